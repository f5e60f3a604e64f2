"""From a variant to a function that can be launched.

A function, once loaded, stays for the life of the process: graphs may hold it. The hot path is one dictionary look-up
and takes no lock; a miss is single-flight per variant and device, and other threads wait without holding the
interpreter.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, replace
from typing import Any

from jitkern import binaries, driver, events, modules, sources
from jitkern.binaries import freeze, obtain, store, thaw
from jitkern.errors import CaptureError, LaunchError
from jitkern.flights import Flights
from jitkern.sources import Text
from jitkern.variants import Variant

__all__ = ["CPU", "Function", "forget", "freeze", "get", "obtain", "store", "thaw"]

CPU = -1  # the "device" of the CPU backend


@dataclass(frozen=True)
class Function:
    """A loaded kernel.

    Attributes:
        variant: what it is.
        device: the CUDA device's number, or :data:`CPU`.
        handle: the driver's function handle, or the address of the CPU entry.
        how: ``compiled`` or ``cached``.
        seconds: compiling or reading, and loading.
        keep: whatever has to stay alive with it.
        dynamic_shared: the dynamic shared memory that was announced for it.
    """

    variant: Variant
    device: int
    handle: int
    how: str
    seconds: float
    keep: Any = None
    dynamic_shared: int = 0

    @property
    def attributes(self) -> dict[str, int]:
        """Registers, local bytes and so on, as the driver tells them; empty on the CPU."""
        return {} if self.device == CPU else driver.attributes(self.handle)


_ready: dict[tuple[Variant, int, str], Function] = {}
_flights = Flights()
_forked_with_cuda = False


def _after_fork() -> None:
    """A child cannot use its parent's CUDA: forget those functions, so that the next call says so."""
    global _forked_with_cuda
    if driver.library.cache_info().currsize:  # the driver was started
        _forked_with_cuda = True
    for name in [name for name in _ready if name[1] != CPU]:
        _forked_with_cuda = True
        del _ready[name]


os.register_at_fork(after_in_child=_after_fork)


def forget() -> None:
    """Forget what is loaded, failed or open in this process (tests, a first-call timing). Loaded code stays loaded."""
    _ready.clear()
    binaries.forget()
    sources.forget()


def get(
    variant: Variant,
    device: int,
    stream: int | None = None,
    text: Text | None = None,
    dynamic_shared: int = 0,
) -> Function:
    """The function for a variant on a device, compiled and loaded if need be.

    Args:
        variant: what is wanted.
        device: CUDA device number, or :data:`CPU`.
        stream: the stream that it will be launched on, to refuse a miss during capture.
        text: the kernel's text; default: the shipped one.
        dynamic_shared: the most dynamic shared memory, in bytes, that launches will ask for.

    Raises:
        CaptureError: it is not loaded and a CUDA graph is being captured.
        MissError: it is in no cache and ``JITKERN_MODE`` is ``hit-only``.
        CompileError, ToolchainError, LaunchError: it cannot be made.
    """
    name = (variant, device, "" if text is None else text.flat)
    found = _ready.get(name)
    if found is not None and found.dynamic_shared >= dynamic_shared:
        return found
    if device != CPU:
        _refuse_fork(variant, device)
        _refuse_capture(variant, device, stream)
    with _flights.alone(name):
        found = _ready.get(name)
        if found is None:
            found = _load(variant, device, text or sources.shipped(variant.kernel), dynamic_shared)
        elif found.dynamic_shared < dynamic_shared:
            with driver.current(device):
                driver.prepare(found.handle, variant.symbol, dynamic_shared)
            found = replace(found, dynamic_shared=dynamic_shared)
        _ready[name] = found
        return found


def _refuse_fork(variant: Variant, device: int) -> None:
    if _forked_with_cuda:
        raise LaunchError(
            f"{variant.name} on cuda:{device}: this process was forked from one that had used CUDA, and CUDA does not"
            ' survive that. Start workers with multiprocessing.get_context("spawn"), or fork before the first use'
        )


def _refuse_capture(variant: Variant, device: int, stream: int | None) -> None:
    import torch

    streams = {torch.cuda.current_stream(device).cuda_stream} if torch.cuda.is_initialized() else set()
    if stream is not None:
        streams.add(stream)
    if any(driver.is_capturing(handle) for handle in streams):
        raise CaptureError(
            f"{variant.name} is not loaded on cuda:{device}, and a CUDA graph is being captured: compiling or loading"
            f" now would break the capture. Before it, run\n    {variant.warmup_line(device)}"
        )


def _load(variant: Variant, device: int, text: Text, dynamic_shared: int) -> Function:
    start = time.perf_counter()
    binary, how = obtain(variant, text)
    try:
        handle, keep = modules.load(variant, device, binary, dynamic_shared)
    except LaunchError as error:
        if how != "cached":
            raise
        # A damaged entry can still match its hash if it was damaged before it was written: build it once more.
        binary, how = binaries.rebuild(variant, text, f"it cannot be loaded: {error}"), "compiled"
        handle, keep = modules.load(variant, device, binary, dynamic_shared)
    seconds = time.perf_counter() - start
    events.report("loaded", variant.name, seconds, how)
    return Function(variant, device, handle, how, seconds, keep, dynamic_shared)
