"""sglang's ``merge_state_v2`` (of ``sgl_kernel``) and ``merge_state`` (of ``sglang.srt.layers.attention.merge_state``).

L is [tokens, heads], base e; it is converted to float32. What differs from sglang:

- Both sides empty: O = 0, L = -inf (sglang: NaN). An empty side's O is not used, NaN there changes nothing.
- Any strides, alignment and head size (sglang: contiguous, 16-byte packs, Triton for the rest), and more than 2^32
  elements.
- Outputs are checked like inputs. One of another dtype raises (sglang reads the inputs as if they had the output's).
- An L of another dtype than float32 as an *output* raises.

``sgl_kernel.merge_state``, without ``_v2``, is FlashInfer's kernel and takes base 2: that is
:func:`jitkern.compat.flashinfer.merge_state`.
"""

from __future__ import annotations

from typing import Any

from jitkern import torch_ops
from jitkern.compat.convert import to_float32


def merge_state_v2(
    v_a: Any, s_a: Any, v_b: Any, s_b: Any, v_merged: Any = None, s_merged: Any = None
) -> tuple[Any, Any]:
    """Merge two states and return (v, s): ``v_merged`` and ``s_merged`` where they are given.

    Args:
        v_a, v_b: [tokens, heads, head size].
        s_a, s_b: [tokens, heads], base e; +-inf: no keys.
        v_merged, s_merged: where the result goes; allocated if None. ``s_merged`` is float32.
    """
    return torch_ops.merge_state(v_a, to_float32(s_a, v_a), v_b, to_float32(s_b, v_b), out=v_merged, out_lse=s_merged)


def merge_state(
    prefix_output: Any,
    prefix_lse: Any,
    suffix_output: Any,
    suffix_lse: Any,
    output: Any = None,
    output_lse: Any = None,
) -> tuple[Any, Any]:
    """Merge the attention over a prefix and a suffix: :func:`merge_state_v2` by the names that sglang's callers use."""
    return merge_state_v2(prefix_output, prefix_lse, suffix_output, suffix_lse, output, output_lse)
