"""The GPU branches of the merges on the emulator (tests/emulator), against their float64 oracles, with no GPU."""

from __future__ import annotations

import math

import pytest
import torch

import jitkern
from jitkern.ops import nway
from jitkern.ops.recent import PerThread
from tests.emulator.device import EmulatedDevice
from tests.emulator.emulate import Emulator
from tests.merge_oracle import assert_merged, random_states
from tests.states_oracle import assert_states, random_partials
from tests.test_merge_contract import same_bits

pytestmark = pytest.mark.usefixtures("one_thread")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(params=["sm_75", "sm_80", "sm_90"])  # each converts 16-bit elements in its own way
def device(request: pytest.FixtureRequest, emulator: Emulator, monkeypatch: pytest.MonkeyPatch) -> EmulatedDevice:
    return EmulatedDevice(emulator, request.param, monkeypatch)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("tokens", "heads", "d"), [(7, 3, 64), (5, 5, 20)])  # neither fills its last block
def test_two_states(device: EmulatedDevice, tokens: int, heads: int, d: int, dtype: torch.dtype) -> None:
    states = random_states(tokens, heads, d, dtype)
    out, lse = states.outputs()
    jitkern.merge_attn_states(out, states.a, states.a_lse, states.b, states.b_lse, lse)
    assert_merged(out, lse, states)
    in_place = states.clone()
    jitkern.merge_attn_states(in_place.a, in_place.a, in_place.a_lse, in_place.b, in_place.b_lse, in_place.a_lse)
    assert torch.equal(in_place.a.nan_to_num(7), out.nan_to_num(7))
    assert torch.equal(in_place.a_lse, lse)
    assert len(device.launched) == 2


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", [3, 4, 6, 9])  # a part of a group, one, one and a part; more than is compiled in
def test_many_states(device: EmulatedDevice, count: int, dtype: torch.dtype) -> None:
    p = random_partials(5, count, 3, 40, dtype)
    out, lse = jitkern.merge_states(p.v, p.s)
    assert_states(out, lse, p)
    listed = jitkern.merge_states(*p.lists())
    ragged, ragged_s, indptr = p.ragged([count] * 5)
    assert all(map(same_bits, listed, (out, lse)))
    assert all(map(same_bits, jitkern.merge_states(ragged, ragged_s, indptr=indptr), (out, lse)))
    counts = [dict(variant.constants).get("count", 0) for variant in device.launched]
    assert counts == ([count, count, 0] if count <= nway.MAX_COUNTED else [0, 0, 0])


def test_a_count_that_is_compiled_in_changes_no_bit(device: EmulatedDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    """Empty partials, one live, none, NaN, sinks, in place: as where the parameter block has the number."""
    p = random_partials(6, 5, 3, 64, torch.bfloat16, empty=0.4)
    p.s[0], p.v[0] = math.inf, math.nan
    p.s[1], p.s[1, 3] = -math.inf, 1e-42
    p.v[1, 3, :, :2] = torch.tensor([-0.0, math.nan]).to(torch.bfloat16)
    p.s[2, 4, 1] = math.nan
    sinks = torch.tensor([0.5, -math.inf, -3.0])
    results = []
    for most in (8, 0):
        monkeypatch.setattr(nway, "MAX_COUNTED", most)
        monkeypatch.setattr(nway, "_thread", PerThread())
        given = p.clone()
        jitkern.merge_states(given.v, given.s, out=given.v[:, 2], out_lse=given.s[:, 2])
        results.append([*jitkern.merge_states(p.v, p.s), given.v[:, 2], given.s[:, 2]])
        results[-1] += jitkern.merge_states(*p.lists(), sink=sinks)
    assert len({variant.symbol for variant in device.launched}) == 4  # stacked and listed
    for result in results:
        assert all(map(same_bits, result, results[0]))
    assert all(map(same_bits, results[0][:2], results[0][2:4]))
    assert_states(results[0][4], results[0][5], p, sink=sinks)


def test_a_list_of_other_strides_is_not_compiled_for_its_length(device: EmulatedDevice) -> None:
    p = random_partials(3, 3, 2, 64, torch.float16)
    v, s = p.lists()
    v[1] = v[1].transpose(0, 1).contiguous().transpose(0, 1)
    assert all(map(same_bits, jitkern.merge_states(v, s), jitkern.merge_states(p.v, p.s)))
    assert [dict(variant.constants).get("count", 0) for variant in device.launched] == [0, 3]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("quantised", [torch.float8_e4m3fn, torch.float8_e5m2], ids=str)
def test_eight_bits_with_group_scales_are_those_of_the_cpu(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, quantised: torch.dtype, dtype: torch.dtype
) -> None:
    states = random_states(6, 3, 64, dtype)
    results = []
    for target in (None, "sm_80", "sm_90"):  # the latter has an instruction for it
        if target:
            EmulatedDevice(emulator, target, monkeypatch)
        out, scale = torch.empty(6, 3, 64, dtype=quantised), torch.empty(6, 3)
        lse = torch.empty_like(states.a_lse)
        jitkern.merge_attn_states(out, states.a, states.a_lse, states.b, states.b_lse, lse, output_group_scale=scale)
        results.append((out.view(torch.uint8), scale, lse))
    for result in results[1:]:
        assert all(torch.equal(x, y) for x, y in zip(result, results[0], strict=True))
