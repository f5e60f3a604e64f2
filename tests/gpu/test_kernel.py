"""jitkern.Kernel on a GPU: streams, graphs, other frameworks' arrays, shared memory, tuning, figures."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch

import jitkern
from jitkern import bench, settings
from jitkern.kernel import Kernel

AXPY = """
#include "include/elements.cuh"
__global__ void axpy(T* __restrict__ y, const T* __restrict__ x, float a, int n) {
  int i = (blockIdx.x * blockDim.x + threadIdx.x) * PACK;
  if (i >= n) return;
  auto u = jitkern::load<PACK>(x + i), v = jitkern::load<PACK>(y + i);
  for (int j = 0; j < PACK; ++j) v[j] = v[j] + a * u[j];
  jitkern::store(y + i, v);
}
"""
ROW_SUM = """
#include "include/reduce.cuh"
__global__ void row_sum(float* out, const float* x, int d) {
  float sum = 0;
  for (int i = threadIdx.x; i < d; i += blockDim.x) sum += x[(long long)blockIdx.x * d + i];
  sum = jitkern::block_sum(sum);
  if (threadIdx.x == 0) out[blockIdx.x] = sum;
}
"""


def make(text: str = AXPY) -> Kernel:
    return Kernel(text, grid="cdiv(n, 256 * PACK)", block=256)


@pytest.fixture
def axpy() -> Kernel:
    return make()


def ones(n: int, **more: Any) -> torch.Tensor:
    return torch.ones(n, device="cuda", **more)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [0, 1, 7, 1000, 1 << 20])
@pytest.mark.parametrize("offset", [0, 1])
def test_the_gpu_and_the_cpu_give_the_same(axpy: Kernel, dtype: torch.dtype, n: int, offset: int) -> None:
    x, y = (torch.randn(n + offset).to(dtype)[offset:] for _ in range(2))
    gpu = y.to("cuda")
    axpy(gpu, x.to("cuda"), 0.5, n)
    # One multiplication by a power of two is exact, so that a fused and a separate addition round alike.
    axpy(y, x, 0.5, n)
    assert torch.equal(gpu.cpu(), y)


@pytest.mark.parametrize("threads", [32, 96, 1024])
def test_a_collective_over_the_block(threads: int) -> None:
    row_sum = Kernel(ROW_SUM, grid="out.shape[0]", block=threads, cpu_block=1)
    x = torch.randint(-8, 8, (300, 777), device="cuda").float()
    out = torch.empty(300, device="cuda")
    row_sum(out, x, 777)
    assert torch.equal(out, x.sum(1))


def test_dynamic_shared_memory_beyond_48_KiB() -> None:
    text = """__global__ void rev(float* y, const float* x, int n) {
      extern __shared__ float s[];
      for (int i = threadIdx.x; i < n; i += blockDim.x) s[i] = x[i];
      __syncthreads();
      for (int i = threadIdx.x; i < n; i += blockDim.x) y[i] = s[n - 1 - i];
    }"""
    rev = Kernel(text, grid=1, block=256, shared=lambda a: 4 * a.n)
    for n in (100, 20000, 12):
        x, y = torch.randn(n, device="cuda"), torch.empty(n, device="cuda")
        rev(y, x, n)
        assert torch.equal(y, x.flip(0))


# ---- streams and graphs --------------------------------------------------------------------------------------------


def test_the_current_stream_is_asked_for_at_each_call(axpy: Kernel) -> None:
    x, y = ones(1000), torch.zeros(1000, device="cuda")
    axpy(y, x, 0.0, 1000)
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(100_000_000)
        y.fill_(5)
        axpy(y, x, 1.0, 1000)
    side.synchronize()
    assert (y == 6).all(), "it ran before what the stream had to do first"


@pytest.mark.parametrize("kind", ["torch", "int"])
def test_a_stream_that_is_given(axpy: Kernel, kind: str) -> None:
    x, y = ones(1000), torch.zeros(1000, device="cuda")
    axpy(y, x, 0.0, 1000)
    assert (y == 0).all()  # the comparison's own kernels are loaded before it counts
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        torch.cuda._sleep(400_000_000)
    axpy(y, x, 1.0, 1000, stream=side if kind == "torch" else side.cuda_stream)
    assert (y == 0).all()
    side.synchronize()
    assert (y == 1).all()


def captured(kernel: Kernel, y: torch.Tensor, x: torch.Tensor) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernel(y, x, 1.0, y.numel())
    return graph


def test_a_graph_keeps_the_text_that_it_was_captured_with(axpy: Kernel) -> None:
    x, y = ones(1000), torch.zeros(1000, device="cuda")
    axpy.warmup(y, x, 1.0, 1000)
    graph = captured(axpy, y, x)
    edited = make(AXPY.replace("a * u[j]", "100.0f * a * u[j]"))
    edited(y, x, 1.0, 1000)
    del axpy
    graph.replay()
    torch.cuda.synchronize()
    assert (y == 101).all()
    second = captured(edited, y, x)
    second.replay()
    graph.replay()
    torch.cuda.synchronize()
    assert (y == 202).all()


def test_a_cold_call_in_a_capture_names_the_line_that_helps() -> None:
    cold = make(AXPY.replace("a * u[j]", f"{time.time_ns() % 1000003}.0f * a * u[j]"))
    x, y, marker = ones(1000), torch.zeros(1000, device="cuda"), torch.zeros(1, device="cuda")
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        marker.add_(1)
        with pytest.raises(jitkern.CaptureError) as caught:
            cold(y, x, 1.0, 1000)
        marker.add_(1)
    graph.replay()
    torch.cuda.synchronize()
    assert marker.item() == 2, "the capture did not survive"
    line = next(part.strip() for part in str(caught.value).splitlines() if ".warmup(" in part)
    exec(line, {"axpy": cold})
    captured(cold, y, x).replay()
    torch.cuda.synchronize()
    assert (y != 0).all()


def test_no_allocation_and_no_synchronisation(axpy: Kernel) -> None:
    x, y = ones(1000), torch.zeros(1000, device="cuda")
    axpy(y, x, 1.0, 1000)
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["allocation.all.allocated"]
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(10):
            axpy(y, x, 1.0, 1000)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.cuda.memory_stats()["allocation.all.allocated"] == before


def test_a_thread_without_a_context(axpy: Kernel) -> None:
    x, y = ones(1000), torch.zeros(1000, device="cuda")
    torch.cuda.synchronize()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(axpy, y, x, 1.0, 1000).result()
    torch.cuda.synchronize()
    assert (y == 1).all()


def test_profilers_see_a_readable_name(axpy: Kernel) -> None:
    x, y = ones(1000), torch.zeros(1000, device="cuda")
    axpy(y, x, 1.0, 1000)
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        axpy(y, x, 1.0, 1000)
        torch.cuda.synchronize()
    assert [event.key for event in profile.key_averages() if "jitkern" in event.key] == ["jitkern_axpy_f32_p4"]


# ---- other frameworks ----------------------------------------------------------------------------------------------


class Cai:
    """An array that only speaks the CUDA array interface."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor = tensor
        self.__cuda_array_interface__ = tensor.__cuda_array_interface__


def test_the_cuda_array_interface_and_dlpack(axpy: Kernel) -> None:
    x, y = ones(1000), torch.zeros(1000, device="cuda")
    for _ in range(2):
        axpy(Cai(y), Cai(x), 1.0, 1000)
    torch.cuda.synchronize()
    assert (y == 2).all()
    cupy = pytest.importorskip("cupy")
    z = cupy.zeros(1000, dtype=cupy.float32)
    axpy(z, cupy.ones(1000, dtype=cupy.float32), 3.0, 1000)
    assert (z == 3).all()


def test_to_cupy(axpy: Kernel) -> None:
    cupy = pytest.importorskip("cupy")
    y, x = cupy.zeros(1024, dtype=cupy.float32), cupy.ones(1024, dtype=cupy.float32)
    axpy.to_cupy(T="f32", PACK=4)((1,), (256,), (y, x, cupy.float32(2), cupy.int32(1024)))
    assert (y == 2).all()


def test_tensors_on_two_devices_are_refused(axpy: Kernel) -> None:
    with pytest.raises(jitkern.ArgumentError, match="y on cuda:0, x on cpu; all tensors must be on one device"):
        axpy(torch.zeros(4, device="cuda"), torch.zeros(4), 1.0, 4)


# ---- figures -------------------------------------------------------------------------------------------------------


def test_attributes_and_bench(axpy: Kernel, record_property: Any) -> None:
    n = 1 << 26
    result = axpy.bench(torch.zeros(n, device="cuda"), ones(n), 1.0, n, bytes=3 * 4 * n)
    record_property("measured", str(result).splitlines()[-1])
    assert 0.5 < result.share < 1.2
    found = axpy.attributes
    assert found["registers"] > 0
    assert 0 < found["occupancy"] <= 1
    assert "ld.global" in axpy.ptx


def test_tuning_picks_the_quickest_block(axpy: Kernel, tmp_path: Any) -> None:
    text = AXPY.replace(
        "if (i >= n) return;", "if (i >= n) return;\n  for (int r = 0; r < SPIN; ++r) __nanosleep(1000);"
    )
    with settings.override(cache_dir=tmp_path):
        spin = Kernel(text, grid="cdiv(n, 256 * PACK)", block=256, constants={"SPIN": [50, 0, 20]})
        y = torch.zeros(4096, device="cuda")
        spin(y, ones(4096), 1.0, 4096)
        assert spin.last is not None
        assert spin.last.holes["SPIN"] == 0
        torch.cuda.synchronize()
        assert (y == 1).all()
        assert list(tmp_path.glob("v*/sm_*/axpy-tuning-*/kernel.json"))


def test_host_time_of_a_call_with_three_tensors_and_two_scalars(record_property: Any) -> None:
    head = "__global__ void f(float* y, const float* a, const float* b, float s, int n)"
    f = Kernel(f"{head} {{{{ if (n < 0) y[0] = a[0] * b[0] * s; }}}}", grid=1, block=32)
    y, a, b = (ones(16) for _ in range(3))
    f(y, a, b, 1.0, 16)
    us = bench.host_microseconds(lambda: f(y, a, b, 1.0, 16))
    record_property("measured", f"Kernel call, 3 tensors and 2 scalars: {us:.2f} us of host time")
    assert us < 100
