"""Kernel texts: where they are, and one flat text out of a file and what it includes.

A kernel's own includes (``#include "include/pack.cuh"``) are pasted in, each once, with ``#line`` marks. The compiler
then reads one string: the text *is* the cache key, an edited header can never serve a stale binary, no include path is
passed, and an error still names ``kernels_src/include/pack.cuh:41``.
"""

from __future__ import annotations

import functools
import importlib.resources
import os
import re
from dataclasses import dataclass, field
from pathlib import Path

from jitkern import settings
from jitkern.errors import ArgumentError, ToolchainError

_INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"]+)"', re.MULTILINE)
_SYSTEM_INCLUDE = re.compile(r"^[ \t]*#[ \t]*include[ \t]*<([^>]+)>")
_LINE_MARK = re.compile(r'^#line \d+ "([^"]+)"$')
_PRAGMA_ONCE = re.compile(r"^[ \t]*#[ \t]*pragma[ \t]+once[^\n]*$", re.MULTILINE)


@dataclass(frozen=True)
class Text:
    """A flattened kernel text.

    Attributes:
        name: the kernel's name, ``merge_attn_states``.
        flat: what the compiler gets.
        system_headers: names in ``#include <...>``; empty for every kernel that jitkern ships, on a GPU.
        originals: (label, text) of files that were changed before they were pasted in, for messages.
    """

    name: str
    flat: str = field(repr=False)  # hundreds of lines, and whoever prints an instance or a call wants none of them
    system_headers: tuple[str, ...]
    originals: tuple[tuple[str, str], ...] = field(default=(), repr=False)


def root() -> Path:
    """The folder of the kernel texts: ``JITKERN_SOURCES_DIR``, else the package's, else a checkout's.

    Raises:
        ToolchainError: there is none.
    """
    chosen = settings.get().sources_dir
    packaged = Path(str(importlib.resources.files("jitkern"))) / "kernels_src"
    candidates = [chosen] if chosen else [packaged, packaged.parent.parent / "kernels_src"]
    for candidate in candidates:
        if os.path.isdir(candidate):
            return candidate
    looked = " or ".join(str(candidate) for candidate in candidates)
    raise ToolchainError(
        f"the kernel texts are missing: no folder {looked}. Reinstall jitkern, or set JITKERN_SOURCES_DIR."
    )


def names() -> list[str]:
    """The kernels that are shipped, sorted."""
    return sorted(path.stem for path in root().glob("*.cu"))


def shipped(name: str) -> Text:
    """The flattened text of a shipped kernel.

    Raises:
        ArgumentError: there is no kernel of that name.
    """
    return _shipped(name, root())


@functools.lru_cache(maxsize=256)
def _shipped(name: str, folder: Path) -> Text:
    path = folder / f"{name}.cu"
    if not os.path.isfile(path):
        raise ArgumentError(f"no kernel {name!r} in {folder}; there are {', '.join(names())}")
    return flatten(name, path.read_text(encoding="utf-8"), f"kernels_src/{name}.cu")


def forget() -> None:
    """Read the files again at the next use (for a kernel author who edits them while the process runs)."""
    _shipped.cache_clear()


def flatten(name: str, text: str, label: str, folder: Path | None = None, before: str = "") -> Text:
    """Paste the quoted includes of ``text`` in, each once.

    Args:
        name: the kernel's name.
        text: the CUDA text.
        label: what errors call it; must not be an absolute path, since it becomes part of the text.
        folder: where quoted includes are looked up before the folder of shipped texts.
        before: text that is put in front, and shares its includes with ``text``.

    Raises:
        ArgumentError: an included file does not exist.
    """
    folders = [folder] if folder else []
    seen = {label}
    parts = [(before, "jitkern"), (text, label)] if before else [(text, label)]
    flat = "\n".join(_paste(part, name, [*folders, root()], folders, seen) for part, name in parts)
    return Text(name, flat, _system_headers(flat))


def _system_headers(flat: str) -> tuple[str, ...]:
    """What a GPU compiler may need from outside. A file called ``.h`` is read by the host compiler only."""
    found, host_only = set(), False
    for line in flat.splitlines():
        mark = _LINE_MARK.match(line)
        if mark:
            host_only = mark[1].endswith(".h")
        elif not host_only and (include := _SYSTEM_INCLUDE.match(line)):
            found.add(include[1])
    return tuple(sorted(found))


def _paste(text: str, label: str, search: list[Path], own: list[Path], seen: set[str]) -> str:
    lines = [f'#line 1 "{label}"']
    for number, line in enumerate(text.splitlines(), start=1):
        found = _INCLUDE.match(line)
        if found is None:
            lines.append("" if _PRAGMA_ONCE.match(line) else line)
            continue
        path = next((folder / found[1] for folder in search if os.path.isfile(folder / found[1])), None)
        if path is None:
            looked = ", ".join(str(folder) for folder in search)
            raise ArgumentError(f'{label}:{number}: #include "{found[1]}" is not in {looked}')
        inner = f"kernels_src/{found[1]}" if path.parent not in own and search[-1] in path.parents else found[1]
        if inner in seen:
            lines.append("")
            continue
        seen.add(inner)
        lines.append(_paste(path.read_text(encoding="utf-8"), inner, search, own, seen))
        lines.append(f'#line {number + 1} "{label}"')
    return "\n".join(lines)
