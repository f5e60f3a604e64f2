"""Binding the merge of two states: variant, grid, parameter block."""

from __future__ import annotations

import math
from typing import Any

from jitkern import dtypes, launch, loader, streams, variants
from jitkern.errors import ArgumentError
from jitkern.loader import CPU
from jitkern.ops import checks
from jitkern.ops.kernels import PAIR as KERNEL
from jitkern.ops.pairwise_checks import Extras
from jitkern.ops.shapes import base_ratio, geometry, is_wide, lse_strides, pack_of

_LAYOUT = "6Pq2I4{0}2i5P12q0P"  # struct MergeParams of kernels_src/merge_attn_states.cu; {0}: f, or d beside float64
_PATCH, _PATCH_WITH_EXTRAS = "6Pq", "6Pq2I4{0}2i5P"


def bind(
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
