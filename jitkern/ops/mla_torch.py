"""Handles: how a traced graph, which holds tensors and numbers only, names an :class:`~jitkern.ops.mla.MLADecode`."""

from __future__ import annotations

import itertools
import weakref
from typing import Any

from jitkern.errors import ArgumentError

_objects: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_numbers = itertools.count(1)


def register(decode: Any) -> int:
    """Give an object a number."""
    number = next(_numbers)
    _objects[number] = decode
    return number


def copied(op: str, results: tuple[Any, Any], out: Any, lse: Any) -> tuple[Any, Any]:
    """Traced code has new results; outputs that were given are copied to.

    Raises:
        ArgumentError: one of them is of another shape or dtype, to which a copy would broadcast or convert.
    """
    for name, new, old in (("out", results[0], out), ("lse", results[1], lse)):
        if old is not None and (old.shape != new.shape or old.dtype != new.dtype):
            raise ArgumentError(
                f"{op}: {name} has shape {list(old.shape)}, {old.dtype}; expected {list(new.shape)}, {new.dtype}"
            )
    new_out, new_lse = results
    return new_out if out is None else out.copy_(new_out), new_lse if lse is None else lse.copy_(new_lse)


def find(number: int) -> Any:
    """The object of a number.

    Raises:
        ArgumentError: it is gone.
    """
    found = _objects.get(number)
    if found is None:
        raise ArgumentError(
            f"MLADecode number {number} does not exist (any more);"
            " keep the object alive as long as compiled code or a graph uses it"
        )
    return found
