"""Why a variant is not in the cache: which part of its key differs from the nearest entry."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jitkern import cache, compilers
from jitkern.cache import files, manifest
from jitkern.sources import Text
from jitkern.variants import Variant

# The parts of a key, those that make two entries most unlike each other first.
_WEIGHTS = {"symbol": 64, "target": 32, "backend": 16, "schema": 8, "text": 4}
_ENTRY = "-DJITKERN_ENTRY="  # the symbol once more


@dataclass(frozen=True)
class Difference:
    """One part of the key that differs.

    Attributes:
        part: its name, ``compiler.version``.
        cached: the value in the nearest entry.
        wanted: the value now.
    """

    part: str
    cached: str
    wanted: str


@dataclass(frozen=True)
class Why:
    """Where a variant stands.

    Attributes:
        variant: which.
        state: ``cached``; ``differs`` from the nearest entry; ``damaged``; or ``absent``, with no entry of this kernel.
        nearest: the entry that was compared, or the variant's own.
        differences: what differs, the weightiest part first.
        roots: where entries were looked for.
    """

    variant: Variant
    state: str
    nearest: Path | None = None
    differences: list[Difference] = field(default_factory=list)
    roots: list[Path] = field(default_factory=list)

    @property
    def short(self) -> str:
        """The reason in a few words."""
        if self.state == "differs":
            return f"the nearest entry differs in {', '.join(item.part for item in self.differences)}"
        return "not in the cache" if self.state == "absent" else self.state

    def __str__(self) -> str:
        name, where = self.variant.name, ", ".join(map(str, self.roots)) or "no cache root"
        if self.state == "cached":
            return f"{name} is cached: {self.nearest}"
        if self.state == "damaged":
            return f"{name} has an entry that is damaged ({self.differences[0].cached}): {self.nearest}"
        if self.state == "absent":
            return f"{name} is not cached, and nothing of {self.variant.kernel} is ({where})"
        other = next((item for item in self.differences if item.part == "backend"), None)
        if other:  # so everything differs, and none of it says why
            return f"{name} is not cached. The nearest entry, {self.nearest}, is of backend {other.cached}"
        lines = [f"{item.part}: {item.cached} in the entry, {item.wanted} now" for item in self.differences]
        return "\n  ".join([f"{name} is not cached. The nearest entry, {self.nearest}, differs in", *lines])


def compare(variant: Variant, text: Text, places: list[cache.Store]) -> Why:
    """Compare a variant with what is in some stores. Changes nothing, compiles nothing.

    Raises:
        ToolchainError, ArgumentError: its key cannot be made.
    """
    key = compilers.key_of(variant, text)
    roots = [place.root for place in places]
    for place in places:
        path = place.base / key.folder
        try:
            if place.read(path, key.digest) is not None:
                return Why(variant, "cached", path, [], roots)
        except (cache.BadFileError, OSError) as error:
            return Why(variant, "damaged", path, [Difference("entry", str(error.args[0]), "")], roots)
    wanted = key.parts | {"text": hashlib.sha256(text.flat.encode()).hexdigest()}
    ranked = [(_distance(meta["key"], wanted), path, meta["key"]) for path, meta in _of_kernel(places, variant)]
    if not ranked:
        return Why(variant, "absent", None, [], roots)
    _, path, found = min(ranked, key=lambda item: (item[0], str(item[1])))
    return Why(variant, "differs", path, _differences(found, wanted, path, text), roots)


def _of_kernel(places: list[cache.Store], variant: Variant) -> Iterator[tuple[Path, dict[str, Any]]]:
    for place in places:
        for path, _, _ in place.entries():
            if path.name.startswith(f"{variant.kernel}-"):
                with contextlib.suppress(cache.BadFileError, OSError):
                    folder = os.open(path, files.DIRECTORY_FLAGS)
                    try:
                        yield (
                            path,
                            manifest.decode(files.read(folder, manifest.NAME, place.owners, most=manifest.LARGEST)),
                        )
                    finally:
                        os.close(folder)


def _flat(value: Any, name: str = "") -> dict[str, Any]:
    """Nested parts under dotted names."""
    if not isinstance(value, dict):
        return {name: value}
    flat: dict[str, Any] = {}
    for key, inner in value.items():
        flat |= _flat(inner, f"{name}.{key}" if name else str(key))
    return flat


def _differing(found: dict[str, Any], wanted: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    a, b = _flat(found), _flat(wanted)
    names = sorted(a.keys() | b.keys(), key=lambda name: (-_WEIGHTS.get(name, 1), name))
    return [(name, a.get(name), b.get(name)) for name in names if a.get(name) != b.get(name)]


def _distance(found: dict[str, Any], wanted: dict[str, Any]) -> int:
    return sum(_WEIGHTS.get(name, 1) for name, _, _ in _differing(found, wanted))


def _differences(found: dict[str, Any], wanted: dict[str, Any], path: Path, text: Text) -> list[Difference]:
    result: list[Difference] = []
    for name, cached, now in _differing(found, wanted):
        if name == "options" and isinstance(cached, list) and isinstance(now, list):
            mine = [option for option in now if option not in cached and not option.startswith(_ENTRY)]
            theirs = [option for option in cached if option not in now and not option.startswith(_ENTRY)]
            if not mine and not theirs and result:  # only the symbol, which was told
                continue
            cached, now = " ".join(theirs) or "nothing more", " ".join(mine) or "nothing more"
        if name == "text":
            cached, now = _first_line(path, text)
        result.append(
            Difference(name, "nothing" if cached is None else str(cached), "nothing" if now is None else str(now))
        )
    return result


def _first_line(path: Path, text: Text) -> tuple[str, str]:
    """The first line in which an entry's text differs, with the file and number that it has there."""
    try:
        source = next(item for item in path.glob("kernel.c*") if item.suffix in (".cu", ".cpp"))
        before = source.read_text(encoding="utf-8").splitlines()
    except (OSError, StopIteration, ValueError):
        return "another text", "this text"
    now = text.flat.splitlines()
    number = next((n for n, (a, b) in enumerate(zip(before, now, strict=False)) if a != b), min(len(before), len(now)))
    file, line = "", 0
    for passed in now[:number]:
        mark = passed.split('"')
        file, line = (
            (mark[1], int(passed.split()[1]) - 1) if passed.startswith("#line ") and len(mark) > 1 else (file, line + 1)
        )
    place = f"{file}:{line + 1}"
    return tuple(f"{place} `{lines[number].strip() if number < len(lines) else ''}`" for lines in (before, now))  # type: ignore[return-value]
