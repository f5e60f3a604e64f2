"""jitkern.compat: the peers' own signatures and published test grids, spread on the CPU; whole in tests/gpu.

The grids and value distributions are those of the peers' tests, the programs and the reference are ours. A peer
compares with another kernel under a tolerance; here the reference is float64, the bound one unit of the output's type.
"""

from __future__ import annotations

import inspect
import itertools
import math
from typing import Any

import pytest
import torch

import jitkern
from jitkern.compat import flashinfer, sglang, vllm
from tests.merge_oracle import States, assert_merged, random_states
from tests.states_oracle import Partials, assert_lse, assert_states, merge, random_partials
from tests.test_merge_contract import same_bits

DTYPES = (torch.float32, torch.float16, torch.bfloat16)
FLOAT8 = torch.float8_e4m3fn

# vLLM tests/kernels/attention/test_merge_attn_states.py; a count of merged tokens, and 8-bit output of scale 0.05.
VLLM = list(
    itertools.product(
        (256, 512, 613, 1024, 1536, 4096),
        (4, 8, 16, 32, 48, 64),
        (32, 48, 64, 96, 128, 256),
        DTYPES,
        (None, 128),
        (False, True),
    )
)
# sglang sgl-kernel/tests/test_merge_state_v2.py.
SGLANG = list(itertools.product((256, 512, 613, 1024, 1536), (8, 16, 32), (32, 48, 64, 128, 256), DTYPES[1:]))
# FlashInfer tests: shared prefix (512 tokens, 32 heads), traces (16, 4, 64) and (7, 2, 64), cascade (N = 100).
FLASHINFER = [(512, 32, 128), (16, 4, 64), (7, 2, 64)]
# tokenspeed test_merge_state.py: tokens, heads, head size; float16 and bfloat16, bases e, 2 and 10.
TOKENSPEED = [
    *((tokens, 16, 128) for tokens in (1, 8, 256, 8192)),
    (4096, 8, 128),
    *((256, heads, d) for heads in (12, 64, 65, 96, 97, 100, 128) for d in (64, 128, 256)),
    (64, 96, 512),
]
# FlashAttention tests/cute/test_flash_attn_combine.py: batch 5, 16 heads; N, sequence length and head size.
FLASH_ATTENTION = [
    (1, 640, 64), (2, 64, 128), (3, 113, 64), (5, 1, 512), (17, 108, 96), (32, 3, 192),
    (55, 2, 64), (97, 1, 256), (133, 1, 64), (17, 256, 64), (5, 1024, 128),
]  # fmt: skip
# sglang test_dcp_lse_combine.py: N, tokens, heads, head size.
DCP = [(2, 4, 8, 64), (4, 8, 16, 128), (8, 4, 8, 128), (8, 4, 8, 512), (2, 64, 16, 128)]


def spread(grid: list[Any], step: int, most: int) -> list[Any]:
    """Every `step`-th case of at most so many elements."""
    return [case for i, case in enumerate(grid) if i % step == 0 and math.prod(case[:3]) <= most]


def parameters(function: Any) -> list[tuple[str, Any]]:
    return [(name, p.default) for name, p in inspect.signature(function).parameters.items()]


def test_signatures_are_the_peers_own() -> None:
    empty = inspect.Parameter.empty
    assert parameters(vllm.merge_attn_states) == [
        *((name, empty) for name in ("output", "prefix_output", "prefix_lse", "suffix_output", "suffix_lse")),
        *((name, None) for name in ("output_lse", "prefill_tokens_with_context", "output_scale")),
    ]
    four = [(name, empty) for name in ("v_a", "s_a", "v_b", "s_b")]
    assert parameters(sglang.merge_state_v2) == [*four, ("v_merged", None), ("s_merged", None)]
    assert parameters(sglang.merge_state) == [
        *((name, empty) for name in ("prefix_output", "prefix_lse", "suffix_output", "suffix_lse")),
        *(("output", None), ("output_lse", None)),
    ]
    assert parameters(flashinfer.merge_state) == four
    in_place = [*((name, empty) for name in ("v", "s", "v_other", "s_other")), ("mask", None)]
    assert parameters(flashinfer.merge_state_in_place) == in_place
    assert parameters(flashinfer.merge_states) == [("v", empty), ("s", empty)]


def check_vllm(case: tuple[Any, ...], device: str) -> None:
    tokens, heads, d, dtype, k, small = case
    states = random_states(tokens, heads, d, dtype, device)
    out, lse = states.outputs()
    vllm.merge_attn_states(out, states.a, states.a_lse, states.b, states.b_lse, lse, k)
    assert_merged(out, lse, states, k)
    if small:
        scale = torch.tensor(0.05, device=device)
        codes, codes_lse = torch.empty_like(out, dtype=FLOAT8), torch.empty_like(lse)
        vllm.merge_attn_states(codes, states.a, states.a_lse, states.b, states.b_lse, codes_lse, k, scale)
        assert same_bits(codes_lse, lse)
        # Half a unit of e4m3 (3 bits of mantissa), and what rounding `out` to its own type has cost.
        got, wanted = codes.float() * scale, out.float().clamp(-448 * 0.05, 448 * 0.05)
        off = (got - wanted).abs() - (wanted.abs() * (2**-4 + 2**-7) + 0.05 * 2**-10)
        assert torch.equal(got.isnan(), wanted.isnan())
        assert off.nan_to_num(-1).max().item() <= 0


def check_sglang(case: tuple[Any, ...], device: str) -> None:
    tokens, heads, d, dtype = case
    states = random_states(tokens, heads, d, dtype, device)
    operands = (states.a, states.a_lse.T.contiguous(), states.b, states.b_lse.T.contiguous())
    v, s = sglang.merge_state_v2(*operands)
    assert_merged(v, s.T, states)
    into = torch.empty_like(v), torch.empty_like(s)
    for function in (sglang.merge_state_v2, sglang.merge_state):
        given = function(*operands, *into)
        assert given[0] is into[0]
        assert given[1] is into[1]
        assert same_bits(into[0], v)
        assert same_bits(into[1], s)


@pytest.mark.parametrize("case", spread(VLLM, 97, 2_000_000))
def test_vllm_grid(case: tuple[Any, ...], device: str) -> None:
    check_vllm(case, device)


@pytest.mark.parametrize("case", spread(SGLANG, 17, 2_000_000))
def test_sglang_grid(case: tuple[Any, ...], device: str) -> None:
    check_sglang(case, device)


def test_vllm_mask_of_empty_contexts(device: str) -> None:
    """vLLM's own case: rows 2 to 132 belong to the one request without context."""
    queries, context = (torch.tensor(x, dtype=torch.int32, device=device) for x in ([0, 2, 133, 134], [0, 4, 4, 7]))
    lse = torch.arange(4 * 134, device=device).view(4, 134).float()
    before = lse.clone()
    vllm.mask_empty_context_lse(lse, queries, context)
    assert (lse[:, 2:133] == -math.inf).all()
    assert torch.equal(lse[:, :2], before[:, :2])
    assert torch.equal(lse[:, 133:], before[:, 133:])


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_mask_of_empty_contexts_at_its_edges(device: str, kind: torch.dtype) -> None:
    """Padded rows in front and behind, a request without queries, the first and the last one empty, L transposed."""
    queries = torch.tensor([1, 3, 3, 5, 6], dtype=kind, device=device)
    context = torch.tensor([7, 7, 9, 12, 12], dtype=kind, device=device)
    lse = torch.zeros(8, 2, device=device).T
    vllm.mask_empty_context_lse(lse, queries, context)
    assert (lse == -math.inf)[0].tolist() == [False, True, True, False, False, True, False, False]
    assert torch.equal(lse[0], lse[1])
    vllm.mask_empty_context_lse(lse[:, :0], queries, context)
    with pytest.raises(jitkern.ArgumentError, match=r"context_start_loc has shape \[4\]"):
        vllm.mask_empty_context_lse(lse, queries, context[1:])
    with pytest.raises(jitkern.ArgumentError, match=r"query_start_loc is torch\.float32"):
        vllm.mask_empty_context_lse(lse, queries.float(), context)


def base_two(p: Partials) -> Partials:
    return Partials(p.v, p.s * math.log2(math.e))


@pytest.mark.parametrize("shape", FLASHINFER)
def test_flashinfer_merge_state(shape: tuple[int, int, int], device: str) -> None:
    """Base 2, and what is computed is the merge of the same states in base e."""
    tokens, heads, d = shape
    p = random_partials(tokens, 2, heads, d, torch.float16, device)
    two = base_two(p)
    v, s = flashinfer.merge_state(two.v[:, 0], two.s[:, 0], two.v[:, 1], two.s[:, 1])
    assert_states(v, s, two, 2.0)
    assert_lse(s * math.log(2), merge(p.cpu())[1])


@pytest.mark.parametrize("share", [None, 0.0, 0.5, 1.0])
def test_flashinfer_in_place_with_a_mask(share: float | None, device: str) -> None:
    p = random_partials(512, 2, 32, 128, torch.float16, device, empty=0)
    v, s = p.v[:, 0].clone(), p.s[:, 0].clone()
    expected, expected_lse = flashinfer.merge_state(v, s, p.v[:, 1], p.s[:, 1])
    mask = None if share is None else (torch.rand(512) < share).to(device)
    flashinfer.merge_state_in_place(v, s, p.v[:, 1], p.s[:, 1], mask)
    wanted = torch.ones(512, dtype=torch.bool) if mask is None else mask.cpu()
    assert same_bits(v[wanted], expected[wanted])
    assert same_bits(s[wanted], expected_lse[wanted])
    assert same_bits(v[~wanted], p.v[~wanted, 0])
    assert same_bits(s[~wanted], p.s[~wanted, 0])


@pytest.mark.parametrize(("tokens", "count"), [(64, 100), (7, 1), (7, 0)])
def test_flashinfer_merge_states(tokens: int, count: int, device: str) -> None:
    two = base_two(random_partials(tokens, count, 8, 128, torch.float16, device))
    v, s = flashinfer.merge_states(two.v, two.s)
    assert_states(v, s, two, 2.0)


def test_a_logarithm_is_converted_where_the_peer_does_it(device: str) -> None:
    p = random_partials(7, 2, 2, 64, torch.float16, device, empty=0)
    half = [p.v[:, 0], p.s[:, 0].half(), p.v[:, 1], p.s[:, 1].half()]
    exact = Partials(p.v, p.s.half().float())
    for function, base in ((sglang.merge_state_v2, math.e), (flashinfer.merge_state, 2.0)):
        v, s = function(*half)
        assert s.dtype == torch.float32
        assert_states(v, s, exact, base)
    v, s = flashinfer.merge_states(p.v, p.s.half())
    assert_states(v, s, exact, 2.0)
    before = half[1].clone()
    with pytest.raises(jitkern.ArgumentError, match=r"s \(as input\) is torch.float16; expected torch.float32"):
        flashinfer.merge_state_in_place(*half)
    assert torch.equal(half[1], before)
    with pytest.raises(jitkern.ArgumentError, match=r"s_a is torch\.int32"):
        sglang.merge_state_v2(half[0], half[1].int(), *half[2:])


@pytest.mark.parametrize("case", [case for case in TOKENSPEED if math.prod(case) <= 4_000_000][::3])
@pytest.mark.parametrize("base", ["e", "2", "10"])
def test_tokenspeed_grid(case: tuple[int, int, int], base: str, device: str) -> None:
    """Three bases, and the round trip: merging in place by another base gives the same state."""
    tokens, heads, d = case
    number = {"e": math.e, "2": 2.0, "10": 10.0}[base]
    states = random_states(tokens, heads, d, torch.bfloat16, device)
    written = States(states.a, states.a_lse / math.log(number), states.b, states.b_lse / math.log(number))
    out, lse = written.outputs()
    jitkern.merge_attn_states(out, written.a, written.a_lse, written.b, written.b_lse, lse, lse_base=base)
    assert_merged(out, lse, written, base=number)


@pytest.mark.parametrize("case", [case for case in FLASH_ATTENTION if case[0] * case[1] * case[2] < 40_000])
@pytest.mark.parametrize("kind", ["list of views", "stacked"])
def test_flash_attention_grid(case: tuple[int, int, int], kind: str, device: str) -> None:
    """The second half of the splits is empty for a third of the rows; batch and sequence make the tokens."""
    count, length, d = case
    p = random_partials(5 * length, count, 16, d, torch.float32, device, empty=0)
    if count > 1:
        p.s[::3, count // 2 :], p.v[::3, count // 2 :] = -math.inf, math.nan
    views = list(p.v.unbind(1)), list(p.s.unbind(1))
    out, lse = jitkern.merge_states(*views) if kind == "list of views" else jitkern.merge_states(p.v, p.s)
    assert_states(out, lse, p)


@pytest.mark.parametrize("shape", DCP)
@pytest.mark.parametrize("base", ["e", "2"])
@pytest.mark.parametrize("values", ["random", "dominant", "equal", "infinite"])
def test_decode_context_parallel_grid(shape: tuple[int, int, int, int], base: str, values: str, device: str) -> None:
    count, tokens, heads, d = shape
    p = random_partials(tokens, count, heads, d, torch.bfloat16, device, empty=0.3 if values == "infinite" else 0)
    if values == "dominant":
        p.s.fill_(-100)[:, 1] = 100
    elif values == "equal":
        p.s.fill_(5)
    out, lse = jitkern.merge_states(list(p.v.unbind(1)), list(p.s.unbind(1)), lse_base=base)
    assert_states(out, lse, p, 2.0 if base == "2" else math.e)
    if values == "dominant":
        assert same_bits(out, p.v[:, 1])
