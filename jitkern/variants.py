"""Variants: a kernel with everything that is fixed at compile time, and how a pack size is chosen."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from jitkern import dtypes
from jitkern.errors import ArgumentError

_TARGET = re.compile(r"cpu|sm_\d{2,3}[af]?")
PACK_BYTES = 16  # the widest access of one GPU thread


@dataclass(frozen=True)
class Variant:
    """A kernel, its element type, its pack and its other compile-time constants, for one target on one backend.

    Attributes:
        kernel: the name of the text.
        dtype: the element type's tag.
        pack: elements that one access moves.
        target: ``sm_90`` and the like, or ``cpu``.
        constants: further holes, sorted: ``(("d", 128),)`` becomes ``-DJITKERN_D=128``.
        backend: ``nvrtc``, ``nvcc`` or ``cpu``.
    """

    kernel: str
    dtype: str
    pack: int
    target: str
    constants: tuple[tuple[str, int | str], ...] = ()
    backend: str = "nvrtc"

    @property
    def symbol(self) -> str:
        """The entry symbol, as profilers show it: ``jitkern_merge_attn_states_bf16_p8_d128``."""
        tail = "".join(f"_{name}{value}" for name, value in self.constants)
        return re.sub(r"\W", "_", f"jitkern_{self.kernel}_{self.dtype}_p{self.pack}{tail}")

    @property
    def name(self) -> str:
        """For people: ``merge_attn_states-bf16-p8-d128 for sm_90``."""
        return f"{self.stem} for {self.target}"

    @property
    def stem(self) -> str:
        """The name without the target, as entries in the cache are called."""
        tail = "".join(f"-{name}{value}" for name, value in self.constants)
        return re.sub(r"[^\w.-]", "_", f"{self.kernel}-{self.dtype}-p{self.pack}{tail}")

    @property
    def defines(self) -> dict[str, str]:
        """The holes and their values."""
        holes = {
            "JITKERN_ENTRY": self.symbol,
            "JITKERN_T": dtypes.resolve(self.dtype).cuda,
            "JITKERN_PACK": str(self.pack),
        }
        return holes | {f"JITKERN_{name.upper()}": str(value) for name, value in self.constants}

    def warmup_line(self, device: int | None = None) -> str:
        """The Python line that makes this variant ready."""
        extra = "".join(f", {name}={value!r}" for name, value in self.constants)
        where = f', device="cuda:{device}"' if device is not None else ', device="cpu"'
        which = f", backend={self.backend!r}" if self.backend == "nvcc" else ""
        return f'jitkern.warmup("{self.kernel}", dtype="{self.dtype}", pack={self.pack}{extra}{where}{which})'

    def warm_line(self) -> str | None:
        """The command that puts this variant into a cache; None where no command does."""
        if self.backend == "nvcc":
            return None
        extra = "".join(f" --constant {name}={value}" for name, value in self.constants)
        return f"jitkern warm {self.kernel} --target {self.target} --dtype {self.dtype} --pack {self.pack}{extra}"


def check_target(target: str) -> str:
    """Return ``target`` if it is ``cpu`` or ``sm_XX``.

    Raises:
        ArgumentError: it is something else.
    """
    if not _TARGET.fullmatch(target):
        raise ArgumentError(f"unknown target {target!r}; expected cpu or sm_XX, for example sm_90")
    return target


def widest_pack(element_bytes: int, *multiples: int) -> int:
    """Elements of the widest access that divides every number of bytes given (addresses, strides, row sizes).

    >>> widest_pack(2, 256, 4096)
    8
    >>> widest_pack(2, 256, 4098)
    1
    """
    bits = PACK_BYTES
    for multiple in multiples:
        bits |= multiple
    return max((bits & -bits) // element_bytes, 1)


@dataclass(frozen=True)
class Kernel:
    """What the engine knows of a kernel that can be warmed ahead: its holes and the variants most callers need.

    Attributes:
        name: the kernel's name, and its text's.
        constants: its holes beside type and pack, with their defaults (None: has none). A hole at its default is not
            part of a variant.
        common: (dtype tag, pack, constants) of the variants that ``jitkern warm`` makes by default.
        gpu_only: holes that calls on the CPU leave at their default.
    """

    name: str
    constants: Mapping[str, int | str | None]
    common: tuple[tuple[str, int, tuple[tuple[str, int | str], ...]], ...]
    gpu_only: tuple[str, ...] = ()

    def variants(self, target: str, backend: str) -> Iterator[Variant]:
        """The common variants for a target."""
        for dtype, pack, constants in self.common:
            if target == "cpu" and any(name in self.gpu_only for name, _ in constants):
                continue
            yield Variant(self.name, dtype, pack, target, constants, backend)


_registry: dict[str, Kernel] = {}


def register(kernel: Kernel) -> Kernel:
    """Make a kernel known to warm-up and the command line. Ops call this once."""
    _registry[kernel.name] = kernel
    return kernel


def registered() -> Mapping[str, Kernel]:
    """The kernels made known so far."""
    return _registry


def make_constants(kernel: Kernel, given: Mapping[str, int | str]) -> tuple[tuple[str, int | str], ...]:
    """Bring a kernel's constants into their order.

    Raises:
        ArgumentError: one is missing or unknown.
    """
    missing = [name for name, default in kernel.constants.items() if default is None and name not in given]
    unknown = [name for name in given if name not in kernel.constants]
    if missing or unknown:
        raise ArgumentError(
            f"{kernel.name}: {'missing ' + ', '.join(missing) if missing else ''}"
            f"{' and ' if missing and unknown else ''}{'unknown ' + ', '.join(unknown) if unknown else ''};"
            f" its constants are {', '.join(kernel.constants) or 'none'}"
        )
    return tuple(
        (name, given[name]) for name, default in kernel.constants.items() if given.get(name, default) != default
    )


def names(kernels: Iterable[Kernel]) -> str:
    """Names for a message."""
    return ", ".join(sorted(kernel.name for kernel in kernels)) or "none"
