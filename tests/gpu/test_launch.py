"""Streams, devices, threads and CUDA graphs."""

from __future__ import annotations

import gc
import itertools
import os
import subprocess
import sys
import textwrap
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import jitkern
from jitkern import loader
from tests.merge_oracle import States, assert_merged, random_states

# Head sizes that no other test uses, so that their variants are cold in this process.
cold_head_sizes = itertools.count(6008, 8)


def merge_into(out: torch.Tensor, lse: torch.Tensor | None, s: States, **more: Any) -> None:
    jitkern.merge_attn_states(out, s.a, s.a_lse, s.b, s.b_lse, lse, **more)


def cold_states(tokens: int = 4, dtype: torch.dtype = torch.float16) -> States:
    return random_states(tokens, 2, next(cold_head_sizes), dtype, "cuda")


@pytest.fixture(autouse=True)
def _no_graph_of_another_test_dies_during_a_capture() -> None:
    gc.collect()  # destroying a graph is illegal while another one is captured


@pytest.fixture
def states() -> States:
    return random_states(512, 8, 128, torch.bfloat16, "cuda")


def test_current_stream_behind_a_long_kernel(states: States) -> None:
    """Inputs appear late on a side stream; the merge on that stream must see them."""
    side = torch.cuda.Stream()
    out, lse = states.outputs()
    late = States(*(torch.zeros_like(x) for x in vars(states).values()))
    merge_into(out, lse, states)
    out.fill_(-1)
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(200_000_000)
        for to, value in zip(vars(late).values(), vars(states).values(), strict=True):
            to.copy_(value)
        merge_into(out, lse, late)
    side.synchronize()
    assert_merged(out, lse, states)


@pytest.mark.parametrize("kind", ["torch", "int", "cupy", "protocol"])
def test_explicit_stream(states: States, kind: str) -> None:
    side = torch.cuda.Stream()

    class Holder:
        def __cuda_stream__(self) -> tuple[int, int]:
            return 0, side.cuda_stream

    stream: Any = {"torch": side, "int": side.cuda_stream, "protocol": Holder()}.get(kind)
    if kind == "cupy":
        cupy = pytest.importorskip("cupy")
        stream = cupy.cuda.Stream.from_external(side)
    out, lse = states.outputs()
    merge_into(out, lse, states)
    out.fill_(-123)
    assert (out == -123).all()  # the comparison's own kernels are loaded before it counts
    torch.cuda.synchronize()
    with torch.cuda.stream(side):
        torch.cuda._sleep(400_000_000)
    merge_into(out, lse, states, stream=stream)
    assert (out == -123).all(), "it ran before the stream got to it"  # this read is on the default stream
    side.synchronize()
    assert_merged(out, lse, states)


def test_stream_zero_is_passed_as_it_is(states: States) -> None:
    out, lse = states.outputs()
    with torch.cuda.stream(torch.cuda.Stream()):
        merge_into(out, lse, states, stream=0)
    torch.cuda.synchronize()
    assert_merged(out, lse, states)


def test_capture_and_replay_with_changed_inputs_on_another_stream(states: States) -> None:
    out, lse = states.outputs()
    merge_into(out, lse, states)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        merge_into(out, lse, states)
    for seed in (1, 2):
        other = random_states(512, 8, 128, torch.bfloat16, "cuda", seed=seed)
        for to, value in zip(vars(states).values(), vars(other).values(), strict=True):
            to.copy_(value)
        out.fill_(-1)
        torch.cuda.synchronize()
        with torch.cuda.stream(torch.cuda.Stream()):
            graph.replay()
        torch.cuda.synchronize()
        assert_merged(out, lse, other)


def test_a_cold_call_in_capture_says_what_to_do_and_leaves_the_capture_valid() -> None:
    states = cold_states()
    out, lse = states.outputs()
    marker = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        marker.add_(1)
        with pytest.raises(jitkern.CaptureError) as caught:
            merge_into(out, lse, states)
        marker.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert (marker == 2).all(), "the capture did not survive"
    line = next(part.strip() for part in str(caught.value).splitlines() if "jitkern.warmup(" in part)
    exec(line, {"jitkern": jitkern})  # the very line of the message
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        merge_into(out, lse, states)
    graph.replay()
    torch.cuda.synchronize()
    assert_merged(out, lse, states)


def test_a_cold_call_on_a_captured_stream_that_is_not_the_current_one() -> None:
    states = cold_states()
    out, lse = states.outputs()
    side, other = torch.cuda.Stream(), torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, stream=side):
        with torch.cuda.stream(other), pytest.raises(jitkern.CaptureError):
            merge_into(out, lse, states, stream=side)
        torch.zeros(1, device="cuda").add_(1)


def test_loading_in_one_thread_leaves_a_capture_in_another_valid() -> None:
    states = cold_states()
    out, lse = states.outputs()
    marker = torch.zeros(4, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as pool, torch.cuda.graph(graph):
        marker.add_(1)
        pool.submit(
            jitkern.warmup, "merge_attn_states", dtype="f16", pack=8, d=states.shape[2], dense=2, device=0
        ).result()
        marker.add_(1)
    graph.replay()
    merge_into(out, lse, states)
    torch.cuda.synchronize()
    assert (marker == 2).all()
    assert_merged(out, lse, states)


def test_replay_after_everything_python_held_is_gone() -> None:
    states = cold_states()
    out, lse = states.outputs()
    merge_into(out, lse, states)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        merge_into(out, lse, states)
    loader.forget()
    gc.collect()
    out.fill_(-1)
    graph.replay()
    torch.cuda.synchronize()
    assert_merged(out, lse, states)


def test_no_allocation_no_synchronisation(states: States) -> None:
    out, lse = states.outputs()
    merge_into(out, lse, states)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            merge_into(out, lse, states)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_one_kernel_with_a_name_that_profilers_show(states: States) -> None:
    out, lse = states.outputs()
    merge_into(out, lse, states)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        merge_into(out, lse, states)
        torch.cuda.synchronize()
    names = [event.key for event in profile.key_averages() if "jitkern" in event.key]
    assert names == ["jitkern_merge_attn_states_bf16_p8_d128_dense2"]


def test_eight_threads_cold_at_once() -> None:
    states = cold_states(32)
    before = jitkern.stats()["compiled"]

    def call(_: int) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = states.outputs()
        merge_into(out, lse, states)
        return out, lse

    with ThreadPoolExecutor(8) as pool:
        results = list(pool.map(call, range(8)))
    torch.cuda.synchronize()
    assert jitkern.stats()["compiled"] - before <= 1
    for out, lse in results:
        assert_merged(out, lse, states)


def test_a_thread_without_a_context(states: States) -> None:
    """A thread that never touched CUDA has no current context; launching from it must work all the same."""
    out, lse = states.outputs()
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(merge_into, out, lse, states).result()
    torch.cuda.synchronize()
    assert_merged(out, lse, states)


PROGRAM = """
import torch, jitkern
from tests.merge_oracle import random_states, assert_merged
s = random_states(8, 2, 200, torch.float16, "cuda")
out, lse = s.outputs()
jitkern.merge_attn_states(out, s.a, s.a_lse, s.b, s.b_lse, lse)
assert_merged(out, lse, s)
print("good", jitkern.stats()["compiled"])
"""


def test_two_processes_cold_at_once(tmp_path: Path) -> None:
    environment = os.environ | {"JITKERN_CACHE_DIR": f"{tmp_path}/cold"}
    command = [sys.executable, "-c", textwrap.dedent(PROGRAM)]
    runs = [subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, text=True) for _ in range(2)]
    outputs = [run.communicate(timeout=120)[0] for run in runs]
    assert all(text.startswith("good") for text in outputs), outputs
    assert sum(int(text.split()[1]) for text in outputs) == 1, "one compile for both"


def test_tensors_on_two_devices_are_refused(states: States) -> None:
    out, lse = states.outputs()
    with pytest.raises(jitkern.ArgumentError, match="several devices"):
        merge_into(out, lse, States(states.a.cpu(), states.a_lse, states.b, states.b_lse))


def test_the_tensors_device_counts_not_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    states = random_states(64, 4, 128, torch.bfloat16, "cuda:1")
    out, lse = states.outputs()
    with torch.cuda.device(0):
        merge_into(out, lse, states)
    torch.cuda.synchronize(1)
    assert_merged(out, lse, states)


def test_a_thousand_runs_are_equal(states: States) -> None:
    out, lse = states.outputs()
    merge_into(out, lse, states)
    first = out.clone()
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(1000):
        merge_into(out.fill_(-1), lse, states)
        different += (out.view(torch.int16) != first.view(torch.int16)).sum()
    assert different.item() == 0


def test_aliased_lse_many_times() -> None:
    """d=192: 24 lanes a row, rows that straddle warps; L is read and overwritten in place."""
    states = random_states(4096, 8, 192, torch.bfloat16, "cuda")
    out, lse = states.outputs()
    merge_into(out, lse, states)
    different = torch.zeros((), dtype=torch.int64, device="cuda")
    for _ in range(200):
        s = states.clone()
        merge_into(s.a, s.a_lse, s)
        different += (s.a.view(torch.int16) != out.view(torch.int16)).sum() + (s.a_lse != lse).sum()
    assert different.item() == 0
