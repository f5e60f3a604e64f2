"""Your own kernel: seconds from an edited text to its result, and the host time of a call.

    python benchmarks/bench_kernel.py [--device cuda] [--rounds 7] [--peers] [--out FILE.csv]

Edit to run: a text of about 60 lines is changed (a constant in it, so that nothing is cached) and called on tensors;
the clock runs from the text to the synchronised result, in a process that has compiled before. With ``--peers`` torch's
``load_inline`` and CuPy's RawKernel do the same, where they are installed.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import common
from jitkern import bench, settings
from jitkern.kernel import Kernel

# RMSNorm fused with the residual addition; the holes of jitkern on top, CUDA as anybody writes it below.
BODY = """
// out = rmsnorm(x + residual) * weight; residual becomes x + residual. One block works on one row.
__device__ float warp_sum(float v) {
  for (int step = 16; step > 0; step >>= 1) {
    v += __shfl_xor_sync(0xffffffffu, v, step);
  }
  return v;
}

__device__ float block_sum(float v) {
  __shared__ float partial[32];
  const int lane = threadIdx.x & 31;
  const int warp = threadIdx.x >> 5;
  v = warp_sum(v);
  if (lane == 0) {
    partial[warp] = v;
  }
  __syncthreads();
  const int warps = blockDim.x >> 5;
  v = lane < warps ? partial[lane] : 0.0f;
  return warp_sum(v);
}

constexpr int kPerThread = 8;
constexpr float kEdited = EDITED;

extern "C" __global__ void rmsnorm(
    float* __restrict__ out,
    float* __restrict__ residual,
    const float* __restrict__ x,
    const float* __restrict__ weight,
    int d,
    float eps) {
  const long long row = (long long)blockIdx.x * d;
  float kept[kPerThread];
  float sum = 0.0f;
  for (int k = 0; k < kPerThread; ++k) {
    const int i = threadIdx.x + k * blockDim.x;
    if (i >= d) {
      break;
    }
    const float v = x[row + i] + residual[row + i];
    residual[row + i] = v;
    kept[k] = v;
    sum += v * v;
  }
  sum = block_sum(sum);
  const float scale = kEdited * rsqrtf(sum / d + eps);
  for (int k = 0; k < kPerThread; ++k) {
    const int i = threadIdx.x + k * blockDim.x;
    if (i >= d) {
      break;
    }
    out[row + i] = kept[k] * scale * weight[i];
  }
}
"""
# The same on the CPU, where a block has one thread and no shuffle.
CPU_BODY = """
extern "C" __global__ void rmsnorm(
    float* out, float* residual, const float* x, const float* weight, int d, float eps) {
  const long long row = (long long)blockIdx.x * d;
  float sum = 0.0f;
  for (int i = 0; i < d; ++i) {
    residual[row + i] += x[row + i];
    sum += residual[row + i] * residual[row + i];
  }
  const float scale = EDITED * rsqrtf(sum / d + eps);
  for (int i = 0; i < d; ++i) out[row + i] = residual[row + i] * scale * weight[i];
}
"""
ROWS, D, THREADS = 256, 1024, 128
INLINE = """
#include <ATen/cuda/CUDAContext.h>
#include <torch/extension.h>
{body}
void run(torch::Tensor out, torch::Tensor residual, torch::Tensor x, torch::Tensor weight, double eps) {{
  rmsnorm<<<out.size(0), {threads}, 0, at::cuda::getCurrentCUDAStream()>>>(
      out.data_ptr<float>(), residual.data_ptr<float>(), x.data_ptr<float>(), weight.data_ptr<float>(),
      out.size(1), eps);
}}
"""


class Rows:
    """The operands, and the answer."""

    def __init__(self, device: str) -> None:
        torch.manual_seed(0)
        self.x, self.residual = (torch.randn(ROWS, D, device=device) for _ in range(2))
        self.weight, self.out = torch.randn(D, device=device), torch.empty(ROWS, D, device=device)
        self.before = self.residual.clone()

    def check(self, factor: float) -> None:
        total = (self.before + self.x).double()
        expected = factor * total * (total.square().mean(1, keepdim=True) + 1e-5).rsqrt() * self.weight.double()
        torch.testing.assert_close(self.out.double(), expected, rtol=1e-4, atol=1e-4)
        self.residual.copy_(self.before)


def use_jitkern(text: str, rows: Rows, number: int) -> None:
    kernel = Kernel(text, grid="out.shape[0]", block=THREADS, cpu_block=1)
    kernel(rows.out, rows.residual, rows.x, rows.weight, D, 1e-5)


def use_cupy(text: str, rows: Rows, number: int) -> None:
    import cupy

    kernel = cupy.RawKernel(text, "rmsnorm")
    arrays = [cupy.from_dlpack(value) for value in (rows.out, rows.residual, rows.x, rows.weight)]
    kernel((ROWS,), (THREADS,), (*arrays, cupy.int32(D), cupy.float32(1e-5)))


def use_load_inline(text: str, rows: Rows, number: int) -> None:
    from torch.utils.cpp_extension import load_inline

    source = INLINE.format(body=text, threads=THREADS)
    declared = "void run(torch::Tensor, torch::Tensor, torch::Tensor, torch::Tensor, double);"
    module = load_inline(f"edit_{number}", declared, source, functions=["run"], no_implicit_headers=False)
    module.run(rows.out, rows.residual, rows.x, rows.weight, 1e-5)


def edit_to_run(use: Callable[[str, Rows, int], None], device: str, rounds: int) -> list[float]:
    """Seconds of each round; the first, which starts the compiler, is not counted."""
    rows, times = Rows(device), []
    body = CPU_BODY if device == "cpu" else BODY
    for number in range(rounds + 1):
        factor = 1.0 + (time.time_ns() % 1_000_000) / 1e7  # a text that nobody has compiled
        text = body.replace("EDITED", f"{factor!r}f")
        start = time.perf_counter()
        use(text, rows, number)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        rows.check(factor)
    return times[1:]


def launch_time(device: str) -> float:
    """Host microseconds of a call with three tensors and two scalars."""
    head = "__global__ void f(float* y, const float* a, const float* b, float s, int n)"
    kernel = Kernel(f"{head} {{ if (n < 0) y[0] = a[0] * b[0] * s; }}", grid=1, block=32, cpu_block=1)
    y, a, b = (torch.ones(16, device=device) for _ in range(3))
    kernel(y, a, b, 1.0, 16)
    return bench.host_microseconds(lambda: kernel(y, a, b, 1.0, 16), cuda=device == "cuda")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    peers: dict[str, tuple[Callable[[str, Rows, int], None], int]] = {"jitkern.Kernel": (use_jitkern, arguments.rounds)}
    if arguments.peers and arguments.device == "cuda":
        peers |= {"CuPy RawKernel": (use_cupy, arguments.rounds), "torch load_inline": (use_load_inline, 1)}
    rows: list[dict[str, Any]] = []
    lines = len((CPU_BODY if arguments.device == "cpu" else BODY).strip().splitlines())
    with tempfile.TemporaryDirectory() as folder, settings.override(cache_dir=Path(folder)):
        for name, (use, rounds) in peers.items():
            try:
                times = edit_to_run(use, arguments.device, rounds)
            except ImportError as error:
                print(f"{name}: left out ({error})", file=sys.stderr)
                continue
            row = {"what": f"edit to run, {lines} lines", "path": name, "unit": "s"}
            rows.append(row | {"median": statistics.median(times), "least": min(times), "most": max(times)})
        us = launch_time(arguments.device)
        row = {"what": "host time of a call", "path": "jitkern.Kernel", "unit": "us"}
        rows.append(row | dict.fromkeys(("median", "least", "most"), us))
    print(bench.table(rows))
    if arguments.out:
        common.write_csv(arguments.out, [row | {"target": arguments.device} | common.facts() for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
