"""Shared objects through ``torch.utils.cpp_extension.load``: the CPU backend, and nvcc for those who want it.

The text includes no torch header and the object links nothing of torch (``--as-needed``), so it compiles in a
fraction of a second and outlives a torch upgrade. Every build has a private folder and a name of its own: torch's own
lock file, which waits for ever after a kill, and its memory of failed builds never come into play.
"""

from __future__ import annotations

import os
import re
import uuid
from pathlib import Path
from typing import Any

from jitkern import toolchain
from jitkern.compilers import Artifact, building, diagnostics
from jitkern.errors import ToolchainError
from jitkern.sources import Text
from jitkern.variants import Variant


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
            return [
                arch,
                "-O3",
                "--ftz=false",
                "--prec-div=true",
                "--fmad=true",
                "-DJITKERN_EXPORT_FUNCTION=1",
                *defines,
            ]
        # -pipe: no assembler file in the temporary folder, which a compiler that is killed would leave there.
        return [
            "-O3",
            "-pipe",
            "-march=native",
            "-ffp-contract=off",
            "-fno-math-errno",
            "-fvisibility=hidden",
            *defines,
        ]

    def platform(self) -> dict[str, Any]:
        """The architecture, the C library and the instructions that the object is made for."""
        return {"abi": toolchain.host_abi()}

    def identity(self, variant: Variant, text: Text) -> dict[str, Any]:
        """The compilers, and what of the environment changes what they do."""
        host = toolchain.host_compiler().identity
        parts: dict[str, Any]
        if self.cuda:
            parts = {"compiler": {"name": "nvcc", "version": toolchain.nvcc()[1]}, "host": host}
        else:
            parts = {"compiler": {"name": "host", "version": host}}
        environment = toolchain.compiler_environment()
        return parts | ({"environment": environment} if environment else {})

    def compile(self, variant: Variant, text: Text) -> Artifact:
        """Compile and link a shared object."""
        compiler = toolchain.host_compiler()
        if self.cuda:
            toolchain.nvcc()
        log, binary = self._build(variant, text, compiler)
        if binary is None:
            raise diagnostics.compile_error(variant.name, text, log)
        if binary[:4] != b"\x7fELF":
            raise ToolchainError(f"{compiler.command} made something that is no shared object of {variant.name}")
        return Artifact(binary, log, {"compiler": compiler.identity}, self._replaced())

    def _build(self, variant: Variant, text: Text, compiler: toolchain.HostCompiler) -> tuple[str, bytes | None]:
        """(log, object) from the first place that has room for the build."""
        full: building.NoRoomError | None = None
        for parent in building.PARENTS:
            try:
                with building.private_folder(parent) as folder, building.environment(compiler, parent):
                    log, binary = _load(variant, text, folder, self.cuda, self.options(variant))
                return log.replace(f"{folder}/", ""), binary
            except building.NoRoomError as error:
                full = full or error
        raise full or ToolchainError(f"there is no place to build {variant.name}")

    def _replaced(self) -> bool:
        """Whether the compilers are others than those that the key was made with: an upgrade while this process ran."""
        before = (toolchain.host_compiler(), toolchain.nvcc() if self.cuda else None)
        toolchain.forget()
        try:
            return before != (toolchain.host_compiler(), toolchain.nvcc() if self.cuda else None)
        except ToolchainError:  # it was taken away
            return True


def _load(variant: Variant, text: Text, folder: Path, cuda: bool, options: list[str]) -> tuple[str, bytes | None]:
    try:
        from torch.utils import cpp_extension
    except (ImportError, RuntimeError) as error:  # RuntimeError: the interpreter is ending
        raise ToolchainError(f"backends cpu and nvcc build with torch, which cannot be imported: {error}") from None

    name = f"jitkern_{uuid.uuid4().hex}"
    source = folder / f"kernel.{'cu' if cuda else 'cpp'}"
    try:
        source.write_text(text.flat, encoding="utf-8")
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
        if not os.path.isfile(folder / f"{name}.so"):
            log = f"{error}"
            if re.search(r"\berror\b[: ]", log) and not building.is_transient(log):
                return log, None
            last = "\n".join(log.strip().splitlines()[-12:])
            kind = building.NoRoomError if building.has_no_room(log) else ToolchainError
            raise kind(
                f"building {variant.name} failed, and not for its text; call again once that is put right:\n{last}"
            ) from None
    return "", (folder / f"{name}.so").read_bytes()
