"""Seconds of the first call in a new process, torch imported and the CUDA context up: nothing cached, and disk warm.

python benchmarks/first_call.py [--device cuda] [--rounds 5] [--out FILE.csv]
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks import common
from jitkern import bench

PROGRAM = """
import time, sys, torch
device = {device!r}
a = torch.randn(16, 4, 128, device=device).to(torch.bfloat16)
lse = torch.randn(4, 16, device=device)
out, out_lse = torch.empty_like(a), torch.empty_like(lse)
if device == "cuda":
    torch.cuda.synchronize()
start = time.perf_counter()
import jitkern
imported = time.perf_counter()
jitkern.merge_attn_states(out, a, lse, a, lse, out_lse)
if device == "cuda":
    torch.cuda.synchronize()
print(time.perf_counter() - start, imported - start, "cupy" in sys.modules)
"""


def one(device: str, cache: str) -> float:
    """Seconds of the import and the first call together."""
    environment = os.environ | {"JITKERN_CACHE_DIR": cache, "PYTHONPATH": str(Path(__file__).parents[1])}
    environment["PYTHONPATH"] += os.pathsep + os.environ.get("PYTHONPATH", "")
    run = subprocess.run(
        [sys.executable, "-c", PROGRAM.format(device=device)],
        capture_output=True,
        text=True,
        check=True,
        env=environment,
    )
    return float(run.stdout.split()[0])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    cold, warm = [], []
    for _ in range(arguments.rounds):
        with tempfile.TemporaryDirectory() as folder:
            cold.append(one(arguments.device, folder))
            warm.append(one(arguments.device, folder))
    rows = [
        {
            "path": name,
            "median s": round(statistics.median(times), 4),
            "least s": round(min(times), 4),
            "most s": round(max(times), 4),
        }
        for name, times in (("nothing cached", cold), ("disk cache warm", warm))
    ]
    print(bench.table(rows))
    if arguments.out:
        common.write_csv(arguments.out, [row | {"target": arguments.device} | common.facts() for row in rows])
    return 0


if __name__ == "__main__":
    sys.exit(main())
