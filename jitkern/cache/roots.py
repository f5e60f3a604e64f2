"""Where entries are: the root to write to, and further ones to read from."""

from __future__ import annotations

import contextlib
import os
import stat
from pathlib import Path

from jitkern import events, settings
from jitkern.cache import files
from jitkern.cache.store import Store


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


def _make_root(path: Path, strict: bool) -> str | None:
    """Make and check a root; returns why it cannot be used, or None."""
    try:
        if not path.is_dir():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.mkdir(mode=0o700, exist_ok=True)
        info = path.lstat() if strict else path.stat()
    except OSError as error:
        return str(error)
    if stat.S_ISLNK(info.st_mode):
        return "it is a symbolic link"
    if not stat.S_ISDIR(info.st_mode):
        return "it is not a folder"
    return files.untrusted(info, files.trusted_owners())


def open_store() -> Store | None:
    """The store to use; None, with one warning, when there is none and everything stays in memory.

    A root that is ours but cannot be written to (a read-only disk) still serves what it has.
    """
    reasons, readable = [], None
    for path, strict in default_roots():
        reason = _make_root(path, strict)
        if reason is None and not os.access(path, os.W_OK | os.X_OK):
            reason = "it cannot be written to"
            readable = readable or path
        if reason is None:
            return Store(path)
        reasons.append(f"{path}: {reason}")
    why = "; ".join(reasons) or "there is no home and no temporary folder"
    events.warn_once("no root", f"no disk cache ({why}); compiled kernels last for this process only")
    return Store(readable, read_only=True) if readable else None


def read_only_stores() -> list[Store]:
    """The further roots of ``JITKERN_CACHE_ROOTS`` that exist and that others cannot write to.

    Naming a root there is trusting its owner: a shared one belongs to whoever fills it.
    """
    stores = []
    for path in settings.get().cache_roots:
        try:
            info = path.stat()
        except OSError as error:
            events.warn_once(f"root {path}", f"JITKERN_CACHE_ROOTS: {error}; it is skipped")
            continue
        owners = files.trusted_owners() | {info.st_uid}
        reason = files.untrusted(info, owners)
        if reason is None and info.st_uid not in files.trusted_owners():
            reason = _open_to_all(path)
        if reason:
            events.warn_once(f"root {path}", f"JITKERN_CACHE_ROOTS: {path}: {reason}; it is skipped")
            continue
        stores.append(Store(path, read_only=True, owners=owners))
    return stores


def _open_to_all(path: Path) -> str | None:
    """Where everybody may make folders, the owner of one says nothing about who was meant."""
    for folder in path.resolve().parents:
        if folder.stat().st_mode & 0o002:
            return f"it belongs to another user and lies in {folder}, where anyone could have made it"
    return None
