"""MLA decode at its awkward sizes, small, for compute-sanitizer: see sanitizer_cases.py.

    compute-sanitizer --tool memcheck  --error-exitcode 1 python -m tests.gpu.sanitizer_mla
    compute-sanitizer --tool racecheck --error-exitcode 1 python -m tests.gpu.sanitizer_mla

The cases are those of the tests that also run on the CPU: every tile, whole and split requests, pads, every cache.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.gpu.sanitizer_cases import main
from tests.mla_oracle import Coded, assert_decoded, make_step, reference, with_codes, with_tokens
from tests.test_mla_codes import decode

DEVICE = "cuda"
LENGTHS = [0, 1, 63, 65, 200]


def check(coded: Coded, kind: str, parts: int | None = None) -> None:
    assert_decoded(*decode(coded, kind, True, num_parts=parts), reference(coded.values, True))


def every_tile() -> None:
    """Rows of every tile: one, part of one, and more than one, of query tokens times heads."""
    for heads, q_len in ((1, 1), (16, 1), (24, 2), (64, 1), (65, 2)):
        step = make_step(LENGTHS, heads, q_len=q_len, device=DEVICE)
        check(Coded(step, step, None), "plain")


def pieces_and_pages() -> None:
    for page_size, heads_k in ((1, 1), (16, 1), (64, 3)):
        step = make_step(LENGTHS, 16 * heads_k, heads_k, page_size=page_size, dtype=torch.float16, device=DEVICE)
        check(Coded(step, step, None), "plain", parts=7)


def eight_bit_caches() -> None:
    for heads in (16, 64):
        check(with_codes(make_step(LENGTHS, heads, device=DEVICE)), "codes")
        check(with_tokens(make_step(LENGTHS, heads, device=DEVICE)), "tokens", parts=5)


CASES: list[Callable[[], None]] = [every_tile, pieces_and_pages, eight_bit_caches]


if __name__ == "__main__":
    main(CASES)
