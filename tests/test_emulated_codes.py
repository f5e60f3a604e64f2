"""The GPU kernels for caches of 8-bit codes on the emulator (tests/emulator), against the float64 oracle."""

from __future__ import annotations

import pytest
import torch

from tests.emulator.device import EmulatedDevice
from tests.emulator.emulate import EmulationError, Emulator
from tests.mla_oracle import Coded, assert_decoded, reference
from tests.test_mla_codes import decode, make

LENGTHS = [0, 1, 65, 210]
TILES = [("sm_80", 16), ("sm_89", 32), ("sm_90", 16), ("sm_90", 32), ("sm_90", 64)]


def check(device: EmulatedDevice, coded: Coded, kind: str, parts: int, seeds: int = 3) -> None:
    expected, first = reference(coded.values, True), None
    for seed in range(seeds):  # asynchronous work early, at random, late
        device.seed = seed + 10 * parts
        out, lse = decode(coded, kind, True, num_parts=parts)
        assert_decoded(out, lse, expected)
        first = first or (out, lse)
        assert torch.equal(out, first[0])
        assert torch.equal(lse, first[1])


@pytest.mark.parametrize("kind", ["codes", "tokens"])
@pytest.mark.parametrize(("target", "rows"), TILES)
def test_every_tile(emulator: Emulator, monkeypatch: pytest.MonkeyPatch, target: str, rows: int, kind: str) -> None:
    device = EmulatedDevice(emulator, target, monkeypatch)
    check(device, make(kind, LENGTHS, rows // 2, q_len=2, page_size=16), kind, 5)
    constants = dict(device.launched[-2].constants)
    assert constants["rows"] == (16 if target == "sm_89" else rows)  # its shared memory holds no more
    assert constants["cache"] == 1 + (kind == "tokens")


@pytest.mark.parametrize("kind", ["codes", "tokens"])
@pytest.mark.parametrize(("pack", "offset"), [(1, 1), (2, 4), (4, 8)])
def test_narrow_accesses(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, pack: int, offset: int, kind: str
) -> None:
    device = EmulatedDevice(emulator, "sm_90", monkeypatch)
    coded = make(kind, [70, 0, 3], 16)
    cache = coded.step.k_cache
    room = torch.zeros(*cache.shape[:3], cache.shape[3] + offset, dtype=torch.uint8)
    room[..., offset:] = cache.view(torch.uint8)
    coded.step.k_cache = room.view(cache.dtype)[..., offset:]
    check(device, coded, kind, 2)
    assert device.launched[-2].pack == pack


@pytest.mark.parametrize("kind", ["codes", "tokens"])
def test_pages_that_do_not_exist(emulator: Emulator, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    device = EmulatedDevice(emulator, "sm_90", monkeypatch)
    coded = make(kind, [300, 40], 16, page_size=16)
    for step in (coded.step, coded.values):
        step.block_table[0, 0] = -1
        step.block_table[0, 7] = step.k_cache.shape[0]
    check(device, coded, kind, 3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_the_latent_alone(emulator: Emulator, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    check(
        EmulatedDevice(emulator, "sm_90", monkeypatch),
        make("codes", [90, 64], 16, head_dim=512, dtype=dtype),
        "codes",
        2,
    )


# What must not be left out or put elsewhere, and how the emulator tells.
BROKEN = {
    "overwritten before it is read": ("line, 16 * (lane % 8)));\n  __syncwarp();", "line, 16 * (lane % 8)));", "race"),
    "copies not waited for": ("else copies_wait<0>();", "else copies_wait<1>();", "race"),
    "copies over codes": ("row, 4 + group, byte)", "row, group, byte)", "nobody has written"),
    "slot not waited for": ("barrier_wait(empty, ring.parity ^ 1);\n        start", "start", "race|deadlock"),
    "last chunk not finished": ("block <= piece.end; ++block", "block < piece.end; ++block", "deadlock"),
    "an arrival too few": ("barrier_arrive(full);\n    if (lane == 0)", "if (lane == 0)", "deadlock"),
    "scale of another group": ("16 * (group % 2), lane);", "0, lane);", "O: "),
    "scale of another key": ("scale_lane + row)", "scale_lane + (row ^ 1))", "O: "),
    "reached by chance": ("s.reached[chunk.slot] = chunk.reached", "s.reached[chunk.slot] = ~0u", "[OL]: "),
}


@pytest.mark.parametrize("what", BROKEN)
def test_a_broken_producer_is_seen(emulator: Emulator, monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    old, new, said = BROKEN[what]
    device = EmulatedDevice(emulator, "sm_90", monkeypatch)
    device.patches["mla_decode"] = [(old, new)]
    coded = make("tokens", [330, 65], 16, page_size=16)
    for step in (coded.step, coded.values):
        step.block_table[0, 2] = -1
    with pytest.raises((EmulationError, AssertionError), match=said):
        check(device, coded, "tokens", 2)
