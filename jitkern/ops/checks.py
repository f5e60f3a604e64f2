"""Checks that ops share. Every refusal says the op, the operand, what was given, what is allowed."""

from __future__ import annotations

import math
import threading
from typing import Any

from jitkern import dtypes, settings
from jitkern.errors import ArgumentError, UnsupportedError
from jitkern.loader import CPU

BASES = {"e": math.e, "2": 2.0, "10": 10.0}


def tensor(op: str, name: str, value: Any, dims: int, layout: str) -> None:
    """Require a torch tensor of ``dims`` dimensions."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise ArgumentError(f"{op}: {name} is a {type(value).__name__}; expected a torch tensor {layout}")
    if value.dim() != dims:
        raise ArgumentError(f"{op}: {name} has shape {list(value.shape)}; expected {layout}")
    if value.layout is not torch.strided or value.is_neg() or value.is_conj():
        raise ArgumentError(f"{op}: {name} is {value.layout} or a lazy view; expected a plain strided tensor")


def same_shape(op: str, name: str, value: Any, expected: tuple[int, ...], layout: str, reference: str) -> None:
    """Require a shape."""
    if tuple(value.shape) != expected:
        raise ArgumentError(
            f"{op}: {name} has shape {list(value.shape)}; expected {layout} = {list(expected)} as {reference} says"
        )


def dtype(op: str, name: str, value: Any, *allowed: Any) -> None:
    """Require one of some torch dtypes."""
    if value.dtype not in allowed:
        raise ArgumentError(f"{op}: {name} is {value.dtype}; expected {' or '.join(map(str, allowed))}")


def same_device(op: str, **operands: Any) -> Any:
    """Require one device for all operands that are there, a CUDA device or the CPU; returns it."""
    devices = {name: value.device for name, value in operands.items() if value is not None}
    if len(set(devices.values())) > 1:
        raise ArgumentError(
            f"{op}: operands are on several devices: {', '.join(f'{n} on {d}' for n, d in devices.items())};"
            " move them to one"
        )
    found = next(iter(devices.values()))
    if found.type not in ("cuda", "cpu"):
        raise UnsupportedError(f"{op}: operands are on {found}; there are kernels for CUDA devices and the CPU")
    return found


def last_stride_one(op: str, name: str, value: Any) -> None:
    """Require elements of a row to be adjacent."""
    if value.shape[-1] > 1 and value.stride(-1) != 1:
        raise ArgumentError(
            f"{op}: {name} has strides {list(value.stride())}; its last dimension must be contiguous"
            " (call .contiguous())"
        )


def writable(op: str, name: str, value: Any) -> None:
    """Require every element of an output to have a place of its own."""
    spans = sorted((abs(stride), size) for size, stride in zip(value.shape, value.stride(), strict=True) if size > 1)
    reach = 0
    for stride, size in spans:
        if stride <= reach:
            raise ArgumentError(
                f"{op}: {name} has strides {list(value.stride())} for shape {list(value.shape)}: elements may overlap;"
                " an output needs a place for each"
            )
        reach += stride * (size - 1)


def vector(op: str, name: str, value: Any, length: int, device: Any, *dtypes_allowed: Any) -> None:
    """Require ``length`` adjacent elements on ``device``, of one of some torch dtypes."""
    import torch

    if not isinstance(value, torch.Tensor):
        raise ArgumentError(f"{op}: {name} is a {type(value).__name__}; expected a torch tensor")
    dtype(op, name, value, *dtypes_allowed)
    if value.numel() != length or not value.is_contiguous():
        given = f"shape {list(value.shape)} and strides {list(value.stride())}"
        raise ArgumentError(f"{op}: {name} has {given}; expected {length} contiguous elements")
    if value.device != device:
        raise ArgumentError(f"{op}: {name} is on {value.device}, the other operands on {device}; move it there")


def no_gradient(op: str, **operands: Any) -> None:
    """Refuse operands whose gradient would silently be lost."""
    import torch

    if torch.is_grad_enabled():
        wanted = [name for name, value in operands.items() if value is not None and value.requires_grad]
        if wanted:
            raise UnsupportedError(
                f"{op}: {', '.join(wanted)} requires a gradient, which this op does not give;"
                " use torch.no_grad() or .detach()"
            )


def current_stream_only(op: str, stream: Any, backend: str) -> None:
    """Refuse what a call that goes through torch's dispatcher cannot honour."""
    if stream is not None or backend != "auto":
        raise UnsupportedError(
            f"{op}: stream={stream!r}, backend={backend!r} with a gradient or under torch.compile; such a call runs on"
            " the current stream with the default backend (use torch.cuda.stream(...) or JITKERN_BACKEND)"
        )


def lse_bases(op: str, base: Any) -> tuple[float, float, float]:
    """The bases of the first L, the second L and the output's; one base stands for all three."""
    if isinstance(base, tuple):
        if len(base) != 3:
            raise ArgumentError(f"{op}: lse_base={base!r}; expected one base, or three: of either input and the output")
        return lse_base(op, base[0]), lse_base(op, base[1]), lse_base(op, base[2])
    number = lse_base(op, base)
    return number, number, number


def lse_base(op: str, base: Any) -> float:
    """The logarithm's base as a number: ``"e"``, ``"2"``, ``"10"``, or any number above 1.

    Below 1 the largest logarithm is the smallest weight, and a shift by the maximum would overflow.
    """
    number = BASES.get(str(base))
    if number is None and isinstance(base, int | float) and not isinstance(base, bool):
        number = float(base)
    if number is None or not 1 < number < math.inf:
        raise ArgumentError(f'{op}: lse_base={base!r}; expected "e", "2", "10" or a number above 1')
    return number


def backend_for(op: str, backend: str, device: Any) -> str:
    """The backend for tensors on a device."""
    allowed = ("nvrtc", "nvcc") if device.type == "cuda" else ("cpu",)
    chosen = settings.get().backend if backend == "auto" else backend
    if chosen == "auto" or (backend == "auto" and chosen not in allowed):
        return allowed[0]
    if chosen not in allowed:
        raise ArgumentError(
            f"{op}: backend={backend!r} for tensors on {device}; expected auto or {' or '.join(allowed)}"
        )
    return chosen


def device_number(device: Any) -> int:
    """The number that the loader uses for a torch device."""
    if device.type == "cpu":
        return CPU
    import torch

    return torch.cuda.current_device() if device.index is None else int(device.index)


def tag(value: Any) -> str:
    """The tag of a tensor's dtype."""
    return dtypes.resolve(value.dtype).tag


class PerThread(threading.local):
    """Bound calls by signature, of one thread. Bounded, since shapes of a serving engine vary without end."""

    limit = 4096

    def __init__(self) -> None:
        self.calls: dict[Any, Any] = {}

    def keep(self, signature: Any, call: Any) -> Any:
        """Remember a call."""
        if len(self.calls) >= self.limit:
            self.calls.clear()
        self.calls[signature] = call
        return call
