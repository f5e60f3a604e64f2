"""Timing: GPU time by graph replay over rotating buffers, CPU time by the clock; tables of the results."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

_REPEATS = 7


def gpu_microseconds(calls: Sequence[Callable[[], Any]], rounds: int = 1, repeats: int = _REPEATS) -> float:
    """GPU time of one call in microseconds: a CUDA graph of all ``calls`` ``rounds`` times over, replayed; the median.

    Host time is not in it. Give several calls over different buffers, together larger than the L2 cache, and the cache
    is cold for each; a single call over one buffer measures a warm cache.
    """
    import torch

    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        # What calls return is kept: memory that one of them freed would be the next one's output, still in the cache.
        kept = [call() for _ in range(rounds) for call in calls]
    graph.replay()
    torch.cuda.synchronize()
    times = []
    for _ in range(repeats):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1000 / (rounds * len(calls)))
    del kept
    return float(statistics.median(times))


def host_microseconds(call: Callable[[], Any], count: int = 1000, repeats: int = 5, cuda: bool = True) -> float:
    """Host time of one asynchronous call in microseconds: the median over ``repeats`` of ``count`` calls in a row."""
    times = []
    for _ in range(repeats):
        if cuda:
            import torch

            torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(count):
            call()
        times.append((time.perf_counter() - start) / count * 1e6)
    return statistics.median(times)


def cpu_microseconds(call: Callable[[], Any], repeats: int = _REPEATS, at_least: float = 0.05) -> float:
    """Time of one synchronous call in microseconds: the median of ``repeats`` runs of at least ``at_least`` seconds."""
    call()
    start = time.perf_counter()
    call()
    once = max(time.perf_counter() - start, 1e-7)
    count = max(int(at_least / once), 1)
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        for _ in range(count):
            call()
        times.append((time.perf_counter() - start) / count * 1e6)
    return statistics.median(times)


def table(rows: Sequence[dict[str, Any]], numbers: str = "{:.4g}") -> str:
    """Rows as an aligned text table; columns in the order of the first row."""
    if not rows:
        return "(nothing)"
    names = list(rows[0])
    cells = [[_cell(row.get(name), numbers) for name in names] for row in rows]
    widths = [max(len(name), *(len(line[i]) for line in cells)) for i, name in enumerate(names)]
    numeric = [all(isinstance(row.get(name), int | float) for row in rows) for name in names]

    def line(values: Sequence[str]) -> str:
        return "  ".join(
            v.rjust(w) if n else v.ljust(w) for v, w, n in zip(values, widths, numeric, strict=True)
        ).rstrip()

    return "\n".join([line(names), line(["-" * width for width in widths]), *map(line, cells)])


def _cell(value: Any, numbers: str) -> str:
    if value is None:
        return "-"
    return numbers.format(value) if isinstance(value, float) else str(value)
