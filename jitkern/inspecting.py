"""What ``jitkern show`` prints of a kernel, and the ``.clangd`` that makes editors resolve the headers."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jitkern import driver, dtypes, loader, ops, sources, variants, warm
from jitkern.compilers.nvrtc import Nvrtc
from jitkern.errors import ArgumentError
from jitkern.kernel import Kernel, cubin
from jitkern.kernel.instance import disassemble
from jitkern.sources import Text
from jitkern.variants import Variant


@dataclass(frozen=True)
class Shown:
    """A variant to look at.

    Attributes:
        variant: which.
        text: its text.
    """

    variant: Variant
    text: Text

    @property
    def resources(self) -> cubin.Resources | None:
        """Registers and memory; None on the CPU."""
        if self.variant.target == "cpu":
            return None
        return cubin.resources(loader.obtain(self.variant, self.text)[0], self.variant.symbol)

    def form(self, what: str) -> str:
        """``text``, ``ptx`` or ``sass``."""
        if what == "text":
            return self.text.flat
        if self.variant.target == "cpu":
            raise ArgumentError(f"show --{what}: {self.variant.name} has none; name a GPU target: --target sm_90")
        if what == "ptx":
            return Nvrtc().ptx(self.variant, self.text)
        return disassemble(loader.obtain(self.variant, self.text)[0])


def choose(
    kernel: str,
    target: str | None = None,
    dtype: str | None = None,
    pack: int | None = None,
    constants: Mapping[str, int | str] | None = None,
) -> Shown:
    """The variant that a request means: the first common one that fits, of a shipped kernel or of a file.

    Args:
        kernel: a shipped kernel's name, or the path of a ``.cu`` file.
        target: ``sm_XX`` or ``cpu``; default: this machine's GPU, else sm_90.
        dtype, pack, constants: as for ``jitkern warm``.
    """
    place = variants.check_target(target or (driver.target(0) if driver.available() else "sm_90"))
    given = dict(constants or {})
    if kernel.endswith((".cu", ".cuh")):
        mine = Kernel(Path(kernel))
        holes: dict[str, Any] = {**given, **({mine.holes.pack: pack} if mine.holes.pack and pack else {})}
        holes |= dict.fromkeys(mine.holes.types, dtype) if dtype else {}
        instance = mine.instance(target=place, **holes)
        return Shown(instance.variant, instance.text)
    text = sources.shipped(kernel)
    backend = "cpu" if place == "cpu" else "nvrtc"
    ops.register_all()
    if kernel not in variants.registered():  # a text that has no Python around it yet
        element = dtypes.resolve(dtype or "f32")
        width = pack or variants.widest_pack(element.size)
        return Shown(Variant(kernel, element.tag, width, place, tuple(sorted(given.items())), backend), text)
    return Shown(warm.choose(kernel, place, backend, dtype, pack, given)[0], text)


def clangd_text() -> str:
    """A ``.clangd`` for a folder with kernels: CUDA, the shipped headers, and those of the toolkit if there is one.

    Without a toolkit CUDA's words come from a header for editors; ``cuda_fp16.h`` and its like are then not found.
    """
    flags = ["-xcuda", "--std=c++17", "--cuda-gpu-arch=sm_90", "-nocudalib", f"-I{sources.root()}"]
    home = _toolkit()
    if home:
        flags += [f"--cuda-path={home}", "-Wno-unknown-cuda-version"]
    else:
        flags += ["-nocudainc", "-include", str(sources.root() / "include" / "editor_cuda.h")]
    listed = "\n".join(f"    - {flag!r}" for flag in flags)
    return (
        "# Written by `jitkern clangd`; paths are this machine's, so keep it out of version control.\n"
        f"If:\n  PathMatch: .*\\.(cu|cuh)\nCompileFlags:\n  Add:\n{listed}\n"
    )


def _toolkit() -> str | None:
    """A toolkit with the layout that clang expects: bin, include, nvvm."""
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    homes += [str(Path(os.path.realpath(nvcc)).parent.parent)] if nvcc else []
    for home in filter(None, homes):
        if os.path.isfile(Path(home, "include", "cuda.h")) and os.path.isdir(Path(home, "nvvm", "libdevice")):
            return home
    return None
