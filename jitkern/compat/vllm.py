"""vLLM's ``merge_attn_states`` and ``mask_empty_context_lse``.

L is [heads, tokens], base e. What differs from vLLM:

- Both sides empty: O = 0 (vLLM: the prefix's O as it is, or NaN on its Triton path).
- An empty side's O is not used: NaN or garbage there changes nothing.
- Every operand has strides and an alignment of its own, and any head size goes; there is no other path to fall back to.
- Shapes, dtypes and devices are checked; what does not fit raises :class:`jitkern.ArgumentError`.
- More than 2^32 elements, aliased outputs and zero tokens are fine.
- 8-bit inputs need their scales: use :func:`jitkern.merge_attn_states`.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from jitkern import torch_ops
from jitkern.ops import checks


def merge_attn_states(
    output: Any,
    prefix_output: Any,
    prefix_lse: Any,
    suffix_output: Any,
    suffix_lse: Any,
    output_lse: Any = None,
    prefill_tokens_with_context: int | None = None,
    output_scale: Any = None,
) -> None:
    """Merge the attention over a prefix and over a suffix into ``output`` and ``output_lse``.

    Args:
        output: [tokens, heads, head size]; with ``output_scale`` also ``float8_e4m3fn`` or ``float8_e5m2``.
        prefix_output, suffix_output: the partial outputs.
        prefix_lse, suffix_lse, output_lse: [heads, tokens] float32, base e; +-inf: no keys.
        prefill_tokens_with_context: tokens from this one on are copied from the suffix.
        output_scale: one float32 on the device: ``output`` is O / scale.
    """
    inputs = (prefix_output, prefix_lse, suffix_output, suffix_lse)
    torch_ops.merge_attn_states(output, *inputs, output_lse, prefill_tokens_with_context, output_scale)


def mask_empty_context_lse(lse: Any, query_start_loc: Any, context_start_loc: Any) -> None:
    """Set L to -inf, in place, for the queries of requests whose context is empty: their prefix counts for nothing.

    Some attention kernels leave a finite L and an undefined O for a request without keys. Nothing is read by the host:
    it may be captured in a graph. Queries before the first start and from the last one on are left alone.

    Args:
        lse: [heads, tokens].
        query_start_loc: [requests + 1] int32 or int64: where each request's queries start, and where the last ones end.
        context_start_loc: [requests + 1], likewise for its context.
    """
    op = "mask_empty_context_lse"
    checks.tensor(op, "lse", lse, 2, "[heads, tokens]")
    checks.dtype(op, "lse", lse, torch.float32, torch.float64, torch.float16, torch.bfloat16)
    checks.writable(op, "lse", lse)
    if lse.is_leaf:  # any other is followed by autograd
        checks.no_gradient(op, lse=lse)
    checks.tensor(op, "query_start_loc", query_start_loc, 1, "[requests + 1]")
    starts = tuple(query_start_loc.shape)
    checks.tensor(op, "context_start_loc", context_start_loc, 1, "[requests + 1]")
    checks.same_shape(op, "context_start_loc", context_start_loc, starts, "[requests + 1]", "query_start_loc")
    checks.same_device(op, lse=lse, query_start_loc=query_start_loc, context_start_loc=context_start_loc)
    for name, value in (("query_start_loc", query_start_loc), ("context_start_loc", context_start_loc)):
        checks.dtype(op, name, value, torch.int32, torch.int64)
    if starts[0] < 2 or lse.numel() == 0:
        return
    tokens = torch.arange(lse.shape[1], dtype=query_start_loc.dtype, device=lse.device)
    request = torch.searchsorted(query_start_loc.contiguous(), tokens, right=True) - 1
    served = (request >= 0) & (request < starts[0] - 1)
    without_context = context_start_loc.diff() <= 0
    lse.masked_fill_(served & without_context[request.clamp(0, starts[0] - 2)], -math.inf)
