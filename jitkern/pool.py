"""Compiling many variants: as many at once as cores, memory and process limits allow."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

from jitkern import binaries, limits
from jitkern.errors import JitkernError
from jitkern.variants import Variant

# What one compile takes at its peak, with room: (bytes, processes and threads).
_NEEDS = {"nvrtc": (256 << 20, 2), "cpu": (512 << 20, 8), "nvcc": (2 << 30, 12)}


@dataclass(frozen=True)
class Outcome:
    """What became of one variant.

    Attributes:
        variant: which.
        how: ``compiled``, ``cached`` or ``failed``.
        seconds: how long it took.
        error: why it failed.
    """

    variant: Variant
    how: str
    seconds: float
    error: JitkernError | None = None


def size(wanted: Iterable[Variant]) -> int:
    """How many of these variants can be compiled at once here."""
    needs = [_NEEDS.get(backend, _NEEDS["nvcc"]) for backend in {variant.backend for variant in wanted}]
    return limits.jobs(max((n[0] for n in needs), default=1), max((n[1] for n in needs), default=1))


def compile_all(
    wanted: Iterable[Variant],
    jobs: int | None = None,
    progress: Callable[[int, int, Outcome], None] | None = None,
) -> list[Outcome]:
    """Put variants into the cache; one that fails does not keep the others from it. Needs no GPU.

    Args:
        wanted: the variants; double ones are made once.
        jobs: how many at once; default: :func:`size`.
        progress: called in this thread after each, with (how many are done, how many there are, the outcome).

    Returns:
        The outcomes in the order of ``wanted``.
    """
    todo = list(dict.fromkeys(wanted))
    done: dict[Variant, Outcome] = {}
    stop = threading.Event()
    pool = ThreadPoolExecutor(jobs or size(todo), thread_name_prefix="jitkern-compile")
    try:
        running = _submit(pool, todo, stop)
        while running:
            finished, running = wait(running, return_when=FIRST_COMPLETED)
            for future in finished:
                outcome = future.result()
                done[outcome.variant] = outcome
                if progress:
                    progress(len(done), len(todo), outcome)
    finally:  # an interrupt: what has not begun does not begin
        stop.set()
        pool.shutdown(wait=False, cancel_futures=True)
    return [done[variant] for variant in todo]


def _submit(pool: ThreadPoolExecutor, todo: list[Variant], stop: threading.Event) -> set[Future[Outcome]]:
    return {pool.submit(_one, variant, stop) for variant in todo}


def _one(variant: Variant, stop: threading.Event) -> Outcome:
    start = time.perf_counter()
    try:
        if stop.is_set():
            raise JitkernError("stopped")
        how = binaries.obtain(variant)[1]
    except JitkernError as error:
        return Outcome(variant, "failed", time.perf_counter() - start, error)
    return Outcome(variant, how, time.perf_counter() - start)
