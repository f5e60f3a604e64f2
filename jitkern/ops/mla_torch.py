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
