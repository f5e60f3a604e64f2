"""Faults that other merge kernels had, which only a GPU can show. The others: tests/test_field_bugs_merge.py."""

from __future__ import annotations

import pytest
import torch

import jitkern
from tests.merge_oracle import States, assert_merged, random_states
from tests.states_oracle import random_partials


@pytest.mark.parametrize("side", ["prefix", "suffix"])
@pytest.mark.parametrize("d", [192, 96, 80, 576])
def test_aliased_a_thousand_times(d: int, side: str) -> None:
    """local-inference-lab/vllm#468: heads that straddle blocks of 128 threads, O and L overwritten in place."""
    states = random_states(4096, 8, d, torch.bfloat16, "cuda", disjoint=False)
    out, lse = states.outputs()
    jitkern.merge_attn_states(out, states.a, states.a_lse, states.b, states.b_lse, lse)
    mine = states.clone()
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    v, s, v_from, s_from = (
        (mine.a, mine.a_lse, states.a, states.a_lse)
        if side == "prefix"
        else (mine.b, mine.b_lse, states.b, states.b_lse)
    )
    for _ in range(1000):
        v.copy_(v_from)
        s.copy_(s_from)
        jitkern.merge_attn_states(v, mine.a, mine.a_lse, mine.b, mine.b_lse, s)
        different += (v.view(torch.int16) != out.view(torch.int16)).sum()
        different += (s.view(torch.int32) != lse.view(torch.int32)).sum()
    assert different.item() == 0


@pytest.mark.parametrize("partial", [0, 2])
def test_many_partials_aliased_a_thousand_times(partial: int) -> None:
    p = random_partials(2048, 3, 8, 192, torch.bfloat16, "cuda")
    expected, expected_lse = jitkern.merge_states(p.v, p.s)
    mine = p.clone()
    v, s = mine.v[:, partial], mine.s[:, partial]
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        mine.v.copy_(p.v)
        mine.s.copy_(p.s)
        jitkern.merge_states(mine.v, mine.s, out=v, out_lse=s)
        different += (v.contiguous().view(torch.int16) != expected.view(torch.int16)).sum()
        different += (s != expected_lse).sum()
    assert different.item() == 0


def test_transposed_logarithms_of_another_stream() -> None:
    """TE#1624: L.T.contiguous() on one stream, the merge on another, behind an event."""
    states = random_states(512, 8, 128, torch.bfloat16, "cuda")
    token_major = states.a_lse.T.contiguous()
    out, lse = states.outputs()
    jitkern.merge_attn_states(out, states.a, states.a_lse, states.b, states.b_lse, lse)
    one, two = torch.cuda.Stream(), torch.cuda.Stream()
    late = torch.zeros_like(states.a_lse)
    torch.cuda.synchronize()
    with torch.cuda.stream(one):
        torch.cuda._sleep(100_000_000)
        late.copy_(token_major.T.contiguous())
        ready = one.record_event()
    with torch.cuda.stream(two):
        two.wait_event(ready)
        jitkern.merge_attn_states(out.fill_(-1), states.a, late, states.b, states.b_lse, lse)
    two.synchronize()
    assert_merged(out, lse, states)


def test_a_refusal_leaves_no_error_behind() -> None:
    states = random_states(16, 4, 64, torch.bfloat16, "cuda")
    out, lse = states.outputs()
    for wrong in (states.a[:, :2], states.a.float(), states.a.cpu()):
        with pytest.raises(jitkern.ArgumentError):
            jitkern.merge_attn_states(out, wrong, states.a_lse, states.b, states.b_lse, lse)
    torch.cuda.synchronize()
    jitkern.merge_attn_states(out, states.a, states.a_lse, states.b, states.b_lse, lse)
    torch.cuda.synchronize()
    assert_merged(out, lse, states)


def test_counts_masks_and_row_operations_are_read_anew_by_a_replayed_graph() -> None:
    """flashinfer#372 and beyond: one capture, other rows at every replay."""
    states = random_states(64, 4, 128, torch.bfloat16, "cuda", disjoint=False)
    v, s = states.a.clone(), states.a_lse.T.contiguous()
    s_b = states.b_lse.T.contiguous()
    stacked, stacked_s = torch.stack([states.a, states.b], 1), torch.stack([s, s_b], 1)
    out, lse = states.outputs()
    k, mask = torch.zeros(1, dtype=torch.int32, device="cuda"), torch.zeros(64, dtype=torch.bool, device="cuda")
    count = torch.zeros(64, dtype=torch.int32, device="cuda")
    merged, merged_s = torch.empty_like(states.a), torch.empty_like(s)

    def step() -> None:
        v.copy_(states.a)
        s.copy_(states.a_lse.T)
        jitkern.merge_state_in_place(v, s, states.b, s_b, mask)
        jitkern.merge_attn_states(out, states.a, states.a_lse, states.b, states.b_lse, lse, k)
        jitkern.merge_states(stacked, stacked_s, num_valid=count, out=merged, out_lse=merged_s)

    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for rows in (64, 0, 17):
        k.fill_(rows)
        mask.zero_()[:rows] = True
        count.fill_(1)[:rows] = 2
        graph.replay()
        torch.cuda.synchronize()
        assert_merged(out, lse, states, rows)
        kept = States(states.a[:rows], states.a_lse[:, :rows], states.b[:rows], states.b_lse[:, :rows])
        assert_merged(v[:rows], s[:rows].T, kept)
        assert torch.equal(v[rows:].nan_to_num(7), states.a[rows:].nan_to_num(7))
        assert_merged(merged[:rows], merged_s[:rows].T, kept)
