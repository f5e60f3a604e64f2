"""Run the GPU branch of a kernel's text on the CPU, thread by thread, in an order that follows from a seed.

    emulator = Emulator(folder)  # where it builds; tests/test_emulated.py has a fixture
    kernel = emulator.kernel(Variant("mla_combine", "bf16", 4, "sm_80", (("d", 576),)))
    kernel.run(struct.pack(layout, *values), grid=(8, 1, 1), block=(256, 1, 1), shared=0, seed=7)

The variant's target says which branches of the text are taken (`sm_90a` is `__CUDA_ARCH__` 900). Addresses in the
parameters are those of CPU tensors. `patches` replaces strings of the text, each of which must occur, for tests that
break a kernel on purpose; `text` is a text that is not shipped.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import re
import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from jitkern import sources, toolchain
from jitkern.variants import Variant
from tests.emulator.translate import translated

HERE = Path(__file__).parent
TIMINGS = ("early", "random", "late")
Size = tuple[int, int, int]
_OPTIONS = ["-std=c++17", "-fPIC", "-fvisibility=hidden", "-ffp-contract=off", "-w", f"-I{HERE}"]
# What these put in front of each access is a call, which goes to races.cpp; their libraries are not linked.
_CHECKS = ["-fsanitize=thread", "-fsanitize=alignment", "-fno-sanitize-recover=alignment"]
_LAST_LINES = """
namespace emulator {
const u32 params_size = size_of_params(JITKERN_ENTRY);
void enter(const void* params) { call(JITKERN_ENTRY, params); }
}
"""


class EmulationError(Exception):
    """The kernel did something that the GPU does not allow, or stopped for ever."""


class Emulator:
    """Builds kernels in a folder, each once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @functools.cached_property
    def _runtime(self) -> list[Path]:
        files = [HERE / f"{name}.cpp" for name in ("schedule", "memory", "races", "lanes", "matrices", "elements")]
        for file in files:
            self._compile("-O2", "-c", str(file), "-o", str(self.folder / f"{file.stem}.o"))
        return [self.folder / f"{file.stem}.o" for file in files]

    def _compile(self, *arguments: str) -> None:
        command = [toolchain.host_compiler().command, *_OPTIONS, *arguments]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, f"{' '.join(command)}\n{done.stderr[:6000]}"

    def kernel(self, variant: Variant, patches: Iterable[tuple[str, str]] = (), text: str | None = None) -> Kernel:
        """Build a variant."""
        flat = sources.shipped(variant.kernel).flat if text is None else text
        for old, new in patches:
            assert old in flat, f"{variant.kernel} has no {old!r}"
            flat = flat.replace(old, new)
        arch = "".join(filter(str.isdigit, variant.target)) + "0"
        holes = [f"#define {name} {value}\n" for name, value in variant.defines.items()]
        lines = ['#include "cuda.h"\n', f"#define __CUDA_ARCH__ {arch}\n", *holes, translated(flat), _LAST_LINES]
        return self._built("".join(lines), variant)

    @functools.lru_cache(maxsize=64)  # noqa: B019 - one emulator a session
    def _built(self, text: str, variant: Variant) -> Kernel:
        stem = f"{variant.symbol}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"
        file, made, library = (self.folder / f"{stem}.{kind}" for kind in ("cpp", "o", "so"))
        file.write_text(text, encoding="utf-8")
        self._compile("-O1", "-g1", *_CHECKS, "-c", str(file), "-o", str(made))
        self._compile("-shared", str(made), *map(str, self._runtime), "-o", str(library))
        return Kernel(variant, library)


class Kernel:
    """A variant that has been built."""

    def __init__(self, variant: Variant, library: Path) -> None:
        self.variant = variant
        self._path, self._library = library, ctypes.CDLL(str(library))

    def run(
        self, params: bytes, grid: Size, block: Size, shared: int = 0, seed: int = 0, timing: str | None = None
    ) -> None:
        """Launch it, and wait.

        Args:
            params: the parameter block.
            grid, block: as on a GPU.
            shared: bytes of dynamic shared memory.
            seed: gives the order of threads and, unless `timing` does, when asynchronous work is done.
            timing: ``early``, ``random`` or ``late``; default: they take turns with the seed.

        Raises:
            EmulationError: a deadlock, an address outside of shared memory, a trap, ...
        """
        size = self._library.emulator_params_size()
        assert len(params) == size, f"{self.variant.name} has {size} bytes of parameters, not {len(params)}"
        when = seed % len(TIMINGS) if timing is None else TIMINGS.index(timing)
        message = ctypes.create_string_buffer(8192)
        launch = (ctypes.c_uint * 8)(*grid, *block, shared, when)
        if self._library.emulator_run(params, launch, ctypes.c_ulonglong(seed), message, len(message)):
            what, _, frames = message.value.decode().rpartition("\nat")
            raise EmulationError(
                f"{self.variant.name}, seed {seed}, {TIMINGS[when]}: {what}{self._lines(frames.split())}"
            )

    def _lines(self, frames: list[str]) -> str:
        """Where the thread was that found the error, the innermost line first."""
        command = shutil.which("addr2line")
        if not command or not frames:
            return ""
        found = subprocess.run(
            [command, "-i", "-e", str(self._path), *frames], capture_output=True, text=True, check=False
        )
        lines = [line for line in found.stdout.splitlines() if re.search(r"\.cuh?:\d", line)]
        return "".join(f"\n  at {line[line.find('kernels_src') if 'kernels_src' in line else 0 :]}" for line in lines)
