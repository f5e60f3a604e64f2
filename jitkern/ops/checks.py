"""Checks that ops share. Every refusal says the op, the operand, what was given, what is allowed."""

from __future__ import annotations

import math
from typing import Any

from jitkern import derivatives, dtypes, settings
from jitkern.errors import ArgumentError, UnsupportedError
from jitkern.loader import CPU

# What operands raise that are no tensors, have no memory or cannot be hashed; the checks then say what is wrong.
# The warning is one that was made an error: a FakeTensor that is asked for its address.
# The last two are what numpy's numbers and arrays raise when they are compared.
ODD = (AttributeError, TypeError, RuntimeError, Warning, ValueError, ArithmeticError)
WRAPPED = (
    "is wrapped by a transform (torch.vmap, torch.func.grad, jvp, functionalize and the like), which a kernel cannot"
    " follow; call the op outside of it: fold the mapped dimension into the tokens, or loop, and take gradients with"
    " torch.autograd"
)
BASES = {"e": math.e, "2": 2.0, "10": 10.0}


def tensor(op: str, name: str, value: Any, dims: int, layout: str) -> None:
    """Require a strided torch tensor of ``dims`` dimensions whose elements are as its memory says.

    Whether there is memory at all is for :func:`memory`, since to ask for it costs more.
    """
    import torch

    if not isinstance(value, torch.Tensor):
        raise ArgumentError(f"{op}: {name} is a {type(value).__name__}; expected a torch tensor {layout}")
    try:
        if value.layout is torch.strided and not (value.is_neg() or value.is_conj()) and len(value.shape) == dims:
            return
    except RuntimeError:  # a nested one has no shape
        pass
    if value.is_nested:
        raise ArgumentError(
            f"{op}: {name} is a nested tensor; expected a plain one {layout}: pass its .values(), with the tokens"
            " of all its parts in one dimension"
        )
    if value.layout is not torch.strided:
        raise ArgumentError(f"{op}: {name} is {value.layout}; expected a strided tensor {layout} (call .to_dense())")
    if value.is_neg() or value.is_conj():
        raise ArgumentError(
            f"{op}: {name} is a lazy view, whose sign is not in its memory; expected a plain tensor {layout}"
            " (call .resolve_neg() or .resolve_conj())"
        )
    raise ArgumentError(f"{op}: {name} has shape {list(value.shape)}; expected {layout}")


def memory(op: str, **operands: Any) -> None:
    """Refuse tensors that have elements but no memory of their own."""
    import torch

    for name, value in operands.items():
        if value is None:
            continue
        if torch._C._functorch.is_functorch_wrapped_tensor(value):
            raise UnsupportedError(f"{op}: {name} {WRAPPED}")
        if value.device.type not in ("cpu", "cuda") or value.numel() == 0 or _address(value):
            continue
        if value._is_zerotensor():
            raise ArgumentError(
                f"{op}: {name} is a tensor of zeros without memory, as autograd makes them; call .clone()"
            )
        raise ArgumentError(
            f"{op}: {name} is a {type(value).__name__} without memory of its own; pass the tensor that is inside it"
            " (.to_local(), .wait(), ...). Of FakeTensors, ask torch.ops.jitkern"
        )


def addresses(op: str, names: tuple[str, ...], operands: tuple[Any, ...]) -> tuple[int, ...]:
    """Where operands lie, 0 for None; what has elements but no memory is refused."""
    try:
        found = tuple([0 if x is None else x.data_ptr() for x in operands])
    except ODD:
        found = (0,)
    if 0 in found:
        memory(op, **dict(zip(names, operands, strict=True)))
        found = tuple([0 if x is None else x.data_ptr() for x in operands])
    return found


def _address(value: Any) -> int:
    try:
        return int(value.data_ptr())
    except ODD:
        return 0


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


def same_device(op: str, *, any_device: bool = False, **operands: Any) -> Any:
    """Require one device for all operands that are there, a CUDA device or the CPU (or any); returns it."""
    devices = {name: value.device for name, value in operands.items() if value is not None}
    if len(set(devices.values())) > 1:
        raise ArgumentError(
            f"{op}: operands are on several devices: {', '.join(f'{n} on {d}' for n, d in devices.items())};"
            " move them to one"
        )
    found = next(iter(devices.values()))
    if found.type not in ("cuda", "cpu") and not any_device:
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
    tensor(op, name, value, value.dim(), f"of {length} elements")
    memory(op, **{name: value})
    dtype(op, name, value, *dtypes_allowed)
    if value.numel() != length or not value.is_contiguous():
        given = f"shape {list(value.shape)} and strides {list(value.stride())}"
        raise ArgumentError(f"{op}: {name} has {given}; expected {length} contiguous elements")
    if value.device != device:
        raise ArgumentError(f"{op}: {name} is on {value.device}, the other operands on {device}; move it there")


def no_gradient(op: str, **operands: Any) -> None:
    """Refuse operands whose derivative, of either mode, would silently be lost."""
    import torch

    if not torch.compiler.is_compiling():  # traced code has no tangents
        no_tangent(op, **operands)
    if torch.is_grad_enabled():
        wanted = [name for name, value in operands.items() if value is not None and value.requires_grad]
        if wanted:
            raise UnsupportedError(
                f"{op}: {', '.join(wanted)} requires a gradient, which this op does not give;"
                " use torch.no_grad() or .detach()"
            )


def no_tangent(op: str, **operands: Any) -> None:
    """Refuse operands with a forward-mode derivative."""
    tangents = derivatives.with_tangent(operands)
    if tangents:
        raise UnsupportedError(
            f"{op}: {', '.join(tangents)} carries a forward-mode tangent, which this op does not give; use reverse mode"
            " (requires_grad), or pass torch.autograd.forward_ad.unpack_dual(x).primal"
        )


def current_stream_only(op: str, stream: Any, backend: str) -> None:
    """Refuse what a call that goes through torch's dispatcher cannot honour."""
    if stream is not None or backend != "auto":
        raise UnsupportedError(
            f"{op}: stream={stream!r}, backend={backend!r} with a gradient or under torch.compile; such a call runs on"
            " the current stream with the default backend (use torch.cuda.stream(...) or JITKERN_BACKEND)"
        )


def flag(op: str, name: str, value: Any) -> None:
    """Require a bool: a tensor would be read by the host, and a number may have been meant for its neighbour."""
    if not isinstance(value, bool):
        raise ArgumentError(f"{op}: {name}={value!r}; expected True or False")


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
        try:
            number = float(base)
        except OverflowError:
            number = math.inf
    if number is None or not 1 < number < math.inf:
        raise ArgumentError(f'{op}: lse_base={base!r}; expected "e", "2", "10" or a number above 1')
    return number


def backend_for(op: str, backend: str, device: Any) -> str:
    """The backend for tensors on a device."""
    allowed = ("nvrtc", "nvcc") if device.type == "cuda" else ("cpu",)
    if not isinstance(backend, str):
        raise ArgumentError(f"{op}: backend is a {type(backend).__name__}; expected auto or {' or '.join(allowed)}")
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
