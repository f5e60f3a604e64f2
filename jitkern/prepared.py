"""Prepared calls: an op checked and bound once, launched many times."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jitkern import derivatives, launch
from jitkern.errors import ArgumentError, UnsupportedError


class Prepared:
    """An op with its operands. Calling it launches the op again, on the same memory.

    Nothing is checked or looked up any more: the operands must stay as they are, and are kept alive. Not for several
    threads at once.

    Attributes:
        result: what the op returned when it was prepared: its outputs, which every call fills anew.
    """

    __slots__ = ("_calls", "_operands", "_written", "result")

    def __init__(self, calls: list[launch.Call], written: list[Any], operands: Any, result: Any) -> None:
        self._calls, self._written, self._operands, self.result = calls, written, operands, result

    def __call__(self, stream: Any = None) -> None:
        """Launch on ``stream``, or on the current stream of the operands' device."""
        for call in self._calls:
            launch.again(call, stream)
        launch.wrote(*self._written)


def prepare(op: Callable[..., Any], *operands: Any, **options: Any) -> Prepared:
    """Check an op's operands, make its variant ready, and bind everything; nothing runs yet.

    >>> merge = jitkern.prepare(jitkern.merge_attn_states, out, a, a_lse, b, b_lse, out_lse)
    >>> merge()

    Args:
        op: an op of jitkern that launches kernels.
        operands, options: its arguments, except ``stream``.

    Raises:
        ArgumentError: ``stream`` is given.
        UnsupportedError: an operand requires a gradient, or carries a forward-mode tangent.
        Whatever the op raises.
    """
    given: Any = op
    if not callable(given) or isinstance(given, type):
        raise ArgumentError(f"prepare: op is {op!r}; expected an op of jitkern, such as jitkern.merge_attn_states")
    if "stream" in options:
        raise ArgumentError("prepare: stream= is given; give it to the prepared call, prepared(stream)")
    tensors = [x for x in (*operands, *options.values()) if getattr(x, "requires_grad", False)]
    if tensors and derivatives.gradient_wanted(*tensors):
        raise UnsupportedError(
            "prepare: an operand requires a gradient, and a prepared call gives none; use torch.no_grad()"
        )
    with launch.Recording() as seen:
        result = op(*operands, **options)
    calls = [call.bound(*patch) for call, patch in seen.calls]
    return Prepared(calls, seen.written, (operands, options), result)
