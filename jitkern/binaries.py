"""From a variant to its binary: memory, then disk, then the further roots, then the compiler. Needs no GPU.

Of several threads that want the same binary, one makes it; of several processes too, as far as locks work between them.
"""

from __future__ import annotations

import os
import threading
import time
from collections import OrderedDict
from typing import Any

from jitkern import cache, compilers, events, explain, settings, sources, standby
from jitkern.errors import ArgumentError, CompileError, MissError, ToolchainError
from jitkern.flights import Flights, Ongoing
from jitkern.sources import Text
from jitkern.variants import Variant

_KEPT_BYTES = 1 << 26
_MOST_FAILURES = 1024
_LATE = ("event", "warning", "error")

_flights = Flights()
# A library that is unloaded while one of its threads is in it takes the process down: compiles end before it does.
_ongoing = Ongoing(20.0)
_kept: OrderedDict[str, bytes] = OrderedDict()  # what the disk would not take
_failed: OrderedDict[str, CompileError] = OrderedDict()
_roots: tuple[Any, cache.Store | None, list[cache.Store] | None] | None = None
_late: str | None = None
_guard = threading.RLock()


def _after_fork() -> None:
    global _guard
    _guard = threading.RLock()


os.register_at_fork(after_in_child=_after_fork)


def _open() -> tuple[Any, cache.Store | None, list[cache.Store] | None]:
    """(the settings that decide, the store, the further roots once they were needed)."""
    global _roots
    wish = (settings.get().cache_dir, settings.get().cache_roots)
    with _guard:
        if _roots is None or _roots[0] != wish:
            _roots = (wish, cache.open_store(), None)
        return _roots


def store() -> cache.Store | None:
    """The store in use; looked for again when the settings name another root."""
    return _open()[1]


def further_roots() -> list[cache.Store]:
    """The read-only roots that are searched after the store."""
    global _roots
    with _guard:
        wish, mine, further = _open()
        if further is None:
            further = [place for place in cache.read_only_stores() if mine is None or place.root != mine.root]
            _roots = (wish, mine, further)
        return further


def forget() -> None:
    """Forget what failed, what is kept in memory and which roots are open (tests, a first-call timing)."""
    global _roots
    with _guard:
        _failed.clear()
        _kept.clear()
        _roots = None


def freeze(late: str = "warning") -> None:
    """Say that everything is warm: a compile from now on is an ``event``, a ``warning`` (once each) or an ``error``.

    ``JITKERN_FREEZE`` says the same of a whole process, warm-up included; this call goes before it.

    Args:
        late: what a later compile is; the event ``late_compile`` is reported in each case.

    Raises:
        ArgumentError: ``late`` is none of them.
    """
    global _late
    if late not in _LATE:
        raise ArgumentError(f"freeze: late={late!r}; expected {', '.join(_LATE)}")
    _late = late


def thaw() -> None:
    """Take :func:`freeze` back: then what ``JITKERN_FREEZE`` says holds, if anything."""
    global _late
    _late = None


def obtain(variant: Variant, text: Text | None = None) -> tuple[bytes, str]:
    """The binary of a variant, and whether it was ``cached`` or ``compiled``.

    Raises:
        MissError: it is in no cache, and ``JITKERN_MODE`` is ``hit-only`` or :func:`freeze` made that an error.
        CompileError, ToolchainError: it cannot be made.
    """
    text = text or sources.shipped(variant.kernel)
    start = time.perf_counter()
    try:
        key = compilers.key_of(variant, text)
    except ToolchainError as error:
        return _without_compiler(variant, text, error, start), "cached"
    with _flights.alone(key.digest) as nested:
        found = _find(variant, key, start)
        if found is not None:
            return found, "cached"
        events.report("miss", variant.name, detail=key.digest[:12])
        _allow_compile(variant)
        mine = store()
        if mine is None or mine.read_only or nested:  # nested: the lock is this thread's already
            return _compile(variant, text, key), "compiled"
        with mine.compiling(key) as theirs:
            if theirs is not None:
                return theirs.binary, "cached"
            return _compile(variant, text, key), "compiled"


def rebuild(variant: Variant, text: Text, reason: str) -> bytes:
    """Compile once more though there is an entry, since whoever loads it says that it is no good.

    Raises:
        MissError, CompileError, ToolchainError: as :func:`obtain`.
    """
    key = compilers.key_of(variant, text)
    with _flights.alone(key.digest):
        mine = store()
        if mine is not None:
            mine.reject(key, reason)
        with _guard:
            _kept.pop(key.digest, None)
        _allow_compile(variant)
        return _compile(variant, text, key)


def why(variant: Variant, text: Text | None = None) -> explain.Why:
    """Where a variant stands: cached, or which part of its key differs from the nearest entry. Compiles nothing.

    Raises:
        ToolchainError, ArgumentError: its key cannot be made.
    """
    return explain.compare(variant, text or sources.shipped(variant.kernel), places())


def places() -> list[cache.Store]:
    """Where an entry may be: the store, then the further roots."""
    return [place for place in [store(), *further_roots()] if place]


def _find(variant: Variant, key: cache.Key, start: float) -> bytes | None:
    failed = _failed.get(key.digest)
    if failed is not None:  # a copy: each raise would add to the one's traceback
        raise CompileError(str(failed), log=failed.log, source=failed.source)
    kept = _kept.get(key.digest)
    if kept is not None:
        events.report("hit", variant.name, time.perf_counter() - start, "memory")
        return kept
    mine = store()
    entry = mine.get(key) if mine else None
    if entry is None:
        entry = next((found for place in further_roots() if (found := place.get(key))), None)
    if entry is None:
        return None
    events.report("hit", variant.name, time.perf_counter() - start, str(entry.path))
    return entry.binary


def _without_compiler(variant: Variant, text: Text, error: ToolchainError, start: float) -> bytes:
    entry = standby.find(variant, text, places())
    if entry is None:
        if settings.get().mode == "hit-only":
            raise _miss(variant) from None
        raise ToolchainError(
            f"{variant.name} is not cached ({_where()}), and cannot be compiled here: {error}"
        ) from None
    events.report("hit", variant.name, time.perf_counter() - start, f"{entry.path}; its compiler is not here")
    return entry.binary


def _allow_compile(variant: Variant) -> None:
    """Raise if nothing may be compiled now; tell if that was not expected."""
    # Before a lock is made, too: filelock lists its locks at exit, and a new one in another thread upsets that.
    _refuse_at_the_end(variant)
    if settings.get().mode == "hit-only":
        raise _miss(variant)
    late = _late or settings.get().freeze
    if late == "off":
        return
    events.report("late_compile", variant.name, detail=late)
    who = "freeze() said" if _late else f"JITKERN_FREEZE={late} says"
    message = f"{variant.name} is not cached ({_where()}), and {who} that everything is warm;"
    message += f" add {variant.warmup_line()}"
    if line := variant.warm_line():
        message += f", or fill the cache before: {line}"
    if late == "error":
        raise MissError(message)
    if late == "warning":
        events.warn_once(f"late {variant.name}", f"{message}; compiling it now")


def _miss(variant: Variant) -> MissError:
    how = variant.warm_line() or "run the program once"
    return MissError(
        f"{variant.name} is not cached ({_where()}) and JITKERN_MODE is hit-only. Fill the cache where compiling is"
        f" allowed: {how}"
    )


def _where() -> str:
    return ", ".join(str(place.root) for place in places()) or "no cache root"


def _refuse_at_the_end(variant: Variant) -> None:
    if _ongoing.ending and threading.current_thread() is not threading.main_thread():
        raise ToolchainError(f"{variant.name} is not compiled: the interpreter is ending")


def _compile(variant: Variant, text: Text, key: cache.Key) -> bytes:
    compiler = compilers.get(variant.backend)
    start = time.perf_counter()
    _refuse_at_the_end(variant)
    try:
        with _ongoing.one(), events.SlowNotice(f"compiling {variant.name}", lambda: why(variant, text).short):
            artifact = compiler.compile(variant, text)
    except CompileError as error:  # it would come again: remember it instead of compiling again
        with _guard:
            _failed[key.digest] = error
            while len(_failed) > _MOST_FAILURES:
                _failed.popitem(last=False)
        raise
    seconds = time.perf_counter() - start
    place = store()
    meta = {
        "schema": cache.SCHEMA,
        "variant": variant.name,
        "symbol": variant.symbol,
        "options": compiler.options(variant),
        "versions": artifact.versions,
        "milliseconds": round(seconds * 1000, 1),
        "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }
    # A compiler that was replaced while it ran made something that is not what the key says.
    published = None
    if place is not None and not artifact.stale:
        published = place.publish(key, artifact.binary, compiler.binary_name, text.flat, meta)
    if published is None and not artifact.stale:
        with _guard:
            _kept[key.digest] = artifact.binary
            while sum(map(len, _kept.values())) > _KEPT_BYTES and len(_kept) > 1:
                _kept.popitem(last=False)
    # Last, so that a listener that asks for the variant finds it.
    events.report("compiled", variant.name, seconds, variant.backend)
    return artifact.binary
