"""Waiting for another process."""

from __future__ import annotations

import os
import signal
import time
from typing import Any

from jitkern import events, loader
from tests.faults import harness, injected


def _holder(seconds: float) -> harness.Child:
    def work() -> Any:
        injected.install(seconds=seconds)
        return loader.obtain(injected.variant(1), injected.TEXT)[1]

    injected.install()
    child = harness.Child(work)
    time.sleep(0.5)
    return child


def wait_for_a_slow_one(root: str) -> dict[str, Any]:
    """Another process compiles for some seconds."""
    child = _holder(3.0)
    how = loader.obtain(injected.variant(1), injected.TEXT)[1]
    child.result()
    return {"how": how, "events": events.stats().counts, "holder": child.pid}


def wait_for_a_stopped_one(root: str) -> dict[str, Any]:
    """Another process was stopped while it compiles, and nobody lets it go on."""
    child = _holder(1.0)
    os.kill(child.pid, signal.SIGSTOP)
    start = time.perf_counter()
    how = loader.obtain(injected.variant(1), injected.TEXT)[1]
    seconds = time.perf_counter() - start
    child.kill(signal.SIGKILL)
    child.result()
    return {"how": how, "seconds": seconds, "holder": child.pid}
