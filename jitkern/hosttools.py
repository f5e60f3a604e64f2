"""The host's C++ compiler, nvcc and ninja: where they are, and which."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from jitkern.errors import ToolchainError

# Compilers read these too. They are no part of the options, so whoever sets one gets entries of their own.
_READ_BY_COMPILERS = (
    "CPATH",
    "CPLUS_INCLUDE_PATH",
    "COMPILER_PATH",
    "GCC_EXEC_PREFIX",
    "LIBRARY_PATH",
    "NVCC_APPEND_FLAGS",
    "NVCC_PREPEND_FLAGS",
)


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


def compiler_environment() -> dict[str, str]:
    """The variables that change what a compiler makes, those that are set; mostly none."""
    return {name: os.environ[name] for name in _READ_BY_COMPILERS if os.environ.get(name)}
