"""8-bit operands of merge_attn_states: every code, tie and special value, against torch's conversion and float64."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
import torch

import jitkern
from tests.merge_oracle import States, assert_merged, merge, random_states
from tests.states_oracle import WIDE
from tests.test_merge_contract import device_of, run, same_bits

D = 64
KINDS = (torch.float8_e4m3fn, torch.float8_e5m2)
LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}
INPUTS = (torch.float32, torch.float16, torch.bfloat16)


def every_code(kind: torch.dtype) -> torch.Tensor:
    return torch.arange(256).to(torch.uint8).view(kind)


def finite_values(kind: torch.dtype) -> torch.Tensor:
    """The magnitudes of the type in the order of their codes."""
    values = every_code(kind)[:128].to(WIDE)
    return values[values.isfinite()]


def nearest(x: torch.Tensor, kind: torch.dtype) -> torch.Tensor:
    """Codes by search in the table of values, in float64: nearest, ties to the even code, saturated, -0 kept."""
    table = finite_values(kind)
    magnitude = x.to(WIDE).abs().nan_to_num(0).contiguous()
    low = (torch.searchsorted(table, magnitude, right=True) - 1).clamp(0, len(table) - 1)
    high = (low + 1).clamp_max(len(table) - 1)
    below, above = magnitude - table[low], table[high] - magnitude
    upwards = (above < below) | ((above == below) & (high % 2 == 0))
    code = torch.where(upwards, high, low) | (torch.signbit(x.cpu()).long() << 7)
    return torch.where(x.isnan(), 0x7F, code).to(torch.uint8)


def hard_values(kind: torch.dtype) -> torch.Tensor:
    """All values, all midpoints and their neighbours in float32, what saturates, what underflows, what is no number."""
    table = finite_values(kind)
    middle = ((table[1:] + table[:-1]) / 2).float()
    exact = torch.cat([table.float(), middle])
    up, down = exact.nextafter(torch.tensor(math.inf)), exact.nextafter(torch.tensor(-math.inf))
    more = torch.tensor(
        [LARGEST[kind] * 1.03, LARGEST[kind] * 1.07, 1e5, 1e30, 3.4e38, math.inf, math.nan, 1e-45, 1e-30]
    )
    positive = torch.cat([exact, up, down, more])
    return torch.cat([positive, -positive])


def codes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8).cpu()


def equal_codes(x: torch.Tensor, expected: torch.Tensor) -> torch.Tensor:
    """Where the codes are the same, one NaN being as good as another."""
    return (codes(x) == expected.cpu()) | (x.float().cpu().isnan() & expected.cpu().view(x.dtype).float().isnan())


def scale_of(value: float, device: str, shape: tuple[int, ...] = (1,)) -> torch.Tensor:
    return torch.full(shape, value, device=device)


def rows_of(x: torch.Tensor, dtype: torch.dtype, device: str) -> States:
    """States of which both sides hold x, in rows of a head's size; L is 0."""
    x = torch.nn.functional.pad(x.to(dtype), (0, -len(x) % D)).view(-1, 1, D).to(device)
    zero = torch.zeros(1, x.shape[0], device=device)
    return States(x, zero, x.clone(), zero.clone())


@pytest.mark.parametrize("dtype", INPUTS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_code_tie_and_special_value(backend: str, kind: torch.dtype, dtype: torch.dtype) -> None:
    """By all ways through the kernel: a copied tail, either side empty, and a merge of equals, whose mean is exact."""
    states = rows_of(hard_values(kind), dtype, device_of(backend))
    x = states.a.cpu().float()
    expected = x.clamp(-LARGEST[kind], LARGEST[kind]).to(kind).view(torch.uint8)
    by_search = nearest(x.to(WIDE), kind)
    assert equal_codes(by_search.view(kind), expected).all(), "two references disagree"
    empty = torch.full_like(states.a_lse, -math.inf)
    garbage = torch.full_like(states.a, math.nan)
    ways = {
        "tail": (states, 0),
        "no prefix": (replace(states, a=garbage, a_lse=empty), None),
        "no suffix": (replace(states, b=garbage, b_lse=empty), None),
        "merge": (states, None),
    }
    for way, (given, k) in ways.items():
        for scale in (1.0, 2.0, 0.125):  # powers of two: the quotient is exact
            out = torch.empty_like(given.a, dtype=kind)
            scaled = States(given.a * scale, given.a_lse, given.b * scale, given.b_lse)
            comparable = (scaled.a if way == "no suffix" else scaled.b).cpu().float() / scale == x
            operands = (out, scaled.a, scaled.a_lse, scaled.b, scaled.b_lse, None, k)
            jitkern.merge_attn_states(*operands, scale_of(scale, out.device.type), backend=backend)
            # Half of a subnormal is not a float: a mean of those need not be exact, and is far below any code's tie.
            wrong = ~equal_codes(out, expected) & (comparable | x.isnan()) & (x.isnan() | (x.abs() > 1e-37) | (x == 0))
            assert not wrong.any(), (
                f"{way}, scale {scale}: {x[wrong][:4].tolist()} became {codes(out)[wrong][:4].tolist()}"
            )


@pytest.mark.parametrize("kind", KINDS)
def test_both_empty_gives_the_code_of_zero(backend: str, kind: torch.dtype) -> None:
    states = rows_of(hard_values(kind), torch.bfloat16, device_of(backend))
    states.a_lse.fill_(-math.inf), states.b_lse.fill_(math.inf)
    out, lse = torch.full_like(states.a, 3, dtype=kind), torch.zeros_like(states.a_lse)
    scale = scale_of(0.5, out.device.type)
    jitkern.merge_attn_states(out, states.a, states.a_lse, states.b, states.b_lse, lse, None, scale, backend=backend)
    assert (codes(out) == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("k", [None, 0, 13])
@pytest.mark.parametrize("shape", [(), (1,)])
@pytest.mark.parametrize("kind", KINDS)
def test_a_merge_is_rounded_to_the_nearest_code(
    backend: str, kind: torch.dtype, shape: tuple[int, ...], k: int | None
) -> None:
    """vLLM's scale of 0.05; where float32's error can reach a tie, either neighbour is right, nowhere else."""
    states = random_states(40, 3, D, torch.bfloat16, device_of(backend), disjoint=False)
    states.a.mul_(10), states.b.mul_(10)  # some beyond 448 * 0.05
    scale = torch.tensor(0.05).item()
    out, lse = torch.empty_like(states.a, dtype=kind), torch.empty_like(states.a_lse)
    given = (states.a, states.a_lse, states.b, states.b_lse, lse, k, scale_of(0.05, out.device.type, shape))
    jitkern.merge_attn_states(out, *given, backend=backend)
    reference, _ = merge(states, k)
    wanted = (reference / scale).clamp(-LARGEST[kind], LARGEST[kind])
    best = nearest(wanted, kind).view(kind).to(WIDE)
    sides = torch.maximum(states.a.cpu().to(WIDE).abs().nan_to_num(0), states.b.cpu().to(WIDE).abs().nan_to_num(0))
    error = 8 * 2**-24 * sides / scale
    got = out.cpu().to(WIDE)
    assert torch.equal(got.isnan(), reference.isnan())
    assert ((got - wanted).abs() <= (best - wanted).abs() + error)[~reference.isnan()].all()
    assert (got.abs() == LARGEST[kind]).any() == (kind == torch.float8_e4m3fn), "the scale is to saturate e4m3 only"
    plain, plain_lse = run(states, backend, k)
    assert same_bits(lse, plain_lse), "the scale is none of L's business"
    assert plain.dtype == torch.bfloat16


def test_the_scale_is_read_from_the_device_at_every_call(backend: str) -> None:
    states = rows_of(torch.full((D,), 8.0), torch.float16, device_of(backend))
    out = torch.empty_like(states.a, dtype=torch.float8_e4m3fn)
    scale = scale_of(1.0, out.device.type)
    for value in (1.0, 4.0, 0.5):
        given = (states.a, states.a_lse, states.b, states.b_lse, None, None, scale.fill_(value))
        jitkern.merge_attn_states(out, *given, backend=backend)
        assert (out.float() == 8 / value).all()


@pytest.mark.parametrize("out_kind", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", KINDS)
def test_8_bit_inputs_with_a_scale_each(backend: str, kind: torch.dtype, out_kind: torch.dtype) -> None:
    wide = random_states(20, 3, D, torch.float32, device_of(backend), disjoint=False)
    a, b = wide.a.to(kind), wide.b.to(kind)
    for k in (None, 7):
        out, lse = torch.empty_like(a, dtype=out_kind), torch.empty_like(wide.a_lse)
        scales: dict[str, Any] = {
            "prefix_scale": scale_of(0.75, a.device.type),
            "suffix_scale": scale_of(3.0, a.device.type, ()),
        }
        jitkern.merge_attn_states(out, a, wide.a_lse, b, wide.b_lse, lse, k, backend=backend, **scales)
        assert_merged(out, lse, States(a.to(WIDE) * 0.75, wide.a_lse, b.to(WIDE) * 3, wide.b_lse), k)


@pytest.mark.parametrize("kind", KINDS)
def test_every_8_bit_input_is_read_exactly(backend: str, kind: torch.dtype) -> None:
    states = rows_of(every_code(kind).float(), torch.float32, device_of(backend))
    x = every_code(kind).view(-1, 1, D).to(states.a.device)
    states.a_lse.fill_(-math.inf)
    out, one = torch.empty_like(states.b), scale_of(1.0, x.device.type)
    never = scale_of(math.nan, x.device.type)  # of the empty side
    given = (x, states.a_lse, x, states.b_lse)
    jitkern.merge_attn_states(out, *given, prefix_scale=never, suffix_scale=one, backend=backend)
    assert torch.equal(out.isnan(), states.b.isnan())
    assert same_bits(out.nan_to_num(7), states.b.nan_to_num(7))


def test_8_bits_in_and_out_in_place(backend: str) -> None:
    """The output may be an input here, too; and of another 8-bit type than the inputs."""
    wide = random_states(20, 3, D, torch.float32, device_of(backend), disjoint=False)
    a, b = wide.a.to(torch.float8_e4m3fn), wide.b.to(torch.float8_e4m3fn)
    one: dict[str, Any] = {
        name: scale_of(1.0, a.device.type) for name in ("output_scale", "prefix_scale", "suffix_scale")
    }
    for kind in KINDS:
        out = torch.empty_like(a, dtype=kind)
        jitkern.merge_attn_states(out, a, wide.a_lse, b, wide.b_lse, backend=backend, **one)
        reference, _ = merge(States(a.to(WIDE), wide.a_lse, b.to(WIDE), wide.b_lse))
        best = nearest(reference, kind).view(kind).to(WIDE)
        off = (out.cpu().to(WIDE) - reference).abs() - (best - reference).abs()
        assert (off.nan_to_num(0) <= 16 * 2**-24).all()
        if kind == a.dtype:
            mine = a.clone()
            jitkern.merge_attn_states(mine, mine, wide.a_lse, b, wide.b_lse, backend=backend, **one)
            assert torch.equal(codes(mine), codes(out))


@pytest.mark.parametrize("offset", [1, 4, 8])
def test_an_8_bit_output_at_any_address(backend: str, offset: int) -> None:
    states = random_states(11, 4, D, torch.bfloat16, device_of(backend))
    scale = scale_of(0.25, device_of(backend))
    dense = torch.empty_like(states.a, dtype=torch.float8_e4m3fn)
    room = torch.full((11, 6, D + 16), 99, dtype=torch.uint8, device=dense.device)
    view = room[:, 1:5, offset : offset + D].view(torch.float8_e4m3fn)
    for out in (dense, view):
        given = (states.a, states.a_lse, states.b, states.b_lse, None, None, scale)
        jitkern.merge_attn_states(out, *given, backend=backend)
    assert torch.equal(codes(view), codes(dense))
    room[:, 1:5, offset : offset + D] = 99
    assert (room == 99).all()


def test_other_ops_say_that_they_take_no_8_bit_types() -> None:
    v = torch.zeros(2, 2, D).to(torch.float8_e4m3fn)
    s = torch.zeros(2, 2)
    for call in (
        lambda: jitkern.merge_state(v, s, v, s),
        lambda: jitkern.merge_state_in_place(v, s, v, s),
        lambda: jitkern.merge_states([v, v], [s, s]),
    ):
        with pytest.raises(jitkern.ArgumentError, match=r"float8_e4m3fn; expected torch.float32"):
            call()
