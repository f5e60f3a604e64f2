"""The merge in Triton, one program per (token, head), as serving engines' fall-backs do it: a peer, not a part."""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _kernel(out, out_lse, a, a_lse, b, b_lse, heads, d: tl.constexpr, block: tl.constexpr):  # type: ignore[no-untyped-def]
    row = tl.program_id(0) * heads + tl.program_id(1)
    at = tl.arange(0, block)
    inside = at < d
    left, right = tl.load(a_lse + row), tl.load(b_lse + row)
    left = float("-inf") if left == float("inf") else left
    right = float("-inf") if right == float("inf") else right
    top = tl.maximum(left, right)
    wa, wb = tl.exp(left - top), tl.exp(right - top)
    total = wa + wb
    tl.store(out_lse + row, tl.log(total) + top)
    x = tl.load(a + row * d + at, mask=inside)
    y = tl.load(b + row * d + at, mask=inside)
    tl.store(out + row * d + at, x * (wa / total) + y * (wb / total), mask=inside)


def merge(out: Any, out_lse: Any, a: Any, a_lse: Any, b: Any, b_lse: Any) -> None:
    """Launch it; all contiguous, L [n, h]."""
    n, h, d = a.shape
    _kernel[(n, h)](out, out_lse, a, a_lse, b, b_lse, h, d, triton.next_power_of_2(d))
