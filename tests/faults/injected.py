"""A compiler that is quick, can be counted and told to be slow, for faults that the real ones are too slow for."""

from __future__ import annotations

import os
import time
from typing import Any

from jitkern import compilers
from jitkern.compilers import Artifact
from jitkern.sources import Text
from jitkern.variants import Variant

TEXT = Text("injected", "// injected\n", ())


def variant(number: int = 0, target: str = "sm_90", **more: Any) -> Variant:
    return Variant("injected", "f32", 4, target, (("n", number),), more.get("backend", "nvrtc"))


class Compiler:
    """Its binary is made of the variant's name, so that one taken for another is seen."""

    binary_name = "kernel.cubin"

    def __init__(self, seconds: float = 0.0, size: int = 20_000, version: str = "1", log: str = "") -> None:
        self.seconds, self.size, self.version, self.log = seconds, size, version, log
        self.calls = 0

    def options(self, variant: Variant) -> list[str]:
        return [f"--gpu-architecture={variant.target}", "--std=c++17", f"-DN={dict(variant.constants)['n']}"]

    def platform(self) -> dict[str, Any]:
        return {}

    def identity(self, variant: Variant, text: Text) -> dict[str, Any]:
        return {"compiler": {"name": "injected", "version": self.version}, "headers": None}

    def expected(self, variant: Variant) -> bytes:
        seed = f"{variant.name} {self.version} ".encode()
        return b"\x7fELF" + (seed * (self.size // len(seed) + 1))[: self.size]

    def compile(self, variant: Variant, text: Text) -> Artifact:
        self.calls += 1
        if self.log:  # one line per compile, appended in one go: counts across processes
            descriptor = os.open(self.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            os.write(descriptor, f"{os.getpid()} {variant.stem}\n".encode())
            os.close(descriptor)
        time.sleep(self.seconds)
        return Artifact(self.expected(variant))


def install(**options: Any) -> Compiler:
    """Let every backend use one injected compiler from now on, in this process and those forked from it."""
    compiler = Compiler(**options)
    compilers.get = lambda backend: compiler  # type: ignore[assignment]
    return compiler
