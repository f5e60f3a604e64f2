"""What may be passed for a kernel's parameters, and the checks that say so."""

from __future__ import annotations

import ast
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jitkern import dtypes
from jitkern.errors import ArgumentError, UnsupportedError
from jitkern.kernel.signature import Declaration, Parameter
from jitkern.ops import checks


@dataclass(frozen=True)
class Tensor:
    """More about a tensor parameter than its declaration says.

    Attributes:
        dtype: the dtypes that it may have; default: those that its type allows.
        dims: how many dimensions; default: any.
        optional: None may be passed, and the kernel then gets a null pointer.
        strided: any strides may be passed, since the kernel is told them; otherwise it must be contiguous.
    """

    dtype: Any = None
    dims: int | None = None
    optional: bool = False
    strided: bool = False


@dataclass(frozen=True)
class Scalar:
    """More about a scalar parameter than its declaration says.

    Attributes:
        low, high: the range, both ends allowed.
        default: what is passed when it is left out.
    """

    low: float | None = None
    high: float | None = None
    default: Any = None


Rules = Mapping[str, Tensor | Scalar]


def complete(declared: Declaration, given: Rules | None) -> dict[str, Tensor | Scalar]:
    """A rule for every parameter: what was given, what the declaration's defaults say, nothing special.

    Raises:
        ArgumentError: a rule is for no parameter, or of the wrong kind.
    """
    given = given or {}
    names = [parameter.name for parameter in declared.parameters]
    rules: dict[str, Tensor | Scalar] = {}
    for name in given:
        if name not in names:
            raise ArgumentError(f"{declared.name}: signature={{{name!r}: ...}}; its parameters are {', '.join(names)}")
    for parameter in declared.parameters:
        default = parameter.default
        rule = given.get(parameter.name)
        if rule is None and parameter.pointer:
            rule = Tensor(optional=default in ("nullptr", "NULL", "0"))
        if rule is None:
            rule = Scalar(default=None if default is None else _number(declared.name, parameter))
        if isinstance(rule, Tensor) is not parameter.pointer:
            kind = "tensor" if parameter.pointer else "scalar"
            raise ArgumentError(f"{declared.name}: the parameter {parameter.name} is a {kind}: `{parameter.whole}`")
        rules[parameter.name] = rule
    return rules


def _number(kernel: str, parameter: Parameter) -> Any:
    text = (
        (parameter.default or "").strip().rstrip("fFuUlL")
        if "x" not in (parameter.default or "")
        else parameter.default
    )
    words = {"true": True, "false": False}
    if text in words:
        return words[text]
    try:
        return ast.literal_eval(str(text))
    except (ValueError, SyntaxError):
        raise ArgumentError(
            f"{kernel}: {parameter.name} has the default `{parameter.default}`; expected a plain number"
        ) from None


def as_tensor(kernel: str, name: str, value: Any) -> Any:
    """A torch view of an array: a tensor as it is, anything with DLPack or the CUDA array interface without a copy.

    Raises:
        ArgumentError: it is none of these.
    """
    import torch

    if isinstance(value, torch.Tensor):
        return value
    try:
        if hasattr(value, "__dlpack__"):
            return torch.utils.dlpack.from_dlpack(value)
        if hasattr(value, "__cuda_array_interface__"):
            return torch.as_tensor(value, device="cuda")
    except (BufferError, RuntimeError, TypeError) as error:
        raise ArgumentError(f"{kernel}: {name} is a {type(value).__name__} that cannot be shared: {error}") from None
    raise ArgumentError(
        f"{kernel}: {name} is a {type(value).__name__}; expected a torch tensor, or an array with __dlpack__ or"
        " __cuda_array_interface__"
    )


def check_tensor(kernel: str, parameter: Parameter, rule: Tensor, value: Any) -> None:
    """Refuse a tensor that the kernel would misread."""
    import torch

    name = parameter.name
    if value.is_nested:
        raise ArgumentError(f"{kernel}: {name} is a nested tensor; expected a plain one (pass its .values())")
    if value.layout is not torch.strided or value.is_neg() or value.is_conj():
        raise ArgumentError(f"{kernel}: {name} is {value.layout} or a lazy view; expected a plain strided tensor")
    allowed = _tags(rule.dtype) if rule.dtype is not None else parameter.elements
    tag = dtypes.resolve(value.dtype).tag
    if allowed is not None and tag not in allowed:
        raise ArgumentError(f"{kernel}: {name} is {value.dtype}; `{parameter.whole}` takes {' or '.join(allowed)}")
    if rule.dims is not None and value.dim() != rule.dims:
        raise ArgumentError(f"{kernel}: {name} has shape {list(value.shape)}; expected {rule.dims} dimensions")
    if not rule.strided and not value.is_contiguous():
        raise ArgumentError(
            f"{kernel}: {name} has strides {list(value.stride())} for shape {list(value.shape)}, and a plain pointer"
            f" does not tell them. Pass {name}.contiguous(), or pass the strides as numbers and declare"
            f' signature={{"{name}": jitkern.Tensor(strided=True)}}'
        )
    if not parameter.const:
        checks.writable(kernel, name, value)


def _tags(dtype: Any) -> tuple[str, ...]:
    several = dtype if isinstance(dtype, list | tuple | set) else [dtype]
    return tuple(dtypes.resolve(item).tag for item in several)


def check_scalar(kernel: str, parameter: Parameter, rule: Scalar, value: Any) -> None:
    """Refuse a number that the parameter's type cannot hold, or that is out of its range."""
    name, allowed = parameter.name, _range(parameter, rule)
    if hasattr(value, "data_ptr"):
        raise ArgumentError(
            f"{kernel}: {name} is a tensor; `{parameter.whole}` takes a number, for example {name}.item()"
        )
    try:
        struct.pack(parameter.format, value)
        inside = not (rule.low is not None and value < rule.low) and not (rule.high is not None and value > rule.high)
    except (struct.error, OverflowError, TypeError):
        inside = False
    if not inside:
        raise ArgumentError(f"{kernel}: {name}={value!r}; `{parameter.whole}` takes {allowed}")


def _range(parameter: Parameter, rule: Scalar) -> str:
    kind = {"f": "a number", "d": "a number", "?": "True or False"}.get(parameter.format, "a whole number")
    low, high = rule.low, rule.high
    if parameter.format in "bBhHiIqQ":
        bits = 8 * struct.calcsize(parameter.format)
        signed = parameter.format.islower()
        low = low if low is not None else -(1 << (bits - 1)) if signed else 0
        high = high if high is not None else (1 << (bits - signed)) - 1
    ends = [f"from {low}" if low is not None else "", f"to {high}" if high is not None else ""]
    return " ".join([kind, *filter(None, ends)])


def same_device(kernel: str, tensors: Mapping[str, Any]) -> Any:
    """The one device of all tensors.

    Raises:
        ArgumentError: they are on several, or there is no tensor.
    """
    devices = {name: value.device for name, value in tensors.items() if value is not None}
    if not devices:
        raise ArgumentError(f"{kernel}: no tensor is passed, so there is no device to run on; pass at least one")
    if len(set(devices.values())) > 1:
        said = ", ".join(f"{name} on {device}" for name, device in devices.items())
        raise ArgumentError(f"{kernel}: {said}; all tensors must be on one device (move them with .to(...))")
    device = next(iter(devices.values()))
    if device.type not in ("cpu", "cuda"):
        raise UnsupportedError(f"{kernel}: tensors on {device}; there are backends for cuda and cpu")
    return device
