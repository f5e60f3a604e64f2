"""What surrounds a build by other programs: its private folder, its environment, and the end of what it started.

A build ends in one of four ways: done, rejected, interrupted, or its process is killed. In the first three nothing of
it stays behind, no folder and no compiler that goes on; after a kill its folder stays until a later build sweeps it.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import re
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from jitkern import toolchain
from jitkern.errors import ToolchainError

_PREFIX = "jitkern-build-"
_LOG_PREFIX = "jitkern-log-"
_STALE_SECONDS = {_PREFIX: 3600.0, _LOG_PREFIX: 7 * 86400.0}
PARENTS = (None, "/dev/shm")  # where to build: the usual temporary folder, else in memory
_NO_ROOM = ("No space left on device", "Disk quota exceeded", "Read-only file system")
_TRANSIENT = (
    *_NO_ROOM,
    "Input/output error",
    "annot allocate memory",
    "virtual memory exhausted",
    "out of memory",
    "Killed",
    "Terminated",
    "Resource temporarily unavailable",
    "Too many open files",
    "internal compiler error",
    "Stale file handle",
)

_LOCATED = re.compile(r"^[^\s:]+(:\d+:|\(\d+\): )(?!.*error (writing|closing|reading))")
_EXCERPT = re.compile(r"^\s*\d*\s*\|")

_swept: set[Path] = set()
_open_folders: set[Path] = set()
_users = 0
_before: dict[str, str | None] = {}
_guard = threading.RLock()
_ending = False


def _after_fork() -> None:
    global _guard, _users
    _guard = threading.RLock()
    _open_folders.clear()
    if _users:  # the child has no build under way: give it the environment that there was before
        _users = 0
        _restore()


os.register_at_fork(after_in_child=_after_fork)


class NoRoomError(ToolchainError):
    """A place to build in cannot be written to, or is full."""


def has_no_room(log: str) -> bool:
    """Whether a build failed because its folder took no more."""
    return any(words in log for words in _NO_ROOM)


def is_transient(log: str) -> bool:
    """Whether a build failed for something that has to do with the machine's state, not with the text.

    What a compiler says of a line of the text, and its copy of that line, may hold any words; only what it says of
    itself counts.
    """
    own = [line for line in log.splitlines() if not (_LOCATED.match(line) or _EXCERPT.match(line))]
    return any(words in line for line in own for words in _TRANSIENT)


@contextlib.contextmanager
def private_folder(parent: str | None) -> Iterator[Path]:
    """A folder for one build, gone afterwards, together with every process that works in it.

    Args:
        parent: where; None: the usual temporary folder.

    Raises:
        NoRoomError: it cannot be made there.
    """
    folder = _make_folder(parent)
    with _guard:
        if not _open_folders:
            atexit.unregister(_end_at_exit)
            atexit.register(_end_at_exit)
        _open_folders.add(folder)
    try:
        yield folder
    except BaseException:
        # cpp_extension starts ninja, ninja starts compilers; an interrupt reaches the first at best.
        end_processes_in(folder)
        raise
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        with _guard:
            _open_folders.discard(folder)


def _make_folder(parent: str | None) -> Path:
    if _ending:
        raise ToolchainError("the interpreter is ending; nothing is built any more")
    try:
        folder = Path(tempfile.mkdtemp(prefix=_PREFIX, dir=parent))
    except OSError as error:
        raise NoRoomError(f"no folder to build in: {error}. Set TMPDIR to one that can be written to.") from None
    if folder.parent not in _swept:  # once a process: a temporary folder may be crowded
        _swept.add(folder.parent)
        sweep(folder.parent)
    return folder


def sweep(parent: Path) -> None:
    """Delete folders of builds whose process was killed, and old logs. Only ours, and only old ones."""
    with contextlib.suppress(OSError), os.scandir(parent) as found:
        for item in found:
            stale = next((age for prefix, age in _STALE_SECONDS.items() if item.name.startswith(prefix)), None)
            if stale is None:
                continue
            with contextlib.suppress(OSError):
                info = item.stat(follow_symlinks=False)
                if info.st_uid != os.geteuid() or time.time() - info.st_mtime < stale:
                    continue
                if item.is_dir(follow_symlinks=False):
                    shutil.rmtree(item.path, ignore_errors=True)
                else:
                    os.unlink(item.path)


def end_processes_in(folder: Path) -> int:
    """Kill the processes whose working directory is a build's private folder; returns how many there were.

    The folder's name is random and only the build's own children are started in it, so nobody else can be meant.
    """
    ended: set[int] = set()
    for _ in range(100):
        found = _processes_in(folder)
        if not found:
            break
        for process in found:
            with contextlib.suppress(OSError):
                os.kill(process, signal.SIGKILL)
                ended.add(process)
        time.sleep(0.005)  # the killed may have started one more just before
    return len(ended)


def _processes_in(folder: Path) -> list[int]:
    found = []
    with contextlib.suppress(OSError):
        for name in os.listdir("/proc"):
            with contextlib.suppress(OSError):
                if name.isdigit() and int(name) != os.getpid() and os.readlink(f"/proc/{name}/cwd") == str(folder):
                    found.append(int(name))
    return found


def _end_at_exit() -> None:
    """A daemon thread may be building while the interpreter ends."""
    global _ending
    _ending = True
    with _guard:
        folders = list(_open_folders)
    for folder in folders:
        end_processes_in(folder)


@contextlib.contextmanager
def environment(compiler: toolchain.HostCompiler, temporary: str | None) -> Iterator[None]:
    """Let cpp_extension find ninja, the compiler of the key and, if the usual one is full, a temporary folder.

    Builds may overlap; the last one to end puts back what there was.
    """
    global _users
    ninja = toolchain.ninja()
    with _guard:
        if _users == 0:
            _before.update({name: os.environ.get(name) for name in ("PATH", "CXX", "TMPDIR")})
            os.environ["PATH"] = f"{ninja}{os.pathsep}{_before['PATH'] or os.defpath}"
        os.environ["CXX"] = compiler.command
        if temporary is not None:
            os.environ["TMPDIR"] = temporary
        _users += 1
    try:
        yield
    finally:
        with _guard:
            _users = max(_users - 1, 0)
            if _users == 0:
                _restore()


def _restore() -> None:
    for name, value in _before.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    _before.clear()
