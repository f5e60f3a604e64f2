"""MLA decode at its awkward sizes, small, for compute-sanitizer: see sanitizer_cases.py.

    compute-sanitizer --tool memcheck  --error-exitcode 1 python -m tests.gpu.sanitizer_mla
    compute-sanitizer --tool racecheck --error-exitcode 1 python -m tests.gpu.sanitizer_mla

The cases are those of the tests that also run on the CPU: every tile, whole and split requests, pads, every cache.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch

import jitkern
from tests.gpu.sanitizer_cases import main
from tests.mla_cases import CACHES
from tests.mla_oracle import Coded, assert_decoded, make_step, reference, with_codes, with_tokens

DEVICE = "cuda"
LENGTHS = [0, 1, 63, 65, 200]


def decode(coded: Coded, kind: str, parts: int | None = None) -> None:
    step = coded.step
    batch, q_len, heads, d = step.q.shape
    mla = jitkern.MLADecode(
        batch + 1,
        heads,
        step.k_cache.shape[2],
        q_len,
        step.q.dtype,
        DEVICE,
        d,
        512,
        step.page_size,
        cache_dtype=CACHES[kind],
        num_parts=parts,
    )
    mla.plan(step.cache_seqlens)
    out = torch.full((batch, q_len, heads, 512), math.nan, dtype=step.q.dtype, device=DEVICE)
    lse = torch.full((batch, heads, q_len), math.nan, device=DEVICE)
    mla.run(*step.operands(), causal=True, out=out, lse=lse, k_scale=coded.k_scale)
    assert_decoded(out, lse, reference(coded.values, True))


def every_tile() -> None:
    """Rows of every tile: one, part of one, and more than one, of query tokens times heads."""
    for heads, q_len in ((1, 1), (16, 1), (24, 2), (64, 1), (65, 2)):
        step = make_step(LENGTHS, heads, q_len=q_len, device=DEVICE)
        decode(Coded(step, step, None), "plain")


def pieces_and_pages() -> None:
    for page_size, heads_k in ((1, 1), (16, 1), (64, 3)):
        step = make_step(LENGTHS, 16 * heads_k, heads_k, page_size=page_size, dtype=torch.float16, device=DEVICE)
        decode(Coded(step, step, None), "plain", parts=7)


def eight_bit_caches() -> None:
    for heads in (16, 64):
        decode(with_codes(make_step(LENGTHS, heads, device=DEVICE)), "codes")
        decode(with_tokens(make_step(LENGTHS, heads, device=DEVICE)), "tokens", parts=5)


CASES: list[Callable[[], None]] = [every_tile, pieces_and_pages, eight_bit_caches]


if __name__ == "__main__":
    main(CASES)
