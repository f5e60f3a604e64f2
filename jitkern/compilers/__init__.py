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

    def platform(self) -> dict[str, Any]:
        """What of this machine the binary depends on, whatever compiles it."""

    def identity(self, variant: Variant, text: Text) -> dict[str, Any]:
        """Which compiler and headers the binary depends on. Starts no process if possible.

        Raises:
            ToolchainError: they are not here.
        """

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


def parts_without_compiler(variant: Variant, text: Text) -> dict[str, Any]:
    """The parts of a key that are known where its compiler is not installed."""
    compiler = get(variant.backend)
    variants.check_target(variant.target)  # it becomes a folder's name
    return {
        "schema": SCHEMA,
        "text": text.flat,
        "backend": variant.backend,
        "options": sorted(compiler.options(variant)),
        "target": variant.target,
        "symbol": variant.symbol,
        **compiler.platform(),
    }


def stem_of(variant: Variant) -> str:
    """The readable part of an entry's name."""
    return f"{variant.stem}-{variant.backend}" if variant.backend == "nvcc" else variant.stem


def key_of(variant: Variant, text: Text) -> Key:
    """The cache key of a variant: everything its binary depends on.

    Raises:
        ToolchainError: the compiler, which is a part of it, is not here.
    """
    parts = parts_without_compiler(variant, text) | get(variant.backend).identity(variant, text)
    return Key(parts, variant.target, stem_of(variant))
