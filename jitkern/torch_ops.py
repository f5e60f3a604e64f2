"""The ops as ``torch.ops.jitkern.*``, for ``torch.compile``, ``torch.export``, FakeTensor and autograd.

The look-up of variants happens inside the op, where nothing is traced.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch

from jitkern.errors import UnsupportedError
from jitkern.ops import checks, gradient, nway, pairwise, quantised
from jitkern.ops.library import register
from jitkern.ops.merge import NAMES, OP, merge_attn_states
from jitkern.ops.nway import merge_states
from jitkern.ops.nway_checks import Inputs
from jitkern.ops.nway_checks import check as check_states
from jitkern.ops.pairwise_checks import Extras
from jitkern.ops.state import merge_in_place, merge_state, merge_state_in_place

__all__ = ["merge_attn_states", "merge_state", "merge_state_in_place", "merge_states"]

_library = torch.library.Library("jitkern", "DEF")
_BASES = "float base_a, float base_b, float base_out"


def _register(schema: str, run: Callable[..., Any], fake: Callable[..., Any]) -> None:
    register(_library, schema, run, fake)


def _no_gradient(op: str, *operands: Any) -> None:
    """Refuse while tracing: what is traced here runs where autograd is off, and the op itself could not tell."""
    tensors = {f"operand {i}": x for i, x in enumerate(operands) if isinstance(x, torch.Tensor)}
    checks.no_gradient(op, **tensors)


def _one_device(op: str, *operands: Any) -> None:
    """Refuse while tracing what the op would refuse when the program runs."""
    flat = [x for group in operands for x in (group if isinstance(group, list | tuple) else [group])]
    checks.same_device(
        op, any_device=True, **{f"operand {i}": x for i, x in enumerate(flat) if isinstance(x, torch.Tensor)}
    )


def _merge_attn_states(
    output: Any,
    prefix_output: Any,
    prefix_lse: Any,
    suffix_output: Any,
    suffix_lse: Any,
    output_lse: Any = None,
    prefill_tokens_with_context: int | None = None,
) -> None:
    operands = (output, output_lse, prefix_output, prefix_lse, suffix_output, suffix_lse)
    pairwise.merge(OP, NAMES, "hn", *operands, prefill_tokens_with_context, "e", None, "auto")


def _merge_attn_states_fake(output: Any, prefix_output: Any, *others: Any) -> None:
    _no_gradient(OP, output, prefix_output, *others)
    _one_device(OP, output, prefix_output, *others)
    torch._check(
        output.shape == prefix_output.shape,
        lambda: f"{OP}: output has shape {list(output.shape)}, prefix_output {list(prefix_output.shape)}",
    )


_OPERANDS = (
    "Tensor(a!) output, Tensor prefix_output, Tensor prefix_lse, Tensor suffix_output, Tensor suffix_lse,"
    " Tensor(b!)? output_lse"
)
# What almost every call is: an op with few arguments costs less.
_register(
    f"merge_attn_states({_OPERANDS}=None, int? prefill_tokens_with_context=None) -> ()",
    _merge_attn_states,
    _merge_attn_states_fake,
)


def _merge_attn_states_with(*arguments: Any) -> None:
    output, a, a_lse, b, b_lse, output_lse, k, k_on_device, out_scale, a_scale, b_scale, *bases = arguments
    extras = Extras(out_scale, a_scale, b_scale, merged_tokens=k_on_device)
    operands = (output, output_lse, a, a_lse, b, b_lse)
    pairwise.merge(OP, NAMES, "hn", *operands, k, tuple(bases), None, "auto", extras)


_register(
    f"merge_attn_states_with({_OPERANDS}, int? prefill_tokens_with_context, Tensor? tokens_with_context,"
    f" Tensor? output_scale, Tensor? prefix_scale, Tensor? suffix_scale, {_BASES}) -> ()",
    _merge_attn_states_with,
    _merge_attn_states_fake,
)


def _merge_attn_states_grouped(*arguments: Any) -> None:
    output, a, a_lse, b, b_lse, output_lse, group_scale, ue8m0, k, *bases = arguments
    state = dict(zip(NAMES, (output, output_lse, a, a_lse, b, b_lse), strict=True))
    quantised.merge_quantised(state, group_scale, ue8m0, k, tuple(bases), None, "auto")


_register(
    f"merge_attn_states_grouped({_OPERANDS}, Tensor(c!) output_group_scale, bool scale_ue8m0,"
    f" int? prefill_tokens_with_context, {_BASES}) -> ()",
    _merge_attn_states_grouped,
    _merge_attn_states_fake,
)


def _merge_state(v_a: Any, s_a: Any, v_b: Any, s_b: Any, merged_tokens: int, *bases: float) -> tuple[Any, Any]:
    try:
        out, lse = v_a.new_empty(v_a.shape), s_a.new_empty(s_a.shape)
    except checks.ODD:
        checks.tensor("merge_state", "v_a", v_a, 3, "[tokens, heads, head size]")
        checks.tensor("merge_state", "s_a", s_a, 2, "[tokens, heads]")
        checks.memory("merge_state", v_a=v_a, s_a=s_a)
        raise
    k = None if merged_tokens < 0 else merged_tokens
    names = ("out", "out_lse", "v_a", "s_a", "v_b", "s_b")
    pairwise.merge("merge_state", names, "nh", out, lse, v_a, s_a, v_b, s_b, k, bases, None, "auto")
    return out, lse


def _merge_state_fake(v_a: Any, s_a: Any, *others: Any) -> tuple[Any, Any]:
    _one_device("merge_state", v_a, s_a, *others)
    return v_a.new_empty(v_a.shape), s_a.new_empty(s_a.shape)


_register(
    f"merge_state(Tensor v_a, Tensor s_a, Tensor v_b, Tensor s_b, int merged_tokens, {_BASES}) -> (Tensor, Tensor)",
    _merge_state,
    _merge_state_fake,
)


def _merge_state_in_place(v: Any, s: Any, v_other: Any, s_other: Any, mask: Any, row_op: Any, *bases: float) -> None:
    merge_in_place(v, s, v_other, s_other, mask, row_op, bases, None, "auto")


def _merge_state_in_place_fake(*operands: Any) -> None:
    _no_gradient("merge_state_in_place", *operands)
    _one_device("merge_state_in_place", *operands)


_register(
    "merge_state_in_place(Tensor(a!) v, Tensor(b!) s, Tensor v_other, Tensor s_other, Tensor? mask, Tensor? row_op,"
    f" {_BASES}) -> ()",
    _merge_state_in_place,
    _merge_state_in_place_fake,
)


def _merge_states(
    v: list[Any],
    s: list[Any],
    sink: Any,
    valid: Any,
    indptr: Any,
    listed: bool,
    sink_in_lse: bool,
    base: float,
    out: float,
) -> tuple[Any, Any]:
    inputs = Inputs(v if listed else v[0], s if listed else s[0], sink, valid, indptr, None, None)
    check_states(nway.OP, inputs)
    inputs = inputs.with_outputs()
    nway.launch_states(inputs, (base, base, out), sink_in_lse, None, "auto")
    return inputs.out, inputs.out_lse


def _merge_states_fake(v: list[Any], s: list[Any], sink: Any, valid: Any, indptr: Any, listed: bool, *_: Any) -> Any:
    _one_device(nway.OP, v, s, sink, valid, indptr)
    *_, heads, d = v[0].shape
    tokens = v[0].shape[0] if indptr is None else indptr.shape[0] - 1
    return v[0].new_empty((tokens, heads, d)), s[0].new_empty((tokens, heads))


_register(
    "merge_states(Tensor[] v, Tensor[] s, Tensor? sink, Tensor? num_valid, Tensor? indptr, bool listed,"
    " bool sink_in_lse, float base, float base_out) -> (Tensor, Tensor)",
    _merge_states,
    _merge_states_fake,
)


def _merge_backward(*arguments: Any) -> list[Any]:
    bases: tuple[float, float, float] = arguments[-3:]
    return gradient.merge_backward(*arguments[:-3], bases)  # type: ignore[call-arg]


def _merge_backward_fake(grad_v: Any, grad_s: Any, v: list[Any], s: list[Any], *_: Any) -> list[Any]:
    return [x.new_empty(x.shape) for x in (*v, *s)]


_register(
    "merge_backward(Tensor grad_v, Tensor grad_s, Tensor[] v, Tensor[] s, Tensor? sink, Tensor? num_valid,"
    f" Tensor? indptr, bool listed, bool sink_in_lse, int merged_tokens, {_BASES}) -> Tensor[]",
    _merge_backward,
    _merge_backward_fake,
)


def _save_pair(ctx: Any, inputs: Any, output: Any) -> None:
    ctx.save_for_backward(*inputs[:4])
    ctx.merged_tokens, ctx.bases = inputs[4], inputs[5:]


def _backward_of_pair(ctx: Any, grad_v: Any, grad_s: Any) -> tuple[Any, ...]:
    v_a, s_a, v_b, s_b = ctx.saved_tensors
    of_pair = (None, None, None, True, True, ctx.merged_tokens)
    grads = torch.ops.jitkern.merge_backward(grad_v, grad_s, [v_a, v_b], [s_a, s_b], *of_pair, *ctx.bases)
    return grads[0], grads[2], grads[1], grads[3], None, None, None, None


def _save_states(ctx: Any, inputs: Any, output: Any) -> None:
    v, s, sink, valid, indptr, ctx.listed, ctx.sink_in_lse, ctx.base, ctx.base_out = inputs
    ctx.count = len(v)
    of_sink = output if sink is not None and sink.requires_grad else (None, None)
    ctx.save_for_backward(*v, *s, sink, valid, indptr, *of_sink)


def _backward_of_states(ctx: Any, grad_v: Any, grad_s: Any) -> tuple[Any, ...]:
    *tensors, sink, valid, indptr, out, lse = ctx.saved_tensors
    v, s = tensors[: ctx.count], tensors[ctx.count :]
    flags = (sink, valid, indptr, ctx.listed, ctx.sink_in_lse, -1, ctx.base, ctx.base, ctx.base_out)
    grads = torch.ops.jitkern.merge_backward(grad_v, grad_s, v, s, *flags)
    of_sink = None if out is None else _gradient_of_sink(ctx, grad_v, grad_s, out, lse, sink)
    return grads[: ctx.count], grads[ctx.count :], of_sink, None, None, None, None, None, None


def _gradient_of_sink(ctx: Any, grad_v: Any, grad_s: Any, out: Any, lse: Any, sink: Any) -> Any:
    """dsink = sum over tokens of w (dL / ln(base) - <dO, O>), with w = exp(sink - L) the sink's share."""
    to_e = math.log(ctx.base_out)
    total = lse * to_e if ctx.sink_in_lse else torch.logaddexp(lse * to_e, sink)
    share = torch.where(sink == -math.inf, 0, torch.exp(sink - total))
    kind = lse.dtype  # float32, or float64 beside float64
    inner = (grad_v.to(kind) * out.to(kind)).sum(-1)
    return (share * ((grad_s / to_e if ctx.sink_in_lse else 0) - inner)).sum(0).to(sink.dtype)


def _second_derivative(*_: Any) -> Any:
    raise UnsupportedError("merge_backward: a second derivative of a merge is asked for; there is only the first")


_autograd = torch.library.register_autograd
_autograd("jitkern::merge_state", _backward_of_pair, setup_context=_save_pair, lib=_library)
_autograd("jitkern::merge_states", _backward_of_states, setup_context=_save_states, lib=_library)
_autograd("jitkern::merge_backward", _second_derivative, lib=_library)
