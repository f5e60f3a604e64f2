"""What the benchmarks share: who ran, where, with which versions; rotating buffers; CSV files."""

from __future__ import annotations

import csv
import datetime
import importlib.metadata
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Many times the largest L2 cache that was met (60 MB): a cache that keeps some old lines must not serve them again.
COLD_BYTES = 800_000_000
MAX_SETS = 1500


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


def sets_for(bytes_per_set: int) -> int:
    """How many sets of buffers keep the L2 cache cold."""
    return max(3, min(-(-COLD_BYTES // bytes_per_set), MAX_SETS))


def write_csv(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Write rows with their facts."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = list(dict.fromkeys(name for row in rows for name in row))
    with open(path, "w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, names)
        writer.writeheader()
        writer.writerows(rows)
