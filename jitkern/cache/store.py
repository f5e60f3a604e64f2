"""One root: reading, publishing and setting aside of entries."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import time
import uuid
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any

from jitkern import events, settings
from jitkern.cache import eviction, files, locking, manifest
from jitkern.cache.files import BadFileError
from jitkern.cache.key import SCHEMA, Entry, Key
from jitkern.errors import CacheError

_OCCUPIED = (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR)
_TOUCH_SECONDS = 60.0  # the time of last use is kept this exactly; anything finer is a write per load for nothing
_TAGS = (
    ("CACHEDIR.TAG", b"Signature: 8a477f597d28d172789f06886806bc55\n# Compiled kernels of jitkern.\n"),
    (".gitignore", b"*\n"),
)


class Store:
    """The entries under one root.

    Args:
        root: a folder that exists and was checked by :func:`jitkern.cache.open_store`.
        read_only: never write, not even the time of last use.
        owners: whose files are believed; default: ours and root's.
    """

    def __init__(self, root: Path, read_only: bool = False, owners: Collection[int] | None = None) -> None:
        self.root = root
        self.base = root / f"v{SCHEMA}"
        self.read_only = read_only
        self.owners = files.trusted_owners() if owners is None else owners
        self._published = 0

    def get(self, key: Key) -> Entry | None:
        """The entry for ``key``, verified; None if there is none, or none that is good (it is then set aside)."""
        path = self.base / key.folder
        try:
            try:
                return self.read(path, key.digest)
            except OSError as error:
                if error.errno != errno.ESTALE:
                    raise
                return self.read(path, key.digest)  # a network file system lost a file that somebody exchanged
        except BadFileError as error:
            self._set_aside(path, error)
        except OSError as error:
            events.warn_once(f"read {error.errno}", f"cannot read cache entry {path}: {error}; going on without it")
        return None

    def read(self, path: Path, digest: str | None = None) -> Entry | None:
        """The entry at a path, verified; None if there is none.

        Raises:
            BadFileError: something is there that is not this entry. Its ``args[1:]`` tell which folder it was.
            OSError: it cannot be read.
        """
        try:
            folder = os.open(path, files.DIRECTORY_FLAGS)
        except FileNotFoundError:
            return None
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.ENOTDIR):
                raise
            if not os.path.lexists(path):  # what is no folder is one of its parents
                return None
            raise BadFileError("it is not a folder") from None
        try:
            info = os.fstat(folder)
            try:
                return self._verified(folder, info, path, digest)
            except FileNotFoundError as error:
                if files.identity(path) != files.identity_of(info):  # removed while it was read
                    return None
                raise BadFileError(f"{error.filename} is missing", files.identity_of(info)) from None
            except BadFileError as error:
                raise BadFileError(str(error), files.identity_of(info)) from None
        finally:
            os.close(folder)

    def _verified(self, folder: int, info: os.stat_result, path: Path, digest: str | None) -> Entry:
        reason = files.untrusted(info, self.owners)
        if reason:
            raise BadFileError(reason)
        meta = manifest.decode(files.read(folder, manifest.NAME, self.owners, most=manifest.LARGEST), digest)
        binary = files.read(folder, meta["binary"], self.owners, meta["size"])
        if hashlib.sha256(binary).hexdigest() != meta["sha256"]:
            raise BadFileError(f"{meta['binary']} does not match its SHA-256")
        if not self.read_only and abs(time.time() - info.st_mtime) > _TOUCH_SECONDS:
            with contextlib.suppress(OSError):
                os.utime(folder)  # the time of last use, for eviction
        return Entry(binary, meta, path)

    def reject(self, key: Key, reason: str) -> None:
        """Set the entry of ``key`` aside though it matches its hash: whoever loads it says that it is no good."""
        path = self.base / key.folder
        self._set_aside(path, BadFileError(reason, *filter(None, [files.identity(path)])))

    def _set_aside(self, path: Path, error: BadFileError) -> None:
        reason, *identity = error.args
        events.report("bad_entry", path.name, detail=reason)
        what = "it stays, and is not used" if self.read_only else "it is set aside and built again"
        events.warn_once(f"bad {path}", f"cache entry {path} is damaged ({reason}); {what}")
        # Meanwhile somebody may have put a good one in its place, which must not suffer for it.
        if not self.read_only and (not identity or files.identity(path) == identity[0]):
            self.discard(path)

    def discard(self, path: Path) -> None:
        """Take an entry out of sight in one step, then delete it. Never raises."""
        doomed = self.base / "tmp" / f"gone-{uuid.uuid4().hex}"
        try:
            files.make_private(doomed.parent, self.root)
            os.rename(path, doomed)
        except OSError as error:
            # An overlay cannot rename a folder of the image below it, but hides one that is deleted.
            if error.errno == errno.EXDEV:
                files.remove(path)
        else:
            files.remove(doomed)

    def publish(self, key: Key, binary: bytes, binary_name: str, text: str, meta: dict[str, Any]) -> Entry | None:
        """Make an entry visible. Returns None, with one warning, if the disk would not take it.

        If somebody else published the same key first, theirs stays.
        """
        meta = {
            **meta,
            "digest": key.digest,
            "stem": key.stem,
            "key": key.parts | {"text": hashlib.sha256(text.encode()).hexdigest()},
            "binary": binary_name,
            "size": len(binary),
            "sha256": hashlib.sha256(binary).hexdigest(),
        }
        content = {
            f"kernel.{'cpp' if key.target == 'cpu' else 'cu'}": text.encode(),
            binary_name: binary,
            manifest.NAME: manifest.encode(meta),
        }
        try:
            if self.read_only:
                raise OSError(errno.EROFS, "it can only be read")
            self.adopt(key.folder, key.digest, content)
        except OSError as error:
            events.report("memory_only", key.stem, detail=str(error))
            events.warn_once(
                f"write {error.errno}", f"cannot write to the cache {self.root}: {error}; going on in memory"
            )
            return None
        return Entry(binary, meta, self.base / key.folder)

    def adopt(self, folder: str, digest: str, content: dict[str, bytes]) -> None:
        """Write the files of an entry, and make them visible as one unit.

        Raises:
            OSError: the disk would not take it.
        """
        final = self.base / folder
        try:
            self._write_entry(final, digest, content)
        except FileNotFoundError:  # somebody removes the whole cache under our hands: once more, from the root up
            self._write_entry(final, digest, content)
        with contextlib.suppress(OSError):
            self._keep_house(final, sum(map(len, content.values())))

    def _write_entry(self, final: Path, digest: str, content: dict[str, bytes]) -> None:
        staging = self.base / "tmp" / uuid.uuid4().hex
        try:
            files.make_private(staging, self.root)
            for name, data in content.items():
                files.write(staging / name, data)
            files.flush_folder(staging)
            files.make_private(final.parent, self.root)
            self._place(staging, final, digest)
        except BaseException:  # an interrupt too
            files.remove(staging)
            raise

    def _place(self, staging: Path, final: Path, digest: str) -> None:
        """Rename into place. Whoever finds a good entry there leaves it; a bad one gives way."""
        for last in (False, False, True):
            try:
                os.rename(staging, final)
            except OSError as error:
                if last or error.errno not in _OCCUPIED:
                    raise
            else:
                files.flush_folder(final.parent)
                return
            try:
                if self.read(final, digest) is not None:
                    files.remove(staging)
                    return
            except BadFileError as error:
                self._set_aside(final, error)

    def _keep_house(self, final: Path, size: int) -> None:
        if self._published == 0:
            for name, content in _TAGS:  # tell backup tools and git that this is a cache
                with contextlib.suppress(OSError):
                    files.write(self.base / name, content, flush=False)
        if self._published % 256 == 0:
            eviction.sweep(self.base, final.lstat().st_mtime)
        self._published += 1
        eviction.account(self, final, size, settings.get().cache_max)

    def entries(self) -> Iterator[tuple[Path, os.stat_result, int]]:
        """(path, status, bytes) of every entry."""
        return eviction.entries(self.base)

    def trim(self, limit: int, keep: Path | None = None) -> int:
        """Remove entries, the least recently used first, until ``limit`` bytes are not exceeded. Returns how many.

        An entry used within the last two minutes, by any process, stays. Leftovers of builders that died are swept.
        """
        return eviction.trim(self, limit, keep)[0]

    def clear(self) -> int:
        """Remove every entry; processes that use one go on with what they have loaded. Returns how many went."""
        if self.read_only:
            raise CacheError(f"{self.root} is a read-only root; clear it where it is made")
        removed = 0
        for path, _, _ in list(self.entries()):
            self.discard(path)
            removed += not os.path.lexists(path)
        return removed

    @contextlib.contextmanager
    def compiling(self, key: Key) -> Iterator[Entry | None]:
        """Hold the lock that keeps others from compiling the same key; yields their entry if they finish first.

        The wait is bounded by ``JITKERN_LOCK_TIMEOUT``; after it, and wherever locking does not work, the caller
        compiles for itself. Nothing but duplicate work depends on it.
        """
        with locking.compiling(self.base, self.root, key, lambda: self.get(key)) as entry:
            yield entry
