"""No gradient is lost without an error: remembered calls, 8-bit outputs, masks, tracing, second derivatives."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import jitkern
from jitkern import UnsupportedError
from jitkern.ops import pairwise
from tests.test_merge_traced import Tensors, attn_states, in_place, pair


def with_gradient(x: torch.Tensor) -> torch.Tensor:
    return x.detach().clone().requires_grad_()


@pytest.mark.parametrize("which", range(4))
def test_a_warm_call_does_not_hide_a_gradient(which: int) -> None:
    """The first calls are remembered; one with a gradient must not be taken for one of them. Nor after no_grad."""
    _, operands = pair(6)
    out, lse = torch.empty_like(operands[0]), torch.empty_like(operands[1])
    v, s = torch.stack([operands[0], operands[2]], 1), torch.stack([operands[1], operands[3]], 1)
    wanting = [with_gradient(x) if i == which else x for i, x in enumerate(operands)]
    wide = with_gradient(v) if which % 2 == 0 else v
    wide_lse = s if which % 2 == 0 else with_gradient(s)
    for _ in range(2):
        jitkern.merge_state(*operands)
        jitkern.merge_state(*operands, out=out, out_lse=lse)
        jitkern.merge_states(v, s)
        jitkern.merge_states(v, s, out=out, out_lse=lse)
        attn_states(*operands)
        with torch.no_grad():
            jitkern.merge_state(*wanting)
            jitkern.merge_states(wide, wide_lse)
            jitkern.merge_states(wide, wide_lse, out=out, out_lse=lse)
            attn_states(*wanting)
        assert jitkern.merge_state(*wanting)[0].requires_grad
        assert jitkern.merge_states(wide, wide_lse)[0].requires_grad
        assert attn_states(*wanting)[0].requires_grad
        with pytest.raises(UnsupportedError, match="requires a gradient"):
            jitkern.merge_state(*wanting, out=out, out_lse=lse)
        with pytest.raises(UnsupportedError, match="requires a gradient"):
            jitkern.merge_states(wide, wide_lse, out=out, out_lse=lse)
        with pytest.raises(UnsupportedError, match="requires a gradient"):
            jitkern.merge_state_in_place(out, lse, *wanting[2:] if which > 1 else wanting[:2])


def quantised(a: torch.Tensor, a_lse: torch.Tensor, b: torch.Tensor, b_lse: torch.Tensor) -> Tensors:
    out = torch.empty_like(a, dtype=torch.float8_e4m3fn)
    jitkern.merge_attn_states(out, a, a_lse.T, b, b_lse.T, None, None, torch.ones(1))
    return (out,)


def counted(a: torch.Tensor, a_lse: torch.Tensor, b: torch.Tensor, b_lse: torch.Tensor) -> Tensors:
    out = torch.empty_like(a)
    jitkern.merge_attn_states(out, a, a_lse.T, b, b_lse.T, None, torch.ones(1, dtype=torch.int32))
    return (out,)


def grouped(a: torch.Tensor, a_lse: torch.Tensor, b: torch.Tensor, b_lse: torch.Tensor) -> Tensors:
    out, scale = torch.empty_like(a, dtype=torch.float8_e4m3fn), torch.empty_like(a[:, 0, :1])
    jitkern.merge_attn_states(out, a, a_lse.T, b, b_lse.T, output_group_scale=scale)
    return (out,)


@pytest.mark.parametrize("which", range(4))
@pytest.mark.parametrize("function", [quantised, counted, grouped, in_place])
def test_what_gives_no_gradient_says_so(function: Callable[..., Tensors], which: int) -> None:
    _, operands = pair(6)
    function(*operands)
    wanting = [with_gradient(x) if i == which else x for i, x in enumerate(operands)]
    with pytest.raises(UnsupportedError, match="requires a gradient, which this op does not give"):
        function(*wanting)
    compiled = torch.compile(function, fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="requires a gradient"):
        compiled(*wanting)
    with torch.no_grad():
        function(*wanting)
        torch.compile(function, fullgraph=True, backend="aot_eager")(*wanting)


def test_a_second_derivative_is_refused() -> None:
    _, operands = pair(4, empty=0)
    leaves = [with_gradient(x) for x in operands]
    (first,) = torch.autograd.grad(jitkern.merge_state(*leaves)[0].square().sum(), leaves[1], create_graph=True)
    with pytest.raises(UnsupportedError, match="second derivative"):
        first.sum().backward()


def test_operands_are_checked_with_gradients_as_without() -> None:
    _, (a, a_lse, b, b_lse) = pair(4)
    inputs = (with_gradient(a), a_lse.T, b, b_lse.T)
    with pytest.raises(jitkern.ArgumentError, match=r"output is torch.float16; expected torch.float32"):
        jitkern.merge_attn_states(torch.empty_like(a, dtype=torch.float16), *inputs)
    with pytest.raises(jitkern.ArgumentError, match=r"output has shape \[5, 4, 3, 32\]"):
        jitkern.merge_attn_states(torch.empty(5, *a.shape), *inputs)
    with pytest.raises(jitkern.ArgumentError, match=r"output_lse has shape"):
        jitkern.merge_attn_states(torch.empty_like(a), *inputs, torch.empty_like(a_lse))
    for k in (-1, 5):
        with pytest.raises(jitkern.ArgumentError, match=f"prefill_tokens_with_context={k}; expected 0 to 4"):
            jitkern.merge_attn_states(torch.empty_like(a), *inputs, None, k)
    with pytest.raises(UnsupportedError, match=r"backend='cpu'.*current stream"):
        jitkern.merge_state(with_gradient(a), a_lse, b, b_lse, backend="cpu")
    with pytest.raises(UnsupportedError, match="stream=0"):
        jitkern.merge_states([with_gradient(a), b], [a_lse, b_lse], stream=0)


def test_an_output_that_requires_a_gradient_is_refused() -> None:
    """As torch refuses to write to a leaf; warm or not."""
    _, operands = pair(6)
    stacked = torch.stack(operands[::2], 1), torch.stack(operands[1::2], 1)
    leaf = torch.empty_like(operands[0]).requires_grad_()
    for out in (leaf, leaf.detach(), leaf):
        for call in (
            lambda out=out: jitkern.merge_state(*operands, out=out),
            lambda out=out: jitkern.merge_states(*stacked, out=out),
        ):
            if out is leaf:
                with pytest.raises(UnsupportedError, match="out requires a gradient"):
                    call()
            else:
                call()


def test_operands_without_memory_are_refused() -> None:
    _, operands = pair(6)
    batched = [torch.stack([x, x]) for x in operands]
    pairwise._recent.forget()
    with pytest.raises((UnsupportedError, RuntimeError), match=r"vmap|storage"):
        torch.vmap(lambda *x: jitkern.merge_state(*x)[0])(*batched)
    with pytest.raises((UnsupportedError, RuntimeError), match=r"vmap|storage"):
        torch.vmap(lambda *x: jitkern.merge_states(list(x[::2]), list(x[1::2]))[0])(*batched)
