"""The merge of two states, for every op that is one: signature, checks, variant, grid, launch."""

from __future__ import annotations

import math
from typing import Any

from jitkern import dtypes, launch, loader, variants
from jitkern.errors import ArgumentError
from jitkern.loader import CPU
from jitkern.ops import checks

_LAYOUT = "6Pq12q2I4{}i0P"  # struct MergeParams of kernels_src/merge_attn_states.cu; {}: f, or d beside float64
_PATCH = "6Pq"
_MAX_THREADS = 128
_MAX_BLOCK_Z = 64
_MAX_GRID_Y = 65535
_HEAD_SIZES = (64, 128, 256, 512)

KERNEL = variants.register(
    variants.Kernel(
        "merge_attn_states",
        {"d": None, "stride": 32},
        tuple((tag, pack, (("d", d),)) for tag, pack in (("f32", 4), ("f16", 8), ("bf16", 8)) for d in _HEAD_SIZES),
    )
)
_thread = checks.PerThread()


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
    lse_base: str | float,
    stream: Any,
    backend: str,
) -> None:
    """Merge ``a`` and ``b`` into ``out``.

    Args:
        op: the public op, for messages.
        names: its names of out, out_lse, a, a_lse, b, b_lse.
        lse_layout: ``"hn"`` for L of [heads, tokens], ``"nh"`` for [tokens, heads].
        out, out_lse, a, a_lse, b, b_lse: the states; ``out_lse`` may be None.
        merged_tokens: tokens from this one on are copies of ``b``; None: all are merged.
        lse_base, stream, backend: as in the public ops.
    """
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
            (addresses[0] | addresses[2] | addresses[4]) & (variants.PACK_BYTES - 1),
            (addresses[0] == addresses[2], addresses[0] == addresses[4]),
            (addresses[1] == addresses[3], addresses[1] == addresses[5]),
            a.is_neg() or b.is_neg() or a_lse.is_neg() or b_lse.is_neg() or out.is_neg(),
            (lse_layout, lse_base, backend),
        )
        bound = _thread.calls.get(signature)
    except (AttributeError, TypeError):  # something is no tensor, or cannot be hashed: the checks say what
        addresses = signature = bound = None
    if bound is None or launch.gradient_wanted(a, a_lse, b, b_lse):
        state = dict(zip(names, (out, out_lse, a, a_lse, b, b_lse), strict=True))
        _check(op, state, lse_layout)
        bound = _thread.keep(signature, _bind(op, state, lse_layout, addresses, lse_base, stream, backend))
    call, tokens = bound
    if merged_tokens is None:
        merged_tokens = tokens
    elif not 0 <= merged_tokens <= tokens:
        raise ArgumentError(
            f"{op}: prefill_tokens_with_context={merged_tokens}; expected 0 to {tokens}, the number of tokens"
        )
    if call is not None:
        launch.on(call, stream, *addresses, merged_tokens)


def _check(op: str, state: dict[str, Any], lse_layout: str) -> None:
    """Refuse what the kernel cannot take, before anything runs."""
    import torch

    (out_name, out), (out_lse_name, out_lse), *inputs = state.items()
    layout = "[heads, tokens]" if lse_layout == "hn" else "[tokens, heads]"
    outputs = [(out_name, out), *inputs[::2]]
    logarithms = [*inputs[1::2], *([] if out_lse is None else [(out_lse_name, out_lse)])]
    for name, value in outputs:
        checks.tensor(op, name, value, 3, "[tokens, heads, head size]")
        checks.same_shape(op, name, value, tuple(out.shape), "[tokens, heads, head size]", out_name)
        checks.last_stride_one(op, name, value)
    kinds = [torch.float32, torch.float16, torch.bfloat16]
    if out.device.type == "cpu":
        kinds.append(torch.float64)
    checks.dtype(op, out_name, out, *kinds)
    tokens, heads, _ = out.shape
    rows = (heads, tokens) if lse_layout == "hn" else (tokens, heads)
    for name, value in outputs[1:]:
        checks.dtype(op, name, value, out.dtype)
    for name, value in logarithms:
        checks.tensor(op, name, value, 2, layout)
        checks.same_shape(op, name, value, rows, layout, out_name)
        checks.dtype(op, name, value, torch.float64 if out.dtype == torch.float64 else torch.float32)
    checks.same_device(op, **state)
    checks.writable(op, out_name, out)
    if out_lse is not None:
        checks.writable(op, out_lse_name, out_lse)
    _check_aliases(op, state)
    checks.no_gradient(op, **state)


def _check_aliases(op: str, state: dict[str, Any]) -> None:
    """An output may be an input, but only as the same view of it."""
    (out_name, out), (out_lse_name, out_lse), *inputs = state.items()
    for output_name, output, others in ((out_name, out, inputs[::2]), (out_lse_name, out_lse, inputs[1::2])):
        for name, value in others:
            same = output is not None and output.numel() > 0 and output.data_ptr() == value.data_ptr()
            if same and output.stride() != value.stride():
                raise ArgumentError(
                    f"{op}: {output_name} starts where {name} does, with strides {list(output.stride())} instead of"
                    f" {list(value.stride())}; an output may be an input only as the same view of it"
                )


def _bind(
    op: str,
    state: dict[str, Any],
    lse_layout: str,
    addresses: tuple[int, ...],
    lse_base: str | float,
    stream: Any,
    backend: str,
) -> tuple[launch.Call | None, int]:
    """Choose the variant, load it, and pack its parameters; no call at all when there is nothing to do."""
    out, out_lse, a, a_lse, b, b_lse = state.values()
    base = checks.lse_base(op, lse_base)
    chosen = checks.backend_for(op, backend, out.device)
    tokens, heads, d = map(int, out.shape)
    if tokens == 0 or heads == 0 or d == 0:
        return None, tokens
    if max(tokens, heads) >= 1 << 31:
        raise ArgumentError(f"{op}: {tokens} tokens and {heads} heads; a call takes less than 2^31 of either")
    size = dtypes.resolve(out.dtype).size
    row_strides = [
        stride * size
        for value in (out, a, b)
        for stride, n in zip(value.stride()[:2], out.shape[:2], strict=True)
        if n > 1
    ]
    pack = variants.widest_pack(size, d * size, *row_strides, *addresses[0::2][:1], addresses[2], addresses[4])
    device = checks.device_number(out.device)
    target = launch.target(device)
    wide = any(stride >= 1 << 32 for value in state.values() if value is not None for stride in value.stride())
    constants = variants.make_constants(KERNEL, {"d": d, "stride": 64 if wide else 32})
    variant = variants.Variant(KERNEL.name, checks.tag(out), pack, target, constants, chosen)
    handle = None if device == CPU else launch.resolve_stream(stream, device)
    function = loader.get(variant, device, handle)
    transposed = lse_layout == "hn"
    values = [
        *addresses,
        tokens,
        *(stride for value in (out, a, b) for stride in value.stride()[:2]),
        *(stride for value in (out_lse, a_lse, b_lse) for stride in _lse_strides(value, transposed)),
        tokens,
        heads,
        1.0,
        1.0,
        math.log(base) if base != math.e else 1.0,
        1 / math.log(base) if base != math.e else 1.0,
        int(addresses[1] in (addresses[3], addresses[5])),
    ]
    grid, block = geometry(tokens, heads, d // pack, device)
    work = 3 * tokens * heads * d * size
    layout = _LAYOUT.format("d" if variant.dtype == "f64" else "f")
    return launch.Call(function, grid, block, layout, values, _PATCH, work=work, pdl=True), tokens


def _lse_strides(value: Any, transposed: bool) -> tuple[int, int]:
    """(token stride, head stride)."""
    if value is None:
        return 0, 0
    first, second = value.stride()
    return (second, first) if transposed else (first, second)


def geometry(tokens: int, heads: int, packs: int, device: int) -> tuple[launch.Dim3, launch.Dim3]:
    """(grid, block): whole rows in a block, heads before tokens, a number of heads that divides all if possible."""
    if device == CPU:
        lanes, block_heads, block_tokens = 1, 1, 1
    else:
        lanes = min(packs, _MAX_THREADS)
        most = min(heads, _MAX_THREADS // lanes)
        divisor = max(n for n in range(1, most + 1) if heads % n == 0)
        block_heads = divisor if 2 * divisor > most else most
        block_tokens = max(min(_MAX_THREADS // (lanes * block_heads), _MAX_BLOCK_Z, tokens), 1)
    tiles = -(-tokens // block_tokens)
    depth = -(-tiles // _MAX_GRID_Y)
    return (-(-heads // block_heads), -(-tiles // depth), depth), (lanes, block_heads, block_tokens)
