"""The default GPU compiler: NVRTC, in this process, to a cubin for the exact target. Needs no GPU and no nvcc."""

from __future__ import annotations

import ctypes
import functools
from typing import Any

from jitkern import toolchain
from jitkern.compilers import Artifact, diagnostics
from jitkern.errors import ToolchainError
from jitkern.flights import ForkGate
from jitkern.sources import Text
from jitkern.variants import Variant

_gate = ForkGate(30.0)  # NVRTC has locks of its own, and knows nothing of forks


class Nvrtc:
    """Compiles with the NVRTC that :func:`jitkern.toolchain.nvrtc` finds."""

    binary_name = "kernel.cubin"

    def options(self, variant: Variant) -> list[str]:
        """No ``-ftz``, no fast math: backends agree to the last bit."""
        return [
            f"--gpu-architecture={variant.target}",
            "--std=c++17",
            "--ftz=false",
            "--prec-div=true",
            "--fmad=true",
            *(f"-D{name}={value}" for name, value in variant.defines.items()),
        ]

    def platform(self) -> dict[str, Any]:
        """A cubin depends on nothing of the machine that it is made on."""
        return {}

    def identity(self, variant: Variant, text: Text) -> dict[str, Any]:
        """NVRTC's build, and the headers if the text includes any."""
        library = toolchain.nvrtc()
        headers = toolchain.headers_identity(text.system_headers) if text.system_headers else None
        return {"compiler": {"name": "nvrtc", "version": library.version, "build": library.build}, "headers": headers}

    def compile(self, variant: Variant, text: Text) -> Artifact:
        """Compile to a cubin. The interpreter is free to run other threads meanwhile."""
        if _gate.broken:
            raise ToolchainError(
                f"{variant.name} cannot be compiled here: this process was forked in the middle of another thread's"
                ' compile. Start workers with multiprocessing.get_context("spawn"), or warm up before forking'
            )
        version = toolchain.nvrtc().version
        with _gate.section():
            log, binary = self._build(variant, text, "CUBIN")
        if binary[:4] != b"\x7fELF":
            raise ToolchainError(f"NVRTC {version} returned something that is no cubin for {variant.name}")
        return Artifact(binary, log, {"nvrtc": version, "path": str(toolchain.nvrtc().path)})

    def ptx(self, variant: Variant, text: Text) -> str:
        """The PTX of a variant, for people to read: what runs is a cubin."""
        with _gate.section():
            return self._build(variant, text, "PTX")[1].rstrip(b"\0").decode()

    def _build(self, variant: Variant, text: Text, what: str) -> tuple[str, bytes]:
        nvrtc = _library()
        supported = _supported(nvrtc)
        number = int("".join(filter(str.isdigit, variant.target.removeprefix("sm_"))))
        version = toolchain.nvrtc().version
        if number not in supported:
            known = ", ".join(f"sm_{item}" for item in supported)
            which = "a newer" if number > max(supported) else "an older"
            raise ToolchainError(
                f"NVRTC {version} cannot compile for {variant.target}; it knows {known}. Install {which} one."
            )
        options = self.options(variant)
        if not text.system_headers and _number(version) >= (12, 4):
            options.append("--minimal")  # leaves out what only headers use
        if text.system_headers:
            folders = [toolchain.cuda_include(), toolchain.cccl_include()]
            options += [f"-I{folder}" for folder in folders if folder]
        if what == "PTX":
            options = [option.replace("=sm_", "=compute_") for option in options]
        log, binary = _run(nvrtc, text.flat, f"{text.name}.cu", options, what)
        if binary is None:
            raise diagnostics.compile_error(variant.name, text, log)
        return log, binary


def _number(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".") if part.isdigit())


@functools.cache
def _library() -> Any:
    nvrtc = toolchain.open_nvrtc(toolchain.nvrtc())
    pointer, size = ctypes.c_void_p, ctypes.c_size_t
    text, texts = ctypes.c_char_p, ctypes.POINTER(ctypes.c_char_p)
    nvrtc.nvrtcCreateProgram.argtypes = (ctypes.POINTER(pointer), text, text, ctypes.c_int, texts, texts)
    nvrtc.nvrtcCompileProgram.argtypes = (pointer, ctypes.c_int, texts)
    nvrtc.nvrtcGetErrorString.restype = text
    for name in ("nvrtcGetProgramLogSize", "nvrtcGetCUBINSize", "nvrtcGetPTXSize"):
        getattr(nvrtc, name).argtypes = (pointer, ctypes.POINTER(size))
    for name in ("nvrtcGetProgramLog", "nvrtcGetCUBIN", "nvrtcGetPTX"):
        getattr(nvrtc, name).argtypes = (pointer, text)
    nvrtc.nvrtcDestroyProgram.argtypes = (ctypes.POINTER(pointer),)
    return nvrtc


def _supported(nvrtc: Any) -> list[int]:
    count = ctypes.c_int()
    nvrtc.nvrtcGetNumSupportedArchs(ctypes.byref(count))
    archs = (ctypes.c_int * count.value)()
    nvrtc.nvrtcGetSupportedArchs(archs)
    return sorted(archs)


def _run(nvrtc: Any, text: str, name: str, options: list[str], what: str = "CUBIN") -> tuple[str, bytes | None]:
    """(log, what came out); the latter is None when the text was rejected."""
    program = ctypes.c_void_p()
    result = nvrtc.nvrtcCreateProgram(ctypes.byref(program), text.encode(), name.encode(), 0, None, None)
    if result:
        raise ToolchainError(f"NVRTC cannot start: {nvrtc.nvrtcGetErrorString(result).decode()}")
    try:
        encoded = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
        result = nvrtc.nvrtcCompileProgram(program, len(options), encoded)
        log = (
            _fetch(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
            .rstrip(b"\0")
            .decode(errors="replace")
        )
        if result == 6:  # NVRTC_ERROR_COMPILATION
            return log, None
        if result:
            raise ToolchainError(
                f"NVRTC failed: {nvrtc.nvrtcGetErrorString(result).decode()} with {' '.join(options)}. {log}"
            )
        return log, _fetch(getattr(nvrtc, f"nvrtcGet{what}Size"), getattr(nvrtc, f"nvrtcGet{what}"), program)
    finally:
        nvrtc.nvrtcDestroyProgram(ctypes.byref(program))


def _fetch(ask_size: Any, ask: Any, program: Any) -> bytes:
    size = ctypes.c_size_t()
    if ask_size(program, ctypes.byref(size)) or size.value == 0:
        return b""
    buffer = ctypes.create_string_buffer(size.value)
    ask(program, buffer)
    return buffer.raw
