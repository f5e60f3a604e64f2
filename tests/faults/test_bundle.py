"""Bundles carry entries, and nothing that is not exactly what it claims to be."""

from __future__ import annotations

import hashlib
import json
import random
import re
from pathlib import Path

import pytest

from jitkern import bundle, cache, compilers, loader, settings
from jitkern.errors import CacheError
from tests.faults import injected


@pytest.fixture
def filled(here, monkeypatch):
    """A cache with six entries of two targets."""
    monkeypatch.setattr(compilers, "get", lambda backend: injected.Compiler(size=2000))
    for target in ("sm_80", "sm_90"):
        for number in range(3):
            loader.obtain(injected.variant(number, target), injected.TEXT)
    return here


@pytest.fixture
def other(tmp_path):
    """An empty cache elsewhere."""
    root = tmp_path / "other"
    root.mkdir(mode=0o700)
    return cache.Store(root)


def content(store: cache.Store) -> dict[str, bytes]:
    return {str(p.relative_to(store.root)): p.read_bytes() for p in store.root.rglob("kernel.*")}


def test_what_is_exported_is_imported(filled, other, tmp_path):
    made = bundle.export_bundle(tmp_path / "b", ["sm_90"])
    assert len(made.entries) == 3
    assert all(name.startswith("sm_90/") for name in made.entries)
    assert bundle.verify_bundle(tmp_path / "b").entries == made.entries
    assert bundle.import_bundle(tmp_path / "b", store=other).added == 3
    assert bundle.import_bundle(tmp_path / "b", store=other).added == 0
    assert content(other) == {k: v for k, v in content(cache.Store(filled)).items() if "sm_90" in k}
    with settings.override(cache_dir=other.root):
        assert loader.obtain(injected.variant(1, "sm_90"), injected.TEXT)[1] == "cached"
        assert loader.obtain(injected.variant(1, "sm_80"), injected.TEXT)[1] == "compiled"


def test_a_pattern_chooses(filled, tmp_path):
    assert len(bundle.export_bundle(tmp_path / "b", pattern="*-n2-*").entries) == 2
    with pytest.raises(CacheError, match="nothing to export"):
        bundle.export_bundle(tmp_path / "b", pattern="other*")


def test_any_byte_that_is_changed_gets_a_bundle_refused(filled, other, tmp_path):
    path, draw = tmp_path / "b", random.Random(5)
    bundle.export_bundle(path)
    good = path.read_bytes()
    places = [*range(0, 40), *(draw.randrange(len(good)) for _ in range(400))]
    unsigned = good.index(b"-\n")  # the word for "no signature" may be any other: no key, no signature
    for place in places:
        if place == unsigned:
            continue
        bad = bytearray(good)
        bad[place] ^= 1 << draw.randrange(8)
        path.write_bytes(bad)
        with pytest.raises(CacheError, match="refused"):
            bundle.import_bundle(path, store=other)
    assert content(other) == {}


@pytest.mark.parametrize("cut", [0, 1, 10, 100, 3000, -1])
def test_a_bundle_that_is_cut_off_or_goes_on_is_refused(filled, other, tmp_path, cut):
    path = tmp_path / "b"
    bundle.export_bundle(path)
    good = path.read_bytes()
    for bad in (good[:cut], good + b"x"):
        path.write_bytes(bad)
        with pytest.raises(CacheError, match="refused"):
            bundle.import_bundle(path, store=other)
    assert content(other) == {}


def remade(path: Path, change) -> None:
    """Change a bundle's manifest as somebody would who can compute hashes."""
    header, rest = path.read_bytes().split(b"\n", 1)
    length = int(header.split()[2])
    text = json.loads(rest[:length])
    change(text["entries"][0])
    raw = json.dumps(text).encode()
    sha256 = hashlib.sha256(raw).hexdigest().encode()
    path.write_bytes(b"jitkern-bundle 1 %d %s -\n" % (len(raw), sha256) + raw + rest[length:])


@pytest.mark.parametrize(
    "change",
    [
        lambda e: e.update(target="../../tmp"),
        lambda e: e.update(name="../x-" + e["digest"][:20]),
        lambda e: e.update(name="/etc/x-" + e["digest"][:20]),
        lambda e: e.update(name="x-" + e["digest"][:20]),
        lambda e: e.update(digest="0" * 64),
        lambda e: e["files"][0].__setitem__(0, "../../kernel.cu"),
        lambda e: e["files"][0].__setitem__(0, "setup.py"),
        lambda e: e["files"][0].__setitem__(1, -1),
        lambda e: e["files"][0].__setitem__(1, 1 << 60),
        lambda e: e["files"][0].__setitem__(1, True),
        lambda e: e["files"].append(e["files"][0]),
        lambda e: e["files"].reverse(),
        lambda e: e.pop("files"),
        lambda e: e.update(target="sm_80" if e["target"] == "sm_90" else "sm_90"),
    ],
)
def test_a_manifest_that_leads_astray_is_refused(filled, other, tmp_path, change):
    path = tmp_path / "b"
    bundle.export_bundle(path)
    remade(path, change)
    with pytest.raises(CacheError, match="refused"):
        bundle.import_bundle(path, store=other)
    assert content(other) == {}
    assert list(tmp_path.glob("kernel*")) == []


def test_a_damaged_entry_is_not_exported(filled, tmp_path):
    next(cache.Store(filled).entries())[0].joinpath("kernel.cu").write_text("another text")
    with pytest.raises(CacheError, match="not the one of the key"):
        bundle.export_bundle(tmp_path / "b")
    assert list(tmp_path.glob("b*")) == []


def test_a_bad_entry_in_the_cache_gives_way_to_the_bundle(filled, other, tmp_path):
    bundle.export_bundle(tmp_path / "b")
    bundle.import_bundle(tmp_path / "b", store=other)
    next(other.entries())[0].joinpath("kernel.cubin").write_bytes(b"bad")
    assert bundle.import_bundle(tmp_path / "b", store=other).added == 1
    assert content(other) == content(cache.Store(filled))


@pytest.fixture
def keys(tmp_path):
    """(private, public, another public) key files."""
    ed25519 = pytest.importorskip(
        "cryptography.hazmat.primitives.asymmetric.ed25519", reason="cryptography is not installed"
    )
    from cryptography.hazmat.primitives import serialization as s

    paths = []
    for name in ("one", "two"):
        key = ed25519.Ed25519PrivateKey.generate()
        (tmp_path / name).write_bytes(key.private_bytes(s.Encoding.PEM, s.PrivateFormat.PKCS8, s.NoEncryption()))
        public = key.public_key().public_bytes(s.Encoding.PEM, s.PublicFormat.SubjectPublicKeyInfo)
        (tmp_path / f"{name}.pub").write_bytes(public)
        paths += [tmp_path / name, tmp_path / f"{name}.pub"]
    return paths[0], paths[1], paths[3]


def test_with_a_key_only_what_was_signed_with_it_is_taken(filled, other, tmp_path, keys):
    private, public, another = keys
    signed, unsigned = tmp_path / "signed", tmp_path / "unsigned"
    assert bundle.export_bundle(signed, key=private).signed
    assert not bundle.export_bundle(unsigned).signed
    assert not bundle.verify_bundle(signed).signed, "without a key nothing can be said of a signature"
    assert bundle.verify_bundle(signed, public).signed
    with pytest.raises(CacheError, match="not signed"):
        bundle.import_bundle(unsigned, public, other)
    with pytest.raises(CacheError, match="signature"):
        bundle.import_bundle(signed, another, other)
    with settings.override(bundle_key=another), pytest.raises(CacheError, match="signature"):
        bundle.import_bundle(signed, store=other)
    assert content(other) == {}
    with settings.override(bundle_key=public):
        assert bundle.import_bundle(signed, store=other).signed


def test_a_signature_covers_all_of_it(filled, other, tmp_path, keys):
    private, public, _ = keys
    path = tmp_path / "b"
    bundle.export_bundle(path, key=private)
    good, draw = path.read_bytes(), random.Random(7)
    for _ in range(200):
        bad = bytearray(good)
        bad[draw.randrange(len(good))] ^= 1 << draw.randrange(8)
        path.write_bytes(bad)
        if re.sub(rb"(?<= )[0-9a-fA-F]{128}(?=\n)", lambda m: m[0].lower(), bytes(bad), count=1) == good:
            continue  # the signature in other letters is the same signature
        with pytest.raises(CacheError):
            bundle.import_bundle(path, public, other)
    assert content(other) == {}


def test_a_key_that_is_none_is_told(filled, tmp_path, keys):
    _, public, _ = keys
    (tmp_path / "junk").write_text("junk")
    with pytest.raises(CacheError, match="no private key"):
        bundle.export_bundle(tmp_path / "b", key=tmp_path / "junk")
    with pytest.raises(CacheError, match="no private key"):
        bundle.export_bundle(tmp_path / "b", key=public)
    assert not (tmp_path / "b").exists()
