"""Host time of tiny calls on the CPU: what Python adds to a launch, with next to nothing launched.

    JITKERN_THREADS=1 python benchmarks/host_calls.py

Each figure is the least of many short runs, in microseconds, to be held against another commit in the same minutes.
"""

from __future__ import annotations

import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import jitkern
from jitkern import bench

TEXT = """__global__ void f(T* y, const T* x, const T* z, float a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) y[i] = x[i] + z[i] * a;
}"""


def calls() -> dict[str, Callable[[], Any]]:
    """What is measured, by name."""
    v, s = torch.randn(2, 2, 1, 8), torch.randn(2, 2, 1)
    (a, b), (a_lse, b_lse) = ([x.contiguous() for x in y.unbind(1)] for y in (v, s))
    out, out_lse = torch.empty_like(a), torch.empty_like(a_lse)
    kernel = jitkern.Kernel(TEXT, grid="cdiv(n, 8)", block=8)
    y, x, z = (torch.zeros(8) for _ in range(3))
    results = {"out": out, "out_lse": out_lse}
    return {
        "merge_attn_states": lambda: jitkern.merge_attn_states(out, a, a_lse.T, b, b_lse.T, out_lse.T),
        "merge_state into": lambda: jitkern.merge_state(a, a_lse, b, b_lse, **results),
        "merge_state_in_place": lambda: jitkern.merge_state_in_place(a, a_lse, b, b_lse),
        "merge_states, a list of 2": lambda: jitkern.merge_states([a, b], [a_lse, b_lse], **results),
        "merge_states, 2 stacked": lambda: jitkern.merge_states(v, s, **results),
        "own kernel, 3 tensors and 2 numbers": lambda: kernel(y, x, z, 1.0, 8),
    }


def main() -> None:
    print(f"jitkern {jitkern.__version__}, torch {torch.__version__}, Python {platform.python_version()}")
    for name, call in calls().items():
        for _ in range(5):
            call()
        least = min(bench.host_microseconds(call, count=1000, repeats=1, cuda=False) for _ in range(60))
        print(f"{name:36} {least:6.2f} us")


if __name__ == "__main__":
    main()
