"""merge_state and merge_state_in_place against the oracle: layouts, masks, row operations, aliasing, mixed bases."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

import jitkern
from tests.merge_oracle import States, assert_merged, random_states
from tests.merge_oracle import merge as merge_pair
from tests.states_oracle import assert_lse
from tests.test_merge_contract import DTYPES, STRIDED, device_of, on, run, same_bits

D = 64
BASES = {"e": math.e, "2": 2.0, "10": 10.0}


def token_major(states: States) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The operands of merge_state: L as [tokens, heads]."""
    return states.a, states.a_lse.T.contiguous(), states.b, states.b_lse.T.contiguous()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("tokens", "heads"), [(1, 1), (7, 3), (63, 100), (130, 8)])
def test_merge_state(backend: str, tokens: int, heads: int, dtype: torch.dtype) -> None:
    states = random_states(tokens, heads, D, dtype, device_of(backend), disjoint=False, empty=0.3)
    v, s = jitkern.merge_state(*token_major(states), backend=backend)
    assert v.dtype == dtype
    assert (v.shape, s.shape, s.dtype) == (states.shape, states.shape[:2], torch.float32)
    assert_merged(v, s.T, states)
    out, lse = run(states, backend)
    assert same_bits(v, out)
    assert same_bits(s, lse.T)


def test_merge_state_into_given_tensors(backend: str) -> None:
    states = random_states(9, 4, D, torch.float16, device_of(backend))
    operands = token_major(states)
    expected, expected_lse = jitkern.merge_state(*operands, backend=backend)
    room = torch.full((9, 6, 2 * D), 99.0, dtype=torch.float16, device=operands[0].device)
    room_lse = torch.full((4, 18), 99.0, device=operands[0].device)
    out, out_lse = room[:, 1:5, :D], room_lse[:, ::2].T
    v, s = jitkern.merge_state(*operands, out=out, out_lse=out_lse, backend=backend)
    assert v is out
    assert s is out_lse
    assert same_bits(v, expected)
    assert same_bits(s, expected_lse)
    assert (room[:, [0, 5]] == 99).all()
    assert (room[..., D:] == 99).all()
    assert (room_lse[:, 1::2] == 99).all()


@pytest.mark.parametrize("which", [0, 2])
def test_outputs_may_be_either_input(backend: str, which: int) -> None:
    states = random_states(40, 8, 192, torch.bfloat16, device_of(backend), disjoint=False)
    operands = token_major(states)
    expected, expected_lse = jitkern.merge_state(*operands, backend=backend)
    jitkern.merge_state(*operands, out=operands[which], out_lse=operands[which + 1], backend=backend)
    assert same_bits(operands[which], expected)
    assert same_bits(operands[which + 1], expected_lse)


@pytest.mark.parametrize("shape", [(0, 4, D), (4, 0, D), (4, 4, 0)])
def test_nothing_to_do_is_legal(backend: str, shape: tuple[int, int, int]) -> None:
    v, s, other, s_other = token_major(random_states(*shape, torch.float32, device_of(backend)))
    assert jitkern.merge_state(v, s, other, s_other, backend=backend)[0].shape == shape
    jitkern.merge_state_in_place(v, s, other, s_other, backend=backend)
    stacked = jitkern.merge_states(torch.stack([v, other], 1), torch.stack([s, s_other], 1), backend=backend)
    assert stacked[0].shape == shape


@pytest.mark.parametrize("dtype", DTYPES)
def test_in_place_equals_out_of_place(backend: str, dtype: torch.dtype) -> None:
    states = random_states(33, 5, D, dtype, device_of(backend), disjoint=False, empty=0.3)
    v, s, other, s_other = token_major(states)
    kept, s_kept = other.clone(), s_other.clone()
    expected, expected_lse = jitkern.merge_state(v, s, other, s_other, backend=backend)
    jitkern.merge_state_in_place(v, s, other, s_other, backend=backend)
    assert same_bits(v, expected)
    assert same_bits(s, expected_lse)
    assert same_bits(other, kept)
    assert same_bits(s_other, s_kept)


@pytest.mark.parametrize("which", STRIDED)
def test_in_place_of_any_strides(backend: str, which: str) -> None:
    states = random_states(11, 4, D, torch.bfloat16, device_of(backend))
    v, s, other, s_other = token_major(states)
    expected, _ = jitkern.merge_state(v, s, other, s_other, backend=backend)
    strided = STRIDED[which](v)
    jitkern.merge_state_in_place(strided, s, STRIDED[which](other), s_other, backend=backend)
    assert same_bits(strided, expected)


@pytest.mark.parametrize("kind", [torch.bool, torch.uint8])
@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_masked_rows_stay_bit_for_bit(backend: str, share: float, kind: torch.dtype) -> None:
    states = random_states(50, 3, D, torch.float32, device_of(backend), disjoint=False, empty=0.4)
    states.a_lse[0, 0], states.b[0] = math.nan, math.nan
    v, s, other, s_other = token_major(states)
    wanted = torch.rand(50, generator=torch.Generator().manual_seed(1)) < share
    mask = wanted.to(kind) if kind == torch.bool else wanted.to(kind) * 255  # anything but 0 is a yes
    before, s_before = v.clone(), s.clone()
    expected, expected_lse = jitkern.merge_state(v, s, other, s_other, backend=backend)
    jitkern.merge_state_in_place(v, s, other, s_other, mask.to(v.device), backend=backend)
    assert same_bits(v[~wanted], before[~wanted])
    assert same_bits(s[~wanted], s_before[~wanted])
    assert same_bits(v[wanted].nan_to_num(5), expected[wanted].nan_to_num(5))
    assert same_bits(s[wanted].nan_to_num(5), expected_lse[wanted].nan_to_num(5))


@pytest.mark.parametrize("kind", [torch.int32, torch.int64, torch.float32, torch.int8])
def test_a_mask_of_another_type_is_refused_not_misread(backend: str, kind: torch.dtype) -> None:
    v, s, other, s_other = token_major(random_states(4, 3, D, torch.float32, device_of(backend)))
    before = v.clone()
    with pytest.raises(jitkern.ArgumentError, match=f"merge_state_in_place: mask is {kind}.*bool or torch.uint8"):
        jitkern.merge_state_in_place(v, s, other, s_other, torch.ones(4, dtype=kind, device=v.device))
    assert same_bits(v, before)


@pytest.mark.parametrize(
    ("mask", "words"),
    [
        (torch.ones(5, dtype=torch.bool), r"mask has shape \[5\]"),
        (torch.ones(8, dtype=torch.bool)[::2], "mask .*strides"),
        ([True] * 4, "mask is a list"),
    ],
)
def test_a_mask_of_another_shape_is_refused(mask: Any, words: str) -> None:
    operands = token_major(random_states(4, 3, D, torch.float32))
    with pytest.raises(jitkern.ArgumentError, match=words):
        jitkern.merge_state_in_place(*operands, mask)
    with pytest.raises(jitkern.ArgumentError, match="both mask and row_op"):
        jitkern.merge_state_in_place(*operands, torch.ones(4, dtype=torch.bool), row_op=torch.ones(4).byte())
    with pytest.raises(jitkern.ArgumentError, match=r"row_op is torch.bool.*uint8"):
        jitkern.merge_state_in_place(*operands, row_op=torch.ones(4, dtype=torch.bool))


@pytest.mark.parametrize("bases", ["e", ("e", "2", "e")])
def test_row_operations(backend: str, bases: Any) -> None:
    states = random_states(40, 3, D, torch.bfloat16, device_of(backend), disjoint=False, empty=0.3)
    v, s, other, s_other = token_major(states)
    ops = (torch.arange(40) % 4).to(torch.uint8)
    before, s_before = v.clone(), s.clone()
    expected, expected_lse = jitkern.merge_state(v, s, other, s_other, lse_base=bases, backend=backend)
    jitkern.merge_state_in_place(v, s, other, s_other, row_op=ops.to(v.device), lse_base=bases, backend=backend)
    assert same_bits(v[ops == 0], before[ops == 0])
    assert same_bits(s[ops == 0], s_before[ops == 0])
    assert same_bits(v[ops == 1], expected[ops == 1])
    assert same_bits(s[ops == 1], expected_lse[ops == 1])
    assert same_bits(v[ops == 2], other[ops == 2])  # infinite L or not
    factor = math.log(2) if isinstance(bases, tuple) else 1
    assert torch.allclose(s[ops == 2], s_other[ops == 2] * factor, rtol=1e-6)
    assert same_bits(v[ops == 3], before[ops == 3])
    assert same_bits(s[ops == 3], s_before[ops == 3])


def test_keeping_a_row_converts_its_logarithm(backend: str) -> None:
    v, s, other, s_other = token_major(random_states(4, 3, D, torch.float32, device_of(backend), empty=0))
    before, s_before = v.clone(), s.clone()
    keep = torch.full((4,), 3, dtype=torch.uint8, device=v.device)
    jitkern.merge_state_in_place(v, s, other, s_other, row_op=keep, lse_base=("2", "2", "e"), backend=backend)
    assert same_bits(v, before)
    assert torch.allclose(s, s_before * math.log(2), rtol=1e-6)


def test_a_mask_is_read_anew_at_every_call(backend: str) -> None:
    states = random_states(6, 3, D, torch.float32, device_of(backend), empty=0)
    mask = torch.zeros(6, dtype=torch.bool, device=states.a.device)
    for wanted in ([0, 2], [1], [0, 1, 2, 3, 4, 5]):
        v, s, other, s_other = token_major(states.clone())
        mask.zero_()[wanted] = True
        jitkern.merge_state_in_place(v, s, other, s_other, mask, backend=backend)
        changed = (v != states.a).flatten(1).any(1)
        assert changed.nonzero().flatten().tolist() == wanted


@pytest.mark.parametrize("bases", [*itertools.permutations(["e", "2", "10"], 3), ("2", "2", "e"), ("e", "2", "2")])
def test_every_operand_has_a_base_of_its_own(backend: str, bases: tuple[str, str, str]) -> None:
    """The same states, their logarithms written in three bases, give the same result."""
    states = random_states(30, 4, D, torch.float32, device_of(backend), disjoint=False, empty=0.2)
    reference, reference_lse = merge_pair(states)
    a, b, out = (math.log(BASES[base]) for base in bases)
    written = States(states.a, states.a_lse / a, states.b, states.b_lse / b)
    v, lse = run(written, backend, lse_base=bases)
    # Writing L in another base, and reading it, each rounds a number of up to 12: that many units of weight.
    assert torch.allclose(v.cpu().double(), reference, atol=40 * 2**-23, rtol=0, equal_nan=True)
    assert_lse(lse, reference_lse / out)


@pytest.mark.parametrize("k", [0, 1, 5, 6, 100, -3])
@pytest.mark.parametrize("shape", [(), (1,)])
def test_the_number_of_merged_tokens_on_the_device(backend: str, k: int, shape: tuple[int, ...]) -> None:
    """As the int, and clamped: the host cannot refuse what it does not read."""
    states = random_states(6, 3, D, torch.bfloat16, device_of(backend), disjoint=False, empty=0.4)
    on_device = torch.full(shape, k, dtype=torch.int32, device=states.a.device)
    out, lse = run(states, backend, on_device)
    same, same_lse = run(states, backend, min(max(k, 0), 6))
    assert same_bits(out, same)
    assert same_bits(lse, same_lse)
    assert_merged(out, lse, states, min(max(k, 0), 6))


def test_the_tail_is_read_anew_at_every_call(backend: str) -> None:
    states = random_states(6, 3, D, torch.float32, device_of(backend))
    k = torch.zeros((), dtype=torch.int32, device=states.a.device)
    for count in (6, 0, 3):
        assert_merged(*run(states, backend, k.fill_(count)), states, count)


def test_the_fixtures_move_operands(backend: str) -> None:
    states = random_states(2, 2, 8, torch.float32)
    assert on(states, backend).a.device.type == device_of(backend)
