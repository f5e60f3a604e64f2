"""What processes do to a compile: fork, signals, exit, a compiler that is killed, a stderr that is gone."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
import time
from pathlib import Path
from typing import Any

from jitkern import binaries, driver, events, loader, settings
from jitkern.compilers import building
from jitkern.errors import JitkernError, LaunchError
from tests.faults import harness, injected
from tests.faults.scenes_kill import real


def builders() -> list[int]:
    """Processes of anybody that work in a build's private folder below our temporary folder."""
    found, own = [], os.environ["TMPDIR"]
    for name in os.listdir("/proc"):
        with contextlib.suppress(OSError):
            where = os.readlink(f"/proc/{name}/cwd") if name.isdigit() else ""
            if where.startswith(f"{own}/jitkern-build-"):
                found.append(int(name))
    return found


def folders() -> list[str]:
    return sorted(os.listdir(os.environ["TMPDIR"]))


def kill_the_compiler(root: str, program: str) -> dict[str, Any]:
    """A signal ends the compiler itself; that is an error of the machine, not of the text, and the next call works."""

    def hunt() -> None:
        end = time.monotonic() + 30
        while time.monotonic() < end:
            for process in builders():
                with contextlib.suppress(OSError):
                    name = Path(f"/proc/{process}/comm").read_text().strip()
                    if name == program:
                        os.kill(process, signal.SIGKILL)
                        return

    import torch.utils.cpp_extension  # noqa: F401

    hunter = threading.Thread(target=hunt)
    hunter.start()
    time.sleep(0.05)
    try:
        loader.obtain(real(1, "cpu"))
        error = "none"
    except JitkernError as problem:
        error = f"{type(problem).__name__}: {problem}"
    hunter.join()
    return {"error": error, "next": loader.obtain(real(1, "cpu"))[1], "left": builders(), "folders": folders()}


def interrupt_a_build(root: str, after: float) -> dict[str, Any]:
    """Ctrl-C that only this process gets, as in a notebook, while a compiler runs for a minute."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    import torch.utils.cpp_extension  # noqa: F401

    me = os.getpid()

    def press() -> None:
        end = time.monotonic() + 30
        while len(builders()) < 2 and time.monotonic() < end:
            time.sleep(0.01)
        time.sleep(after)
        os.kill(me, signal.SIGINT)

    threading.Thread(target=press, daemon=True).start()
    start = time.perf_counter()
    try:
        loader.obtain(real(1, "cpu"))
        outcome = "finished"
    except KeyboardInterrupt:
        outcome = "interrupted"
    seconds = time.perf_counter() - start
    time.sleep(0.1)
    return {
        "outcome": outcome,
        "seconds": seconds,
        "left": builders(),
        "folders": folders(),
        "path": os.environ["PATH"],
    }


def exit_during(root: str, backend: str, seconds: float, first: bool = True) -> None:
    """The interpreter ends while a daemon thread compiles one thing after the other."""
    import logging

    logging.getLogger().addHandler(logging.NullHandler())

    def endless() -> None:
        for number in range(10_000):
            with contextlib.suppress(JitkernError):
                loader.obtain(real(number, backend))

    # The compiler is open and torch imported, so that the exit falls into a compile.
    if first:
        assert loader.obtain(real(20_000 + int(seconds * 1000), backend))[1] == "compiled"
    else:
        import torch.utils.cpp_extension  # noqa: F401
    threading.Thread(target=endless, daemon=True).start()
    time.sleep(seconds)


def fork_between(root: str) -> dict[str, Any]:
    """Fork while another thread compiles, holds the counters' lock and waits; parent and child both go on."""
    injected.install(seconds=0.3)
    hold, release = threading.Event(), threading.Event()

    def holder() -> None:
        with events._lock:
            hold.set()
            release.wait(20)

    threads = [threading.Thread(target=holder)]
    threads += [threading.Thread(target=loader.obtain, args=(injected.variant(1), injected.TEXT)) for _ in range(2)]
    threads[0].start()
    hold.wait()
    for thread in threads[1:]:
        thread.start()
    time.sleep(0.05)

    def child_work() -> Any:
        return loader.obtain(injected.variant(1), injected.TEXT)[1], loader.obtain(injected.variant(2), injected.TEXT)[
            1
        ]

    child = harness.Child(child_work)
    result = child.result(15)
    release.set()
    for thread in threads:
        thread.join(20)
    return {
        "child": result,
        "parent": loader.obtain(injected.variant(1), injected.TEXT)[1],
        "alive": sum(t.is_alive() for t in threads),
    }


def fork_in_compiles(root: str, times: int) -> dict[str, Any]:
    """Fork again and again while another thread is in NVRTC; the children compile, or just end."""
    loader.obtain(real(1, "nvrtc"))
    stop = threading.Event()

    def endless() -> None:
        for number in range(2, 10_000):
            if stop.is_set():
                return
            loader.obtain(real(number, "nvrtc"))

    thread = threading.Thread(target=endless)
    thread.start()
    results, longest = list[Any](), 0.0
    for number in range(times):
        time.sleep(0.013)
        start = time.perf_counter()
        child = harness.Child(lambda n=number: loader.obtain(real(20_000 + n, "nvrtc"))[1])  # type: ignore[misc]
        longest = max(longest, time.perf_counter() - start)
        results.append(child.result(20))
    stop.set()
    thread.join(20)
    return {"results": [r for r in results if r != ("ok", "compiled")], "alive": thread.is_alive(), "longest": longest}


def fork_that_cannot_wait(root: str) -> dict[str, Any]:
    """A fork in the middle of a compile that does not end: the child is told, and does not hang."""
    from jitkern.compilers import nvrtc

    nvrtc._gate._patience = 0.2
    inside, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with nvrtc._gate.section():
            inside.set()
            leave.wait(20)

    thread = threading.Thread(target=hold)
    thread.start()
    inside.wait()
    result = harness.Child(lambda: loader.obtain(real(1, "nvrtc"))[1]).result(20)
    leave.set()
    thread.join(20)
    return {"result": result, "parent": loader.obtain(real(1, "nvrtc"))[1]}


def fork_after_use(root: str) -> dict[str, Any]:
    """A child uses CPU functions of its parent, and is told plainly that it cannot use its CUDA."""
    loader.get(real(1, "cpu"), loader.CPU)

    def child_work(cuda: bool) -> Any:
        handle = loader.get(real(1, "cpu"), loader.CPU).how
        loader.get(real(2, "cpu"), loader.CPU)
        try:
            loader.get(real(1, "nvrtc"), 0)
        except LaunchError as error:
            return handle, str(error)
        except JitkernError as error:
            return handle, type(error).__name__
        return handle, "loaded"

    before = harness.Child(lambda: child_work(False)).result()
    # There may be no GPU here: what the parent would have after using one is put in its place.
    name = (real(1, "nvrtc"), 0, "")
    loader._ready[name] = loader.Function(real(1, "nvrtc"), 0, 1, "cached", 0.0)
    after = harness.Child(lambda: child_work(True)).result()
    return {"before": before, "after": after, "gpu": driver.available()}


def reenter(root: str, how: str) -> dict[str, Any]:
    """A signal handler, or a listener, wants the very variant that its own thread is just making or counting."""
    injected.install(seconds=0.2)
    done: list[str] = []

    def want() -> None:
        done.append(loader.obtain(injected.variant(1), injected.TEXT)[1])

    if how == "listener":
        stop = events.listen(lambda event: want() if event.kind == "compiled" and len(done) < 3 else None)
        loader.obtain(injected.variant(1), injected.TEXT)
        stop()
        return {"done": done}
    signal.signal(signal.SIGALRM, lambda number, frame: want())
    start = time.perf_counter()
    if how == "compile":
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        loader.obtain(injected.variant(1), injected.TEXT)
    else:
        with events._lock:
            os.kill(os.getpid(), signal.SIGALRM)
    return {"done": done, "seconds": time.perf_counter() - start}


def without_stderr(root: str, how: str) -> dict[str, Any]:
    """A daemon's stderr is closed, or a pipe that nobody reads; a slow compile and a warning want to speak."""
    injected.install(seconds=1.2)
    if how == "none":
        sys.stderr = None
    elif how == "closed":
        sys.stderr.close()
    else:
        outer, inner = os.pipe()
        os.close(outer)
        sys.stderr = open(inner, "w")  # noqa: SIM115
    result = loader.obtain(injected.variant(1), injected.TEXT)[1]
    events.warn_once("x", "a warning")
    with settings.override(cache_dir=Path("/proc/none")):
        binaries.forget()
        second = loader.obtain(injected.variant(2), injected.TEXT)[1]
    sys.stderr = open(os.devnull, "w")  # noqa: SIM115
    return {"results": [result, second]}


def without_threads(root: str) -> dict[str, Any]:
    """No thread can be started (a limit of processes): the notice about slow compiles must not be in the way."""
    injected.install()

    def refuse(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    threading.Thread.start = refuse  # type: ignore[method-assign]
    with settings.override(quiet=False):
        return {"result": loader.obtain(injected.variant(1), injected.TEXT)[1]}


def swept(root: str) -> dict[str, Any]:
    """Leftovers of killed builds: old ones of ours go, young ones and other people's stay."""
    own = Path(os.environ["TMPDIR"])
    old, young, other = (own / f"jitkern-build-{name}" for name in ("old", "young", "other"))
    for folder in (old, young, other):
        folder.mkdir()
        (folder / "kernel.cpp").write_text("")
    (own / "jitkern-log-old.txt").write_text("")
    (own / "unrelated").mkdir()
    for path in (old, other, own / "jitkern-log-old.txt", own / "unrelated"):
        os.utime(path, (1e9, 1e9))
    if os.geteuid() == 0:
        os.chown(other, 54321, 54321)
    else:
        os.utime(other)
    building.sweep(own)
    return {"left": folders()}
