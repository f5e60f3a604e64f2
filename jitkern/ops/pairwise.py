"""The merge of two states, for every op that is one: signature, checks, variant, grid, launch."""

from __future__ import annotations

import math
from typing import Any

from jitkern import derivatives, dtypes, launch, loader, streams, variants
from jitkern.errors import ArgumentError, UnsupportedError
from jitkern.loader import CPU
from jitkern.ops import checks, validate
from jitkern.ops.pairwise_checks import Extras, check
from jitkern.ops.recent import RecentCalls
from jitkern.ops.shapes import base_ratio, geometry, is_wide, lse_strides, pack_of

_LAYOUT = "6Pq2I4{0}2i5P12q0P"  # struct MergeParams of kernels_src/merge_attn_states.cu; {0}: f, or d beside float64
_PATCH, _PATCH_WITH_EXTRAS = "6Pq", "6Pq2I4{0}2i5P"
_HEAD_SIZES = (64, 128, 256, 512)
_NOTHING = Extras()

KERNEL = variants.register(
    variants.Kernel(
        "merge_attn_states",
        {"d": None, "dense": 0, "out": "", "stride": 32, "control": 0},
        tuple(
            (tag, pack, (("d", d), ("dense", dense)))
            for tag, pack in (("f32", 4), ("f16", 8), ("bf16", 8))
            for d in _HEAD_SIZES
            for dense in (1, 2)
        ),
    )
)
_thread = checks.PerThread()
_recent = RecentCalls()


def merge(
    op: str,
    names: tuple[str, str, str, str, str, str],
    lse_layout: str,
    out: Any,
    out_lse: Any,
    a: Any,
    a_lse: Any,
    b: Any,
    b_lse: Any,
    merged_tokens: int | None,
    lse_base: Any,
    stream: Any,
    backend: str,
    extras: Extras | None = None,
) -> None:
    """Merge ``a`` and ``b`` into ``out``.

    Args:
        op: the public op, for messages.
        names: its names of out, out_lse, a, a_lse, b, b_lse.
        lse_layout: ``"hn"`` for L of [heads, tokens], ``"nh"`` for [tokens, heads].
        out, out_lse, a, a_lse, b, b_lse: the states; ``out_lse`` may be None.
        merged_tokens: tokens from this one on are copies of ``b``; None: all are merged.
        lse_base, stream, backend: as in the public ops.
        extras: scales and control by the device.
    """
    if extras is None and again(lse_layout, out, out_lse, a, a_lse, b, b_lse, merged_tokens, lse_base, stream, backend):
        return
    more: tuple[int, ...] = ()
    addresses: Any
    signature: Any
    try:
        addresses = (
            out.data_ptr(),
            0 if out_lse is None else out_lse.data_ptr(),
            a.data_ptr(),
            a_lse.data_ptr(),
            b.data_ptr(),
            b_lse.data_ptr(),
        )
        signature = (
            *(out.shape, out.stride(), out.dtype, out.device),
            *(a.shape, a.stride(), a.dtype, a.device),
            *(b.shape, b.stride(), b.dtype, b.device),
            *(a_lse.shape, a_lse.stride(), a_lse.dtype, a_lse.device),
            *(b_lse.shape, b_lse.stride(), b_lse.dtype, b_lse.device),
            None if out_lse is None else (out_lse.shape, out_lse.stride(), out_lse.dtype, out_lse.device),
            _relations(*addresses),
            a.is_neg() or b.is_neg() or a_lse.is_neg() or b_lse.is_neg() or out.is_neg(),
            (lse_layout, lse_base, backend),
        )
        if extras is not None:
            more = tuple(0 if x is None else x.data_ptr() for x in extras.tensors)
            signature += tuple(None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in extras.tensors)
            signature += (extras.row_op_is_mask,)
        bound = _thread.calls.get(signature)
    except (AttributeError, TypeError, RuntimeError):  # no tensor, no storage, cannot be hashed: the checks say what
        addresses = signature = bound = None
    if bound is None or derivatives.wanted(out, a, a_lse, b, b_lse):
        state = dict(zip(names, (out, out_lse, a, a_lse, b, b_lse), strict=True))
        check(op, state, lse_layout, extras or _NOTHING)
        checks.lse_bases(op, lse_base)
        if addresses is None:
            raise UnsupportedError(f"{op}: operands have no memory of their own (vmap and the like); loop over them")
        bound = _bind(op, state, lse_layout, addresses + more, lse_base, stream, backend, extras or _NOTHING)
        _thread.keep(signature, bound)
    call, tokens, between = bound
    if validate.wanted():
        _validate(op, names, lse_layout, (a, a_lse, b, b_lse), extras or _NOTHING, tokens)
    elif extras is None and call is not None:  # what is remembered is not looked at again
        tensors = (out, a, b, a_lse, b_lse) if out_lse is None else (out, a, b, a_lse, b_lse, out_lse)
        _recent.remember((lse_layout, lse_base, backend, len(tensors)), tensors, _relations(*addresses), bound)
    if merged_tokens is None:
        merged_tokens = tokens
    else:
        check_merged_tokens(op, merged_tokens, tokens)
    if call is not None:
        launch.on(call, stream, *addresses, merged_tokens, *between, *more)


def _validate(
    op: str, names: tuple[str, ...], lse_layout: str, inputs: tuple[Any, ...], extras: Extras, tokens: int
) -> None:
    a, a_lse, b, b_lse = inputs
    logs = (a_lse, b_lse) if lse_layout == "nh" else (a_lse.T, b_lse.T)
    pairs = [(names[2], a, names[3], logs[0]), (names[4], b, names[5], logs[1])]
    scales = {"output_scale": extras.out_scale, "prefix_scale": extras.a_scale, "suffix_scale": extras.b_scale}
    merged = None if extras.merged_tokens is None else (extras.merged_tokens, tokens)
    validate.check_values(op, pairs, scales, {"prefill_tokens_with_context": merged})


def _relations(out: int, out_lse: int, a: int, a_lse: int, b: int, b_lse: int) -> tuple[Any, ...]:
    """What a bound call takes for granted of the addresses."""
    low_bits = (out | a | b) & (variants.PACK_BYTES - 1)
    return low_bits, out == a, out == b, out_lse == a_lse, out_lse == b_lse


def again(
    lse_layout: str,
    out: Any,
    out_lse: Any,
    a: Any,
    a_lse: Any,
    b: Any,
    b_lse: Any,
    merged_tokens: Any,
    lse_base: Any,
    stream: Any,
    backend: str,
) -> bool:
    """Launch if this is like one of the last few calls; says whether it was."""
    tensors = (out, a, b, a_lse, b_lse) if out_lse is None else (out, a, b, a_lse, b_lse, out_lse)
    options = (lse_layout, lse_base, backend, len(tensors))
    for recent in _recent.entries:
        if recent.options == options and recent.same(*tensors):
            o, x, y, lx, ly = out.data_ptr(), a.data_ptr(), b.data_ptr(), a_lse.data_ptr(), b_lse.data_ptr()
            lo = 0 if out_lse is None else out_lse.data_ptr()
            if recent.relations != _relations(o, lo, x, lx, y, ly):
                continue
            call, tokens, _ = recent.call
            if merged_tokens is None:
                merged_tokens = tokens
            elif type(merged_tokens) is not int or not 0 <= merged_tokens <= tokens:
                return False
            launch.on(call, stream, o, lo, x, lx, y, ly, merged_tokens)
            return True
    return False


def _bind(
    op: str,
    state: dict[str, Any],
    lse_layout: str,
    addresses: tuple[int, ...],
    lse_base: Any,
    stream: Any,
    backend: str,
    extras: Extras,
) -> tuple[launch.Call | None, int, tuple[Any, ...]]:
    """Choose the variant, load it, and pack its parameters.

    Returns the call (none when there is nothing to do), the number of tokens, and what lies in the parameter block
    between the addresses of the states and those of ``extras``, if there are any.
    """
    out, out_lse, a, a_lse, b, b_lse = state.values()
    bases = checks.lse_bases(op, lse_base)
    chosen = checks.backend_for(op, backend, out.device)
    tokens, heads, d = map(int, out.shape)
    if tokens == 0 or heads == 0 or d == 0:
        return None, tokens, ()
    if max(tokens, heads) >= 1 << 31:
        raise ArgumentError(f"{op}: {tokens} tokens and {heads} heads; a call takes less than 2^31 of either")
    device = checks.device_number(out.device)
    pack = min(pack_of(value, d) for value in (out, a, b))
    holes: dict[str, int | str] = {
        "d": d,
        "dense": _dense(state, lse_layout),
        "out": "" if out.dtype == a.dtype else dtypes.resolve(out.dtype).cuda,
        "stride": 64 if is_wide(*state.values()) else 32,
        "control": int(extras.row_op is not None or extras.merged_tokens is not None),
    }
    constants = variants.make_constants(KERNEL, holes)
    variant = variants.Variant(KERNEL.name, checks.tag(a), pack, launch.target(device), constants, chosen)
    function = loader.get(variant, device, None if device == CPU else streams.resolve_stream(stream, device))
    transposed = lse_layout == "hn"
    to_e = base_ratio(bases[2], math.e)
    ratios = (base_ratio(bases[0], bases[2]), base_ratio(bases[1], bases[2]), to_e, 1 / to_e)
    flags = (int(addresses[1] in (addresses[3], addresses[5])), int(extras.row_op_is_mask))
    between = (tokens, heads, *ratios, *flags)
    values = [
        *addresses[:6],
        tokens,
        *between,
        *(addresses[6:] or (0, 0, 0, 0, 0)),
        *(stride for value in (out, a, b) for stride in value.stride()[:2]),
        *(stride for value in (out_lse, a_lse, b_lse) for stride in lse_strides(value, transposed)),
    ]
    grid, block = geometry(tokens, heads, d // pack, device)
    accumulator = "d" if variant.dtype == "f64" else "f"
    with_extras = len(addresses) > 6
    patch = (_PATCH_WITH_EXTRAS if with_extras else _PATCH).format(accumulator)
    work = tokens * heads * d * (2 * a.element_size() + out.element_size())
    call = launch.Call(function, grid, block, _LAYOUT.format(accumulator), values, patch, work=work, pdl=True)
    return call, tokens, between if with_extras else ()


def _dense(state: dict[str, Any], lse_layout: str) -> int:
    """1: all contiguous and L in memory as [tokens, heads]; 2: as [heads, tokens]; 0: anything else."""
    out, out_lse, a, a_lse, b, b_lse = state.values()
    logs = [x if lse_layout == "nh" else x.T for x in (a_lse, b_lse, out_lse) if x is not None]
    if not all(x.is_contiguous() for x in (out, a, b)):
        return 0
    if all(x.is_contiguous() for x in logs):
        return 1
    return 2 if all(x.T.is_contiguous() for x in logs) else 0


def check_merged_tokens(op: str, merged_tokens: int | None, tokens: int) -> None:
    """Refuse a number of merged tokens that there cannot be."""
    if merged_tokens is not None and not 0 <= merged_tokens <= tokens:
        raise ArgumentError(
            f"{op}: prefill_tokens_with_context={merged_tokens}; expected 0 to {tokens}, the number of tokens"
        )
