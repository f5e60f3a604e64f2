"""jitkern.prepare: bound once, launched many times, on nobody else's parameter block."""

from __future__ import annotations

import pytest
import torch

import jitkern
from tests.merge_oracle import assert_merged, random_states


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_a_prepared_call_uses_its_own_operands(device: str) -> None:
    one, two = (random_states(40, 4, 64, torch.bfloat16, device, seed=seed) for seed in (1, 2))
    out, lse = one.outputs()
    other, other_lse = two.outputs()
    prepared = jitkern.prepare(jitkern.merge_attn_states, out, one.a, one.a_lse, one.b, one.b_lse, lse)
    assert (out == -123).all(), "preparing launches nothing"
    jitkern.merge_attn_states(other, two.a, two.a_lse, two.b, two.b_lse, other_lse)  # the same shapes, another call
    prepared()
    assert_merged(out, lse, one)
    assert_merged(other, other_lse, two)
    one.a.copy_(two.a)
    one.a_lse.copy_(two.a_lse)
    prepared()
    assert_merged(out, lse, one)


def test_outputs_are_the_result() -> None:
    states = random_states(9, 2, 32, torch.float32, empty=0)
    s_a, s_b = states.a_lse.T.contiguous(), states.b_lse.T.contiguous()
    prepared = jitkern.prepare(jitkern.merge_state, states.a, s_a, states.b, s_b)
    prepared()
    v, s = prepared.result
    assert_merged(v, s.T, states)


def test_what_cannot_be_prepared() -> None:
    states = random_states(9, 2, 32, torch.float32)
    out, _ = states.outputs()
    operands = (out, states.a, states.a_lse, states.b, states.b_lse)
    with pytest.raises(jitkern.ArgumentError, match="stream= is given"):
        jitkern.prepare(jitkern.merge_attn_states, *operands, stream=0)
    with pytest.raises(jitkern.ArgumentError, match="suffix_lse"):
        jitkern.prepare(jitkern.merge_attn_states, *operands[:4], out)
    states.a.requires_grad_()
    with pytest.raises(jitkern.UnsupportedError, match="requires a gradient"):
        jitkern.prepare(jitkern.merge_attn_states, *operands)
    states.a.requires_grad_(False)
    jitkern.merge_attn_states(*operands)  # a refused preparation leaves nothing recording
    assert_merged(out, None, states)


def test_a_fresh_mask_is_bound_to_nothing() -> None:
    from jitkern.ops import pairwise

    states = random_states(9, 2, 32, torch.float32, empty=0)
    s_a, s_b = states.a_lse.T.contiguous(), states.b_lse.T.contiguous()
    masks = [torch.arange(9) % 2 == i for i in (0, 1)]
    jitkern.merge_state_in_place(states.a.clone(), s_a.clone(), states.b, s_b, masks[0].clone())
    bound = len(pairwise._thread.calls)
    for mask in masks:
        v, s = states.a.clone(), s_a.clone()
        jitkern.merge_state_in_place(v, s, states.b, s_b, mask)
        assert torch.equal(v[~mask], states.a[~mask])
        assert not torch.isclose(v[mask], states.a[mask]).all()
    assert len(pairwise._thread.calls) == bound
