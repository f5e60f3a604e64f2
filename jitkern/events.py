"""What jitkern did: counters, listeners and the one line about a slow compile.

Nothing here is configured at import: the logger ``jitkern`` gets a ``NullHandler`` only, and a handler of its own when
``JITKERN_LOG`` asks for one.
"""

from __future__ import annotations

import contextlib
import logging
import os
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from jitkern import settings

logger = logging.getLogger("jitkern")
logger.addHandler(logging.NullHandler())


@dataclass(frozen=True)
class Event:
    """Something that happened to a variant.

    Attributes:
        kind: ``hit`` (found on disk or kept in memory), ``miss``, ``compiled``, ``loaded``, ``waiting`` (for another
            process, still), ``wait`` (the waiting is over), ``bad_entry`` (damaged, set aside), ``memory_only`` (the
            disk would not take it), ``evicted``, ``late_compile`` (after ``freeze``). A warm call reports nothing.
        variant: the variant's name.
        seconds: how long it took, where that means something.
        detail: free text: why it missed, whom it waited for, what was wrong.
    """

    kind: str
    variant: str
    seconds: float = 0.0
    detail: str = ""


@dataclass
class Stats:
    """Counts since the process started. ``seconds`` has the total time by kind."""

    counts: dict[str, int] = field(default_factory=dict)
    seconds: dict[str, float] = field(default_factory=dict)

    def __getitem__(self, kind: str) -> int:
        return self.counts.get(kind, 0)

    def __str__(self) -> str:
        shown = (
            f"{kind} {n}" + (f" ({self.seconds[kind]:.3f} s)" if self.seconds.get(kind) else "")
            for kind, n in self.counts.items()
        )
        return ", ".join(shown) or "nothing happened"


# Re-entrant: a signal handler that calls jitkern may interrupt the very thread that counts an event.
_lock = threading.RLock()
_stats = Stats()
_listeners: list[Callable[[Event], Any]] = []
_warned: set[str] = set()


def _after_fork() -> None:
    global _lock
    _lock = threading.RLock()  # a thread that held it at the fork is not in the child


os.register_at_fork(after_in_child=_after_fork)


def stats() -> Stats:
    """A copy of the counters: hits, misses, compiles, loads, waits, bad entries, and the seconds they took."""
    with _lock:
        return Stats(dict(_stats.counts), dict(_stats.seconds))


def listen(listener: Callable[[Event], Any]) -> Callable[[], None]:
    """Call ``listener(event)`` for every event from now on. Returns a function that stops it.

    A listener that raises is logged and kept; it never breaks a launch.
    """
    with _lock:
        _listeners.append(listener)

    def stop() -> None:
        with _lock:
            if listener in _listeners:
                _listeners.remove(listener)

    return stop


def report(kind: str, variant: str, seconds: float = 0.0, detail: str = "") -> None:
    """Count an event, log it and tell the listeners."""
    event = Event(kind, variant, seconds, detail)
    with _lock:
        _stats.counts[kind] = _stats.counts.get(kind, 0) + 1
        _stats.seconds[kind] = _stats.seconds.get(kind, 0.0) + seconds
        listeners = tuple(_listeners)
    configure_logging()
    level = logging.INFO if kind == "compiled" else logging.DEBUG
    logger.log(
        level, "%s %s%s%s", kind, variant, f" in {seconds:.3f} s" if seconds else "", f" ({detail})" if detail else ""
    )
    for listener in listeners:
        try:
            listener(event)
        except Exception:
            logger.exception("a listener of jitkern events raised")


def warn_once(topic: str, message: str) -> None:
    """Log a warning the first time that ``topic`` comes up in this process."""
    with _lock:
        if topic in _warned:
            return
        _warned.add(topic)
    configure_logging()
    logger.warning(message)


def forget_warnings() -> None:
    """Let every warning be given again (tests)."""
    with _lock:
        _warned.clear()


def announce(line: str) -> None:
    """Say something that a waiting person wants to know, on stderr, unless ``JITKERN_QUIET`` is set."""
    if settings.get().quiet:
        return
    with contextlib.suppress(OSError, ValueError, AttributeError):  # stderr may be closed, a dead pipe, or not there
        print(f"jitkern: {line}", file=sys.stderr, flush=True)


class _UntilConfigured(logging.Handler):
    """Writes to stderr as long as the program has no handlers of its own; once it has, they are enough."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        with contextlib.suppress(OSError, ValueError, AttributeError):
            print(f"{record.name}: {record.getMessage()}", file=sys.stderr, flush=True)


_configured = False


def configure_logging() -> None:
    """Set the level that ``JITKERN_LOG`` asks for, and speak on stderr where the program has no handlers.

    A level that the program gave the logger ``jitkern`` itself stands, unless the variable asks for another.
    """
    global _configured
    if _configured:
        return
    with _lock:
        if _configured:
            return
        _configured = True
    level = settings.get().log
    if level == "off":
        logger.setLevel(logging.CRITICAL + 1)
    elif level != "warning" or logger.level == logging.NOTSET:
        logger.setLevel(level.upper())
    logger.addHandler(_UntilConfigured())


class SlowNotice:
    """``with SlowNotice(text): ...`` says nothing for a second, then one line to stderr, then how long it took.

    Args:
        text: what is being done.
        reason: finds out why, once it is worth saying.
        after: seconds of silence.
    """

    def __init__(self, text: str, reason: Callable[[], str] | None = None, after: float = 1.0) -> None:
        self._text, self._reason = text, reason
        self._shown = False
        self._timer = threading.Timer(after, self._show)
        self._timer.daemon = True

    def _show(self) -> None:
        self._shown = True
        reason = ""
        with contextlib.suppress(Exception):  # nobody waits for a reason that cannot be found
            reason = f" ({self._reason()})" if self._reason else ""
        announce(f"{self._text}{reason} ...")

    def __enter__(self) -> SlowNotice:
        self._start = time.perf_counter()
        if not settings.get().quiet:
            with contextlib.suppress(RuntimeError):  # no thread to be had (a limit, or the interpreter is ending)
                self._timer.start()
        return self

    def __exit__(self, kind: object, *rest: object) -> None:
        self._timer.cancel()
        if self._shown:
            outcome = "done" if kind is None else "failed"
            announce(f"{self._text}: {outcome} after {time.perf_counter() - self._start:.1f} s")
