"""MLA decode and its plan: GPU time by graph replay, beside FlashMLA where its library is given.

Each figure is the median over replays of a graph that holds many calls over rotating buffers, more than three times the
L2 together, so that host time is out of it and the cache is cold. `decode` reuses a ready plan; `decode + plan` makes
the plan before each decode, as a serving step does; `plan` is alone. Values are compared with float64 first.

    python benchmarks/bench_mla.py --flashmla path/to/flashmla_ops.abi3.so --csv results.csv
"""

from __future__ import annotations

import argparse
import csv
import statistics
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

ROWS = (  # batch, keys, heads, query tokens: the rows of the baseline table
    (1, 4096, 16, 1),
    (1, 32768, 16, 1),
    (8, 4096, 16, 1),
    (16, 1024, 16, 1),
    (32, 2048, 16, 1),
    (64, 2048, 16, 1),
    (128, 1024, 16, 1),
    (256, 1024, 16, 1),
    (128, 4096, 16, 1),
    (128, 8192, 16, 1),
    (132, 4096, 16, 2),
    (128, 1024, 16, 4),
    (128, 4096, 64, 1),
    (1, 4096, 128, 1),
    (1, 32768, 128, 1),
    (8, 4096, 128, 1),
    (32, 4096, 128, 1),
    (128, 4096, 128, 1),
    (132, 4096, 128, 2),
)
PAGE, D, DV = 64, 576, 512


@dataclass
class Problem:
    """Operands of one row; several block tables and queries over one cache take turns."""

    q: list[torch.Tensor]
    cache: torch.Tensor
    tables: list[torch.Tensor]
    lengths: torch.Tensor
    out: list[torch.Tensor]
    lse: list[torch.Tensor]

    @property
    def turns(self) -> int:
        return len(self.q)


def make_problem(batch: int, keys: int, heads: int, q_len: int, flush: int) -> Problem:
    pages = batch * -(-keys // PAGE)
    turns = max(2, min(64, -(-flush // (pages * PAGE * D * 2))))
    cache = torch.randn(turns * pages, PAGE, 1, D, device="cuda", dtype=torch.bfloat16) / 10
    order = torch.randperm(turns * pages, device="cuda", dtype=torch.int32).view(turns, batch, -1)
    shape = (batch, q_len, heads, D)
    return Problem(
        [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(turns)],
        cache,
        [order[i].contiguous() for i in range(turns)],
        torch.full((batch,), keys, dtype=torch.int32, device="cuda"),
        [torch.empty(batch, q_len, heads, DV, device="cuda", dtype=torch.bfloat16) for _ in range(turns)],
        [torch.empty(batch, heads, q_len, device="cuda") for _ in range(turns)],
    )


def graph_time(call: Callable[[int], Any], turns: int, repeats: int = 7, calls: int = 20) -> float:
    """Microseconds of one call, by replaying a graph of many."""
    calls = max(calls, turns)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())  # for the operands, and the plan
    with torch.cuda.stream(stream):
        for i in range(min(3, turns)):
            call(i)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for i in range(calls):
            call(i % turns)
    times = []
    for repeat in range(repeats + 2):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        if repeat >= 2:
            times.append(begin.elapsed_time(end) * 1000 / calls)
    return statistics.median(times)


def worst_error(problem: Problem, turn: int, requests: Sequence[int], causal: bool) -> float:
    """The largest relative distance of a request's O from float64, over some requests."""
    worst = 0.0
    for i in requests:
        keys = problem.cache[problem.tables[turn][i].long()].view(-1, D)[: int(problem.lengths[i])].double()
        q = problem.q[turn][i].double()
        scores = torch.einsum("thd,kd->thk", q, keys) * D**-0.5
        if causal:
            q_len = q.shape[0]
            for t in range(q_len):
                scores[t, :, keys.shape[0] - (q_len - 1 - t) :] = -torch.inf
        want = torch.softmax(scores, -1) @ keys[:, :DV]
        error = (problem.out[turn][i].double() - want).norm() / want.norm()
        worst = max(worst, float(error.nan_to_num(torch.inf)))
    return worst


def bench_jitkern(problem: Problem, shape: tuple[int, int, int, int], tuning: Any, pdl: bool) -> dict[str, float]:
    from jitkern.ops.mla import MLADecode
    from jitkern.ops.mla_plan import Tuning

    batch, _, heads, q_len = shape
    decode = MLADecode(batch, heads, 1, q_len, torch.bfloat16, "cuda", D, DV, PAGE, tuning=tuning or Tuning, pdl=pdl)
    causal = q_len > 1

    def plan(_: int) -> None:
        decode.plan(problem.lengths)

    def run(i: int) -> None:
        decode.run(
            problem.q[i],
            problem.cache,
            problem.tables[i],
            problem.lengths,
            None,
            causal,
            problem.out[i],
            problem.lse[i],
        )

    def step(i: int) -> None:
        plan(i)
        run(i)

    for out in problem.out:
        out.fill_(torch.nan)
    step(0)
    error = worst_error(problem, 0, (0, batch - 1), causal)
    result = {"error": error, "decode": graph_time(run, problem.turns), "decode_plan": graph_time(step, problem.turns)}
    result["plan"] = graph_time(plan, 1)
    return result


def bench_flashmla(problem: Problem, shape: tuple[int, int, int, int]) -> dict[str, float]:
    op = torch.ops.sgl_kernel.dense_decode_fwd
    causal = shape[3] > 1

    def step(i: int, metadata: Any = None, splits: Any = None) -> Any:
        return op(
            problem.q[i], problem.cache, DV, problem.lengths, problem.tables[i], D**-0.5, causal, metadata, splits
        )

    out, _, metadata, splits = step(0)
    problem.out[0].copy_(out)
    error = worst_error(problem, 0, (0, shape[0] - 1), causal)
    run = graph_time(lambda i: step(i, metadata, splits), problem.turns)
    return {"error": error, "decode": run, "decode_plan": graph_time(step, problem.turns)}


def floor(shape: tuple[int, int, int, int]) -> float:
    """Microseconds that the larger of bytes and operations takes at 4.3 TB/s and 790 TFLOP/s."""
    batch, keys, heads, q_len = shape
    moved = batch * keys * D * 2 + batch * q_len * heads * (D + DV) * 2
    operations = 2 * batch * keys * heads * q_len * (D + DV)
    return max(moved / 4.3e6, operations / 790e6)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--flashmla", type=Path, help="FlashMLA's op library (sglang-kernel's flashmla_ops.abi3.so)")
    parser.add_argument("--csv", type=Path)
    parser.add_argument("--rows", help="numbers of rows, comma separated; default: all")
    parser.add_argument("--tuning", default="", help="for example min_blocks=2,slack=10")
    options = parser.parse_args(arguments)
    if options.flashmla:
        torch.ops.load_library(str(options.flashmla))
    chosen = ROWS if options.rows is None else [ROWS[int(i)] for i in options.rows.split(",")]
    tuning = None
    if options.tuning:
        from jitkern.ops.mla_plan import Tuning

        tuning = type(
            "Chosen", (Tuning,), {k: int(v) for k, v in (pair.split("=") for pair in options.tuning.split(","))}
        )
    torch.manual_seed(0)
    flush = 3 * torch.cuda.get_device_properties(0).L2_cache_size
    table = []
    for shape in chosen:
        problem = make_problem(*shape, flush)
        results = {
            "jitkern": bench_jitkern(problem, shape, tuning, False),
            "jitkern pdl": bench_jitkern(problem, shape, tuning, True),
        }
        if options.flashmla:
            results["flashmla"] = bench_flashmla(problem, shape)
        for name, figures in results.items():
            line = {"batch": shape[0], "keys": shape[1], "heads": shape[2], "q_len": shape[3], "library": name}
            line |= {k: f"{v:.3g}" if k == "error" else f"{v:.2f}" for k, v in figures.items()} | {
                "floor": f"{floor(shape):.1f}"
            }
            table.append(line)
            print(*(f"{key}={value}" for key, value in line.items()), flush=True)
        del problem
        torch.cuda.empty_cache()
    if options.csv:
        with options.csv.open("w", newline="") as file:
            writer = csv.DictWriter(file, list(table[0] | {"plan": ""}))
            writer.writeheader()
            writer.writerows(table)
    return 0


if __name__ == "__main__":
    sys.exit(main())
