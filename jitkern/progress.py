"""Progress of a long step: one line that is rewritten on a terminal, plain lines elsewhere."""

from __future__ import annotations

import sys
import time
from types import TracebackType


class Progress:
    """``with Progress("demo") as step: step("compiling")`` shows steps on stderr, the time each took with the next."""

    def __init__(self, title: str, quiet: bool = False) -> None:
        self._title, self._quiet = title, quiet
        self._terminal = sys.stderr is not None and sys.stderr.isatty()
        self._start = time.perf_counter()

    def __call__(self, text: str) -> None:
        """Say what is being done now."""
        if self._quiet or sys.stderr is None:
            return
        line = f"{self._title} [{time.perf_counter() - self._start:5.1f} s] {text}"
        print(
            f"\r\x1b[K{line}" if self._terminal else line,
            end="" if self._terminal else "\n",
            file=sys.stderr,
            flush=True,
        )

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._terminal and not self._quiet:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)
