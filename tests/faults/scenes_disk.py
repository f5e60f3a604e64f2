"""Disks that are full, read-only, failing or forbidden, at each step; users without a home or a name."""

from __future__ import annotations

import errno
import logging
import os
from collections import Counter
from pathlib import Path
from typing import Any

from jitkern import binaries, events, loader, settings
from tests.faults import harness, injected
from tests.faults.conftest import Heard
from tests.faults.scenes_kill import real


def _hear() -> list[str]:
    handler = Heard()
    events.logger.addHandler(handler)
    logging.getLogger().addHandler(logging.NullHandler())  # the program has logging of its own: stderr stays clean
    return handler.lines


def every_step_fails(root: str, name: str) -> dict[str, Any]:
    """Let each file-system call of a cold and of a warm call fail, one at a time."""
    number, compiler, heard = getattr(errno, name), injected.install(), _hear()
    loader.obtain(injected.variant(), injected.TEXT)  # imports are done
    wrong, outcomes, count = list[Any](), Counter[str](), 0
    for warm in (False, True):
        step = 0
        while True:
            place = Path(root) / f"{name}-{warm}-{step}"
            place.mkdir(mode=0o700)
            with settings.override(cache_dir=place):
                binaries.forget()
                events.forget_warnings()
                variant = injected.variant(1)
                if warm:
                    loader.obtain(variant, injected.TEXT)
                    os.utime(next(binaries.store().entries())[0], (1e9, 1e9))  # type: ignore[union-attr]
                    binaries.forget()
                heard.clear()

                def fail(at: int, what: str, step: int = step) -> None:
                    if at == step:
                        raise OSError(number, os.strerror(number), what)

                try:
                    with harness.steps(fail) as seen:
                        binary, how = loader.obtain(variant, injected.TEXT)
                        again = loader.obtain(variant, injected.TEXT)
                    if binary != compiler.expected(variant) or again[0] != binary:
                        wrong.append([step, warm, seen[step : step + 1], how, again[1]])
                    if len(heard) > 1:
                        wrong.append([step, warm, seen[step : step + 1], list(heard)])
                    outcomes["told" if heard else "silent"] += 1
                except BaseException as error:
                    wrong.append([step, warm, seen[step : step + 1], repr(error)])
                binaries.forget()
                # Afterwards, with the disk in order again, there is nothing wrong in the cache.
                heard.clear()
                events.forget_warnings()
                later, _ = loader.obtain(variant, injected.TEXT)
                if later != compiler.expected(variant) or heard:
                    wrong.append([step, warm, "afterwards", list(heard)])
            count += 1
            if len(seen) <= step:
                break
            step += 1
    return {"points": count, "wrong": wrong, "outcomes": dict(outcomes)}


def use(root: str, backend: str = "nvrtc", numbers: list[int] | None = None) -> dict[str, Any]:
    """Get a few real binaries, each twice; what was said, and where it went."""
    heard, got = _hear(), []
    for number in numbers or [1]:
        binary, how = loader.obtain(real(number, backend))
        again, second = loader.obtain(real(number, backend))
        got.append([how, second, binary == again and binary[:4] == b"\x7fELF"])
    place = binaries.store()
    if backend == "cpu":
        loader.get(real(1, backend), loader.CPU)
    return {
        "got": got,
        "heard": list(heard),
        "root": str(place.root) if place else None,
        "mode": oct(place.root.stat().st_mode & 0o777) if place else None,
        "entries": sum(1 for _ in place.entries()) if place else 0,
        "events": events.stats().counts,
    }


def use_shipped() -> str:
    """Get a binary of a shipped kernel; how it was got."""
    return loader.obtain(real(1, "nvrtc"))[1]
