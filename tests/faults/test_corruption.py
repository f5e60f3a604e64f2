"""Damage of every kind on disk: never loaded, always built again, told once."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest

from jitkern import cache, compilers, events, loader
from jitkern.cache import manifest
from jitkern.variants import Variant
from tests.faults import harness, injected
from tests.faults.conftest import the_store

ROUNDS = harness.amount(500, 10_000)


def _truncate(path, other, draw):
    os.truncate(path, draw.randrange(path.stat().st_size))


def _zero(path, other, draw):
    size = path.stat().st_size
    start = draw.randrange(size)
    with open(path, "r+b") as file:
        file.seek(start)
        file.write(bytes(draw.randrange(1, size - start + 1)))


def _flip(path, other, draw):
    data = bytearray(path.read_bytes())
    data[draw.randrange(len(data))] ^= 1 << draw.randrange(8)
    path.write_bytes(data)


def _garble(path, other, draw):
    path.write_bytes(draw.randbytes(path.stat().st_size))


def _extend(path, other, draw):
    with open(path, "ab") as file:
        file.write(draw.randbytes(draw.randrange(1, 100)))


def _empty(path, other, draw):
    os.truncate(path, 0)


def _swap(path, other, draw):
    shutil.copy(other / path.name, path)


def _delete(path, other, draw):
    path.unlink()


def _folder(path, other, draw):
    path.unlink()
    path.mkdir()


def _fifo(path, other, draw):
    path.unlink()
    os.mkfifo(path)


def _link(path, other, draw):
    copy = path.with_name("copy")
    path.rename(copy)
    path.symlink_to(copy)


def _open_to_all(path, other, draw):
    path.chmod(0o666)


FILE_DAMAGE = [_truncate, _zero, _flip, _garble, _extend, _empty, _swap, _delete, _folder, _fifo, _link, _open_to_all]


def _entry_is_file(path, draw):
    shutil.rmtree(path)
    path.write_bytes(b"file")


def _entry_is_link(path, draw):
    shutil.rmtree(path.with_name("moved"), ignore_errors=True)
    path.rename(path.with_name("moved"))
    path.symlink_to(path.with_name("moved"))


def _entry_is_dangling(path, draw):
    shutil.rmtree(path)
    path.symlink_to("nowhere")


def _entry_is_open(path, draw):
    path.chmod(0o777)


FOLDER_DAMAGE = [_entry_is_file, _entry_is_link, _entry_is_dangling, _entry_is_open]


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> injected.Compiler:
    found = injected.Compiler(size=3000)
    monkeypatch.setattr(compilers, "get", lambda backend: found)
    return found


@pytest.mark.timeout(1200)
def test_random_damage_is_never_loaded_always_repaired_and_told_once(
    here, compiler, heard, record_property, monkeypatch
):
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # nothing here is about flushing, and disks are slow
    draw, kinds = random.Random(harness.SEED), Counter[str]()
    variant, other = injected.variant(1), injected.variant(2)
    key, other_key = (compilers.key_of(v, injected.TEXT) for v in (variant, other))
    store = the_store()
    path, other_path = store.base / key.folder, store.base / other_key.folder
    for v in (variant, other):
        loader.obtain(v, injected.TEXT)
    for number in range(ROUNDS):
        before = {name: (path / name).read_bytes() for name in (manifest.NAME, "kernel.cubin")}
        if draw.random() < 0.1:
            damage: Callable[..., None] = draw.choice(FOLDER_DAMAGE)
            damage(path, draw)
        else:
            damage = draw.choice(FILE_DAMAGE)
            name = draw.choice(list(before))
            damage(path / name, other_path, draw)
            file = path / name
            if (
                damage is not _open_to_all
                and not file.is_symlink()
                and file.is_file()
                and file.read_bytes() == before[name]
            ):
                continue  # zeros over zeros are no damage
        kinds[damage.__name__.strip("_")] += 1
        heard.clear()
        events.forget_warnings()
        calls, bad = compiler.calls, events.stats()["bad_entry"]
        binary, how = loader.obtain(variant, injected.TEXT)
        where = f"round {number}, seed {harness.SEED}: {damage.__name__}"
        assert binary == compiler.expected(variant), where
        assert (how, compiler.calls - calls) == ("compiled", 1), where
        assert events.stats()["bad_entry"] - bad == 1, where
        assert len(heard) == 1, f"{where}: {heard}"
        assert "damaged" in heard[0]
        assert store.get(key) is not None, f"{where}: it was not repaired"
        assert loader.obtain(variant, injected.TEXT) == (binary, "cached"), where
    done = sum(kinds.values())
    record_property("measured", f"{done} random corruptions, none loaded, all repaired: {dict(sorted(kinds.items()))}")
    assert done > 0.9 * ROUNDS
    assert not list(store.base.glob("tmp/*"))


@pytest.mark.parametrize("backend", ["nvrtc", "cpu"])
def test_damage_to_real_binaries_is_repaired_by_the_real_compilers(here, backend, heard):
    draw = random.Random(harness.SEED)
    target = "cpu" if backend == "cpu" else "sm_90"
    variant = Variant("merge_attn_states", "f32", 4, target, (("d", 96),), backend)
    good, _ = loader.obtain(variant)
    (path, _, _) = next(the_store().entries())
    for damage in (_truncate, _zero, _flip, _garble, _empty):
        events.forget_warnings()
        heard.clear()
        binary = path / ("kernel.so" if backend == "cpu" else "kernel.cubin")
        before = binary.read_bytes()
        while binary.read_bytes() == before:  # zeros over zeros are no damage
            damage(binary, path, draw)
        assert loader.obtain(variant)[1] == "compiled"
        assert len(heard) == 1
    assert loader.obtain(variant)[1] == "cached"
    if backend == "nvrtc":
        assert loader.obtain(variant)[0] == good


WRONG: list[Any] = [
    [], {}, None, 5, "text", [[1]], {"digest": 5}, {"digest": "x" * 64},
    {"binary": "../kernel.cubin"}, {"binary": "/etc/passwd"}, {"binary": 7}, {"binary": "kernel.cubin\0"},
    {"size": -1}, {"size": True}, {"size": 2.0**70}, {"size": "20"}, {"size": None}, {"size": 10**30},
    {"sha256": None}, {"sha256": ["a"]}, {"key": []}, {"key": "x"}, {"key": None},
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG, ids=[json.dumps(w)[:40] for w in WRONG])
def test_a_manifest_that_matches_its_hash_and_says_nonsense_is_damage(here, compiler, heard, wrong):
    variant = injected.variant()
    loader.obtain(variant, injected.TEXT)
    path = next(the_store().entries())[0] / manifest.NAME
    meta = manifest.decode(path.read_bytes())
    meta.pop("~sha256", None)
    if isinstance(wrong, dict) and wrong:
        path.write_bytes(manifest.encode(meta | wrong))
    else:  # as a whole something else than an object
        body = json.dumps(wrong).encode()
        path.write_bytes(manifest.encode({"x": 1}).replace(b'{\n "x": 1', body))
    assert loader.obtain(variant, injected.TEXT) == (compiler.expected(variant), "compiled")
    assert len(heard) == 1


@pytest.mark.parametrize(
    "content", [b"[" * 500_000, b'{"a":' * 100_000, b"\xff\xfe" * 50, b"9" * 100_000, b"\0" * 5000]
)
def test_a_manifest_that_breaks_parsers_is_damage(here, compiler, heard, content):
    import hashlib

    variant = injected.variant()
    loader.obtain(variant, injected.TEXT)
    path = next(the_store().entries())[0] / manifest.NAME
    path.write_bytes(content + (manifest._FOOTER % hashlib.sha256(content).hexdigest()).encode())
    assert loader.obtain(variant, injected.TEXT)[1] == "compiled"
    assert len(heard) == 1


@pytest.mark.parametrize("name", [manifest.NAME, "kernel.cubin"])
def test_a_file_of_a_terabyte_is_not_read(here, compiler, heard, name):
    variant = injected.variant()
    loader.obtain(variant, injected.TEXT)
    path = next(the_store().entries())[0] / name
    try:
        os.truncate(path, 1 << 40)
    except OSError as error:
        pytest.skip(f"this file system has no sparse files of that size: {error}")
    start = time.perf_counter()
    assert loader.obtain(variant, injected.TEXT)[1] == "compiled"
    assert time.perf_counter() - start < 2.0
    assert len(heard) == 1


def test_an_entry_that_is_good_by_its_hash_and_cannot_be_loaded_is_built_again_once(here, heard):
    variant = Variant("merge_attn_states", "f32", 4, "cpu", (("d", 80),), "cpu")
    loader.obtain(variant)
    from jitkern import sources

    text = sources.shipped(variant.kernel)
    key = compilers.key_of(variant, text)
    store = the_store()
    store.discard(store.base / key.folder)
    store.publish(key, b"\x7fELF but nothing else", "kernel.so", text.flat, {})
    before = events.stats()["compiled"]
    function = loader.get(variant, loader.CPU)
    assert (function.how, events.stats()["compiled"] - before) == ("compiled", 1)
    assert len(heard) == 1
    loader.forget()
    assert loader.get(variant, loader.CPU).how == "cached", "the bad entry stayed"


def test_what_cannot_be_loaded_is_not_rebuilt_where_nothing_may_be_compiled(here):
    from jitkern import settings, sources
    from jitkern.errors import MissError

    variant = Variant("merge_attn_states", "f32", 4, "cpu", (("d", 84),), "cpu")
    key = compilers.key_of(variant, sources.shipped(variant.kernel))
    cache.Store(here).publish(key, b"\x7fELF", "kernel.so", "text", {})
    before = events.stats()["compiled"]
    with settings.override(mode="hit-only"), pytest.raises(MissError):
        loader.get(variant, loader.CPU)
    assert events.stats()["compiled"] == before


def test_a_reader_that_saw_damage_leaves_the_good_entry_that_took_its_place(here, compiler, monkeypatch):
    variant = injected.variant()
    loader.obtain(variant, injected.TEXT)
    store, key = the_store(), compilers.key_of(variant, injected.TEXT)
    path = store.base / key.folder
    os.truncate(path / "kernel.cubin", 5)
    read = store.read

    def slow_read(*args):
        try:
            return read(*args)
        finally:  # another process repairs it between the reader's look and its deed
            monkeypatch.setattr(store, "read", read)
            other = cache.Store(here)
            other.discard(path)
            other.publish(key, compiler.expected(variant), "kernel.cubin", injected.TEXT.flat, {})

    monkeypatch.setattr(store, "read", slow_read)
    assert store.get(key) is None
    assert store.get(key) is not None


def test_a_root_that_vanishes_during_a_publish_is_made_again(here, compiler, heard, monkeypatch):
    from jitkern.cache import files

    write, removed = files.write, list[Any]()

    def write_and_lose(path, *arguments, **more):
        if path.name == manifest.NAME and not removed:
            removed.append(path)
            shutil.rmtree(here)
        write(path, *arguments, **more)

    monkeypatch.setattr(files, "write", write_and_lose)
    variant = injected.variant()
    assert loader.obtain(variant, injected.TEXT)[1] == "compiled"
    assert len(removed) == 1
    assert heard == []
    assert the_store().get(compilers.key_of(variant, injected.TEXT)) is not None
    assert here.stat().st_mode & 0o077 == 0
