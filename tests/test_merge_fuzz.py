"""Random layouts, types, numbers, controls: merge_states and merge_state_in_place on the CPU against the oracle."""

from __future__ import annotations

import math
from typing import Any

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import jitkern
from tests.merge_oracle import States, assert_merged
from tests.merge_oracle import merge as merge_pair
from tests.states_oracle import assert_states, random_partials
from tests.test_merge_contract import same_bits

# A variant is compiled for each: few, and every type and every kind of pack among them.
ELEMENTS = [(torch.float32, 64), (torch.bfloat16, 64), (torch.float16, 3), (torch.float64, 16)]
BASES = [math.e, 2.0, 10.0]
POISON = -77.0


class Layout:
    """Puts a tensor anywhere: dimensions in another order, with gaps, behind an offset. Gaps hold poison, or NaN."""

    def __init__(self, draw: Any) -> None:
        self.draw = draw
        self.rooms: list[tuple[torch.Tensor, torch.Tensor, float]] = []

    def place(self, x: torch.Tensor, keep_last: bool, gap: float = math.nan) -> torch.Tensor:
        dims = x.dim() - keep_last
        order = self.draw(st.permutations(range(dims))) + ([dims] if keep_last else [])
        pads = [self.draw(st.integers(0, 2)) for _ in order]
        offset = self.draw(st.integers(0, 3))
        room = torch.full([offset + math.prod(x.shape[i] + pad for i, pad in zip(order, pads, strict=True))], gap)
        room = room.to(x.dtype)
        view = room[offset:].view([x.shape[i] + pad for i, pad in zip(order, pads, strict=True)])
        view = view[tuple(slice(0, x.shape[i]) for i in order)].permute([order.index(i) for i in range(x.dim())])
        view.copy_(x)
        self.rooms.append((room, view, gap))
        return view

    def gaps_are_whole(self) -> bool:
        """Whether nothing outside the views has changed. Destroys their contents."""
        for _, view, gap in self.rooms:
            view.fill_(gap)
        return all(
            torch.equal(room.nan_to_num(1e3), torch.full_like(room, gap).nan_to_num(1e3)) for room, _, gap in self.rooms
        )


@settings(max_examples=100)
@given(data=st.data())
def test_merge_states_of_any_layout(data: Any) -> None:
    draw = data.draw
    tokens, count, heads = draw(st.integers(1, 6)), draw(st.integers(0, 10)), draw(st.integers(1, 4))
    dtype, d = draw(st.sampled_from(ELEMENTS))
    how = draw(st.sampled_from(["stacked", "list", "ragged"] if count else ["stacked"]))
    p = random_partials(
        tokens, count, heads, d, dtype, empty=draw(st.sampled_from([0, 0.3, 0.9])), seed=draw(st.integers(0, 99))
    )
    base, base_out = draw(st.sampled_from(BASES)), draw(st.sampled_from(BASES))
    sink = draw(st.none() | st.sampled_from([-math.inf, -5.0, 0.0, 3.0, math.inf]))
    in_lse, layout = draw(st.booleans()), Layout(draw)
    more: dict[str, Any] = {"sink": None if sink is None else torch.full((heads,), sink), "sink_in_lse": in_lse}
    if how == "ragged" or (count and draw(st.booleans())):
        counts = draw(st.lists(st.integers(0, count), min_size=tokens, max_size=tokens))
        p.valid = torch.tensor(counts, dtype=torch.int32)
    v: Any
    s: Any
    if how == "ragged":
        rows, logs, more["indptr"] = p.ragged(counts)
        v, s = layout.place(rows, True), layout.place(logs, False)
    elif how == "list":
        v = [layout.place(x, True) for x in p.v.unbind(1)]
        s = [layout.place(x, False) for x in p.s.unbind(1)]
        more["num_valid"] = p.valid
    else:
        v, s, more["num_valid"] = layout.place(p.v, True), layout.place(p.s, False), p.valid
    out = layout.place(torch.zeros(tokens, heads, d, dtype=dtype), True, POISON)
    lse = layout.place(torch.zeros(tokens, heads, dtype=p.s.dtype), False, POISON)
    bases = (base, base, base_out)
    jitkern.merge_states(v, s, out=out, out_lse=lse, lse_base=bases, **more)
    assert_states(out, lse, p, base, base_out, more["sink"], in_lse)
    fresh, fresh_lse = jitkern.merge_states(v, s, lse_base=bases, **more)
    assert same_bits(fresh.nan_to_num(9), out.nan_to_num(9))
    assert same_bits(fresh_lse, lse)
    assert layout.gaps_are_whole()


@settings(max_examples=60)
@given(data=st.data())
def test_merge_state_in_place_of_any_layout(data: Any) -> None:
    draw = data.draw
    tokens, heads = draw(st.integers(1, 6)), draw(st.integers(1, 4))
    dtype, d = draw(st.sampled_from(ELEMENTS))
    p = random_partials(
        tokens, 2, heads, d, dtype, empty=draw(st.sampled_from([0, 0.3, 0.9])), seed=draw(st.integers(0, 99))
    )
    layout = Layout(draw)
    v, s = layout.place(p.v[:, 0], True), layout.place(p.s[:, 0], False)
    other, s_other = layout.place(p.v[:, 1], True), layout.place(p.s[:, 1], False)
    base = draw(st.sampled_from(BASES))
    ops = torch.tensor(draw(st.lists(st.integers(0, 3), min_size=tokens, max_size=tokens)), dtype=torch.uint8)
    kind = draw(st.sampled_from(["none", "mask", "row_op"]))
    more: dict[str, Any] = {"none": {}, "mask": {"mask": ops != 0}, "row_op": {"row_op": ops}}[kind]
    jitkern.merge_state_in_place(v, s, other, s_other, lse_base=base, **more)
    did = {"none": torch.ones_like(ops), "mask": (ops != 0).byte(), "row_op": ops}[kind]
    merged = did == 1
    states = States(p.v[merged, 0], p.s[merged, 0].T, p.v[merged, 1], p.s[merged, 1].T)
    assert_merged(v[merged], s[merged].T, states, base=base)
    left = (did == 0) | (did == 3)
    assert same_bits(v[left], p.v[left, 0])
    assert same_bits(s[left], p.s[left, 0])
    assert same_bits(v[did == 2], p.v[did == 2, 1])
    assert same_bits(s[did == 2], p.s[did == 2, 1])
    assert layout.gaps_are_whole()


@settings(max_examples=100)
@given(data=st.data())
def test_the_two_oracles_agree(data: Any) -> None:
    """Pairs by max-shift and pairs by softmax are written independently of each other: neither is wrong alone."""
    draw = data.draw
    p = random_partials(
        4, 2, 3, 8, torch.float64, empty=draw(st.sampled_from([0, 0.5])), seed=draw(st.integers(0, 999))
    )
    p.s.mul_(draw(st.sampled_from([1.0, 30.0, 300.0])))
    base = draw(st.sampled_from(BASES))
    out, lse = merge_pair(States(p.v[:, 0], p.s[:, 0].T, p.v[:, 1], p.s[:, 1].T), base=base)
    from tests.states_oracle import merge

    other, other_lse = merge(p, base)
    assert torch.allclose(out, other, rtol=1e-12, atol=1e-12)
    assert torch.allclose(lse.T, other_lse, rtol=1e-12, atol=1e-12)
