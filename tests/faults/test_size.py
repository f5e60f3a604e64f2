"""The cap: a year of daily edits, entries in use, clocks that are wrong, a cache that is trimmed by many."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import pytest

from jitkern import binaries, cache, compilers, events, loader, pool, settings, sources
from jitkern.cache import eviction
from tests.faults import harness, injected
from tests.faults.conftest import the_store

DAYS = harness.amount(60, 365)
PER_DAY = 20
KILOBYTES = 40


@pytest.fixture
def quick(monkeypatch):
    """Nothing here is about flushing."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


def age(root: Path, seconds: float) -> None:
    """Let time pass."""
    for path, info, _ in cache.Store(root).entries():
        os.utime(path, (info.st_mtime - seconds, info.st_mtime - seconds))


def total(root: Path) -> int:
    return sum(size for _, _, size in cache.Store(root).entries())


def test_a_year_of_daily_edits_stays_below_the_cap(here, quick, monkeypatch, record_property):
    cap, largest, kept_today = 4 << 20, 0, 0
    looks, trim = [], eviction.trim

    def counted(*arguments):
        looks.append(arguments)
        return trim(*arguments)

    monkeypatch.setattr(eviction, "trim", counted)
    with settings.override(cache_max=cap):
        for day in range(DAYS):
            compiler = injected.Compiler(size=KILOBYTES * 1000, version=str(day))  # every text was edited
            monkeypatch.setattr(compilers, "get", lambda backend, c=compiler: c)
            for number in range(PER_DAY):
                loader.obtain(injected.variant(number), injected.TEXT)
            largest = max(largest, total(here))
            binaries.forget()
            kept_today += sum(loader.obtain(injected.variant(n), injected.TEXT)[1] == "cached" for n in range(PER_DAY))
            age(here, 86_400)
    made = DAYS * PER_DAY * KILOBYTES / 1000
    locks = len(list(here.glob("v1/locks/*")))
    record_property(
        "measured",
        f"{DAYS} days of {PER_DAY} edited variants: {made:.0f} MB made, at most {largest / 1e6:.2f} MB of"
        f" {cap / 1e6:.2f} MB taken, {len(looks)} looks at the whole cache in {DAYS * PER_DAY} publishes",
    )
    assert largest <= cap
    assert largest > 0.8 * cap
    assert kept_today == DAYS * PER_DAY, "today's work was evicted"
    assert len(looks) < DAYS * PER_DAY / 5
    assert locks <= DAYS * PER_DAY


def test_the_least_recently_used_goes_first_and_a_use_counts(here, quick, monkeypatch):
    monkeypatch.setattr(compilers, "get", lambda backend: injected.Compiler())
    store = the_store()
    for number in range(10):
        loader.obtain(injected.variant(number), injected.TEXT)
    paths = {
        number: store.base / compilers.key_of(injected.variant(number), injected.TEXT).folder for number in range(10)
    }
    for number, path in paths.items():
        os.utime(path, (time.time() - 10_000 + number, time.time() - 10_000 + number))
    assert store.get(compilers.key_of(injected.variant(0), injected.TEXT)) is not None  # the oldest is used
    each = total(here) // 10
    assert store.trim(total(here) - 3 * each + 1) == 3
    gone = {number for number, path in paths.items() if not path.exists()}
    assert gone == {1, 2, 3}


@pytest.mark.parametrize("offset", [0.0, 100.0, -100.0, 1e8])
def test_an_entry_in_use_stays_whatever_the_cap(here, quick, monkeypatch, offset):
    monkeypatch.setattr(compilers, "get", lambda backend: injected.Compiler())
    loader.obtain(injected.variant(), injected.TEXT)
    store = the_store()
    path = next(store.entries())[0]
    os.utime(path, (time.time() + offset, time.time() + offset))  # a clock that runs ahead, or one far behind
    assert store.trim(0) == 0
    assert path.exists()
    os.utime(path, (time.time() - 200, time.time() - 200))
    assert store.trim(0) == 1


def test_a_cap_of_nothing_still_works(here, quick, monkeypatch):
    compiler = injected.Compiler()
    monkeypatch.setattr(compilers, "get", lambda backend: compiler)
    with settings.override(cache_max=0):
        for number in range(20):
            assert loader.obtain(injected.variant(number), injected.TEXT) == (
                compiler.expected(injected.variant(number)),
                "compiled",
            )
            age(here, 1000)
        assert sum(1 for _ in the_store().entries()) == 1


def test_a_cache_that_was_filled_before_anybody_counted_is_trimmed(here, quick, monkeypatch):
    monkeypatch.setattr(compilers, "get", lambda backend: injected.Compiler())
    for number in range(10):
        loader.obtain(injected.variant(number), injected.TEXT)
    age(here, 1000)
    os.unlink(here / "v1/grown")
    with settings.override(cache_max=total(here) // 2):
        loader.obtain(injected.variant(10), injected.TEXT)
        assert total(here) <= settings.get().cache_max
    assert events.stats()["evicted"] >= 1


def test_old_locks_and_leftovers_are_swept_by_a_publish(here, quick, monkeypatch):
    monkeypatch.setattr(compilers, "get", lambda backend: injected.Compiler())
    loader.obtain(injected.variant(0), injected.TEXT)
    base = here / "v1"
    old = [base / "tmp" / "dead", base / "locks" / "dead.lock", base / "locks" / "dead.holder"]
    old[0].mkdir()
    (old[0] / "kernel.cu").write_text("")
    for path in old[1:]:
        path.write_text("")
    young = base / "tmp" / "alive"
    young.mkdir()
    for path in old:
        os.utime(path, (time.time() - 90_000, time.time() - 90_000))
    binaries.forget()  # as a new process
    loader.obtain(injected.variant(1), injected.TEXT)
    assert [path.name for path in old if path.exists()] == []
    assert young.exists()


def test_many_threads_without_a_disk(here, monkeypatch):
    monkeypatch.setattr(compilers, "get", lambda backend: injected.Compiler(size=250_000))
    monkeypatch.setattr(sources, "shipped", lambda name: injected.TEXT)
    monkeypatch.setattr(binaries, "_KEPT_BYTES", 1 << 24)
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with settings.override(cache_dir=Path("/proc/none")):
            binaries.forget()
            outcomes = pool.compile_all(map(injected.variant, range(600)), jobs=16)
    finally:
        sys.setswitchinterval(before)
    assert {item.how for item in outcomes} == {"compiled"}


def test_a_thousand_texts_in_memory_are_bounded(here, quick, monkeypatch):
    monkeypatch.setattr(compilers, "get", lambda backend: injected.Compiler(size=1 << 20))
    with settings.override(cache_dir=Path("/proc/none")):
        binaries.forget()
        for number in range(100):
            loader.obtain(injected.variant(number), injected.TEXT)
        assert sum(map(len, binaries._kept.values())) <= binaries._KEPT_BYTES
        assert loader.obtain(injected.variant(99), injected.TEXT)[1] == "cached"
