"""The lock that saves duplicate compiles. Nothing is wrong without it: it may fail, or never be let go."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from jitkern import events, settings
from jitkern.cache import files
from jitkern.cache.key import DIGEST_CHARS, Entry, Key

_SLICE_SECONDS = 0.2
_POLL_SECONDS = 0.02
_PATIENCE_SECONDS = 1.0  # then the user is told whom we wait for


@contextlib.contextmanager
def compiling(base: Path, root: Path, key: Key, look: Callable[[], Entry | None]) -> Iterator[Entry | None]:
    """Hold the lock of a key; yields what another process published meanwhile, or None: then the caller compiles.

    Args:
        base: the versioned root.
        root: the root.
        key: what is compiled.
        look: looks for the entry.
    """
    holder, lock, entry = _holder(base, key), None, None
    try:
        try:
            files.make_private(holder.parent, root)
            lock = _make(holder.with_suffix(".lock"))
            entry = _wait(lock, key, holder, look)
        # RuntimeError: filelock sees that this thread holds the lock already.
        except (OSError, NotImplementedError, RuntimeError) as error:
            events.logger.debug("no lock at %s (%s); compiling without one", holder, error)
        yield entry
    finally:  # an interrupt while waiting too: a notebook would keep the lock as long as it shows the traceback
        if lock is not None and lock.is_locked:
            with contextlib.suppress(OSError):
                holder.unlink()
            with contextlib.suppress(OSError):
                lock.release(force=True)


def _holder(base: Path, key: Key) -> Path:
    return base / "locks" / f"{key.digest[:DIGEST_CHARS]}.holder"


def _make(path: Path) -> Any:
    import filelock

    try:
        # The soft fallback is a lock by existence: one killed holder would cost everybody after it the whole wait.
        return filelock.FileLock(path, mode=0o600, thread_local=False, fallback_to_soft=False)
    except TypeError:  # an older filelock, which has no such choice
        return filelock.FileLock(path, mode=0o600, thread_local=False)


def _wait(lock: Any, key: Key, holder: Path, look: Callable[[], Entry | None]) -> Entry | None:
    start = time.monotonic()
    entry = _acquire(lock, key, holder, start, look)
    if entry is not None or not lock.is_locked:
        return entry
    with contextlib.suppress(OSError):
        files.remove(holder)  # of one that was killed
        me = {"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}
        files.write(holder, json.dumps(me).encode(), flush=False)
    # Whoever held it may have published between our look and our turn, however short that was.
    entry = look()
    if entry is not None:
        events.report("wait", key.stem, time.monotonic() - start, "another process compiled it")
    return entry


def _acquire(lock: Any, key: Key, holder: Path, start: float, look: Callable[[], Entry | None]) -> Entry | None:
    """Wait for the lock, but not longer than the setting says, nor than it takes until the entry is there."""
    import filelock

    bound, announced = settings.get().lock_timeout, False
    while True:
        waited = time.monotonic() - start
        try:
            lock.acquire(timeout=max(min(_SLICE_SECONDS, bound - waited), 0.0), poll_interval=_POLL_SECONDS)
            return None
        except filelock.Timeout:
            entry, waited = look(), time.monotonic() - start
        if entry is not None:
            events.report("wait", key.stem, waited, "another process compiled it")
            return entry
        if waited >= bound:
            who = describe_holder(holder)
            events.report("wait", key.stem, waited, f"gave up on {who}")
            events.warn_once(
                f"lock {holder}", f"waited {waited:.0f} s for {who} to compile {key.stem}; compiling it here"
            )
            return None
        if waited > _PATIENCE_SECONDS and not announced:
            announced = True
            who = describe_holder(holder)
            events.report("waiting", key.stem, waited, who)
            events.announce(f"waiting for {who}, which compiles {key.stem}")


def describe_holder(path: Path) -> str:
    """Who holds a lock, for a message."""
    try:
        holder = json.loads(path.read_bytes()[:4096])
        return f"pid {int(holder['pid'])} on {holder['host']} (since {time.time() - holder['since']:.0f} s)"
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return "another process"
