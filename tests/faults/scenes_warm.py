"""The warm path, for strace and the clock."""

from __future__ import annotations

import os
import statistics
import time
from pathlib import Path
from typing import Any

from jitkern import binaries, cache, compilers, loader
from tests.faults import injected
from tests.faults.scenes_kill import real


def fill(root: str) -> None:
    """Make two entries, for another process to find."""
    for number in (1, 2):
        loader.obtain(real(number, "nvrtc"))
    for path, _, _ in cache.Store(Path(root)).entries():
        os.utime(path, (1e9, 1e9))  # not used for long: the time of use has to be noted too


def trace(root: str) -> None:
    """Read one entry to have everything open, then a second one between two marks."""
    loader.obtain(real(1, "nvrtc"))
    os.write(2, b"@@begin\n")
    _, how = loader.obtain(real(2, "nvrtc"))
    os.write(2, b"@@end\n")
    assert how == "cached"


def load_times(root: str, size: int, entries: int, publishes: int) -> dict[str, Any]:
    """Milliseconds of warm loads of an entry of ``size`` bytes in a cache of ``entries``, and of publishes into it."""
    injected.install(size=size)
    store = cache.Store(Path(root))
    fsync, os.fsync = os.fsync, lambda fd: None  # many at once; what is timed below is flushed
    for number in range(entries):
        variant = injected.variant(number)
        key = compilers.key_of(variant, injected.TEXT)
        content = b"\x7fELF" + bytes(size if number == 0 else 100)
        store.publish(key, content, "kernel.cubin", injected.TEXT.flat, {})
    os.fsync = fsync
    loader.obtain(injected.variant(0), injected.TEXT)
    times = []
    for _ in range(200):
        start = time.perf_counter()
        loader.obtain(injected.variant(0), injected.TEXT)
        times.append(time.perf_counter() - start)
    misses = []
    for number in range(publishes):
        start = time.perf_counter()
        loader.obtain(injected.variant(1_000_000 + number), injected.TEXT)
        misses.append(time.perf_counter() - start)
    count = sum(1 for _ in store.entries())
    return {
        "load": statistics.median(times) * 1000,
        "publish": statistics.median(misses) * 1000 if misses else 0.0,
        "entries": count,
    }


def first_call(root: str) -> dict[str, Any]:
    """Milliseconds of the first two warm calls of a process for real entries: key, check, read."""
    start = time.perf_counter()
    loader.obtain(real(1, "nvrtc"))
    first = time.perf_counter() - start
    start = time.perf_counter()
    loader.obtain(real(2, "nvrtc"))
    second = time.perf_counter() - start
    return {
        "first": first * 1000,
        "second": second * 1000,
        "modules": sorted({"filelock", "torch", "cupy"} & set(__import__("sys").modules)),
    }


def cpu_load(root: str) -> dict[str, Any]:
    """Milliseconds of whole warm loads of CPU variants, mapping included, and the descriptors that they keep."""
    numbers = range(1, 5)
    for number in numbers:
        loader.get(real(number, "cpu"), loader.CPU)
    before, times, handles = len(os.listdir("/proc/self/fd")), [], set()
    for _ in range(50):
        binaries.forget()
        loader._ready.clear()
        for number in numbers:
            start = time.perf_counter()
            function = loader.get(real(number, "cpu"), loader.CPU)
            times.append(time.perf_counter() - start)
            assert function.how == "cached"
            handles.add(function.handle)
    return {
        "load": statistics.median(times) * 1000,
        "more": len(os.listdir("/proc/self/fd")) - before,
        "handles": len(handles),
    }
