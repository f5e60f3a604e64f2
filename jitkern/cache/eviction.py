"""The size of a cache: the least recently used entries go first, and never one in use.

Finding out how large a cache is takes a look at every entry, too much to do at each publish. So the growth is
counted: the file ``grown`` gets a byte for each unit published (appending is atomic), and only when its length says
that the cap may be exceeded are the entries looked at, and the file cut to what they really take.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from jitkern import events, variants
from jitkern.cache import files
from jitkern.errors import ArgumentError

if TYPE_CHECKING:
    from jitkern.cache.store import Store

_UNIT = 8192
_ROOM = 0.9  # an automatic trim goes down to this part of the cap, so that not every publish is followed by one
_IN_USE_SECONDS = 120.0  # an entry read this recently is not evicted
_STALE_STAGING_SECONDS = 3600.0
_STALE_LOCK_SECONDS = 86400.0
_COUNTER_FLAGS = os.O_WRONLY | os.O_APPEND | os.O_NOFOLLOW | os.O_CLOEXEC


def entries(base: Path) -> Iterator[tuple[Path, os.stat_result, int]]:
    """(path, status, bytes) of every entry."""
    for target in files.subfolders(base):
        try:
            variants.check_target(target.name)
        except ArgumentError:
            continue
        for entry in files.subfolders(target):
            with contextlib.suppress(OSError):
                size = sum(file.stat(follow_symlinks=False).st_size for file in files.listing(entry))
                yield Path(entry.path), entry.stat(follow_symlinks=False), size


def account(store: Store, entry: Path, size: int, cap: int) -> None:
    """Count a publish, and trim if the cap may be exceeded.

    Raises:
        OSError: counting did not work; the cap then waits for a publish that can count.
    """
    counter = store.base / "grown"
    try:
        descriptor, first = os.open(counter, _COUNTER_FLAGS), False
    except FileNotFoundError:  # nobody counted so far: look once
        descriptor, first = os.open(counter, _COUNTER_FLAGS | os.O_CREAT, 0o600), True
    try:
        os.write(descriptor, b"." * (size // _UNIT + 1))
        if first or os.fstat(descriptor).st_size * _UNIT > cap:
            total = trim(store, int(cap * _ROOM) if not first else cap, entry)[1]
            # If all that is left is in use, the next look can wait until there is some more.
            os.ftruncate(descriptor, min(total, int(cap * _ROOM)) // _UNIT)
    finally:
        os.close(descriptor)


def trim(store: Store, limit: int, keep: Path | None = None) -> tuple[int, int]:
    """(entries removed, bytes left): see :meth:`Store.trim`."""
    now = _now(keep)
    sweep(store.base, now)
    found = [(min(info.st_mtime, now), path, size) for path, info, size in entries(store.base)]
    total, removed = sum(item[2] for item in found), 0
    for used, path, size in sorted(found):
        if total <= limit or now - used < _IN_USE_SECONDS:
            break
        if path == keep:
            continue
        store.discard(path)
        total -= size
        removed += 1
    if removed:
        events.report("evicted", store.root.name, detail=f"{removed} entries, {total} bytes are left")
    return removed, total


def _now(fresh: Path | None) -> float:
    """The present by the clock that stamps the files, which on a network file system is another machine's."""
    if fresh is not None:
        with contextlib.suppress(OSError):
            return fresh.lstat().st_mtime
    return time.time()


def sweep(base: Path, now: float) -> None:
    """Delete what builders that died left behind, and locks that nobody took for a day.

    Deleting a lock that is just being taken costs no more than compiling twice.
    """
    for folder, stale in (("tmp", _STALE_STAGING_SECONDS), ("locks", _STALE_LOCK_SECONDS)):
        for item in files.listing(base / folder):
            with contextlib.suppress(OSError):
                if now - item.stat(follow_symlinks=False).st_mtime > stale:
                    files.remove(Path(item.path))
