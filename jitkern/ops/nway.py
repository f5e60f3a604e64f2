"""``merge_states``: any number of partial states in one launch, stacked, as a list, or ragged."""

from __future__ import annotations

import math
from typing import Any

import torch

from jitkern import derivatives, launch, loader, streams, variants
from jitkern.errors import ArgumentError
from jitkern.loader import CPU
from jitkern.ops import checks, validate
from jitkern.ops.kernels import STATES as KERNEL
from jitkern.ops.nway_checks import Inputs, check, check_overlaps
from jitkern.ops.pairwise import again, merge_unlike_recent
from jitkern.ops.recent import PerThread
from jitkern.ops.shapes import base_ratio, geometry, is_wide, pack_of
from jitkern.ops.state import traced, wants_gradient

OP = "merge_states"
MAX_LIST = 256
MAX_COUNTED = 8  # the most partials for whose very number there is a variant, which loads all of them at once
_ROWS = "PPqqI{0}q{0}q"  # struct Rows of kernels_src/include/partials.cuh; {0}: twice the strides that it has room for
_LAYOUT = "{1}P3P" + _ROWS + "4q2I3{2}2i0P"  # struct StatesParams of kernels_src/merge_states.cu

_PAIR = ("out", "out_lse", "v0", "s0", "v1", "s1")

_thread = PerThread()


def merge_states(
    v: Any,
    s: Any,
    *,
    out: Any = None,
    out_lse: Any = None,
    lse_base: Any = "e",
    sink: Any = None,
    sink_in_lse: bool = True,
    num_valid: Any = None,
    indptr: Any = None,
    stream: Any = None,
    backend: str = "auto",
) -> tuple[Any, Any]:
    """Merge N partial attention states in one launch, accumulated in float32, and return (v, s).

    Args:
        v: [tokens, N, heads, head size], or a list of N tensors [tokens, heads, head size], or, with ``indptr``,
            [rows, heads, head size]. Any strides; the last dimension contiguous. float32, float16, bfloat16 (float64 on
            the CPU).
        s: log-sum-exp in the same arrangement without the head size, float32; +-inf: no keys.
        out, out_lse: [tokens, heads, head size] and [tokens, heads]; allocated if None. May be partials.
        lse_base: base of ``s`` and of the result, as in :func:`merge_state`; or three, of which the first two agree.
        sink: [heads] float32 or None: one more logit in the denominator, without a value, in natural units.
        sink_in_lse: whether the returned log-sum-exp counts the sink.
        num_valid: [tokens] int32 on the device or None: how many of the N count; the rest is not read.
        indptr: [tokens + 1] int32 on the device or None: token t has the rows indptr[t] to indptr[t + 1].
        stream, backend: as in :func:`jitkern.merge_attn_states`.

    Raises:
        ArgumentError: an operand does not fit; nothing has run.
    """
    tensors = [*v, *s] if isinstance(v, list | tuple) and isinstance(s, list | tuple) else [v, s]
    tracing = traced()
    if tracing or (out is None and out_lse is None and wants_gradient(*tensors, sink)):
        checks.current_stream_only(OP, stream, backend)
        if not tracing:
            with torch.no_grad():  # the checks refuse operands with a gradient
                check(OP, Inputs(v, s, sink, num_valid, indptr, out, out_lse))
        return _through_op(v, s, out, out_lse, lse_base, sink, sink_in_lse, num_valid, indptr)
    inputs = Inputs(v, s, sink, num_valid, indptr, out, out_lse)
    if out is None or out_lse is None:
        check(OP, inputs)
        inputs = inputs.with_outputs()
    launch_states(inputs, lse_base, sink_in_lse, stream, backend)
    return inputs.out, inputs.out_lse


def _through_op(
    v: Any, s: Any, out: Any, out_lse: Any, lse_base: Any, sink: Any, sink_in_lse: bool, num_valid: Any, indptr: Any
) -> tuple[Any, Any]:
    listed = isinstance(v, list | tuple)
    bases = _bases(lse_base)
    values, logs = (list(v), list(s)) if listed else ([v], [s])
    result = torch.ops.jitkern.merge_states(
        values, logs, sink, num_valid, indptr, listed, sink_in_lse, bases[0], bases[2]
    )
    return (result[0] if out is None else out.copy_(result[0])), (
        result[1] if out_lse is None else out_lse.copy_(result[1])
    )


def launch_states(inputs: Inputs, lse_base: Any, sink_in_lse: bool, stream: Any, backend: str) -> None:
    """Launch with outputs that are there."""
    checks.flag(OP, "sink_in_lse", sink_in_lse)
    pair = inputs.pair()
    if pair is not None:  # the pairwise kernel is made for two
        if not again("nh", inputs.out, inputs.out_lse, *pair, None, lse_base, stream, backend):
            check(OP, inputs)
            _bases(lse_base)
            merge_unlike_recent(OP, _PAIR, "nh", inputs.out, inputs.out_lse, *pair, None, lse_base, stream, backend)
        return
    signature = addresses = bound = None
    try:
        addresses = inputs.addresses()
        signature = (inputs.signature(addresses), lse_base, sink_in_lse, backend)
        bound = _thread.calls.get(signature)
    except checks.ODD:
        signature = bound = None
    if bound is None or derivatives.wanted(*inputs.outputs_and_inputs()):
        check(OP, inputs)
        _bases(lse_base)
        addresses = inputs.addresses()
        bound = (_bind(inputs, addresses, lse_base, sink_in_lse, stream, backend),)
        if signature is not None:
            _thread.keep(signature, bound)
    (call,) = bound
    if validate.wanted():
        _validate(inputs)
    if call is not None and addresses is not None:
        room = call.room
        padding = (0,) * (room - inputs.listed)
        count = inputs.listed
        launch.on(
            call.call,
            stream,
            *addresses[:count],
            *padding,
            *addresses[count : 2 * count],
            *padding,
            *addresses[2 * count :],
        )
        launch.wrote(*[x for x in (inputs.out, inputs.out_lse) if x is not None])


def _validate(inputs: Inputs) -> None:
    check_overlaps(OP, inputs)
    heads, d = inputs.values[0].shape[-2:]
    pairs = [
        (f"v{i}", value.reshape(-1, heads, d), f"s{i}", log.reshape(-1, heads))
        for i, (value, log) in enumerate(zip(inputs.values, inputs.logs, strict=True))
        if inputs.num_valid is None and inputs.indptr is None
    ]
    counts = {"num_valid": inputs.num_valid, "indptr": inputs.indptr}
    bounds = {name: None if x is None else (x, inputs.count) for name, x in counts.items()}
    validate.check_values(OP, pairs, {}, bounds)


def _bases(lse_base: Any) -> tuple[float, float, float]:
    bases = checks.lse_bases(OP, lse_base)
    if bases[0] != bases[1]:
        raise ArgumentError(
            f"{OP}: lse_base={lse_base!r}; all partials have one base: expected (base of s, base of s, of the result)"
        )
    return bases


class _Bound:
    """A call, and how many tensors its parameter block has room for."""

    __slots__ = ("call", "room")

    def __init__(self, call: launch.Call, room: int) -> None:
        self.call, self.room = call, room


def _bind(
    inputs: Inputs, addresses: tuple[int, ...], lse_base: Any, sink_in_lse: bool, stream: Any, backend: str
) -> _Bound | None:
    out, first = inputs.out, inputs.values[0]
    bases = _bases(lse_base)
    chosen = checks.backend_for(OP, backend, out.device)
    tokens, heads, d = map(int, out.shape)
    if out.numel() == 0:
        return None
    device = checks.device_number(out.device)
    pack = min(pack_of(x, d) for x in (out, *inputs.values))
    count, room = _count_and_room(inputs, device)
    operands = (out, inputs.out_lse, *inputs.values, *inputs.logs)
    holes = {"d": d, "list": room, "stride": 64 if is_wide(*operands) else 32, "count": count}
    constants = variants.make_constants(KERNEL, holes)
    variant = variants.Variant(KERNEL.name, checks.tag(first), pack, launch.target(device), constants, chosen)
    function = loader.get(variant, device, None if device == CPU else streams.resolve_stream(stream, device))
    to_e = base_ratio(bases[2], math.e)
    listed = inputs.listed
    padding = (0,) * (room - listed)
    values = [
        *addresses[:listed],
        *padding,
        *addresses[listed : 2 * listed],
        *padding,
        *addresses[2 * listed :],
        *inputs.row_strides(0 if count else room),
        *out.stride()[:2],
        *inputs.out_lse.stride(),
        tokens,
        heads,
        base_ratio(bases[0], bases[2]),
        to_e,
        1 / to_e,
        int(sink_in_lse),
        int(inputs.shares_lse()),
    ]
    accumulator = "d" if variant.dtype == "f64" else "f"
    layout = _LAYOUT.format(2 if count else 2 * room, 2 * room, accumulator)
    grid, block = geometry(tokens, heads, d // pack, device)
    work = (inputs.count + 1) * out.numel() * out.element_size()
    call = launch.Call(function, grid, block, layout, values, f"{2 * room}P5P", work=work, pdl=True)
    return _Bound(call, room)


def _count_and_room(inputs: Inputs, device: int) -> tuple[int, int]:
    """How many partials are compiled in (0: none), and how many tensors of a list there is room for."""
    if device != CPU and 2 <= inputs.count <= MAX_COUNTED and inputs.alike():
        return inputs.count, inputs.listed
    return 0, list_room(inputs.listed)


def list_room(count: int) -> int:
    """How many tensors the variant for a list of ``count`` has room for: a power of two, so that few are made."""
    if count > MAX_LIST:
        raise ArgumentError(f"{OP}: a list of {count} tensors; expected at most {MAX_LIST}, or one stacked tensor")
    return 1 if count == 1 else 1 << (count - 1).bit_length()
