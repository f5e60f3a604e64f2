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
        temporary = Path(tempfile.gettempdir())
        if temporary != Path.cwd():  # Python's last resort, and no place where anybody would look for a cache
            roots.append((temporary / f"jitkern-{os.geteuid()}", True))
    return [(path, strict) for path, strict in roots if path.is_absolute()]


def _make_root(path: Path, strict: bool) -> str | None:
    """Make and check a root; returns why it cannot be used, or None."""
    try:
        if not os.path.isdir(path):
            for folder in [*reversed(path.parents), path]:  # parents=True would make those between for everybody
                if not os.path.isdir(folder):
                    folder.mkdir(mode=0o700, exist_ok=True)
        info = path.lstat() if strict else path.stat()
    except OSError as error:
        return str(error)
    if stat.S_ISLNK(info.st_mode):
        return "it is a symbolic link"
    if not stat.S_ISDIR(info.st_mode):
        return "it is not a folder"
    return files.untrusted(info, files.trusted_owners())


def open_store() -> Store | None:
    """The store to write to; one that can only be read if no root can be written to but one can be read.

    None, with one warning, when there is neither: then everything stays in memory.
    """
    reasons, readable = [], None
    for path, strict in default_roots():
        reason = _make_root(path, strict)
        if reason is None and _writable(path):
            return Store(path)
        if reason is None and os.access(path, os.X_OK):
            readable = readable or path
        reasons.append(f"{path}: {reason or 'it cannot be written to'}")
    if readable is not None:  # a warm cache in a read-only image: no reason to complain before something is missing
        return Store(readable, read_only=True)
    why = "; ".join(reasons) or "there is no home and no temporary folder"
    events.warn_once("no root", f"no disk cache ({why}); compiled kernels last for this process only")
    return None


def _writable(path: Path) -> bool:
    return os.access(path, os.W_OK | os.X_OK, effective_ids=os.access in os.supports_effective_ids)


def read_only_stores() -> list[Store]:
    """Further roots to read from: default ones that cannot be written to, and those of ``JITKERN_CACHE_ROOTS``.

    They have to exist, and others must not be able to write to them.

    Naming a root there is trusting its owner: a shared one belongs to whoever fills it.
    """
    stores = []
    for path, strict in default_roots():
        if (
            os.path.isdir(path)
            and os.access(path, os.X_OK)
            and not _writable(path)
            and _make_root(path, strict) is None
        ):
            stores.append(Store(path, read_only=True))
    for path in settings.get().cache_roots:
        try:
            info = path.stat()
            owners = files.trusted_owners() | {info.st_uid}
            reason = files.untrusted(info, owners)
            if reason is None and info.st_uid not in files.trusted_owners():
                reason = _open_to_all(path)
        except OSError as error:
            events.warn_once(f"root {path}", f"JITKERN_CACHE_ROOTS: {error}; it is skipped")
            continue
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
