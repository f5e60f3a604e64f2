"""What an op writes to counts as changed: autograd refuses a backward pass that had kept what was there before."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import jitkern
from jitkern import Kernel
from tests.mla_oracle import make_step

N, H, D = 4, 2, 8
Made = tuple[Callable[[], Any], list[torch.Tensor]]  # a call, and what it writes to


def states(device: str) -> list[torch.Tensor]:
    return [torch.randn(*shape, device=device) for shape in ((N, H, D), (N, H), (N, H, D), (N, H))]


def attn_states(device: str) -> Made:
    a, a_lse, b, b_lse = states(device)
    out, lse = torch.empty_like(a), torch.empty(H, N, device=device)
    return lambda: jitkern.merge_attn_states(out, a, a_lse.T, b, b_lse.T, lse), [out, lse]


def without_lse(device: str) -> Made:
    a, a_lse, b, b_lse = states(device)
    out = torch.empty_like(a)
    return lambda: jitkern.merge_attn_states(out, a, a_lse.T, b, b_lse.T), [out]


def in_place(device: str) -> Made:
    a, a_lse, b, b_lse = states(device)
    return lambda: jitkern.merge_state_in_place(a, a_lse, b, b_lse), [a, a_lse]


def masked(device: str) -> Made:
    a, a_lse, b, b_lse = states(device)
    mask = torch.ones(N, dtype=torch.bool, device=device)
    return lambda: jitkern.merge_state_in_place(a, a_lse, b, b_lse, mask), [a, a_lse]


def into(device: str) -> Made:
    a, a_lse, b, b_lse = states(device)
    out, lse = torch.empty_like(a), torch.empty_like(a_lse)
    return lambda: jitkern.merge_state(a, a_lse, b, b_lse, out=out, out_lse=lse), [out, lse]


def n_way(device: str) -> Made:
    a, a_lse, b, b_lse = states(device)
    out, lse = torch.empty_like(a), torch.empty_like(a_lse)
    return lambda: jitkern.merge_states([a, b, a], [a_lse, b_lse, a_lse], out=out, out_lse=lse), [out, lse]


def grouped(device: str) -> Made:
    a, a_lse, b, b_lse = states(device)
    out, scale = torch.empty(N, H, D, dtype=torch.float8_e4m3fn, device=device), torch.empty(N, 1, device=device)
    return (
        lambda: jitkern.merge_attn_states(out, a, a_lse.T, b, b_lse.T, output_group_scale=scale),
        [out, scale],
    )


def torch_op(device: str) -> Made:
    a, a_lse, b, b_lse = states(device)
    out, lse = torch.empty_like(a), torch.empty(H, N, device=device)
    return lambda: torch.ops.jitkern.merge_attn_states(out, a, a_lse.T, b, b_lse.T, lse), [out, lse]


def prepared(device: str) -> Made:
    a, a_lse, b, b_lse = states(device)
    out, lse = torch.empty_like(a), torch.empty_like(a_lse)
    call = jitkern.prepare(jitkern.merge_state, a, a_lse, b, b_lse, out=out, out_lse=lse)
    return call, [out, lse]


def mla(device: str) -> Made:
    step = make_step([70, 3], 16, device=device)
    decode = jitkern.MLADecode(2, 16, device=device)
    decode.plan(step.cache_seqlens)
    out = torch.empty(2, 1, 16, 512, dtype=torch.bfloat16, device=device)
    lse = torch.empty(2, 16, 1, device=device)
    return lambda: decode.run(*step.operands(), out=out, lse=lse), [out, lse]


TEXT = """
__global__ void scale(float* y, const float* x, float* more = nullptr, int n = 8) {
  for (int i = 0; i < n; ++i) { y[i] = 2 * x[i]; if (more) more[i] = x[i]; }
}
"""


def own(device: str) -> Made:
    kernel = Kernel(TEXT, grid=1, block=1)
    y, x, more = (torch.ones(8, device=device) for _ in range(3))
    return lambda: kernel(y, x, more), [y, more]


def own_without(device: str) -> Made:
    kernel = Kernel(TEXT, grid=1, block=1)
    y, x = (torch.ones(8, device=device) for _ in range(2))
    return lambda: kernel(y, x), [y]


CALLS = [
    attn_states, without_lse, in_place, masked, into, n_way, grouped, torch_op, prepared, mla, own, own_without,
]  # fmt: skip


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("make", CALLS)
def test_what_is_written_to_counts_as_changed(make: Callable[[str], Made], device: str) -> None:
    call, written = make(device)
    for _ in range(5):  # new, known, remembered
        before = [x._version for x in written]
        call()
        assert all(x._version > old for x, old in zip(written, before, strict=True))


@pytest.mark.parametrize("make", CALLS)
def test_a_backward_pass_over_what_was_overwritten_is_refused(make: Callable[[str], Made], device: str) -> None:
    call, written = make(device)
    kept = next(x for x in written if x.dtype.is_floating_point and x.element_size() > 1)
    for _ in range(4):
        call()
    weight = torch.ones((), device=device, dtype=kept.dtype, requires_grad=True)
    loss = (weight * kept).sum()
    call()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@pytest.mark.parametrize("make", CALLS)
def test_in_inference_mode(make: Callable[[str], Made], device: str) -> None:
    with torch.inference_mode():
        call, _ = make(device)
        for _ in range(4):
            call()


def test_nothing_is_written_while_a_call_is_prepared() -> None:
    a, a_lse, b, b_lse = states("cpu")
    out, lse = torch.empty_like(a), torch.empty_like(a_lse)
    before = out._version
    jitkern.prepare(jitkern.merge_state, a, a_lse, b, b_lse, out=out, out_lse=lse)
    assert out._version == before
