"""MLADecode with caches of 8-bit codes against the float64 oracle, on CPU and GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

import jitkern
from jitkern.errors import ArgumentError, UnsupportedError
from tests.mla_cases import CACHES
from tests.mla_oracle import Coded, assert_decoded, make_step, reference, with_codes, with_tokens

MAKERS = {"codes": with_codes, "tokens": with_tokens}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=list(MAKERS))
def kind(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def make(kind: str, *arguments: Any, **more: Any) -> Coded:
    return MAKERS[kind](make_step(*arguments, **more))


def decoder(coded: Coded, kind: str, **more: Any) -> jitkern.MLADecode:
    batch, q_len, heads, d = coded.step.q.shape
    heads_k, page_size = coded.step.k_cache.shape[2], coded.step.page_size
    shape = (batch, heads, heads_k, q_len, coded.step.q.dtype, coded.step.q.device, d, 512, page_size)
    return jitkern.MLADecode(*shape, cache_dtype=CACHES[kind], **more)


def decode(coded: Coded, kind: str, causal: bool = False, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    mla = decoder(coded, kind, **more)
    mla.plan(coded.step.cache_seqlens)
    batch, q_len, heads, _ = coded.step.q.shape
    out = torch.full((batch, q_len, heads, 512), math.nan, dtype=coded.step.q.dtype, device=coded.step.q.device)
    lse = torch.full((batch, heads, q_len), math.nan, device=coded.step.q.device)
    mla.run(*coded.step.operands(), causal=causal, out=out, lse=lse, k_scale=coded.k_scale)
    return out, lse


@pytest.mark.parametrize("heads", [1, 16, 24, 64, 128])
@pytest.mark.parametrize("q_len", [1, 2])
def test_rows_of_every_tile(kind: str, heads: int, q_len: int, device: str) -> None:
    coded = make(kind, [0, 1, 15, 63, 64, 65, 500], heads, q_len=q_len, device=device)
    assert_decoded(*decode(coded, kind, True), reference(coded.values, True))


@pytest.mark.parametrize("page_size", [1, 2, 16, 64, 128])
def test_page_sizes(kind: str, page_size: int, device: str) -> None:
    coded = make(kind, [1, 63, 64, 65, 0, 333], 4, page_size=page_size, device=device)
    assert_decoded(*decode(coded, kind), reference(coded.values))


@pytest.mark.parametrize("parts", [1, 3, 64])
def test_split_requests(kind: str, parts: int, device: str) -> None:
    coded = make(kind, [700, 0, 64, 2000, 1, 130], 5, q_len=2, device=device)
    assert_decoded(*decode(coded, kind, True, num_parts=parts), reference(coded.values, True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("head_dim", [576, 512])
@pytest.mark.parametrize("scale", [0.02, 1.0, 3e-4])
def test_codes_of_any_scale(dtype: torch.dtype, head_dim: int, scale: float, device: str) -> None:
    step = make_step([100, 777, 0], 20, dtype=dtype, head_dim=head_dim, device=device, scale=25 * min(scale, 0.02))
    coded = with_codes(step, scale)
    assert_decoded(*decode(coded, "codes"), reference(coded.values))


def test_every_code_is_what_it_stands_for(device: str) -> None:
    """One key a request, so that O is the value itself: all 256 codes, NaN kept as NaN."""
    step = make_step([1], 16, device=device)
    coded = with_codes(step, 1.0)
    page = int(step.block_table[0, 0])
    bytes_ = torch.arange(576, device=device).to(torch.uint8)
    finite = torch.where(bytes_ % 128 == 127, torch.zeros_like(bytes_), bytes_)
    coded.step.k_cache[page, 0, 0] = finite.view(torch.float8_e4m3fn)
    coded.step.q.zero_()
    out, _ = decode(coded, "codes")
    assert torch.equal(out[0, 0, 3], finite.view(torch.float8_e4m3fn)[:512].to(out.dtype))
    coded.step.k_cache[page, 0, 0] = bytes_.view(torch.float8_e4m3fn)
    out, lse = decode(coded, "codes")
    assert bool(lse.isnan().all()) or bool(out[0, 0, 0, bytes_[:512] % 128 == 127].isnan().all())


def test_the_scales_are_read_on_the_device(device: str) -> None:
    coded = with_codes(make_step([300, 5], 16, device=device), 0.5)  # the codes themselves are small values, too
    mla = decoder(coded, "codes")
    mla.plan(coded.step.cache_seqlens)
    k_scale, q_scale = torch.ones(1, device=device), torch.tensor(2.0, device=device)
    operands = coded.step.operands()
    mla.run(*operands, k_scale=k_scale, q_scale=q_scale)
    assert coded.k_scale is not None
    k_scale.copy_(coded.k_scale)
    q_scale.fill_(0.5)
    out, lse = mla.run(*operands, k_scale=k_scale, q_scale=q_scale)
    coded.values.q = coded.values.q * 0.5
    assert_decoded(out, lse, reference(coded.values))
    out, lse = mla.run(*operands)
    coded.values.q = coded.step.q
    coded.values.k_cache = coded.step.k_cache.to(torch.float64)
    assert_decoded(out, lse, reference(coded.values))


def test_a_group_has_its_own_scale(device: str) -> None:
    """Columns of very different size: one scale for all of them would lose the small ones."""
    step = make_step([200, 64], 16, device=device)
    for group, size in enumerate((1e-4, 1.0, 1e-2, 10.0)):
        step.k_cache[..., 128 * group : 128 * group + 128] *= size
    coded = with_tokens(step)
    out, lse = decode(coded, "tokens")
    assert_decoded(out, lse, reference(coded.values))
    small = reference(coded.values)[0][..., :128]
    assert float(((out[..., :128] - small).abs() / small.abs().amax()).amax()) < 2.0**-6


@pytest.mark.parametrize("extra", [0, 1, 2, 4, 16])
def test_any_strides_and_addresses_of_the_cache(kind: str, extra: int, device: str) -> None:
    coded = make(kind, [70, 200, 0], 16, device=device)
    cache = coded.step.k_cache
    width = cache.shape[-1]
    room = torch.zeros(*cache.shape[:3], width + extra, dtype=torch.uint8, device=device)
    inside = room[..., extra:]
    inside.copy_(cache.view(torch.uint8))
    coded.step.k_cache = inside.view(cache.dtype) if extra == 0 else inside
    if extra and kind == "codes":
        coded.step.k_cache = room.view(torch.float8_e4m3fn)[..., extra:]
    assert_decoded(*decode(coded, kind), reference(coded.values))


def test_several_kv_heads(kind: str, device: str) -> None:
    coded = make(kind, [100, 3], 12, 3, device=device)
    assert_decoded(*decode(coded, kind), reference(coded.values))


def test_packed_tokens_may_be_a_view_of_float8(device: str) -> None:
    coded = make("tokens", [100, 3], 8, device=device)
    coded.step.k_cache = coded.step.k_cache.view(torch.float8_e4m3fn)
    assert_decoded(*decode(coded, "tokens"), reference(coded.values))


def test_pages_that_do_not_exist_are_masked(kind: str, device: str) -> None:
    coded = make(kind, [300, 130], 16, device=device)
    for step in (coded.step, coded.values):
        step.block_table = step.block_table.clone()
        step.block_table[0, 1] = -1
    assert_decoded(*decode(coded, kind), reference(coded.values))


def test_wrong_caches_and_scales_are_refused(device: str) -> None:
    with pytest.raises(UnsupportedError, match=r"cache_dtype='fp8'; expected None or torch.bfloat16"):
        jitkern.MLADecode(1, 16, device=device, cache_dtype="fp8")
    with pytest.raises(UnsupportedError, match="float8_e5m2"):
        jitkern.MLADecode(1, 16, device=device, cache_dtype=torch.float8_e5m2)
    with pytest.raises(UnsupportedError, match="512 codes and 64 bfloat16"):
        jitkern.MLADecode(1, 16, dtype=torch.float16, device=device, cache_dtype="fp8_ds_mla")
    with pytest.raises(UnsupportedError, match="head_dim=512"):
        jitkern.MLADecode(1, 16, head_dim=512, device=device, cache_dtype="fp8_ds_mla")
    coded = make("codes", [3], 16, device=device)
    operands = coded.step.operands()
    mla = decoder(coded, "codes")
    mla.plan(coded.step.cache_seqlens)
    with pytest.raises(ArgumentError, match="k_scale is a float; expected a float32 tensor of one element"):
        mla.run(*operands, k_scale=0.5)
    with pytest.raises(ArgumentError, match=r"k_scale has shape \[2\]"):
        mla.run(*operands, k_scale=torch.ones(2, device=device))
    with pytest.raises(ArgumentError, match=r"q_scale is torch.float64"):
        mla.run(*operands, q_scale=torch.ones(1, device=device, dtype=torch.float64))
    with pytest.raises(ArgumentError, match=r"k_cache is torch.bfloat16; expected torch.float8_e4m3fn"):
        mla.run(operands[0], coded.values.k_cache.bfloat16(), *operands[2:])
    plain = jitkern.MLADecode(1, 16, device=device)
    plain.plan(coded.step.cache_seqlens)
    step = make_step([3], 16, device=device)
    with pytest.raises(ArgumentError, match=r"no scale beside the cache; make it with cache_dtype=torch.float8_e4m3fn"):
        plain.run(*step.operands(), k_scale=torch.ones(1, device=device))


def test_traced(kind: str, device: str) -> None:
    coded = make(kind, [100, 0, 65], 16, device=device)
    mla = decoder(coded, kind)

    def layer(q: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        mla.plan(coded.step.cache_seqlens)
        return mla.run(q * 1, *coded.step.operands()[1:], k_scale=coded.k_scale)

    out, lse = torch.compile(layer, fullgraph=True, backend="aot_eager")(coded.step.q)
    assert_decoded(out, lse, reference(coded.values))
