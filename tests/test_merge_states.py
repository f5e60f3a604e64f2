"""merge_states against the float64 oracle: stacked, listed and ragged partials, counts from the device, sinks."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import jitkern
from tests.merge_oracle import unit
from tests.states_oracle import Partials, assert_lse, assert_states, merge, random_partials
from tests.test_merge_contract import DTYPES, device_of, same_bits

COUNTS = [1, 2, 3, 5, 17, 64, 256]
D = 64  # one head size throughout: each further one is a variant to compile


def run(p: Partials, backend: str, how: str = "stacked", **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    if how == "ragged":
        counts = [p.v.shape[1]] * p.v.shape[0] if p.valid is None else p.valid.clamp(0, p.v.shape[1]).tolist()
        v, s, indptr = p.ragged(counts)
        return jitkern.merge_states(v, s, indptr=indptr, backend=backend, **more)
    operands: tuple[Any, Any] = p.lists() if how == "list" else (p.v, p.s)
    return jitkern.merge_states(*operands, num_valid=p.valid, backend=backend, **more)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", COUNTS)
def test_any_number_in_every_arrangement(backend: str, count: int, dtype: torch.dtype) -> None:
    if device_of(backend) == "cpu" and dtype != torch.bfloat16 and count in (3, 17, 64):
        dtype = torch.bfloat16  # their lists would be variants that only the type tells apart
    p = random_partials(5, count, 3, D, dtype, device_of(backend))
    out, lse = run(p, backend)
    assert_states(out, lse, p)
    for how in ("list", "ragged"):
        other, other_lse = run(p, backend, how)
        if count == 2 and how == "ragged":  # two and nothing else are a pairwise merge's
            assert_states(other, other_lse, p)
            continue
        assert same_bits(other, out), how
        assert same_bits(other_lse, lse), how


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("how", ["stacked", "list"])
@pytest.mark.parametrize("base", ["e", "2", ("2", "2", "e")])
def test_two_are_a_pairwise_merge(backend: str, how: str, dtype: torch.dtype, base: Any) -> None:
    p = random_partials(9, 2, 3, D, dtype, device_of(backend))
    (a, b), (a_lse, b_lse) = p.lists()
    want, want_lse = jitkern.merge_state(a, a_lse, b, b_lse, lse_base=base, backend=backend)
    for _ in range(3):  # new, known, remembered
        out, lse = run(p, backend, how, lse_base=base)
        assert same_bits(out, want)
        assert same_bits(lse, want_lse)
    given = (a.clone(), a_lse.clone())
    operands: Any = ([given[0], b], [given[1], b_lse])
    jitkern.merge_states(*operands, out=given[0], out_lse=given[1], lse_base=base, backend=backend)
    assert same_bits(given[0], want)
    assert same_bits(given[1], want_lse)


def test_no_partials_at_all(backend: str) -> None:
    v, s = torch.zeros(4, 0, 3, D, device=device_of(backend)), torch.zeros(4, 0, 3, device=device_of(backend))
    out, lse = jitkern.merge_states(v, s, backend=backend)
    assert (out == 0).all()
    assert not torch.signbit(out).any()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("how", ["stacked", "list", "ragged"])
@pytest.mark.parametrize("sign", [math.inf, -math.inf])
def test_all_empty_gives_zero_and_minus_infinity(backend: str, sign: float, how: str) -> None:
    p = random_partials(4, 3, 2, D, torch.float32, device_of(backend), empty=0)
    p.s[1:3], p.v[1:3] = sign, math.nan
    out, lse = run(p, backend, how)
    assert (out[1:3] == 0).all()
    assert not torch.signbit(out[1:3]).any()
    assert (lse[1:3] == -math.inf).all()
    assert_states(out, lse, p)


@pytest.mark.parametrize("how", ["stacked", "list"])
@pytest.mark.parametrize("count", [1, 5, 17])
def test_one_live_partial_comes_out_bit_for_bit(backend: str, count: int, how: str) -> None:
    p = random_partials(count, count, 2, D, torch.bfloat16, device_of(backend), empty=0)
    p.v[..., :4] = torch.tensor([-0.0, 1e-40, math.nan, math.inf]).to(torch.bfloat16)
    p.s[..., 0] = 1e-42
    live = p.clone()
    for t in range(count):  # token t keeps partial t
        gone = torch.arange(count) != t
        p.v[t, gone] = math.nan
        p.s[t, gone] = math.inf if t % 2 else -math.inf
    out, lse = run(p, backend, how)
    own = torch.arange(count)
    assert same_bits(out, live.v[own, own])
    assert same_bits(lse, live.s[own, own])


def test_only_the_valid_partials_are_read(backend: str) -> None:
    """What lies behind a token's count is NaN, O and L: any use of it would show."""
    counts = torch.tensor([0, 1, 2, 5, 8, 9, 1000, -1, -(2**31), 2**31 - 1], dtype=torch.int32)
    p = random_partials(len(counts), 8, 3, D, torch.bfloat16, empty=0)
    for t, count in enumerate(counts.clamp(0, 8).tolist()):
        p.v[t, count:], p.s[t, count:] = math.nan, math.nan
    p = Partials(p.v, p.s, counts).to(device_of(backend))
    out, lse = run(p, backend)
    assert not out.isnan().any()
    assert (lse[[0, 7, 8]] == -math.inf).all()
    assert_states(out, lse, p)
    other, other_lse = run(p, backend, "list")
    assert same_bits(other, out)
    assert same_bits(other_lse, lse)
    other, other_lse = run(p, backend, "ragged")
    assert same_bits(other, out)
    assert same_bits(other_lse, lse)


def test_a_count_on_the_device_is_read_anew_at_every_call(backend: str) -> None:
    p = random_partials(3, 4, 2, D, torch.float32, device_of(backend), empty=0)
    for counts in ([4, 4, 4], [1, 2, 3], [0, 4, 1]):
        p.valid = torch.tensor(counts, dtype=torch.int32, device=p.v.device)
        assert_states(*run(p, backend), p)


def test_ragged_rows_with_none_and_many(backend: str) -> None:
    counts = [0, 1, 2, 33, 0, 0, 7, 1]
    p = random_partials(len(counts), 33, 3, D, torch.float16, device_of(backend))
    p.valid = torch.tensor(counts, dtype=torch.int32, device=p.v.device)
    out, lse = run(p, backend, "ragged")
    assert (out[[0, 4, 5]] == 0).all()
    assert_states(out, lse, p)


def test_indptr_out_of_range_reads_nothing_outside(backend: str) -> None:
    p = random_partials(1, 6, 2, D, torch.float32, device_of(backend), empty=0)
    indptr = torch.tensor([-5, 2, 2, 9, 3, 100], dtype=torch.int32, device=p.v.device)
    out, lse = jitkern.merge_states(p.v[0], p.s[0], indptr=indptr, backend=backend)
    for t, (first, end) in enumerate([(0, 2), (2, 2), (2, 6), (6, 6), (3, 6)]):
        part = Partials(p.v[:, first:end], p.s[:, first:end])
        assert_states(out[t : t + 1], lse[t : t + 1], part)


@pytest.mark.parametrize("in_lse", [True, False])
@pytest.mark.parametrize("sink", [0.7, -40.0, 60.0, -math.inf, math.inf, -1e30])
def test_a_sink_counts_once(backend: str, sink: float, in_lse: bool) -> None:
    p = random_partials(6, 3, 4, D, torch.float32, device_of(backend))
    p.s[4], p.v[4] = -math.inf, math.nan
    sinks = torch.full((4,), sink, device=p.v.device)
    sinks[3] = 0.25
    for how in ("stacked", "list", "ragged"):
        out, lse = run(p, backend, how, sink=sinks, sink_in_lse=in_lse)
        assert_states(out, lse, p, sink=sinks, sink_in_lse=in_lse)
        assert (out[4] == 0).all()
        assert torch.equal(lse[4], sinks if in_lse else torch.full_like(sinks, -math.inf))
    if sink == math.inf:
        assert (out[:, :3] == 0).all()


@pytest.mark.parametrize("in_lse", [True, False])
def test_a_sink_of_infinity_takes_nan_too(backend: str, in_lse: bool) -> None:
    p = random_partials(3, 5, 2, D, torch.float32, device_of(backend), empty=0)
    p.s[1, 2, 0], p.v[2, 4, 0] = math.nan, math.nan
    sinks = torch.tensor([math.inf, -math.inf], device=p.v.device)
    out, lse = run(p, backend, sink=sinks, sink_in_lse=in_lse)
    assert (out[:, 0] == 0).all()
    assert (lse[:, 0] == math.inf).all() if in_lse else lse[:, 0].isnan().tolist() == [False, True, False]
    assert out[:, 1].isfinite().all()


def test_a_sink_of_minus_infinity_changes_no_bit(backend: str) -> None:
    p = random_partials(6, 3, 4, D, torch.bfloat16, device_of(backend), empty=0.5)
    none = torch.full((4,), -math.inf, device=p.v.device)
    for out, other in zip(run(p, backend), run(p, backend, sink=none), strict=True):
        assert same_bits(out, other)


def test_a_sink_in_another_base(backend: str) -> None:
    """The sink is a natural logit whatever the base of L."""
    p = random_partials(6, 5, 4, D, torch.float32, device_of(backend))
    sinks = torch.tensor([0.7, -2.0, 3.0, 0.0], device=p.v.device)
    for in_lse in (True, False):
        out, lse = run(p, backend, lse_base=("2", "2", "10"), sink=sinks, sink_in_lse=in_lse)
        assert_states(out, lse, p, 2.0, 10.0, sinks, in_lse)


@pytest.mark.parametrize(("base", "out_base"), [("2", "2"), ("10", "e"), ("e", "2"), (3.5, 7)])
def test_any_base(backend: str, base: Any, out_base: Any) -> None:
    p = random_partials(9, 5, 3, D, torch.float32, device_of(backend))
    out, lse = run(p, backend, lse_base=(base, base, out_base))
    number, out_number = (math.e if x == "e" else float(x) for x in (base, out_base))
    assert_states(out, lse, p, number, out_number)


def test_the_largest_logarithms_stay_ordinary_numbers_in_another_base(backend: str) -> None:
    """3e38 in base e is more than float32 holds in base 2: it still outweighs everything."""
    p = random_partials(2, 6, 1, D, torch.float32, device_of(backend), empty=0)
    p.s[0, :, 0] = torch.tensor([5.0, 3e38, 200.0, 5.0, 6.0, 7.0])
    p.s[1, :, 0] = -3e38
    out, lse = run(p, backend, lse_base=("e", "e", "2"))
    assert torch.allclose(out[0], p.v[0, 1])
    assert torch.allclose(out[1], p.v[1].mean(0), atol=1e-6)
    assert lse.isfinite().all()


@pytest.mark.parametrize("position", [0, 2, 6])
def test_nan_in_lse_shows_and_stays_in_its_row(backend: str, position: int) -> None:
    p = random_partials(4, 7, 3, D, torch.float32, device_of(backend), empty=0)
    p.s[2, position, 1] = math.nan
    p.s[3, :, 0], p.s[3, position, 0] = -math.inf, math.nan  # alone, its O passes, as in a pair
    out, lse = run(p, backend)
    assert out[2, 1].isnan().all()
    assert lse[2, 1].isnan()
    assert lse[3, 0].isnan()
    assert same_bits(out[3, 0], p.v[3, position, 0])
    assert out.isnan().sum() == D
    assert lse.isnan().sum() == 2


def test_eight_partials_are_rounded_once_where_a_chain_rounds_seven_times(backend: str) -> None:
    p = random_partials(512, 8, 4, D, torch.bfloat16, device_of(backend), empty=0)
    p.v.add_(8)  # one binade, so that a unit is the same everywhere
    reference, _ = merge(p)
    chained = jitkern.merge_state(p.v[:, 0], p.s[:, 0], p.v[:, 1], p.s[:, 1], backend=backend)
    for i in range(2, 8):
        chained = jitkern.merge_state(*chained, p.v[:, i], p.s[:, i], backend=backend)
    off, chained_off = (
        ((x.cpu().double() - reference.cpu()).abs() / unit(reference.cpu(), torch.bfloat16)).max().item()
        for x in (run(p, backend)[0], chained[0])
    )
    assert off <= 0.501
    assert chained_off > 1


@pytest.mark.parametrize("count", [2, 17])
def test_a_row_does_not_depend_on_its_neighbours(backend: str, count: int) -> None:
    p = random_partials(130, count, 6, D, torch.bfloat16, device_of(backend))
    out, lse = run(p, backend)
    for t in (0, 64, 129):
        one, one_lse = run(Partials(p.v[t : t + 1], p.s[t : t + 1]), backend)
        assert same_bits(one[0], out[t])
        assert same_bits(one_lse[0], lse[t])


def test_merging_merged_states_is_associative(backend: str) -> None:
    """N-way of a split equals N-way of everything, up to rounding: the L that comes out is the L that goes in."""
    p = random_partials(40, 6, 3, D, torch.float32, device_of(backend))
    halves = [run(Partials(p.v[:, part], p.s[:, part]), backend) for part in (slice(0, 3), slice(3, 6))]
    out, lse = jitkern.merge_states([v for v, _ in halves], [s for _, s in halves], backend=backend)
    reference, reference_lse = merge(p.cpu())
    assert torch.allclose(out.cpu().double(), reference, atol=2e-6)
    assert_lse(lse, reference_lse)
