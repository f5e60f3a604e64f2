"""Random steps of MLA decode: any shape, cache and strides, plans of other lengths, pads, pages that do not exist."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace

import torch

import jitkern
from tests.mla_oracle import Coded, Step, assert_decoded, make_step, reference, with_codes, with_tokens

CACHES = {"plain": None, "codes": torch.float8_e4m3fn, "tokens": "fp8_ds_mla"}
NO_PAGES = (-1, -5, 2147483647, -2147483648)


@dataclass
class Case:
    """One step, how it is planned, and what it comes to."""

    kind: str
    coded: Coded
    q_scale: torch.Tensor | None
    causal: bool
    parts: int
    planned: torch.Tensor  # lengths
    count: torch.Tensor | None
    empty: float
    rng: random.Random

    def decode(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Run it with every buffer poisoned, into results of any strides whose surroundings must stay as they were."""
        step, rng = self.coded.step, self.rng
        batch, q_len, heads, d = step.q.shape
        shape = (batch + rng.choice([0, 3]), heads, step.k_cache.shape[2], q_len, step.q.dtype, "cpu", d, 512)
        mla = jitkern.MLADecode(
            *shape, step.page_size, cache_dtype=CACHES[self.kind], empty_lse=self.empty, num_parts=self.parts
        )
        mla._partial_out.fill_(math.nan)
        mla._partial_lse.fill_(math.nan)
        mla._plan.storage.fill_(0x7F7F7F7F)
        mla.plan(self.planned, self.count)
        out, room = roomy(
            torch.full((batch, q_len, heads, 512), math.nan, dtype=step.q.dtype), rng.choice([1, 4, 8]), rng
        )
        lse = torch.full((heads, batch, q_len, rng.choice([1, 2])), math.nan)[..., -1].transpose(0, 1)
        mla.run(
            *step.operands(), causal=self.causal, out=out, lse=lse, k_scale=self.coded.k_scale, q_scale=self.q_scale
        )
        result = out.clone()
        out.fill_(math.nan)
        assert room.isnan().all(), "something outside of out was written"
        return result, lse.contiguous()

    def check(self, out: torch.Tensor, lse: torch.Tensor) -> None:
        """Hold a result against the oracle. Lengths end with the table, and rows that are not planned are pads."""
        step, values = self.coded.step, self.coded.values
        lengths = step.cache_seqlens.clamp(max=step.block_table.shape[1] * step.page_size)
        real = len(self.planned) if self.count is None else min(int(self.count), len(self.planned))
        lengths[max(real, 0) :] = 0
        q = values.q.double() * (1.0 if self.q_scale is None else float(self.q_scale))
        assert_decoded(out, lse, reference(replace(values, q=q, cache_seqlens=lengths), self.causal, empty=self.empty))


def roomy(x: torch.Tensor, unit: int, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor]:
    """(the elements in a larger tensor of NaN, in steps of `unit`, with any order of dimensions; that tensor)."""
    strides, step = [0, 0, 0, 1], -(-x.shape[-1] // unit) * unit
    for axis in rng.sample(range(3), 3):
        strides[axis] = step + unit * rng.choice([0, 0, 1, 5])
        step = strides[axis] * x.shape[axis]
    offset = unit * rng.choice([0, 1, 3])
    codes = x.element_size() == 1
    room = torch.full((offset + step + 64,), 0x7F if codes else math.nan, dtype=torch.uint8 if codes else x.dtype)
    view = room.as_strided(x.shape, strides, offset)
    view.copy_(x.view(torch.uint8) if codes else x)
    return view.view(x.dtype), room


def draw(
    rng: random.Random, kind: str, most_rows: int, most_keys: int, units: tuple[int, ...] = (1, 2, 4, 8, 16)
) -> Case:
    """A case of up to `most_rows` rows a KV head and `most_keys` keys; the cache lies on multiples of `units` bytes."""
    heads_k = rng.choice([1, 1, 1, 2, 3])
    group = min(rng.choice([1, 2, 3, 8, 16, 16, 33, 64, 65, 128]), most_rows)
    q_len = min(rng.choice([1, 1, 2, 3, 4]), most_rows // group)
    page_size, batch = rng.choice([1, 2, 4, 8, 16, 32, 64, 128]), rng.choice([1, 2, 3, 5, 9])
    edges = [0, 1, q_len, 15, 17, 63, 64, 65, 127, 129, most_keys]
    lengths = [min(rng.choice([*edges, rng.randint(0, most_keys)]), 4 * most_keys // batch) for _ in range(batch)]
    d = 576 if kind == "tokens" else rng.choice([576, 576, 512])
    dtype = torch.bfloat16 if kind == "tokens" else rng.choice([torch.bfloat16, torch.bfloat16, torch.float16])
    columns = rng.choice([None, None, None, rng.randint(0, 300) // page_size])
    seed = rng.randrange(1 << 20)
    step = make_step(
        lengths, group * heads_k, heads_k, q_len, page_size, dtype, "cpu", d, seed, rng.choice([0, 3]), columns
    )
    for _ in range(rng.choice([0, 0, 2]) if step.block_table.numel() else 0):
        row = rng.randrange(batch)
        column = rng.randrange(min(step.block_table.shape[1], max(-(-lengths[row] // page_size), 1)))
        step.block_table[row, column] = rng.choice([*NO_PAGES, step.k_cache.shape[0]])
    coded, q_scale = _coded(step, kind, rng)
    unit = rng.choice([unit for unit in units if unit >= coded.step.k_cache.element_size()])
    coded.step.k_cache, _ = roomy(coded.step.k_cache, unit // coded.step.k_cache.element_size(), rng)
    planned, count = _planned(coded.step.cache_seqlens, rng)
    parts, causal, empty = rng.choice([1, 2, 3, 5, 9, 40]), rng.random() < 0.5, rng.choice([math.inf, -math.inf])
    return Case(kind, coded, q_scale, causal, parts, planned, count, empty, rng)


def _coded(step: Step, kind: str, rng: random.Random) -> tuple[Coded, torch.Tensor | None]:
    if kind == "tokens":
        return with_tokens(step), None
    if kind == "plain":
        return Coded(step, replace(step, k_cache=step.k_cache.double()), None), None
    coded = with_codes(step, rng.choice([0.02, 0.1, 0.003]))
    sign = rng.choice([1.0, 1.0, 1.0, -1.0, 0.0])
    coded.values.k_cache = coded.values.k_cache * sign
    assert coded.k_scale is not None
    coded.k_scale = torch.mul(coded.k_scale, sign).reshape(rng.choice([(), (1,), (1, 1)]))
    return coded, rng.choice([None, torch.tensor(0.5), torch.tensor([-1.0])])


def _planned(lengths: torch.Tensor, rng: random.Random) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The lengths that a plan is made of: these, those of another step, those of fewer requests, or a count beside."""
    how, batch = rng.choice(["these", "others", "fewer", "count"]), len(lengths)
    if how == "others":
        return torch.tensor([rng.randint(1, 700) if n else 0 for n in lengths.tolist()], dtype=torch.int32), None
    if how == "fewer":
        return lengths[: rng.randint(0, batch)].clone(), None
    return lengths, torch.tensor([rng.randint(-1, batch + 2)], dtype=torch.int32) if how == "count" else None
