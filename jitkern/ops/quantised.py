"""Merging into 8-bit floating point with a scale for each token or each group of a token's elements."""

from __future__ import annotations

import math
from typing import Any

import torch

from jitkern import derivatives, dtypes, launch, loader, streams, variants
from jitkern.errors import ArgumentError
from jitkern.loader import CPU
from jitkern.ops import checks, validate
from jitkern.ops.kernels import QUANTISE as KERNEL
from jitkern.ops.pairwise import check_merged_tokens
from jitkern.ops.pairwise_checks import FLOAT8, Extras, check, check_overlaps
from jitkern.ops.recent import PerThread
from jitkern.ops.shapes import base_ratio, is_wide, lse_strides, pack_of

OP = "merge_attn_states"
_LAYOUT = "7Pq14q4I4fi0P"  # struct QuantiseParams of kernels_src/merge_quantise.cu
_PATCH = "7Pq"
_THREADS = 256
_MAX_SHARED_GROUPS = 12 * 1024  # 48 KiB
_thread = PerThread()


def merge_quantised(
    state: dict[str, Any],
    scale: Any,
    power_of_two: bool,
    merged_tokens: int | None,
    lse_base: Any,
    stream: Any,
    backend: str,
) -> None:
    """Merge, writing 8-bit elements to ``output`` and the groups' scales to ``scale``.

    Args:
        state: output, output_lse, prefix_output, prefix_lse, suffix_output, suffix_lse by name; L [heads, tokens].
        scale: [tokens, groups] float32, any strides; the groups are equal parts of a token's heads times head size.
        power_of_two: round scales up to powers of two (UE8M0).
        merged_tokens: tokens from this one on are copies of the suffix, quantised too.
        lse_base, stream, backend: as in :func:`jitkern.merge_attn_states`.
    """
    checks.flag(OP, "scale_ue8m0", power_of_two)
    operands = (*state.values(), scale)
    signature: Any = None
    bound = None
    try:
        addresses = [0 if x is None else x.data_ptr() for x in operands]
        described = [None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.is_neg()) for x in operands]
        signature = (*described, _relations(addresses), power_of_two, lse_base, backend)
        bound = _thread.calls.get(signature)
    except checks.ODD:
        signature = None
    if bound is None or derivatives.wanted(*[x for x in operands if x is not None]):
        _check(state, scale)
        addresses = [0 if x is None else x.data_ptr() for x in operands]
        bound = _bind(operands, addresses, power_of_two, lse_base, stream, backend)
        if signature is not None:
            _thread.keep(signature, bound)
    call, tokens = bound
    if validate.wanted():
        _validate(state, scale)
    k = tokens if merged_tokens is None else merged_tokens
    check_merged_tokens(OP, k, tokens)
    if call is not None:
        launch.on(call, stream, *addresses, k)
        launch.wrote(*[x for x in (state["output"], state["output_lse"], scale) if x is not None])


def _relations(addresses: list[int]) -> tuple[Any, ...]:
    """What a bound call takes for granted of the addresses: alignment, what has none, what starts where others do."""
    out, out_lse, a, a_lse, b, b_lse, _ = addresses
    low_bits = (out | a | b) & (variants.PACK_BYTES - 1)
    return low_bits, addresses.count(0), out == a, out == b, out_lse == a_lse, out_lse == b_lse


def _validate(state: dict[str, Any], scale: Any) -> None:
    check_overlaps(OP, state, Extras(), scale)
    (_, _), (_, _), (a_name, a), (a_lse_name, a_lse), (b_name, b), (b_lse_name, b_lse) = state.items()
    validate.check_values(OP, [(a_name, a, a_lse_name, a_lse.T), (b_name, b, b_lse_name, b_lse.T)], {}, {})


def _check(state: dict[str, Any], scale: Any) -> None:
    out = state["output"]
    checks.tensor(OP, "output", out, 3, "[tokens, heads, head size]")
    checks.dtype(OP, "output", out, *FLOAT8)
    checks.tensor(OP, "prefix_output", state["prefix_output"], 3, "[tokens, heads, head size]")
    checks.dtype(OP, "prefix_output", state["prefix_output"], torch.float32, torch.float16, torch.bfloat16)
    check(OP, state, "hn", Extras(out_scale=torch.ones(1, device=out.device)))
    checks.tensor(OP, "output_group_scale", scale, 2, "[tokens, groups]")
    checks.dtype(OP, "output_group_scale", scale, torch.float32)
    checks.same_device(OP, output=out, output_group_scale=scale)
    checks.memory(OP, output_group_scale=scale)
    checks.no_gradient(OP, output_group_scale=scale)
    checks.writable(OP, "output_group_scale", scale)
    tokens, heads, d = out.shape
    groups = scale.shape[1]
    if scale.shape[0] != tokens or groups == 0 or heads * d % groups or groups > _MAX_SHARED_GROUPS:
        raise ArgumentError(
            f"{OP}: output_group_scale has shape {list(scale.shape)}; expected [{tokens}, groups], where the groups are"
            f" equal parts of the {heads * d} elements of a token, and at most {_MAX_SHARED_GROUPS}"
        )
    check_overlaps(OP, state, Extras(), scale)


def _bind(
    operands: tuple[Any, ...], addresses: list[int], power_of_two: bool, lse_base: Any, stream: Any, backend: str
) -> tuple[launch.Call | None, int]:
    """The call, none when there is nothing to do, and the number of tokens."""
    out, out_lse, a, a_lse, b, b_lse, scale = operands
    tokens, heads, d = map(int, out.shape)
    bases = checks.lse_bases(OP, lse_base)
    chosen = checks.backend_for(OP, backend, out.device)
    if out.numel() == 0:
        return None, tokens
    groups = int(scale.shape[1])
    group = heads * d // groups
    device = checks.device_number(out.device)
    pack = min(pack_of(x, d) for x in (out, a, b))
    pack = min(pack, group & -group)  # a pack lies within one group
    holes: dict[str, int | str] = {"d": d, "out": dtypes.resolve(out.dtype).cuda}
    holes["stride"] = 64 if is_wide(*operands) else 32
    constants = variants.make_constants(KERNEL, holes)
    variant = variants.Variant(KERNEL.name, checks.tag(a), pack, launch.target(device), constants, chosen)
    function = loader.get(variant, device, None if device == CPU else streams.resolve_stream(stream, device))
    to_e = base_ratio(bases[2], math.e)
    values = [
        *addresses,
        tokens,
        *(stride for x in (out, a, b) for stride in x.stride()[:2]),
        *(stride for x in (out_lse, a_lse, b_lse) for stride in lse_strides(x, True)),
        *scale.stride(),
        tokens,
        heads,
        group,
        groups,
        base_ratio(bases[0], bases[2]),
        base_ratio(bases[1], bases[2]),
        to_e,
        1 / to_e,
        int(power_of_two),
    ]
    threads = 1 if device == CPU else _THREADS
    width = min(tokens, (1 << 31) - 1)
    work = 3 * out.numel() * a.element_size()
    shared = 4 * groups
    call = launch.Call(function, (width, 1, 1), (threads, 1, 1), _LAYOUT, values, _PATCH, shared, work, pdl=True)
    return call, tokens
