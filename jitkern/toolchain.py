"""Find compilers, libraries and headers, and say exactly which they are. Compiles nothing.

NVRTC is looked for in the pip wheels that torch itself uses (by absolute path, so that two CUDA majors in one process
do not mix), then wherever ``cuda.pathfinder`` finds it: other wheels, conda, ``CUDA_HOME``.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitkern.errors import ToolchainError
from jitkern.hosttools import (
    HostCompiler,
    compiler_environment,
    file_identity,
    host_abi,
    host_compiler,
    ninja,
    nvcc,
)

__all__ = [
    "NVRTC_HINT",
    "HostCompiler",
    "Library",
    "cccl_include",
    "compiler_environment",
    "cuda_include",
    "file_identity",
    "forget",
    "header_version",
    "headers_identity",
    "host_abi",
    "host_compiler",
    "ninja",
    "nvcc",
    "nvrtc",
    "open_nvrtc",
]

# Newest first: (CUDA major, folder of the library, folder of the headers) below site-packages/nvidia.
_WHEELS = ((13, "cu13/lib", "cu13/include"), (12, "cuda_nvrtc/lib", "cuda_runtime/include"))
NVRTC_HINT = 'pip install "jitkern[cuda13]" (or [cuda12] for a driver older than 580)'


@dataclass(frozen=True)
class Library:
    """A compiler library on disk.

    Attributes:
        path: absolute path of the shared object.
        major: CUDA major version.
        version: as its builtins say, ``13.0``.
        build: a digest of what the files are, for the cache key: two builds of one version differ here.
    """

    path: Path
    major: int
    version: str
    build: str


def _preferred_major() -> int | None:
    """The CUDA major that torch was built for, without importing torch for it."""
    torch = sys.modules.get("torch")
    cuda = getattr(getattr(torch, "version", None), "cuda", None)
    return int(cuda.split(".")[0]) if cuda else None


@functools.cache
def nvrtc() -> Library:
    """The NVRTC library to use.

    Raises:
        ToolchainError: there is none; the message says where it was looked for and how to get it.
    """
    major = _preferred_major()
    wheels = sorted(_WHEELS, key=lambda wheel: wheel[0] != major)
    for number, folder, _ in wheels:
        for site in map(Path, sys.path):
            path = site / "nvidia" / folder / f"libnvrtc.so.{number}"
            if os.path.isfile(path):
                return _describe_nvrtc(path, number)
    try:
        from cuda import pathfinder

        found = pathfinder.load_nvidia_dynamic_lib("nvrtc").abs_path
    except Exception as error:
        found, reason = None, f" ({type(error).__name__})"
    else:
        reason = ""
    if not found:
        raise ToolchainError(
            f"NVRTC is not installed: not in the nvidia wheels on sys.path, not in conda or CUDA_HOME{reason}."
            f" Run: {NVRTC_HINT}"
        )
    match = re.search(r"\.so\.(\d+)", os.path.realpath(found))
    return _describe_nvrtc(Path(found), int(match[1]) if match else 0)


def forget() -> None:
    """Look for every compiler again at the next use, since one was installed or replaced while this process runs.

    Not for NVRTC: once opened it stays what it is, whatever is on the disk now.
    """
    for found in (host_compiler, nvcc, cuda_include, headers_identity):
        found.cache_clear()


def _describe_nvrtc(path: Path, major: int) -> Library:
    builtins = sorted(path.parent.glob(f"libnvrtc-builtins.so.{major}*"))
    names = [re.search(r"\.so\.(\d+\.\d+)", item.name) for item in builtins]
    version = next((match[1] for match in names if match), str(major))
    try:
        return Library(path, major, version, file_identity(path, *builtins))
    except OSError as error:
        raise ToolchainError(f"NVRTC at {path} cannot be read: {error}. Run: {NVRTC_HINT}") from None


@functools.cache
def cuda_include() -> Path:
    """The folder of the CUDA headers that belong to :func:`nvrtc`, for texts that include some.

    Raises:
        ToolchainError: there is none, or only one of another CUDA major.
    """
    library = nvrtc()
    candidates = [library.path.parent.parent / "include"]
    for number, _, inside in _WHEELS:
        if number == library.major:
            candidates += [Path(site) / "nvidia" / inside for site in sys.path]
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    candidates += [Path(home) / "include"]
    for folder in candidates:
        if os.path.isfile(folder / "cuda_fp16.h") and header_version(folder) // 1000 == library.major:
            return folder
    package = "nvidia-cuda-runtime" if library.major >= 13 else f"nvidia-cuda-runtime-cu{library.major}"
    raise ToolchainError(
        f"CUDA {library.major} headers (cuda_fp16.h) are not installed. Run: pip install '{package}=={library.major}.*'"
    )


def cccl_include() -> Path | None:
    """The folder with ``nv/target`` and ``cuda/std``, which some CUDA headers include, if it is installed."""
    base = cuda_include()
    for folder in (base, base / "cccl"):
        if os.path.isfile(folder / "nv" / "target"):
            return folder
    return None


def header_version(folder: Path) -> int:
    """``CUDA_VERSION`` of a header folder, 13000 for 13.0; 0 if it cannot be read."""
    try:
        match = re.search(r"#define\s+CUDA_VERSION\s+(\d+)", (folder / "cuda.h").read_text(errors="replace"))
    except OSError:
        return 0
    return int(match[1]) if match else 0


@functools.cache
def headers_identity(names: tuple[str, ...]) -> dict[str, Any]:
    """What to put in a key for a text that includes system headers: the set's version and the named files' content."""
    folder, cccl = cuda_include(), cccl_include()
    # What these include in turn is told by the versions of the two sets of headers.
    digest, sets = hashlib.sha256(), [folder, *([cccl] if cccl else [])]
    for name in (*names, "cuda/std/__cccl/version.h"):
        for base in dict.fromkeys([*sets, folder / "cccl"]):
            for path in (base / name, base / Path(name).with_suffix(".hpp")):
                if os.path.isfile(path):
                    digest.update(path.read_bytes())
    return {"version": header_version(folder), "content": digest.hexdigest()[:32]}


def open_nvrtc(library: Library) -> Any:
    """Open NVRTC itself. Its builtins are opened first: it looks for them by name and would not find them."""
    try:
        for builtins in sorted(library.path.parent.glob(f"libnvrtc-builtins.so.{library.major}*")):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(library.path))
    except OSError as error:
        raise ToolchainError(f"NVRTC at {library.path} cannot be opened: {error}. Run: {NVRTC_HINT}") from None
