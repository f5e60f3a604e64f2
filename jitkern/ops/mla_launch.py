"""The decode and the merge of an :class:`~jitkern.ops.mla.MLADecode`: their variants, and their bound launches."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from jitkern import driver, launch, loader, streams, variants
from jitkern.errors import CaptureError
from jitkern.loader import CPU
from jitkern.ops import checks, mla_geometry, mla_plan
from jitkern.variants import Variant

if TYPE_CHECKING:
    from jitkern.ops.mla import MLADecode

_LAYOUT = "13P13q10i3fi2P"  # struct DecodeParams of kernels_src/include/mla_params.cuh
_PATCH = "6P"
_ALL_THREADS = 1 << 40  # bytes of work that make a CPU kernel use all threads
_COMMON_ROWS = (16, 32, 64)
_NO_GAIN_FROM = 64  # rows of a tile whose kernels do not gain from an early start (docs/mla.md)
_announced: set[int] = set()  # functions that the driver knows the shared memory of


class _DecodeKernel(variants.Kernel):
    """The decode's common variants are those that a target's own tiles need."""

    def variants(self, target: str, backend: str) -> Iterator[Variant]:
        """One for each element type and tile of the target; none for a target without tiles."""
        device = mla_geometry.device_of_target(target)
        if device is None:
            return
        for tile in dict.fromkeys(mla_geometry.tile(rows, 576, device) for rows in _COMMON_ROWS):
            for tag in ("bf16", "f16"):
                yield Variant(self.name, tag, 8, tile.target, _constants(576, tile), backend)


def _constants(
    head_dim: int, tile: mla_geometry.Tile, cache: tuple[tuple[str, int], ...] = ()
) -> tuple[tuple[str, int | str], ...]:
    warpgroup = int(tile.warpgroup)
    return (("d", head_dim), ("rows", tile.rows), ("chunks", tile.chunks), ("warpgroup", warpgroup), *cache)


DECODE = variants.register(
    _DecodeKernel("mla_decode", {"d": None, "rows": None, "chunks": None, "warpgroup": None, "cache": 0}, ())
)
COMBINE = variants.register(
    variants.Kernel("mla_combine", {"d": None}, tuple((tag, 4, (("d", 576),)) for tag in ("bf16", "f16")))
)


def load(made: MLADecode) -> None:
    """Make all kernels that well-aligned operands need ready."""
    made._plan.load(made.backend)
    # From 64 query tokens on, whatever the heads, it is the largest tile.
    for tile in {made._tile(q_len) for q_len in range(1, min(made.max_q_len, mla_geometry.MOST_ROWS) + 1)}:
        _decode(made, tile, variants.widest_pack(2, 0), None)
    _combine(made, None)


def bind(
    made: MLADecode,
    operands: tuple[Any, ...],
    scale: float,
    causal: bool,
    base: float,
    scales: tuple[int, ...],
    stream: Any,
) -> tuple[launch.Call, launch.Call]:
    """The two launches of a run, with everything but the operands' addresses fixed."""
    q, cache = operands[2:4]
    batch, q_len, heads, _ = q.shape
    on_cpu = made._number == CPU
    handle = None if on_cpu else streams.resolve_stream(stream, made._number)
    tile, parts = made._tile(q_len), made.parts(q_len)
    slots = min(batch, parts)
    join_units, join_tiles = mla_geometry.join_units(slots, heads * q_len, made._sizes)
    pack = 8 if on_cpu else _pack(q, cache)
    values = [*_values(made, operands, scale, causal, base, (parts, join_units)), *scales]
    grid = (-(-heads // made.num_heads_k * q_len // tile.rows), parts, made.num_heads_k)
    join_threads = 1 if on_cpu else mla_geometry.COMBINE_THREADS
    early = tile.rows < _NO_GAIN_FROM if made._pdl is None else made._pdl
    decode = launch.Call(
        _decode(made, tile, pack, handle),
        grid,
        (tile.threads, 1, 1),
        _LAYOUT,
        values,
        _PATCH,
        tile.shared,
        _ALL_THREADS,
        early,
    )
    combine = launch.Call(
        _combine(made, handle),
        (slots * join_tiles, 1, 1),
        (join_threads, 1, 1),
        _LAYOUT,
        values,
        _PATCH,
        0,
        _ALL_THREADS,
        early,
    )
    return decode, combine


def _decode(made: MLADecode, tile: mla_geometry.Tile, pack: int, stream: int | None) -> loader.Function:
    constants = _constants(made.head_dim, tile, made.cache_format.constants)
    variant = Variant(DECODE.name, checks.tag(made), pack, tile.target, constants, made.backend)
    try:
        function = loader.get(variant, made._number, stream, dynamic_shared=tile.shared)
    except CaptureError:
        raise CaptureError(
            f"MLADecode.run: the addresses or strides of q or k_cache allow accesses of {2 * pack} bytes only, and the"
            f" kernel for that ({variant.name}) is not loaded while a CUDA graph is being captured. Call run once with"
            " such operands before the capture"
        ) from None
    if made._number != CPU and function.handle not in _announced:
        # A warm-up by name may have loaded it, and cannot know how much shared memory its launches ask for.
        with driver.current(made._number):
            driver.prepare(function.handle, variant.symbol, tile.shared)
        _announced.add(function.handle)
    return function


def _combine(made: MLADecode, stream: int | None) -> loader.Function:
    constants = (("d", made.head_dim),)
    variant = Variant(COMBINE.name, checks.tag(made), 4, launch.target(made._number), constants, made.backend)
    return loader.get(variant, made._number, stream)


def _byte_strides(value: Any) -> list[int]:
    """Of the dimensions before the last that are stepped along."""
    size = value.element_size()
    return [size * stride for stride, n in zip(value.stride()[:3], value.shape[:3], strict=True) if n > 1]


def _pack(q: Any, cache: Any) -> int:
    return variants.widest_pack(2, q.data_ptr(), cache.data_ptr(), *_byte_strides(q), *_byte_strides(cache))


def _values(
    made: MLADecode, operands: tuple[Any, ...], scale: float, causal: bool, base: float, sizes: tuple[int, int]
) -> list[Any]:
    """``struct DecodeParams``, in its order."""
    out, lse, q, cache, table, _ = operands
    batch, q_len, heads, _ = q.shape
    parts, join_units = sizes
    out_aligned = variants.widest_pack(2, out.data_ptr(), *_byte_strides(out)) >= 4
    lse_strides = lse.stride()
    return [
        *(operand.data_ptr() for operand in operands),
        *(made._partial_out.data_ptr(), made._partial_lse.data_ptr(), *mla_plan.view_addresses(made._plan)),
        *(*out.stride()[:3], lse_strides[0], lse_strides[2], lse_strides[1], *q.stride()[:3]),
        *(*cache.stride()[:3], table.stride(0)),
        *(batch, q_len, made.num_heads_k, heads // made.num_heads_k),
        *(table.shape[1], cache.shape[0], mla_geometry.page_shift(made.page_size), int(causal and q_len > 1)),
        *(int(out_aligned), parts),
        *(scale * math.log2(math.e), math.log(2) / math.log(base), made.empty_lse, join_units),
    ]
