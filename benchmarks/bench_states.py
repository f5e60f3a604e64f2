"""N-way merges beside chains of pairwise ones, and fused 8-bit output beside merge and quantise.

    python benchmarks/bench_states.py --out benchmarks/results/states.csv

GPU time by graph replay over rotating buffers. The peers are what one does without: instead of the N-way kernel a chain
of jitkern's own pairwise merges in place; instead of fused 8-bit output a merge and a quantise kernel (Inductor's, the
eager formula, and sglang's where SGLANG_OPS names a common_ops.abi3.so that has one).
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

import jitkern
from benchmarks import common
from jitkern import bench

NWAY = [(1024, 32, 128), (4096, 32, 128), (256, 128, 512), (64, 128, 128)]
COUNTS = (2, 3, 4, 8, 16)


def timed(make: Callable[[], Any], run: Callable[[Any], Any], size: int) -> float:
    sets = [make() for _ in range(common.sets_for(size))]
    us = bench.gpu_microseconds([lambda o=o: run(o) for o in sets], max(1, 30 // len(sets)))  # type: ignore[misc]
    del sets
    torch.cuda.empty_cache()
    return us


class Stack:
    def __init__(self, n: int, count: int, h: int, d: int) -> None:
        self.v = torch.randn(n, count, h, d, device="cuda").bfloat16()
        self.s = torch.randn(n, count, h, device="cuda")
        self.out, self.lse = torch.empty(n, h, d, device="cuda").bfloat16(), torch.empty(n, h, device="cuda")
        self.list_v, self.list_s = list(self.v.unbind(1)), list(self.s.unbind(1))


def chain(o: Stack) -> None:
    jitkern.merge_state(o.list_v[0], o.list_s[0], o.list_v[1], o.list_s[1], out=o.out, out_lse=o.lse)
    for v, s in zip(o.list_v[2:], o.list_s[2:], strict=True):
        jitkern.merge_state_in_place(o.out, o.lse, v, s)


def nway_rows() -> list[dict[str, Any]]:
    rows = []
    for n, h, d in NWAY:
        for count in COUNTS:
            size = (count + 1) * n * h * d * 2
            if size > 2_000_000_000:
                continue
            make = lambda n=n, count=count, h=h, d=d: Stack(n, count, h, d)  # noqa: E731
            stacked = timed(make, lambda o: jitkern.merge_states(o.v, o.s, out=o.out, out_lse=o.lse), size)
            listed = timed(make, lambda o: jitkern.merge_states(o.list_v, o.list_s, out=o.out, out_lse=o.lse), size)
            chained = timed(make, chain, size)
            rows.append(
                {"n": n, "h": h, "d": d, "N": count, "stacked us": stacked, "list us": listed, "chain us": chained}
                | {"GB/s": round(size / stacked / 1000), "chain/stacked": chained / stacked}
            )
        pair = next(row for row in rows if (row["n"], row["h"], row["d"], row["N"]) == (n, h, d, 2))["chain us"]
        for row in rows:
            if (row["n"], row["h"], row["d"]) == (n, h, d):
                row["of (N+1)/3 pairwise"] = row["stacked us"] / (pair * (row["N"] + 1) / 3)
    return rows


@torch.compile(dynamic=True)
def static_quantise(out: torch.Tensor, wide: torch.Tensor, scale: torch.Tensor) -> None:
    """One kernel, made by Inductor: read 16 bits, write 8."""
    out.copy_((wide.float() * (1 / scale)).clamp(-448, 448).to(torch.float8_e4m3fn))


class Quantised:
    def __init__(self, n: int, h: int, d: int) -> None:
        self.a, self.b = (torch.randn(n, h, d, device="cuda").bfloat16() for _ in range(2))
        self.a_lse, self.b_lse = (torch.randn(h, n, device="cuda") for _ in range(2))
        self.wide = torch.empty_like(self.a)
        self.out = torch.empty(n, h, d, device="cuda", dtype=torch.float8_e4m3fn)
        self.scale = torch.full((1,), 0.05, device="cuda")

    def fused(self) -> None:
        jitkern.merge_attn_states(self.out, self.a, self.a_lse, self.b, self.b_lse, None, None, self.scale)

    def merge(self) -> None:
        jitkern.merge_attn_states(self.wide, self.a, self.a_lse, self.b, self.b_lse)

    def eager(self) -> Any:
        self.merge()
        return (self.wide.float() / self.scale).clamp(-448, 448).to(torch.float8_e4m3fn)

    def compiled(self) -> None:
        self.merge()
        static_quantise(self.out, self.wide, self.scale)

    def kernels(self) -> None:
        self.merge()
        n, h, d = self.wide.shape
        torch.ops.sgl_kernel.sgl_per_tensor_quant_fp8(
            self.wide.view(n, h * d), self.out.view(n, h * d), self.scale, True
        )


def quantised_rows() -> list[dict[str, Any]]:
    rows = []
    peers: dict[str, Callable[[Quantised], Any]] = {
        "fused": Quantised.fused,
        "merge + compiled quantise": Quantised.compiled,
        "merge + eager quantise": Quantised.eager,
    }
    if "SGLANG_OPS" in os.environ:
        torch.ops.load_library(os.environ["SGLANG_OPS"])
        if hasattr(torch.ops.sgl_kernel, "sgl_per_tensor_quant_fp8"):
            peers["merge + sglang quantise"] = Quantised.kernels
    for n, h, d in [(1024, 128, 128), (256, 128, 128), (64, 128, 128), (4096, 32, 128)]:
        row: dict[str, Any] = {"n": n, "h": h, "d": d}
        for name, run in peers.items():
            row[f"{name} us"] = timed(lambda n=n, h=h, d=d: Quantised(n, h, d), run, n * h * d * 5)  # type: ignore[misc]
        rows.append(row)
    return rows


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    nway, quantised = nway_rows(), quantised_rows()
    print(bench.table(nway))
    print(bench.table(quantised))
    if arguments.out:
        common.write_csv(arguments.out, [row | common.facts() for row in (*nway, *quantised)])
    return 0


if __name__ == "__main__":
    sys.exit(main())
