"""500 steps of a serving loop on fixed buffers, every step compared by value."""

from __future__ import annotations

import math

import pytest
import torch

from jitkern.ops.mla import MLADecode
from tests.mla_oracle import assert_decoded, reference
from tests.mla_serving import Engine


@pytest.mark.usefixtures("one_thread")
@pytest.mark.parametrize(("q_len", "heads"), [(1, 3), (2, 2)])
def test_five_hundred_steps(q_len: int, heads: int) -> None:
    engine = Engine(capacity=6, heads=heads, q_len=q_len)
    mla = MLADecode(6, heads, 1, q_len, device="cpu", page_size=16, num_parts=5)
    out = torch.empty(6, q_len, heads, 512, dtype=torch.bfloat16)
    lse = torch.empty(6, heads, q_len)
    addresses = {t.data_ptr() for t in (mla.tile_scheduler_metadata, mla.num_splits, out, lse)}
    sizes, busy = set(), 0
    for _ in range(500):
        engine.advance()
        real = len(engine.requests)
        rows = next(n for n in (0, 1, 2, 4, 6) if n >= real)  # as graphs of a few sizes would have it
        sizes.add(rows)
        busy += real
        step = engine.step
        mla.plan(step.cache_seqlens[:rows], engine.count)
        out.fill_(math.nan)
        lse.fill_(math.nan)
        mla.run(
            *(step.q[:rows], step.k_cache, step.block_table[:rows], step.cache_seqlens[:rows]),
            causal=True,
            out=out[:rows],
            lse=lse[:rows],
        )
        assert_decoded(out[:rows], lse[:rows], reference(engine.truth(rows), True))
    assert sizes == {0, 1, 2, 4, 6}, "the walk must reach every size"
    assert busy > 1000
    assert addresses == {t.data_ptr() for t in (mla.tile_scheduler_metadata, mla.num_splits, out, lse)}
