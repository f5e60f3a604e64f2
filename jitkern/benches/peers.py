"""The pairwise merges that are compared, and their operands."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch

Shape = tuple[int, int, int, str]


def traffic(shape: Shape) -> int:
    """Bytes that a pairwise merge has to move."""
    n, h, d, name = shape
    return 3 * n * h * d * int(getattr(torch, name).itemsize) + 12 * n * h


class Operands:
    """One set of buffers; L lies in memory as [n, h], which every peer wants."""

    def __init__(self, shape: Shape, device: str = "cuda") -> None:
        n, h, d, name = shape
        self.a, self.b = (torch.randn(n, h, d, device=device).to(getattr(torch, name)) for _ in range(2))
        self.a_lse, self.b_lse = (torch.randn(n, h, device=device) for _ in range(2))
        self.out, self.out_lse = torch.empty_like(self.a), torch.empty_like(self.a_lse)


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
    compiled = torch.compile(eager, dynamic=True)
    return lambda o: compiled(o)


MAKERS: dict[str, Callable[[], Callable[[Operands], Any]]] = {
    "jitkern": _jitkern,
    "sglang": _sglang,
    "triton": _triton,
    "eager": lambda: eager,
    "compile": _compiled,
    "flashinfer": _flashinfer,
}
