"""Bundles: entries in one file, to carry from where compiling is allowed to where it is not.

The file is a line ``jitkern-bundle 1 <manifest's bytes> <its SHA-256> <signature or ->``, the manifest as JSON, and
the files' bytes one after the other. The manifest names each file's size and SHA-256; an Ed25519 signature covers the
manifest, and so everything. Nothing in a bundle says where it goes: folders are made from what is checked.
"""

from __future__ import annotations

import fnmatch
import hashlib
import json
import os
import re
import time
import uuid
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitkern import cache, settings, signing, variants
from jitkern.cache import files, manifest
from jitkern.errors import ArgumentError, CacheError

_MAGIC = "jitkern-bundle"
_FORMAT = 1
_HEADER_BYTES = 300
_MOST_MANIFEST = 1 << 26
_NAME = re.compile(r"[A-Za-z0-9_.-]{1,160}")
_FILE = re.compile(r"kernel\.[a-z]{1,8}|meta\.json")


@dataclass(frozen=True)
class Report:
    """What a bundle holds, or what was made of it.

    Attributes:
        path: the file.
        entries: ``target/name`` of each.
        bytes: of the whole file.
        signed: whether its signature was checked against a key, and was right.
        added: how many entries an import put into the cache that were not there.
    """

    path: Path
    entries: list[str]
    bytes: int
    signed: bool
    added: int = 0


def export_bundle(
    path: Path,
    targets: Iterable[str] = (),
    pattern: str = "*",
    key: Path | None = None,
    roots: Iterable[cache.Store] | None = None,
) -> Report:
    """Write entries to a bundle.

    Args:
        path: the file to make.
        targets: ``sm_90`` and so on; none: all.
        pattern: which entries, a shell pattern for their names: ``merge_attn_states-*``.
        key: a file with an Ed25519 private key (PEM) to sign with.
        roots: where to take entries from; default: the cache in use.

    Raises:
        CacheError: nothing fits, an entry is damaged, or the file cannot be written.
    """
    chosen = {variants.check_target(target) for target in targets}
    if roots is None:
        place = cache.open_store()
        roots = [place] if place else []
    listed: list[dict[str, Any]] = []
    blobs: list[bytes] = []
    for place in roots:
        for folder, _, _ in sorted(place.entries()):
            if (chosen and folder.parent.name not in chosen) or not fnmatch.fnmatchcase(folder.name, pattern):
                continue
            content = _content(place, folder)
            listed.append(_describe(folder, content))
            blobs += content.values()
    if not listed:
        where = ", ".join(sorted(chosen)) or "any target"
        raise CacheError(f"nothing to export: no entry {pattern!r} for {where}; jitkern warm makes some")
    created = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    text = json.dumps({"created": created, "entries": listed}, sort_keys=True).encode()
    signature = signing.sign(text, key).hex() if key else "-"
    header = f"{_MAGIC} {_FORMAT} {len(text)} {hashlib.sha256(text).hexdigest()} {signature}\n".encode()
    _write(path, [header, text, *blobs])
    names = [f"{item['target']}/{item['name']}" for item in listed]
    return Report(path, names, path.stat().st_size, key is not None)


def verify_bundle(path: Path, key: Path | None = None) -> Report:
    """Check a bundle: every hash, every entry against its own manifest and key, and the signature.

    Args:
        path: the bundle.
        key: a file with the Ed25519 public key (PEM) that it must be signed with; default: ``JITKERN_BUNDLE_KEY``. With
            neither, a signature is not asked for.

    Raises:
        CacheError: it is damaged, or not signed with that key.
    """
    found = list(_read(path, key))
    return Report(path, [item[0] for item in found], path.stat().st_size, bool(found) and found[0][3])


def import_bundle(path: Path, key: Path | None = None, store: cache.Store | None = None) -> Report:
    """Put a bundle's entries into the cache, after everything in it was checked.

    Args:
        path: the bundle.
        key: as for :func:`verify_bundle`.
        store: where to put them; default: the cache in use.

    Raises:
        CacheError: the bundle is refused, and nothing was taken from it; or the cache cannot be written to.
    """
    place = store or cache.open_store()
    if place is None or place.read_only:
        raise CacheError(
            f"cannot import {path}: there is no cache folder that can be written to; jitkern doctor says why"
        )
    everything = list(_read(path, key))  # all of it is checked before any of it is used
    added = 0
    for name, digest, content, _ in everything:
        if _holds(place, name, digest):
            continue
        try:
            place.adopt(name, digest, content)
        except OSError as error:
            raise CacheError(f"importing {path} stopped after {added} entries: {error}") from None
        added += 1
    names = [item[0] for item in everything]
    return Report(path, names, path.stat().st_size, bool(everything) and everything[0][3], added)


def _holds(place: cache.Store, name: str, digest: str) -> bool:
    try:
        return place.read(place.base / name, digest) is not None
    except (cache.BadFileError, OSError):
        return False  # what is there gives way to the good one


def _content(place: cache.Store, path: Path) -> dict[str, bytes]:
    """The files of an entry, checked."""
    try:
        folder = os.open(path, files.DIRECTORY_FLAGS)
        try:
            raw = files.read(folder, manifest.NAME, place.owners, most=manifest.LARGEST)
            meta = manifest.decode(raw)
            text = "kernel.cpp" if path.parent.name == "cpu" else "kernel.cu"
            content = {name: files.read(folder, name, place.owners) for name in (text, meta["binary"])}
        finally:
            os.close(folder)
        content[manifest.NAME] = raw
        _check_entry(path.parent.name, path.name, meta["digest"], content)
    except (cache.BadFileError, OSError) as error:
        raise CacheError(f"cannot export {path}: {error}") from None
    return content


def _describe(path: Path, content: dict[str, bytes]) -> dict[str, Any]:
    digest = manifest.decode(content[manifest.NAME])["digest"]
    listed = [[name, len(data), hashlib.sha256(data).hexdigest()] for name, data in content.items()]
    return {"target": path.parent.name, "name": path.name, "digest": digest, "files": listed}


def _check_entry(target: str, name: str, digest: str, content: dict[str, bytes]) -> None:
    """Whether files are the entry that they claim to be: binary, manifest, and the key with the text in it."""
    meta = manifest.decode(content.get(manifest.NAME, b""), digest)
    binary = content.get(meta["binary"], b"")
    if len(binary) != meta["size"] or hashlib.sha256(binary).hexdigest() != meta["sha256"]:
        raise cache.BadFileError(f"{meta['binary']} does not match its SHA-256")
    texts = [data for file, data in content.items() if file not in (manifest.NAME, meta["binary"])]
    if len(texts) != 1 or hashlib.sha256(texts[0]).hexdigest() != meta["key"].get("text"):
        raise cache.BadFileError("the text is not the one of the key")
    try:
        parts = meta["key"] | {"text": texts[0].decode()}
        # A choice of constants is no binary for a target: its key names the device.
        key = cache.Key(parts, str(parts.get("target", target)), str(meta.get("stem")))
    except ValueError:
        raise cache.BadFileError("the text is no UTF-8") from None
    if key.digest != digest or key.folder != f"{target}/{name}":
        raise cache.BadFileError("its key does not give its name")


def _read(path: Path, key: Path | None) -> Iterator[tuple[str, str, dict[str, bytes], bool]]:
    """(folder, digest, files, signed) of each entry, checked one by one."""
    try:
        with open(path, "rb") as file:
            text, signed = _open(file, path, key)
            for item in text["entries"]:
                yield *_entry(file, item), signed
            if file.read(1):
                raise cache.BadFileError("there is something after its end")
    except OSError as error:
        raise CacheError(f"cannot read the bundle {path}: {error}") from None
    except (cache.BadFileError, ArgumentError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise CacheError(f"the bundle {path} is refused: {error}. Make it again with jitkern cache export") from None


def _open(file: Any, path: Path, key: Path | None) -> tuple[dict[str, Any], bool]:
    """(manifest, whether it is signed with the key)."""
    header = file.readline(_HEADER_BYTES).decode("ascii").split()
    if len(header) != 5 or header[:2] != [_MAGIC, str(_FORMAT)]:
        raise cache.BadFileError(f"it is no {_MAGIC} {_FORMAT}")
    length = int(header[2])
    if not 0 < length <= _MOST_MANIFEST:
        raise cache.BadFileError("its manifest has an impossible size")
    raw = file.read(length)
    if len(raw) != length:
        raise cache.BadFileError("it is cut off")
    if hashlib.sha256(raw).hexdigest() != header[3]:
        raise cache.BadFileError("its manifest does not match its SHA-256")
    public = key or settings.get().bundle_key
    if public is not None:
        if header[4] == "-":
            raise cache.BadFileError(f"it is not signed, and {public} says that it must be")
        if not signing.matches(raw, bytes.fromhex(header[4]), public):
            raise cache.BadFileError(f"its signature is not one of {public}")
    return json.loads(raw), public is not None


def _entry(file: Any, item: dict[str, Any]) -> tuple[str, str, dict[str, bytes]]:
    target, name, digest = item["target"], item["name"], item["digest"]
    if not (_NAME.fullmatch(name) and re.fullmatch("[0-9a-f]{64}", digest)):
        raise cache.BadFileError(f"{name!r} is no entry's name")
    content: dict[str, bytes] = {}
    for file_name, size, sha256 in item["files"]:
        if not _FILE.fullmatch(file_name) or file_name in content or type(size) is not int:
            raise cache.BadFileError(f"{file_name!r} is no file of an entry")
        if not 0 <= size <= files.LARGEST_FILE:
            raise cache.BadFileError(f"{name}/{file_name} has an impossible size")
        content[file_name] = file.read(size)
        if hashlib.sha256(content[file_name]).hexdigest() != sha256:
            raise cache.BadFileError(f"{name}/{file_name} does not match its SHA-256")
    _check_entry(variants.check_target(target), name, digest, content)
    return f"{target}/{name}", digest, content


def _write(path: Path, parts: Iterable[bytes]) -> None:
    """Write a file under another name first, so that nobody sees half of it."""
    staging = path.with_name(f"{path.name}.{uuid.uuid4().hex}.part")
    try:
        files.write(staging, b"".join(parts))
        os.chmod(staging, 0o644)
        os.replace(staging, path)
    except OSError as error:
        files.remove(staging)
        raise CacheError(f"cannot write the bundle {path}: {error}") from None
