"""The GPU branches of the merges on the emulator (tests/emulator), against their float64 oracles, with no GPU."""

from __future__ import annotations

import pytest
import torch

import jitkern
from tests.emulator.device import EmulatedDevice
from tests.emulator.emulate import Emulator
from tests.merge_oracle import assert_merged, random_states
from tests.states_oracle import assert_states, random_partials

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
def test_many_states(device: EmulatedDevice, dtype: torch.dtype) -> None:
    p = random_partials(5, 6, 3, 40, dtype)
    out, lse = jitkern.merge_states(p.v, p.s)
    assert_states(out, lse, p)
    listed, listed_lse = jitkern.merge_states(*p.lists())
    assert torch.equal(listed.nan_to_num(7), out.nan_to_num(7))
    assert torch.equal(listed_lse, lse)


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
