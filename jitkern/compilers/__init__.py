"""Compilers: each turns a variant's text into a binary, and names everything that the binary depends on."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any, Protocol

from jitkern import variants
from jitkern.cache import SCHEMA, Key
from jitkern.errors import ArgumentError
from jitkern.sources import Text
from jitkern.variants import Variant

BACKENDS = ("nvrtc", "nvcc", "cpu")


@dataclass(frozen=True)
class Artifact:
    """What a compiler made.

    Attributes:
        binary: a cubin, or a shared object.
        log: what the compiler said.
        versions: of the compiler and its parts, for people.
        stale: the compiler was replaced while it ran, so that the key may be of another one.
    """

    binary: bytes
    log: str = ""
    versions: dict[str, Any] = field(default_factory=dict)
    stale: bool = False


class Compiler(Protocol):
    """One backend's compiler."""

    binary_name: str

    def options(self, variant: Variant) -> list[str]:
        """Canonical options, without a path in them."""

    def identity(self, variant: Variant, text: Text) -> dict[str, Any]:
        """What else the binary depends on: compiler, headers, for host code its ABI. Starts no process if possible."""

    def compile(self, variant: Variant, text: Text) -> Artifact:
        """Compile.

        Raises:
            CompileError: the text was rejected.
            ToolchainError: something that is needed is missing.
        """


@functools.cache
def get(backend: str) -> Compiler:
    """The compiler of a backend."""
    if backend == "nvrtc":
        from jitkern.compilers.nvrtc import Nvrtc

        return Nvrtc()
    if backend in ("nvcc", "cpu"):
        from jitkern.compilers.extension import Extension

        return Extension(cuda=backend == "nvcc")
    raise ArgumentError(f"unknown backend {backend!r}; there are {', '.join(BACKENDS)}")


def key_of(variant: Variant, text: Text) -> Key:
    """The cache key of a variant: everything its binary depends on."""
    compiler = get(variant.backend)
    variants.check_target(variant.target)  # it becomes a folder's name
    parts = {
        "schema": SCHEMA,
        "text": text.flat,
        "backend": variant.backend,
        "options": sorted(compiler.options(variant)),
        "target": variant.target,
        "symbol": variant.symbol,
        **compiler.identity(variant, text),
    }
    return Key(
        parts, variant.target, f"{variant.stem}-{variant.backend}" if variant.backend == "nvcc" else variant.stem
    )
