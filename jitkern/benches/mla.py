"""``jitkern bench mla``: MLA decode and its plan beside the public kernels, on whatever GPU or CPU is there.

GPU time is that of a graph of many calls over rotating buffers, replayed, so that host time is out of it and the cache
is cold; on a CPU, time by the clock. ``decode`` reuses a ready plan; ``decode_plan`` makes the plan before each decode,
as a serving step does; ``plan`` is alone. O is compared with float64 first, and what is wrong is not timed.

Peers that are not there are left out: FlashMLA (FLASHMLA_OPS names sglang-kernel's flashmla_ops.abi3.so),
FlashAttention-3 (FA3_OPS names vLLM's _vllm_fa3_C.abi3.so; ``fa3`` with the bound of 32 pieces that vLLM has under
graphs, ``fa3-auto`` with its own), a split and a reduction in Triton, and the formula in torch. jitkern's own other
ways are measured as well: with early launches and without, and caches of 8-bit codes, whose keys have the same values.
"""

from __future__ import annotations

import argparse
import functools
import sys
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from jitkern import bench
from jitkern.benches import common, mla_peers, mla_problem
from jitkern.benches.mla_problem import Problem, Shape
from jitkern.errors import ArgumentError
from jitkern.ops.mla_plan import Tuning
from jitkern.progress import Progress

PEERS = tuple(mla_peers.MAKERS)
OURS = (*mla_peers.EARLY, *mla_peers.TOKEN_BYTES)
# Relative, of all of O. P and O are rounded to bfloat16: about 0.002.
ERROR_BOUND = 0.01
_CALLS = 30  # in a graph, at least
Row = dict[str, Any]


def _time(call: Callable[[int], Any], problem: Problem, repeats: int) -> float:
    if problem.cache.device.type == "cpu":
        return bench.cpu_microseconds(lambda: call(0), repeats)
    calls = [functools.partial(call, i) for i in range(problem.turns)]
    return bench.gpu_microseconds(calls, max(1, _CALLS // problem.turns), repeats)


def _plan_time(plan: Callable[[], Any], problem: Problem, repeats: int) -> float:
    if problem.cache.device.type == "cpu":
        return bench.cpu_microseconds(plan, repeats)
    return bench.gpu_microseconds([plan], _CALLS, repeats)


def measure(make: Callable[[Problem], mla_peers.Decode], problem: Problem, repeats: int) -> Row:
    """One peer on one problem: its error, and microseconds if that is small enough."""
    for out in problem.out:
        out.fill_(torch.nan)  # so that nobody's results pass for another's
    decode = make(problem)
    requests = sorted({0, problem.shape.batch - 1})
    ways = [decode.run] if decode.step is None else [decode.step, decode.run]
    error = max(mla_problem.worst_error(problem, 0, way(0), requests) for way in ways)
    row: Row = {"error": float(f"{error:.3g}"), "note": decode.note}
    if not error < ERROR_BOUND:
        return row | {"note": f"WRONG, not timed: off by {error:.3g}, allowed {ERROR_BOUND}"}
    row["decode"] = _time(decode.run, problem, repeats)
    # What has no plan has nothing to add to a step.
    row["decode_plan"] = row["decode"] if decode.step is None else _time(decode.step, problem, repeats)
    if decode.plan is not None:
        row["plan"] = _plan_time(decode.plan, problem, repeats)
    return row


def _attempt(name: str, make: Callable[[Problem], mla_peers.Decode], problem: Problem, repeats: int) -> Row:
    """The same; what a peer raises becomes a note, what jitkern raises is raised."""
    if name in OURS:
        return measure(make, problem, repeats)
    try:
        return measure(make, problem, repeats)
    except Exception as error:  # a library of somebody else's: whatever it throws, the others are still measured
        return {"note": f"left out ({type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''})"}


def _rows(shape: Shape, peers: dict[str, Any], device: str, repeats: int) -> list[Row]:
    problem = mla_problem.make(shape, device)
    rows = []
    for name, make in peers.items():
        result = _attempt(name, make, problem, repeats)
        moved = mla_problem.traffic(shape, mla_peers.TOKEN_BYTES.get(name, 2 * mla_problem.D)) / 1e6
        row: Row = shape._asdict() | {"library": name, "MB": round(moved, 3)} | result
        if "decode" in result:
            row["GB/s"] = round(moved * 1e3 / result["decode"])
        rows.append(row)
        if device == "cuda":
            torch.cuda.empty_cache()
    return rows


def _chosen(arguments: argparse.Namespace, device: str) -> tuple[list[Shape], dict[str, Any]]:
    everything = {"baseline": mla_problem.BASELINE, "grid": mla_problem.GRID}[arguments.shapes]
    shapes = everything if device == "cuda" else mla_problem.ON_CPU
    if getattr(arguments, "rows", None):
        shapes = [shapes[int(number)] for number in arguments.rows.split(",")]
    names = arguments.peers.split(",") if arguments.peers else list(PEERS)
    if unknown := set(names) - set(PEERS):
        raise ArgumentError(f"jitkern bench mla: no peer {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    return shapes, {name: _tuned(name, arguments) for name in names if device == "cuda" or name in mla_peers.ON_CPU}


def _tuned(name: str, arguments: argparse.Namespace) -> Callable[[Problem], mla_peers.Decode]:
    given = getattr(arguments, "tuning", None)
    if name not in mla_peers.EARLY or not given:
        return mla_peers.MAKERS[name]
    pairs = {key: int(value) for key, value in (pair.split("=") for pair in given.split(","))}
    tuning = type("Chosen", (Tuning,), pairs)
    return functools.partial(mla_peers.jitkern, tuning=tuning, pdl=mla_peers.EARLY[name])


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure everything; writes CSV and plots where ``--out`` says."""
    start = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes, peers = _chosen(arguments, device)
    torch.manual_seed(0)
    bandwidth, rate = common.bandwidth(device), common.matrix_rate(device)
    rows: list[Row] = []
    with Progress("jitkern bench mla", quiet=getattr(arguments, "json", False)) as say:
        for number, shape in enumerate(shapes, 1):
            rows += (new := _rows(shape, peers, device, common.repeats(arguments)))
            # The figures as well: a library that breaks the device takes the rest of the run with it, not these.
            say(f"{number}/{len(shapes)} {tuple(shape)}: {_told(new)}")
    for row in rows:
        shape = Shape(*(row[name] for name in Shape._fields))
        floor = max(row["MB"] * 1e3 / bandwidth, mla_problem.operations(shape) / rate / 1e6)
        row |= {name: round(row[name], 3) for name in ("decode", "decode_plan", "plan") if name in row}
        row["floor"] = round(floor, 2)
    facts = common.facts()
    ceilings = {"ceiling (torch.add), GB/s": round(bandwidth), "ceiling (matrix product), TFLOP/s": round(rate, 2)}
    result = {"rows": rows, "ceilings": ceilings, "facts": facts, **_summary(rows)}
    result |= {"ok": all("decode" in row for row in rows if row["library"] in OURS)}
    if arguments.out:
        more = [{"library": name, "GB/s": value} for name, value in ceilings.items()]
        common.write_csv(arguments.out, [row | facts for row in (*rows, *more)])
        from jitkern.benches import plot

        title = f"MLA decode on {facts['device']}, bfloat16, page {mla_problem.PAGE}"
        plot.roofline(plot.mla_panels(rows, bandwidth), title, arguments.out)
    return result | {"seconds": round(time.perf_counter() - start, 1)}


def _told(rows: Sequence[Row]) -> str:
    return ", ".join(
        f"{row['library']} {row['decode']:.1f} / {row['decode_plan']:.1f}" for row in rows if "decode" in row
    )


def _summary(rows: Sequence[Row]) -> dict[str, Any]:
    """Ratios to jitkern's time of both figures, and where a peer is ahead by more than 2 %."""
    summary: dict[str, Any] = {}
    libraries = dict.fromkeys(row["library"] for row in rows)
    for figure in ("decode", "decode_plan"):
        times = {name: _times(rows, name, figure) for name in libraries}
        summary[f"{figure} ratios"] = common.ratios(times)
        others = [name for name in libraries if name not in OURS]
        summary[f"{figure} behind"] = common.ahead(times, Shape._fields, others)
    return summary


def _times(rows: Sequence[Row], library: str, figure: str) -> dict[Shape, float]:
    found = [row for row in rows if row["library"] == library and figure in row]
    return {Shape(*(row[name] for name in Shape._fields)): row[figure] for row in found}


def _wide(rows: Sequence[Row]) -> list[Row]:
    """One line a shape: decode / with the plan, of each library."""
    lines: dict[tuple[int, ...], Row] = {}
    for row in rows:
        key = tuple(row[name] for name in Shape._fields)
        line = lines.setdefault(key, {name: row[name] for name in Shape._fields})
        shown = f"{row['decode']:.1f} / {row['decode_plan']:.1f}" if "decode" in row else "-"
        line[row["library"]] = shown
        if "plan" in row and row["library"] == "jitkern":
            line["plan"] = row["plan"]
        line["floor"] = row["floor"]
    return list(lines.values())


def text(result: dict[str, Any]) -> str:
    """The result for people."""
    lines = ["microseconds: decode / with its plan", bench.table(_wide(result["rows"]))]
    for figure, words in (("decode", "decode alone"), ("decode_plan", "decode with its plan")):
        lines += [f"{words}:", *result[f"{figure} ratios"]]
        if behind := result[f"{figure} behind"]:
            lines += ["peers ahead by more than 2 %:", bench.table(behind)]
    notes = {f"{row['library']}: {row['note']}" for row in result["rows"] if row.get("note") and "decode" not in row}
    lines += sorted(notes)
    lines += [f"{name}: {value}" for name, value in result["ceilings"].items()]
    return "\n".join([*lines, f"{result['seconds']} s in all"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run as a script, which can do a little more than the command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_options(parser)
    parser.add_argument("--rows", help="numbers of shapes, comma separated, from 0; default: all")
    parser.add_argument("--tuning", help="jitkern's, for example min_blocks=2,slack=10")
    result = run(parser.parse_args(argv))
    print(text(result))
    return 0 if result["ok"] else 1


if __name__ == "__main__":
    sys.exit(main())
