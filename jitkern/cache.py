"""The disk cache: entries that are published as one unit and checked before every use.

An entry is a folder ``<root>/v1/<target>/<variant>-<digest>`` with the text, the binary and ``meta.json``. It is written
under ``<root>/v1/tmp``, flushed, and renamed into place, so that a reader sees all of it or nothing; whoever loses a race
goes on with the bytes it holds. Correctness never rests on a lock. See ``docs/reliability.md`` for what is tested.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import json
import os
import shutil
import socket
import stat
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jitkern import events, settings
from jitkern.errors import CacheError

SCHEMA = 1
_DIGEST_CHARS = 20
_STALE_STAGING_SECONDS = 3600.0
_IN_USE_SECONDS = 120.0  # an entry read this recently is not evicted
_DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC


@dataclass(frozen=True)
class Key:
    """What an entry's content depends on, and its digest.

    Attributes:
        parts: every input of the compilation by name: schema, text, options, compiler, headers, target, symbol, abi.
        target: the entry's folder.
        stem: the readable part of the entry's name.
    """

    parts: dict[str, Any]
    target: str
    stem: str
    digest: str = field(init=False)

    def __post_init__(self) -> None:
        canonical = json.dumps(self.parts, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        object.__setattr__(self, "digest", hashlib.sha256(canonical.encode()).hexdigest())

    @property
    def folder(self) -> str:
        """The entry's path below the versioned root."""
        return f"{self.target}/{self.stem[:120]}-{self.digest[:_DIGEST_CHARS]}"


@dataclass(frozen=True)
class Entry:
    """A verified binary with what is known of it."""

    binary: bytes
    meta: dict[str, Any]
    path: Path | None = None


class _BadEntry(Exception):
    """An entry is there and is not what it claims to be."""


def _untrusted(info: os.stat_result) -> str | None:
    """Why a file or folder cannot be trusted, or None."""
    if info.st_uid not in (os.geteuid(), 0):
        return f"it belongs to uid {info.st_uid}, not to {os.geteuid()}"
    if info.st_mode & 0o022:
        return f"others can write to it (mode {stat.S_IMODE(info.st_mode):04o}); run chmod go-w on it"
    return None


def _read(folder: int, name: str, limit: int | None = None) -> bytes:
    """Read a file of an entry that only we could have written."""
    descriptor = os.open(name, _FILE_FLAGS | os.O_NONBLOCK, dir_fd=folder)
    with open(descriptor, "rb", buffering=0) as file:
        info = os.fstat(descriptor)
        if not stat.S_ISREG(info.st_mode):
            raise _BadEntry(f"{name} is not a file")
        reason = _untrusted(info)
        if reason:
            raise _BadEntry(f"{name}: {reason}")
        if limit is not None and info.st_size != limit:
            raise _BadEntry(f"{name} has {info.st_size} bytes instead of {limit}")
        return file.read(info.st_size)


class Store:
    """The entries under one root.

    Args:
        root: a folder that exists and was checked by :func:`open_store`.
        read_only: never write, not even the time of last use.
    """

    def __init__(self, root: Path, read_only: bool = False) -> None:
        self.root = root
        self.base = root / f"v{SCHEMA}"
        self.read_only = read_only

    def get(self, key: Key) -> Entry | None:
        """The entry for ``key``, verified; None if there is none, or none that is good (it is then set aside)."""
        path = self.base / key.folder
        try:
            return self._verified(path, key)
        except (FileNotFoundError, NotADirectoryError):
            return None
        except (_BadEntry, ValueError, KeyError, TypeError) as error:
            self._set_aside(path, f"{error}")
            return None
        except OSError as error:
            if error.errno == errno.ELOOP:
                self._set_aside(path, "it is a symbolic link")
            else:
                events.warn_once(f"read {error.errno}", f"cannot read cache entry {path}: {error}; going on without it")
            return None

    def _verified(self, path: Path, key: Key) -> Entry:
        folder = os.open(path, _DIRECTORY_FLAGS)
        try:
            meta = json.loads(_read(folder, "meta.json"))
            if meta["digest"] != key.digest:
                raise _BadEntry("meta.json is of another key")
            binary = _read(folder, meta["binary"], meta["size"])
            if hashlib.sha256(binary).hexdigest() != meta["sha256"]:
                raise _BadEntry(f"{meta['binary']} does not match its SHA-256")
            if not self.read_only:
                with contextlib.suppress(OSError):
                    os.utime(folder)  # the time of last use, for eviction
            return Entry(binary, meta, path)
        finally:
            os.close(folder)

    def _set_aside(self, path: Path, reason: str) -> None:
        events.report("bad_entry", path.name, detail=reason)
        events.warn_once(f"bad {path}", f"cache entry {path} is damaged ({reason}); it is set aside and built again")
        if not self.read_only:
            self._discard(path)

    def _discard(self, path: Path) -> None:
        """Take an entry out of sight in one step, then delete it. Never raises."""
        with contextlib.suppress(OSError):
            doomed = self.base / "tmp" / f"gone-{uuid.uuid4().hex}"
            doomed.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            os.rename(path, doomed)
            if doomed.is_symlink() or not doomed.is_dir():
                doomed.unlink()
            else:
                shutil.rmtree(doomed, ignore_errors=True)

    def publish(self, key: Key, binary: bytes, binary_name: str, text: str, meta: dict[str, Any]) -> Entry | None:
        """Make an entry visible. Returns None, with one warning, if the disk would not take it.

        If somebody else published the same key first, theirs stays.
        """
        staging = self.base / "tmp" / uuid.uuid4().hex
        meta = {
            **meta,
            "digest": key.digest,
            "key": key.parts | {"text": hashlib.sha256(text.encode()).hexdigest()},
            "binary": binary_name,
            "size": len(binary),
            "sha256": hashlib.sha256(binary).hexdigest(),
        }
        suffix = "cpp" if key.target == "cpu" else "cu"
        files = {f"kernel.{suffix}": text.encode(), binary_name: binary, "meta.json": _json(meta)}
        final = self.base / key.folder
        try:
            staging.mkdir(mode=0o700, parents=True)
            for name, content in files.items():
                _write_flushed(staging / name, content)
            _flush_directory(staging)
            _mark(self.root)
            final.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            try:
                os.rename(staging, final)
                _flush_directory(final.parent)
            except OSError as error:
                if error.errno not in (errno.EEXIST, errno.ENOTEMPTY):
                    raise
                shutil.rmtree(staging, ignore_errors=True)  # lost the race, which is fine
        except OSError as error:
            shutil.rmtree(staging, ignore_errors=True)
            events.report("memory_only", key.stem, detail=str(error))
            events.warn_once(f"write {error.errno}", f"cannot write to the cache {self.root}: {error}; going on in memory")
            return None
        with contextlib.suppress(OSError):
            self.trim(settings.get().cache_max, keep=final)
        return Entry(binary, meta, final)

    def entries(self) -> Iterator[tuple[Path, os.stat_result, int]]:
        """(path, status, bytes) of every entry."""
        for target in _subfolders(self.base):
            if target.name in ("tmp", "locks", "memo"):
                continue
            for entry in _subfolders(target):
                with contextlib.suppress(OSError):
                    with os.scandir(entry.path) as files:
                        size = sum(file.stat(follow_symlinks=False).st_size for file in files)
                    yield Path(entry.path), entry.stat(follow_symlinks=False), size

    def trim(self, limit: int, keep: Path | None = None) -> int:
        """Remove entries, the least recently used first, until ``limit`` bytes are not exceeded. Returns how many.

        An entry used within the last two minutes, by any process, stays. Leftovers of builders that died are swept.
        """
        self._sweep()
        found = sorted(self.entries(), key=lambda item: item[1].st_mtime)
        total, removed, now = sum(item[2] for item in found), 0, time.time()
        for path, info, size in found:
            if total <= limit:
                break
            if path == keep or now - info.st_mtime < _IN_USE_SECONDS:
                continue
            self._discard(path)
            total -= size
            removed += 1
        return removed

    def _sweep(self) -> None:
        for folder in _subfolders(self.base / "tmp"):
            with contextlib.suppress(OSError):
                if time.time() - folder.stat(follow_symlinks=False).st_mtime > _STALE_STAGING_SECONDS:
                    shutil.rmtree(folder.path, ignore_errors=True)

    def clear(self) -> int:
        """Remove every entry; processes that use one go on with what they have loaded. Returns how many went."""
        if self.read_only:
            raise CacheError(f"{self.root} is a read-only root; clear it where it is made")
        removed = 0
        for path, _, _ in list(self.entries()):
            self._discard(path)
            removed += 1
        return removed

    @contextlib.contextmanager
    def compiling(self, key: Key) -> Iterator[Entry | None]:
        """Hold the lock that keeps others from compiling the same key; yields their entry if they finish first.

        The wait is bounded by ``JITKERN_LOCK_TIMEOUT``; after it, and wherever locking does not work, the caller
        compiles for itself. Nothing but duplicate work depends on it.
        """
        lock, entry = self._wait_for_lock(key)
        try:
            yield entry
        finally:
            if lock is not None:
                with contextlib.suppress(OSError):
                    lock.release()

    def _wait_for_lock(self, key: Key) -> tuple[Any, Entry | None]:
        import filelock

        path = self.base / "locks" / f"{key.digest[:_DIGEST_CHARS]}.lock"
        holder = path.with_suffix(".holder")
        start, announced = time.monotonic(), False
        bound = settings.get().lock_timeout
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            lock = filelock.FileLock(path, mode=0o600, thread_local=False)
            while True:
                waited = time.monotonic() - start
                try:
                    lock.acquire(timeout=min(0.2, max(bound - waited, 0.0)), poll_interval=0.02)
                    break
                except filelock.Timeout:
                    entry = self.get(key)
                    if entry is not None:
                        events.report("wait", key.stem, time.monotonic() - start, "another process compiled it")
                        return None, entry
                    if waited >= bound:
                        who = _describe_holder(holder)
                        events.report("wait", key.stem, waited, f"gave up on {who}")
                        events.warn_once(f"lock {path}", f"waited {waited:.0f} s for {who} to compile {key.stem}; compiling it here")
                        return None, None
                    if waited > 1.0 and not announced:
                        announced = True
                        events.announce(f"waiting for {_describe_holder(holder)}, which compiles {key.stem}")
        except (OSError, NotImplementedError) as error:
            events.logger.debug("no lock at %s (%s); compiling without one", path, error)
            return None, None
        with contextlib.suppress(OSError):
            holder.write_bytes(_json({"pid": os.getpid(), "host": socket.gethostname(), "since": time.time()}))
        waited = time.monotonic() - start
        entry = self.get(key) if waited > 0.02 else None
        if entry is not None:
            events.report("wait", key.stem, waited, "another process compiled it")
        return lock, entry


def _json(value: Any) -> bytes:
    return json.dumps(value, indent=1, sort_keys=True).encode()


def _describe_holder(path: Path) -> str:
    try:
        holder = json.loads(path.read_bytes())
        return f"pid {holder['pid']} on {holder['host']} (since {time.time() - holder['since']:.0f} s)"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _write_flushed(path: Path, content: bytes) -> None:
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(descriptor)


def _flush_directory(path: Path) -> None:
    descriptor = os.open(path, _DIRECTORY_FLAGS)
    try:
        with contextlib.suppress(OSError):  # some network file systems cannot flush a folder
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _subfolders(path: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(path) as listing:
            return [item for item in listing if item.is_dir(follow_symlinks=False)]
    except OSError:
        return []


def _make_root(path: Path, strict: bool) -> str | None:
    """Make and check a root; returns why it cannot be used, or None."""
    try:
        path.mkdir(mode=0o700, parents=True, exist_ok=True)
        info = path.lstat() if strict else path.stat()
    except OSError as error:
        return str(error)
    if stat.S_ISLNK(info.st_mode):
        return "it is a symbolic link"
    if not stat.S_ISDIR(info.st_mode):
        return "it is not a folder"
    reason = _untrusted(info)
    if reason is None and not os.access(path, os.W_OK | os.X_OK):
        return "it cannot be written to"
    return reason


def default_roots() -> list[tuple[Path, bool]]:
    """Where entries may go, the first that works, with whether a symbolic link is refused there."""
    chosen = settings.get().cache_dir
    if chosen is not None:
        return [(chosen, False)]
    roots: list[tuple[Path, bool]] = []
    import tempfile

    import platformdirs

    with contextlib.suppress(RuntimeError, OSError, KeyError):  # no home folder at all
        roots.append((platformdirs.user_cache_path("jitkern"), False))
    with contextlib.suppress(OSError):  # no usable temporary folder
        roots.append((Path(tempfile.gettempdir()) / f"jitkern-{os.geteuid()}", True))
    return [(path, strict) for path, strict in roots if path.is_absolute()]


def open_store() -> Store | None:
    """The store to write to; None, with one warning, when there is none and everything stays in memory."""
    reasons = []
    for path, strict in default_roots():
        reason = _make_root(path, strict)
        if reason is None:
            return Store(path)
        reasons.append(f"{path}: {reason}")
    why = "; ".join(reasons) or "there is no home and no temporary folder"
    events.warn_once("no root", f"no disk cache ({why}); compiled kernels last for this process only")
    return None


def read_only_stores() -> list[Store]:
    """The further roots of ``JITKERN_CACHE_ROOTS`` that exist and that others cannot write to."""
    stores = []
    for path in settings.get().cache_roots:
        try:
            info = path.stat()
        except OSError as error:
            events.warn_once(f"root {path}", f"JITKERN_CACHE_ROOTS: {error}; it is skipped")
            continue
        reason = _untrusted(info)
        if reason:
            events.warn_once(f"root {path}", f"JITKERN_CACHE_ROOTS: {path}: {reason}; it is skipped")
            continue
        stores.append(Store(path, read_only=True))
    return stores


def _mark(root: Path) -> None:
    """Tell backup tools and git that this is a cache."""
    for name, content in (
        ("CACHEDIR.TAG", "Signature: 8a477f597d28d172789f06886806bc55\n# Compiled kernels of jitkern.\n"),
        (".gitignore", "*\n"),
    ):
        with contextlib.suppress(OSError):
            descriptor = os.open(root / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            with open(descriptor, "w") as file:
                file.write(content)
