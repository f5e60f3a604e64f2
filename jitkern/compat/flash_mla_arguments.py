"""The arguments of ``flash_mla_with_kvcache`` behind ``causal``: whose order they are in, and what they may be."""

from __future__ import annotations

from typing import Any

from jitkern.errors import ArgumentError, UnsupportedError
from jitkern.ops import mla_cache

_HEAD = (
    *("is_fp8_kvcache", "indices", "attn_sink", "extra_k_cache", "extra_indices_in_kvcache"),
    *("topk_length", "extra_topk_length"),
)
_VLLM = ("descale_q", "descale_k", "is_fp8_kvcache", "indices")


def by_name(op: str, positional: tuple[Any, ...], given: dict[str, Any]) -> dict[str, Any]:
    """What was given by position beside what was given by name.

    FlashMLA has ``is_fp8_kvcache`` behind ``causal``, a bool; vLLM's build has ``descale_q``, a tensor or None.

    Raises:
        ArgumentError: there are too many, or one is given twice.
    """
    names = _HEAD if positional and isinstance(positional[0], bool) else _VLLM
    if len(positional) > len(names):
        raise ArgumentError(
            f"{op}: {len(positional)} arguments behind causal; expected at most {len(names)}: {', '.join(names)}"
        )
    named = dict(zip(names, positional, strict=False))
    twice = sorted(named.keys() & given.keys())
    if twice:
        raise ArgumentError(f"{op}: {', '.join(twice)} is given by position and by name; give it once")
    return {**given, **named}


def dense(op: str, named: dict[str, Any]) -> tuple[Any, Any, Any]:
    """``is_fp8_kvcache``, ``descale_q`` and ``descale_k``; anything else but None is refused."""
    is_fp8_kvcache, descales = named.pop("is_fp8_kvcache", False), [named.pop(f"descale_{x}", None) for x in "qk"]
    refused = sorted(name for name, value in named.items() if value is not None)
    if refused:
        raise UnsupportedError(f"{op}: {', '.join(refused)} is given; attention is dense here")
    return is_fp8_kvcache, *descales


def check_codes(op: str, q: Any, k_cache: Any, is_fp8_kvcache: Any) -> None:
    """Check the dtypes of queries and cache against ``is_fp8_kvcache``."""
    import torch

    if not isinstance(is_fp8_kvcache, bool):
        raise ArgumentError(
            f"{op}: is_fp8_kvcache is a {type(is_fp8_kvcache).__name__}; expected a bool (give descale_q and descale_k"
            " by name)"
        )
    codes = k_cache.element_size() == 1
    if is_fp8_kvcache and not codes:
        raise ArgumentError(f"{op}: is_fp8_kvcache=True, but k_cache is {k_cache.dtype}")
    if q.dtype == torch.float8_e4m3fn and k_cache.dtype != q.dtype:
        raise ArgumentError(f"{op}: q is {q.dtype}, k_cache is {k_cache.dtype}; queries of 8 bits go with such a cache")


def cache_dtype(q: Any, k_cache: Any) -> Any:
    """``cache_dtype`` of :class:`~jitkern.ops.mla.MLADecode` for these tensors."""
    if k_cache.element_size() > 1:
        return None if k_cache.dtype == q.dtype else k_cache.dtype
    return mla_cache.PACKED if k_cache.shape[3] == mla_cache.PACKED_BYTES else k_cache.dtype
