"""An entry for a machine without its compiler: a container that is only to run what was compiled elsewhere.

The compiler is a part of an entry's key, so that two compilers never share one. Where there is none, nothing can be
compiled either, and an entry that agrees in all other parts (text, options, target, symbol, for host code the ABI) is
what was shipped for this machine.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from jitkern import cache, compilers
from jitkern.cache.files import BadFileError
from jitkern.sources import Text
from jitkern.variants import Variant


def find(variant: Variant, text: Text, places: Iterable[cache.Store]) -> cache.Entry | None:
    """The newest verified entry that agrees in everything but its compiler; None if there is none."""
    wanted = compilers.parts_without_compiler(variant, text)
    wanted["text"] = hashlib.sha256(text.flat.encode()).hexdigest()  # as manifests have it
    found = [
        entry
        for place in places
        for path in _candidates(place, variant)
        if (entry := _read(place, path)) is not None and _agrees(entry.meta["key"], wanted)
    ]
    return max(found, key=lambda entry: str(entry.meta.get("created")), default=None)


def _candidates(place: cache.Store, variant: Variant) -> list[Path]:
    prefix = f"{compilers.stem_of(variant)}-"
    try:
        return [path for path in (place.base / variant.target).iterdir() if path.name.startswith(prefix)]
    except OSError:
        return []


def _read(place: cache.Store, path: Path) -> cache.Entry | None:
    try:
        return place.read(path)
    except (BadFileError, OSError):
        return None


def _agrees(key: dict[str, Any], wanted: dict[str, Any]) -> bool:
    return all(key.get(name) == value for name, value in wanted.items())
