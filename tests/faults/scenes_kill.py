"""Kill, interrupt and stop a process that compiles and publishes, at random times and at every step."""

from __future__ import annotations

import os
import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import Any

from jitkern import binaries, events, loader, settings
from jitkern.variants import Variant
from tests.faults import harness, injected

SIGNALS = {"SIGKILL": signal.SIGKILL, "SIGINT": signal.SIGINT, "SIGSTOP": signal.SIGSTOP}


def real(number: int, backend: str) -> Variant:
    """A variant of a shipped kernel that nobody asked for before."""
    target = "cpu" if backend == "cpu" else "sm_90"
    return Variant("merge_attn_states", "f32", 4, target, (("d", 8 + 4 * number),), backend)


def _obtain(variant: Variant, text: Any = None) -> tuple[str, int, int]:
    signal.signal(signal.SIGINT, signal.default_int_handler)
    binary, how = loader.obtain(variant, text)
    found = events.stats()
    return how, len(binary), found["bad_entry"]


def _leftovers(root: Path) -> str:
    """Where a killed process was, told from what it left."""
    base = root / "v1"
    if list(base.glob("tmp/*")):
        return "while publishing"
    if list(base.glob("*/*/meta.json")):
        return "after publishing"
    if list(base.glob("locks/*.holder")):
        return "while compiling"
    return "nothing left"


def random_points(root: str, backend: str, name: str, points: int, seed: int) -> dict[str, Any]:
    """Hit a compile at random times; then a clean run has to succeed in its normal time."""
    draw, number = random.Random(seed), SIGNALS[name]
    top = Path(root)
    if backend == "cpu":
        import torch.utils.cpp_extension  # noqa: F401  # so that a forked process has it
    loader.obtain(real(0, backend))  # NVRTC is open, torch imported: children then differ in the compile alone
    calm = []
    for step in range(1, 4):
        child = harness.Child(lambda step=step: _obtain(real(step, backend)))  # type: ignore[misc]
        assert child.result()[0] == "ok"
        calm.append(child.seconds)
    normal, where, clean_seconds, wrong = sorted(calm)[1], Counter[str](), [], []
    for point in range(points):
        place = top / str(point)
        place.mkdir(mode=0o700)
        with settings.override(cache_dir=place):
            binaries.forget()
            variant = real(4 + point, backend)
            victim = harness.Child(lambda v=variant: _obtain(v))  # type: ignore[misc]
            time.sleep(draw.uniform(0.0, 1.1 * normal))
            victim.kill(number)
            if number == signal.SIGSTOP:
                victim.wait_for_stop()
            else:
                victim.result()
            where[_leftovers(place)] += 1
            clean = harness.Child(lambda v=variant: _obtain(v))  # type: ignore[misc]
            result = clean.result()
            if result[0] != "ok" or result[1][2] != 0:
                wrong.append([point, result])
            clean_seconds.append(clean.seconds)
            if number == signal.SIGSTOP:
                victim.kill(signal.SIGCONT)
                again = victim.result()
                if again[0] != "ok":
                    wrong.append([point, again])
            # What was published, by whomever, is right.
            later = harness.Child(lambda v=variant: _obtain(v))  # type: ignore[misc]
            last = later.result()
            if last[0] != "ok" or last[1][0] != "cached":
                wrong.append([point, "the entry is not there afterwards"])
    return {"normal": normal, "slowest": max(clean_seconds), "where": dict(where), "wrong": wrong}


def every_step(root: str, name: str) -> dict[str, Any]:
    """Hit an injected compile before each of its file-system calls."""
    number, top, wrong, step = SIGNALS[name], Path(root), [], 0
    compiler = injected.install()
    loader.obtain(injected.variant(), injected.TEXT)  # imports are done
    what: list[str] = []
    while True:
        place = top / str(step)
        place.mkdir(mode=0o700)
        with settings.override(cache_dir=place):
            binaries.forget()
            variant = injected.variant(1)

            def victim_work(step: int = step, variant: Variant = variant) -> Any:
                def action(count: int, _: str) -> None:
                    if count == step:
                        os.kill(os.getpid(), number)

                signal.signal(signal.SIGINT, signal.default_int_handler)
                with harness.steps(action) as seen:
                    loader.obtain(variant, injected.TEXT)
                return seen

            victim = harness.Child(victim_work)
            if number == signal.SIGSTOP:
                victim.wait_for_stop()
                result: tuple[str, Any] = ("stopped", None) if victim.status is None else victim.result()
            else:
                result = victim.result()
            clean = harness.Child(lambda v=variant: _obtain(v, injected.TEXT))  # type: ignore[misc]
            after = clean.result()
            if after[0] != "ok" or after[1][1] != len(compiler.expected(variant)) or after[1][2]:
                wrong.append([step, after])
            if number == signal.SIGSTOP and result[0] == "stopped":
                victim.kill(signal.SIGCONT)
                result = victim.result()
                if result[0] != "ok":
                    wrong.append([step, result])
            later = harness.Child(lambda v=variant: _obtain(v, injected.TEXT))  # type: ignore[misc]
            last = later.result()
            if last[0] != "ok" or last[1][0] != "cached":
                wrong.append([step, "the entry is not there afterwards", last])
            if result[0] == "ok":
                what = result[1]
                if len(what) <= step:  # the process went through without reaching this step
                    return {"steps": len(what), "what": what, "wrong": wrong}
        step += 1


def interrupted_notebook(root: str) -> dict[str, Any]:
    """Interrupt at each step a process that keeps the traceback and simply calls again, as a notebook does."""
    compiler, wrong, step = injected.install(), [], 0
    signal.signal(signal.SIGINT, signal.default_int_handler)
    loader.obtain(injected.variant(), injected.TEXT)
    kept: list[BaseException] = []
    while True:
        place = Path(root) / str(step)
        place.mkdir(mode=0o700)
        with settings.override(cache_dir=place):
            binaries.forget()
            variant, waited = injected.variant(1), events.stats()["wait"]

            def action(count: int, what: str, step: int = step) -> None:
                if count == step:
                    os.kill(os.getpid(), signal.SIGINT)

            try:
                with harness.steps(action) as seen:
                    loader.obtain(variant, injected.TEXT)
            except KeyboardInterrupt as error:
                kept.append(error)
            start = time.perf_counter()
            binary, _ = loader.obtain(variant, injected.TEXT)
            seconds = time.perf_counter() - start
            if binary != compiler.expected(variant) or seconds > 5.0 or events.stats()["wait"] > waited + 1:
                wrong.append([step, seen[step : step + 1], seconds, events.stats()["wait"] - waited])
            left = len(list(place.glob("v1/tmp/*")))
            if left > 1 or len(loader._flights) + len(binaries._flights):
                wrong.append([step, seen[step : step + 1], "left", left])
        if len(seen) <= step:
            return {"steps": step, "interrupts": len(kept), "wrong": wrong}
        step += 1
