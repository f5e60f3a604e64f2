"""``jitkern bench merge``: the pairwise merge beside the public kernels, on whatever GPU or CPU is there.

GPU time by graph replay over rotating buffers, host time by asynchronous calls; on a CPU, time by the clock. Peers that
are not there are left out: sglang's merge_state_v2 (the kernel that vLLM ships too; SGLANG_OPS names
common_ops.abi3.so), FlashInfer (in a process of its own, since its failed launches stick), Triton with one program per
(token, head), the eager formula and torch.compile of it.
"""

from __future__ import annotations

import argparse
import functools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from jitkern import bench
from jitkern.benches import common
from jitkern.benches.peers import MAKERS, Operands, Shape, rotating, traffic
from jitkern.errors import ArgumentError
from jitkern.prepared import prepare
from jitkern.progress import Progress
from jitkern.torch_ops import merge_attn_states

F32, F16, BF16 = "float32", "float16", "bfloat16"
_SIZES = (
    (256, 4, 32),
    (1024, 8, 64),
    (4096, 8, 128),
    (256, 32, 256),
    (1024, 32, 256),
    (4096, 32, 256),
    (4096, 64, 256),
)
BASELINE: list[Shape] = [
    *((n, h, d, F32) for n, h, d in (*_SIZES, (613, 16, 128), (1, 16, 512), (16384, 128, 512), (131072, 16, 128))),
    *((n, h, d, BF16) for n, h, d in (*_SIZES, (613, 16, 128), (1, 16, 512), (128, 128, 512))),
]
ON_CPU: list[Shape] = [(n, h, d, t) for n, h, d in ((256, 4, 32), (1024, 8, 64), (4096, 32, 128)) for t in (F32, BF16)]
GRID: list[Shape] = [
    (n, h, d, t)
    for n in (256, 512, 613, 1024, 1536, 4096)
    for h in (4, 8, 16, 32, 48, 64)
    for d in (32, 48, 64, 96, 128, 256)
    for t in (F32, F16, BF16)
]
PEERS = ("jitkern", "sglang", "triton", "compile", "eager", "flashinfer")
_PEERS_ON_CPU = ("jitkern", "eager", "compile")
_ALONE = "flashinfer"  # its failed launches stick, and everything after them in the process fails, too
_ALONE_SECONDS = 300
_MISSING = (ImportError, KeyError, OSError, AttributeError)
_CALLS = 30  # in a graph, at least
_TELL_EVERY = 50  # shapes
Call = Callable[[Operands], Any]


def _applies(peer: str, shape: Shape) -> bool:
    _, h, d, name = shape
    if peer == "flashinfer":
        return name != F32 and d in (64, 128, 256, 512) and h * (d // max(8, d // 32)) <= 1024
    return not (peer in ("eager", "compile") and traffic(shape) > 500_000_000)


def _sets(shape: Shape, device: str) -> list[Operands]:
    return rotating(shape, common.sets_for(traffic(shape)) if device == "cuda" else 1, device)


def _measure(peer: str, call: Call, sets: list[Operands], repeats: int, device: str) -> float:
    if device == "cpu":
        return bench.cpu_microseconds(lambda: call(sets[0]), repeats)
    if peer == "eager":  # a dozen kernels a call, slow to record; a quarter is three times the L2 still
        sets = sets[: max(3, -(-len(sets) // 4))]
    calls = [functools.partial(call, o) for o in sets]
    return bench.gpu_microseconds(calls, max(1, _CALLS // len(sets)), repeats)


def _available(peers: Sequence[str]) -> dict[str, Call]:
    calls = {}
    for peer in peers:
        try:
            calls[peer] = MAKERS[peer]()
        except _MISSING as error:
            print(f"{peer}: left out ({type(error).__name__}: {error})", file=sys.stderr)
    return calls


def _measure_all(
    calls: dict[str, Call], shapes: list[Shape], repeats: int, device: str
) -> Iterator[tuple[str, Shape, float]]:
    """Shape by shape all peers one after the other on the same buffers, so that what drifts, drifts for all."""
    for shape in shapes:
        sets = _sets(shape, device)
        for peer, call in calls.items():
            if _applies(peer, shape):
                yield peer, shape, _measure(peer, call, sets, repeats, device)
        del sets
        if device == "cuda":
            torch.cuda.empty_cache()


def _in_a_process(peer: str, arguments: argparse.Namespace) -> dict[Shape, float]:
    """What a peer measured by itself, up to where it failed or was stopped."""
    command = [sys.executable, "-m", "jitkern.benches.merge", "--only", peer]
    command += ["--repeats", str(common.repeats(arguments)), "--shapes", arguments.shapes]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as child:
        try:
            said, errors = child.communicate(timeout=_ALONE_SECONDS)
        except subprocess.TimeoutExpired:
            child.kill()
            said, errors = child.communicate()
            errors = f"{errors}\nstopped after {_ALONE_SECONDS} s"
    if child.returncode:
        print(f"{peer}: left out, or a part of it ({errors.strip().splitlines()[-1:]})", file=sys.stderr)
    found = [json.loads(line) for line in said.splitlines() if line.startswith("[") and line.endswith("]")]
    return {(n, h, d, t): us for n, h, d, t, us in found}


def host_times(peers: Sequence[str], device: str) -> dict[str, float]:
    """Host microseconds a call: n=16, h=4, d=64, bf16, asynchronous on a GPU."""
    o = rotating((16, 4, 64, BF16), 1, device)[0]
    views = (o.out, o.a, o.a_lse.T, o.b, o.b_lse.T, o.out_lse.T)
    calls: dict[str, Callable[[], Any]] = {}
    for peer in peers:
        try:
            call = MAKERS[peer]()
        except _MISSING:
            continue
        calls[peer] = lambda call=call: call(o)  # type: ignore[misc]
    calls["jitkern, L as [h, n] already"] = lambda: merge_attn_states(*views)
    calls["jitkern, prepared"] = prepare(merge_attn_states, *views)
    op = torch.ops.jitkern.merge_attn_states.default
    calls["torch.ops.jitkern"] = lambda: op(*views)
    for run_once in calls.values():
        run_once()
    return {name: bench.host_microseconds(bound, cuda=device == "cuda") for name, bound in calls.items()}


def _rows(shapes: list[Shape], results: dict[str, dict[Shape, float]]) -> list[dict[str, Any]]:
    rows = []
    for shape in shapes:
        times = {peer: result.get(shape) for peer, result in results.items()}
        mine = times.get("jitkern")
        row: dict[str, Any] = dict(zip(("n", "h", "d", "dtype"), shape, strict=True))
        row |= {f"{peer} us": None if us is None else round(us, 3) for peer, us in times.items()}
        row["jitkern GB/s"] = None if mine is None else round(traffic(shape) / mine / 1000)
        rows.append(row)
    return rows


def _results(arguments: argparse.Namespace, shapes: list[Shape], device: str) -> dict[str, dict[Shape, float]]:
    names = arguments.peers.split(",") if arguments.peers else list(PEERS)
    if unknown := set(names) - set(PEERS):
        raise ArgumentError(f"jitkern bench merge: no peer {', '.join(sorted(unknown))}; there are {', '.join(PEERS)}")
    if device == "cpu":  # Inductor's C++ takes long to compile: only when it is asked for
        names = [name for name in names if name in _PEERS_ON_CPU and (arguments.peers or name != "compile")]
    results: dict[str, dict[Shape, float]] = {name: {} for name in names}
    calls = _available([name for name in names if name != _ALONE])
    with Progress("jitkern bench merge", quiet=getattr(arguments, "json", False)) as say:
        for peer, shape, us in _measure_all(calls, shapes, common.repeats(arguments), device):
            results[peer][shape] = us
            done = shapes.index(shape) + 1
            if peer == "jitkern" and done % _TELL_EVERY == 0:
                say(f"{done}/{len(shapes)} shapes")
        if _ALONE in names:
            say(f"{_ALONE}, in a process of its own")
            results[_ALONE] = _in_a_process(_ALONE, arguments)
    return {peer: result for peer, result in results.items() if result}


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure everything; writes CSV and plots where ``--out`` says."""
    start = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = {"baseline": BASELINE, "grid": GRID}[arguments.shapes] if device == "cuda" else ON_CPU
    results = _results(arguments, shapes, device)
    rows, ceiling, facts = _rows(shapes, results), common.bandwidth(device), common.facts()
    host = host_times([peer for peer in results if peer != _ALONE], device)
    if arguments.out:
        more = [{"host us/call": name, "us": round(us, 2)} for name, us in host.items()]
        more.append({"host us/call": "ceiling (torch.add), GB/s", "us": round(ceiling)})
        common.write_csv(arguments.out, [row | facts for row in (*rows, *more)])
        from jitkern.benches import plot

        title = f"merge_attn_states on {facts['device']}"
        plot.roofline(plot.merge_panels(rows, ceiling), title, arguments.out)
    return {
        "rows": rows,
        "ratios": common.ratios(results),
        "behind": common.ahead(results, ("n", "h", "d", "dtype"), results),
        "host": host,
        "ceiling GB/s": round(ceiling),
        "facts": facts,
        "seconds": round(time.perf_counter() - start, 1),
    }


def text(result: dict[str, Any]) -> str:
    """The result for people. A grid has too many rows to read: of it, what matters."""
    rows, behind = result["rows"], result["behind"]
    lines = [bench.table(rows) if len(rows) <= len(BASELINE) else f"{len(rows)} shapes", *result["ratios"]]
    if behind:
        lines += [f"peers ahead by more than 2 %, {len(behind)} times:", bench.table(behind)]
    lines.append(f"ceiling, torch.add: {result['ceiling GB/s']} GB/s")
    host = [{"host us/call": name, "us": us} for name, us in result["host"].items()]
    return "\n".join([*lines, bench.table(host), f"{result['seconds']} s in all"])


def main(argv: Sequence[str] | None = None) -> int:
    """Run as a script, or for one peer in a process of its own (``--only``)."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    common.add_options(parser)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.only:
        calls = {arguments.only: MAKERS[arguments.only]()}
        shapes = BASELINE if arguments.shapes == "baseline" else GRID
        for _, shape, us in _measure_all(calls, shapes, common.repeats(arguments), "cuda"):
            print(json.dumps([*shape, us]), flush=True)
        return 0
    print(text(run(arguments)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
