"""MLADecode as torch ops: opcheck, and torch.compile without a graph break."""

from __future__ import annotations

import gc
import math

import pytest
import torch

import jitkern
from jitkern.errors import ArgumentError
from tests.mla_oracle import assert_decoded, make_step, reference


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def test_opcheck(device: str) -> None:
    step = make_step([100, 0, 65], 16, q_len=2, device=device)
    mla = jitkern.MLADecode(3, 16, 1, 2, device=device)
    number, storage = mla._number_in_graphs, mla._plan.storage
    plan = (storage, step.cache_seqlens, None, 2, number)
    torch.library.opcheck(torch.ops.jitkern.mla_plan.default, plan)
    torch.ops.jitkern.mla_plan(*plan)
    run = (storage, *step.operands(), None, None, None, True, math.e, number)
    torch.library.opcheck(torch.ops.jitkern.mla_run.default, run)


def test_compiled_without_a_break(device: str) -> None:
    step = make_step([100, 0, 65], 16, q_len=2, device=device)
    mla = jitkern.MLADecode(3, 16, 1, 2, device=device)
    out = torch.full((3, 2, 16, 512), math.nan, dtype=torch.bfloat16, device=device)

    def layer(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mla.plan(step.cache_seqlens)
        first, lse = mla.run(q * 1, step.k_cache, step.block_table, step.cache_seqlens, causal=True)
        mla.run(q, step.k_cache, step.block_table, step.cache_seqlens, causal=True, out=out)
        return first, lse

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for lengths in ([100, 0, 65], [40, 3, 1]):
        step.cache_seqlens.copy_(torch.tensor([min(a, b) for a, b in zip(lengths, step.lengths, strict=True)]))
        first, lse = compiled(step.q)
        assert_decoded(first, lse, reference(step, True))
        assert torch.equal(out, first)


def test_an_object_that_is_gone_is_named() -> None:
    mla = jitkern.MLADecode(1, 16, device="cpu")
    number, storage = mla._number_in_graphs, mla._plan.storage
    del mla
    gc.collect()
    with pytest.raises(ArgumentError, match="keep the object alive"):
        torch.ops.jitkern.mla_plan(storage, torch.zeros(1, dtype=torch.int32), None, 1, number)
