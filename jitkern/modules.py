"""From a binary to a handle: through the driver, CuPy, or the dynamic loader. What is loaded stays loaded."""

from __future__ import annotations

import contextlib
import ctypes
import itertools
import os
import tempfile
from pathlib import Path
from typing import Any

from jitkern import driver, settings
from jitkern.errors import LaunchError
from jitkern.variants import Variant

_loads = itertools.count()


def load(variant: Variant, device: int, binary: bytes, dynamic_shared: int) -> tuple[int, Any]:
    """(handle, what has to stay alive with it).

    Raises:
        LaunchError: the driver or the dynamic loader refuses.
    """
    if variant.backend == "cpu":
        return _load_host(variant, binary)
    if variant.backend == "nvcc":
        return _load_nvcc(variant, device, binary, dynamic_shared)
    if settings.get().loader == "cupy":
        return _load_cupy(variant, device, binary, dynamic_shared)
    return driver.load(binary, variant.symbol, device, dynamic_shared), None


def shared_object(binary: bytes, name: str) -> ctypes.CDLL:
    """Map a shared object: from memory, so that the bytes that were verified are the bytes that run.

    Where that is not possible (no memfd, no ``/proc``, a kernel that runs nothing from memory), from a private file.

    Raises:
        OSError: it cannot be mapped.
    """
    problems = []
    for way in (_map_from_memory, _map_from_file):
        try:
            return way(binary, name)
        except (OSError, AttributeError) as error:
            problems.append(str(error))
    raise OSError("; ".join(dict.fromkeys(problems)))


def _map_from_memory(binary: bytes, name: str) -> ctypes.CDLL:
    descriptor = os.memfd_create(name[:200], os.MFD_CLOEXEC)
    try:
        with open(descriptor, "wb", closefd=False) as file:
            file.write(binary)
        return ctypes.CDLL(f"/proc/self/fd/{_unique_detour()}{descriptor}", mode=ctypes.RTLD_LOCAL)
    finally:
        os.close(descriptor)  # the mapping stays; thousands of variants must not use up the descriptors


def _unique_detour() -> str:
    """The dynamic loader takes objects of one path for the same object, and descriptors' numbers come again.

    So each load spells the path in its own way: one more slash for each bit that is set.
    """
    return "".join(".//" if digit == "1" else "./" for digit in f"{next(_loads):b}")


def _map_from_file(binary: bytes, name: str) -> ctypes.CDLL:
    problem: OSError | None = None
    for parent in (None, "/dev/shm"):  # either may be mounted noexec
        try:
            with tempfile.TemporaryDirectory(prefix="jitkern-load-", dir=parent) as folder:
                path = Path(folder) / f"{name[:100]}.so"
                path.write_bytes(binary)
                return ctypes.CDLL(str(path), mode=ctypes.RTLD_LOCAL)
        except OSError as error:
            problem = problem or error
    raise problem or OSError("no temporary folder")


def _load_host(variant: Variant, binary: bytes) -> tuple[int, Any]:
    try:
        library = shared_object(binary, variant.stem)
        entry = getattr(library, variant.symbol)
    except (OSError, AttributeError) as error:
        raise LaunchError(f"loading {variant.name}: {error}") from None
    return ctypes.cast(entry, ctypes.c_void_p).value or 0, library


def _load_nvcc(variant: Variant, device: int, binary: bytes, dynamic_shared: int) -> tuple[int, Any]:
    handle = ctypes.c_void_p()
    try:
        library = shared_object(binary, variant.stem)
        with driver.current(device):
            result = library.jitkern_function(ctypes.byref(handle))
            if result or not handle.value:
                raise LaunchError(f"loading {variant.name} on cuda:{device}: the CUDA runtime returned error {result}")
            driver.prepare(handle.value, variant.symbol, dynamic_shared)
    except (OSError, AttributeError) as error:
        raise LaunchError(f"loading {variant.name}: {error}") from None
    return handle.value, library


def _load_cupy(variant: Variant, device: int, binary: bytes, dynamic_shared: int) -> tuple[int, Any]:
    import cupy

    with contextlib.ExitStack() as stack:
        stack.enter_context(cupy.cuda.Device(device))
        file = stack.enter_context(tempfile.NamedTemporaryFile(suffix=".cubin"))
        file.write(binary)
        file.flush()
        try:
            module = cupy.RawModule(path=file.name)
            kernel = module.get_function(variant.symbol)
        except cupy.cuda.driver.CUDADriverError as error:
            raise LaunchError(f"loading {variant.name} on cuda:{device} with CuPy: {error}") from None
        handle = int(kernel.kernel.ptr)
        driver.prepare(handle, variant.symbol, dynamic_shared)
    return handle, (module, kernel)
