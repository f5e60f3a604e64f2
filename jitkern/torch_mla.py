"""``MLADecode`` for ``torch.compile``: its two calls as ops of tensors, ``jitkern::mla_plan`` and ``jitkern::mla_run``.

A plan is written to the object's plan buffer and a run reads it: the buffer is an operand of both, so that a compiler
keeps their order. ``MLADecode.plan`` and ``.run`` go here by themselves while they are being traced.
"""

from __future__ import annotations

from typing import Any

import torch

from jitkern.ops import mla_torch
from jitkern.ops.library import register
from jitkern.ops.mla import MLADecode

__all__ = ["MLADecode"]

_library = torch.library.Library("jitkern", "FRAGMENT")


def _plan(storage: Any, cache_seqlens: Any, num_requests: Any, q_len: int, number: int) -> None:
    mla_torch.find(number).plan(cache_seqlens, num_requests, q_len=q_len)


def _plan_fake(storage: Any, cache_seqlens: Any, num_requests: Any, q_len: int, number: int) -> None:
    torch._check(cache_seqlens.dim() == 1, lambda: f"mla_plan: cache_seqlens has shape {list(cache_seqlens.shape)}")


def _run(
    storage: Any,
    q: Any,
    k_cache: Any,
    block_table: Any,
    cache_seqlens: Any,
    k_scale: Any,
    q_scale: Any,
    softmax_scale: float | None,
    causal: bool,
    lse_base: float,
    number: int,
) -> tuple[Any, Any]:
    operands, scales = (q, k_cache, block_table, cache_seqlens), {"k_scale": k_scale, "q_scale": q_scale}
    decode = mla_torch.find(number)
    result: tuple[Any, Any] = decode.run(*operands, softmax_scale, causal, lse_base=lse_base, **scales)
    return result


def _run_fake(storage: Any, q: Any, k_cache: Any, *rest: Any) -> tuple[Any, Any]:
    batch, q_len, heads, _ = q.shape
    decode = mla_torch.find(rest[-1])
    out = q.new_empty((batch, q_len, heads, decode.head_dim_v))
    return out, q.new_empty((batch, heads, q_len), dtype=torch.float32)


_SCHEMAS = (
    (
        "mla_plan(Tensor(a!) storage, Tensor cache_seqlens, Tensor? num_requests, int q_len, int number) -> ()",
        _plan,
        _plan_fake,
    ),
    (
        "mla_run(Tensor storage, Tensor q, Tensor k_cache, Tensor block_table, Tensor cache_seqlens,"
        " Tensor? k_scale, Tensor? q_scale, float? softmax_scale, bool causal, float lse_base, int number)"
        " -> (Tensor, Tensor)",
        _run,
        _run_fake,
    ),
)
for _schema, _implementation, _fake in _SCHEMAS:
    register(_library, _schema, _implementation, _fake)
