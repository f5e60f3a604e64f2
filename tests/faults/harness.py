"""Scenes run in a process of their own: single-threaded, so that it may fork, and killed with all that it started."""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
# Read here, at import: the suite's own fixture takes every JITKERN_ variable away before a test runs.
LONG = os.environ.get("JITKERN_FAULTS", "short") == "long"
SEED = int(os.environ.get("JITKERN_FAULTS_SEED", "0")) or random.SystemRandom().randrange(1 << 30)
_MARK = "@@result@@"


def amount(short: int, long: int) -> int:
    """How often to do something."""
    return long if LONG else short


def environment(**changes: str | None) -> dict[str, str]:
    """This process's environment without what decides where entries go, and with changes; None takes one away."""
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JITKERN_", "PYTHON", "XDG_", "COV_"))}
    env |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": "", "PYTHONDONTWRITEBYTECODE": "1"}
    for name, value in changes.items():
        env.pop(name, None)
        if value is not None:
            env[name] = value
    return env


def with_root(root: Path | str, **changes: str | None) -> dict[str, str]:
    """An environment for a scene that uses a cache root, is quiet, and waits for a lock for a moment only."""
    own: dict[str, str | None] = {
        "JITKERN_CACHE_DIR": str(root),
        "JITKERN_LOCK_TIMEOUT": "0.3",
        "JITKERN_QUIET": "1",
        "TMPDIR": str(Path(root).parent),
    }
    return environment(**(own | changes))


def scene(
    module: str,
    function: str,
    *args: Any,
    env: dict[str, str] | None = None,
    prefix: Sequence[str] = (),
    timeout: float = 240.0,
    code: int = 0,
) -> tuple[Any, str]:
    """Run ``tests.faults.<module>.<function>(*args)`` in a fresh interpreter; returns (its result, its stderr)."""
    call = f"{function}(*json.loads({json.dumps(args)!r}))"
    program = f"import json\nfrom tests.faults.{module} import {function}\nr = {call}\nprint({_MARK!r} + json.dumps(r))"
    process = subprocess.Popen(
        [*prefix, sys.executable, "-c", program],
        cwd="/", env=env or environment(), text=True, errors="replace", start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
    assert process.returncode == code, f"exit code {process.returncode}\n{out}\n{err}"
    found = [line for line in out.splitlines() if line.startswith(_MARK)]
    return (json.loads(found[-1].removeprefix(_MARK)) if found else None), err


class Child:
    """A forked process that does something and sends back what it returned or raised."""

    def __init__(self, work: Callable[[], Any]) -> None:
        self._out, inner = os.pipe()
        self.start = time.perf_counter()
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                os.close(self._out)
                try:
                    result: tuple[str, Any] = ("ok", work())
                    code = 0
                except BaseException as error:
                    result = ("error", f"{type(error).__name__}: {error}")
                with open(inner, "wb") as file:
                    file.write(pickle.dumps(result))
            finally:
                os._exit(code)
        os.close(inner)
        self.status: int | None = None

    def kill(self, number: int) -> None:
        if self.status is None:
            os.kill(self.pid, number)

    def wait_for_stop(self) -> bool:
        """Wait until it is stopped or has ended; whether it is stopped."""
        _, status = os.waitpid(self.pid, os.WUNTRACED)
        if os.WIFSTOPPED(status):
            return True
        self.status = status
        return False

    def ended(self) -> bool:
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = status
        return self.status is not None

    def result(self, timeout: float = 60.0) -> tuple[str, Any]:
        """("ok", value), ("error", text) or ("killed", signal)."""
        deadline, data = time.monotonic() + timeout, b""
        with open(self._out, "rb", buffering=0) as file:
            while True:
                ready, _, _ = select.select([file], [], [], max(deadline - time.monotonic(), 0))
                if not ready:
                    os.kill(self.pid, signal.SIGKILL)
                    os.waitpid(self.pid, 0)
                    return "hung", timeout
                part = file.read(1 << 20)
                if not part:
                    break
                data += part
        if self.status is None:
            self.status = os.waitpid(self.pid, 0)[1]
        self.seconds = time.perf_counter() - self.start
        if os.WIFSIGNALED(self.status):
            return "killed", os.WTERMSIG(self.status)
        found: tuple[str, Any] = pickle.loads(data) if data else ("error", "nothing came back")
        return found


def together(count: int, work: Callable[[int], Any], timeout: float = 120.0) -> list[tuple[str, Any]]:
    """Run ``work(i)`` in forked processes that start at the same moment."""
    gate_out, gate_in = os.pipe()

    def held(number: int) -> Any:
        os.close(gate_in)
        os.read(gate_out, 1)  # returns for all at once when the last writer is gone
        return work(number)

    children = [Child(lambda n=n: held(n)) for n in range(count)]  # type: ignore[misc]
    os.close(gate_out)
    os.close(gate_in)
    return [child.result(timeout) for child in children]


@contextlib.contextmanager
def steps(action: Callable[[int, str], None]) -> Iterator[list[str]]:
    """Call ``action(number, what)`` before every file-system call that Python makes in this block.

    Audit hooks see ``open``, ``rename``, ``mkdir`` and so on; flushes, writes and time stamps are wrapped here.
    """
    seen: list[str] = []
    active = [True]

    def step(what: str) -> None:
        if active[0]:
            active[0] = False
            seen.append(what)
            try:
                action(len(seen) - 1, what)
            finally:
                active[0] = True

    def hook(event: str, arguments: tuple[Any, ...]) -> None:
        if event == "open" or event.startswith(("os.", "shutil.", "fcntl.")):
            step(f"{event} {str(arguments[0])[-60:] if arguments else ''}")

    wrapped = {name: getattr(os, name) for name in ("fsync", "write", "utime", "ftruncate")}

    def wrap(name: str) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            step(f"os.{name}")
            return wrapped[name](*args, **kwargs)

        return call

    for name in wrapped:
        setattr(os, name, wrap(name))
    sys.addaudithook(hook)  # it cannot be taken away, only told to be still
    try:
        yield seen
    finally:
        active[0] = False
        for name, original in wrapped.items():
            setattr(os, name, original)
