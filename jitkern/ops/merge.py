"""``merge_attn_states``: combine two partial attention outputs and their log-sum-exp (arXiv 2501.01005, 2.2)."""

from __future__ import annotations

from typing import Any

import torch

from jitkern.errors import UnsupportedError
from jitkern.ops import checks, pairwise

OP = "merge_attn_states"
NAMES = ("output", "output_lse", "prefix_output", "prefix_lse", "suffix_output", "suffix_lse")


def merge_attn_states(
    output: Any,
    prefix_output: Any,
    prefix_lse: Any,
    suffix_output: Any,
    suffix_lse: Any,
    output_lse: Any = None,
    prefill_tokens_with_context: int | None = None,
    output_scale: Any = None,
    *,
    lse_base: str | float = "e",
    stream: Any = None,
    backend: str = "auto",
) -> None:
    """Merge two partial attention states of the same queries; the results go to ``output`` and ``output_lse``.

    With m = max(L_prefix, L_suffix) and w = exp(L - m), O = (w_p O_p + w_s O_s) / (w_p + w_s) and
    L = m + log(w_p + w_s) (arXiv 2501.01005, section 2.2). An infinite L, of either sign, marks a side without keys:
    the other side then comes out bit for bit; if both are, O = 0 and L = -inf. NaN in L gives NaN.

    Args:
        output: [tokens, heads, head size], float32, float16 or bfloat16 (float64 on the CPU). Any token and head
            stride; the last dimension contiguous. May be one of the inputs.
        prefix_output, suffix_output: the partial outputs; shape, dtype and device of ``output``, strides of their own.
        prefix_lse, suffix_lse: [heads, tokens] float32 (float64 beside float64), any strides, in base ``lse_base``.
        output_lse: [heads, tokens] as the others, or None. May be one of the inputs.
        prefill_tokens_with_context: tokens from this one on are copied from the suffix, O and L unchanged; None: none.
        output_scale: for a quantised output, which this version has not.
        lse_base: ``"e"``, ``"2"``, ``"10"`` or a number.
        stream: ``torch.cuda.Stream``, CuPy stream or raw handle; None: the current stream of the tensors' device.
        backend: ``auto``, ``nvrtc``, ``nvcc`` or ``cpu``.

    Raises:
        ArgumentError: an operand does not fit; nothing has run.
        CaptureError: the variant is not ready and a CUDA graph is being captured; the message names the warm-up line.
    """
    if output_scale is not None:
        raise UnsupportedError(f"{OP}: output_scale is given, but there is no quantised output yet; leave it None")
    if torch.compiler.is_compiling():
        base = checks.lse_base(OP, lse_base)
        inputs = (prefix_output, prefix_lse, suffix_output, suffix_lse)
        torch.ops.jitkern.merge_attn_states(output, *inputs, output_lse, prefill_tokens_with_context, lse_base=base)
        return
    pairwise.merge(
        OP,
        NAMES,
        "hn",
        output,
        output_lse,
        prefix_output,
        prefix_lse,
        suffix_output,
        suffix_lse,
        prefill_tokens_with_context,
        lse_base,
        stream,
        backend,
    )
