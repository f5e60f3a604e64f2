"""FlashMLA's names and conventions on jitkern's kernels: importing from here instead moves a caller over.

Both forms of the interface work. With a lazy object (``get_mla_metadata()``) the plan is made by the first call that
gets the object, and later calls of the step reuse it. With tensors (``get_mla_metadata(cache_seqlens, ...)``, copied
wherever the caller keeps them) every call plans anew from the lengths it is given: that costs some microseconds a
layer, and is right whatever happened to the tensors since, in a graph and out of it.

Caches may be bf16, f16, float8_e4m3fn with ``descale_k``, or FlashMLA's tokens of 656 bytes. Attention is dense.
"""

from __future__ import annotations

import collections
from typing import Any

from jitkern.compat import flash_mla_arguments
from jitkern.errors import ArgumentError, CaptureError, UnsupportedError
from jitkern.ops import checks, mla_geometry, mla_plan
from jitkern.ops.mla import MLADecode

OP = "flash_mla_with_kvcache"
_HEAD_DIM = 576
_MOST_OBJECTS = 64  # for the tensor form, one for each metadata buffer and shape
_objects: collections.OrderedDict[Any, MLADecode] = collections.OrderedDict()
_kept: list[MLADecode] = []  # graphs hold their addresses


class FlashMLASchedMeta:
    """What the lazy form passes around: nothing until its first call, then one step's plan.

    A plan is right as long as no request goes from no keys to some; make a new object for each step, as with FlashMLA,
    and for each graph.
    """

    def __init__(self) -> None:
        self.decode: MLADecode | None = None
        self.config: dict[str, Any] = {}
        self.captured = False

    @property
    def tile_scheduler_metadata(self) -> Any:
        """The plan's records, or None before the first call."""
        return None if self.decode is None else self.decode.tile_scheduler_metadata

    @property
    def num_splits(self) -> Any:
        """Prefix sums of the splits, or None before the first call."""
        return None if self.decode is None else self.decode.num_splits[: self.config["batch"] + 1]


def get_mla_metadata(
    cache_seqlens: Any = None,
    num_q_tokens_per_head_k: int | None = None,
    num_heads_k: int | None = None,
    num_heads_q: int | None = None,
    is_fp8_kvcache: bool = False,
    topk: int | None = None,
) -> tuple[Any, Any]:
    """The plan of a step: (lazy object, None) without arguments, else two new int32 tensors.

    Args:
        cache_seqlens: [batch] int32, on the device.
        num_q_tokens_per_head_k: query tokens times query heads per KV head.
        num_heads_k: KV heads.
        num_heads_q, is_fp8_kvcache: change nothing here.
        topk: for sparse attention, which there is none of here.

    Returns:
        ``FlashMLASchedMeta, None``; or ``tile_scheduler_metadata`` [parts, 8] and ``num_splits`` [batch + 1].
    """
    op = "get_mla_metadata"
    if topk is not None:
        raise UnsupportedError(f"{op}: topk={topk}; attention is dense here")
    if cache_seqlens is None or num_q_tokens_per_head_k is None or num_heads_k is None:
        return FlashMLASchedMeta(), None
    import torch

    checks.tensor(op, "cache_seqlens", cache_seqlens, 1, "[batch]")
    checks.dtype(op, "cache_seqlens", cache_seqlens, torch.int32)
    checks.same_device(op, cache_seqlens=cache_seqlens)
    for name, value in (("num_q_tokens_per_head_k", num_q_tokens_per_head_k), ("num_heads_k", num_heads_k)):
        if type(value) is not int or not 0 < value < 1 << 31:
            raise ArgumentError(f"{op}: {name}={value!r}; expected an int above 0, below 2^31")
    device = mla_geometry.device_of(checks.device_number(cache_seqlens.device))
    parts = mla_geometry.parts(num_q_tokens_per_head_k, num_heads_k, _HEAD_DIM, device)
    plan = mla_plan.Plan(int(cache_seqlens.shape[0]), parts, cache_seqlens.device)
    plan.load(checks.backend_for(op, "auto", cache_seqlens.device))
    plan.make(cache_seqlens.contiguous(), None, parts, None)
    return plan.records, plan.num_splits


def flash_mla_with_kvcache(
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    head_dim_v: int,
    tile_scheduler_metadata: Any,
    num_splits: Any = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    *positional: Any,
    **named: Any,
) -> tuple[Any, Any]:
    """Attend over a paged latent cache.

    Behind ``causal`` come, by name or by position, ``is_fp8_kvcache`` and ``indices`` as FlashMLA has them, or
    ``descale_q``, ``descale_k``, ``is_fp8_kvcache`` and ``indices`` as vLLM's build does.

    Args:
        q: [batch, q_len, heads, 576]; bf16, f16, or float8_e4m3fn with a cache of that type.
        k_cache: [pages, page size, KV heads, 576]; any power of two as page size; or 656 uint8 or float8_e4m3fn.
        block_table: [batch, columns] int32.
        cache_seqlens: [batch] int32, the query tokens counted in.
        head_dim_v: 512.
        tile_scheduler_metadata, num_splits: what :func:`get_mla_metadata` gave, or copies of it.
        softmax_scale: default ``576 ** -0.5``.
        causal: bottom-right mask.
        is_fp8_kvcache: whether the cache holds 8-bit codes.
        descale_q, descale_k: float32 tensors of one element, as vLLM's build has them for float8_e4m3fn caches; with
            bf16 and f16 caches they are not read, as there.
        indices and FlashMLA's other arguments for sparse attention: anything but None is refused.

    Returns:
        ``out`` [batch, q_len, heads, 512] and ``softmax_lse`` [batch, heads, q_len] float32, natural logarithm, +inf
        for rows without a key. bf16 for queries of 8 bits.
    """
    options = flash_mla_arguments.by_name(OP, positional, named)
    is_fp8_kvcache, descale_q, descale_k = flash_mla_arguments.dense(OP, options)
    checks.tensor(OP, "q", q, 4, "[batch, q_len, heads, head size]")
    checks.tensor(OP, "k_cache", k_cache, 4, "[pages, page size, KV heads, head size]")
    checks.same_device(OP, q=q, k_cache=k_cache)
    if type(head_dim_v) is not int or head_dim_v != 512:
        raise UnsupportedError(f"{OP}: head_dim_v={head_dim_v}; expected 512")
    flash_mla_arguments.check_codes(OP, q, k_cache, is_fp8_kvcache)
    if k_cache.element_size() > 1:
        descale_q = descale_k = None
    if q.element_size() == 1:
        q = q.bfloat16()  # exact
    operands = (q, k_cache, block_table, cache_seqlens)
    lazy = isinstance(tile_scheduler_metadata, FlashMLASchedMeta)
    if lazy:
        decode = _lazy(tile_scheduler_metadata, num_splits, *operands, causal)
    else:
        decode = _from_tensors(tile_scheduler_metadata, num_splits, *operands)
        decode.plan(cache_seqlens, q_len=int(q.shape[1]))
    results = decode.run(*operands, softmax_scale, causal, k_scale=descale_k, q_scale=descale_q)
    if lazy:  # not before: a call that fails leaves no plan behind
        tile_scheduler_metadata.decode = decode
    return results


# vLLM's names where the cache holds 8-bit codes. Its order of arguments is one of the two that are taken.
flash_mla_with_kvcache_fp8 = flash_mla_with_kvcache
get_mla_metadata_dense_fp8 = get_mla_metadata


def _config(q: Any, k_cache: Any, causal: bool = False) -> dict[str, Any]:
    batch, q_len, heads, d = map(int, q.shape)
    given = {"batch": batch, "q_len": q_len, "heads": heads, "heads_k": int(k_cache.shape[2])}
    return given | {
        "page_size": int(k_cache.shape[1]),
        "head_dim": d,
        "causal": causal,
        "dtype": q.dtype,
        "device": q.device,
        "cache_dtype": flash_mla_arguments.cache_dtype(q, k_cache),
    }


def _make(config: dict[str, Any], capacity: int) -> MLADecode:
    return MLADecode(
        *(capacity, config["heads"], config["heads_k"], config["q_len"]),
        *(config["dtype"], config["device"], config["head_dim"], 512, config["page_size"]),
        cache_dtype=config["cache_dtype"],
    )


def _capturing(device: Any) -> bool:
    import torch

    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _lazy(
    meta: FlashMLASchedMeta, num_splits: Any, q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any, causal: bool
) -> MLADecode:
    if num_splits is not None:
        raise ArgumentError(f"{OP}: num_splits is given beside a FlashMLASchedMeta; pass None, the object has it")
    config = _config(q, k_cache, causal)
    if meta.decode is None:
        meta.config, meta.captured = config, _capturing(q.device)
        decode = _make(config, config["batch"])
        decode.plan(cache_seqlens)
        return decode
    differing = [name for name, value in config.items() if meta.config[name] != value]
    if differing:
        first = differing[0]
        raise ArgumentError(
            f"{OP}: {first} is {config[first]}, but this FlashMLASchedMeta was first used with {meta.config[first]};"
            " make one for each shape: get_mla_metadata()"
        )
    if _capturing(q.device) and not meta.captured:
        raise CaptureError(
            f"{OP}: this FlashMLASchedMeta was planned before the capture, and the graph would keep that plan;"
            " make a new one for the capture: get_mla_metadata()"
        )
    return meta.decode


def _from_tensors(
    metadata: Any, num_splits: Any, q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any
) -> MLADecode:
    import torch

    checks.tensor(OP, "tile_scheduler_metadata", metadata, 2, "[parts, 8]")
    checks.dtype(OP, "tile_scheduler_metadata", metadata, torch.int32)
    checks.tensor(OP, "num_splits", num_splits, 1, "[batch + 1]")
    checks.dtype(OP, "num_splits", num_splits, torch.int32)
    batch = int(q.shape[0])
    if metadata.shape[1] != mla_plan.RECORD_WORDS or num_splits.shape[0] < batch + 1:
        raise ArgumentError(
            f"{OP}: tile_scheduler_metadata has shape {list(metadata.shape)}, num_splits {list(num_splits.shape)}; for"
            f" {batch} requests expected [parts, {mla_plan.RECORD_WORDS}] and at least [{batch + 1}]"
        )
    config = _config(q, k_cache)
    capacity = max(16, 1 << (batch - 1).bit_length()) if batch else 16
    # A metadata buffer has one user at a time, by FlashMLA's contract: so has the workspace that goes with it.
    key = (metadata.data_ptr(), capacity, *(value for name, value in config.items() if name != "batch"))
    found = _objects.get(key)
    if found is None:
        found = _objects[key] = _make(config, capacity)
        if len(_objects) > _MOST_OBJECTS:
            _objects.popitem(last=False)
    _objects.move_to_end(key)
    if _capturing(q.device) and not any(found is kept for kept in _kept):
        _kept.append(found)
    return found
