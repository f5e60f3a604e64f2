"""Files and folders that only we could have made: opened without following a link, checked on the open descriptor.

What is checked is what is used: owner and mode are asked of the descriptor that is read, so that nobody gains
anything by exchanging a folder between a check and a use.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Collection
from pathlib import Path

DIRECTORY_FLAGS = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
# O_NONBLOCK: opening a FIFO that somebody left in a file's place must not wait for a writer.
_FILE_FLAGS = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_CREATE_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_NOT_A_FILE = (errno.ELOOP, errno.ENXIO, errno.ENODEV, errno.ENOTDIR, errno.EISDIR)
_CANNOT_FLUSH = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
LARGEST_FILE = 1 << 28  # no kernel's binary comes near; a larger file is damage, and is not read


class BadFileError(Exception):
    """A file is there and is not what it has to be."""


def trusted_owners() -> frozenset[int]:
    """Those whose files we believe: ourselves and root."""
    return frozenset((os.geteuid(), 0))


def untrusted(info: os.stat_result, owners: Collection[int]) -> str | None:
    """Say why a file or folder cannot be trusted; None if it can."""
    if info.st_uid not in owners:
        return f"it belongs to uid {info.st_uid}, not to {os.geteuid()}"
    if info.st_mode & 0o022:
        return f"others can write to it (mode {stat.S_IMODE(info.st_mode):04o}); run chmod go-w on it"
    return None


def read(folder: int, name: str, owners: Collection[int], size: int | None = None, most: int = LARGEST_FILE) -> bytes:
    """Read a file in an open folder.

    Args:
        folder: the folder's descriptor.
        name: the file's plain name.
        owners: whose files are believed.
        size: the bytes that it must have, if that is known.
        most: the bytes that it may have at most.

    Raises:
        BadFileError: it is no file, not ours, or of another size.
        FileNotFoundError: there is none.
        OSError: it cannot be read.
    """
    if os.sep in name or name in ("", ".", ".."):
        raise BadFileError(f"{name!r} is no plain name")
    try:
        descriptor = os.open(name, _FILE_FLAGS, dir_fd=folder)
    except OSError as error:
        if error.errno in _NOT_A_FILE:
            raise BadFileError(f"{name} is not a file") from None
        raise
    try:
        info = os.fstat(descriptor)
        reason = "it is not a file" if not stat.S_ISREG(info.st_mode) else untrusted(info, owners)
        if reason:
            raise BadFileError(f"{name}: {reason}")
        if info.st_size > most or (size is not None and info.st_size != size):
            raise BadFileError(f"{name} has {info.st_size} bytes instead of {most if size is None else size}")
        return _read_all(descriptor, info.st_size)
    finally:
        os.close(descriptor)


def _read_all(descriptor: int, size: int) -> bytes:
    content = os.read(descriptor, size)
    while 0 < len(content) < size:  # network file systems may give less than was asked for
        more = os.read(descriptor, size - len(content))
        if not more:
            break
        content += more
    return content


def write(path: Path, content: bytes, flush: bool = True) -> None:
    """Make a new file, and have the disk take it unless it may as well be lost."""
    descriptor = os.open(path, _CREATE_FLAGS, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)
        file.flush()
        if flush:
            _flush(descriptor)


def flush_folder(path: Path) -> None:
    """Have the disk take the names in a folder, where it can do that."""
    descriptor = os.open(path, DIRECTORY_FLAGS)
    try:
        with contextlib.suppress(OSError):
            os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _flush(descriptor: int) -> None:
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno not in _CANNOT_FLUSH:  # a full disk or a quota may show only here
            raise


def make_private(path: Path, root: Path) -> None:
    """Make a folder below ``root``, and what lies between, each for us alone.

    ``Path.mkdir(parents=True)`` gives the folders between the mode of the umask, which may let others write.

    Raises:
        OSError: one cannot be made, or is not ours.
    """
    if not os.path.isdir(root):  # somebody removed it while we run
        with contextlib.suppress(FileExistsError):
            root.mkdir(mode=0o700)
    owners = trusted_owners()
    for folder in [*reversed(path.relative_to(root).parents), path.relative_to(root)][1:]:
        step = root / folder
        with contextlib.suppress(FileExistsError):
            step.mkdir(mode=0o700)
        info = step.lstat()
        reason = "it is not a folder" if not stat.S_ISDIR(info.st_mode) else untrusted(info, owners)
        if reason:
            raise OSError(errno.EPERM, reason, str(step))


def remove(path: Path) -> None:
    """Delete a file or a tree as far as that is possible. Never raises: leftovers are no reason to fail."""
    try:
        path.unlink()
    except FileNotFoundError:
        return
    except OSError:
        pass
    else:
        return
    shutil.rmtree(path, ignore_errors=True)


def subfolders(path: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
    """The folders in a folder, links to folders not among them; none if it cannot be read."""
    return [item for item in listing(path) if item.is_dir(follow_symlinks=False)]


def listing(path: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
    """What is in a folder; nothing if it cannot be read."""
    try:
        with os.scandir(path) as found:
            return list(found)
    except OSError:
        return []


def identity_of(info: os.stat_result) -> tuple[int, int]:
    """Which folder it is; numbers of inodes come again, and so does the whole second."""
    return info.st_ino, info.st_ctime_ns


def identity(path: Path) -> tuple[int, int] | None:
    """Which file or folder is at a path now."""
    try:
        return identity_of(path.lstat())
    except OSError:
        return None
