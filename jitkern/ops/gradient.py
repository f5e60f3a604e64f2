"""The gradient of every merge, with respect to each O and L: one kernel for pairs, lists, stacks and ragged ones."""

from __future__ import annotations

import math
from typing import Any

import torch

from jitkern import launch, loader, streams, variants
from jitkern.loader import CPU
from jitkern.ops import checks
from jitkern.ops.kernels import BACKWARD as KERNEL
from jitkern.ops.nway import list_room
from jitkern.ops.nway_checks import Inputs
from jitkern.ops.shapes import base_ratio, is_wide

OP = "merge_backward"
_ROWS = "PPqqI{0}q{0}q"  # struct Rows of kernels_src/include/partials.cuh
_LAYOUT = "{1}P{1}P3P" + _ROWS + "0q" + _ROWS + "4qq2I4{2}i0P"  # struct BackwardParams of kernels_src/merge_backward.cu
_WARP, _ROWS_PER_BLOCK, _MAX_GRID_Y = 32, 4, 65535


def merge_backward(
    grad_v: Any,
    grad_s: Any,
    v: list[Any],
    s: list[Any],
    sink: Any,
    num_valid: Any,
    indptr: Any,
    listed: bool,
    sink_in_lse: bool,
    merged_tokens: int,
    bases: tuple[float, float, float],
) -> list[Any]:
    """Gradients of ``[*v, *s]``.

    Args:
        grad_v, grad_s: gradients of the merged O [tokens, heads, head size] and L [tokens, heads].
        v, s, sink, num_valid, indptr: as given to the merge; one tensor each if not ``listed``.
        listed, sink_in_lse: as given to the merge.
        merged_tokens: tokens from this one on are copies of the second partial; -1: none are.
        bases: of the first L, of the other ones, of the merged L.
    """
    inputs = Inputs(v if listed else v[0], s if listed else s[0], sink, num_valid, indptr, grad_v, grad_s)
    partly = num_valid is not None or indptr is not None
    make = torch.zeros_like if partly else torch.empty_like
    gradients = [make(x, memory_format=torch.contiguous_format) for x in (*inputs.values, *inputs.logs)]
    if grad_v.numel() == 0 or inputs.count == 0:
        return [gradient.zero_() for gradient in gradients]
    grad_v = grad_v if grad_v.stride(-1) == 1 else grad_v.contiguous()
    into = Inputs(
        gradients[: inputs.listed] if listed else gradients[0],
        gradients[inputs.listed :] if listed else gradients[1],
        sink,
        num_valid,
        indptr,
        grad_v,
        grad_s,
    )
    call = _bind(inputs, into, grad_v, grad_s, sink_in_lse, merged_tokens, bases)
    launch.on(call, None)
    return gradients


def _bind(
    inputs: Inputs,
    into: Inputs,
    grad_v: Any,
    grad_s: Any,
    sink_in_lse: bool,
    merged_tokens: int,
    bases: tuple[float, float, float],
) -> launch.Call:
    tokens, heads, d = map(int, grad_v.shape)
    device = checks.device_number(grad_v.device)
    room = list_room(inputs.listed) if inputs.is_list else 1
    wide = is_wide(grad_v, grad_s, *inputs.values, *inputs.logs, *into.values, *into.logs)
    constants = variants.make_constants(KERNEL, {"d": d, "list": room, "stride": 64 if wide else 32})
    backend = checks.backend_for(OP, "auto", grad_v.device)
    pack = variants.widest_pack(grad_v.element_size(), d * grad_v.element_size())
    variant = variants.Variant(OP, checks.tag(grad_v), pack, launch.target(device), constants, backend)
    function = loader.get(variant, device, None if device == CPU else streams.resolve_stream(None, device))
    padding = (0,) * (room - inputs.listed)

    def pointers(of: Inputs) -> list[int]:
        return [x for group in (of.values, of.logs) for x in (*(t.data_ptr() for t in group), *padding)]

    optional = [0 if x is None else x.data_ptr() for x in (inputs.num_valid, inputs.indptr)]
    to_e = base_ratio(bases[2], math.e)
    values = [
        *pointers(inputs),
        *pointers(into),
        grad_v.data_ptr(),
        grad_s.data_ptr(),
        0 if inputs.sink is None else inputs.sink.data_ptr(),
        *optional,
        *inputs.row_strides(room),
        *optional,
        *into.row_strides(room),
        *grad_v.stride()[:2],
        *grad_s.stride(),
        tokens if merged_tokens < 0 else merged_tokens,
        tokens,
        heads,
        base_ratio(bases[0], bases[2]),
        base_ratio(bases[1], bases[2]),
        to_e,
        1 / to_e,
        int(sink_in_lse),
    ]
    layout = _LAYOUT.format(2 * room, 2 * room, "d" if variant.dtype == "f64" else "f")
    lanes, rows = (1, 1) if device == CPU else (_WARP, _ROWS_PER_BLOCK)
    depth = -(-tokens // _MAX_GRID_Y)
    grid = (-(-heads // rows), -(-tokens // depth), depth)
    work = 3 * inputs.count * grad_v.numel() * grad_v.element_size()
    return launch.Call(function, grid, (lanes, rows, 1), layout, values, "", work=work)
