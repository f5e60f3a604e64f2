"""What the MLA benchmark decodes: shapes, operands, bytes and operations, and float64 to hold O against."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch

from jitkern.benches import common

PAGE, D, DV = 64, 576, 512
SCALE = D**-0.5
CODE_SCALE = 2.0**-6  # of the e4m3 codes that every key of the benchmark can be written as, exactly


class Shape(NamedTuple):
    """One row of the benchmark."""

    batch: int
    keys: int
    heads: int
    q_len: int


BASELINE = [
    Shape(1, 4096, 16, 1),
    Shape(1, 32768, 16, 1),
    Shape(8, 4096, 16, 1),
    Shape(16, 1024, 16, 1),
    Shape(32, 2048, 16, 1),
    Shape(64, 2048, 16, 1),
    Shape(128, 1024, 16, 1),
    Shape(256, 1024, 16, 1),
    Shape(128, 4096, 16, 1),
    Shape(128, 8192, 16, 1),
    Shape(132, 4096, 16, 2),
    Shape(128, 1024, 16, 4),
    Shape(128, 4096, 64, 1),
    Shape(1, 4096, 128, 1),
    Shape(1, 32768, 128, 1),
    Shape(8, 4096, 128, 1),
    Shape(32, 4096, 128, 1),
    Shape(128, 4096, 128, 1),
    Shape(132, 4096, 128, 2),
]
GRID = [
    Shape(batch, keys, heads, q_len)
    for batch in (1, 4, 16, 64, 128, 256)
    for keys in (512, 2048, 8192, 32768)
    for heads in (16, 128)
    for q_len in (1, 2)
    if batch * keys <= 1 << 20
]
ON_CPU = [Shape(1, 512, 16, 1), Shape(4, 256, 16, 1), Shape(4, 256, 16, 2), Shape(2, 256, 64, 1)]


def traffic(shape: Shape, token_bytes: int = 2 * D) -> int:
    """Bytes that a decode has to move: every key once, the queries, the results."""
    batch, keys, heads, q_len = shape
    return batch * keys * token_bytes + batch * q_len * heads * (D + DV) * 2


def operations(shape: Shape) -> int:
    """Floating point operations of both matrix products."""
    batch, keys, heads, q_len = shape
    return 2 * batch * keys * heads * q_len * (D + DV)


@dataclass
class Problem:
    """Operands of one shape; several block tables and queries over one cache take turns, so that the L2 is cold."""

    shape: Shape
    q: list[torch.Tensor]
    cache: torch.Tensor
    tables: list[torch.Tensor]
    lengths: torch.Tensor
    out: list[torch.Tensor]
    lse: list[torch.Tensor]

    @property
    def turns(self) -> int:
        """How many sets there are."""
        return len(self.q)

    @property
    def causal(self) -> bool:
        """A single query token sees every key anyway."""
        return self.shape.q_len > 1


def make(shape: Shape, device: str) -> Problem:
    """Random operands on pages in random order."""
    batch, keys, heads, q_len = shape
    pages = batch * -(-keys // PAGE)
    turns = common.sets_for(pages * PAGE * D * 2) if device == "cuda" else 1
    bf16 = {"device": device, "dtype": torch.bfloat16}
    cache = torch.randn(turns * pages, PAGE, 1, D, **bf16) / 10  # type: ignore[call-overload]
    cache = codes_of(cache).to(torch.bfloat16) * CODE_SCALE  # so that one reference serves caches of every kind
    order = torch.randperm(turns * pages, device=device, dtype=torch.int32).view(turns, batch, -1)
    return Problem(
        shape,
        [torch.randn(batch, q_len, heads, D, **bf16) for _ in range(turns)],  # type: ignore[call-overload]
        cache,
        [order[i].contiguous() for i in range(turns)],
        torch.full((batch,), keys, dtype=torch.int32, device=device),
        [torch.empty(batch, q_len, heads, DV, **bf16) for _ in range(turns)],  # type: ignore[call-overload]
        [torch.empty(batch, heads, q_len, device=device) for _ in range(turns)],
    )


def codes_of(cache: torch.Tensor) -> torch.Tensor:
    """The cache as e4m3, all times ``CODE_SCALE``."""
    return (cache / CODE_SCALE).to(torch.float8_e4m3fn)


def tokens_of(cache: torch.Tensor) -> torch.Tensor:
    """The cache as tokens of 656 bytes."""
    scales = torch.full((*cache.shape[:-1], 4), CODE_SCALE, device=cache.device)
    parts = (codes_of(cache[..., :DV]), scales, cache[..., DV:].contiguous())
    return torch.cat([part.view(torch.uint8) for part in parts], -1)


def worst_error(problem: Problem, turn: int, out: torch.Tensor, requests: Sequence[int]) -> float:
    """The largest relative distance of a request's O from float64, over some requests; inf where O has NaN."""
    worst = 0.0
    batch, _, heads, q_len = problem.shape
    out = out.view(batch, q_len, heads, DV)  # some libraries give [tokens, heads, DV]
    for i in requests:
        length = int(problem.lengths[i])
        keys = problem.cache[problem.tables[turn][i].long()].view(-1, D)[:length].double()
        scores = torch.einsum("thd,kd->thk", problem.q[turn][i].double(), keys) * SCALE
        if problem.causal:
            for t in range(q_len):
                scores[t, :, length - (q_len - 1 - t) :] = -torch.inf
        want = torch.softmax(scores, -1) @ keys[:, :DV]
        error = (out[i].double() - want).norm() / want.norm()
        worst = max(worst, float(error.nan_to_num(torch.inf)))
    return worst
