"""From a variant to a function that can be launched: memory, then disk, then compile.

A function, once loaded, stays for the life of the process: graphs may hold it. The hot path is one dictionary look-up and
takes no lock; a miss is single-flight per variant and device, and other threads wait without holding the interpreter.
"""

from __future__ import annotations

import ctypes
import os
import threading
import time
from dataclasses import dataclass
from typing import Any

from jitkern import cache, compilers, driver, events, settings, sources
from jitkern.errors import CaptureError, CompileError, LaunchError, MissError
from jitkern.sources import Text
from jitkern.variants import Variant

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
    """

    variant: Variant
    device: int
    handle: int
    how: str
    seconds: float
    keep: Any = None

    @property
    def attributes(self) -> dict[str, int]:
        """Registers, local bytes and so on, as the driver tells them; empty on the CPU."""
        return {} if self.device == CPU else driver.attributes(self.handle)


_ready: dict[tuple[Variant, int, str], Function] = {}
_flights: dict[tuple[Variant, int, str], threading.Lock] = {}
_failed: dict[str, CompileError] = {}
_guard = threading.Lock()
_store: tuple[Any, cache.Store | None] | None = None


def _after_fork() -> None:
    global _guard
    _guard = threading.Lock()
    _flights.clear()


os.register_at_fork(after_in_child=_after_fork)


def store() -> cache.Store | None:
    """The store in use; looked for again when the settings name another root."""
    global _store
    wish = settings.get().cache_dir
    if _store is None or _store[0] != wish:
        _store = (wish, cache.open_store())
    return _store[1]


def forget() -> None:
    """Forget what is loaded, failed or open in this process (tests, a first-call timing). Loaded code stays loaded."""
    global _store
    with _guard:
        _ready.clear()
        _failed.clear()
        _store = None
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
    if found is not None:
        return found
    if device != CPU:
        _refuse_capture(variant, device, stream)
    with _guard:
        flight = _flights.setdefault(name, threading.Lock())
    with flight:
        found = _ready.get(name)
        if found is None:
            found = _load(variant, device, text or sources.shipped(variant.kernel), dynamic_shared)
            _ready[name] = found
        return found


def _refuse_capture(variant: Variant, device: int, stream: int | None) -> None:
    import torch

    streams = {torch.cuda.current_stream(device).cuda_stream} if torch.cuda.is_initialized() else set()
    if stream is not None:
        streams.add(stream)
    if any(driver.is_capturing(handle) for handle in streams):
        raise CaptureError(
            f"{variant.name} is not loaded on cuda:{device}, and a CUDA graph is being captured: compiling or loading now"
            f" would break the capture. Before it, run\n    {variant.warmup_line(device)}"
        )


def _load(variant: Variant, device: int, text: Text, dynamic_shared: int) -> Function:
    start = time.perf_counter()
    binary, how = obtain(variant, text)
    try:
        handle, keep = _load_binary(variant, device, binary, dynamic_shared)
    except LaunchError:
        if how != "cached":
            raise
        # A damaged entry can still match its hash if it was damaged before it was written: build it once more.
        events.report("bad_entry", variant.name, detail="the driver refused it")
        binary, how = _compile(variant, text, compilers.key_of(variant, text)).binary, "compiled"
        handle, keep = _load_binary(variant, device, binary, dynamic_shared)
    seconds = time.perf_counter() - start
    events.report("loaded", variant.name, seconds, how)
    return Function(variant, device, handle, how, seconds, keep)


def _load_binary(variant: Variant, device: int, binary: bytes, dynamic_shared: int) -> tuple[int, Any]:
    if variant.backend == "cpu":
        return _load_host(variant, binary)
    if variant.backend == "nvcc":
        return _load_nvcc(variant, device, binary, dynamic_shared)
    if settings.get().loader == "cupy":
        return _load_cupy(variant, device, binary, dynamic_shared)
    return driver.load(binary, variant.symbol, device, dynamic_shared), None


def _shared_object(binary: bytes, name: str) -> ctypes.CDLL:
    """Map a shared object out of memory: the bytes that were verified are the bytes that run."""
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC)
    with open(descriptor, "wb", closefd=False) as file:
        file.write(binary)
    # The descriptor stays open: the dynamic loader knows objects by path, and this path must not be used again.
    return ctypes.CDLL(f"/proc/self/fd/{descriptor}", mode=ctypes.RTLD_LOCAL)


def _load_host(variant: Variant, binary: bytes) -> tuple[int, Any]:
    try:
        library = _shared_object(binary, variant.stem)
        entry = getattr(library, variant.symbol)
    except (OSError, AttributeError) as error:
        raise LaunchError(f"loading {variant.name}: {error}") from None
    return ctypes.cast(entry, ctypes.c_void_p).value or 0, library


def _load_nvcc(variant: Variant, device: int, binary: bytes, dynamic_shared: int) -> tuple[int, Any]:
    handle = ctypes.c_void_p()
    try:
        library = _shared_object(binary, variant.stem)
        with driver.current(device):
            result = library.jitkern_function(ctypes.byref(handle))
            if result or not handle.value:
                raise LaunchError(f"loading {variant.name} on cuda:{device}: the CUDA runtime returned error {result}")
            driver.prepare(handle.value, variant.symbol, dynamic_shared)
    except (OSError, AttributeError) as error:
        raise LaunchError(f"loading {variant.name}: {error}") from None
    return handle.value, library


def _load_cupy(variant: Variant, device: int, binary: bytes, dynamic_shared: int) -> tuple[int, Any]:
    import tempfile

    import cupy

    with cupy.cuda.Device(device), tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        module = cupy.RawModule(path=file.name)
        kernel = module.get_function(variant.symbol)
        handle = int(kernel.kernel.ptr)
        driver.prepare(handle, variant.symbol, dynamic_shared)
    return handle, (module, kernel)


def obtain(variant: Variant, text: Text | None = None) -> tuple[bytes, str]:
    """The binary of a variant, and whether it was ``cached`` or ``compiled``. Needs no GPU.

    Raises:
        MissError, CompileError, ToolchainError: as :func:`get`.
    """
    text = text or sources.shipped(variant.kernel)
    start = time.perf_counter()
    key = compilers.key_of(variant, text)
    failed = _failed.get(key.digest)
    if failed is not None:
        raise failed
    mine = store()
    for place in [mine, *cache.read_only_stores()]:
        entry = place.get(key) if place else None
        if entry is not None:
            events.report("hit", variant.name, time.perf_counter() - start, str(entry.path))
            return entry.binary, "cached"
    events.report("miss", variant.name, detail=key.digest[:12])
    if settings.get().mode == "hit-only":
        where = ", ".join(str(place.root) for place in [mine, *cache.read_only_stores()] if place) or "no cache root"
        raise MissError(
            f"{variant.name} is not cached ({where}) and JITKERN_MODE is hit-only. Fill the cache where compiling is"
            f" allowed: jitkern warm {variant.kernel} --target {variant.target}"
        )
    if mine is None:
        return _compile(variant, text, key).binary, "compiled"
    with mine.compiling(key) as theirs:
        if theirs is not None:
            return theirs.binary, "cached"
        artifact = _compile(variant, text, key)
        return artifact.binary, "compiled"


def _compile(variant: Variant, text: Text, key: cache.Key) -> compilers.Artifact:
    compiler = compilers.get(variant.backend)
    start = time.perf_counter()
    try:
        with events.SlowNotice(f"compiling {variant.name} (not in the cache)"):
            artifact = compiler.compile(variant, text)
    except CompileError as error:  # it would come again: remember it instead of compiling again
        _failed[key.digest] = error
        raise
    seconds = time.perf_counter() - start
    events.report("compiled", variant.name, seconds, variant.backend)
    place = store()
    if place is not None:
        meta = {
            "schema": cache.SCHEMA,
            "variant": variant.name,
            "symbol": variant.symbol,
            "options": compiler.options(variant),
            "versions": artifact.versions,
            "milliseconds": round(seconds * 1000, 1),
            "created": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        }
        place.publish(key, artifact.binary, compiler.binary_name, text.flat, meta)
    return artifact

