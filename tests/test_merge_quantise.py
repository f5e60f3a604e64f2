"""Merging into 8-bit elements with a scale for each token or group, against torch's conversion of the plain merge."""

from __future__ import annotations

import math

import pytest
import torch

import jitkern
from tests.merge_oracle import States, random_states

BACKENDS = ["cpu", pytest.param("nvrtc", marks=pytest.mark.gpu)]
FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


def plain_merge(states: States, k: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """The float32 merge that the other tests hold to the oracle."""
    out, lse = torch.empty_like(states.a, dtype=torch.float32), torch.empty_like(states.a_lse)
    jitkern.merge_attn_states(out, states.a.float(), states.a_lse, states.b.float(), states.b_lse, lse, k)
    return out, lse


def quantise(wide: torch.Tensor, groups: int, dtype: torch.dtype, ue8m0: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """On the CPU: torch's GPU division by a number multiplies by its reciprocal, and rounds otherwise."""
    device, wide = wide.device, wide.cpu()
    tokens, heads, d = wide.shape
    parts = wide.view(tokens, groups, heads * d // groups)
    most = torch.finfo(dtype).max
    scale = parts.nan_to_num(0, posinf=torch.finfo(torch.float32).max).abs().amax(-1).clamp_min(1e-10) / most
    if ue8m0:
        mantissa, exponent = torch.frexp(scale)
        scale = torch.ldexp(torch.ones_like(scale), exponent - (mantissa == 0.5).int())
    codes = (parts * (1 / scale).unsqueeze(-1)).clamp(-most, most).to(dtype)
    return codes.view(wide.shape).to(device), scale.to(device)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("ue8m0", [False, True])
@pytest.mark.parametrize("dtype", FLOAT8)
@pytest.mark.parametrize(
    ("heads", "d", "group"), [(4, 128, 64), (4, 128, 128), (4, 128, 512), (6, 64, 128), (3, 24, 12)]
)
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_groups(
    backend: str, heads: int, d: int, group: int, dtype: torch.dtype, ue8m0: bool, kind: torch.dtype
) -> None:
    device = "cpu" if backend == "cpu" else "cuda"
    states = random_states(7, heads, d, kind, device, disjoint=False)
    states.a[3], states.b[3] = 0, 0  # a group of zeros has a scale all the same
    states.a[5, 0, 1] = math.nan
    wide, wide_lse = plain_merge(states, 5)
    groups = heads * d // group
    codes, scales = quantise(wide, groups, dtype, ue8m0)
    layouts = {
        "row": torch.full((7, groups), 7.0, device=device),
        "column": torch.full((groups, 7), 7.0, device=device).T,
        "column, padded to 4 tokens": torch.full((groups, 8), 7.0, device=device).T[:7],
    }
    for name, scale in layouts.items():
        out, lse = torch.empty_like(states.a, dtype=dtype), torch.empty_like(states.a_lse)
        operands = (out, states.a, states.a_lse, states.b, states.b_lse, lse, 5)
        jitkern.merge_attn_states(*operands, output_group_scale=scale, scale_ue8m0=ue8m0, backend=backend)
        assert torch.equal(scale, scales), name
        assert torch.equal(out.view(torch.uint8), codes.view(torch.uint8)), name
        assert torch.equal(lse.nan_to_num(9), wide_lse.nan_to_num(9)), name


def test_an_infinite_element_saturates_and_spares_its_group() -> None:
    states = random_states(1, 1, 64, torch.float32, empty=0)
    states.b_lse.fill_(-math.inf)
    states.a[0, 0, 0] = math.inf
    out, scale = torch.empty_like(states.a, dtype=torch.float8_e4m3fn), torch.zeros(1, 1)
    jitkern.merge_attn_states(out, states.a, states.a_lse, states.b, states.b_lse, output_group_scale=scale)
    assert scale.isfinite().all()
    assert out.float().isfinite().all()
    assert out[0, 0, 0].float() == 448


@pytest.mark.parametrize(
    ("shape", "word"),
    [((7, 5), "equal parts"), ((6, 4), "expected \\[7, groups\\]"), ((7, 0), "groups"), ((7,), "shape")],
)
def test_refused(shape: tuple[int, ...], word: str) -> None:
    states = random_states(7, 4, 64, torch.bfloat16)
    out = torch.empty_like(states.a, dtype=torch.float8_e4m3fn)
    with pytest.raises(jitkern.ArgumentError, match=word):
        jitkern.merge_attn_states(
            out, states.a, states.a_lse, states.b, states.b_lse, output_group_scale=torch.zeros(shape)
        )
