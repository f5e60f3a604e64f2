"""MLADecode under CUDA graphs, with pads, dummies and poison: failures that serving engines have had, one by one."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch

from jitkern.errors import ArgumentError, CaptureError
from jitkern.ops.mla import MLADecode
from jitkern.ops.mla_plan import Tuning
from tests.mla_oracle import Step, assert_decoded, make_step, reference
from tests.mla_serving import Engine

HEADS = [16, 40]


def decoder(step: Step, capacity: int | None = None, **more: Any) -> MLADecode:
    batch, q_len, heads, d = step.q.shape
    return MLADecode(
        capacity or batch, heads, step.k_cache.shape[2], q_len, step.q.dtype, "cuda", d, 512, step.page_size, **more
    )


class Captured:
    """Plan and run of one object in one graph, over the operands of a step."""

    def __init__(self, step: Step, mla: MLADecode, count: torch.Tensor | None = None, plan_inside: bool = True) -> None:
        batch, q_len, heads, _ = step.q.shape
        self.step, self.mla, self.count = step, mla, count
        self.out = torch.empty(batch, q_len, heads, 512, dtype=step.q.dtype, device="cuda")
        self.lse = torch.empty(batch, heads, q_len, device="cuda")
        self.graph = torch.cuda.CUDAGraph()
        mla.plan(step.cache_seqlens, count)
        torch.cuda.synchronize()
        with torch.cuda.graph(self.graph):
            if plan_inside:
                mla.plan(step.cache_seqlens, count)
            mla.run(*step.operands(), causal=True, out=self.out, lse=self.lse)

    def poison(self) -> None:
        for tensor in (self.out, self.lse, self.mla._partial_out, self.mla._partial_lse):
            tensor.fill_(math.nan)
        self.mla._plan.storage.fill_(0x7F7F7F7F)

    def replay(self) -> tuple[torch.Tensor, torch.Tensor]:
        self.graph.replay()
        return self.out, self.lse


def step_of(lengths: list[int], heads: int, q_len: int = 1, seed: int = 0) -> tuple[Step, Step]:
    """A step at these lengths, and the same for an oracle that must not see later changes of the lengths."""
    step = make_step(lengths, heads, q_len=q_len, device="cuda", seed=seed)
    return step, Step(step.q, step.k_cache, step.block_table, step.cache_seqlens.clone())


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("pdl", [False, True])
def test_captured_at_length_one_and_replayed_at_every_length(heads: int, pdl: bool) -> None:
    step, truth = step_of([4096, 700, 64, 2500], heads)
    step.cache_seqlens.fill_(1)
    captured = Captured(step, decoder(step, pdl=pdl))
    for lengths in (
        [1, 1, 1, 1],
        [2, 64, 63, 65],
        [4096, 700, 64, 2500],
        [129, 1, 0, 2048],
        [0, 0, 0, 0],
        [4096, 0, 0, 0],
    ):
        truth.cache_seqlens.copy_(torch.tensor(lengths))
        step.cache_seqlens.copy_(truth.cache_seqlens)
        captured.poison()
        assert_decoded(*captured.replay(), reference(truth, True))


@pytest.mark.parametrize("heads", HEADS)
def test_one_graph_of_the_capacity_serves_every_real_count(heads: int) -> None:
    capacity = 64
    lengths = [(37 * i) % 900 + 1 for i in range(capacity)]
    step, truth = step_of(lengths, heads)
    count = torch.tensor([capacity], dtype=torch.int32, device="cuda")
    captured = Captured(step, decoder(step), count)
    expected = reference(truth, True)
    for real in (64, 0, 1, 5, 17, 63, 33, 2):
        count.fill_(real)
        captured.poison()
        out, lse = captured.replay()
        assert_decoded(out[:real], lse[:real], (expected[0][:real], expected[1][:real]))
        assert (out[real:] == 0).all()
        assert (lse[real:] == math.inf).all()


def test_plan_refreshed_in_place_before_replay() -> None:
    step, truth = step_of([3000, 10, 500], 16)
    mla = decoder(step)
    captured = Captured(step, mla, plan_inside=False)
    for lengths in ([3000, 10, 500], [1, 1, 1], [0, 2999, 64]):
        truth.cache_seqlens.copy_(torch.tensor(lengths).clamp_max(torch.tensor([3000, 10, 500])))
        step.cache_seqlens.copy_(truth.cache_seqlens)
        captured.poison()
        mla.plan(step.cache_seqlens)
        assert_decoded(*captured.replay(), reference(truth, True))


def test_eager_and_replay_give_the_same_bits() -> None:
    step, _ = step_of([4000, 100, 0, 900], 16, 2)
    captured = Captured(step, decoder(step))
    first = [t.clone() for t in captured.replay()]
    for _ in range(20):
        captured.poison()
        assert all(torch.equal(a, b) for a, b in zip(first, captured.replay(), strict=True))
    eager = decoder(step)
    eager.plan(step.cache_seqlens)
    assert all(torch.equal(a, b) for a, b in zip(first, eager.run(*step.operands(), causal=True), strict=True))


@pytest.mark.parametrize("q_len", [2, 3, 4])
def test_causal_with_lengths_below_the_query_length(q_len: int) -> None:
    step, truth = step_of([1, q_len - 1, q_len, 500], 16, q_len)
    captured = Captured(step, decoder(step))
    captured.poison()
    assert_decoded(*captured.replay(), reference(truth, True))


def test_two_objects_in_alternating_graphs() -> None:
    steps = [step_of([2000, 30], 16, seed=1), step_of([50, 60, 3000], 40, seed=2)]
    graphs = [Captured(step, decoder(step)) for step, _ in steps]
    expected = [reference(truth, True) for _, truth in steps]
    for i in (0, 1, 1, 0, 1, 0):
        assert_decoded(*graphs[i].replay(), expected[i])


def test_a_second_plan_of_one_object_is_noticed() -> None:
    step, _ = step_of([100, 200], 16)
    mla = decoder(step)
    first = mla.plan(step.cache_seqlens)
    mla.plan(step.cache_seqlens)
    with pytest.raises(ArgumentError, match="another plan"):
        mla.run(*step.operands(), plan=first)


def test_no_allocation_and_no_synchronisation() -> None:
    step, _ = step_of([100, 2000], 16)
    mla = decoder(step)
    out = torch.empty(2, 1, 16, 512, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(2, 16, 1, device="cuda")
    mla.plan(step.cache_seqlens)
    mla.run(*step.operands(), out=out, lse=lse)
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            mla.plan(step.cache_seqlens)
            mla.run(*step.operands(), out=out, lse=lse)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_a_variant_that_is_not_ready_is_refused_during_capture() -> None:
    step, truth = step_of([100, 200], 16)
    mla = decoder(step)
    mla.plan(step.cache_seqlens)
    odd = torch.empty(2, 1, 16, 577, dtype=torch.bfloat16, device="cuda")[..., :576]
    odd.copy_(step.q)
    strided = Step(odd, step.k_cache, step.block_table, step.cache_seqlens)  # needs narrower packs
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        graph.capture_begin()
        out = torch.empty(2, 1, 16, 512, dtype=torch.bfloat16, device="cuda")
        lse = torch.empty(2, 16, 1, device="cuda")
        with pytest.raises(CaptureError, match="before the capture"):
            mla.run(*strided.operands(), out=out, lse=lse)
        mla.run(*step.operands(), out=out, lse=lse)  # the capture is still good
        graph.capture_end()
    graph.replay()
    assert_decoded(out, lse, reference(truth))
    assert_decoded(*mla.run(*strided.operands()), reference(truth))


def test_a_graph_holds_three_kernels_and_nothing_else() -> None:
    step, _ = step_of([100, 2000], 16)
    captured = Captured(step, decoder(step))
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA], acc_events=True) as profile:
        captured.replay()
        torch.cuda.synchronize()
    names = [e.name for e in profile.events() if e.device_type.name == "CUDA"]
    assert len(names) == 3, names
    assert all("jitkern_mla" in name for name in names), names


def test_capture_on_one_stream_replay_on_another() -> None:
    step, truth = step_of([100, 2000], 16)
    captured = Captured(step, decoder(step))
    lengths = torch.tensor([77, 1999], dtype=torch.int32, device="cuda")
    truth.cache_seqlens.copy_(lengths)
    writer, other = torch.cuda.Stream(), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(writer):
        torch.cuda._sleep(2_000_000)
        step.cache_seqlens.copy_(lengths)
    other.wait_stream(writer)
    with torch.cuda.stream(other):
        result = captured.replay()
    torch.cuda.synchronize()
    assert_decoded(*result, reference(truth, True))


def test_thousand_replays_behind_kernels_that_end_late() -> None:
    step, truth = step_of([900, 65, 0, 2000], 16)
    captured = Captured(step, decoder(step, pdl=True))
    choices = [
        torch.tensor(x, dtype=torch.int32, device="cuda") for x in ([900, 65, 0, 2000], [1, 0, 0, 64], [64, 1, 0, 1999])
    ]
    expected = []
    for lengths in choices:
        truth.cache_seqlens.copy_(lengths)
        step.cache_seqlens.copy_(lengths)
        expected.append([t.clone() for t in captured.replay()])
        assert_decoded(*captured.replay(), reference(truth, True))
    wrong = torch.zeros(1, dtype=torch.int64, device="cuda")
    for i in range(1000):
        step.cache_seqlens.copy_(choices[i % 3])
        for got, want in zip(captured.replay(), expected[i % 3], strict=True):
            wrong += (got != want).sum()
    assert wrong.item() == 0


@pytest.mark.parametrize(("min_blocks", "parts"), [(64, 1), (16, 4), (1, 128), (1, 132)])
def test_forced_numbers_of_splits(min_blocks: int, parts: int) -> None:
    step, truth = step_of([4096, 130], 16)
    mla = decoder(step, num_parts=parts, tuning=type("Chosen", (Tuning,), {"min_blocks": min_blocks}))
    mla.plan(step.cache_seqlens)
    assert_decoded(*mla.run(*step.operands()), reference(truth))


def test_churning_the_allocator_between_replays() -> None:
    step, truth = step_of([4000, 100], 16)
    captured = Captured(step, decoder(step))
    expected = reference(truth, True)
    for n in range(5):
        junk = [torch.full((1 << 20,), math.nan, device="cuda") for _ in range(8)]
        captured.poison()
        assert_decoded(*captured.replay(), expected)
        del junk
        if n == 2:
            torch.cuda.empty_cache()


@pytest.mark.parametrize(("capacity", "heads", "q_len"), [(16, 16, 1), (32, 8, 2)])
def test_serving_loop_with_graphs_of_several_sizes(capacity: int, heads: int, q_len: int) -> None:
    engine = Engine(capacity, heads, q_len, page_size=64, pages=200, columns=8, device="cuda")
    step = engine.step
    mla = MLADecode(capacity, heads, 1, q_len, device="cuda", page_size=64)
    out = torch.empty(capacity, q_len, heads, 512, dtype=torch.bfloat16, device="cuda")
    lse = torch.empty(capacity, heads, q_len, device="cuda")
    graphs = {}
    for rows in (capacity, capacity // 2, 4):
        views = (step.q[:rows], step.k_cache, step.block_table[:rows], step.cache_seqlens[:rows])
        graphs[rows] = torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graphs[rows]):
            mla.plan(step.cache_seqlens[:rows], engine.count)
            mla.run(*views, causal=True, out=out[:rows], lse=lse[:rows])
    for i in range(500):
        engine.advance()
        rows = min(n for n in graphs if n >= len(engine.requests))
        out.fill_(math.nan)
        lse.fill_(math.nan)
        graphs[rows].replay()
        if i % 5 == 0:  # the oracle is what takes the time
            assert_decoded(out[:rows], lse[:rows], reference(engine.truth(rows), True))
        else:
            assert out[:rows].isfinite().all()
            assert (lse[len(engine.requests) : rows] == math.inf).all()


def test_page_offsets_beyond_32_bits() -> None:
    pages = 60_000  # x 64 x 576 elements: 2.2e9
    cache = torch.zeros(pages, 64, 1, 576, dtype=torch.bfloat16, device="cuda")
    small, truth = step_of([64, 130], 16)
    for i, length in enumerate(small.lengths):
        for k in range(-(-length // 64)):
            page = int(small.block_table[i, k])
            small.block_table[i, k] = pages - 1 - page
            cache[pages - 1 - page] = small.k_cache[page]
    expected = reference(Step(truth.q, cache, small.block_table, truth.cache_seqlens))
    big = Step(small.q, cache, small.block_table, small.cache_seqlens)
    mla = decoder(big)
    mla.plan(big.cache_seqlens)
    assert_decoded(*mla.run(*big.operands()), expected)
