"""The plan: what every plan must satisfy, and FlashMLA's own schedule, in Python, against its test vectors."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from jitkern.ops import mla_geometry
from jitkern.ops.mla_plan import Plan, Tuning

BLOCK = 64


def blocks_of(length: int) -> int:
    return -(-max(length, 0) // BLOCK)


# ---- FlashMLA's schedule, for its numbers (ours cuts differently)


def flashmla_schedule(lengths: list[int], parts: int, overhead: int = 5) -> tuple[int, list[int], int]:
    """(budget, prefix sums of the splits, idle parts), walked request by request as FlashMLA does."""
    blocks = [max(1, blocks_of(n)) for n in lengths]
    budget = -(-sum(n + overhead for n in blocks) // parts) + overhead
    prefix, request, block, split, idle = [0], 0, 0, 0, 0
    for _ in range(parts):
        left = budget
        idle += request == len(blocks)
        while request < len(blocks):
            rest = blocks[request] - block
            if rest + overhead <= left:
                left -= rest + overhead
                prefix.append(prefix[-1] + split + 1)
                request, block, split = request + 1, 0, 0
                continue
            if left > overhead:
                block += left - overhead
                split += 1
            break
    assert request == len(blocks), "the budget must be enough"
    return budget, prefix, idle


@pytest.mark.parametrize(
    ("lengths", "parts", "budget", "prefix", "idle"),
    [
        ([64] * 3, 4, 10, [0, 1, 2, 3], 1),
        ([0] * 4, 8, 8, [0, 1, 2, 3, 4], 4),
        ([1000], 4, 11, [0, 3], 1),
        ([1000], 132, 6, [0, 16], 116),
        ([4096], 132, 6, [0, 64], 68),
        ([4641, 45118, 1730, 1696], 132, 12, [0, 11, 112, 116, 120], 12),
        ([100, 5000, 0, 64], 6, 23, [0, 1, 6, 7, 8], None),
        ([4096] * 128, 66, 139, list(range(129)), 2),
        ([4096] * 128, 132, 72, list(range(129)), 4),
    ],
)
def test_flashmla_schedule_vectors(
    lengths: list[int], parts: int, budget: int, prefix: list[int], idle: int | None
) -> None:
    got = flashmla_schedule(lengths, parts)
    assert got[:2] == (budget, prefix)
    assert idle is None or got[2] == idle


def test_flashmla_schedule_of_equal_long_requests() -> None:
    budget, prefix, idle = flashmla_schedule([8192] * 16, 132)
    assert (budget, idle) == (22, 8)
    assert prefix[:6] == [0, 8, 17, 26, 34, 42]
    assert prefix[-1] == 136


# ---- ours


def make_plan(
    lengths: list[int], parts: int, capacity: int | None = None, count: int | None = None, **tuning: int
) -> Plan:
    plan = Plan(len(lengths) if capacity is None else capacity, parts, "cpu", type("Chosen", (Tuning,), tuning))
    plan.load("cpu")
    plan.storage.fill_(0x7F7F7F7F)  # what a plan does not write, it must not need
    real = None if count is None else torch.tensor([count], dtype=torch.int32)
    plan.make(torch.tensor(lengths, dtype=torch.int32), real, parts, None)
    return plan


def check_plan(plan: Plan, lengths: list[int], count: int | None = None) -> list[int]:
    """Check everything that the decode and the merge rely on; returns each part's number of blocks."""
    real = len(lengths) if count is None else max(0, min(count, len(lengths)))
    blocks = [blocks_of(n) if i < real else 0 for i, n in enumerate(lengths)]
    pieces: list[list[tuple[int, int]]] = [[] for _ in blocks]
    order, rows, splits = plan.order.tolist(), plan.rows.tolist(), plan.num_splits.tolist()
    ranked = [i for i, n in enumerate(blocks) if n]
    assert order == ranked + [-1] * (len(order) - len(ranked))
    work, cursor = [], (0, 0)  # the next (rank, block) that nobody has
    for begin, end, begin_block, end_block, piece, begins_inside, ends_inside, rank in plan.records.tolist():
        if begin < 0:
            work.append(0)
            continue
        assert (rank, begin_block) == cursor, "parts follow each other without a gap or an overlap"
        assert order[rank] == begin
        assert begins_inside == (begin_block > 0)
        assert piece == len(pieces[begin])
        total, last = 0, ranked.index(end)
        assert last >= rank
        for r in range(rank, last + 1):
            first = begin_block if r == rank else 0
            stop = end_block if r == last else blocks[order[r]]
            assert 0 <= first < stop <= blocks[order[r]]
            pieces[order[r]].append((first, stop))
            total += stop - first
        assert ends_inside == (end_block < blocks[end])
        cursor = (last, end_block) if ends_inside else (last + 1, 0)
        work.append(total)
    assert cursor == (len(ranked), 0), "every block of every request is in a part"
    for mine in pieces:
        assert [first for first, _ in mine] == [0, *[stop for _, stop in mine]][: len(mine)]
    counts = [max(len(mine), 1) for mine in pieces[:real]]
    prefix = [sum(counts[:i]) for i in range(real + 1)]
    assert splits == prefix + [prefix[-1]] * (len(splits) - len(prefix))
    first_row, split = 0, []
    for i in range(plan.capacity):
        n = len(pieces[i]) if i < len(pieces) else 0
        assert rows[i] == (-2 if n == 0 else -1 if n == 1 else first_row)
        if n > 1:
            split.append([i, first_row, n, 0])
            first_row += n
    assert first_row <= mla_geometry.partial_rows(plan.parts), "partial results fit their buffer"
    got = plan.split.view(-1, 4).tolist()
    assert got == split + [[-1] * 4] * (len(got) - len(split))
    assert sum(counts) <= real + plan.parts - 1
    return work


LENGTHS = st.lists(
    st.one_of(st.sampled_from([0, 1, 63, 64, 65, 128, 4096, 131072]), st.integers(0, 70_000)), min_size=0, max_size=40
)


@settings(max_examples=300)
@given(
    LENGTHS,
    st.integers(1, 140),
    st.integers(0, 5),
    st.one_of(st.none(), st.integers(-1, 45)),
    st.integers(1, 6),
    st.integers(0, 6),
    st.integers(0, 5),
    st.sampled_from([0, 25, 100, 10_000]),
)
def test_every_plan_covers_every_block_once(
    lengths: list[int], parts: int, spare: int, count: int | None, min_blocks: int, crumb: int, cost: int, slack: int
) -> None:
    tuning = {"min_blocks": min_blocks, "crumb": crumb, "request_cost": cost, "slack": slack, "split_cost": cost}
    check_plan(make_plan(lengths, parts, len(lengths) + spare, count, **tuning), lengths, count)


@settings(max_examples=40)
@given(st.integers(100, 3000), st.integers(1, 300), st.integers(0, 2**31), st.sampled_from([0, 25]))
def test_large_batches(batch: int, parts: int, seed: int, slack: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    lengths = (torch.rand(batch, generator=generator) ** 3 * 20_000 - 500).clamp_min(0).int().tolist()
    work = check_plan(make_plan(lengths, parts, slack=slack, split_cost=0), lengths)
    total = sum(blocks_of(n) for n in lengths)
    if slack == 0 and total > 100 * parts:
        assert max(work) <= total / parts * 1.1 + 40, "parts are level"


@pytest.mark.parametrize(
    ("lengths", "parts", "pieces"),
    [
        ([4096], 132, 64),  # one block each
        ([32768], 132, 128),  # four each: 512 blocks do not divide among more
        ([2048] * 64, 132, 128),
        ([4096] * 128, 132, 128),  # whole
        ([4096] * 132, 132, 132),
        ([1024] * 256, 132, 256),
        ([0] * 8, 132, 8),
        ([], 132, 0),
    ],
)
def test_equal_requests_are_cut_evenly(lengths: list[int], parts: int, pieces: int) -> None:
    plan = make_plan(lengths, parts)
    work = [n for n in check_plan(plan, lengths) if n]
    assert int(plan.num_splits[-1]) == pieces
    step = blocks_of(lengths[0]) if len(lengths) > parts else 1  # whole requests, or blocks
    assert max(work, default=0) - min(work, default=0) <= step


@settings(max_examples=150)
@given(st.data(), st.integers(1, 40), st.integers(0, 100), st.integers(1, 6), st.integers(1, 700))
def test_an_even_length_is_the_least_that_fits(
    data: st.DataObject, requests: int, spare: int, min_blocks: int, longest: int
) -> None:
    blocks = data.draw(st.lists(st.integers(1, longest), min_size=requests, max_size=requests))
    check_even_length(blocks, requests + spare, min_blocks)


def test_an_even_length_between_the_least_and_the_longest_is_found() -> None:
    check_even_length([8, 7, 7, 7, 7], 6, 1)  # the least is 6


def check_even_length(blocks: list[int], parts: int, min_blocks: int) -> None:
    plan = make_plan([n * BLOCK for n in blocks], parts, min_blocks=min_blocks, slack=1_000_000)
    check_plan(plan, [n * BLOCK for n in blocks])
    cuts = plan.num_splits.diff().tolist()
    least = max(min_blocks, -(-sum(blocks) // parts))
    while sum(-(-n // least) for n in blocks) > parts:
        least += 1
    lengths = range(least, least + least // 32 + 1)  # the search stops there
    assert any([-(-n // length) for n in blocks] == cuts for length in lengths), (blocks, parts, least, cuts)


def test_a_long_request_among_short_ones_is_shared() -> None:
    lengths = [100] * 100 + [131072]
    work = check_plan(make_plan(lengths, 132), lengths)
    assert max(work) <= 80  # 2,248 blocks; alone the long request would be 2,048


@settings(max_examples=60)
@given(
    st.lists(st.one_of(st.integers(2**30, 2**31 - 1), st.integers(0, 5000)), min_size=60, max_size=300),
    st.sampled_from([1, 2, 16, 66, 132, 1000]),
    st.integers(0, 6),
)
def test_lengths_that_nobody_has_still_make_a_plan(lengths: list[int], parts: int, cost: int) -> None:
    """Uninitialised lengths of pads, say: their sum is beyond an i32, and the other requests must not suffer."""
    most = (2**31 - 1) // len(lengths) - cost
    counted = [min(n, most * BLOCK) for n in lengths]  # the rest goes to the last piece, as if it had grown since
    check_plan(make_plan(lengths, parts, request_cost=cost), counted)


def test_nothing_is_left_of_an_earlier_plan() -> None:
    plan = make_plan([5000] * 8, 16, capacity=8)
    plan.make(torch.tensor([70], dtype=torch.int32), None, 4, None)
    check_plan(plan, [70])
    plan.make(torch.tensor([], dtype=torch.int32), None, 16, None)
    check_plan(plan, [])
    assert (plan.records[:, 0] == -1).all()
