"""Outputs that share memory with something: refused unless in place, and only where a byte is shared."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import jitkern
from jitkern import ArgumentError, settings
from jitkern.ops import nway, overlap, pairwise, quantised
from tests.mla_oracle import make_step
from tests.states_oracle import assert_states, random_partials

N, H, D = 6, 3, 8


def bytes_of(x: torch.Tensor) -> set[int]:
    offsets = {0}
    for size, stride in zip(x.shape, x.stride(), strict=True):
        offsets = {o + i * stride * x.element_size() for o in offsets for i in range(size)}
    return {x.data_ptr() + o + i for o in offsets for i in range(x.element_size())}


def test_share_is_what_sets_of_bytes_say() -> None:
    rng, seen = random.Random(1), {True: 0, False: 0}
    buffer = torch.zeros(4096, dtype=torch.uint8)
    for _ in range(3000):
        views = []
        for _ in range(2):
            kind = rng.choice([torch.uint8, torch.float16, torch.float32])
            of_kind, dims = buffer.view(kind), rng.randint(1, 4)
            shape, strides = [rng.randint(1, 4) for _ in range(dims)], [rng.randint(0, 40) for _ in range(dims)]
            views.append(of_kind.as_strided(shape, strides, rng.randint(0, 200)))
        expected = bool(bytes_of(views[0]) & bytes_of(views[1]))
        seen[expected] += 1
        assert overlap.share(*views) is expected, [(x.shape, x.stride(), x.storage_offset(), x.dtype) for x in views]
    assert min(seen.values()) > 300


def test_views_of_one_large_buffer_take_few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = torch.empty(4096, 33, 272, dtype=torch.bfloat16)  # never touched
    left, right, shifted_right = whole[..., :128], whole[..., 128:256], whole[1:, :, 120:248]
    tokens, heads = whole[::2, :, :128], whole[:, 1::2, :128]
    steps: list[int] = []
    solvable = overlap._solvable

    def counted(wanted: int, terms: Any, budget: list[int]) -> bool:
        found = solvable(wanted, terms, budget)
        steps.append(overlap._MOST_STEPS - budget[0])
        return found

    monkeypatch.setattr(overlap, "_solvable", counted)
    pairs = ((left, right), (tokens, whole[1::2, :, :128]), (heads, whole[:, ::2, :128]), (left, shifted_right))
    assert [overlap.share(x, y) for x, y in pairs] == [False, False, False, True]
    assert max(steps) < 200


@pytest.fixture(params=[False, True])
def validating(request: pytest.FixtureRequest) -> Iterator[bool]:
    """Off, where a call of these shapes is bound for the first time; on, whatever was bound before."""
    if not request.param:
        for module in (pairwise, nway, quantised):
            module._thread.calls.clear()
    pairwise._recent.forget()
    with settings.override(validate=request.param):
        yield request.param


def operands() -> dict[str, torch.Tensor]:
    p = random_partials(N, 2, H, D, torch.float32, empty=0)
    return {"a": p.v[:, 0].clone(), "a_lse": p.s[:, 0].clone(), "b": p.v[:, 1].clone(), "b_lse": p.s[:, 1].clone()}


def pair(out: Any, lse: Any, a: Any, a_lse: Any, b: Any, b_lse: Any) -> None:
    jitkern.merge_attn_states(out, a, a_lse.T, b, b_lse.T, lse.T)


def listed(out: Any, lse: Any, a: Any, a_lse: Any, b: Any, b_lse: Any) -> None:
    jitkern.merge_states([a, b], [a_lse, b_lse], out=out, out_lse=lse)


def state(out: Any, lse: Any, a: Any, a_lse: Any, b: Any, b_lse: Any) -> None:
    jitkern.merge_state(a, a_lse, b, b_lse, out=out, out_lse=lse)


def shifted(x: torch.Tensor, by: int) -> tuple[torch.Tensor, torch.Tensor]:
    """x in a new buffer, and a tensor of its shape that begins so many elements later."""
    buffer = torch.zeros(x.numel() + by)
    first = buffer[: x.numel()].view(x.shape)
    first.copy_(x)
    return first, buffer[by:].view(x.shape)


@pytest.mark.parametrize("call", [pair, listed, state])
@pytest.mark.parametrize(("output", "operand"), [("out", "a"), ("out", "b"), ("lse", "a_lse"), ("lse", "b_lse")])
def test_a_partial_overlap_is_refused(call: Callable[..., None], output: str, operand: str, validating: bool) -> None:
    given = operands() | {"out": torch.empty(N, H, D), "lse": torch.empty(N, H)}
    if validating:  # whatever was bound before
        call(**given)
    row = H * D if output == "out" else H
    given[operand], given[output] = shifted(given[operand], row)
    before = given[operand].clone()
    with pytest.raises(ArgumentError, match="shares memory with"):
        call(**given)
    assert torch.equal(given[operand], before)


@pytest.mark.parametrize("call", [pair, listed, state])
def test_outputs_that_share_with_each_other_or_another_kind(call: Callable[..., None], validating: bool) -> None:
    given = operands()
    buffer = torch.zeros(N * H * D)
    out = buffer.view(N, H, D)
    with pytest.raises(ArgumentError, match=r"out\w* .*shares memory with (out|output)_lse"):
        call(out=out, lse=buffer[-N * H :].view(N, H), **given)
    inside = buffer[: N * H].view(N, H)
    inside.copy_(given["a_lse"])
    with pytest.raises(ArgumentError, match="shares memory with"):
        call(out=out, lse=torch.empty(N, H), **given | {"a_lse": inside})


@pytest.mark.parametrize("call", [pair, listed, state])
def test_what_shares_no_byte_is_taken(call: Callable[..., None], validating: bool) -> None:
    """Interleaved views of one buffer: heads beside heads, O beside its L, tokens between tokens."""
    for axis in (0, 1, 2):
        p = random_partials(N, 2, H, D, torch.float32, empty=0)
        shape = [N, H, D]
        shape[axis] *= 3
        whole, logs = torch.zeros(shape), torch.zeros(3, N, H)
        if axis == 2:
            out, a, b = whole.split(D, 2)
        else:
            out, a, b = (whole[i::3] if axis == 0 else whole[:, i::3] for i in range(3))
        out_lse, a_lse, b_lse = logs.permute(1, 2, 0).contiguous().unbind(2)
        for to, value in ((a, p.v[:, 0]), (b, p.v[:, 1]), (a_lse, p.s[:, 0]), (b_lse, p.s[:, 1])):
            to.copy_(value)
        call(out=out, lse=out_lse, a=a, a_lse=a_lse, b=b, b_lse=b_lse)
        assert_states(out, out_lse, p)


@pytest.mark.parametrize("call", [pair, listed, state])
@pytest.mark.parametrize("operand", ["a", "b"])
def test_in_place_is_taken(call: Callable[..., None], operand: str, validating: bool) -> None:
    given = operands()
    p = torch.stack([given["a"], given["b"]], 1), torch.stack([given["a_lse"], given["b_lse"]], 1)
    expected = jitkern.merge_states(*p)
    call(out=given[operand], lse=given[f"{operand}_lse"], **given)
    assert torch.allclose(given[operand], expected[0], atol=1e-6)
    assert torch.allclose(given[f"{operand}_lse"], expected[1], atol=1e-6)


def test_stacks(validating: bool) -> None:
    p = random_partials(N, 4, H, D, torch.float32, empty=0)
    expected = jitkern.merge_states(p.v, p.s)
    for i in range(4):
        q = p.clone()
        jitkern.merge_states(q.v, q.s, out=q.v[:, i], out_lse=q.s[:, i])
        assert torch.equal(q.v[:, i], expected[0])
        assert torch.equal(q.s[:, i], expected[1])
    flat = p.v.flatten()
    with pytest.raises(ArgumentError, match=r"out lies in v|shares memory"):
        jitkern.merge_states(p.v, p.s, out=flat[D : D + N * H * D].view(N, H, D), out_lse=torch.empty(N, H))
    with pytest.raises(ArgumentError, match=r"out_lse .*shares memory with s0"):
        jitkern.merge_states(p.v, p.s, out=torch.empty(N, H, D), out_lse=p.s.flatten()[1 : 1 + N * H].view(N, H))


def test_group_scales(validating: bool) -> None:
    given = operands()
    buffer = torch.zeros(N * H * D, dtype=torch.uint8)
    out, inside = buffer.view(torch.float8_e4m3fn).view(N, H, D), buffer[: 4 * N].view(torch.float32).view(N, 1)
    inputs = (given["a"], given["a_lse"].T, given["b"], given["b_lse"].T)
    with pytest.raises(ArgumentError, match=r"output .*shares memory with output_group_scale"):
        jitkern.merge_attn_states(out, *inputs, output_group_scale=inside)
    scale = given["a"].view(-1)[:N].view(N, 1)
    with pytest.raises(ArgumentError, match=r"output_group_scale .*shares memory with prefix_output"):
        jitkern.merge_attn_states(torch.empty_like(out), *inputs, output_group_scale=scale)


def test_a_mask_in_the_output(validating: bool) -> None:
    given = operands()
    mask = given["a"].view(torch.uint8).view(-1)[:N]
    with pytest.raises(ArgumentError, match=r"v .*shares memory with (mask|row_op)"):
        jitkern.merge_state_in_place(given["a"], given["a_lse"], given["b"], given["b_lse"], mask)


def test_mla_decode() -> None:
    step = make_step([100, 65], 16, q_len=1)
    decode = jitkern.MLADecode(2, 16, device="cpu")
    decode.plan(step.cache_seqlens)
    out = step.q[..., :512]
    with pytest.raises(ArgumentError, match=r"out .*shares memory with q"):
        decode.run(*step.operands(), out=out)
    wide = torch.empty(2, 1, 16, 576 + 512, dtype=torch.bfloat16)
    wide[..., :576] = step.q
    expected, _ = decode.run(*step.operands())
    beside, _ = decode.run(wide[..., :576], *step.operands()[1:], out=wide[..., 576:])
    assert torch.equal(beside, expected)
