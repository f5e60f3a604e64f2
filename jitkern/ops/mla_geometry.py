"""Sizes of MLA decode that follow from heads, query length and device alone: tiles, parts, shared memory, partial rows.

None of them depends on a batch or on lengths: a captured graph must not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from jitkern.errors import UnsupportedError
from jitkern.loader import CPU

BLOCK_TOKENS = 64
MAX_PARTS = 1024  # kMaxParts of kernels_src/include/mla_plan.cuh
MOST_ROWS = 64  # of any tile
COMBINE_THREADS = 256  # kThreads of kernels_src/mla_combine.cu
_COMBINE_STRIPES = 4  # kStripes of kernels_src/mla_combine.cu, for 512 columns
_COMBINE_BLOCKS = 2  # of the merge on each multiprocessor; more only start and find nothing to do
_BLOCK_CHUNKS = 4  # chunks of 16 tokens in a block
_CPU_TILE_ROWS = 32
_OLDEST = 80  # the first with the copies and matrix instructions of the kernels
_SHARED_KB = {80: 163, 86: 99, 87: 163, 89: 99, 120: 99, 121: 99}  # of a block; 227 elsewhere


@dataclass(frozen=True)
class Device:
    """What the sizes depend on.

    Attributes:
        number: CUDA device number, or ``CPU``.
        workers: multiprocessors, or threads.
        shared: the most dynamic shared memory of a block, in bytes.
        target: ``sm_90`` and the like, or ``cpu``.
    """

    number: int
    workers: int
    shared: int
    target: str

    @property
    def warpgroups(self) -> bool:
        """Whether it has Hopper's warpgroup matrix instructions."""
        return self.target == "sm_90"


@dataclass(frozen=True)
class Tile:
    """How one block of the decode works: the variant's constants and the launch's shape.

    Attributes:
        rows: (query token, head) pairs of a tile.
        chunks: ring slots of 16 tokens.
        warpgroup: whether warpgroup matrix instructions do the work.
        threads: of a block.
        shared: bytes of dynamic shared memory.
        target: what to compile for; the warpgroup instructions need ``sm_90a``.
    """

    rows: int
    chunks: int
    warpgroup: bool
    threads: int
    shared: int
    target: str


def device_of(number: int) -> Device:
    """Ask torch about a device."""
    import torch

    if number == CPU:
        return Device(CPU, torch.get_num_threads(), 0, "cpu")
    properties: Any = torch.cuda.get_device_properties(number)
    target = f"sm_{properties.major}{properties.minor}"
    return Device(number, properties.multi_processor_count, properties.shared_memory_per_block_optin, target)


def device_of_target(target: str) -> Device | None:
    """A device of a target, as far as variants depend on it; None where there is no kernel for it."""
    if target == "cpu":
        return Device(CPU, 1, 0, "cpu")
    number = int("".join(filter(str.isdigit, target)))
    if number < _OLDEST:
        return None
    return Device(0, 1, _SHARED_KB.get(number, 227) * 1024, f"sm_{number}")


def _plain_shared(head_dim: int, rows: int, chunks: int) -> int:
    """``sizeof(Shared)`` of kernels_src/include/mla_tile.cuh."""
    row = 2 * head_dim + 16
    groups = 8 * 16 // rows
    fixed = rows * row + rows * (2 * BLOCK_TOKENS + 16) + 2 * 4 * rows * groups
    return _round_up(_round_up(fixed + chunks * (16 * row + 4), 8) + 8 * (2 * chunks + 2), 16)


def _warpgroup_shared(head_dim: int, rows: int, chunks: int) -> int:
    """``sizeof(Shared)`` of kernels_src/include/mla_tile_warpgroup.cuh."""
    weights = 128 * rows if rows < 64 else 16 if head_dim > 512 else 128 * rows * (chunks // _BLOCK_CHUNKS)
    lines = 2 * head_dim * (16 * chunks + rows) + weights
    waves = 1 if rows < 64 else 3 if head_dim % 192 == 0 else 2
    barriers = (waves + 1) * chunks + 5
    return _round_up(_round_up(lines + 2 * 16 * rows + 4 * chunks, 8) + 8 * barriers, 1024)


def _plain(head_dim: int, rows: int, device: Device) -> Tile | None:
    chunks = 3 * _BLOCK_CHUNKS
    while chunks >= _BLOCK_CHUNKS and _plain_shared(head_dim, rows, chunks) > device.shared:
        chunks -= 1
    shared = _plain_shared(head_dim, rows, chunks)
    return Tile(rows, chunks, False, 384, shared, device.target) if chunks >= _BLOCK_CHUNKS else None


def _warpgroup(head_dim: int, rows: int, device: Device) -> Tile | None:
    for chunks in (3 * _BLOCK_CHUNKS, 2 * _BLOCK_CHUNKS):
        shared = _warpgroup_shared(head_dim, rows, chunks)
        if shared <= device.shared:
            return Tile(rows, chunks, True, 384 if rows > 32 else 256, shared, f"{device.target}a")
    return None


def tile(rows: int, head_dim: int, device: Device) -> Tile:
    """The smallest tile that holds ``rows`` rows, or the largest that fits the device."""
    if device.number == CPU:
        return Tile(_CPU_TILE_ROWS, 0, False, 1, 0, "cpu")
    if int(device.target[3:]) < _OLDEST:
        raise UnsupportedError(
            f"MLADecode: there is no kernel for {device.target}; it needs sm_80 or later, or the CPU"
        )
    make, sizes = (_warpgroup, (16, 32, 64)) if device.warpgroups else (_plain, (16, 32))
    fitting = [found for size in sizes if (found := make(head_dim, size, device))]
    if not fitting:
        raise UnsupportedError(
            f"MLADecode: a block of {device.target} has {device.shared} bytes of shared memory;"
            f" that is too little for head_dim={head_dim}"
        )
    return next((found for found in fitting if found.rows >= rows), fitting[-1])


def tiles(rows: int, head_dim: int, device: Device) -> int:
    """Tiles of a request and KV head."""
    return -(-rows // tile(rows, head_dim, device).rows)


def parts(rows: int, heads_k: int, head_dim: int, device: Device) -> int:
    """Workers that share the keys: what the tiles and KV heads leave of the multiprocessors, and at least 1."""
    return min(max(device.workers // (tiles(rows, head_dim, device) * heads_k), 1), MAX_PARTS)


def partial_rows(parts_: int) -> int:
    """The most pieces that belong to split requests, whatever the batch."""
    return max(2 * (parts_ - 1), 1)


def join_units(slots: int, rows: int, device: Device) -> tuple[int, int]:
    """(units that one block of the merge takes, blocks of a slot). A unit is a stripe of a row.

    One unit a block or two, or with many units one for each of its warps and more: its blocks should fit on the device
    at once, as most of them only find out that there is nothing to do.
    """
    units = rows * (1 if device.number == CPU else _COMBINE_STRIPES)
    most = max(device.workers * _COMBINE_BLOCKS // slots, 1)
    needed = -(-units // most)
    each = needed if needed <= 2 else _round_up(needed, COMBINE_THREADS // 32)
    return each, -(-units // each)


def page_shift(page_size: int) -> int:
    """log2 of the page size."""
    return int(math.log2(page_size))


def _round_up(x: int, multiple: int) -> int:
    return -(-x // multiple) * multiple
