"""The merge of two states, for every op that is one: signature, checks, variant, grid, launch."""

from __future__ import annotations

from typing import Any

import torch.autograd.forward_ad as forward_ad

from jitkern import derivatives, launch, variants
from jitkern.errors import ArgumentError
from jitkern.ops import checks, validate
from jitkern.ops.pairwise_bind import bind
from jitkern.ops.pairwise_checks import Extras, check, check_overlaps
from jitkern.ops.recent import PerThread, RecentCalls

_NOTHING = Extras()
_PLAIN = (str, int, float, tuple)  # numpy's numbers compare as arrays
_PACK_MASK = variants.PACK_BYTES - 1

_thread = PerThread()
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
    operands = (out, out_lse, a, a_lse, b, b_lse)
    merge_unlike_recent(op, names, lse_layout, *operands, merged_tokens, lse_base, stream, backend, extras)


def merge_unlike_recent(
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
    """The same where :func:`again` has said no, or cannot be asked."""
    more: tuple[int, ...] = ()
    scales: list[Any] = []
    addresses: Any = None
    signature: Any = None
    try:
        addresses = _addresses(out, out_lse, a, a_lse, b, b_lse)
        signature = (
            *(out.shape, out.stride(), out.dtype, out.device),
            *(a.shape, a.stride(), a.dtype, a.device),
            *(b.shape, b.stride(), b.dtype, b.device),
            *(a_lse.shape, a_lse.stride(), a_lse.dtype, a_lse.device),
            *(b_lse.shape, b_lse.stride(), b_lse.dtype, b_lse.device),
            None if out_lse is None else (out_lse.shape, out_lse.stride(), out_lse.dtype, out_lse.device),
            _relations(*addresses),
            addresses.count(0),  # more than the bound call's: one has no memory of its own
            a.is_neg() or b.is_neg() or a_lse.is_neg() or b_lse.is_neg() or out.is_neg(),
            (lse_layout, lse_base, backend),
        )
        if extras is not None:
            given = extras.tensors
            more = _addresses(*given)
            scales = [x for x in given[:3] if x is not None]
            described = [None if x is None else (x.shape, x.stride(), x.dtype, x.device) for x in given]
            signature += (*described, extras.row_op_is_mask, more.count(0))
        bound = _thread.calls.get(signature)
    except checks.ODD:
        signature = bound = None
    if bound is None or derivatives.wanted(out, a, a_lse, b, b_lse, *scales, *(() if out_lse is None else (out_lse,))):
        state = dict(zip(names, (out, out_lse, a, a_lse, b, b_lse), strict=True))
        check(op, state, lse_layout, extras or _NOTHING)
        checks.lse_bases(op, lse_base)
        if signature is None:
            addresses, more = _addresses(*state.values()), () if extras is None else _addresses(*extras.tensors)
        bound = bind(op, state, lse_layout, addresses + more, lse_base, stream, backend, extras or _NOTHING)
        if signature is not None:
            _thread.keep(signature, bound)
    call, tokens, between = bound
    if validate.wanted():
        _validate(op, names, lse_layout, (out, out_lse, a, a_lse, b, b_lse), extras or _NOTHING, tokens)
    elif extras is None and call is not None and type(lse_base) in _PLAIN:  # it is not looked at again
        tensors = _tensors(out, out_lse, a, a_lse, b, b_lse)
        options = (lse_layout, lse_base, backend, len(tensors), _relations(*addresses))
        _recent.remember(options, tensors, bound)
    if merged_tokens is None:
        merged_tokens = tokens
    else:
        check_merged_tokens(op, merged_tokens, tokens)
    if call is not None:
        launch.on(call, stream, *addresses, merged_tokens, *between, *more)
        launch.wrote(*[x for x in (out, out_lse) if x is not None])


def _validate(
    op: str, names: tuple[str, ...], lse_layout: str, operands: tuple[Any, ...], extras: Extras, tokens: int
) -> None:
    check_overlaps(op, dict(zip(names, operands, strict=True)), extras)
    _, _, a, a_lse, b, b_lse = operands
    logs = (a_lse, b_lse) if lse_layout == "nh" else (a_lse.T, b_lse.T)
    pairs = [(names[2], a, names[3], logs[0]), (names[4], b, names[5], logs[1])]
    scales = {"output_scale": extras.out_scale, "prefix_scale": extras.a_scale, "suffix_scale": extras.b_scale}
    merged = None if extras.merged_tokens is None else (extras.merged_tokens, tokens)
    validate.check_values(op, pairs, scales, {"prefill_tokens_with_context": merged})


def _addresses(*operands: Any) -> tuple[int, ...]:
    return tuple([0 if x is None else x.data_ptr() for x in operands])


def _tensors(out: Any, out_lse: Any, a: Any, a_lse: Any, b: Any, b_lse: Any) -> tuple[Any, ...]:
    """What a guard looks at: no tensor twice, which it would refuse; their number tells what was left out."""
    if out is a and out_lse is a_lse:
        return out, b, a_lse, b_lse
    return (out, a, b, a_lse, b_lse) if out_lse is None else (out, a, b, a_lse, b_lse, out_lse)


def _relations(out: int, out_lse: int, a: int, a_lse: int, b: int, b_lse: int) -> tuple[Any, ...]:
    """What a bound call takes for granted of the addresses."""
    return (out | a | b) & _PACK_MASK, out == a, out == b, out_lse == a_lse, out_lse == b_lse


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
    if forward_ad._current_level >= 0:  # the guard sees no tangents
        return False
    try:
        if out.is_nested or a.is_nested or b.is_nested or a_lse.is_nested or b_lse.is_nested:
            return False  # the guard would end the process
        o, x, y, lx, ly = out.data_ptr(), a.data_ptr(), b.data_ptr(), a_lse.data_ptr(), b_lse.data_ptr()
        lo = 0 if out_lse is None else out_lse.data_ptr()
        if out is a and out_lse is a_lse:  # as _tensors has it
            tensors: tuple[Any, ...] = (out, b, a_lse, b_lse)
        else:
            tensors = (out, a, b, a_lse, b_lse) if out_lse is None else (out, a, b, a_lse, b_lse, out_lse)
        relations = (o | x | y) & _PACK_MASK, o == x, o == y, lo == lx, lo == ly
        options = (lse_layout, lse_base, backend, len(tensors), relations)
        for recent in _recent.entries:
            if recent.options == options and recent.same(*tensors):
                break
        else:
            return False
    except checks.ODD:
        return False
    call, tokens, _ = recent.call
    if merged_tokens is None:
        merged_tokens = tokens
    elif type(merged_tokens) is not int or not 0 <= merged_tokens <= tokens:
        return False
    launch.on(call, stream, o, lo, x, lx, y, ly, merged_tokens)
    launch.wrote(out) if out_lse is None else launch.wrote(out, out_lse)
    return True


def check_merged_tokens(op: str, merged_tokens: int | None, tokens: int) -> None:
    """Refuse a number of merged tokens that there cannot be."""
    if merged_tokens is not None and (type(merged_tokens) is not int or not 0 <= merged_tokens <= tokens):
        raise ArgumentError(
            f"{op}: prefill_tokens_with_context={merged_tokens}; expected 0 to {tokens}, the number of tokens"
        )
