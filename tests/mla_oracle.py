"""MLA decode in float64, page by page from the definition; data and tolerances as in FlashMLA's own tests."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

GARBAGE_PAGE = 2147480000  # what an unused table entry may hold
WIDE = torch.float64


@dataclass
class Step:
    """The operands of one decode step."""

    q: torch.Tensor
    k_cache: torch.Tensor
    block_table: torch.Tensor
    cache_seqlens: torch.Tensor

    @property
    def lengths(self) -> list[int]:
        return [int(n) for n in self.cache_seqlens.tolist()]

    @property
    def page_size(self) -> int:
        return int(self.k_cache.shape[1])

    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        return self.q, self.k_cache, self.block_table, self.cache_seqlens

    def rows(self, *which: int) -> Step:
        at = list(which)
        return replace(self, q=self.q[at], block_table=self.block_table[at], cache_seqlens=self.cache_seqlens[at])


def make_step(
    lengths: list[int],
    heads: int = 16,
    heads_k: int = 1,
    q_len: int = 1,
    page_size: int = 64,
    dtype: torch.dtype = torch.bfloat16,
    device: str = "cpu",
    head_dim: int = 576,
    seed: int = 0,
    spare_pages: int = 3,
    columns: int | None = None,
    scale: float = 0.1,
) -> Step:
    """Random operands: shuffled pages, NaN in each row of the cache that nobody owns, garbage in unused entries."""
    generator = torch.Generator().manual_seed(seed)
    batch, used = len(lengths), [-(-n // page_size) for n in lengths]
    pages = sum(used) + spare_pages
    k_cache = torch.randn(pages, page_size, heads_k, head_dim, generator=generator).mul_(scale).clamp_(-1, 1).to(dtype)
    owners = torch.randperm(pages, generator=generator)[: sum(used)].int()
    wide = max([*used, 0]) + 4 if columns is None else columns
    block_table = torch.full((batch, wide), GARBAGE_PAGE, dtype=torch.int32)
    owned = torch.zeros(pages, page_size, dtype=torch.bool)
    first = 0
    for i, (length, n) in enumerate(zip(lengths, used, strict=True)):
        mine = owners[first : first + n]
        first += n
        block_table[i, : min(n, wide)] = mine[:wide]
        for k, page in enumerate(mine.tolist()):
            owned[page, : min(length - k * page_size, page_size)] = True
    k_cache[~owned] = math.nan
    q = torch.randn(batch, q_len, heads, head_dim, generator=generator).mul_(10 * scale).clamp_(-10, 10).to(dtype)
    seqlens = torch.tensor(lengths, dtype=torch.int32)
    return Step(*(x.to(device) for x in (q, k_cache, block_table, seqlens)))


def rising(step: Step, slope: float) -> Step:
    """The step with `slope` added to the scores of each later block of 64 tokens, by a column behind the values."""
    cache = step.k_cache.clone()
    for row, length in zip(step.block_table, step.lengths, strict=True):
        for token in range(length):
            cache[row[token // step.page_size], token % step.page_size, :, -1] = (
                slope * (token // 64) * step.q.shape[-1] ** 0.5
            )
    q = step.q.clone()
    q[..., -1] = 1
    return replace(step, q=q, k_cache=cache)


def reference(
    step: Step, causal: bool = False, softmax_scale: float | None = None, head_dim_v: int = 512, empty: float = math.inf
) -> tuple[torch.Tensor, torch.Tensor]:
    """(O [batch, q_len, heads, head_dim_v], L [batch, heads, q_len] in base e), float64."""
    batch, q_len, heads, d = step.q.shape
    pages, page_size, heads_k, _ = step.k_cache.shape
    scale = d**-0.5 if softmax_scale is None else softmax_scale
    out = torch.zeros(batch, q_len, heads, head_dim_v, dtype=WIDE, device=step.q.device)
    lse = torch.full((batch, heads, q_len), empty, dtype=WIDE, device=step.q.device)
    table = step.block_table.cpu()
    for i, length in enumerate(step.lengths):
        keys, position = [], []
        for k in range(min(-(-length // page_size), table.shape[1])):
            page, n = int(table[i, k]), min(page_size, length - k * page_size)
            if 0 <= page < pages:
                keys.append(step.k_cache[page, :n].to(WIDE))
                position.append(torch.arange(n, device=step.q.device) + k * page_size)
        if not keys:
            continue
        key, where = torch.cat(keys), torch.cat(position)
        for t in range(q_len):
            seen = where < (length - (q_len - 1 - t) if causal else length)
            if not seen.any():
                continue
            for head in range(heads):
                mine = key[seen, head // (heads // heads_k)]
                scores = mine @ step.q[i, t, head].to(WIDE) * scale
                lse[i, head, t] = torch.logsumexp(scores, 0)
                out[i, t, head] = torch.softmax(scores, 0) @ mine[:, :head_dim_v]
    return out, lse


def assert_decoded(
    out: torch.Tensor, lse: torch.Tensor, expected: tuple[torch.Tensor, torch.Tensor], base: float = math.e
) -> None:
    """FlashMLA's own bounds: O within 8e-4 or 2.01/128, L within 1e-6 or 8.01/65536, cosines 5e-6 and 1e-7."""
    _assert_close("O", out, expected[0], 8e-4, 2.01 / 128, 5e-6)
    _assert_close("L", lse, expected[1] / math.log(base), 1e-6, 8.01 / 65536, 1e-7)


def _assert_close(name: str, got: torch.Tensor, want: torch.Tensor, atol: float, rtol: float, cosine: float) -> None:
    assert got.shape == want.shape, f"{name} has shape {list(got.shape)}, expected {list(want.shape)}"
    got, want = got.to(WIDE), want.to(got.device)
    assert not got.isnan().any(), f"{name} has {int(got.isnan().sum())} NaN of {got.numel()}"
    infinite = want.isinf()
    assert torch.equal(got.isinf(), infinite), f"{name} is infinite in other places than the reference"
    assert torch.equal(got[infinite], want[infinite]), f"{name} has infinities of the wrong sign"
    got, want = got[~infinite], want[~infinite]
    if not got.numel():
        return
    difference = (got - want).abs()
    bad = (difference >= atol) & (difference >= rtol * want.abs())
    assert not bad.any(), (
        f"{name}: {int(bad.sum())} of {bad.numel()} elements are off, the worst by {difference[bad].max():.3g}"
    )
    norm = (got * got + want * want).sum()
    if norm > 0:
        off = 1 - 2 * (got * want).sum() / norm
        assert off < cosine, f"{name}: cosine difference {off:.3g}, allowed {cosine}"


@dataclass
class Coded:
    """A step whose cache holds codes, and the same step with the values that they stand for."""

    step: Step
    values: Step
    k_scale: torch.Tensor | None


def with_codes(step: Step, scale: float = 0.02) -> Coded:
    """The cache as e4m3, all times one scale."""
    codes = (step.k_cache.float() / scale).to(torch.float8_e4m3fn)
    values = replace(step, k_cache=codes.to(WIDE) * torch.tensor(scale, dtype=torch.float32).to(WIDE))
    return Coded(replace(step, k_cache=codes), values, torch.tensor([scale], device=step.q.device))


def with_tokens(step: Step) -> Coded:
    """The cache as tokens of 656 bytes: 512 e4m3, a float32 scale for each 128 of them, 64 bf16."""
    latent, rope = step.k_cache[..., :512].float().unflatten(-1, (4, 128)), step.k_cache[..., 512:]
    scale = latent.abs().amax(-1, keepdim=True) / 448
    codes = (latent / scale).to(torch.float8_e4m3fn)
    parts = (codes.flatten(-2), scale.squeeze(-1), rope.bfloat16())
    packed = torch.cat([part.contiguous().view(torch.uint8) for part in parts], -1)
    rounded = (codes.float() * scale).bfloat16()  # that a key is bf16 is part of the format
    values = replace(step, k_cache=torch.cat([rounded.flatten(-2), rope.bfloat16()], -1).to(WIDE))
    return Coded(replace(step, k_cache=packed), values, None)
