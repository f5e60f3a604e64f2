"""Sizes of MLA decode that follow from heads, query length and device alone: tiles, parts, shared memory, partial rows.

None of them depends on a batch or on lengths: a captured graph must not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from jitkern.loader import CPU

BLOCK_TOKENS = 64
MAX_PARTS = 1024  # kMaxParts of kernels_src/mla_plan.cu
CONSUMER_THREADS = 256
THREADS = 384  # kThreads of kernels_src/include/mla_tile.cuh
COMBINE_THREADS = 256  # kThreads of kernels_src/mla_combine.cu
_COMBINE_BLOCKS = 4  # of the merge on each multiprocessor; more only start and find nothing to do
_CHUNK_TOKENS = 16
_CPU_TILE_ROWS = 32
_MAX_GRID_Z = 65535


@dataclass(frozen=True)
class Device:
    """What the sizes depend on.

    Attributes:
        number: CUDA device number, or ``CPU``.
        workers: multiprocessors, or threads.
        shared: the most dynamic shared memory of a block, in bytes.
    """

    number: int
    workers: int
    shared: int


def device_of(number: int) -> Device:
    """Ask torch about a device."""
    import torch

    if number == CPU:
        return Device(CPU, torch.get_num_threads(), 0)
    properties = torch.cuda.get_device_properties(number)
    return Device(number, properties.multi_processor_count, properties.shared_memory_per_block_optin)


def shared_bytes(head_dim: int, rows: int, chunks: int) -> int:
    """``sizeof(Shared)`` of kernels_src/include/mla_tile.cuh."""
    row = 2 * head_dim + 16
    groups = 8 * 16 // rows
    fixed = rows * row + rows * (2 * BLOCK_TOKENS + 16) + 2 * 4 * rows * groups
    return _round_up(_round_up(fixed + chunks * (_CHUNK_TOKENS * row + 4), 8) + 8 * (2 * chunks + 2), 16)


def ring_chunks(head_dim: int, rows: int, shared: int) -> int:
    """How many chunks of the ring fit, at most three blocks' worth."""
    chunks = 3 * BLOCK_TOKENS // _CHUNK_TOKENS
    while chunks > 0 and shared_bytes(head_dim, rows, chunks) > shared:
        chunks -= 1
    return chunks


def tile_rows(rows: int, head_dim: int, device: Device) -> int:
    """Rows of a tile: 16, or 32 where there are more rows and the shared memory has room for them."""
    if device.number == CPU:
        return _CPU_TILE_ROWS
    roomy = ring_chunks(head_dim, 32, device.shared) * _CHUNK_TOKENS >= BLOCK_TOKENS
    return 32 if rows > 16 and roomy else 16


def tiles(rows: int, head_dim: int, device: Device) -> int:
    """Tiles of a request and KV head."""
    return -(-rows // tile_rows(rows, head_dim, device))


def parts(rows: int, heads_k: int, head_dim: int, device: Device) -> int:
    """Workers that share the keys: what the tiles and KV heads leave of the multiprocessors, and at least 1."""
    return min(max(device.workers // (tiles(rows, head_dim, device) * heads_k), 1), MAX_PARTS)


def partial_rows(parts_: int) -> int:
    """The most pieces that belong to split requests, whatever the batch."""
    return max(2 * (parts_ - 1), 1)


def join_rows(slots: int, rows: int, device: Device) -> int:
    """Rows that one block of the merge takes, so that its blocks fit on the device at once."""
    most = max(device.workers * _COMBINE_BLOCKS // slots, 1)
    return -(-rows // most)


def page_shift(page_size: int) -> int:
    """log2 of the page size."""
    return int(math.log2(page_size))


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple
