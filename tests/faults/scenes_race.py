"""Many processes and threads at once: cold, with locks of every kind, readers against writers, removal under way."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import hashlib
import itertools
import os
import random
import shutil
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from jitkern import binaries, cache, events, loader, settings
from tests.faults import harness, injected
from tests.faults.scenes_kill import real


def _break_locks(kind: str, node: int) -> None:
    """Make ``flock`` what it is on other people's machines."""
    if kind == "works":
        return
    if kind == "node-local":
        _other_domain(node)
        return
    number = {"ENOLCK": errno.ENOLCK, "ENOSYS": errno.ENOSYS, "EIO": errno.EIO, "busy": errno.EAGAIN}[kind]

    def refuse(descriptor: int, operation: int) -> None:
        raise OSError(number, os.strerror(number))

    fcntl.flock = refuse  # type: ignore[assignment]


def _other_domain(node: int) -> None:
    """Processes of different nodes lock different files, as under ``nolock``."""
    native, held = fcntl.flock, dict[int, int]()

    def flock(descriptor: int, operation: int) -> None:
        if operation & fcntl.LOCK_UN:
            with contextlib.suppress(KeyError):
                os.close(held.pop(descriptor))
            return
        other = os.open(f"{os.readlink(f'/proc/self/fd/{descriptor}')}.node{node}", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            native(other, operation)
        except BaseException:
            os.close(other)
            raise
        held[descriptor] = other

    fcntl.flock = flock  # type: ignore[assignment]


def cold_processes(root: str, count: int, different: int, kind: str, use_real: bool) -> dict[str, Any]:
    """``count`` processes want ``different`` variants of an empty cache at the same moment."""
    if use_real:
        with settings.override(cache_dir=Path(root) / "other"):
            loader.obtain(real(0, "nvrtc"))
    else:
        injected.install(seconds=0.05, log=f"{root}/log")

    def work(number: int) -> Any:
        _break_locks(kind, number % 2)
        text = None if use_real else injected.TEXT
        variant = real(1 + number % different, "nvrtc") if use_real else injected.variant(number % different)
        binary, how = loader.obtain(variant, text)
        found = events.stats()
        return number % different, how, hashlib.sha256(binary).hexdigest(), found["bad_entry"], found["memory_only"]

    results = harness.together(count, work)
    failed = [result for result in results if result[0] != "ok"]
    compiled = Counter(value[0] for state, value in results if state == "ok" and value[1] == "compiled")
    hashes = {
        number: {value[2] for state, value in results if state == "ok" and value[0] == number}
        for number in range(different)
    }
    binaries.forget()
    store = binaries.store()
    assert store is not None
    return {
        "failed": failed,
        "compiles": [compiled[number] for number in range(different)],
        "versions": [len(found) for found in hashes.values()],
        "trouble": sum(value[3] + value[4] for state, value in results if state == "ok"),
        "entries": sum(1 for _ in store.entries()),
        "left": len(list(store.base.glob("tmp/*"))),
    }


def cold_threads(root: str, count: int, different: int, in_memory: bool) -> dict[str, Any]:
    """``count`` threads want ``different`` CPU functions at the same moment, with real compiles."""
    if in_memory:
        settings.override(cache_dir=Path("/proc/no/such/root"))
        binaries._roots = ((settings.get().cache_dir, settings.get().cache_roots), None, [])
    gate, results, lock = threading.Barrier(count), list[Any](), threading.Lock()
    beats, stop = list[float](), threading.Event()

    def heart() -> None:  # another thread of the program: does it get to run while these wait?
        while not stop.is_set():
            beats.append(time.perf_counter())
            time.sleep(0.002)

    def work(number: int) -> None:
        gate.wait()
        try:
            value: Any = loader.get(real(number % different, "cpu"), loader.CPU).handle
        except BaseException as error:
            value = repr(error)
        with lock:
            results.append((number % different, value))

    import torch.utils.cpp_extension  # noqa: F401  # its import is no part of what is looked at

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    watcher = threading.Thread(target=heart)
    watcher.start()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    stop.set()
    watcher.join()
    found = events.stats()
    return {
        "handles": len(set(results)),
        "wrong": [value for _, value in results if not isinstance(value, int)],
        "compiled": found["compiled"],
        "loaded": found["loaded"],
        "flights": len(loader._flights) + len(binaries._flights),
        "longest pause": max((b - a for a, b in itertools.pairwise(beats)), default=0.0),
    }


def failing_threads(root: str, count: int) -> dict[str, Any]:
    """Many threads want a text that does not compile: one compile, and an error for each."""
    from jitkern.errors import CompileError
    from jitkern.sources import Text

    text = Text("broken", '#line 1 "broken.cu"\nint x = ;\n', ())
    gate, seen = threading.Barrier(count), list[str]()

    def work() -> None:
        gate.wait()
        try:
            loader.obtain(real(0, "nvrtc"), text)
        except CompileError as error:
            depth, trace = 0, error.__traceback__
            while trace:
                depth, trace = depth + 1, trace.tb_next
            seen.append(f"{'broken.cu:1' in str(error)} {depth < 20}")

    threads = [threading.Thread(target=work) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {"errors": Counter(seen), "tries": len(list(Path(os.environ["TMPDIR"]).glob("jitkern-log-*")))}


def readers_and_writers(root: str, readers: int, writers: int, seconds: float) -> dict[str, Any]:
    """Writers remove and publish one entry without end; each read sees nothing, or all of one version."""
    key = cache.Key({"schema": 1, "target": "sm_90"}, "sm_90", "contended")
    end = time.monotonic() + seconds

    def write(number: int) -> Any:
        store, draw, done = cache.Store(Path(root)), random.Random(number), 0
        while time.monotonic() < end:
            fill = bytes([draw.randrange(256)])
            if store.publish(key, fill * draw.randrange(1, 200_000), "kernel.cubin", "text", {"fill": fill[0]}):
                done += 1
            store.discard(store.base / key.folder)
        return "writes", done, _trouble()

    def read(number: int) -> Any:
        store, done, torn = cache.Store(Path(root)), 0, 0
        while time.monotonic() < end:
            entry = store.get(key)
            if entry is not None:
                done += 1
                torn += len(set(entry.binary)) != 1 or entry.binary[0] != entry.meta["fill"]
        return "reads", done, _trouble() + torn

    results = harness.together(readers + writers, lambda n: write(n) if n < writers else read(n), seconds + 60)
    totals = Counter[str]()
    for state, value in results:
        if state == "ok":
            totals[value[0]] += value[1]
    return {"failed": [r for r in results if r[0] != "ok" or r[1][2]], **totals}


def _trouble() -> int:
    found = events.stats()
    return found["bad_entry"] + found["memory_only"]


def removal_under_way(root: str, how: str, processes: int, seconds: float) -> dict[str, Any]:
    """Others compile, publish and read while the cache is cleared, trimmed, or its folder is removed altogether."""
    compiler = injected.install()
    end = time.monotonic() + seconds

    def remove() -> Any:
        done, store = 0, cache.Store(Path(root))
        while time.monotonic() < end:
            if how == "clear":
                store.clear()
            elif how == "trim":
                store.trim(0)
            else:
                shutil.rmtree(root, ignore_errors=True)
            done += 1
            time.sleep(0.003)
        return done, 0

    def use(number: int) -> Any:
        done, draw = 0, random.Random(number)
        while time.monotonic() < end:
            variant = injected.variant(draw.randrange(20))
            binary, _ = loader.obtain(variant, injected.TEXT)
            assert binary == compiler.expected(variant)
            done += 1
        # `rm -r` takes entries apart file by file, which is damage, and may take every folder made for a new one.
        return done, _trouble() if how != "remove" else 0

    results = harness.together(processes + 1, lambda n: use(n) if n else remove(), seconds + 60)
    return {
        "failed": [result for result in results if result[0] != "ok" or result[1][1]],
        "removals": results[0][1][0] if results[0][0] == "ok" else 0,
        "uses": sum(value[0] for state, value in results[1:] if state == "ok"),
    }
