"""jitkern.compat.flash_mla used as FlashMLA's callers use it: both forms, vLLM's slices, sglang's copies."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from jitkern.compat.flash_mla import (
    FlashMLASchedMeta,
    flash_mla_with_kvcache,
    flash_mla_with_kvcache_fp8,
    get_mla_metadata,
    get_mla_metadata_dense_fp8,
)
from jitkern.errors import ArgumentError, UnsupportedError
from tests.mla_oracle import Step, assert_decoded, make_step, reference, with_codes, with_tokens


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def call(step: Step, metadata: object, splits: object = None, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    return flash_mla_with_kvcache(*step.operands(), 512, metadata, splits, **more)


def test_tensor_form(device: str) -> None:
    step = make_step([300, 0, 2000], 16, q_len=2, device=device)
    metadata, splits = get_mla_metadata(step.cache_seqlens, 2 * 16, 1)
    assert metadata.dtype == splits.dtype == torch.int32
    assert metadata.shape[1] == 8
    counts = splits.diff()
    assert splits[0] == 0
    assert (counts >= 1).all(), "a request counts at least 1, as FlashMLA has it"
    used = metadata[metadata[:, 0] >= 0]
    assert int(counts.sum()) <= 3 + metadata.shape[0] - 1
    assert used[0, :3].tolist() == [0, used[0, 1].item(), 0]
    out, lse = call(step, metadata, splits, causal=True)
    assert_decoded(out, lse, reference(step, True))
    assert lse.shape == (3, 16, 2)


def test_lazy_form(device: str) -> None:
    step = make_step([300, 64, 2000], 16, device=device)
    meta, nothing = get_mla_metadata()
    assert nothing is None
    assert meta.tile_scheduler_metadata is None
    for _ in range(3):  # layers
        assert_decoded(*call(step, meta), reference(step))
    metadata = meta.tile_scheduler_metadata
    assert metadata is not None
    assert metadata.shape[1] == 8
    assert meta.num_splits.shape == (4,)
    with pytest.raises(ArgumentError, match="heads is 8, but this FlashMLASchedMeta was first used with 16"):
        call(make_step([300, 64, 2000], 8, device=device), meta)
    with pytest.raises(ArgumentError, match="num_splits is given"):
        call(step, meta, meta.num_splits)
    ignored, _ = get_mla_metadata(num_heads_k=1)
    assert isinstance(ignored, FlashMLASchedMeta)


def test_as_vllm_does(device: str) -> None:
    """Buffers made once at capacity; each step copies into slices and fills num_splits with its last value."""
    capacity, columns = 8, 6
    metadata_buffer = torch.zeros(200, 8, dtype=torch.int32, device=device)
    splits_buffer = torch.empty(capacity + 1, dtype=torch.int32, device=device)
    for lengths in ([200, 3], [64, 65, 66, 300, 1], [], [7] * 8):
        real = len(lengths)
        step = make_step(lengths + [0] * (capacity - real), 16, device=device, columns=columns, seed=real)
        metadata, splits = get_mla_metadata(step.cache_seqlens[:real], 16, 1)
        metadata_view = metadata_buffer[: metadata.shape[0]]
        metadata_view.copy_(metadata)
        splits_buffer[: real + 1].copy_(splits)
        splits_buffer[real + 1 :].fill_(splits[-1].item())
        out, lse = call(step, metadata_view, splits_buffer)
        assert_decoded(out, lse, reference(step))
        assert (out[real:] == 0).all()
        assert (lse[real:] == math.inf).all()


def test_as_sglang_does(device: str) -> None:
    """Planned for the largest batch at length 1, then recomputed for the padded batch and copied over."""
    largest = 8
    ones = torch.ones(largest, dtype=torch.int32, device=device)
    metadata, splits = get_mla_metadata(ones, 16, 1)
    for rows, lengths in ((4, [500, 20, 1024]), (8, [64] * 7), (2, [1, 2])):
        step = make_step(lengths + [1024] * (rows - len(lengths)), 16, device=device, seed=rows)
        new_metadata, new_splits = get_mla_metadata(step.cache_seqlens, 16, 1)
        metadata.copy_(new_metadata)
        splits[: rows + 1].copy_(new_splits)
        assert_decoded(*call(step, metadata, splits[: rows + 1]), reference(step))


@pytest.mark.parametrize("lazy", [True, False])
def test_caches_of_codes(lazy: bool, device: str) -> None:
    """vLLM's FP8 cache, queries of 8 bits among them, and FlashMLA's tokens of 656 bytes."""

    def metadata(step: Step) -> tuple[object, object]:
        return get_mla_metadata(is_fp8_kvcache=True) if lazy else get_mla_metadata(step.cache_seqlens, 16, 1)

    coded = with_codes(make_step([300, 0, 64], 16, device=device))
    scale = {"descale_k": coded.k_scale, "is_fp8_kvcache": True}
    assert_decoded(*call(coded.step, *metadata(coded.step), **scale), reference(coded.values))
    q, q_scale = coded.step.q.to(torch.float8_e4m3fn), torch.tensor([0.25], device=device)
    coded.step.q, coded.values.q = q, q.to(torch.float64) * 0.25
    out, lse = call(coded.step, *metadata(coded.step), descale_q=q_scale, **scale)
    assert out.dtype == torch.bfloat16
    assert_decoded(out, lse, reference(coded.values))
    coded = with_tokens(make_step([300, 0, 64], 16, device=device))
    assert_decoded(*call(coded.step, *metadata(coded.step), is_fp8_kvcache=True), reference(coded.values))


def test_vllm_names_for_codes(device: str) -> None:
    coded = with_codes(make_step([300, 0, 64], 16, device=device))
    coded.step.q = coded.step.q.to(torch.float8_e4m3fn)
    coded.values.q = coded.step.q.to(torch.float64) * 0.5
    metadata, splits = get_mla_metadata_dense_fp8(coded.step.cache_seqlens, 16, 1)
    scales = torch.tensor([0.5], device=device), coded.k_scale
    out, lse = flash_mla_with_kvcache_fp8(*coded.step.operands(), 512, metadata, splits, None, True, *scales)
    assert_decoded(out, lse, reference(coded.values))


def test_both_orders_behind_causal(device: str) -> None:
    """FlashMLA: is_fp8_kvcache, indices, ...; vLLM's build: descale_q, descale_k, is_fp8_kvcache, indices."""
    coded = with_codes(make_step([300, 0, 64], 16, device=device))
    descale_q = torch.tensor([0.5], device=device)
    expected = call(coded.step, get_mla_metadata()[0], descale_q=descale_q, descale_k=coded.k_scale)
    first = (*coded.step.operands(), 512)
    for more in ((), (True,), (True, None)):
        meta, splits = get_mla_metadata(coded.step.cache_seqlens, 16, 1)
        given = (*first, meta, splits, None, False, descale_q, coded.k_scale, *more)
        for got, want in zip(flash_mla_with_kvcache(*given), expected, strict=True):
            assert torch.equal(got, want)
    plain = make_step([300, 0, 64], 16, device=device)
    for order in ((False, None, None, None, None, None, None), (None, None, False, None), (False,), (None,)):
        out = flash_mla_with_kvcache(*plain.operands(), 512, get_mla_metadata()[0], None, None, False, *order)
        assert_decoded(*out, reference(plain))
    start = (*plain.operands(), 512, get_mla_metadata()[0], None, None, False)
    with pytest.raises(UnsupportedError, match="indices is given"):
        flash_mla_with_kvcache(*start, False, torch.zeros(1))
    with pytest.raises(UnsupportedError, match="attn_sink is given"):
        flash_mla_with_kvcache(*start, False, None, torch.zeros(1))
    with pytest.raises(UnsupportedError, match="indices is given"):
        flash_mla_with_kvcache(*start, None, None, False, torch.zeros(1))
    with pytest.raises(ArgumentError, match="5 arguments behind causal; expected at most 4: descale_q, descale_k"):
        flash_mla_with_kvcache(*start, None, None, False, None, None)
    with pytest.raises(ArgumentError, match="is_fp8_kvcache is given by position and by name"):
        flash_mla_with_kvcache(*start, False, is_fp8_kvcache=False)
    with pytest.raises(UnsupportedError, match="descale is given"):
        flash_mla_with_kvcache(*start, descale=torch.ones(1))


def test_descales_of_a_plain_cache_are_not_read(device: str) -> None:
    """vLLM passes its layers' scales whatever the cache holds, and its build looks at them for 8-bit caches only."""
    step = make_step([300, 0, 64], 16, device=device)
    scales = {"descale_q": torch.ones(1, device=device), "descale_k": torch.ones(1, device=device)}
    assert_decoded(*call(step, get_mla_metadata()[0], **scales), reference(step))
    assert_decoded(*call(step, *get_mla_metadata(step.cache_seqlens, 16, 1), **scales), reference(step))


def test_a_first_call_that_fails_leaves_no_plan(device: str) -> None:
    step = make_step([300, 65, 64], 16, device=device)
    meta, _ = get_mla_metadata()
    for wrong in (step.cache_seqlens[:1], step.cache_seqlens.long(), step.cache_seqlens * 0):
        table = step.block_table.long() if wrong.shape[0] == 3 else step.block_table
        with pytest.raises(ArgumentError):
            flash_mla_with_kvcache(step.q, step.k_cache, table, wrong, 512, meta)
        assert meta.tile_scheduler_metadata is None
    assert_decoded(*call(step, meta), reference(step))


def test_what_there_is_not_is_refused(device: str) -> None:
    step = make_step([100], 16, device=device)
    meta, _ = get_mla_metadata()
    with pytest.raises(UnsupportedError, match="topk=64; attention is dense here"):
        get_mla_metadata(topk=64)
    with pytest.raises(ArgumentError, match=r"is_fp8_kvcache=True, but k_cache is torch.bfloat16"):
        call(step, meta, is_fp8_kvcache=True)
    with pytest.raises(ArgumentError, match="is_fp8_kvcache is a Tensor; expected a bool"):
        call(step, meta, is_fp8_kvcache=torch.ones(1))
    with pytest.raises(ArgumentError, match="queries of 8 bits go with such a cache"):
        flash_mla_with_kvcache(step.q.to(torch.float8_e4m3fn), *step.operands()[1:], 512, meta)
    packed = with_tokens(make_step([100], 16, device=device)).step
    with pytest.raises(ArgumentError, match="no scale beside the cache"):
        call(packed, get_mla_metadata()[0], descale_k=torch.ones(1, device=device))
    with pytest.raises(UnsupportedError, match="attn_sink, indices is given"):
        call(step, meta, indices=torch.zeros(1), attn_sink=torch.zeros(16))
    with pytest.raises(UnsupportedError, match="head_dim_v=256"):
        flash_mla_with_kvcache(*step.operands(), 256, meta)
    metadata, splits = get_mla_metadata(step.cache_seqlens, 16, 1)
    with pytest.raises(ArgumentError, match=r"for 1 requests expected \[parts, 8\] and at least \[2\]"):
        call(step, metadata, splits[:1])
