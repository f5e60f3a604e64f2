"""From the operands of a merge to a launch: packs, strides, ratios of bases, grid and block."""

from __future__ import annotations

import math
from typing import Any

from jitkern import launch, variants
from jitkern.loader import CPU

MAX_THREADS = 128
_MAX_BLOCK_Z = 64
_MAX_GRID_Y = 65535
_WIDE_STRIDE = 1 << 32


def pack_of(value: Any, d: int) -> int:
    """Elements of the widest access that an operand's address and strides allow."""
    size = value.element_size()
    strides = [stride * size for stride, n in zip(value.stride()[:-1], value.shape[:-1], strict=True) if n > 1]
    return variants.widest_pack(size, d * size, value.data_ptr(), *strides)


def is_wide(*operands: Any) -> bool:
    """Whether a stride does not fit in 32 bits."""
    return any(stride >= _WIDE_STRIDE for value in operands if value is not None for stride in value.stride())


def base_ratio(base: float, out: float) -> float:
    """What brings a logarithm from ``base`` to ``out``; exactly 1 where they are the same."""
    return 1.0 if base == out else math.log(base) / math.log(out)


def lse_strides(value: Any, transposed: bool) -> tuple[int, int]:
    """(token stride, head stride)."""
    if value is None:
        return 0, 0
    first, second = value.stride()
    return (second, first) if transposed else (first, second)


def geometry(tokens: int, heads: int, packs: int, device: int) -> tuple[launch.Dim3, launch.Dim3]:
    """(grid, block): whole rows in a block, heads before tokens, a number of heads that divides all if possible."""
    if device == CPU:
        lanes, block_heads, block_tokens = 1, 1, 1
    else:
        lanes = min(packs, MAX_THREADS)
        most = min(heads, MAX_THREADS // lanes)
        divisor = max(n for n in range(1, most + 1) if heads % n == 0)
        block_heads = divisor if 2 * divisor > most else most
        block_tokens = max(min(MAX_THREADS // (lanes * block_heads), _MAX_BLOCK_Z, tokens), 1)
    tiles = -(-tokens // block_tokens)
    depth = -(-tiles // _MAX_GRID_Y)
    return (-(-heads // block_heads), -(-tiles // depth), depth), (lanes, block_heads, block_tokens)
