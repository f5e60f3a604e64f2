"""Every kernel of the merge family at its awkward sizes, small, for compute-sanitizer:

    compute-sanitizer --tool memcheck  --error-exitcode 1 python -m tests.gpu.sanitizer_cases
    compute-sanitizer --tool racecheck --error-exitcode 1 python -m tests.gpu.sanitizer_cases

A caching allocator hides an access just behind a tensor, so run it with PYTORCH_NO_CUDA_MEMORY_CACHING=1. Results are
compared with the CPU's, to see that the cases did run.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch

import jitkern
from tests.merge_oracle import random_states
from tests.states_oracle import Partials, assert_states, random_partials

DEVICE = "cuda"


def pair(tokens: int, heads: int, d: int, dtype: torch.dtype) -> None:
    states = random_states(tokens, heads, d, dtype, DEVICE, disjoint=False)
    out, lse = states.outputs()
    jitkern.merge_attn_states(out, states.a, states.a_lse, states.b, states.b_lse, lse, tokens // 2)
    host = random_states(tokens, heads, d, dtype, disjoint=False)
    expected, expected_lse = host.outputs()
    jitkern.merge_attn_states(expected, host.a, host.a_lse, host.b, host.b_lse, expected_lse, tokens // 2)
    assert torch.equal(out.cpu().nan_to_num(9), expected.nan_to_num(9))
    assert torch.equal(lse.cpu().nan_to_num(9), expected_lse.nan_to_num(9))


def narrow_and_ragged_grids() -> None:
    """n * h no multiple of a block; packs of 16 bytes down to 1."""
    for dtype in (torch.float32, torch.bfloat16):
        for tokens, heads, d in (
            (1, 1, 32),
            (613, 3, 64),
            (5, 7, 80),
            (3, 33, 192),
            (2, 3, 59),
            (7, 5, 1),
            (2, 2, 576),
        ):
            pair(tokens, heads, d, dtype)


def odd_addresses() -> None:
    for offset in (1, 2, 4):
        states = random_states(37, 3, 64, torch.bfloat16, DEVICE)
        room = torch.zeros(states.a.numel() + offset, dtype=torch.bfloat16, device=DEVICE)
        view = room[offset:].view(states.a.shape)
        view.copy_(states.a)
        out, lse = states.outputs()
        jitkern.merge_attn_states(out, view, states.a_lse, states.b, states.b_lse, lse)
        jitkern.merge_attn_states(view, view, states.a_lse, states.b, states.b_lse, lse)
        assert torch.equal(view.nan_to_num(9), out.nan_to_num(9))


def aliased() -> None:
    """O and L over either input, where a row's threads are no multiple of a warp."""
    for d in (192, 96, 80, 576):
        for side in ("a", "b"):
            states = random_states(129, 3, d, torch.bfloat16, DEVICE)
            out, lse = states.outputs()
            jitkern.merge_attn_states(out, states.a, states.a_lse, states.b, states.b_lse, lse)
            v, s = getattr(states, side), getattr(states, f"{side}_lse")
            jitkern.merge_attn_states(v, states.a, states.a_lse, states.b, states.b_lse, s)
            assert torch.equal(v.nan_to_num(9), out.nan_to_num(9))
            assert torch.equal(s.nan_to_num(9), lse.nan_to_num(9))


def in_place_by_rows() -> None:
    states = random_states(61, 3, 96, torch.bfloat16, DEVICE)
    v, s, s_b = states.a.clone(), states.a_lse.T.contiguous(), states.b_lse.T.contiguous()
    jitkern.merge_state_in_place(v, s, states.b, s_b, (torch.arange(61, device=DEVICE) % 2).bool())
    jitkern.merge_state_in_place(v, s, states.b, s_b, row_op=(torch.arange(61, device=DEVICE) % 4).byte())
    assert torch.equal(v[::4].nan_to_num(9), states.a[::4].nan_to_num(9))


def many_partials() -> None:
    for count, d, dtype in (
        (1, 64, torch.float32),
        (3, 80, torch.bfloat16),
        (17, 59, torch.bfloat16),
        (6, 576, torch.float16),
    ):
        p = random_partials(13, count, 3, d, dtype, DEVICE)
        sink = torch.zeros(3, device=DEVICE)
        assert_states(*jitkern.merge_states(p.v, p.s, sink=sink), p, sink=sink)
        assert_states(*jitkern.merge_states(*p.lists()), p)
        p.valid = torch.arange(13, dtype=torch.int32, device=DEVICE) % (count + 2)
        assert_states(*jitkern.merge_states(p.v, p.s, num_valid=p.valid), p)
        v, s, indptr = p.ragged(p.valid.clamp(max=count).tolist())
        assert_states(*jitkern.merge_states(v, s, indptr=indptr), p)
        mine = p.clone()
        jitkern.merge_states(mine.v, mine.s, num_valid=p.valid, out=mine.v[:, 0], out_lse=mine.s[:, 0])
        assert_states(mine.v[:, 0], mine.s[:, 0], p)


def eight_bits() -> None:
    states = random_states(37, 3, 80, torch.bfloat16, DEVICE, disjoint=False)
    one = torch.ones(1, device=DEVICE)
    for kind in (torch.float8_e4m3fn, torch.float8_e5m2):
        out = torch.empty_like(states.a, dtype=kind)
        jitkern.merge_attn_states(out, states.a, states.a_lse, states.b, states.b_lse, None, 20, one)
        scales: Any = {"prefix_scale": one, "suffix_scale": one}
        a, b, wide = states.a.to(kind), states.b.to(kind), torch.empty_like(states.a)
        jitkern.merge_attn_states(wide, a, states.a_lse, b, states.b_lse, **scales)
        groups = torch.empty(37, 3, device=DEVICE)
        operands = (out, states.a, states.a_lse, states.b, states.b_lse)
        jitkern.merge_attn_states(*operands, output_group_scale=groups)


def backward() -> None:
    for count, d in ((2, 80), (5, 59), (3, 576)):
        p = random_partials(13, count, 3, d, torch.float32, DEVICE)
        leaves = [x.requires_grad_() for y in p.lists() for x in y]
        v, s = jitkern.merge_states(leaves[:count], leaves[count:])
        (v.sum() + torch.where(s.isinf(), 0, s).sum()).backward()
        assert all(x.grad is not None and x.grad.isfinite().all() for x in leaves)
        stacked = Partials(p.v.clone().requires_grad_(), p.s.clone().requires_grad_())
        counts = torch.full((13,), count - 1, dtype=torch.int32, device=DEVICE)
        jitkern.merge_states(stacked.v, stacked.s, num_valid=counts)[0].sum().backward()


CASES: list[Callable[[], None]] = [
    narrow_and_ragged_grids,
    odd_addresses,
    aliased,
    in_place_by_rows,
    many_partials,
    eight_bits,
    backward,
]


def main(cases: list[Callable[[], None]]) -> None:
    """Run all, or those named on the command line."""
    for case in cases:
        if len(sys.argv) < 2 or case.__name__ in sys.argv[1:]:
            case()
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            sys.stdout.write(f"{case.__name__}: done\n")


if __name__ == "__main__":
    main(CASES)
