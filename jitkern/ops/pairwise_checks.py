"""What the pairwise merge refuses, before anything runs."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch

from jitkern.errors import ArgumentError
from jitkern.ops import checks, overlap

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
_WIDE = (torch.float32, torch.float16, torch.bfloat16)
_WITHOUT_SCALES = ("merge_state", "merge_state_in_place")
_LAYOUT = "[tokens, heads, head size]"


class Extras(NamedTuple):
    """What few merges have: scales of 8-bit operands, and control by the device.

    Attributes:
        out_scale, a_scale, b_scale: one float32 on the device, or None.
        row_op: uint8 or bool for each token, or None.
        row_op_is_mask: any number but 0 means "merge", 0 "leave the row alone".
        merged_tokens: one int32 on the device, or None.
    """

    out_scale: Any = None
    a_scale: Any = None
    b_scale: Any = None
    row_op: Any = None
    row_op_is_mask: bool = False
    merged_tokens: Any = None

    @property
    def tensors(self) -> tuple[Any, ...]:
        """The operands in the kernel's order."""
        return self.out_scale, self.a_scale, self.b_scale, self.row_op, self.merged_tokens


def check(op: str, state: dict[str, Any], lse_layout: str, extras: Extras) -> None:
    """Check ``state``: out, out_lse, a, a_lse, b, b_lse by their public names."""
    (out_name, out), (out_lse_name, out_lse), *inputs = state.items()
    layout = "[heads, tokens]" if lse_layout == "hn" else "[tokens, heads]"
    outputs = [(out_name, out), *inputs[::2]]
    logarithms = [*inputs[1::2], *([] if out_lse is None else [(out_lse_name, out_lse)])]
    for name, value in outputs:
        checks.tensor(op, name, value, 3, _LAYOUT)
    for name, value in outputs:
        checks.same_shape(op, name, value, tuple(out.shape), _LAYOUT, out_name)
        checks.last_stride_one(op, name, value)
    _check_dtypes(op, out_name, out, inputs[::2], extras)
    tokens, heads, _ = out.shape
    rows = (heads, tokens) if lse_layout == "hn" else (tokens, heads)
    for name, value in logarithms:
        checks.tensor(op, name, value, 2, layout)
        checks.same_shape(op, name, value, rows, layout, out_name)
        checks.dtype(op, name, value, torch.float64 if out.dtype == torch.float64 else torch.float32)
    device = checks.same_device(op, **state)
    checks.memory(op, **dict(inputs), **{out_name: out, out_lse_name: out_lse})  # an output may be made from an input
    checks.writable(op, out_name, out)
    if out_lse is not None:
        checks.writable(op, out_lse_name, out_lse)
    _check_aliases(op, state)
    _check_extras(op, extras, tokens, device)
    check_overlaps(op, state, extras)
    checks.no_gradient(op, **state, **_scales(extras))


def _check_dtypes(op: str, out_name: str, out: Any, inputs: list[tuple[str, Any]], extras: Extras) -> None:
    (a_name, a), (b_name, b) = inputs
    wide = (*_WIDE, torch.float64) if out.device.type == "cpu" else _WIDE
    for name, value in inputs:
        checks.dtype(op, name, value, *wide, *(() if op in _WITHOUT_SCALES else FLOAT8))
    checks.dtype(op, b_name, b, a.dtype)
    if out.dtype in FLOAT8:
        if extras.out_scale is None:
            raise ArgumentError(f"{op}: {out_name} is {out.dtype}; give its scale, or an output of {a.dtype}")
        if a.dtype == torch.float64:
            raise ArgumentError(
                f"{op}: {a_name} is torch.float64 and {out_name} {out.dtype}; inputs of float32 can be quantised"
            )
    elif extras.out_scale is not None:
        raise ArgumentError(
            f"{op}: a scale of the output is given, but {out_name} is {out.dtype}; expected one of {FLOAT8}"
        )
    elif a.dtype in FLOAT8:
        checks.dtype(op, out_name, out, *_WIDE)
    else:
        checks.dtype(op, out_name, out, a.dtype)
    scales = {a_name: extras.a_scale, b_name: extras.b_scale}
    for name, scale in scales.items():
        if (a.dtype in FLOAT8) != (scale is not None):
            raise ArgumentError(
                f"{op}: {name} is {a.dtype}; its scale is {'needed' if scale is None else 'for 8-bit inputs only'}"
            )


def _check_aliases(op: str, state: dict[str, Any]) -> None:
    """An output may be an input, but only as the same view of it."""
    (out_name, out), (out_lse_name, out_lse), *inputs = state.items()
    for output_name, output, others in ((out_name, out, inputs[::2]), (out_lse_name, out_lse, inputs[1::2])):
        for name, value in others:
            same = output is not None and output.numel() > 0 and output.data_ptr() == value.data_ptr()
            if same and (output.stride() != value.stride() or output.dtype != value.dtype):
                raise ArgumentError(
                    f"{op}: {output_name} starts where {name} does, as {output.dtype} with strides"
                    f" {list(output.stride())} instead of {value.dtype} with {list(value.stride())};"
                    " an output may be an input only as the same view of it"
                )


def check_overlaps(op: str, state: dict[str, Any], extras: Extras, further_output: Any = None) -> None:
    """Outputs share no memory with anything, unless one is an input as the same view of it."""
    (out_name, out), (out_lse_name, out_lse), *inputs = state.items()
    same = {(out_name, name) for name, x in inputs[::2] if overlap.same_view(out, x)}
    same |= {(out_lse_name, name) for name, x in inputs[1::2] if overlap.same_view(out_lse, x)}
    rows = "mask" if extras.row_op_is_mask else "row_op"
    further = {**_scales(extras), rows: extras.row_op, "prefill_tokens_with_context": extras.merged_tokens}
    outputs = {out_name: out, out_lse_name: out_lse, "output_group_scale": further_output}
    overlap.refuse(op, outputs, {**dict(inputs), **further}, same)


def _scales(extras: Extras) -> dict[str, Any]:
    return {"output_scale": extras.out_scale, "prefix_scale": extras.a_scale, "suffix_scale": extras.b_scale}


def _check_extras(op: str, extras: Extras, tokens: int, device: Any) -> None:
    for name, value in _scales(extras).items():
        if value is not None:
            checks.vector(op, name, value, 1, device, torch.float32)
    if extras.row_op is not None:
        kinds = (torch.bool, torch.uint8) if extras.row_op_is_mask else (torch.uint8,)
        checks.vector(op, "mask" if extras.row_op_is_mask else "row_op", extras.row_op, tokens, device, *kinds)
    if extras.merged_tokens is not None:
        checks.vector(op, "prefill_tokens_with_context", extras.merged_tokens, 1, device, torch.int32)
