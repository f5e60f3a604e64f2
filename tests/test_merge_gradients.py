"""Gradients of every merge with respect to every O and L: gradcheck in float64, and autograd of the formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import jitkern
from tests.states_oracle import WIDE, Partials, merge, random_partials

D = 4
HARD = [math.inf, -math.inf]


def leaves(p: Partials) -> tuple[torch.Tensor, ...]:
    """v and s of every partial, each a leaf of its own."""
    return tuple(x.detach().clone().requires_grad_() for x in (*p.v.unbind(1), *p.s.unbind(1)))


def partials(count: int, tokens: int = 3, heads: int = 2, empty: bool = True, dtype: torch.dtype = WIDE) -> Partials:
    """Some sides are empty, one token has nothing at all; their O is 1.5, which gradcheck can step from, unlike NaN."""
    p = random_partials(tokens, count, heads, D, dtype, empty=0)
    if empty:
        for t in range(min(tokens, count)):
            p.s[t, t % count, t % heads] = HARD[t % 2]
            p.v[t, t % count, t % heads] = 1.5
        p.s[tokens - 1] = -math.inf
    return p


def check(function: Callable[..., Any], inputs: tuple[torch.Tensor, ...]) -> None:
    """gradcheck of O and of finite L. Infinite L is no place to take a difference at: those inputs are held fixed."""

    def finite(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        out, lse = function(*values)
        return out, torch.where(lse.isinf(), 0.0, lse)

    def step(*values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        fixed = [torch.where(x.detach().isinf(), x.detach(), x) for x in values]
        return finite(*fixed)

    assert torch.autograd.gradcheck(step, inputs, eps=1e-6, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("bases", ["e", "2", ("e", "2", "10")])
def test_merge_state(bases: Any) -> None:
    check(
        lambda a, b, la, lb: jitkern.merge_state(a, la, b, lb, lse_base=bases),
        leaves(partials(2)),
    )


@pytest.mark.parametrize("k", [None, 0, 2, 3])
@pytest.mark.parametrize("bases", ["e", ("2", "10", "e")])
@pytest.mark.parametrize("with_lse", [True, False])
def test_merge_attn_states(k: int | None, bases: Any, with_lse: bool) -> None:
    def call(a: torch.Tensor, b: torch.Tensor, la: torch.Tensor, lb: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.empty_like(a.detach()), torch.empty_like(la.detach().T)
        jitkern.merge_attn_states(out, a, la.T, b, lb.T, lse if with_lse else None, k, lse_base=bases)
        return out, lse if with_lse else torch.zeros_like(lse)

    check(call, leaves(partials(2, empty=k in (None, 3))))


@pytest.mark.parametrize("sink", [None, -math.inf, 0.7, 30.0])
@pytest.mark.parametrize("in_lse", [True, False])
@pytest.mark.parametrize("how", ["stacked", "list"])
def test_merge_states(how: str, sink: float | None, in_lse: bool) -> None:
    sinks = None if sink is None else torch.tensor([sink, 0.25])

    def call(*x: torch.Tensor) -> Any:
        v, s = list(x[:3]), list(x[3:])
        operands: Any = (v, s) if how == "list" else (torch.stack(v, 1), torch.stack(s, 1))
        return jitkern.merge_states(*operands, sink=sinks, sink_in_lse=in_lse)

    check(call, leaves(partials(3)))


@pytest.mark.parametrize("bases", ["2", ("10", "10", "2")])
def test_merge_states_of_other_bases(bases: Any) -> None:
    sinks = torch.tensor([0.3, -0.3])

    def call(*x: torch.Tensor) -> Any:
        return jitkern.merge_states(list(x[:3]), list(x[3:]), lse_base=bases, sink=sinks)

    check(call, leaves(partials(3)))


@pytest.mark.parametrize("count", [1, 5])
def test_merge_states_of_one_and_of_more_than_a_group(count: int) -> None:
    check(lambda *x: jitkern.merge_states(list(x[:count]), list(x[count:])), leaves(partials(count, tokens=2)))


def test_merge_states_with_counts_from_the_device() -> None:
    valid = torch.tensor([0, 1, 3, 7], dtype=torch.int32)
    p = partials(3, tokens=4, empty=False)
    v, s = p.v.clone().requires_grad_(), p.s.clone().requires_grad_()
    check(lambda v, s: jitkern.merge_states(v, s, num_valid=valid), (v, s))
    listed = leaves(p)
    check(lambda *x: jitkern.merge_states(list(x[:3]), list(x[3:]), num_valid=valid), listed)


def test_merge_states_ragged() -> None:
    indptr = torch.tensor([0, 0, 2, 3, 7], dtype=torch.int32)  # the last two rows belong to nobody
    p = random_partials(1, 9, 2, D, WIDE, empty=0)
    v, s = p.v[0].clone().requires_grad_(), p.s[0].clone().requires_grad_()
    check(lambda v, s: jitkern.merge_states(v, s, indptr=indptr), (v, s))
    jitkern.merge_states(v, s, indptr=indptr)[0].sum().backward()
    assert v.grad is not None
    assert (v.grad[7:] == 0).all()


@pytest.mark.parametrize("in_lse", [True, False])
@pytest.mark.parametrize("bases", ["e", ("2", "2", "10")])
def test_a_sink_has_a_gradient(in_lse: bool, bases: Any) -> None:
    """Sinks are learnt. In float32, as sinks are; against autograd of the float64 formula."""
    p = random_partials(6, 3, 4, D, torch.float32)
    p.s[2] = -math.inf
    sink = torch.tensor([0.5, -3.0, 9.0, -math.inf], requires_grad=True)
    number = {"e": (math.e, math.e)}.get(bases, (2.0, 10.0))
    out, lse = jitkern.merge_states(p.v, p.s, sink=sink, sink_in_lse=in_lse, lse_base=bases)
    weights, lse_weights = torch.randn(out.shape), torch.randn(lse.shape)
    ((out * weights).sum() + (torch.where(lse.isinf(), 0, lse) * lse_weights).sum()).backward()
    twin = sink.detach().clone().requires_grad_()
    wide, wide_lse = merge(p, *number, twin, in_lse)
    ((wide * weights).sum() + (torch.where(wide_lse.isinf(), 0, wide_lse) * lse_weights).sum()).backward()
    assert sink.grad is not None
    assert twin.grad is not None
    assert torch.allclose(sink.grad, twin.grad.nan_to_num(0), atol=1e-5)


def of_formula(p: Partials, **more: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Leaves in float64, and the formula's result of them."""
    v, s = p.v.to(WIDE).requires_grad_(), p.s.to(WIDE).requires_grad_()
    return v, s, *merge(Partials(v, s, p.valid), **more)


@pytest.mark.parametrize(
    ("dtype", "d"), [(torch.float32, 64), (torch.bfloat16, 64), (torch.float16, 64), (torch.bfloat16, 59)]
)
def test_against_autograd_of_the_formula(device: str, dtype: torch.dtype, d: int) -> None:
    """NaN in an empty O and infinite L, both must come back as zeros; every gradient is finite."""
    p = random_partials(9, 5, 3, d, dtype, empty=0.3)
    p.s[4], p.v[4] = math.inf, math.nan
    v, s, wide, wide_lse = of_formula(p)
    upstream, upstream_lse = torch.randn(wide.shape).to(dtype), torch.randn(wide_lse.shape)
    ((wide * upstream).sum() + (torch.where(wide_lse.isinf(), 0, wide_lse) * upstream_lse).sum()).backward()
    mine, mine_s = (x.detach().to(device).requires_grad_() for x in (p.v, p.s))
    torch.autograd.backward(jitkern.merge_states(mine, mine_s), [upstream.to(device), upstream_lse.to(device)])
    assert mine.grad is not None and mine_s.grad is not None and v.grad is not None and s.grad is not None  # noqa: PT018
    assert mine.grad.dtype == dtype
    assert mine.grad.isfinite().all()
    assert mine_s.grad.isfinite().all()
    assert (mine.grad.cpu()[~p.live] == 0).all()
    assert (mine_s.grad.cpu()[~p.live] == 0).all()
    size = upstream.to(WIDE).abs()
    bound = torch.finfo(dtype).eps * size.unsqueeze(1) + 1e-6
    assert ((mine.grad.cpu().to(WIDE) - v.grad.nan_to_num(0)).abs() <= bound).all()
    # A dot product of d terms, in float32, of numbers of up to |upstream| |v|.
    spread = (size * p.v.to(WIDE).nan_to_num(0).abs().amax(1)).sum(-1).unsqueeze(1)
    assert ((mine_s.grad.cpu().to(WIDE) - s.grad.nan_to_num(0)).abs() <= 2e-6 * (spread + 1)).all()


@pytest.mark.parametrize("which", range(4))
def test_one_operand_alone(which: int) -> None:
    """Only one of four requires a gradient: it gets the one that it gets among all."""
    p = partials(2)
    everything = leaves(p)
    a, b, la, lb = everything
    expected = torch.autograd.grad(jitkern.merge_state(a, la, b, lb)[0].sum(), everything)[which]
    alone = [x.detach() for x in everything]
    alone[which].requires_grad_()
    a, b, la, lb = alone
    (got,) = torch.autograd.grad(jitkern.merge_state(a, la, b, lb)[0].sum(), alone[which])
    assert torch.equal(got, expected)


def test_only_the_logarithm_is_used() -> None:
    a, b, la, lb = leaves(partials(2, empty=False))
    _, lse = jitkern.merge_state(a, la, b, lb)
    grads = torch.autograd.grad(lse.sum(), (a, b, la, lb))
    assert (grads[0] == 0).all()
    assert torch.allclose(grads[2] + grads[3], torch.ones_like(la))


def test_strided_and_expanded_operands_and_gradients(device: str) -> None:
    p = random_partials(7, 2, 3, 64, torch.float32, empty=0)
    padded = torch.nn.functional.pad(p.v, (0, 8))[..., :64].to(device).requires_grad_()
    s = p.s[:, :1].expand(7, 2, 3).to(device).requires_grad_()
    out, lse = jitkern.merge_states(padded, s)
    (out.sum() * 2 + lse.sum()).backward()  # upstream gradients are expanded
    v, s64, wide, wide_lse = of_formula(Partials(p.v, p.s[:, :1].expand(7, 2, 3)))
    (wide.sum() * 2 + wide_lse.sum()).backward()
    for x, y in ((padded, v), (s, s64)):
        assert x.grad is not None
        assert y.grad is not None
        assert torch.allclose(x.grad.cpu().to(WIDE), y.grad, atol=1e-5)
    transposed = torch.randn(64, 3, 7, device=device).permute(2, 1, 0)
    out, _ = jitkern.merge_states(padded, s)
    first = torch.autograd.grad(out, padded, transposed, retain_graph=True)[0]
    assert torch.equal(first, torch.autograd.grad(out, padded, transposed.contiguous())[0])


@pytest.mark.parametrize("upstream", [math.nan, math.inf])
def test_an_empty_side_gets_zeros_whatever_comes_from_above(device: str, upstream: float) -> None:
    p = random_partials(4, 3, 2, 64, torch.float32, device, empty=0)
    p.s[:, 1], p.v[:, 1] = -math.inf, math.nan
    leaves = [x.requires_grad_() for y in p.lists() for x in y]
    out, lse = jitkern.merge_states(leaves[:3], leaves[3:])
    torch.autograd.backward([out, lse], [torch.full_like(out, upstream), torch.full_like(lse, upstream)])
    for leaf in (leaves[1], leaves[4]):
        assert leaf.grad is not None
        assert (leaf.grad == 0).all()
    assert leaves[0].grad is not None
    assert not leaves[0].grad.isfinite().any()
