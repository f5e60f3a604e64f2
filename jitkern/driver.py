"""The few calls of the CUDA driver that jitkern makes, through ctypes.

CuPy could make them too, but importing it takes longer than everything else of a warm first call together
(``JITKERN_LOADER=cupy`` uses it nevertheless). Nothing is opened before the first use of a GPU.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import threading
from collections.abc import Iterator
from typing import Any

from jitkern.errors import LaunchError, ToolchainError

_ATTRIBUTE_CAPABILITY = (75, 76)  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR, _MINOR
_FUNCTION_ATTRIBUTES = {
    "max_threads": 0,
    "shared_bytes": 1,
    "constant_bytes": 2,
    "local_bytes": 3,
    "registers": 4,
}
_MAX_DYNAMIC_SHARED = 8
_CAPTURE_RELAXED = 2


@functools.cache
def library() -> Any:
    """The driver's library, initialised.

    Raises:
        ToolchainError: there is no driver, or it cannot start.
    """
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError as error:
        raise ToolchainError(f"no CUDA driver here ({error}); a GPU kernel can be compiled but not run") from None
    result = cuda.cuInit(0)
    if result:
        raise ToolchainError(f"the CUDA driver does not start: {_describe(cuda, result)}")
    pointer, size, integer = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
    cuda.cuModuleLoadData.argtypes = (ctypes.POINTER(pointer), ctypes.c_char_p)
    cuda.cuModuleGetFunction.argtypes = (ctypes.POINTER(pointer), pointer, ctypes.c_char_p)
    cuda.cuFuncGetAttribute.argtypes = (ctypes.POINTER(integer), integer, pointer)
    cuda.cuFuncSetAttribute.argtypes = (pointer, integer, integer)
    cuda.cuDevicePrimaryCtxRetain.argtypes = (ctypes.POINTER(pointer), integer)
    cuda.cuCtxSetCurrent.argtypes = (pointer,)
    cuda.cuCtxGetCurrent.argtypes = (ctypes.POINTER(pointer),)
    cuda.cuStreamIsCapturing.argtypes = (pointer, ctypes.POINTER(integer))
    cuda.cuOccupancyMaxActiveBlocksPerMultiprocessor.argtypes = (ctypes.POINTER(integer), pointer, integer, size)
    # cuLaunchKernelEx gets prebuilt pointers only, so it needs no conversion of arguments.
    return cuda


def available() -> bool:
    """Whether there is a driver that starts and a device."""
    count = ctypes.c_int()
    try:
        return library().cuDeviceGetCount(ctypes.byref(count)) == 0 and count.value > 0
    except ToolchainError:
        return False


def _describe(cuda: Any, result: int) -> str:
    name, text = ctypes.c_char_p(), ctypes.c_char_p()
    cuda.cuGetErrorName(result, ctypes.byref(name))
    cuda.cuGetErrorString(result, ctypes.byref(text))
    return f"{(name.value or b'error').decode()} ({result}): {(text.value or b'unknown').decode()}"


def check(result: int, what: str) -> None:
    """Raise :class:`LaunchError` naming the driver's error unless ``result`` is 0."""
    if result:
        raise LaunchError(f"{what}: {_describe(library(), result)}")


def version() -> int:
    """The newest CUDA version that the driver knows, as 1000 * major + 10 * minor."""
    number = ctypes.c_int()
    check(library().cuDriverGetVersion(ctypes.byref(number)), "asking the driver for its version")
    return number.value


@functools.cache
def target(device: int) -> str:
    """The target of a device, ``sm_90``."""
    digits = []
    for attribute in _ATTRIBUTE_CAPABILITY:
        value = ctypes.c_int()
        check(library().cuDeviceGetAttribute(ctypes.byref(value), attribute, device), f"asking device {device}")
        digits.append(str(value.value))
    return f"sm_{''.join(digits)}"


@functools.cache
def _primary_context(device: int) -> ctypes.c_void_p:
    context = ctypes.c_void_p()
    check(library().cuDevicePrimaryCtxRetain(ctypes.byref(context), device), f"opening device {device}")
    return context


@contextlib.contextmanager
def current(device: int) -> Iterator[None]:
    """Make a device's primary context current in this thread, and bring the former back afterwards."""
    cuda, before = library(), ctypes.c_void_p()
    cuda.cuCtxGetCurrent(ctypes.byref(before))
    check(cuda.cuCtxSetCurrent(_primary_context(device)), f"using device {device}")
    try:
        yield
    finally:
        if before.value:
            cuda.cuCtxSetCurrent(before)


def ensure_context(device: int) -> None:
    """Give this thread a current context if it has none (a new thread that only ever saw finished tensors)."""
    cuda, now = library(), ctypes.c_void_p()
    cuda.cuCtxGetCurrent(ctypes.byref(now))
    if not now.value:
        check(cuda.cuCtxSetCurrent(_primary_context(device)), f"using device {device}")


def is_capturing(stream: int) -> bool:
    """Whether a CUDA graph is being captured from a stream. Legal at any time, and changes nothing."""
    status = ctypes.c_int()
    result = library().cuStreamIsCapturing(ctypes.c_void_p(stream), ctypes.byref(status))
    # The legacy stream cannot be asked while another stream captures in global mode; it cannot be capturing either.
    return result == 0 and status.value != 0


_loading = threading.Lock()


def load(binary: bytes, symbol: str, device: int, dynamic_shared: int = 0) -> int:
    """Load a cubin on a device and return the function's handle. The module stays for the life of the process.

    Args:
        binary: the cubin.
        symbol: the entry symbol.
        device: the device's number.
        dynamic_shared: bytes of dynamic shared memory that launches may ask for; above 48 KiB this has to be announced.

    Raises:
        LaunchError: the driver refuses.
    """
    cuda = library()
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    with _loading, current(device), _relaxed_capture(cuda):
        check(cuda.cuModuleLoadData(ctypes.byref(module), binary), f"loading {symbol} on device {device}")
        check(cuda.cuModuleGetFunction(ctypes.byref(function), module, symbol.encode()), f"finding {symbol}")
        prepare(function.value or 0, symbol, dynamic_shared)
    return function.value or 0


def prepare(function: int, symbol: str, dynamic_shared: int) -> None:
    """Have the driver load a function's code now, and announce its dynamic shared memory."""
    cuda, handle = library(), ctypes.c_void_p(function)
    # With lazy loading the code would otherwise come with the first launch, which may be inside a capture.
    if hasattr(cuda, "cuFuncLoad"):
        check(cuda.cuFuncLoad(handle), f"loading the code of {symbol}")
    if dynamic_shared > 48 * 1024:
        what = f"{symbol}: asking for {dynamic_shared} bytes of dynamic shared memory"
        check(cuda.cuFuncSetAttribute(handle, _MAX_DYNAMIC_SHARED, dynamic_shared), what)


@contextlib.contextmanager
def _relaxed_capture(cuda: Any) -> Iterator[None]:
    """Loading a module must not invalidate a capture that another thread has under way."""
    mode = ctypes.c_int(_CAPTURE_RELAXED)
    exchanged = cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode)) == 0
    try:
        yield
    finally:
        if exchanged:
            cuda.cuThreadExchangeStreamCaptureMode(ctypes.byref(mode))


def attributes(function: int) -> dict[str, int]:
    """Registers, shared and local bytes and the like of a loaded function."""
    values = {}
    for name, number in _FUNCTION_ATTRIBUTES.items():
        value = ctypes.c_int()
        check(
            library().cuFuncGetAttribute(ctypes.byref(value), number, ctypes.c_void_p(function)), f"asking for {name}"
        )
        values[name] = value.value
    return values
