"""The ops as ``torch.ops.jitkern.*``, for ``torch.compile``, ``torch.export`` and FakeTensor.

Registered with ``Library.define`` and ``impl``: the ``custom_op`` decorator costs 14 microseconds a call, this 2. The
look-up of variants happens inside the op, where nothing is traced.
"""

from __future__ import annotations

import math
from typing import Any

import torch

from jitkern.ops import pairwise
from jitkern.ops.merge import NAMES, OP, merge_attn_states

__all__ = ["merge_attn_states"]

_library = torch.library.Library("jitkern", "DEF")
_library.define(
    "merge_attn_states(Tensor(a!) output, Tensor prefix_output, Tensor prefix_lse, Tensor suffix_output,"
    " Tensor suffix_lse, Tensor(b!)? output_lse=None, int? prefill_tokens_with_context=None, *,"
    f" float lse_base={math.e!r}) -> ()"
)


def _merge_attn_states(
    output: Any,
    prefix_output: Any,
    prefix_lse: Any,
    suffix_output: Any,
    suffix_lse: Any,
    output_lse: Any = None,
    prefill_tokens_with_context: int | None = None,
    *,
    lse_base: float = math.e,
) -> None:
    state = (output, output_lse, prefix_output, prefix_lse, suffix_output, suffix_lse)
    pairwise.merge(OP, NAMES, "hn", *state, prefill_tokens_with_context, lse_base, None, "auto")


def _merge_attn_states_fake(output: Any, prefix_output: Any, *_: Any, **__: Any) -> None:
    torch._check(
        output.shape == prefix_output.shape,
        lambda: f"{OP}: output has shape {list(output.shape)}, prefix_output {list(prefix_output.shape)}",
    )


for _key in ("CPU", "CUDA"):
    _library.impl("merge_attn_states", _merge_attn_states, _key)
torch.library.register_fake("jitkern::merge_attn_states", _merge_attn_states_fake, lib=_library)
