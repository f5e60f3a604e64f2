"""JITKERN_VALIDATE=1: values that the kernels take without a word are refused by name and place."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import jitkern
from jitkern import settings
from jitkern.ops import pairwise
from tests.merge_oracle import States, assert_merged, random_states


@pytest.fixture
def validating() -> Iterator[None]:
    pairwise._recent.forget()
    with settings.override(validate=True):
        yield


def merge(states: States, **more: object) -> torch.Tensor:
    out, lse = states.outputs()
    jitkern.merge_attn_states(out, states.a, states.a_lse, states.b, states.b_lse, lse, **more)  # type: ignore[arg-type]
    assert_merged(out, lse, states)
    return out


def test_good_values_pass_and_so_does_garbage_of_empty_sides(validating: None) -> None:
    for _ in range(2):
        merge(random_states(9, 3, 32, torch.float32, disjoint=False, empty=0.4))


def test_bad_values_are_found_every_time(validating: None) -> None:
    states = random_states(9, 3, 32, torch.float32, empty=0)
    merge(states)
    states.b_lse[2, 7] = float("nan")
    with pytest.raises(
        jitkern.ArgumentError, match=r"suffix_lse is NaN at 1 places, the first \[token, head\] = \[7, 2\]"
    ):
        merge(states)
    states.b_lse[2, 7] = 0
    states.a[4, 1, 5] = float("inf")
    with pytest.raises(jitkern.ArgumentError, match=r"prefix_output is not finite .* = \[4, 1\]"):
        merge(states)


@pytest.mark.parametrize("scale", [0.0, -1.0, float("nan"), float("inf")])
def test_scales(validating: None, scale: float) -> None:
    states = random_states(4, 2, 32, torch.float32, empty=0)
    out = torch.empty_like(states.a, dtype=torch.float8_e4m3fn)
    operands = (out, states.a, states.a_lse, states.b, states.b_lse)
    with pytest.raises(jitkern.ArgumentError, match="output_scale is"):
        jitkern.merge_attn_states(*operands, output_scale=torch.tensor([scale]))


def test_counts(validating: None) -> None:
    v, s = torch.randn(3, 4, 2, 8), torch.randn(3, 4, 2)
    with pytest.raises(jitkern.ArgumentError, match=r"num_valid is \[1, 9, 2\]; expected 0 to 4"):
        jitkern.merge_states(v, s, num_valid=torch.tensor([1, 9, 2], dtype=torch.int32))


def test_off_by_default() -> None:
    states = random_states(9, 3, 32, torch.float32, empty=0)
    states.a_lse[0, 0] = float("nan")
    merge(states)
