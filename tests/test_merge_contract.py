"""merge_attn_states against the float64 oracle, and its edge contract case by case, on every backend."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import jitkern
from tests.merge_oracle import States, assert_merged, merge, random_states

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
BITS = {torch.float32: torch.int32, torch.float16: torch.int16, torch.bfloat16: torch.int16, torch.float64: torch.int64}
TOKENS, HEADS, HEAD_SIZES = (256, 512, 613, 1024, 1536, 4096), (4, 8, 16, 32, 48, 64), (32, 48, 64, 96, 128, 256)
GRID = list(itertools.product(TOKENS, HEADS, HEAD_SIZES, DTYPES))
assert len(GRID) == 648


def device_of(backend: str) -> str:
    return "cpu" if backend == "cpu" else "cuda"


def run(
    states: States, backend: str, k: int | torch.Tensor | None = None, **more: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = states.outputs()
    jitkern.merge_attn_states(out, states.a, states.a_lse, states.b, states.b_lse, lse, k, backend=backend, **more)
    return out, lse


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and torch.equal(a.contiguous().view(BITS[a.dtype]), b.contiguous().view(BITS[b.dtype]))


def on(states: States, backend: str) -> States:
    device = device_of(backend)
    return States(*(x.to(device) for x in (states.a, states.a_lse, states.b, states.b_lse)))


# The 648-case grid: every value of every dimension on the CPU; all of it on a GPU in tests/gpu.
SPREAD = [case for i, case in enumerate(GRID) if i % 41 == 0 and case[0] * case[1] * case[2] <= 8_000_000]


@pytest.mark.parametrize(("tokens", "heads", "d", "dtype"), SPREAD)
@pytest.mark.parametrize("k", [None, 128])
def test_grid_spread(tokens: int, heads: int, d: int, dtype: torch.dtype, k: int | None) -> None:
    states = random_states(tokens, heads, d, dtype)
    out, lse = run(states, "cpu", k)
    assert_merged(out, lse, states, k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [1, 2, 3, 16, 24, 40, 56, 59, 72, 80, 111, 112, 160, 192, 224, 320, 512, 576, 1000, 4096])
def test_any_head_size(backend: str, d: int, dtype: torch.dtype) -> None:
    states = random_states(5, 3, d, dtype, device_of(backend), disjoint=False, empty=0.3)
    out, lse = run(states, backend)
    assert_merged(out, lse, states)


@pytest.mark.parametrize("heads", [1, 2, 3, 7, 33, 65, 96, 97, 100, 128, 257])
@pytest.mark.parametrize("tokens", [1, 2, 63, 65])
def test_any_number_of_heads_and_tokens(backend: str, tokens: int, heads: int) -> None:
    states = random_states(tokens, heads, 128, torch.bfloat16, device_of(backend))
    assert_merged(*run(states, backend), states)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("sign", [math.inf, -math.inf])
@pytest.mark.parametrize("garbage", [math.nan, math.inf, 1e38])
def test_an_empty_side_leaves_the_other_bit_for_bit(
    backend: str, dtype: torch.dtype, sign: float, garbage: float
) -> None:
    states = random_states(9, 5, 64, dtype, device_of(backend), empty=0)
    states.a[0, 0, :4] = torch.tensor([-0.0, 1e-40, math.nan, math.inf]).to(
        dtype
    )  # denormals, -0, NaN pass as they are
    states.a_lse[1, 1] = math.nan
    states.a_lse[2, 2] = 1e-42
    live, live_lse = states.a.clone(), states.a_lse.clone()
    states.b_lse.fill_(sign)
    states.b.copy_(torch.tensor(garbage, dtype=torch.float64).to(dtype))
    for pair in (states, states.swapped()):
        out, lse = run(pair, backend)
        assert same_bits(out, live)
        assert same_bits(lse[~live_lse.isnan()], live_lse[~live_lse.isnan()])
        assert lse[1, 1].isnan()


@pytest.mark.parametrize("signs", list(itertools.product([math.inf, -math.inf], repeat=2)))
def test_both_empty_gives_zero_and_minus_infinity(backend: str, signs: tuple[float, float]) -> None:
    states = random_states(4, 3, 128, torch.float16, device_of(backend), empty=0)
    states.a_lse[:, 1::2], states.b_lse[:, 1::2] = signs
    states.a[1::2], states.b[1::2] = math.nan, 7.0
    out, lse = run(states, backend)
    assert (out[1::2] == 0).all()
    assert not torch.signbit(out[1::2]).any()
    assert (lse[:, 1::2] == -math.inf).all()
    assert_merged(out, lse, states)


def test_nan_in_lse_propagates_and_stays_in_its_row(backend: str) -> None:
    states = random_states(6, 4, 32, torch.float32, device_of(backend), empty=0)
    states.a_lse[2, 3] = math.nan
    states.b_lse[0, 1] = math.nan
    out, lse = run(states, backend)
    assert out.isnan().sum() == 2 * 32
    assert out[3, 2].isnan().all()
    assert out[1, 0].isnan().all()
    assert lse.isnan().sum() == 2
    assert_merged(out, lse, states)


@pytest.mark.parametrize(
    "pair", [(800.0, 799.0), (3e38, -3e38), (-1e30, -1e30), (-1e30, 5.0), (1e4, 1e4 - 1), (0.0, -200.0)]
)
def test_finite_sentinels_and_large_logarithms_are_ordinary_numbers(backend: str, pair: tuple[float, float]) -> None:
    states = random_states(3, 2, 64, torch.float32, device_of(backend), empty=0)
    states.a_lse.fill_(pair[0])
    states.b_lse.fill_(pair[1])
    out, lse = run(states, backend)
    assert out.isfinite().all()
    assert lse.isfinite().all()
    assert_merged(out, lse, states)


def test_absorption(backend: str) -> None:
    """A huge O under a tiny weight: the sigmoid form is 2 % off here, the max-shift form is not."""
    states = random_states(1, 1, 32, torch.float32, device_of(backend), empty=0)
    states.a.fill_(1e4), states.a_lse.fill_(-30.0)
    states.b.fill_(1e-3), states.b_lse.fill_(0.0)
    out, _ = run(states, backend)
    assert torch.allclose(
        out.cpu().double(), torch.full((1, 1, 32), 1.000001e-3 - 9.4e-17, dtype=torch.float64), rtol=3e-7
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_commutative_bit_for_bit(backend: str, dtype: torch.dtype) -> None:
    states = random_states(64, 7, 96, dtype, device_of(backend), disjoint=False)
    states.b_lse[:, ::5] = states.a_lse[:, ::5]  # ties
    out, lse = run(states, backend)
    other, other_lse = run(states.swapped(), backend)
    assert torch.equal(out.nan_to_num(9), other.nan_to_num(9))
    assert torch.equal(lse, other_lse)


@pytest.mark.parametrize("dtype", DTYPES)
def test_idempotent(backend: str, dtype: torch.dtype) -> None:
    states = random_states(33, 4, 64, dtype, device_of(backend), empty=0)
    states.b, states.b_lse = states.a, states.a_lse
    out, lse = run(states, backend)
    assert same_bits(out, states.a)
    assert torch.allclose(lse, states.a_lse + math.log(2), rtol=2e-7, atol=2e-7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_its_neighbours(backend: str, dtype: torch.dtype) -> None:
    states = random_states(257, 6, 80, dtype, device_of(backend))
    out, lse = run(states, backend)
    for token in (0, 1, 100, 256):
        row = States(
            states.a[token : token + 1],
            states.a_lse[:, token : token + 1],
            states.b[token : token + 1],
            states.b_lse[:, token : token + 1],
        )
        one, one_lse = run(row, backend)
        assert same_bits(one[0], out[token])
        assert same_bits(one_lse[:, 0], lse[:, token])


@pytest.mark.parametrize("k", [0, 1, 5, 6, None])
def test_tail_is_copied_unchanged(backend: str, k: int | None) -> None:
    states = random_states(6, 3, 48, torch.bfloat16, device_of(backend), disjoint=False, empty=0.4)
    out, lse = run(states, backend, k)
    if k is not None:
        assert same_bits(out[k:], states.b[k:])
        assert same_bits(lse[:, k:], states.b_lse[:, k:])
    assert_merged(out, lse, states, k)


@pytest.mark.parametrize("base", ["e", "2", "10", 3.5])
def test_logarithms_of_any_base(backend: str, base: str | float) -> None:
    number = {"e": math.e, "2": 2.0, "10": 10.0}.get(str(base), base)
    states = random_states(40, 4, 64, torch.float32, device_of(backend))
    out, lse = run(states, backend, lse_base=base)
    assert_merged(out, lse, states, base=float(number))


def test_known_values_of_two_bases(backend: str) -> None:
    states = random_states(1, 1, 4, torch.float32, device_of(backend), empty=0)
    states.a.fill_(0.0), states.b.fill_(10.0)
    states.a_lse.fill_(math.log(2)), states.b_lse.fill_(math.log(8))
    assert torch.allclose(run(states, backend)[0], torch.full_like(states.a, 8.0))
    assert torch.allclose(run(states, backend, lse_base=2)[0], torch.full_like(states.a, 7.2330), atol=1e-4)
    states.a_lse.fill_(1.0), states.b_lse.fill_(3.0)
    assert torch.allclose(run(states, backend, lse_base=2)[0], torch.full_like(states.a, 8.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", [64, 80, 96, 192, 576, 4096])
@pytest.mark.parametrize("side", ["a", "b"])
def test_outputs_may_be_an_input(backend: str, side: str, d: int, dtype: torch.dtype) -> None:
    states = random_states(130, 8, d, dtype, device_of(backend), disjoint=False)
    out, lse = run(states, backend)
    mine = states.clone()
    target, target_lse = (mine.a, mine.a_lse) if side == "a" else (mine.b, mine.b_lse)
    jitkern.merge_attn_states(target, mine.a, mine.a_lse, mine.b, mine.b_lse, target_lse, backend=backend)
    assert same_bits(target, out)
    assert same_bits(target_lse, lse)


def test_output_lse_is_optional(backend: str) -> None:
    states = random_states(10, 4, 64, torch.float16, device_of(backend))
    out, _ = states.outputs()
    jitkern.merge_attn_states(out, states.a, states.a_lse, states.b, states.b_lse, backend=backend)
    assert_merged(out, None, states)


@pytest.mark.parametrize("shape", [(0, 4, 64), (4, 0, 64), (4, 4, 0)])
def test_nothing_to_do_is_legal(backend: str, shape: tuple[int, int, int]) -> None:
    states = random_states(*shape, torch.float32, device_of(backend))
    _, lse = run(states, backend)
    assert (lse == -123).all()
    after = random_states(2, 2, 8, torch.float32, device_of(backend))
    assert_merged(*run(after, backend), after)


STRIDED = {
    "padded V": lambda x: torch.nn.functional.pad(x, (0, 64), value=math.nan)[..., : x.shape[2]],
    "slice of heads": lambda x: torch.cat([torch.full_like(x, math.nan), x], 1)[:, x.shape[1] :],
    "every other token": lambda x: torch.stack([x, torch.full_like(x, math.nan)], 1).flatten(0, 1)[::2],
    "heads first": lambda x: x.transpose(0, 1).contiguous().transpose(0, 1),
    "odd offset": lambda x: torch.cat([x.new_full((1,), math.nan), x.flatten()])[1:].view(x.shape),
}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", STRIDED)
@pytest.mark.parametrize("operand", ["a", "b", "out"])
def test_any_strides_and_base_address(backend: str, operand: str, which: str, dtype: torch.dtype) -> None:
    states = random_states(11, 4, 128, dtype, device_of(backend))
    out, lse = run(states, backend)
    moved = states.clone()
    if operand == "out":
        strided = STRIDED[which](torch.zeros_like(out))
        jitkern.merge_attn_states(strided, states.a, states.a_lse, states.b, states.b_lse, lse, backend=backend)
        assert same_bits(strided, out)
        return
    setattr(moved, operand, STRIDED[which](getattr(moved, operand)))
    got, got_lse = run(moved, backend)
    assert same_bits(got, out)
    assert same_bits(got_lse, lse)


def test_nothing_outside_a_strided_output_is_written(backend: str) -> None:
    states = random_states(11, 4, 48, torch.bfloat16, device_of(backend))
    whole = torch.full((11, 6, 64), 99.0, dtype=torch.bfloat16, device=device_of(backend))
    whole_lse = torch.full((4, 22), 99.0, device=device_of(backend))
    view, view_lse = whole[:, 1:5, 8:56], whole_lse[:, ::2]
    jitkern.merge_attn_states(view, states.a, states.a_lse, states.b, states.b_lse, view_lse, backend=backend)
    assert_merged(view, view_lse, states)
    outside = torch.ones_like(whole, dtype=torch.bool)
    outside[:, 1:5, 8:56] = False
    assert (whole[outside] == 99).all()
    assert (whole_lse[:, 1::2] == 99).all()


def test_transposed_and_expanded_lse(backend: str) -> None:
    states = random_states(7, 3, 64, torch.float32, device_of(backend), empty=0)
    transposed = States(states.a, states.a_lse.T.contiguous().T, states.b, states.b_lse.T.contiguous().T)
    assert same_bits(run(transposed, backend)[0], run(states, backend)[0])
    states.a_lse = states.a_lse[:, :1].expand(3, 7)
    assert_merged(*run_dense_outputs(states, backend), states)


def run_dense_outputs(states: States, backend: str) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = torch.empty_like(states.a), torch.empty_like(states.b_lse)
    jitkern.merge_attn_states(out, states.a, states.a_lse, states.b, states.b_lse, lse, backend=backend)
    return out, lse


def test_small_conformance_vector(backend: str) -> None:
    """Four tokens, hand-computed: a plain merge, an empty prefix of NaN, both empty of NaN, a copied tail."""
    device = device_of(backend)
    a = torch.tensor([2.0, math.nan, math.nan, math.nan], device=device).view(4, 1, 1).repeat(1, 2, 16)
    b = torch.tensor([10.0 / 3 + 4 / 3, 7.0, math.nan, -5.0], device=device).view(4, 1, 1).repeat(1, 2, 16)
    a_lse = torch.tensor([math.log(1), -math.inf, math.inf, 100.0], device=device).repeat(2, 1)
    b_lse = torch.tensor([math.log(3), math.log(2), -math.inf, math.log(4)], device=device).repeat(2, 1)
    out, lse = run(States(a, a_lse, b, b_lse), backend, 3)
    assert torch.allclose(out[0], torch.full_like(out[0], 4.0))
    assert torch.allclose(lse[:, 0], torch.full_like(lse[:, 0], math.log(4)))
    assert (out[1] == 7).all()
    assert (lse[:, 1] == b_lse[:, 1]).all()
    assert (out[2] == 0).all()
    assert (lse[:, 2] == -math.inf).all()
    assert (out[3] == -5).all()
    assert (lse[:, 3] == b_lse[:, 3]).all()


def test_denormals_are_not_flushed(backend: str) -> None:
    states = random_states(4, 2, 64, torch.float32, device_of(backend), empty=0)
    for x in (states.a, states.b):
        x.copy_(torch.randint(1, 1 << 20, x.shape, dtype=torch.int32).view(torch.float32))  # all denormal
    states.a_lse.fill_(0.0), states.b_lse.fill_(0.0)
    out, _ = run(states, backend)
    reference, _ = merge(states)
    assert ((out.cpu().double() - reference).abs() <= 2**-149).all()
    assert (out != 0).all()


@settings(max_examples=60)
@given(
    tokens=st.integers(1, 9),
    heads=st.integers(1, 5),
    d=st.sampled_from([1, 3, 8, 16, 24, 64]),
    dtype=st.sampled_from(DTYPES),
    pads=st.lists(st.integers(0, 3), min_size=9, max_size=9),
    k=st.none() | st.integers(0, 1),
    seed=st.integers(0, 2**31),
)
def test_any_layout(
    tokens: int, heads: int, d: int, dtype: torch.dtype, pads: list[int], k: int | None, seed: int
) -> None:
    """Random paddings of every operand in every dimension, and random base offsets."""
    states = random_states(tokens, heads, d, dtype, disjoint=False, empty=0.3, seed=seed)

    def pad(x: torch.Tensor, token: int, head: int, offset: int) -> torch.Tensor:
        room = torch.full((x.shape[0] * (1 + token), x.shape[1] + head, d + offset), math.nan, dtype=dtype)
        view = room[:: 1 + token, : x.shape[1], offset:]
        view.copy_(x)
        return view

    padded = States(pad(states.a, *pads[:3]), states.a_lse, pad(states.b, *pads[3:6]), states.b_lse)
    out = pad(torch.zeros_like(states.a), *pads[6:])
    lse = torch.empty_like(states.a_lse)
    jitkern.merge_attn_states(out, padded.a, padded.a_lse, padded.b, padded.b_lse, lse, k)
    assert_merged(out, lse, states, k)


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_pack_gives_the_same_bits(backend: str, dtype: torch.dtype) -> None:
    """All 16-bit patterns at d=64, by the widest access, and at d=63, element by element."""
    width = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    patterns = torch.arange(-(1 << 15), 1 << 15).to(width)
    patterns = (patterns * 65537 if width == torch.int32 else patterns).view(dtype).view(256, 4, 64)
    shuffled = patterns.flatten()[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(3))].view(256, 4, 64)
    lse = torch.randn(2, 4, 256, generator=torch.Generator().manual_seed(4))
    states = on(States(patterns, lse[0], shuffled, lse[1]), backend)
    wide, _ = run(states, backend)
    narrow, _ = run(States(states.a[..., :63], states.a_lse, states.b[..., :63], states.b_lse), backend)
    same = wide[..., :63].contiguous().view(width) == narrow.contiguous().view(width)
    assert (same | (wide[..., :63].isnan() & narrow.isnan())).all()


def test_float64_on_the_cpu() -> None:
    states = random_states(20, 3, 40, torch.float64, disjoint=False)
    out, lse = run(states, "cpu")
    assert_merged(out, lse, states)
    reference, _ = merge(states)
    assert torch.allclose(out.nan_to_num(0), reference.nan_to_num(0), rtol=1e-14, atol=1e-15)
