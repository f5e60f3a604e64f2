"""torch.compile, torch.export and opcheck of every op."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch

import jitkern
import jitkern.torch_ops  # registers torch.ops.jitkern
from tests.states_oracle import Partials, assert_states, merge, random_partials

D = 32
Tensors = tuple[torch.Tensor, ...]


def pair(tokens: int, device: str = "cpu", empty: float = 0.2) -> tuple[Partials, list[torch.Tensor]]:
    """Two partials as stacked ones, and as the operands a, a_lse, b, b_lse of [tokens, heads]."""
    p = random_partials(tokens, 2, 3, D, torch.float32, device, empty)
    return p, [p.v[:, 0].clone(), p.s[:, 0].clone(), p.v[:, 1].clone(), p.s[:, 1].clone()]


def attn_states(a: torch.Tensor, a_lse: torch.Tensor, b: torch.Tensor, b_lse: torch.Tensor) -> Tensors:
    out, lse = torch.empty_like(a), torch.empty_like(a_lse.T)
    jitkern.merge_attn_states(out, a + 0, a_lse.T, b, b_lse.T, lse)
    return out, lse.T


def state(a: torch.Tensor, a_lse: torch.Tensor, b: torch.Tensor, b_lse: torch.Tensor) -> Tensors:
    return jitkern.merge_state(a, a_lse, b, b_lse)


def state_into(a: torch.Tensor, a_lse: torch.Tensor, b: torch.Tensor, b_lse: torch.Tensor) -> Tensors:
    return jitkern.merge_state(a, a_lse, b, b_lse, out=torch.empty_like(a), out_lse=torch.empty_like(a_lse))


def in_place(a: torch.Tensor, a_lse: torch.Tensor, b: torch.Tensor, b_lse: torch.Tensor) -> Tensors:
    v, s = a.clone(), a_lse.clone()
    jitkern.merge_state_in_place(v, s, b, b_lse, torch.ones_like(v[:, 0, 0], dtype=torch.bool))
    return v, s


def stacked(a: torch.Tensor, a_lse: torch.Tensor, b: torch.Tensor, b_lse: torch.Tensor) -> Tensors:
    return jitkern.merge_states(torch.stack([a, b], 1), torch.stack([a_lse, b_lse], 1))


def listed(a: torch.Tensor, a_lse: torch.Tensor, b: torch.Tensor, b_lse: torch.Tensor) -> Tensors:
    return jitkern.merge_states([a, b], [a_lse, b_lse])


def ragged(a: torch.Tensor, a_lse: torch.Tensor, b: torch.Tensor, b_lse: torch.Tensor) -> Tensors:
    v, s = torch.stack([a, b], 1).flatten(0, 1), torch.stack([a_lse, b_lse], 1).flatten(0, 1)
    indptr = 2 * torch.arange(a.shape[0] + 1, dtype=torch.int32, device=a.device)
    return jitkern.merge_states(v, s, indptr=indptr)


FUNCTIONS: list[Callable[..., Tensors]] = [attn_states, state, state_into, in_place, stacked, listed, ragged]
DIFFERENTIABLE = [f for f in FUNCTIONS if f is not in_place]


@pytest.fixture(autouse=True)
def _a_fresh_tracer() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("function", FUNCTIONS)
def test_compiled_whole_and_for_any_number_of_tokens(function: Callable[..., Tensors], device: str) -> None:
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (5, 9, 17):
        p, operands = pair(tokens, device)
        out, lse = compiled(*operands)
        assert_states(out, lse, p)
    counter = torch._dynamo.testing.CompileCounter()
    counted = torch.compile(function, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (5, 9, 17, 33):
        counted(*pair(tokens, device)[1])
    assert counter.frame_count == 1, "other token counts must not trace again"


@pytest.mark.parametrize("function", DIFFERENTIABLE)
def test_compiled_backward(function: Callable[..., Tensors], device: str) -> None:
    compiled = torch.compile(function, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (5, 9):
        p, operands = pair(tokens, device)
        leaves = [x.requires_grad_() for x in operands]
        out, lse = compiled(*leaves)
        upstream = torch.linspace(-1, 1, D, device=device)
        ((out * upstream).sum() + torch.where(lse.isinf(), 0, lse).sum()).backward()
        v, s = p.v.cpu().double().requires_grad_(), p.s.cpu().double().requires_grad_()
        wide, wide_lse = merge(Partials(v, s))
        ((wide * upstream.cpu()).sum() + torch.where(wide_lse.isinf(), 0, wide_lse).sum()).backward()
        assert v.grad is not None
        assert s.grad is not None
        expected = (v.grad[:, 0], s.grad[:, 0], v.grad[:, 1], s.grad[:, 1])
        for leaf, grad in zip(leaves, expected, strict=True):
            assert leaf.grad is not None, "lost"
            assert torch.allclose(leaf.grad.cpu().double(), grad.nan_to_num(0), atol=1e-5)


class Module(torch.nn.Module):
    def __init__(self, function: Callable[..., Tensors]) -> None:
        super().__init__()
        self.function = function

    def forward(self, a: torch.Tensor, a_lse: torch.Tensor, b: torch.Tensor, b_lse: torch.Tensor) -> Tensors:
        return self.function(a, a_lse, b, b_lse)


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("function", FUNCTIONS)
def test_exported_with_a_dynamic_number_of_tokens(function: Callable[..., Tensors], strict: bool) -> None:
    _, operands = pair(6)
    tokens = torch.export.Dim("tokens", min=2, max=4096)
    with torch.no_grad():
        program = torch.export.export(
            Module(function), tuple(operands), dynamic_shapes=[{0: tokens}] * 4, strict=strict
        )
    assert "jitkern" in str(program.graph), "the op is in the program, not what it does"
    for count in (3, 40):
        p, operands = pair(count)
        out, lse = program.module()(*operands)
        assert_states(out, lse, p)


def grouped(a: torch.Tensor, a_lse: torch.Tensor, b: torch.Tensor, b_lse: torch.Tensor) -> Tensors:
    """8-bit output with scales for each third of a token."""
    out, lse = torch.empty_like(a, dtype=torch.float8_e4m3fn), torch.empty_like(a_lse.T)
    scale = torch.empty_like(a[:, :, 0])
    options: dict[str, Any] = {"output_group_scale": scale, "scale_ue8m0": True, "lse_base": ("e", 2, 10)}
    jitkern.merge_attn_states(out, a + 0, a_lse.T, b, b_lse.T, lse, 3, **options)
    return out.view(torch.uint8), scale * 1, lse.T


def test_group_scales_compiled_whole(device: str) -> None:
    compiled = torch.compile(grouped, fullgraph=True, dynamic=True, backend="aot_eager")
    for tokens in (5, 9, 17):
        _, operands = pair(tokens, device)
        for given, expected in zip(compiled(*operands), grouped(*operands), strict=True):
            assert torch.equal(given, expected)


@pytest.mark.parametrize("strict", [True, False])
def test_group_scales_exported(strict: bool) -> None:
    tokens = torch.export.Dim("tokens", min=4, max=4096)
    program = torch.export.export(Module(grouped), tuple(pair(6)[1]), dynamic_shapes=[{0: tokens}] * 4, strict=strict)
    assert "merge_attn_states_grouped" in str(program.graph)
    _, operands = pair(40)
    for given, expected in zip(program.module()(*operands), grouped(*operands), strict=True):
        assert torch.equal(given, expected)


def test_a_refused_combination_is_refused_while_tracing() -> None:
    def function(a: torch.Tensor, a_lse: torch.Tensor) -> torch.Tensor:
        out = torch.empty_like(a, dtype=torch.float8_e4m3fn)
        scales: dict[str, Any] = {"output_scale": torch.ones(1), "output_group_scale": torch.empty_like(a[:, :, 0])}
        jitkern.merge_attn_states(out, a, a_lse.T, a, a_lse.T, **scales)
        return out

    _, operands = pair(4)
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match="goes neither with other scales"):
        torch.compile(function, fullgraph=True, backend="aot_eager")(*operands[:2])


def op_arguments(device: str) -> dict[str, list[tuple[Any, ...]]]:
    """Arguments of every registered op, several of some."""
    _, (a, a_lse, b, b_lse) = pair(4, device, empty=0)
    out, lse = torch.zeros_like(a), torch.zeros_like(a_lse)
    none = torch.empty(0, 3, D, device=device), torch.empty(0, 3, device=device)
    base, bases = math.e, (math.e, 2.0, 10.0)
    sink = torch.zeros(3, device=device)
    count, ends = torch.tensor([0, 1, 2, 2], device=device).int(), torch.tensor([0, 1, 4], device=device).int()
    ones = torch.ones(4, dtype=torch.uint8, device=device)
    wide, wide_lse = torch.stack([a, b], 1), torch.stack([a_lse, b_lse], 1)
    scale = torch.ones(1, device=device)
    small = torch.zeros_like(a, dtype=torch.float8_e4m3fn)
    head_major = (a, a_lse.T, b, b_lse.T)
    backward = (out + 1, lse + 1)
    return {
        "merge_attn_states": [(out, *head_major, lse.T, 3), (out, *head_major), (out, *head_major, None, None)],
        "merge_attn_states_with": [
            (small, *head_major, None, 2, None, scale, None, None, *bases),
            (out, small, a_lse.T, small, b_lse.T, lse.T, None, count[:1], None, scale, scale, *bases),
        ],
        "merge_attn_states_grouped": [
            (small, *head_major, lse.T, torch.zeros(4, 3, device=device), False, None, *bases),
            (small, *head_major, None, torch.zeros(1, 4, device=device).T, True, 2, base, base, base),
        ],
        "merge_state": [
            (a, a_lse, b, b_lse, -1, *bases),
            (a, a_lse, b, b_lse, 2, base, base, base),
            (*none * 2, -1, *bases),
        ],
        "merge_state_in_place": [
            (out, lse, b, b_lse, None, None, *bases),
            (out, lse, b, b_lse, ones.bool(), None, *bases),
            (out, lse, b, b_lse, None, ones, *bases),
        ],
        "merge_states": [
            ([wide], [wide_lse], None, None, None, False, True, base, base),
            ([wide], [wide_lse], sink, count, None, False, False, base, 2.0),
            ([a, b], [a_lse, b_lse], sink, count, None, True, True, 2.0, base),
            ([a], [a_lse], None, None, ends, False, True, base, base),
        ],
        "merge_backward": [
            (*backward, [wide], [wide_lse], sink, count, None, False, True, -1, *bases),
            (*backward, [a, b], [a_lse, b_lse], None, None, None, True, True, 2, *bases),
            (backward[0][:2], backward[1][:2], [a], [a_lse], None, None, ends, False, True, -1, *bases),
        ],
    }  # fmt: skip


def registered() -> set[str]:
    names = torch._C._dispatch_get_all_op_names()
    return {name.split("::")[1].split(".")[0] for name in names if name.startswith("jitkern::merge")}


def test_every_registered_op_is_checked_here() -> None:
    assert registered() == set(op_arguments("cpu"))


@pytest.mark.parametrize("name", sorted(op_arguments("cpu")))
@pytest.mark.parametrize("gradients", [False, True])
def test_opcheck(name: str, gradients: bool, device: str) -> None:
    op = getattr(torch.ops.jitkern, name).default
    if gradients and (op._schema.is_mutable or name == "merge_backward"):
        pytest.skip("gives no gradient: see the refusals below")
    for arguments in op_arguments(device)[name]:
        arguments = torch.utils._pytree.tree_map_only(
            torch.Tensor,
            lambda x: x.detach().clone().requires_grad_(gradients and x.is_floating_point() and x.dim() > 1),
            arguments,
        )
        # The other two compare outputs with torch's own arithmetic, which there is not for 8-bit types.
        small = any(isinstance(x, torch.Tensor) and x.dtype == torch.float8_e4m3fn for x in arguments)
        which: dict[str, Any] = {"test_utils": ("test_autograd_registration", "test_faketensor")} if small else {}
        torch.library.opcheck(op, arguments, **which)
