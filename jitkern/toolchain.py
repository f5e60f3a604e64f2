"""Find compilers, libraries and headers, and say exactly which they are. Compiles nothing.

NVRTC is looked for in the pip wheels that torch itself uses (by absolute path, so that two CUDA majors in one process
do not mix), then wherever ``cuda.pathfinder`` finds it: other wheels, conda, ``CUDA_HOME``.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitkern.errors import ToolchainError

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
            if path.is_file():
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


def file_identity(*paths: Path) -> str:
    """A digest of the files' build identities: quick, and the same wherever the files are copied to."""
    digest = hashlib.sha256()
    for path in paths:
        with open(path, "rb") as file:
            head = file.read(8192)
            size = os.fstat(file.fileno()).st_size
            note = head.find(b"\x04\0\0\0\x14\0\0\0\x03\0\0\0GNU\0")  # the linker's build id, a SHA-1 of the content
            if note >= 0:
                digest.update(head[note + 16 : note + 36])
            else:
                file.seek(max(size - (1 << 20), 0))
                digest.update(head + file.read(1 << 20))
            digest.update(str(size).encode())
    return digest.hexdigest()[:32]


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
        if (folder / "cuda_fp16.h").is_file() and header_version(folder) // 1000 == library.major:
            return folder
    package = "nvidia-cuda-runtime" if library.major >= 13 else f"nvidia-cuda-runtime-cu{library.major}"
    raise ToolchainError(
        f"CUDA {library.major} headers (cuda_fp16.h) are not installed. Run: pip install '{package}=={library.major}.*'"
    )


def cccl_include() -> Path | None:
    """The folder with ``nv/target`` and ``cuda/std``, which some CUDA headers include, if it is installed."""
    base = cuda_include()
    for folder in (base, base / "cccl"):
        if (folder / "nv" / "target").is_file():
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
    folder = cuda_include()
    digest = hashlib.sha256()
    for name in names:
        for path in (folder / name, folder / Path(name).with_suffix(".hpp")):
            if path.is_file():
                digest.update(path.read_bytes())
    return {"version": header_version(folder), "content": digest.hexdigest()[:32]}


@dataclass(frozen=True)
class HostCompiler:
    """The C++ compiler for CPU variants.

    Attributes:
        command: what to run.
        identity: which compiler it is, for the key: a digest of the program, or its version text.
    """

    command: str
    identity: str


@functools.cache
def host_compiler() -> HostCompiler:
    """The C++ compiler: ``$CXX``, else ``c++``, ``g++`` or ``clang++`` on the PATH.

    A compiler's own program says which it is without being started; a wrapper (ccache, a script) has to be asked.

    Raises:
        ToolchainError: none is installed, or it does not start.
    """
    command = os.environ.get("CXX", "").strip() or next(
        (name for name in ("c++", "g++", "clang++") if shutil.which(name)), None
    )
    found = shutil.which(command.split()[0]) if command else None
    if command is None or found is None:
        looked = f"CXX={command}" if command else "c++, g++ and clang++ on the PATH"
        raise ToolchainError(f"no C++ compiler for CPU kernels: looked for {looked}. Install one: apt-get install g++")
    program = Path(os.path.realpath(found))
    with open(program, "rb") as file:
        is_program = file.read(4) == b"\x7fELF"
    if is_program and re.search(r"g\+\+|clang", program.name) and command == command.split()[0]:
        return HostCompiler(command, f"{program.name} {file_identity(program)}")
    try:
        run = subprocess.run([*command.split(), "--version"], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise ToolchainError(f"the C++ compiler {command!r} does not start: {error}") from None
    return HostCompiler(command, run.stdout.split("\n\n")[0])


@functools.cache
def host_abi() -> dict[str, str]:
    """What a shared object made for this CPU depends on: architecture, C library and the instructions there are."""
    flags = ""
    try:
        with open("/proc/cpuinfo") as file:
            flags = next((line for line in file if line.startswith(("flags", "Features"))), "")
    except OSError:
        flags = platform.processor()
    return {
        "machine": platform.machine(),
        "libc": "-".join(platform.libc_ver()),
        "instructions": hashlib.sha256(" ".join(sorted(flags.split())).encode()).hexdigest()[:32],
    }


@functools.cache
def nvcc() -> tuple[str, str]:
    """(path, version line) of nvcc, where ``torch.utils.cpp_extension`` will find it too.

    Raises:
        ToolchainError: it is not installed.
    """
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH")
    candidates = [
        os.environ.get("PYTORCH_NVCC"),
        home and f"{home}/bin/nvcc",
        shutil.which("nvcc"),
        "/usr/local/cuda/bin/nvcc",
    ]
    for path in filter(None, candidates):
        if shutil.which(path):
            try:
                run = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60, check=True)
            except (OSError, subprocess.SubprocessError) as error:
                raise ToolchainError(f"nvcc at {path} does not start: {error}") from None
            return path, " ".join(run.stdout.split()[-3:])
    raise ToolchainError(
        "backend='nvcc' needs nvcc: not in CUDA_HOME, not on the PATH, not in /usr/local/cuda."
        " The default backend, nvrtc, needs none."
    )


def ninja() -> str:
    """The folder of a ninja executable, which ``torch.utils.cpp_extension`` starts.

    Raises:
        ToolchainError: it is not installed.
    """
    found = shutil.which("ninja")
    if found:
        return str(Path(found).parent)
    try:
        import ninja as package

        return str(package.BIN_DIR)
    except ImportError:
        raise ToolchainError("backends cpu and nvcc need ninja. Run: pip install ninja") from None


def open_nvrtc(library: Library) -> Any:
    """Open NVRTC itself. Its builtins are opened first: it looks for them by name and would not find them."""
    try:
        for builtins in sorted(library.path.parent.glob(f"libnvrtc-builtins.so.{library.major}*")):
            ctypes.CDLL(str(builtins), mode=ctypes.RTLD_GLOBAL)
        return ctypes.CDLL(str(library.path))
    except OSError as error:
        raise ToolchainError(f"NVRTC at {library.path} cannot be opened: {error}. Run: {NVRTC_HINT}") from None
