"""The GPU branch of the kernels on the emulator (tests/emulator), against the float64 oracles, with no GPU."""

from __future__ import annotations

import math
import struct
from typing import Any

import pytest
import torch

from jitkern.ops import mla_geometry, mla_launch, mla_plan
from jitkern.ops.mla import MLADecode
from jitkern.variants import Variant
from tests.emulator.emulate import Emulator
from tests.mla_oracle import Step, assert_decoded, make_step, reference

TAGS = {torch.bfloat16: "bf16", torch.float16: "f16"}


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    return Emulator(tmp_path_factory.mktemp("emulator"))


def tile_of(target: str, rows: int) -> mla_geometry.Tile:
    device = mla_geometry.device_of_target(target)
    assert device
    return mla_geometry.tile(rows, 576, device)


class Decoder:
    """MLADecode's three kernels on the emulator."""

    def __init__(self, emulator: Emulator, target: str, rows: int, pack: int = 8, patches: Any = ()) -> None:
        self.emulator, self.target, self.pack, self.patches = emulator, target, pack, patches
        self.tile = tile_of(target, rows)

    def run(self, step: Step, causal: bool, parts: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        batch, q_len, heads, d = step.q.shape
        heads_k = step.k_cache.shape[2]
        made = MLADecode(batch, heads, heads_k, q_len, step.q.dtype, "cpu", d, 512, step.page_size, num_parts=parts)
        tag, target = TAGS[step.q.dtype], self.target
        out = torch.full((batch, q_len, heads, 512), math.nan, dtype=step.q.dtype)
        lse = torch.full((batch, heads, q_len), math.nan)
        plan = made._plan
        values = [
            *(step.cache_seqlens.data_ptr(), 0, plan.records.data_ptr(), plan.num_splits.data_ptr()),
            *(plan.rows.data_ptr(), plan.order.data_ptr(), plan.split.data_ptr(), plan._scratch.data_ptr()),
            *(batch, batch, parts, parts, 1, 1, 2, 3, 25, 0),
        ]
        kernel = self.emulator.kernel(Variant("mla_plan", "i32", 1, target))
        kernel.run(struct.pack(mla_plan._LAYOUT, *values), (1, 1, 1), (512, 1, 1), seed=seed)
        slots = min(batch, parts)
        made._sizes = mla_geometry.Device(0, 4, 0, target)
        units, tiles = mla_geometry.join_units(slots, heads * q_len, made._sizes)
        operands = (out, lse, *step.operands())
        params = struct.pack(
            mla_launch._LAYOUT, *mla_launch._values(made, operands, d**-0.5, causal, math.e, (parts, units))
        )
        rows = heads // heads_k * q_len
        variant = Variant("mla_decode", tag, self.pack, self.tile.target, mla_launch._constants(d, self.tile))
        grid = (-(-rows // self.tile.rows), parts, heads_k)
        self.emulator.kernel(variant, self.patches).run(params, grid, (self.tile.threads, 1, 1), self.tile.shared, seed)
        combine = self.emulator.kernel(Variant("mla_combine", tag, 4, target, (("d", d),)))
        combine.run(params, (slots * tiles, 1, 1), (256, 1, 1), seed=seed)
        return out, lse


@pytest.mark.parametrize("target", ["sm_80", "sm_90"])
@pytest.mark.parametrize("rows", [16, 32, 64])
@pytest.mark.parametrize("dtype", TAGS, ids=str)
def test_decode(emulator: Emulator, target: str, rows: int, dtype: torch.dtype) -> None:
    step = make_step([0, 1, 15, 63, 64, 65, 200], rows // 2, q_len=2, dtype=dtype, page_size=16)
    decoder = Decoder(emulator, target, rows)
    for seed in range(3):
        out, lse = decoder.run(step, True, 3, seed)
        assert_decoded(out, lse, reference(step, True))
