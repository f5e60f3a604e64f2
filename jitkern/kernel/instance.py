"""One variant of a user's kernel: its text with every hole filled, and what compilers make of it. Needs no GPU."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from jitkern import driver, loader
from jitkern.compilers.nvrtc import Nvrtc
from jitkern.errors import CompileError, ToolchainError, UnsupportedError
from jitkern.kernel import cubin
from jitkern.kernel.text import explain_cpu
from jitkern.loader import Function
from jitkern.sources import Text
from jitkern.variants import Variant

_ANNOUNCED_FROM = 48 * 1024  # bytes of dynamic shared memory


@dataclass(frozen=True)
class UserVariant(Variant):
    """A variant of a text that is not shipped: its holes are filled in the text itself."""

    @property
    def symbol(self) -> str:
        """As profilers show it: ``jitkern_rmsnorm_bf16_p8``."""
        return re.sub(r"\W", "_", f"jitkern_{self.stem}")

    @property
    def stem(self) -> str:
        """The readable part of an entry's name."""
        dtype = f"-{self.dtype}" if self.dtype else ""
        pack = f"-p{self.pack}" if self.pack else ""
        tail = "".join(f"-{name}{value}" for name, value in self.constants)
        return re.sub(r"[^\w.-]", "_", f"{self.kernel}{dtype}{pack}{tail}")

    @property
    def defines(self) -> dict[str, str]:
        """Only the entry: the text has the rest."""
        return {"JITKERN_ENTRY": self.symbol}

    def warmup_line(self, device: int | None = None) -> str:
        """The Python line that makes this variant ready."""
        given = [f'T="{self.dtype}"'] if self.dtype else []
        given += [f"PACK={self.pack}"] if self.pack else []
        given += [f"{name}={value!r}" for name, value in self.constants]
        given.append(f'device="cuda:{device}"' if device is not None else 'device="cpu"')
        return f"{self.kernel}.warmup({', '.join(given)})"

    def warm_line(self) -> None:
        """None: the command does not know the text."""


@dataclass(frozen=True)
class Instance:
    """A variant with its text.

    Attributes:
        variant: which.
        text: what the compiler gets.
        label: what errors call the user's text.
    """

    variant: UserVariant
    text: Text
    label: str

    def load(self, device: int, stream: int | None = None, shared: int = 0) -> Function:
        """Compile and load it on a device (:data:`jitkern.loader.CPU` for the CPU)."""
        try:
            function = loader.get(self.variant, device, stream, self.text, shared)
        except CompileError as error:
            raise explain_cpu(self.variant.kernel, self.label, error) from None
        if shared > _ANNOUNCED_FROM:  # it may have been loaded for less
            with driver.current(device):
                driver.prepare(function.handle, self.variant.symbol, shared)
        return function

    def binary(self) -> tuple[bytes, str]:
        """Its cubin or shared object, and whether it was ``compiled`` or ``cached``."""
        try:
            return loader.obtain(self.variant, self.text)
        except CompileError as error:
            raise explain_cpu(self.variant.kernel, self.label, error) from None

    @property
    def ptx(self) -> str:
        """Its PTX, from NVRTC."""
        self._gpu_only("PTX")
        return Nvrtc().ptx(self.variant, self.text)

    @property
    def sass(self) -> str:
        """Its machine code, disassembled by ``nvdisasm`` or ``cuobjdump``."""
        self._gpu_only("SASS")
        return disassemble(self.binary()[0])

    @property
    def resources(self) -> cubin.Resources | None:
        """Registers and memory, out of the cubin; None on the CPU."""
        if self.variant.backend != "nvrtc":
            return None
        return cubin.resources(self.binary()[0], self.variant.symbol)

    def _gpu_only(self, what: str) -> None:
        if self.variant.backend != "nvrtc":
            raise UnsupportedError(
                f"{self.variant.name} has no {what}: it is made by {self.variant.backend}. Name a GPU target, which"
                f' needs no GPU: {self.variant.kernel}.instance(target="sm_90")'
            )


def _tool(*names: str) -> Path | None:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    wheels = [
        Path(site) / "nvidia" / part / "bin"
        for site in sys.path
        for part in ("cu13", "cuda_nvcc", "cuda_nvdisasm", "cuda_cuobjdump")
    ]
    for name in names:
        found = shutil.which(name)
        places = [Path(home) / "bin" for home in homes if home] + wheels
        candidates = [Path(found)] if found else [place / name for place in places]
        for candidate in candidates:
            if os.access(candidate, os.X_OK):
                return candidate
    return None


def disassemble(binary: bytes) -> str:
    """The machine code of a cubin as text.

    Raises:
        ToolchainError: neither disassembler is installed, or it refuses.
    """
    tool = _tool("nvdisasm", "cuobjdump")
    if tool is None:
        raise ToolchainError(
            "sass needs nvdisasm or cuobjdump: not on the PATH, not in CUDA_HOME, not in a wheel."
            " Run: pip install nvidia-cuda-nvdisasm"
        )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        option = "-c" if tool.name == "nvdisasm" else "-sass"
        run = subprocess.run([tool, option, file.name], capture_output=True, text=True, timeout=120, check=False)
    if run.returncode:
        raise ToolchainError(f"{tool} failed: {run.stderr.strip()}")
    return run.stdout
