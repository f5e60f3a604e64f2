"""Launching: a call whose arguments are bound once, on the caller's device and stream.

A :class:`Call` holds a function, a grid and a packed parameter block. Launching it again with other pointers writes
those pointers into the block and makes one call into the driver: no allocation, no synchronisation, no look-up.
Calls are not shared between threads; ops keep them per thread.
"""

from __future__ import annotations

import ctypes
import functools
import struct
import threading
from collections.abc import Sequence
from typing import Any

from jitkern import driver, settings, streams, switches
from jitkern.errors import ArgumentError, LaunchError
from jitkern.loader import CPU, Function

Dim3 = tuple[int, int, int]
_CONFIG = struct.Struct("7I4xPPI4x")  # CUlaunchConfig: grid, block, dynamic shared memory; stream; attributes, count
_STREAM_AT = 32
_HOST_LAUNCH = struct.Struct("7i")
_PDL_ATTRIBUTE = struct.Struct("I4xI60x")  # CUlaunchAttribute: id, value
_PDL = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
_EARLY = ctypes.create_string_buffer(_PDL_ATTRIBUTE.pack(_PDL, 1))
_BYTES_PER_THREAD = 256 * 1024
_MAX_GRID = (2**31 - 1, 65535, 65535)


def host_threads(work: int) -> int:
    """Threads for a CPU kernel that moves ``work`` bytes: ``JITKERN_THREADS``, else as many as torch uses.

    Making a thread takes as long as moving some 100 KB, so a small call stays on the caller's.
    """
    most = settings.get().threads
    if not most:
        import torch

        most = torch.get_num_threads()
    return min(most, 1 + work // _BYTES_PER_THREAD)


@functools.cache
def launches_early(device: int) -> bool:
    """Whether programmatic stream serialization is used: Hopper and data-centre Blackwell, a driver that captures it.

    Graphs hold such launches since CUDA 12.3; on sm_12x capturing one fails.
    """
    family = int(driver.target(device).removeprefix("sm_")) // 10
    return settings.get().pdl and family in (9, 10) and driver.version() >= 12030


class Call:
    """A kernel with its grid and parameter block, ready to be launched many times.

    Args:
        function: what to launch.
        grid: blocks in x, y and z.
        block: threads in x, y and z.
        layout: the ``struct`` format of the parameter block, native alignment (``"6P12q..."``).
        values: the block's values.
        patch: the format of the leading values that every launch replaces (``"6P"``: six addresses).
        offsets: where each parameter of the kernel begins in the block; default: the block is its only one.
        shared: bytes of dynamic shared memory.
        work: bytes moved, which decide how many threads a CPU kernel gets.
        pdl: let the kernel be launched before its predecessor in the stream has finished; its text must wait for it.
            It hides the launch's latency. Ignored where it does not work (see :func:`launches_early`).

    Raises:
        ArgumentError: the grid is larger than a device takes.
    """

    __slots__ = (
        "_addresses",
        "_config",
        "_device",
        "_entry",
        "_host",
        "_launch",
        "_offsets",
        "_parameters",
        "_patch",
        "_stream",
        "block",
        "function",
        "grid",
    )

    def __init__(
        self,
        function: Function,
        grid: Dim3,
        block: Dim3,
        layout: str,
        values: Sequence[Any],
        patch: str,
        shared: int = 0,
        work: int = 0,
        pdl: bool = False,
        offsets: Sequence[int] = (0,),
    ) -> None:
        for axis, size, most in zip("xyz", grid, _MAX_GRID, strict=True):
            if not 0 < size <= most:
                raise ArgumentError(f"{function.variant.kernel}: {size} blocks in {axis}; a launch takes 1 to {most}")
        self.function, self.grid, self.block = function, grid, block
        self._patch, self._offsets = struct.Struct(patch).pack_into, offsets
        self._device, self._host = function.device, function.device == CPU
        packed = struct.pack(layout, *values)
        if self._host:
            self._entry: Any = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)(function.handle)
            self._connect(packed, _HOST_LAUNCH.pack(*grid, *block, host_threads(work)))
            return
        driver.ensure_context(function.device)
        self._entry = driver.library().cuLaunchKernelEx
        early = pdl and launches_early(function.device)
        attributes = (ctypes.addressof(_EARLY), 1) if early else (0, 0)
        self._connect(packed, _CONFIG.pack(*grid, *block, shared, 0, *attributes))

    def _connect(self, parameters: bytes, config: bytes) -> None:
        """Put the blocks where the driver, or the CPU entry, is told to look for them."""
        self._parameters = ctypes.create_string_buffer(parameters, len(parameters))
        self._config = ctypes.create_string_buffer(config, len(config))
        self._stream = -1
        if self._host:
            self._launch: tuple[Any, ...] = (ctypes.addressof(self._parameters), ctypes.addressof(self._config))
            return
        start = ctypes.addressof(self._parameters)
        self._addresses = (ctypes.c_void_p * len(self._offsets))(*(start + offset for offset in self._offsets))
        handle = ctypes.c_void_p(self.function.handle)
        self._launch = (ctypes.byref(self._config), handle, self._addresses, None)

    def bound(self, *patch: int) -> Call:
        """A call of its own with these leading values: nobody else's launches change it."""
        twin = object.__new__(Call)
        twin.function, twin.grid, twin.block = self.function, self.grid, self.block
        twin._patch, twin._host, twin._entry = self._patch, self._host, self._entry
        twin._device = self._device
        twin._offsets = self._offsets
        twin._connect(self._parameters.raw, self._config.raw)
        twin._patch(twin._parameters, 0, *patch)
        return twin

    def relaunch(self, stream: int) -> None:
        """Launch on a stream (a raw handle; ignored on the CPU) with the parameter block as it is.

        The function's device must be the current one, as :func:`on` sees to.
        """
        if self._host:
            self._entry(*self._launch)
            return
        if stream != self._stream:
            struct.pack_into("P", self._config, _STREAM_AT, stream)
            self._stream = stream
        result = self._entry(*self._launch)
        if result:
            self._fail(result, stream)

    def _fail(self, result: int, stream: int) -> None:
        what = f"launching {self.function.variant.symbol} on cuda:{self.function.device},"
        what += f" grid {self.grid}, block {self.block}, stream {stream:#x}"
        if result == 201:  # no context in this thread, or another device's
            what += " (is a tensor's device the current one?)"
        driver.check(result, what)
        raise LaunchError(what)


def target(device: int) -> str:
    """The target of a device: ``cpu``, or the exact ``sm_XX``."""
    return "cpu" if device == CPU else driver.target(device)


class Recording:
    """``with Recording() as seen: op(...)`` collects the calls that this thread's ops would have launched.

    Attributes:
        calls: them, with what each would have put in front of its parameter block.
        written: the tensors that they would have written to.
    """

    def __init__(self) -> None:
        self.thread = threading.get_ident()
        self.calls: list[tuple[Call, tuple[int, ...]]] = []
        self.written: list[Any] = []

    def __enter__(self) -> Recording:
        global _recording
        _recording_lock.acquire()
        _recording = self
        return self

    def __exit__(self, *_: object) -> None:
        global _recording
        _recording = None
        _recording_lock.release()


_recording: Recording | None = None
_recording_lock = threading.Lock()  # one at a time; other threads launch as ever


def on(call: Call, stream: Any, *patch: Any) -> None:
    """Launch a call on ``stream``, or on the current stream of its device, whatever device is current.

    This is the one way that every op launches, on the CPU too.
    """
    if _recording is not None and _recording.thread == threading.get_ident():
        _recording.calls.append((call, patch))
        return
    call._patch(call._parameters, 0, *patch)
    again(call, stream)


def wrote(*outputs: Any) -> None:
    """Tell autograd that an op has written to tensors, so that it notices if it had kept one for a backward pass."""
    if _recording is None or _recording.thread != threading.get_ident():
        (switches.known or switches.get()).increment(outputs)
    else:
        _recording.written += outputs


def again(call: Call, stream: Any = None) -> None:
    """Launch a call with its parameter block as it is."""
    if call._host:
        call._entry(*call._launch)
        return
    ask = switches.known or switches.get()
    device = call._device
    handle = ask.current_stream(device) if stream is None else streams.stream_handle(stream, device)
    if ask.current_device() != device:
        with ask.on_device(device):
            call.relaunch(handle)
    elif handle != call._stream:
        call.relaunch(handle)
    elif result := call._entry(*call._launch):  # as relaunch does, which would be one more Python call
        call._fail(result, handle)
