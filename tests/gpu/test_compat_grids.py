"""The peers' published grids whole, on a GPU, through jitkern.compat."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

import jitkern
import tests.merge_oracle as oracle
from jitkern.compat import sglang
from tests.merge_oracle import States, random_states
from tests.states_oracle import assert_states, random_partials
from tests.test_compat import FLASH_ATTENTION, SGLANG, TOKENSPEED, VLLM, check_sglang, check_vllm


@pytest.fixture
def on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oracle's float64 arithmetic runs on the device: the grids are long."""
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: self)


def grouped(grid: list[Any], *axes: int) -> list[tuple[Any, list[Any]]]:
    """Cases by some of their values, so that one test is some ten cases."""

    def key(case: Any) -> tuple[str, ...]:
        return tuple(str(case[axis]) for axis in axes)

    return [(name, list(cases)) for name, cases in itertools.groupby(sorted(grid, key=key), key)]


@pytest.mark.usefixtures("on_the_device")
@pytest.mark.parametrize(("name", "cases"), grouped(VLLM, 2, 3))
def test_vllm(name: Any, cases: list[Any]) -> None:
    for case in cases:
        check_vllm(case, "cuda")


@pytest.mark.usefixtures("on_the_device")
@pytest.mark.parametrize(("name", "cases"), grouped(SGLANG, 2, 3))
def test_sglang(name: Any, cases: list[Any]) -> None:
    for case in cases:
        check_sglang(case, "cuda")


@pytest.mark.usefixtures("on_the_device")
@pytest.mark.parametrize("base", ["e", "2", "10"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_tokenspeed(base: str, dtype: torch.dtype) -> None:
    number = {"e": math.e, "2": 2.0, "10": 10.0}[base]
    for case in TOKENSPEED:
        states = random_states(*case, dtype, "cuda")
        out, lse = states.outputs()
        jitkern.merge_attn_states(out, states.a, states.a_lse, states.b, states.b_lse, lse, lse_base=base)
        oracle.assert_merged(out, lse, states, base=number)


@pytest.mark.parametrize("case", FLASH_ATTENTION)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flash_attention(case: tuple[int, int, int], dtype: torch.dtype) -> None:
    count, length, d = case
    p = random_partials(5 * length, count, 16, d, dtype, "cuda", empty=0)
    if count > 1:
        p.s[::3, count // 2 :], p.v[::3, count // 2 :] = -math.inf, math.nan
    assert_states(*jitkern.merge_states(p.v, p.s), p)


def test_sglang_overflow_regression() -> None:
    """262,152 tokens, 128 heads of 128: 2^32 elements and more, in float16. Three rows are compared, none is poison."""
    tokens, heads, d = 262_152, 128, 128
    a, b = (torch.empty(tokens, heads, d, dtype=torch.float16, device="cuda").normal_() for _ in range(2))
    a_lse, b_lse = (torch.randn(tokens, heads, device="cuda") for _ in range(2))
    out = torch.full_like(a, -123.0)
    _, lse = sglang.merge_state_v2(a, a_lse, b, b_lse, out)
    for token in (0, tokens // 2, tokens - 1):
        row = slice(token, token + 1)
        states = States(a[row], a_lse[row].T, b[row], b_lse[row].T)
        oracle.assert_merged(out[row], lse[row].T, states)
    assert not (out == -123).any()
