"""Figures of a user's kernel: what it takes, how long it runs, how near to the memory's ceiling it comes."""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from jitkern import bench as timing
from jitkern import driver
from jitkern.errors import ToolchainError, UnsupportedError
from jitkern.kernel import html, quick
from jitkern.kernel.arguments import Tensor
from jitkern.loader import CPU

if TYPE_CHECKING:
    from jitkern.kernel.api import Kernel

_COLD_BYTES = 200_000_000  # more than three times the largest L2 cache
_MAX_SETS = 64


@dataclass(frozen=True)
class Bench:
    """What :meth:`Kernel.bench` measured.

    Attributes:
        kernel: the variant.
        device: where.
        microseconds: of one call.
        bytes: that a call has to move.
        ceiling: GB/s that the memory of this device gives to a plain sum of two arrays, measured here.
    """

    kernel: str
    device: str
    microseconds: float
    bytes: int
    ceiling: float

    @property
    def gb_s(self) -> float:
        """Achieved GB/s."""
        return self.bytes / self.microseconds / 1000

    @property
    def share(self) -> float:
        """Achieved part of the ceiling; above 1 when the data fit into a cache."""
        return self.gb_s / self.ceiling

    @property
    def row(self) -> dict[str, Any]:
        """As a row of a table."""
        return {
            "kernel": self.kernel,
            "device": self.device,
            "µs": round(self.microseconds, 2),
            "MB": round(self.bytes / 1e6, 3),
            "GB/s": round(self.gb_s, 1),
            "of ceiling": f"{self.share:.0%}",
        }

    def __str__(self) -> str:
        return timing.table([self.row])

    def _repr_html_(self) -> str:
        return html.table([self.row]) + html.bars([(self.kernel, self.gb_s)], self.ceiling, "GB/s")


@functools.lru_cache(maxsize=16)
def ceiling(device: int) -> float:
    """GB/s of ``torch.add(a, b, out=c)`` over arrays much larger than a cache: two reads and a write."""
    import torch

    place = torch.device("cpu") if device == CPU else torch.device("cuda", device)
    count = (1 << 24) if device == CPU else (1 << 26)
    a, b, c = (torch.zeros(count, dtype=torch.float32, device=place) for _ in range(3))

    def call() -> None:
        torch.add(a, b, out=c)

    us = timing.cpu_microseconds(call, repeats=5) if device == CPU else timing.gpu_microseconds([call], rounds=4)
    return 3 * 4 * count / us / 1000


def bench(kernel: Kernel, args: Sequence[Any], kwargs: Mapping[str, Any], moved: int | None) -> Bench:
    """Time a call of a kernel; the arguments themselves are not written to."""
    import torch

    names = [parameter.name for parameter in kernel.declared.parameters]
    given = dict(zip(names, args, strict=False)) | dict(kwargs)
    tensors = {
        n: v for n, v in given.items() if n in kernel.rules and isinstance(kernel.rules[n], Tensor) and v is not None
    }
    size = sum(value.numel() * value.element_size() for value in tensors.values())
    sets = _sets(size, next(iter(tensors.values())).device.type == "cuda" if tensors else False)

    def copy() -> Callable[[], None]:
        own = given | {name: value.clone() for name, value in tensors.items()}
        return functools.partial(kernel, **{quick.python_name(name): value for name, value in own.items()})

    calls = [copy() for _ in range(sets)]
    with torch.no_grad():
        calls[0]()
        bound = kernel.last
        assert bound is not None, "the call has just bound it"
        if bound.device == CPU:
            us = timing.cpu_microseconds(calls[0], repeats=5)
        else:
            us = timing.gpu_microseconds(calls, rounds=max(1, 30 // sets))
    name = "CPU" if bound.device == CPU else torch.cuda.get_device_name(bound.device)
    return Bench(bound.instance.variant.stem, name, us, size if moved is None else moved, ceiling(bound.device))


def _sets(size: int, gpu: bool) -> int:
    return max(3, min(-(-_COLD_BYTES // max(size, 1)), _MAX_SETS)) if gpu else 1


def attributes(kernel: Kernel) -> dict[str, Any]:
    """Registers, memory and, on a GPU, occupancy of the variant of the last call or of the default one."""
    last = kernel.last
    instance = last.instance if last else kernel.instance()
    found: dict[str, Any] = {"variant": instance.variant.name}
    resources = instance.resources
    if resources is not None:
        found |= asdict(resources)
    if last is not None and last.device != CPU:
        threads = last.block[0] * last.block[1] * last.block[2]
        function = instance.load(last.device)
        found |= {"dynamic_shared_bytes": last.shared, "threads": threads}
        blocks, share = driver.occupancy(function.handle, threads, last.shared, last.device)
        found |= {"blocks_per_multiprocessor": blocks, "occupancy": round(share, 3)}
    return found


def to_cupy(kernel: Kernel, holes: Mapping[str, Any]) -> Any:
    """The cubin of a variant as a CuPy function.

    Raises:
        ToolchainError: CuPy is not installed.
    """
    try:
        import cupy
    except ImportError:
        raise ToolchainError('to_cupy() needs CuPy. Run: pip install "jitkern[cuda13]"') from None
    target = driver.target(cupy.cuda.Device().id)
    instance = kernel.instance(target=target, **holes)
    if instance.variant.backend != "nvrtc":
        raise UnsupportedError(f"{instance.variant.name} is no cubin; name a GPU target")
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(instance.binary()[0])
        file.flush()
        return cupy.RawModule(path=file.name).get_function(instance.variant.symbol)
