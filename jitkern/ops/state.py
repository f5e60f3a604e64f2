"""``merge_state`` and ``merge_state_in_place``: the merge with L of [tokens, heads], FlashInfer's shapes."""

from __future__ import annotations

from typing import Any

import torch
from torch.compiler import is_compiling

from jitkern.errors import ArgumentError
from jitkern.ops import checks, pairwise
from jitkern.ops.pairwise_checks import Extras

_modes = torch._C._len_torch_dispatch_stack
_NAMES = ("out", "out_lse", "v_a", "s_a", "v_b", "s_b")
_IN_PLACE_NAMES = ("v", "s", "v (as input)", "s (as input)", "v_other", "s_other")


def merge_state(
    v_a: Any,
    s_a: Any,
    v_b: Any,
    s_b: Any,
    *,
    out: Any = None,
    out_lse: Any = None,
    lse_base: Any = "e",
    stream: Any = None,
    backend: str = "auto",
) -> tuple[Any, Any]:
    """Merge two attention states and return (v, s). Differentiable with respect to all four.

    Args:
        v_a, v_b: [tokens, heads, head size], float32, float16 or bfloat16 (float64 on the CPU).
        s_a, s_b: their log-sum-exp, [tokens, heads] float32. +-inf: no keys on that side.
        out, out_lse: where the result goes; allocated if None. Either may be an input.
        lse_base: ``"e"``, ``"2"``, ``"10"``, a number, or a tuple of three: of s_a, of s_b, of the result.
        stream, backend: as in :func:`jitkern.merge_attn_states`.

    Raises:
        ArgumentError: an operand does not fit; nothing has run.
    """
    tracing = traced()
    if tracing or (out is None and out_lse is None and wants_gradient(v_a, s_a, v_b, s_b)):
        checks.current_stream_only("merge_state", stream, backend)
        bases = checks.lse_bases("merge_state", lse_base)
        if not tracing:
            checks.no_tangent("merge_state", v_a=v_a, s_a=s_a, v_b=v_b, s_b=s_b)
        result = torch.ops.jitkern.merge_state(v_a, s_a, v_b, s_b, -1, *bases)
        return _into(out, result[0]), _into(out_lse, result[1])
    try:
        out = torch.empty_like(v_a, memory_format=torch.contiguous_format) if out is None else out
        out_lse = torch.empty_like(s_a, memory_format=torch.contiguous_format) if out_lse is None else out_lse
    except checks.ODD:
        checks.tensor("merge_state", "v_a", v_a, 3, "[tokens, heads, head size]")
        checks.tensor("merge_state", "s_a", s_a, 2, "[tokens, heads]")
        checks.memory("merge_state", v_a=v_a, s_a=s_a)
        raise
    operands = (out, out_lse, v_a, s_a, v_b, s_b)
    pairwise.merge("merge_state", _NAMES, "nh", *operands, None, lse_base, stream, backend)
    return out, out_lse


def traced() -> bool:
    """Whether torch looks at what is called: then a call goes through the registered op, which it can see.

    That is while ``torch.compile`` or ``torch.export`` traces, and under a dispatch mode (``make_fx``, FakeTensorMode).
    """
    return bool(is_compiling() or _modes() > 0)


def _into(target: Any, value: Any) -> Any:
    return value if target is None else target.copy_(value)


def wants_gradient(*operands: Any) -> bool:
    """Whether autograd is on and a tensor among the operands requires a gradient."""
    if not torch.is_grad_enabled():
        return False
    return any(isinstance(x, torch.Tensor) and x.requires_grad for x in operands)


def merge_state_in_place(
    v: Any,
    s: Any,
    v_other: Any,
    s_other: Any,
    mask: Any = None,
    *,
    row_op: Any = None,
    lse_base: Any = "e",
    stream: Any = None,
    backend: str = "auto",
) -> None:
    """Merge another state into (v, s).

    Args:
        v, s: [tokens, heads, head size] and [tokens, heads] float32; read and overwritten.
        v_other, s_other: the state to merge in.
        mask: [tokens] bool or uint8 on the device, or None: a row where it is 0 is left as it is. A captured graph
            reads it anew at every replay.
        row_op: [tokens] uint8 on the device, or None: 0 leaves the row, 1 merges, 2 takes the other state, 3 keeps v
            and s (of another base: converted).
        lse_base, stream, backend: as in :func:`merge_state`.

    Raises:
        ArgumentError: an operand does not fit; nothing has run.
    """
    if mask is not None and row_op is not None:
        raise ArgumentError("merge_state_in_place: both mask and row_op are given; give one of them")
    if traced():
        checks.current_stream_only("merge_state_in_place", stream, backend)
        bases = checks.lse_bases("merge_state_in_place", lse_base)
        torch.ops.jitkern.merge_state_in_place(v, s, v_other, s_other, mask, row_op, *bases)
        return
    merge_in_place(v, s, v_other, s_other, mask, row_op, lse_base, stream, backend)


def merge_in_place(
    v: Any, s: Any, v_other: Any, s_other: Any, mask: Any, row_op: Any, lse_base: Any, stream: Any, backend: str
) -> None:
    """:func:`merge_state_in_place` where nothing is traced."""
    extras = None
    if mask is not None or row_op is not None:
        extras = Extras(row_op=row_op if mask is None else mask, row_op_is_mask=mask is not None)
    operands = (v, s, v, s, v_other, s_other)
    pairwise.merge("merge_state_in_place", _IN_PLACE_NAMES, "nh", *operands, None, lse_base, stream, backend, extras)
