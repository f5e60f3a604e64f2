"""Calls that are remembered: all by signature, and the last few by a guard, one check of all operands in C++.

``TensorGuards`` is what ``torch.compile`` checks its inputs with: type, dtype, device, sizes, strides, lazy views,
``requires_grad`` and inference mode of every tensor, in a microsecond. It is torch's own and not public: where it is
missing or behaves otherwise, there is no quick way and calls take the ordinary one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

_KEPT = 4  # calls remembered per thread: layers of a model differ in few shapes


class Recent(NamedTuple):
    """A call and what another one must share with it.

    Attributes:
        options: everything that is no tensor, and what is true of the addresses (alignment, which are equal).
        same: whether tensors are as the remembered ones were.
        call: what to do with it.
    """

    options: Any
    same: Callable[..., bool]
    call: Any


class RecentCalls(threading.local):
    """The last few calls of one thread, the latest first."""

    def __init__(self) -> None:
        self.entries: list[Recent] = []

    def remember(self, options: Any, tensors: Sequence[Any], call: Any) -> None:
        """Put a call in front. ``tensors`` must have been checked.

        None of one that requires a gradient, under ``no_grad``: the guard would let it pass where autograd is on.
        """
        same = None if any(x.requires_grad for x in tensors) else _guard(tensors)
        if same is not None:
            self.entries = [Recent(options, same, call), *self.entries[: _KEPT - 1]]

    def forget(self) -> None:
        """Drop all (tests)."""
        self.entries = []


def _guard(tensors: Sequence[Any]) -> Callable[..., bool] | None:
    try:
        from torch._C._dynamo.guards import TensorGuards

        sizes, strides = [list(x.shape) for x in tensors], [list(x.stride()) for x in tensors]
        fixed: dict[str, Any] = {"dynamic_dims_sizes": sizes, "dynamic_dims_strides": strides}
        guard = TensorGuards(*tensors, **fixed)
        same: Callable[..., bool] = guard.check
        return same if same(*tensors) is True else None
    except Exception:  # whatever a future torch does instead; the ordinary way serves every call
        return None


class PerThread(threading.local):
    """Bound calls by signature, of one thread. Bounded, since shapes of a serving engine vary without end."""

    limit = 4096

    def __init__(self) -> None:
        self.calls: dict[Any, Any] = {}

    def keep(self, signature: Any, call: Any) -> Any:
        """Remember a call."""
        if len(self.calls) >= self.limit:
            self.calls.clear()
        self.calls[signature] = call
        return call
