"""What MLA decode refuses, and how it says so."""

from __future__ import annotations

import math
from typing import Any

from jitkern.errors import ArgumentError, UnsupportedError
from jitkern.ops import checks, mla_geometry

HEAD_DIMS = (576, 512)
HEAD_DIM_V = 512
PAGE_SIZES = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


def shape(op: str, **given: Any) -> None:
    """Check what an :class:`MLADecode` is made for."""
    for name in ("max_batch", "num_heads", "num_heads_k", "max_q_len"):
        value, least = given[name], 0 if name == "max_batch" else 1
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value < 1 << 31:
            raise ArgumentError(f"{op}: {name}={value!r}; expected an int of at least {least}, below 2^31")
    for name in ("head_dim", "head_dim_v", "page_size"):
        if type(given[name]) is not int:
            raise ArgumentError(f"{op}: {name}={given[name]!r}; expected an int")
    if given["num_heads"] % given["num_heads_k"]:
        raise ArgumentError(
            f"{op}: num_heads={given['num_heads']} is no multiple of num_heads_k={given['num_heads_k']};"
            " every KV head serves the same number of query heads"
        )
    if given["head_dim"] not in HEAD_DIMS or given["head_dim_v"] != HEAD_DIM_V:
        raise UnsupportedError(
            f"{op}: head_dim={given['head_dim']}, head_dim_v={given['head_dim_v']}; there are kernels for"
            f" {' and '.join(f'{d}/{HEAD_DIM_V}' for d in HEAD_DIMS)}"
        )
    if given["page_size"] not in PAGE_SIZES:
        raise UnsupportedError(
            f"{op}: page_size={given['page_size']}; expected a power of two from 1 to {PAGE_SIZES[-1]}"
        )
    import torch

    if given["dtype"] not in (torch.bfloat16, torch.float16):
        raise UnsupportedError(f"{op}: dtype={given['dtype']}; expected torch.bfloat16 or torch.float16")


def options(op: str, empty_lse: Any, num_parts: Any, pdl: Any) -> None:
    """Check the options of an :class:`MLADecode`."""
    if not isinstance(empty_lse, float) or not math.isinf(empty_lse):
        raise ArgumentError(f"{op}: empty_lse={empty_lse!r}; expected inf or -inf")
    if num_parts is not None and (type(num_parts) is not int or not 1 <= num_parts <= mla_geometry.MAX_PARTS):
        raise ArgumentError(f"{op}: num_parts={num_parts!r}; expected 1 to {mla_geometry.MAX_PARTS}, or None")
    if pdl is not None:
        checks.flag(op, "pdl", pdl)


def scale(op: str, given: Any, head_dim: int) -> float:
    """The factor of the scores: a finite number, by default 1 / sqrt(head_dim)."""
    if given is None:
        return float(head_dim**-0.5)
    # The kernels get it times log2(e), as a float32.
    if not isinstance(given, int | float) or isinstance(given, bool) or not abs(given) < 2.3e38:
        raise ArgumentError(
            f"{op}: softmax_scale={given!r}; expected a finite number below 2.3e38, or None for head_dim ** -0.5"
        )
    return float(given)


def usable_device(op: str, device: Any) -> Any:
    """The torch device of that name, with its number."""
    import torch

    try:
        probe = torch.empty(0, device=device)
    except (AssertionError, RuntimeError, TypeError, ValueError) as error:
        raise ArgumentError(
            f"{op}: device={device!r} cannot be used ({str(error).splitlines()[0]}); expected a CUDA device that is"
            ' there, or "cpu"'
        ) from None
    return checks.same_device(op, device=probe)


def lengths(op: str, value: Any, device: Any, name: str = "cache_seqlens") -> None:
    """A contiguous int32 vector on the object's device."""
    import torch

    checks.tensor(op, name, value, 1, "[batch]")
    checks.dtype(op, name, value, torch.int32)
    on_device(op, name, value, device)
    if value.shape[0] > 1 and value.stride(0) != 1:
        raise ArgumentError(f"{op}: {name} has stride {value.stride(0)}; it must be contiguous (call .contiguous())")


def count(op: str, value: Any, device: Any) -> None:
    """The real number of requests: one int32 on the device, or None."""
    import torch

    if value is None:
        return
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(
            f"{op}: num_requests is a {type(value).__name__}; expected an int32 tensor of one element on {device},"
            " so that a graph reads it anew at each replay (or None: all rows are real)"
        )
    checks.dtype(op, "num_requests", value, torch.int32)
    on_device(op, "num_requests", value, device)
    if value.numel() != 1:
        raise ArgumentError(f"{op}: num_requests has shape {list(value.shape)}; expected one element")


def on_device(op: str, name: str, value: Any, device: Any) -> None:
    """Require the object's device."""
    if value.device != device:
        raise ArgumentError(
            f"{op}: {name} is on {value.device}, the object's buffers are on {device}; move it, or make an object there"
        )


def operands(
    op: str, made_for: Any, q: Any, k_cache: Any, block_table: Any, cache_seqlens: Any, out: Any, lse: Any
) -> None:
    """Check the tensors of one run against each other and against what the object was made for."""
    import torch

    checks.tensor(op, "q", q, 4, "[batch, q_len, heads, head size]")
    batch, q_len = map(int, q.shape[:2])
    heads, heads_k, d, cache = made_for.num_heads, made_for.num_heads_k, made_for.head_dim, made_for.cache_format
    checks.same_shape(op, "q", q, (batch, q_len, heads, d), "[batch, q_len, heads, head size]", "the object")
    checks.tensor(op, "k_cache", k_cache, 4, "[pages, page size, KV heads, head size]")
    expected = (int(k_cache.shape[0]), made_for.page_size, heads_k, cache.width)
    checks.same_shape(op, "k_cache", k_cache, expected, "[pages, page size, KV heads, head size]", "the object")
    checks.tensor(op, "block_table", block_table, 2, "[batch, columns]")
    checks.same_shape(op, "block_table", block_table, (batch, int(block_table.shape[1])), "[batch, columns]", "q")
    lengths(op, cache_seqlens, made_for.device)
    checks.same_shape(op, "cache_seqlens", cache_seqlens, (batch,), "[batch]", "q")
    checks.dtype(op, "q", q, made_for.dtype)
    checks.dtype(op, "k_cache", k_cache, *(getattr(torch, name) for name in cache.dtypes))
    checks.dtype(op, "block_table", block_table, torch.int32)
    for name, value in (("q", q), ("k_cache", k_cache), ("block_table", block_table)):
        on_device(op, name, value, made_for.device)
        checks.last_stride_one(op, name, value)
    if out is not None:
        checks.tensor(op, "out", out, 4, "[batch, q_len, heads, value size]")
        checks.same_shape(
            op, "out", out, (batch, q_len, heads, made_for.head_dim_v), "[batch, q_len, heads, value size]", "q"
        )
        checks.dtype(op, "out", out, made_for.dtype)
        checks.last_stride_one(op, "out", out)
        checks.writable(op, "out", out)
        on_device(op, "out", out, made_for.device)
    if lse is not None:
        checks.tensor(op, "lse", lse, 3, "[batch, heads, q_len]")
        checks.same_shape(op, "lse", lse, (batch, heads, q_len), "[batch, heads, q_len]", "q")
        checks.dtype(op, "lse", lse, torch.float32)
        checks.writable(op, "lse", lse)
        on_device(op, "lse", lse, made_for.device)
    checks.no_gradient(op, q=q, k_cache=k_cache, out=out, lse=lse)


def planned(op: str, plan: tuple[int, int, int] | None, batch: int, q_len: int, token: int | None) -> None:
    """Check that the last plan is one for this run."""
    if plan is None:
        raise ArgumentError(
            f"{op}: there is no plan yet; call plan(cache_seqlens) first, or record it before run in the same graph"
        )
    rows, planned_q_len, generation = plan
    if planned_q_len != q_len:
        raise ArgumentError(
            f"{op}: q has {q_len} query tokens a request, the plan is for {planned_q_len};"
            f" call plan(cache_seqlens, q_len={q_len})"
        )
    if rows > batch:
        raise ArgumentError(f"{op}: q has {batch} requests, the plan is for {rows}; plan again for these rows")
    if token is not None and (type(token) is not int or token != generation):
        raise ArgumentError(
            f"{op}: plan={token} is not the latest ({generation}): another plan has been made with this object since."
            " Use one object for each step that is under way at a time"
        )
