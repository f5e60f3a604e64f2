"""More faults that other merge kernels had: types, determinism, sinks, counts. See test_field_bugs_merge.py."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import jitkern
from tests.merge_oracle import random_states
from tests.states_oracle import Partials, assert_states, random_partials
from tests.test_merge_contract import device_of, same_bits


def test_flashinfer_1661_few_sets_and_many_alternate(backend: str) -> None:
    counts = [1, 2, 33] * 20
    p = random_partials(len(counts), 33, 4, 64, torch.float16, device_of(backend), empty=0)
    p.valid = torch.tensor(counts, dtype=torch.int32, device=p.v.device)
    v, s, indptr = p.ragged(counts)
    first, first_lse = jitkern.merge_states(v, s, indptr=indptr, backend=backend)
    assert_states(first, first_lse, p)
    out, lse = torch.empty_like(first), torch.empty_like(first_lse)
    different = torch.zeros((), dtype=torch.int64, device=v.device)
    for _ in range(20 if device_of(backend) == "cpu" else 1000):
        jitkern.merge_states(v, s, indptr=indptr, out=out.fill_(-1), out_lse=lse.fill_(-1), backend=backend)
        different += (out.view(torch.int16) != first.view(torch.int16)).sum() + (lse != first_lse).sum()
    assert different.item() == 0


def operands(**changes: torch.dtype) -> tuple[torch.Tensor, ...]:
    states = random_states(4, 2, 64, torch.bfloat16, empty=0)
    given = {"out": states.a.clone(), "a": states.a, "a_lse": states.a_lse, "b": states.b, "b_lse": states.b_lse}
    return tuple(x.to(changes.get(name, x.dtype)) for name, x in given.items())


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"out": torch.float32}, r"output is torch\.float32; expected torch\.bfloat16"),
        ({"a": torch.float16}, r"suffix_output is torch\.bfloat16; expected torch\.float16"),
        ({"b": torch.float16}, r"suffix_output is torch\.float16; expected torch\.bfloat16"),
        ({"a_lse": torch.float64}, r"prefix_lse is torch\.float64; expected torch\.float32"),
        ({"b_lse": torch.float16}, r"suffix_lse is torch\.float16; expected torch\.float32"),
    ],
)
def test_sglang_v2_reads_no_type_as_another(changes: dict[str, torch.dtype], words: str) -> None:
    given = operands(**changes)
    before = given[0].clone()
    with pytest.raises(jitkern.ArgumentError, match=words):
        jitkern.merge_attn_states(*given)
    assert same_bits(given[0].float(), before.float())


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64])
def test_flashinfer_in_place_loses_no_update(kind: torch.dtype) -> None:
    p = random_partials(4, 2, 2, 64, torch.float16, empty=0)
    v, s = p.v[:, 0].clone(), p.s[:, 0].to(kind)
    before = s.clone()
    with pytest.raises(jitkern.ArgumentError, match=r"s \(as input\) is torch\.\w+; expected torch\.float32"):
        jitkern.merge_state_in_place(v, s, p.v[:, 1], p.s[:, 1])
    assert torch.equal(s, before)


@pytest.mark.parametrize("how", ["stacked", "list", "a pair of pairs"])
def test_rocm_12227_a_sink_is_counted_once_however_the_splits_are_merged(backend: str, how: str) -> None:
    """N=3 without a sink of their own, sink 0.7 per head. In two steps, it goes into the last one only."""
    p = random_partials(5, 3, 2, 64, torch.float32, device_of(backend), empty=0)
    sink = torch.full((2,), 0.7, device=p.v.device)
    more: dict[str, Any] = {"sink": sink, "backend": backend}
    if how == "stacked":
        out, lse = jitkern.merge_states(p.v, p.s, **more)
    elif how == "list":
        out, lse = jitkern.merge_states(*p.lists(), **more)
    else:
        v, s = jitkern.merge_states(p.v[:, :2], p.s[:, :2], backend=backend)
        out, lse = jitkern.merge_states([v, p.v[:, 2]], [s, p.s[:, 2]], **more)
    assert_states(out, lse, p, sink=sink) if how != "a pair of pairs" else None
    weights = torch.cat([p.s, sink.expand(5, 1, 2)], 1).double().softmax(1)[:, :3]
    assert torch.allclose(out.double(), (weights.unsqueeze(-1) * p.v.double()).sum(1), atol=2e-6)
    p.s.fill_(-math.inf)
    out, lse = jitkern.merge_states(p.v, p.s, **more)
    assert (out == 0).all()
    assert torch.equal(lse, sink.expand(5, 2))


def test_vllm_48739_other_sizes_compile_nothing(backend: str) -> None:
    """Tokens, partials, heads, counts, masks and strides vary at run time; dense and strided are two variants."""
    p = random_partials(40, 9, 5, 64, torch.bfloat16, device_of(backend))
    v, s = p.lists()

    def call(tokens: int, count: int, heads: int) -> None:
        part = Partials(p.v[:tokens, :count, :heads], p.s[:tokens, :count, :heads])
        assert_states(*jitkern.merge_states(part.v, part.s, backend=backend), part)
        valid = torch.full((tokens,), count - 1, dtype=torch.int32, device=p.v.device)
        jitkern.merge_states(part.v.contiguous(), part.s.contiguous(), num_valid=valid, backend=backend)
        jitkern.merge_states([x[:tokens] for x in v], [x[:tokens] for x in s], backend=backend)
        x, y = v[0][:tokens, :heads].clone(), s[0][:tokens, :heads].clone()
        mask = torch.ones(tokens, dtype=torch.bool, device=p.v.device)
        jitkern.merge_state_in_place(x, y, v[1][:tokens, :heads], s[1][:tokens, :heads], mask, backend=backend)

    call(40, 9, 5)
    call(2, 2, 3)
    compiled = jitkern.stats()["compiled"]
    for tokens, count, heads in [(2, 1, 3), (17, 8, 2), (39, 5, 5), (40, 9, 1), (3, 3, 4)]:
        call(tokens, count, heads)
    assert jitkern.stats()["compiled"] == compiled
