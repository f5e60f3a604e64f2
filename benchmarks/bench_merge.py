"""Pairwise merge beside the public kernels: GPU time by graph replay over rotating buffers, host time, first call.

    python benchmarks/bench_merge.py --out benchmarks/results/merge.csv

Peers that are not there are left out: sglang's merge_state_v2 (the kernel that vLLM ships too; give the path of
common_ops.abi3.so in SGLANG_OPS), FlashInfer (in a process of its own, since its failed launches stick), Triton with
one program per (token, head), the eager formula and torch.compile of it.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import common
from jitkern import bench

Shape = tuple[int, int, int, str]
F32, F16, BF16 = "float32", "float16", "bfloat16"
BASELINE: list[Shape] = [
    *((n, h, d, F32) for n, h, d in [(256, 4, 32), (1024, 8, 64), (4096, 8, 128), (256, 32, 256), (1024, 32, 256)]),
    *((n, h, d, F32) for n, h, d in [(4096, 32, 256), (4096, 64, 256), (613, 16, 128), (1, 16, 512)]),
    *((n, h, d, F32) for n, h, d in [(16384, 128, 512), (131072, 16, 128)]),
    *((n, h, d, BF16) for n, h, d in [(256, 4, 32), (1024, 8, 64), (4096, 8, 128), (256, 32, 256), (1024, 32, 256)]),
    *((n, h, d, BF16) for n, h, d in [(4096, 32, 256), (4096, 64, 256), (613, 16, 128), (1, 16, 512), (128, 128, 512)]),
]
GRID: list[Shape] = [
    (n, h, d, t)
    for n in (256, 512, 613, 1024, 1536, 4096)
    for h in (4, 8, 16, 32, 48, 64)
    for d in (32, 48, 64, 96, 128, 256)
    for t in (F32, F16, BF16)
]


def traffic(shape: Shape) -> int:
    """Bytes that a pairwise merge has to move."""
    n, h, d, name = shape
    return 3 * n * h * d * getattr(torch, name).itemsize + 12 * n * h


class Operands:
    """One set of buffers; L lies in memory as [n, h], which every peer wants."""

    def __init__(self, shape: Shape) -> None:
        n, h, d, name = shape
        self.a, self.b = (torch.randn(n, h, d, device="cuda").to(getattr(torch, name)) for _ in range(2))
        self.a_lse, self.b_lse = (torch.randn(n, h, device="cuda") for _ in range(2))
        self.out, self.out_lse = torch.empty_like(self.a), torch.empty_like(self.a_lse)


def eager(o: Operands) -> tuple[Any, Any]:
    top = torch.maximum(o.a_lse, o.b_lse)
    wa, wb = torch.exp(o.a_lse - top), torch.exp(o.b_lse - top)
    total = wa + wb
    return (o.a * (wa / total).unsqueeze(-1) + o.b * (wb / total).unsqueeze(-1)).to(o.a.dtype), top + total.log()


def use_jitkern() -> Callable[[Operands], Any]:
    import jitkern

    return lambda o: jitkern.merge_attn_states(o.out, o.a, o.a_lse.T, o.b, o.b_lse.T, o.out_lse.T)


def use_sglang() -> Callable[[Operands], Any]:
    torch.ops.load_library(os.environ["SGLANG_OPS"])
    op = torch.ops.sgl_kernel.merge_state_v2.default
    return lambda o: op(o.a, o.a_lse, o.b, o.b_lse, o.out, o.out_lse)


def use_triton() -> Callable[[Operands], Any]:
    from benchmarks import triton_merge

    return lambda o: triton_merge.merge(o.out, o.out_lse, o.a, o.a_lse, o.b, o.b_lse)


def use_flashinfer() -> Callable[[Operands], Any]:
    import flashinfer

    return lambda o: flashinfer.merge_state(o.a, o.a_lse, o.b, o.b_lse)


def use_compile() -> Callable[[Operands], Any]:
    compiled = torch.compile(eager, dynamic=True)
    return lambda o: compiled(o)


MAKERS: dict[str, Callable[[], Callable[[Operands], Any]]] = {
    "jitkern": use_jitkern,
    "sglang": use_sglang,
    "triton": use_triton,
    "eager": lambda: eager,
    "compile": use_compile,
    "flashinfer": use_flashinfer,
}


def applies(peer: str, shape: Shape) -> bool:
    _, h, d, name = shape
    if peer == "flashinfer":
        size = 2
        vector = max(16 // size, d // 32)
        return name != F32 and d in (64, 128, 256, 512) and h * (d // vector) <= 1024
    return not (peer in ("eager", "compile") and traffic(shape) > 500_000_000)


def measure(peer: str, call: Callable[[Operands], Any], shape: Shape, repeats: int) -> float:
    sets = [Operands(shape) for _ in range(common.sets_for(traffic(shape)))]
    rounds = max(1, 30 // len(sets))
    return bench.gpu_microseconds([lambda o=o: call(o) for o in sets], rounds, repeats)  # type: ignore[misc]


def run_peer(peer: str, shapes: list[Shape], repeats: int) -> dict[Shape, float]:
    try:
        call = MAKERS[peer]()
    except (ImportError, KeyError, OSError, AttributeError) as error:
        print(f"{peer}: left out ({type(error).__name__}: {error})", file=sys.stderr)
        return {}
    times = {}
    for shape in shapes:
        if applies(peer, shape):
            times[shape] = measure(peer, call, shape, repeats)
            torch.cuda.empty_cache()
    return times


def in_a_process(peer: str, arguments: argparse.Namespace) -> dict[Shape, float]:
    command = [
        sys.executable,
        __file__,
        "--only",
        peer,
        "--repeats",
        str(arguments.repeats),
        "--shapes",
        arguments.shapes,
    ]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = run.stdout.strip().splitlines()
    if run.returncode or not lines:
        print(f"{peer}: left out ({run.stderr.strip().splitlines()[-1:]})", file=sys.stderr)
        return {}
    return {(n, h, d, t): us for n, h, d, t, us in json.loads(lines[-1])}


def host_times(peers: list[str]) -> dict[str, float]:
    """Host microseconds a call, n=16, h=4, d=64, bf16, asynchronous."""
    operands = Operands((16, 4, 64, BF16))
    times = {}
    for peer in peers:
        try:
            call = MAKERS[peer]()
        except (ImportError, KeyError, OSError, AttributeError):
            continue
        call(operands)
        times[peer] = bench.host_microseconds(lambda call=call: call(operands))  # type: ignore[misc]
    import jitkern

    o = operands
    views = (o.out, o.a, o.a_lse.T, o.b, o.b_lse.T, o.out_lse.T)
    jitkern.merge_attn_states(*views)
    times["jitkern, views made beforehand"] = bench.host_microseconds(lambda: jitkern.merge_attn_states(*views))
    prepared = jitkern.prepare(jitkern.merge_attn_states, *views)
    times["jitkern, prepared"] = bench.host_microseconds(prepared)
    op = torch.ops.jitkern.merge_attn_states.default
    times["torch.ops.jitkern"] = bench.host_microseconds(lambda: op(*views))
    return times


def geometric_mean(values: list[float]) -> float:
    return math.exp(sum(map(math.log, values)) / len(values)) if values else math.nan


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--only", help="one peer; prints JSON")
    parser.add_argument("--peers", default="jitkern,sglang,triton,eager,flashinfer")
    parser.add_argument("--shapes", choices=("baseline", "grid"), default="baseline")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args()
    shapes = BASELINE if arguments.shapes == "baseline" else GRID
    if arguments.only:
        times = run_peer(arguments.only, shapes, arguments.repeats)
        print(json.dumps([[*shape, us] for shape, us in times.items()]))
        return 0
    results: dict[str, dict[Shape, float]] = {}
    for peer in arguments.peers.split(","):
        results[peer] = (
            in_a_process(peer, arguments) if peer == "flashinfer" else run_peer(peer, shapes, arguments.repeats)
        )
    facts, rows, shown = common.facts(), [], []
    for shape in shapes:
        times = {peer: result.get(shape) for peer, result in results.items()}
        mine = times.get("jitkern")
        row: dict[str, Any] = {"n": shape[0], "h": shape[1], "d": shape[2], "dtype": shape[3]}
        row |= {f"{peer} us": None if us is None else round(us, 3) for peer, us in times.items()}
        row["jitkern GB/s"] = None if mine is None else round(traffic(shape) / mine / 1000)
        shown.append(row)
        rows.append(row | facts)
    if arguments.shapes == "baseline":
        print(bench.table(shown))
    for peer, result in results.items():
        ratios = [us / results["jitkern"][shape] for shape, us in result.items() if shape in results["jitkern"]]
        if peer != "jitkern" and ratios:
            worst = min(ratios)
            mean = geometric_mean(ratios)
            print(f"{peer}: {mean:.3f} x jitkern's time (geometric mean of {len(ratios)}), least {worst:.3f}")
    if arguments.shapes == "baseline":
        host = host_times([peer for peer in results if peer != "flashinfer"])
        print(bench.table([{"host us/call": name, "us": us} for name, us in host.items()]))
        rows += [{"host us/call": name, "us": round(us, 2)} | facts for name, us in host.items()]
    if arguments.out:
        common.write_csv(arguments.out, rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
