"""What the benchmarks share: options, who ran where with which versions, ceilings, ratios, CSV files."""

from __future__ import annotations

import argparse
import csv
import datetime
import importlib.metadata
import math
import os
import subprocess
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from jitkern import bench

# Many times the largest L2 cache that was met (60 MB): a cache that keeps some old lines must not serve them again.
COLD_BYTES = 800_000_000
MAX_SETS = 1500
AHEAD = 1.02  # what is nearer than this is the same


def add_options(parser: argparse.ArgumentParser) -> None:
    """The options of every comparison."""
    parser.add_argument("--out", type=Path, help="a CSV file; plots go beside it, where matplotlib is installed")
    parser.add_argument("--peers", help="comma separated; default: all that the device has")
    parser.add_argument("--shapes", choices=("baseline", "grid"), default="baseline")
    parser.add_argument("--repeats", type=int, help="replays of each graph; default: 7, with a grid 5")


def repeats(arguments: argparse.Namespace) -> int:
    """How often each measurement is made; the median counts."""
    return int(arguments.repeats or {"grid": 5}.get(arguments.shapes, 7))


def facts() -> dict[str, str]:
    """GPU or CPU, versions, date, command and commit, as columns of every row."""
    import torch

    from jitkern.version import __version__

    def version(*names: str) -> str:
        for name in names:
            try:
                return importlib.metadata.version(name)
            except importlib.metadata.PackageNotFoundError:
                continue
        return "-"

    commit = os.environ.get("BENCH_COMMIT") or _git("rev-parse", "--short", "HEAD") or "unknown"
    return {
        "date": datetime.date.today().isoformat(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "jitkern": __version__,
        "torch": torch.__version__,
        "triton": version("triton"),
        "cupy": version("cupy-cuda13x", "cupy-cuda12x"),
        "commit": commit,
        "command": " ".join(Path(word).name if "/" in word else word for word in sys.argv),
    }


def _git(*arguments: str) -> str:
    """What git says of the checkout that this file is in; nothing where it is installed from a wheel."""
    run = subprocess.run(["git", *arguments], capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return run.stdout.strip()


def sets_for(bytes_per_set: int, cold_bytes: int = COLD_BYTES) -> int:
    """How many sets of buffers keep the L2 cache cold."""
    return max(3, min(-(-cold_bytes // bytes_per_set), MAX_SETS))


def bandwidth(device: str) -> float:
    """GB/s of torch.add, two reads and one write: the ceiling that bandwidths are held against."""
    import torch

    n = 1 << (28 if device == "cuda" else 24)
    a, b, c = (torch.ones(n, device=device) for _ in range(3))
    if device == "cuda":
        us = bench.gpu_microseconds([lambda: torch.add(a, b, out=c)], 5)
    else:
        us = bench.cpu_microseconds(lambda: torch.add(a, b, out=c))
    return 12 * n / us / 1000


def matrix_rate(device: str) -> float:
    """TFLOP/s of a square matrix product, bfloat16 on a GPU: the ceiling of operations."""
    import torch

    n, dtype = (8192, torch.bfloat16) if device == "cuda" else (512, torch.float32)
    # Zeros would need less power, and run at a higher clock than any real product.
    a, b, c = (torch.randn(n, n, device=device, dtype=dtype) for _ in range(3))
    if device == "cuda":
        us = bench.gpu_microseconds([lambda: torch.mm(a, b, out=c)], 10)
    else:
        us = bench.cpu_microseconds(lambda: torch.mm(a, b, out=c))
    return 2 * n**3 / us / 1e6


def ratios(results: Mapping[str, Mapping[Any, float]], mine: str = "jitkern") -> list[str]:
    """A line for each peer: how its times compare with ``mine`` where both were measured."""
    lines = []
    for peer, times in results.items():
        found = [us / results[mine][shape] for shape, us in times.items() if shape in results.get(mine, {})]
        if peer != mine and found:
            mean = math.exp(sum(map(math.log, found)) / len(found))
            words = f"{mean:.3f} x {mine}'s time (geometric mean of {len(found)})"
            lines.append(f"{peer}: {words}, least {min(found):.3f}, ahead in {sum(r < 1 / AHEAD for r in found)}")
    return lines


def ahead(
    results: Mapping[str, Mapping[Any, float]], names: Sequence[str], among: Iterable[str], mine: str = "jitkern"
) -> list[dict[str, Any]]:
    """The shapes where one of ``among`` is quicker than ``mine`` by more than 2 %, the worst first."""
    rows = []
    for peer in among:
        for shape, us in results.get(peer, {}).items():
            own = results.get(mine, {}).get(shape)
            if peer != mine and own and own > AHEAD * us:
                row = dict(zip(names, shape, strict=True)) | {"peer": peer, "peer us": round(us, 3)}
                rows.append(row | {f"{mine} us": round(own, 3), "ratio": round(us / own, 3)})
    return sorted(rows, key=lambda row: float(row["ratio"]))


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows with their facts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(name for row in rows for name in row))
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
