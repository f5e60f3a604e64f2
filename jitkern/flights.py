"""Threads that want the same thing: one makes it, the others wait; and what is being made when the process ends."""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from collections.abc import Hashable, Iterator


class _Flight:
    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.users = 0
        self.depth = 0


class Flights:
    """One at a time for each name. Names are forgotten when nobody uses them, and all of them in a forked child.

    The locks are re-entrant: a signal handler or a listener may want what its own thread is just making.
    """

    def __init__(self) -> None:
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        # A lock that another thread held at the fork would never be let go in the child.
        self._guard = threading.RLock()
        self._flights: dict[Hashable, _Flight] = {}

    def __len__(self) -> int:
        return len(self._flights)

    @contextlib.contextmanager
    def alone(self, name: Hashable) -> Iterator[bool]:
        """Be the only thread that does this for ``name``; others wait, without the interpreter's lock.

        Yields whether this thread is already doing it, further out.
        """
        with self._guard:
            flight = self._flights.setdefault(name, _Flight())
            flight.users += 1
        try:
            with flight.lock:
                flight.depth += 1
                try:
                    yield flight.depth > 1
                finally:
                    flight.depth -= 1
        finally:
            with self._guard:
                flight.users -= 1
                if not flight.users and self._flights.get(name) is flight:
                    del self._flights[name]


class Ongoing:
    """What is going on in any thread; the interpreter does not end before it has, or before ``patience`` seconds.

    Attributes:
        ending: the interpreter has begun to end.
    """

    def __init__(self, patience: float) -> None:
        self.ending = False
        self._patience = patience
        self._registered = False
        self._reset()
        os.register_at_fork(after_in_child=self._reset)

    def _reset(self) -> None:
        self._guard = threading.RLock()
        self._count = 0

    @contextlib.contextmanager
    def one(self) -> Iterator[None]:
        """Be one of them."""
        with self._guard:
            self._count += 1
            if not self._registered:  # not at import, which does nothing
                self._registered = True
                atexit.register(self._wait)
        try:
            yield
        finally:
            with self._guard:
                self._count -= 1

    def _wait(self) -> None:
        self.ending = True
        deadline = time.monotonic() + self._patience
        while self._count > 0 and time.monotonic() < deadline:
            time.sleep(0.01)


class ForkGate:
    """Sections of foreign code that a fork must not cut in two: their locks would be held for ever in the child.

    A fork waits for the sections of other threads, and new ones wait for the fork. After ``patience`` seconds it goes
    ahead, and the child is told.

    Attributes:
        broken: this process was forked while another thread was in a section.
    """

    def __init__(self, patience: float) -> None:
        self.broken = False
        self._patience = patience
        self._reset()
        os.register_at_fork(
            before=self._before, after_in_parent=self._after_in_parent, after_in_child=self._after_in_child
        )

    def _reset(self) -> None:
        self._condition = threading.Condition(threading.RLock())
        self._inside: dict[int, int] = {}
        self._forks = 0

    @contextlib.contextmanager
    def section(self) -> Iterator[None]:
        """Be in foreign code."""
        me = threading.get_ident()
        with self._condition:
            if me not in self._inside:
                self._condition.wait_for(lambda: not self._forks, self._patience)
            self._inside[me] = self._inside.get(me, 0) + 1
        try:
            yield
        finally:
            with self._condition:
                self._inside[me] -= 1
                if not self._inside[me]:
                    del self._inside[me]
                self._condition.notify_all()

    def _others(self) -> bool:
        return any(thread != threading.get_ident() for thread in self._inside)

    def _before(self) -> None:
        self._condition.acquire()
        self._forks += 1
        self._condition.wait_for(lambda: not self._others(), self._patience)

    def _after_in_parent(self) -> None:
        self._forks -= 1
        self._condition.notify_all()
        self._condition.release()

    def _after_in_child(self) -> None:
        self.broken = self.broken or self._others()
        self._reset()
