"""The whole 648-case grid on a GPU, with infinite L on either side, merged and with a copied tail; huge tensors."""

from __future__ import annotations

import pytest
import torch

import jitkern
import tests.merge_oracle as oracle
from tests.merge_oracle import States, assert_merged, random_states
from tests.test_merge_contract import DTYPES, HEAD_SIZES, HEADS, TOKENS


def assert_merged_on_gpu(out: torch.Tensor, lse: torch.Tensor, states: States, k: int | None) -> None:
    """The oracle's comparison; its float64 arithmetic runs on the device, to finish 1296 cases in a minute."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "cpu", lambda self: self)
        oracle.assert_merged(out, lse, states, k)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("d", HEAD_SIZES)
def test_grid(d: int, dtype: torch.dtype) -> None:
    for heads in HEADS:
        largest = random_states(max(TOKENS), heads, d, dtype, "cuda")
        for tokens in TOKENS:
            rows = (largest.a[:tokens], largest.a_lse[:, :tokens], largest.b[:tokens], largest.b_lse[:, :tokens])
            states = States(rows[0], rows[1].contiguous(), rows[2], rows[3].contiguous())
            for k in (None, 128):
                out, lse = states.outputs()
                jitkern.merge_attn_states(out, states.a, states.a_lse, states.b, states.b_lse, lse, k)
                assert_merged_on_gpu(out, lse, states, k)


def test_the_oracle_on_the_gpu_can_fail() -> None:
    states = random_states(8, 2, 32, torch.float32, "cuda")
    out, lse = states.outputs()
    jitkern.merge_attn_states(out, states.a, states.a_lse, states.b, states.b_lse, lse)
    assert_merged_on_gpu(out, lse, states, None)
    out.view(-1)[out.isfinite().view(-1).nonzero()[5]] += 1e-4
    with pytest.raises(AssertionError):
        assert_merged_on_gpu(out, lse, states, None)


def test_more_than_2_to_the_32_elements() -> None:
    """n=1,048,580, h=32, d=128: offsets pass 2^32; the last rows are compared by value."""
    tokens, heads, d = 1_048_580, 32, 128
    a = torch.empty(tokens, heads, d, dtype=torch.bfloat16, device="cuda").normal_()
    b = torch.empty_like(a).normal_()
    out = torch.full_like(a, -123.0)
    a_lse, b_lse = (torch.randn(heads, tokens, device="cuda") for _ in range(2))
    lse = torch.full_like(a_lse, -123.0)
    jitkern.merge_attn_states(out, a, a_lse, b, b_lse, lse)
    for part in (slice(0, 3), slice(524_286, 524_291), slice(tokens - 5, tokens)):
        assert_merged(out[part], lse[:, part], States(a[part], a_lse[:, part], b[part], b_lse[:, part]))
    assert not (out == -123).any()


def test_a_padded_stride_beyond_2_to_the_32() -> None:
    heads, d = 3, 64
    room = torch.zeros(2 * (1 << 31) + 4096, dtype=torch.bfloat16, device="cuda")
    view = room.as_strided((3, heads, d), (1 << 31, d, 1))
    states = random_states(3, heads, d, torch.bfloat16, "cuda")
    view.copy_(states.a)
    out, lse = states.outputs()
    jitkern.merge_attn_states(out, view, states.a_lse, states.b, states.b_lse, lse)
    assert_merged(out, lse, states)
