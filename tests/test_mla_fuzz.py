"""MLADecode on random steps (tests/mla_cases.py) against the float64 oracle: the CPU's kernels, and emulated ones."""

from __future__ import annotations

import random

import pytest
import torch

from tests.emulator.device import EmulatedDevice
from tests.emulator.emulate import Emulator
from tests.mla_cases import CACHES, Case, draw

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("kind", CACHES)
def test_random_steps(kind: str) -> None:
    for seed in range(40):
        case = draw(random.Random(f"{kind} {seed}"), kind, 130, 200)
        try:
            case.check(*case.decode())
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from None


@pytest.mark.parametrize(("kind", "rows"), [("codes", 16), ("tokens", 16), ("plain", 64), ("codes", 64)])
def test_random_steps_on_the_emulator(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, kind: str, rows: int
) -> None:
    """A tile and pack that other tests have built as well: to build a kernel takes longer than to run it often."""
    device = EmulatedDevice(emulator, "sm_90", monkeypatch)
    for seed in range(12):
        case = draw(random.Random(f"emulated {kind} {seed}"), kind, rows, 130, (16,))
        while not _fits(case, rows):
            case = draw(case.rng, kind, rows, 130, (16,))
        device.seed = seed
        try:
            case.check(*case.decode())
        except AssertionError as error:
            raise AssertionError(f"seed {seed}: {error}") from None
        decode = next(variant for variant in reversed(device.launched) if variant.kernel == "mla_decode")
        assert (dict(decode.constants)["rows"], decode.pack) == (rows, 8)


def _fits(case: Case, rows: int) -> bool:
    _, q_len, heads, d = case.coded.step.q.shape
    stacked = q_len * heads // case.coded.step.k_cache.shape[2]
    return case.coded.step.q.dtype == torch.bfloat16 and d == 576 and (rows == 16 or stacked > 32)
