"""Keys and entries."""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCHEMA = 1
DIGEST_CHARS = 20


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
        object.__setattr__(self, "digest", hashlib.sha256(canonical.encode(errors="surrogatepass")).hexdigest())

    @property
    def folder(self) -> str:
        """The entry's path below the versioned root. In ASCII: names have a limit in bytes."""
        stem = re.sub(r"[^A-Za-z0-9_.-]", "_", self.stem)[:120]
        return f"{self.target}/{stem}-{self.digest[:DIGEST_CHARS]}"


@dataclass(frozen=True)
class Entry:
    """A verified binary with what is known of it."""

    binary: bytes
    meta: dict[str, Any]
    path: Path | None = None
