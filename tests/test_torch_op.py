"""torch.ops.jitkern.*: opcheck, FakeTensor, torch.compile with full graph and dynamic shapes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

import jitkern
from tests.merge_oracle import assert_merged, random_states

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("with_lse", [True, False])
def test_opcheck(device: str, with_lse: bool) -> None:
    import jitkern.torch_ops  # noqa: F401

    states = random_states(6, 2, 32, torch.float32, device)
    out, lse = states.outputs()
    arguments = (out, states.a, states.a_lse, states.b, states.b_lse, lse if with_lse else None, 3)
    torch.library.opcheck(torch.ops.jitkern.merge_attn_states.default, arguments)


def merged(
    a: torch.Tensor, a_lse: torch.Tensor, b: torch.Tensor, b_lse: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    out, lse = torch.empty_like(a), torch.empty_like(a_lse)
    jitkern.merge_attn_states(out, a + 0, a_lse, b, b_lse, lse)
    return out * 2, lse


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=pytest.mark.gpu)])
def test_compile_fullgraph_dynamic(device: str, backend: str) -> None:
    torch._dynamo.reset()
    compiled: Callable[..., tuple[torch.Tensor, torch.Tensor]] = torch.compile(
        merged, fullgraph=True, dynamic=True, backend=backend
    )
    counter = torch._dynamo.testing.CompileCounter()
    for tokens in (5, 9, 17):
        states = random_states(tokens, 3, 32, torch.float32, device)
        out, lse = compiled(states.a, states.a_lse, states.b, states.b_lse)
        assert_merged(out / 2, lse, states)
    counted = torch.compile(merged, fullgraph=True, dynamic=True, backend=counter)
    for tokens in (5, 9, 17, 33):
        states = random_states(tokens, 3, 32, torch.float32, device)
        counted(states.a, states.a_lse, states.b, states.b_lse)
    assert counter.frame_count == 1, "other token counts must not trace again"


def test_fake_tensors() -> None:
    import jitkern.torch_ops  # noqa: F401

    with torch._subclasses.FakeTensorMode():
        a, lse = torch.empty(4, 2, 8), torch.empty(2, 4)
        assert torch.ops.jitkern.merge_attn_states(torch.empty_like(a), a, lse, a, lse) is None


def test_other_prefill_counts_neither_compile_nor_bind_again() -> None:
    from jitkern.ops import pairwise

    states = random_states(64, 2, 32, torch.float32)
    out, lse = states.outputs()
    jitkern.merge_attn_states(out, states.a, states.a_lse, states.b, states.b_lse, lse, 1)
    compiled, bound = jitkern.stats()["compiled"], len(pairwise._thread.calls)
    for k in range(65):
        jitkern.merge_attn_states(out, states.a, states.a_lse, states.b, states.b_lse, lse, k)
        assert_merged(out, lse, states, k)
    assert jitkern.stats()["compiled"] == compiled
    assert len(pairwise._thread.calls) == bound
