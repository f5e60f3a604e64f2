"""FlashInfer's ``merge_state``, ``merge_state_in_place`` and ``merge_states``.

L is [tokens, heads], **base 2**; an input L is converted to float32. What differs from FlashInfer:

- An L of +inf means "no keys" as -inf does (FlashInfer: the live side is lost, and L is NaN). NaN in L gives NaN
  (FlashInfer: counts as empty).
- An empty side's O is not used: NaN there changes nothing.
- Any head size, any number of heads, any strides; float32 too (FlashInfer: 16-bit, four head sizes, contiguous).
- ``merge_state_in_place`` raises for an ``s`` that is not float32 (FlashInfer updates a temporary, and ``s`` stays as
  it was), and for a ``mask`` that is neither bool nor uint8 (FlashInfer misreads it).
- No tokens or no heads: nothing happens (FlashInfer: an error).
"""

from __future__ import annotations

from typing import Any

from jitkern import torch_ops
from jitkern.compat.convert import to_float32


def merge_state(v_a: Any, s_a: Any, v_b: Any, s_b: Any) -> tuple[Any, Any]:
    """Merge two states and return (v, s).

    Args:
        v_a, v_b: [tokens, heads, head size].
        s_a, s_b: [tokens, heads], base 2.
    """
    return torch_ops.merge_state(v_a, to_float32(s_a, v_a), v_b, to_float32(s_b, v_b), lse_base="2")


def merge_state_in_place(v: Any, s: Any, v_other: Any, s_other: Any, mask: Any = None) -> None:
    """Merge (v_other, s_other) into (v, s).

    Args:
        v, s: [tokens, heads, head size] and [tokens, heads] float32, base 2; read and overwritten.
        v_other, s_other: the state to merge in.
        mask: [tokens] bool or uint8 or None: a row where it is 0 is left as it is.
    """
    torch_ops.merge_state_in_place(v, s, v_other, to_float32(s_other, v_other), mask, lse_base="2")


def merge_states(v: Any, s: Any) -> tuple[Any, Any]:
    """Merge N states and return (v, s).

    Args:
        v: [tokens, N, heads, head size].
        s: [tokens, N, heads], base 2.
    """
    return torch_ops.merge_states(v, to_float32(s, v), lse_base="2")
