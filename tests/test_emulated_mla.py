"""The GPU kernels of MLADecode on the emulator (tests/emulator), against the float64 oracle, with no GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from jitkern.ops.mla import MLADecode
from jitkern.ops.mla_plan import Plan
from tests.emulator.device import EmulatedDevice
from tests.emulator.emulate import Emulator
from tests.mla_oracle import Step, assert_decoded, make_step, reference, rising

pytestmark = pytest.mark.usefixtures("one_thread")
LENGTHS = [0, 1, 15, 63, 64, 65, 200]
TILES = [("sm_80", 16), ("sm_80", 32), ("sm_90", 16), ("sm_90", 32), ("sm_90", 64)]


def decode(step: Step, causal: bool = False, parts: int = 3, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    batch, q_len, heads, d = step.q.shape
    mla = MLADecode(
        batch, heads, step.k_cache.shape[2], q_len, step.q.dtype, "cpu", d, 512, step.page_size, num_parts=parts
    )
    mla.plan(step.cache_seqlens)
    out = torch.full((batch, q_len, heads, 512), math.nan, dtype=step.q.dtype)
    lse = torch.full((batch, heads, q_len), math.nan)
    mla.run(*step.operands(), causal=causal, out=out, lse=lse, **more)
    return out, lse


def check_seeds(device: EmulatedDevice, step: Step, causal: bool, parts: int) -> None:
    expected, first = reference(step, causal), None
    for seed in range(3):  # asynchronous work early, at random, late
        device.seed = seed + 10 * parts
        out, lse = decode(step, causal, parts)
        assert_decoded(out, lse, expected)
        first = first or (out, lse)
        assert torch.equal(out, first[0])
        assert torch.equal(lse, first[1])


@pytest.mark.parametrize(("target", "rows"), TILES)
@pytest.mark.parametrize(
    ("dtype", "page_size", "parts"),
    [(torch.bfloat16, 16, 2), (torch.bfloat16, 64, 12), (torch.float16, 64, 2)],
    ids=["bf16-whole", "bf16-split", "f16-whole"],
)
def test_every_tile_with_whole_and_split_requests(
    emulator: Emulator,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    rows: int,
    dtype: torch.dtype,
    page_size: int,
    parts: int,
) -> None:
    device = EmulatedDevice(emulator, target, monkeypatch)
    step = make_step(LENGTHS, rows // 2, q_len=2, dtype=dtype, page_size=page_size)
    check_seeds(device, step, True, parts)
    assert dict(device.launched[-2].constants)["rows"] == rows


@pytest.mark.parametrize(("target", "rows"), [("sm_80", 16), ("sm_90", 16), ("sm_90", 64)])
def test_single_elements_and_several_kv_heads(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, target: str, rows: int
) -> None:
    device = EmulatedDevice(emulator, target, monkeypatch)
    step = make_step([130, 0, 65], 2 * rows - 2, heads_k=2, page_size=1)
    expected = reference(step)
    pages, page_size, heads_k, d = step.k_cache.shape
    wide = torch.full((pages, page_size, heads_k, d + 1), math.nan, dtype=step.k_cache.dtype)
    wide[..., :d] = step.k_cache
    step.k_cache = wide[..., :d]
    out, lse = decode(step, parts=4)
    assert device.launched[-2].pack == 1
    assert_decoded(out, lse, expected)


@pytest.mark.parametrize(("target", "rows"), [("sm_80", 16), ("sm_90", 16), ("sm_90", 64)])
@pytest.mark.parametrize("slope", [-30.0, 1.0, 30.0])
def test_maxima_that_change_from_block_to_block(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, target: str, rows: int, slope: float
) -> None:
    device = EmulatedDevice(emulator, target, monkeypatch)
    check_seeds(device, rising(make_step([330, 65], rows), slope), False, 1)


@pytest.mark.parametrize(("target", "tiles"), [("sm_80", 3), ("sm_90", 2)])
def test_several_tiles_and_pages_that_do_not_exist(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, target: str, tiles: int
) -> None:
    device = EmulatedDevice(emulator, target, monkeypatch)
    step = make_step([300, 40, 64], 35, q_len=2, page_size=16)
    step.block_table[0, 0] = -1
    step.block_table[0, 7] = step.k_cache.shape[0]
    step.block_table[2, :] = -5
    check_seeds(device, step, False, 5)
    assert -(-70 // int(dict(device.launched[-2].constants)["rows"])) == tiles


def ragged(batch: int, longest: int, least: int = -2) -> list[int]:
    return torch.randint(least, longest, (batch,), generator=torch.Generator().manual_seed(batch)).tolist()


def way_of(plan: Plan, least: int) -> str:
    """How the requests were shared out; ``least``: blocks of a part, were all parts as long."""
    records = [record for record in plan.records.tolist() if record[0] >= 0]
    if any(record[0] != record[1] for record in records):
        return "level" if any(record[5] for record in records) else "whole"
    return "searched" if max(end - begin for _, _, begin, end, *_ in records) > least else "even"


# Up to 32 requests, up to the threads of the block, more, and more than there is shared memory for.
PLANS = [
    ("even", [4096], 132),
    ("even", [640] * 32, 150),
    ("searched", ragged(9, 5000), 16),
    ("searched", ragged(32, 9000), 132),
    ("whole", [64] * 32, 5),
    ("level", [64] * 20 + [2500], 16),  # and fewer shares than parts
    ("level", [70, 9000, 0, 100, *[70] * 28], 30),
    ("even", [1024] * 33, 132),
    ("searched", [4096] * 128, 132),  # the next length
    ("searched", ragged(64, 8000, 100), 132),
    ("whole", [640] * 256, 16),
    ("level", ragged(200, 3000), 132),
    ("level", [100] * 100 + [131072], 132),
    ("even", [130] * 257 + [0] * 40, 1024),
    ("searched", ragged(300, 3000), 700),
    ("searched", [190] * 256 + [512] * 151, 1024),  # marks are set before the least length is found too short
    ("whole", [64] * 700, 132),
    ("level", ragged(700, 5000), 132),
    ("searched", ragged(64, 8000, 100) + [0] * 1200, 132),
    ("whole", [64] * 1100, 16),
    ("level", ragged(1100, 5000), 700),
]


@pytest.mark.parametrize(("way", "lengths", "parts"), PLANS, ids=[f"{way}-{len(n)}" for way, n, _ in PLANS])
def test_the_plan_is_that_of_the_cpu(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, way: str, lengths: list[int], parts: int
) -> None:
    batch = len(lengths)
    count = None if batch % 2 else torch.tensor([batch - batch // 9], dtype=torch.int32)
    real = lengths if count is None else lengths[: int(count)]
    plans = []
    for emulated in (False, True):
        if emulated:
            EmulatedDevice(emulator, "sm_90", monkeypatch).seed = parts
        plan = Plan(batch + 2, parts, "cpu")
        plan.load("cpu")
        plan.make(torch.tensor(lengths, dtype=torch.int32), count, parts, None)
        plans.append([plan.records, plan.num_splits, plan.rows, plan.order, plan.split])
        assert way_of(plan, -(-sum(-(-max(n, 0) // 64) for n in real) // parts)) == way
    for cpu, gpu in zip(*plans, strict=True):
        assert torch.equal(cpu, gpu)
