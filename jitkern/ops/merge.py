"""``merge_attn_states``: combine two partial attention outputs and their log-sum-exp (arXiv 2501.01005, 2.2)."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.compiler import is_compiling

from jitkern.errors import ArgumentError
from jitkern.ops import checks, pairwise, quantised
from jitkern.ops.pairwise_checks import Extras, check
from jitkern.ops.state import wants_gradient

OP = "merge_attn_states"
_modes = torch._C._len_torch_dispatch_stack
NAMES = ("output", "output_lse", "prefix_output", "prefix_lse", "suffix_output", "suffix_lse")


def merge_attn_states(
    output: Any,
    prefix_output: Any,
    prefix_lse: Any,
    suffix_output: Any,
    suffix_lse: Any,
    output_lse: Any = None,
    prefill_tokens_with_context: Any = None,
    output_scale: Any = None,
    *,
    prefix_scale: Any = None,
    suffix_scale: Any = None,
    output_group_scale: Any = None,
    scale_ue8m0: bool = False,
    lse_base: Any = "e",
    stream: Any = None,
    backend: str = "auto",
) -> None:
    """Merge two partial attention states of the same queries; the results go to ``output`` and ``output_lse``.

    With m = max(L_prefix, L_suffix) and w = exp(L - m), O = (w_p O_p + w_s O_s) / (w_p + w_s) and
    L = m + log(w_p + w_s) (arXiv 2501.01005, section 2.2). An infinite L, of either sign, marks a side without keys:
    the other side then comes out bit for bit; if both are, O = 0 and L = -inf. NaN in L gives NaN. Differentiable with
    respect to both O and both L.

    Args:
        output: [tokens, heads, head size], float32, float16 or bfloat16 (float64 on the CPU), or 8-bit floating point
            with ``output_scale``. Any token and head stride; the last dimension contiguous. May be one of the inputs.
        prefix_output, suffix_output: the partial outputs; shape, dtype and device of ``output``, strides of their own.
            8-bit floating point with scales, into an output of any other type.
        prefix_lse, suffix_lse: [heads, tokens] float32 (float64 beside float64), any strides, in base ``lse_base``.
        output_lse: [heads, tokens] as the others, or None. May be one of the inputs.
        prefill_tokens_with_context: tokens from this one on are copied from the suffix, O and L unchanged; None: none.
            An int, or one int32 on the device, which a captured graph reads anew at every replay.
        output_scale: one float32 on the device: ``output`` is O / scale, rounded, saturated, NaN kept.
        prefix_scale, suffix_scale: one float32 each: what 8-bit inputs are multiplied by.
        output_group_scale: [tokens, groups] float32, any strides (row, column, padded), *written*: ``output`` is
            O / scale with a scale for each group, the groups being equal parts of a token's heads times head size: one
            for a scale per token, heads * head size / 128 for groups of 128. Instead of ``output_scale``.
        scale_ue8m0: round those scales up to powers of two.
        lse_base: ``"e"``, ``"2"``, ``"10"``, a number, or a tuple of three: of prefix, suffix and output.
        stream: ``torch.cuda.Stream``, CuPy stream or raw handle; None: the current stream of the tensors' device.
        backend: ``auto``, ``nvrtc``, ``nvcc`` or ``cpu``.

    Raises:
        ArgumentError: an operand does not fit; nothing has run.
        CaptureError: the variant is not ready and a CUDA graph is being captured; the message names the warm-up line.
    """
    plain = output_scale is None and prefix_scale is None and suffix_scale is None and output_group_scale is None
    extras, k = None, prefill_tokens_with_context
    traced = is_compiling() or _modes() > 0  # state.traced, without a call
    if plain and not traced:
        a, a_lse, b, b_lse = prefix_output, prefix_lse, suffix_output, suffix_lse
        if pairwise.again("hn", output, output_lse, a, a_lse, b, b_lse, k, lse_base, stream, backend):
            return
    inputs = (prefix_output, prefix_lse, suffix_output, suffix_lse)
    if k is not None and not isinstance(k, int | torch.SymInt):
        if not isinstance(k, torch.Tensor):
            raise ArgumentError(
                f"{OP}: prefill_tokens_with_context is a {type(k).__name__}; expected an int, one int32 on the device"
                " or None"
            )
        extras, k = Extras(merged_tokens=k), None
    if output_scale is not None or prefix_scale is not None or suffix_scale is not None:
        extras = (extras or Extras())._replace(out_scale=output_scale, a_scale=prefix_scale, b_scale=suffix_scale)
    operands = (output, output_lse, *inputs)
    if output_group_scale is not None and extras is not None:
        raise ArgumentError(f"{OP}: output_group_scale goes neither with other scales nor with a count on the device")
    if traced:
        checks.current_stream_only(OP, stream, backend)
        _traced(operands, k, extras, output_group_scale, scale_ue8m0, lse_base)
    elif output_group_scale is not None:
        state = dict(zip(NAMES, operands, strict=True))
        quantised.merge_quantised(state, output_group_scale, scale_ue8m0, k, lse_base, stream, backend)
    elif extras is None and wants_gradient(*inputs):
        checks.current_stream_only(OP, stream, backend)
        with torch.no_grad():  # the checks refuse operands with a gradient
            check(OP, dict(zip(NAMES, operands, strict=True)), "hn", Extras())
        pairwise.check_merged_tokens(OP, k, output.shape[0])
        _differentiable(output, output_lse, inputs, k, lse_base)
    else:
        pairwise.merge_unlike_recent(OP, NAMES, "hn", *operands, k, lse_base, stream, backend, extras)


def _traced(
    operands: tuple[Any, ...], k: int | None, extras: Extras | None, group_scale: Any, ue8m0: bool, lse_base: Any
) -> None:
    """The same through the op that does it."""
    output, output_lse, *inputs = operands
    bases = checks.lse_bases(OP, lse_base)
    if group_scale is not None:
        torch.ops.jitkern.merge_attn_states_grouped(output, *inputs, output_lse, group_scale, ue8m0, k, *bases)
    elif extras is None and torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        _differentiable(output, output_lse, tuple(inputs), k, lse_base)
    elif extras is None and bases == (math.e, math.e, math.e):
        torch.ops.jitkern.merge_attn_states(output, *inputs, output_lse, k)
    else:
        found = extras or Extras()
        scales = (found.merged_tokens, found.out_scale, found.a_scale, found.b_scale)
        torch.ops.jitkern.merge_attn_states_with(output, *inputs, output_lse, k, *scales, *bases)


def _differentiable(output: Any, output_lse: Any, inputs: tuple[Any, ...], k: int | None, lse_base: Any) -> None:
    """The same through the differentiable op, then copied to where it belongs: autograd follows the copy."""
    a, a_lse, b, b_lse = inputs
    bases = checks.lse_bases(OP, lse_base)
    v, s = torch.ops.jitkern.merge_state(a, a_lse.T, b, b_lse.T, -1 if k is None else k, *bases)
    output.copy_(v)
    if output_lse is not None:
        output_lse.copy_(s.T)
