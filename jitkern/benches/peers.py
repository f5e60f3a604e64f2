"""The pairwise merges that are compared, and their operands."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

Shape = tuple[int, int, int, str]


def traffic(shape: Shape) -> int:
    """Bytes that a pairwise merge has to move."""
    n, h, d, name = shape
    return 3 * n * h * d * int(getattr(torch, name).itemsize) + 12 * n * h


@dataclass
class Operands:
    """One set of buffers; L lies in memory as [n, h], which every peer wants."""

    a: torch.Tensor
    b: torch.Tensor
    a_lse: torch.Tensor
    b_lse: torch.Tensor
    out: torch.Tensor
    out_lse: torch.Tensor


def rotating(shape: Shape, count: int, device: str) -> list[Operands]:
    """Many sets, each operand of all of them in one allocation: hundreds of small ones would take longer than the runs.

    Every set starts at a boundary of 128 bytes, as it would by itself.
    """
    n, h, d, name = shape
    per_set = -(-n * h * d // 64) * 64
    per_lse = -(-n * h // 32) * 32

    def values() -> Iterator[torch.Tensor]:
        flat = torch.empty(count, per_set, device=device, dtype=getattr(torch, name)).normal_()
        return iter(flat[:, : n * h * d].view(count, n, h, d))

    def lse() -> Iterator[torch.Tensor]:
        return iter(torch.randn(count, per_lse, device=device)[:, : n * h].view(count, n, h))

    parts = (values(), values(), lse(), lse(), values(), lse())
    return [Operands(*one) for one in zip(*parts, strict=True)]


def eager(o: Operands) -> tuple[Any, Any]:
    """The formula as one writes it in torch."""
    top = torch.maximum(o.a_lse, o.b_lse)
    wa, wb = torch.exp(o.a_lse - top), torch.exp(o.b_lse - top)
    total = wa + wb
    return (o.a * (wa / total).unsqueeze(-1) + o.b * (wb / total).unsqueeze(-1)).to(o.a.dtype), top + total.log()


def _jitkern() -> Callable[[Operands], Any]:
    from jitkern.torch_ops import merge_attn_states

    return lambda o: merge_attn_states(o.out, o.a, o.a_lse.T, o.b, o.b_lse.T, o.out_lse.T)


def _sglang() -> Callable[[Operands], Any]:
    if "SGLANG_OPS" not in os.environ:
        raise ImportError("SGLANG_OPS is not set; it names sglang-kernel's common_ops.abi3.so")
    torch.ops.load_library(os.environ["SGLANG_OPS"])
    op = torch.ops.sgl_kernel.merge_state_v2.default
    return lambda o: op(o.a, o.a_lse, o.b, o.b_lse, o.out, o.out_lse)


def _triton() -> Callable[[Operands], Any]:
    from jitkern.benches import triton_merge

    return lambda o: triton_merge.merge(o.out, o.out_lse, o.a, o.a_lse, o.b, o.b_lse)


def _flashinfer() -> Callable[[Operands], Any]:
    import flashinfer

    return lambda o: flashinfer.merge_state(o.a, o.a_lse, o.b, o.b_lse)


def _compiled() -> Callable[[Operands], Any]:
    import torch._dynamo

    # One compilation for each dtype and a few for special sizes. Behind the limit torch would run the formula eagerly,
    # and with fullgraph it says so instead.
    torch._dynamo.config.recompile_limit = 64
    compiled = torch.compile(eager, dynamic=True, fullgraph=True)
    return lambda o: compiled(o)


MAKERS: dict[str, Callable[[], Callable[[Operands], Any]]] = {
    "jitkern": _jitkern,
    "sglang": _sglang,
    "triton": _triton,
    "eager": lambda: eager,
    "compile": _compiled,
    "flashinfer": _flashinfer,
}
