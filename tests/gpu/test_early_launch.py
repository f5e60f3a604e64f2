"""Programmatic stream serialization: a merge launched early must see everything that its predecessor wrote."""

from __future__ import annotations

import pytest
import torch

import jitkern
from jitkern import driver, launch, loader, settings, sources
from jitkern.variants import Variant
from tests.merge_oracle import States, assert_merged, random_states

# Lets its successors start at once, then spends a long time, then writes: the worst predecessor there can be.
TRIGGERS_EARLY = """
#include "include/target.cuh"
using namespace jitkern;
struct Copy { u32* to; const u32* from; i64 words; };
JITKERN_KERNEL(Copy, 256) {
  wait_for_predecessor();
  asm volatile("griddepcontrol.launch_dependents;");
  const i64 end = clock64() + 20000;
  while (clock64() < end) {}
  for (i64 i = blockIdx.x * 256ll + threadIdx.x; i < p.words; i += gridDim.x * 256ll) p.to[i] = p.from[i];
}
"""


def early_copy(to: torch.Tensor, source: torch.Tensor) -> launch.Call:
    text = sources.flatten("early_copy", TRIGGERS_EARLY, "early_copy.cu")
    function = loader.get(Variant("early_copy", "f32", 1, driver.target(0)), 0, None, text)
    words = to.numel() * to.element_size() // 4
    return launch.Call(
        function, (64, 1, 1), (256, 1, 1), "PPq", [to.data_ptr(), source.data_ptr(), words], "PP", pdl=True
    )


@pytest.mark.parametrize("captured", [False, True])
def test_behind_a_producer_that_triggers_at_its_start(captured: bool) -> None:
    if not launch.launches_early(0):
        pytest.skip("this GPU or driver launches nothing early")
    versions = [random_states(300, 8, 128, torch.bfloat16, "cuda", seed=seed) for seed in (1, 2)]
    now = versions[0].clone()
    copies = [
        [early_copy(to, value) for to, value in zip(vars(now).values(), vars(version).values(), strict=True)]
        for version in versions
    ]
    expected = []
    for version in versions:
        out, lse = version.outputs()
        jitkern.merge_attn_states(out, version.a, version.a_lse, version.b, version.b_lse, lse)
        expected.append(out)
    out, lse = now.outputs()
    jitkern.merge_attn_states(out, now.a, now.a_lse, now.b, now.b_lse, lse)
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")

    def step(i: int) -> None:
        for copy in copies[i]:
            copy.relaunch(torch.cuda.current_stream().cuda_stream)
        jitkern.merge_attn_states(out, now.a, now.a_lse, now.b, now.b_lse, lse)

    if captured:
        graphs = []
        for i in range(2):
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step(i)
            graphs.append(graph)
    for i in range(1000):
        if captured:
            graphs[i % 2].replay()
        else:
            step(i % 2)
        wrong += (out.view(torch.int16) != expected[i % 2].view(torch.int16)).sum()
    assert wrong.item() == 0


def test_early_launches_survive_fork_and_join_in_a_capture() -> None:
    """Predecessors on two streams, a copy and a fill among them: not all of them are kernels."""
    states = random_states(64, 4, 128, torch.bfloat16, "cuda")
    now = States(*(torch.zeros_like(x) for x in vars(states).values()))
    out, lse = states.outputs()
    jitkern.merge_attn_states(out, states.a, states.a_lse, states.b, states.b_lse, lse)
    side = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        side.wait_stream(torch.cuda.current_stream())
        now.a.copy_(states.a)
        now.a_lse.copy_(states.a_lse)
        with torch.cuda.stream(side):
            now.b.copy_(states.b)
            now.b_lse.copy_(states.b_lse)
        out.zero_()
        torch.cuda.current_stream().wait_stream(side)
        jitkern.merge_attn_states(out, now.a, now.a_lse, now.b, now.b_lse, lse)
        jitkern.merge_attn_states(now.a, out, lse, now.b, now.b_lse)
    for _ in range(20):
        for x in vars(now).values():
            x.fill_(-5)
        graph.replay()
        torch.cuda.synchronize()
        assert_merged(out, lse, states)


def test_it_can_be_switched_off() -> None:
    launch.launches_early.cache_clear()
    try:
        with settings.override(pdl=False):
            assert not launch.launches_early(0)
    finally:
        launch.launches_early.cache_clear()
