"""The one table of element types: torch name, tag in variant names, CUDA type, size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jitkern.errors import ArgumentError


@dataclass(frozen=True)
class DType:
    """An element type.

    Attributes:
        tag: the short name used in variants, symbols and the command line (``bf16``).
        torch_name: the attribute of ``torch`` (``bfloat16``).
        cuda: the type's name in kernel text.
        size: bytes of one element.
    """

    tag: str
    torch_name: str
    cuda: str
    size: int


_TABLE = (
    DType("f64", "float64", "jitkern::f64", 8),
    DType("f32", "float32", "jitkern::f32", 4),
    DType("f16", "float16", "jitkern::f16", 2),
    DType("bf16", "bfloat16", "jitkern::bf16", 2),
    DType("e4m3", "float8_e4m3fn", "jitkern::e4m3", 1),
    DType("e5m2", "float8_e5m2", "jitkern::e5m2", 1),
    DType("i64", "int64", "jitkern::i64", 8),
    DType("i32", "int32", "jitkern::i32", 4),
    DType("u8", "uint8", "jitkern::u8", 1),
    DType("bool", "bool", "bool", 1),
)
BY_TAG = {dtype.tag: dtype for dtype in _TABLE}
_BY_NAME = {name: dtype for dtype in _TABLE for name in (dtype.tag, dtype.torch_name, f"torch.{dtype.torch_name}")}
_BY_NAME |= {"half": BY_TAG["f16"], "float": BY_TAG["f32"], "double": BY_TAG["f64"], "fp32": BY_TAG["f32"]}


def resolve(dtype: Any) -> DType:
    """Return the table's entry for a ``torch.dtype``, a numpy dtype, a tag (``"bf16"``) or a name (``"bfloat16"``).

    Raises:
        ArgumentError: the type is not in the table.
    """
    if isinstance(dtype, DType):
        return dtype
    found = _BY_NAME.get(dtype if isinstance(dtype, str) else str(dtype))
    if found is None and not isinstance(dtype, str):
        found = _BY_NAME.get(str(getattr(dtype, "name", None) or getattr(dtype, "__name__", "")))
    if found is None:
        raise ArgumentError(f"unknown element type {dtype!r}; known are {', '.join(BY_TAG)} and their torch dtypes")
    return found
