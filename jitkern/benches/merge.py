"""``jitkern bench merge``: the pairwise merge beside the public kernels, on whatever GPU or CPU is there.

GPU time by graph replay over rotating buffers, host time by asynchronous calls; on a CPU, time by the clock. Peers that
are not there are left out: sglang's merge_state_v2 (the kernel that vLLM ships too; SGLANG_OPS names
common_ops.abi3.so), FlashInfer (in a process of its own, since its failed launches stick), Triton with one program per
(token, head), the eager formula and torch.compile of it.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import torch

from jitkern import bench
from jitkern.benches import common
from jitkern.benches.peers import MAKERS, Operands, Shape, traffic
from jitkern.prepare import prepare
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
PEERS = "jitkern,sglang,triton,eager,flashinfer"
_MISSING = (ImportError, KeyError, OSError, AttributeError)


def _applies(peer: str, shape: Shape) -> bool:
    _, h, d, name = shape
    if peer == "flashinfer":
        return name != F32 and d in (64, 128, 256, 512) and h * (d // max(8, d // 32)) <= 1024
    return not (peer in ("eager", "compile") and traffic(shape) > 500_000_000)


def _measure(call: Callable[[Operands], Any], shape: Shape, repeats: int, device: str) -> float:
    if device == "cpu":
        operands = Operands(shape, device)
        return bench.cpu_microseconds(lambda: call(operands), repeats)
    sets = [Operands(shape) for _ in range(common.sets_for(traffic(shape)))]
    rounds = max(1, 30 // len(sets))
    return bench.gpu_microseconds([lambda o=o: call(o) for o in sets], rounds, repeats)  # type: ignore[misc]


def _run_peer(peer: str, shapes: list[Shape], repeats: int, device: str) -> dict[Shape, float]:
    if device == "cpu" and peer not in ("jitkern", "eager", "compile"):
        return {}
    try:
        call = MAKERS[peer]()
    except _MISSING as error:
        print(f"{peer}: left out ({type(error).__name__}: {error})", file=sys.stderr)
        return {}
    times = {}
    for shape in shapes:
        if _applies(peer, shape):
            times[shape] = _measure(call, shape, repeats, device)
            if device == "cuda":
                torch.cuda.empty_cache()
    return times


def _in_a_process(peer: str, arguments: argparse.Namespace) -> dict[Shape, float]:
    command = [sys.executable, "-m", "jitkern.benches.merge", "--only", peer]
    command += ["--repeats", str(arguments.repeats), "--shapes", arguments.shapes]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = run.stdout.strip().splitlines()
    if run.returncode or not lines:
        print(f"{peer}: left out ({run.stderr.strip().splitlines()[-1:]})", file=sys.stderr)
        return {}
    return {(n, h, d, t): us for n, h, d, t, us in json.loads(lines[-1])}


def host_times(peers: Sequence[str], device: str) -> dict[str, float]:
    """Host microseconds a call: n=16, h=4, d=64, bf16, asynchronous on a GPU."""
    o = Operands((16, 4, 64, BF16), device)
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


def _ceiling(device: str) -> float:
    """GB/s of torch.add: two reads and one write, the traffic of a merge."""
    n = 1 << (28 if device == "cuda" else 24)
    a, b, c = (torch.ones(n, device=device) for _ in range(3))
    if device == "cuda":
        us = bench.gpu_microseconds([lambda: torch.add(a, b, out=c)], 5)
    else:
        us = bench.cpu_microseconds(lambda: torch.add(a, b, out=c))
    return 12 * n / us / 1000


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


def _ratios(results: dict[str, dict[Shape, float]]) -> list[str]:
    lines = []
    for peer, result in results.items():
        ratios = [us / results["jitkern"][shape] for shape, us in result.items() if shape in results["jitkern"]]
        if peer != "jitkern" and ratios:
            mean = math.exp(sum(map(math.log, ratios)) / len(ratios))
            lines.append(
                f"{peer}: {mean:.3f} x jitkern's time (geometric mean of {len(ratios)}), least {min(ratios):.3f}"
            )
    return lines


def run(arguments: argparse.Namespace) -> dict[str, Any]:
    """Measure everything; writes CSV and plots where ``--out`` says."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    shapes = {"baseline": BASELINE, "grid": GRID}[arguments.shapes] if device == "cuda" else ON_CPU
    results: dict[str, dict[Shape, float]] = {}
    for peer in arguments.peers.split(","):
        alone = peer == "flashinfer" and device == "cuda"
        results[peer] = _in_a_process(peer, arguments) if alone else _run_peer(peer, shapes, arguments.repeats, device)
    results = {peer: result for peer, result in results.items() if result}
    rows, ceiling, facts = _rows(shapes, results), _ceiling(device), common.facts()
    host = host_times([peer for peer in results if peer != "flashinfer"], device)
    if arguments.out:
        more = [{"host us/call": name, "us": round(us, 2)} for name, us in host.items()]
        more.append({"host us/call": "ceiling (torch.add), GB/s", "us": round(ceiling)})
        common.write_csv(arguments.out, [row | facts for row in (*rows, *more)])
        from jitkern.benches import plot

        plot.merge_roofline(rows, ceiling, facts["device"], arguments.out)
    return {"rows": rows, "ratios": _ratios(results), "host": host, "ceiling GB/s": round(ceiling), "facts": facts}


def text(result: dict[str, Any]) -> str:
    """The result for people."""
    host = [{"host us/call": name, "us": us} for name, us in result["host"].items()]
    ceiling = f"ceiling, torch.add: {result['ceiling GB/s']} GB/s"
    return "\n".join([bench.table(result["rows"]), *result["ratios"], ceiling, bench.table(host)])


def main(argv: Sequence[str] | None = None) -> int:
    """Run as a script, or for one peer in a process of its own (``--only``)."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--peers", default=PEERS)
    parser.add_argument("--shapes", choices=("baseline", "grid"), default="baseline")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--only", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    if arguments.only:
        shapes = BASELINE if arguments.shapes == "baseline" else GRID
        times = _run_peer(arguments.only, shapes, arguments.repeats, "cuda")
        print(json.dumps([[*shape, us] for shape, us in times.items()]))
        return 0
    print(text(run(arguments)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
