"""Single flight: of several threads that want the same thing, one makes it and the others wait for it."""

from __future__ import annotations

import contextlib
import os
import threading
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
