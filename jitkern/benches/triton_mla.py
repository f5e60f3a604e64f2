"""MLA decode in Triton, split over the keys, then reduced, as serving engines' fall-backs do: a peer, not a part."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from triton.runtime.errors import OutOfResources

__all__ = ["Config", "OutOfResources", "configs", "decode", "scratch"]

MAX_SPLITS = 128
_LOG2_E = 1.4426950408889634


@dataclass(frozen=True)
class Config:
    """What a launch may choose: rows of a tile, keys of a step, warps, pipeline stages, pieces of a request."""

    rows: int = 16
    keys: int = 32
    warps: int = 4
    stages: int = 2
    splits: int = 4


# Tiles that fit an H200 (227 KB of shared memory), most of them without spills there (64 keys over 4 warps spill); what
# does not fit a smaller device, Triton refuses at the launch.
TILES = ((16, 32, 4, 2), (16, 32, 4, 3), (16, 64, 8, 2), (16, 64, 8, 3), (64, 32, 8, 2), (64, 64, 8, 1))


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _split(  # type: ignore[no-untyped-def]
    q,
    cache,
    table,
    lengths,
    part,
    part_lse,
    scale,
    heads,
    q_len,
    columns,
    page_size: tl.constexpr,
    d_v: tl.constexpr,
    d_r: tl.constexpr,
    block_rows: tl.constexpr,
    block_keys: tl.constexpr,
    causal: tl.constexpr,
):
    """One piece of the keys of one request, for a tile of its (query token, head) rows; L in base 2."""
    b, split, splits = tl.program_id(0), tl.program_id(2), tl.num_programs(2)
    length = tl.load(lengths + b)
    each = tl.cdiv(tl.cdiv(length, splits), block_keys) * block_keys
    first = split * each
    last = tl.minimum(first + each, length)
    rows = heads * q_len
    row = tl.program_id(1) * block_rows + tl.arange(0, block_rows)
    real = row < rows
    at_v, at_r = tl.arange(0, d_v), d_v + tl.arange(0, d_r)
    q_row = q + (b * rows + row)[:, None] * (d_v + d_r)
    q_v = tl.load(q_row + at_v[None, :], mask=real[:, None], other=0.0)
    q_r = tl.load(q_row + at_r[None, :], mask=real[:, None], other=0.0)
    hidden = q_len - 1 - row // heads if causal else row * 0
    top = tl.full([block_rows], float("-inf"), tl.float32)
    total = tl.zeros([block_rows], tl.float32)
    acc = tl.zeros([block_rows, d_v], tl.float32)
    for start in range(first, last, block_keys):
        key = start + tl.arange(0, block_keys)
        inside = key < last
        page = tl.load(table + b * columns + key // page_size, mask=inside, other=0).to(tl.int64)
        k_row = cache + (page * page_size + key % page_size)[:, None] * (d_v + d_r)
        k_v = tl.load(k_row + at_v[None, :], mask=inside[:, None], other=0.0)
        k_r = tl.load(k_row + at_r[None, :], mask=inside[:, None], other=0.0)
        score = tl.dot(q_v, tl.trans(k_v))
        score = tl.dot(q_r, tl.trans(k_r), score) * scale
        seen = inside[None, :] & (key[None, :] < length - hidden[:, None])
        score = tl.where(seen, score, float("-inf"))
        higher = tl.maximum(top, tl.max(score, 1))
        base = tl.where(higher == float("-inf"), 0.0, higher)
        factor = tl.exp2(top - base)
        p = tl.exp2(score - base[:, None])
        total = total * factor + tl.sum(p, 1)
        acc = tl.dot(p.to(k_v.dtype), k_v, acc * factor[:, None])
        top = higher
    place = (b * splits + split) * rows + row
    # An empty piece has L = -inf, and the reduction then does not read its O.
    tl.store(part_lse + place, tl.where(total > 0, top + tl.log2(total), float("-inf")), mask=real)
    if first < last:
        whole = acc / tl.where(total > 0, total, 1.0)[:, None]
        tl.store(part + place.to(tl.int64)[:, None] * d_v + at_v[None, :], whole, mask=real[:, None])


@triton.jit  # type: ignore[untyped-decorator, unused-ignore]
def _reduce(  # type: ignore[no-untyped-def]
    part, part_lse, out, lse, heads, q_len, splits, d_v: tl.constexpr, block_splits: tl.constexpr
):
    """Join the pieces of one row; L in base e, [batch, heads, q_len]."""
    b, row = tl.program_id(0), tl.program_id(1)
    rows = heads * q_len
    at = tl.arange(0, d_v)
    piece = tl.arange(0, block_splits)
    logs = tl.load(part_lse + (b * splits + piece) * rows + row, mask=piece < splits, other=float("-inf"))
    top = tl.max(logs, 0)
    base = tl.where(top == float("-inf"), 0.0, top)
    total = tl.sum(tl.exp2(logs - base), 0)
    acc = tl.zeros([d_v], tl.float32)
    for i in range(0, splits):
        place = (b * splits + i) * rows + row
        weight = tl.exp2(tl.load(part_lse + place) - base)
        acc += weight * tl.load(part + place.to(tl.int64) * d_v + at, mask=at < tl.where(weight > 0, d_v, 0), other=0.0)
    tl.store(out + (b * rows + row) * d_v + at, (acc / tl.where(total > 0, total, 1.0)).to(out.dtype.element_ty))
    token, head = row // heads, row % heads
    # 0.693...: ln 2
    tl.store(lse + (b * heads + head) * q_len + token, (base + tl.log2(total)) * 0.6931471805599453)


def configs(batch: int, rows: int, keys: int, workers: int) -> Iterator[Config]:
    """What is worth trying for a shape: tiles that are not mostly empty, up to two pieces for each multiprocessor."""
    for block_rows, block_keys, warps, stages in TILES:
        if block_rows > max(rows, 16):
            continue
        tiles = batch * -(-rows // block_rows)
        most = min(MAX_SPLITS, triton.next_power_of_2(-(-keys // block_keys)))
        wanted = {_power(workers * quarter // 4 // tiles) for quarter in (1, 2, 4, 8)}
        for splits in sorted({min(n, most) for n in wanted}):
            yield Config(block_rows, block_keys, warps, stages, splits)


def _power(n: int) -> int:
    """The largest power of two that is no larger, and at least 1."""
    return 1 << (max(n, 1).bit_length() - 1)


def scratch(batch: int, rows: int, d_v: int, splits: int, device: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Where the pieces go: O and L in float32."""
    shape = (batch, splits, rows)
    return torch.empty((*shape, d_v), device=device), torch.empty(shape, device=device)


def decode(
    q: torch.Tensor,
    cache: torch.Tensor,
    table: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    pieces: tuple[torch.Tensor, torch.Tensor],
    config: Config,
    causal: bool,
) -> None:
    """Launch both kernels; everything contiguous, one KV head."""
    batch, q_len, heads, d = q.shape
    d_v, page_size, rows = out.shape[-1], cache.shape[1], heads * q_len
    scale = d**-0.5 * _LOG2_E
    _split[(batch, triton.cdiv(rows, config.rows), config.splits)](
        *(q, cache, table, lengths, *pieces, scale, heads, q_len, table.shape[1]),
        *(page_size, d_v, d - d_v, config.rows, config.keys, causal),
        num_warps=config.warps,
        num_stages=config.stages,
    )
    block = triton.next_power_of_2(config.splits)
    _reduce[(batch, rows)](*pieces, out, lse, heads, q_len, config.splits, d_v, block, num_warps=4)
