"""``meta.json``: what is known of an entry, in a form in which every byte counts.

The last line holds the SHA-256 of all that comes before it. Without it, a flipped bit in the manifest's own numbers
would go unseen, and the manifest is what says which binary is the right one.
"""

from __future__ import annotations

import hashlib
import json
import re
from typing import Any

from jitkern.cache.files import BadFileError

NAME = "meta.json"
LARGEST = 1 << 20
_FOOTER = ',\n "~sha256": "%s"\n}\n'
_FOOTER_LENGTH = len(_FOOTER % ("0" * 64))
_BINARY_NAME = re.compile(r"kernel\.[a-z]{1,8}")


def encode(meta: dict[str, Any]) -> bytes:
    """The bytes of a manifest."""
    body = json.dumps(meta, indent=1, sort_keys=True).removesuffix("\n}").encode()
    return body + (_FOOTER % hashlib.sha256(body).hexdigest()).encode()


def decode(raw: bytes, digest: str | None = None) -> dict[str, Any]:
    """Read a manifest.

    Args:
        raw: the file's bytes.
        digest: that of the key that it must be of; None: any.

    Raises:
        BadFileError: it is damaged, or of another key.
    """
    body = raw[:-_FOOTER_LENGTH]
    if raw[len(body) :] != (_FOOTER % hashlib.sha256(body).hexdigest()).encode():
        raise BadFileError(f"{NAME} does not match its SHA-256")
    try:
        meta = json.loads(body + b"\n}")
        right = isinstance(meta["digest"], str) and isinstance(meta["sha256"], str) and isinstance(meta["key"], dict)
        right = right and type(meta["size"]) is int and _BINARY_NAME.fullmatch(meta["binary"]) is not None
    except (ValueError, KeyError, TypeError, RecursionError):
        right = False
    if not right:
        raise BadFileError(f"{NAME} is no manifest of an entry")
    if digest is not None and meta["digest"] != digest:
        raise BadFileError(f"{NAME} is of another key")
    found: dict[str, Any] = meta
    return found
