"""Shared objects through ``torch.utils.cpp_extension.load``: the CPU backend, and nvcc for those who want it.

The text includes no torch header and the object links nothing of torch (``--as-needed``), so it compiles in a fraction of
a second and outlives a torch upgrade. Every build has a private folder and a name of its own: torch's own lock file,
which waits for ever after a kill, and its memory of failed builds never come into play.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import tempfile
import threading
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from jitkern import toolchain
from jitkern.compilers import Artifact, diagnostics
from jitkern.errors import ToolchainError
from jitkern.sources import Text
from jitkern.variants import Variant

_building = threading.Lock()  # cpp_extension is not written for several builds at once, and PATH is changed


class Extension:
    """Builds with the host's C++ compiler, or with nvcc if ``cuda``."""

    binary_name = "kernel.so"

    def __init__(self, cuda: bool) -> None:
        self.cuda = cuda

    def options(self, variant: Variant) -> list[str]:
        """Strict IEEE arithmetic in both: no contraction on the CPU, no flush of denormals on the GPU."""
        defines = [f"-D{name}={value}" for name, value in variant.defines.items()]
        if self.cuda:
            number = variant.target.removeprefix("sm_")
            arch = f"-gencode=arch=compute_{number},code=sm_{number}"
            return [arch, "-O3", "--ftz=false", "--prec-div=true", "--fmad=true", "-DJITKERN_EXPORT_FUNCTION=1", *defines]
        return ["-O3", "-march=native", "-ffp-contract=off", "-fno-math-errno", "-fvisibility=hidden", *defines]

    def identity(self, variant: Variant, text: Text) -> dict[str, Any]:
        """The compilers and what the object's ABI depends on."""
        abi = toolchain.host_abi()
        if self.cuda:
            return {"compiler": {"name": "nvcc", "version": toolchain.nvcc()[1]}, "host": toolchain.host_compiler().identity, "abi": abi}
        return {"compiler": {"name": "host", "version": toolchain.host_compiler().identity}, "abi": abi}

    def compile(self, variant: Variant, text: Text) -> Artifact:
        """Compile and link a shared object."""
        compiler = toolchain.host_compiler()
        if self.cuda:
            toolchain.nvcc()
        with _private_folder() as folder, _building, _environment(compiler):
            log, binary = _load(variant, text, folder, self.cuda, self.options(variant))
        if binary is None:
            raise diagnostics.compile_error(variant.name, text, log.replace(f"{folder}/", ""))
        return Artifact(binary, log, {"compiler": compiler.identity})


def _load(variant: Variant, text: Text, folder: Path, cuda: bool, options: list[str]) -> tuple[str, bytes | None]:
    from torch.utils import cpp_extension

    name = f"jitkern_{uuid.uuid4().hex}"
    source = folder / f"kernel.{'cu' if cuda else 'cpp'}"
    source.write_text(text.flat, encoding="utf-8")
    try:
        cpp_extension.load(
            name,
            [str(source)],
            build_directory=str(folder),
            extra_cflags=None if cuda else options,
            extra_cuda_cflags=options if cuda else None,
            extra_ldflags=["-Wl,--as-needed"],
            with_cuda=cuda,
            is_python_module=False,
        )
    except (RuntimeError, OSError, ImportError) as error:
        # A folder mounted noexec can be built in but not loaded from; the object is loaded from memory anyway.
        if not (folder / f"{name}.so").is_file():
            log = f"{error}"
            if re.search(r"\berror\b[: ]", log):
                return log, None
            raise ToolchainError(f"building {variant.name} failed: {log}") from None
    return "", (folder / f"{name}.so").read_bytes()


@contextlib.contextmanager
def _private_folder() -> Iterator[Path]:
    folder = None
    for parent in (None, "/dev/shm"):
        with contextlib.suppress(OSError):
            folder = Path(tempfile.mkdtemp(prefix="jitkern-build-", dir=parent))
            break
    if folder is None:
        raise ToolchainError(f"no temporary folder to build in: neither {tempfile.gettempdir()} nor /dev/shm can be written to. Set TMPDIR.")
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def _environment(compiler: toolchain.HostCompiler) -> Iterator[None]:
    """Let cpp_extension find ninja and the compiler that the key names."""
    before = {name: os.environ.get(name) for name in ("PATH", "CXX")}
    os.environ["PATH"] = f"{toolchain.ninja()}{os.pathsep}{before['PATH'] or os.defpath}"
    os.environ["CXX"] = compiler.command
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
