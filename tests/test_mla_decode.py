"""MLADecode against the float64 oracle: FlashMLA's grid of shapes, and the contract case by case, on CPU and GPU."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch

from jitkern.errors import ArgumentError, UnsupportedError
from jitkern.ops.mla import MLADecode
from jitkern.ops.mla_plan import Tuning
from tests.mla_oracle import GARBAGE_PAGE, Step, assert_decoded, make_step, reference, rising


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def decoder(step: Step, capacity: int | None = None, **more: Any) -> MLADecode:
    batch, q_len, heads, d = step.q.shape
    heads_k, page_size = step.k_cache.shape[2], step.page_size
    capacity = batch if capacity is None else capacity
    return MLADecode(capacity, heads, heads_k, q_len, step.q.dtype, step.q.device, d, 512, page_size, **more)


def poisoned(step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    batch, q_len, heads, _ = step.q.shape
    out = torch.full((batch, q_len, heads, 512), math.nan, dtype=step.q.dtype, device=step.q.device)
    return out, torch.full((batch, heads, q_len), math.nan, device=step.q.device)


def decode(step: Step, causal: bool = False, **more: Any) -> tuple[torch.Tensor, torch.Tensor]:
    mla = decoder(step, **more)
    mla.plan(step.cache_seqlens)
    out, lse = poisoned(step)
    mla.run(*step.operands(), causal=causal, out=out, lse=lse)
    return out, lse


def varied(batch: int, keys: int, q_len: int) -> list[int]:
    generator = torch.Generator().manual_seed(batch * keys + q_len)
    lengths = (torch.randn(batch, generator=generator) * keys / 2 + keys).long().clamp_min(q_len)
    return [int(n) for n in lengths]


GRID = [
    (batch, q_len, keys, heads, heads_k, vary, causal)
    for batch, q_len, keys, heads, heads_k, vary, causal in itertools.product(
        (1, 2, 6, 64),
        (1, 2, 4),
        (20, 140, 4096),
        (1, 3, 9, 63, 64, 126, 128),
        (1, 2, 3, 8),
        (False, True),
        (False, True),
    )
    if heads % heads_k == 0
]
SMALL = [case for case in GRID if case[0] * case[1] * case[2] * case[3] <= 80_000][::29]
LARGE = GRID[::67]


@pytest.mark.parametrize("case", SMALL, ids=str)
def test_flashmla_grid_small(case: tuple[int, int, int, int, int, bool, bool], device: str) -> None:
    check_grid(case, device)


@pytest.mark.gpu
@pytest.mark.parametrize("case", LARGE, ids=str)
def test_flashmla_grid_large(case: tuple[int, int, int, int, int, bool, bool]) -> None:
    check_grid(case, "cuda")


def check_grid(case: tuple[int, int, int, int, int, bool, bool], device: str) -> None:
    batch, q_len, keys, heads, heads_k, vary, causal = case
    lengths = varied(batch, keys, q_len) if vary else [keys] * batch
    step = make_step(lengths, heads, heads_k, q_len, device=device)
    which = sorted({0, batch // 2, batch - 1})  # the oracle is slow: a few requests of each case
    out, lse = decode(step, causal)
    assert_decoded(out[which], lse[which], reference(step.rows(*which), causal))


def test_half_of_the_lengths_zero(device: str) -> None:
    lengths = [0 if i % 2 else 900 + 13 * i for i in range(16)]
    step = make_step(lengths, 8, q_len=2, device=device)
    assert_decoded(*decode(step, True), reference(step, True))


@pytest.mark.parametrize("page_size", [1, 2, 16, 32, 64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_page_sizes(page_size: int, dtype: torch.dtype, device: str) -> None:
    step = make_step([1, 63, 64, 65, 0, 333], 4, page_size=page_size, dtype=dtype, device=device)
    assert_decoded(*decode(step), reference(step))


@pytest.mark.parametrize("heads", [1, 2, 7, 8, 15, 16, 17, 24, 32, 33, 48, 96, 127, 128])
def test_any_number_of_heads(heads: int, device: str) -> None:
    step = make_step([129, 5, 0, 300], heads, device=device)
    assert_decoded(*decode(step), reference(step))


@pytest.mark.parametrize("q_len", [1, 2, 3, 4, 7, 19])
@pytest.mark.parametrize("heads", [3, 16])
def test_causal_rows_with_fewer_keys_than_queries(q_len: int, heads: int, device: str) -> None:
    step = make_step([1, q_len, q_len + 1, 64, 66, 200, 0], heads, q_len=q_len, device=device)
    out, lse = decode(step, True)
    assert_decoded(out, lse, reference(step, True))
    if q_len > 1:  # the first query tokens of a request of one key see nothing
        assert (out[0, : q_len - 1] == 0).all()
        assert (lse[0, :, : q_len - 1] == math.inf).all()


def test_the_latent_alone(device: str) -> None:
    step = make_step([100, 777, 0], 20, head_dim=512, device=device)
    assert_decoded(*decode(step), reference(step))


@pytest.mark.parametrize("parts", [1, 2, 3, 8, 64, 132, 1024])
@pytest.mark.parametrize("min_blocks", [1, 4])
def test_every_number_of_parts(parts: int, min_blocks: int, device: str) -> None:
    step = make_step([700, 0, 64, 2000, 1, 130], 5, q_len=2, device=device)
    tuning = type("Chosen", (Tuning,), {"min_blocks": min_blocks})
    assert_decoded(*decode(step, True, num_parts=parts, tuning=tuning), reference(step, True))


def test_the_same_bits_each_time(device: str) -> None:
    step = make_step([3000, 100, 0, 65], 16, device=device)
    first = decode(step, num_parts=16)
    for _ in range(3):
        again = decode(step, num_parts=16)
        assert torch.equal(first[0], again[0])
        assert torch.equal(first[1], again[1])


def test_a_request_does_not_depend_on_its_neighbours_when_it_is_not_split(device: str) -> None:
    step = make_step([200, 0, 150, 190, 120, 180], 16, device=device)
    together = decode(step, num_parts=6)
    alone = decode(step.rows(2), num_parts=1)
    assert torch.equal(together[0][2], alone[0][0])
    assert torch.equal(together[1][2], alone[1][0])


# ---- pads, dummies, capacity


def test_no_request_no_column_no_key(device: str) -> None:
    empty = make_step([], 16, device=device)
    out, lse = decode(empty, capacity=4)
    assert out.shape == (0, 1, 16, 512)
    assert lse.shape == (0, 16, 1)
    no_columns = make_step([0, 0, 0], 16, device=device, columns=0)
    out, lse = decode(no_columns)
    assert (out == 0).all()
    assert (lse == math.inf).all()


def test_an_empty_row_can_have_the_l_that_merges_like(device: str) -> None:
    step = make_step([0, 70], 16, q_len=2, device=device)
    out, lse = decode(step, True, empty_lse=-math.inf)
    assert_decoded(out, lse, reference(step, True, empty=-math.inf))
    assert (lse[0] == -math.inf).all()


@pytest.mark.parametrize("real", [0, 1, 3, 7, 8])
def test_the_real_number_of_requests_comes_from_the_device(real: int, device: str) -> None:
    lengths = [300, 20, 64, 0, 1000, 5, 129, 77]
    step = make_step(lengths, 16, device=device)
    step.block_table[real:] = -1  # a pad's row may hold anything
    mla = decoder(step)
    mla.plan(step.cache_seqlens, torch.tensor([real], dtype=torch.int32, device=device))
    out, lse = poisoned(step)
    mla.run(*step.operands(), out=out, lse=lse)
    expected = make_step(lengths, 16, device=device)
    expected.cache_seqlens[real:] = 0
    assert_decoded(out, lse, reference(expected))
    assert (out[real:] == 0).all()
    assert (lse[real:] == math.inf).all()


def test_rows_beyond_the_planned_batch_are_pads(device: str) -> None:
    step = make_step([300, 20, 64, 90], 16, device=device)
    mla = decoder(step)
    mla.plan(step.cache_seqlens[:2])
    out, lse = poisoned(step)
    mla.run(*step.operands(), out=out, lse=lse)
    assert_decoded(out[:2], lse[:2], reference(step.rows(0, 1)))
    assert (out[2:] == 0).all()
    assert (lse[2:] == math.inf).all()


def test_more_requests_than_a_grid_has_rows(device: str) -> None:
    batch = 66_000
    lengths = [1 if i % 1000 == 7 else 0 for i in range(batch)]
    step = make_step(lengths, 1, page_size=1, device=device, columns=1, spare_pages=1)
    out, lse = decode(step, num_parts=8)
    which = [0, 7, 65_007, batch - 1]
    assert_decoded(out[which], lse[which], reference(step.rows(*which)))
    assert int((lse == math.inf).sum()) == lengths.count(0)


# ---- block tables and poison


def test_pages_that_do_not_exist_are_masked(device: str) -> None:
    step = make_step([300, 300, 300, 64], 16, page_size=32, device=device)
    step.block_table[0, 0] = -1
    step.block_table[1, 4] = step.k_cache.shape[0]
    step.block_table[2, 9] = GARBAGE_PAGE
    step.block_table[3, :] = -5
    out, lse = decode(step)
    assert_decoded(out, lse, reference(step))
    assert (out[3] == 0).all()
    assert (lse[3] == math.inf).all()


@pytest.mark.parametrize("page_size", [1, 16, 64, 128])
def test_lengths_beyond_the_table_end_with_the_table(page_size: int, device: str) -> None:
    step = make_step([200, 1000, 64], 16, page_size=page_size, device=device, columns=256 // page_size)
    step.cache_seqlens[1] = 100_000
    assert_decoded(*decode(step), reference(step))


def test_pads_with_uninitialised_lengths_leave_the_others_alone(device: str) -> None:
    step = make_step([64] * 200, 4, device=device, columns=1)
    expected = reference(step)
    step.cache_seqlens[3:] = 0x7F7F7F7F
    assert_decoded(*decode(step, num_parts=16), expected)


def test_negative_lengths_are_empty(device: str) -> None:
    step = make_step([200, 0, 64], 16, device=device)
    step.cache_seqlens[1] = -7
    out, lse = decode(step)
    assert (out[1] == 0).all()
    assert_decoded(out[[0, 2]], lse[[0, 2]], reference(step.rows(0, 2)))


def test_everything_is_written_whatever_was_there(device: str) -> None:
    step = make_step([900, 0, 64, 1300, 1], 16, q_len=2, device=device)
    mla = decoder(step, 8, num_parts=24)
    expected = reference(step, True)
    for word in (0x7F7F7F7F, -1, 0):
        mla._plan.storage.fill_(word)
        mla._partial_out.fill_(math.nan)
        mla._partial_lse.fill_(math.nan)
        mla.plan(step.cache_seqlens)
        out, lse = poisoned(step)
        mla.run(*step.operands(), causal=True, out=out, lse=lse)
        assert_decoded(out, lse, expected)
        assert (mla.num_splits[5:] == mla.num_splits[5]).all()


def test_a_plan_stays_right_while_requests_grow_and_shrink(device: str) -> None:
    step = make_step([700, 1400, 64, 130], 16, device=device)
    mla = decoder(step, num_parts=12)
    step.cache_seqlens.copy_(torch.tensor([300, 900, 1, 129]))
    mla.plan(step.cache_seqlens)
    for lengths in ([300, 900, 1, 129], [301, 961, 64, 130], [700, 1400, 64, 130], [64, 1, 1, 5]):
        step.cache_seqlens.copy_(torch.tensor(lengths))
        clean = make_step([700, 1400, 64, 130], 16, device=device)
        clean.cache_seqlens.copy_(step.cache_seqlens)
        out, lse = mla.run(*step.operands())
        assert_decoded(out, lse, reference(clean))


# ---- strides, alignment, scale, base


@pytest.mark.parametrize("extra", [1, 2, 4, 8, 24])
def test_any_strides_of_the_cache(extra: int, device: str) -> None:
    step = make_step([300, 0, 70], 6, heads_k=2, device=device)
    pages, page_size, heads_k, d = step.k_cache.shape
    wide = torch.full((pages, heads_k, page_size, d + extra), math.nan, dtype=step.k_cache.dtype, device=device)
    wide[..., :d] = step.k_cache.transpose(1, 2)
    expected = reference(step)
    step.k_cache = wide[..., :d].transpose(1, 2)
    assert_decoded(*decode(step), expected)


@pytest.mark.parametrize("offset", [1, 2, 4])
def test_any_address_of_queries_and_results(offset: int, device: str) -> None:
    step = make_step([300, 3000, 70], 6, q_len=2, device=device)
    expected = reference(step, True)
    flat = torch.empty(step.q.numel() + offset, dtype=step.q.dtype, device=device)
    flat[offset:] = step.q.flatten()
    step.q = flat[offset:].view(step.q.shape)
    mla = decoder(step, num_parts=8)
    mla.plan(step.cache_seqlens)
    out = torch.empty(3 * 2 * 6 * 513 + offset, dtype=step.q.dtype, device=device)[offset:].view(3, 2, 6, 513)[
        ..., :512
    ]
    lse = torch.empty(2, 3, 6, device=device).permute(1, 2, 0)
    mla.run(*step.operands(), causal=True, out=out, lse=lse)
    assert_decoded(out, lse, expected)


@pytest.mark.parametrize("base", ["e", "2", 2, 10])
def test_scale_and_base(base: str | int, device: str) -> None:
    step = make_step([300, 3000, 0], 16, device=device)
    mla = decoder(step, num_parts=8)
    mla.plan(step.cache_seqlens)
    out, lse = mla.run(*step.operands(), softmax_scale=0.2, lse_base=base)
    number = math.e if base == "e" else float(base)
    assert_decoded(out, lse, reference(step, softmax_scale=0.2), base=number)


@pytest.mark.parametrize("slope", [-30.0, -1.0, 1.0, 3.0, 30.0])
@pytest.mark.parametrize("heads", [16, 64])
def test_maxima_that_change_from_block_to_block(heads: int, slope: float, device: str) -> None:
    """By less and by more than what weights may be relative to (kHeadroom), up and down, over odd and even blocks."""
    step = rising(make_step([700, 65, 128], heads, device=device), slope)
    assert_decoded(*decode(step, num_parts=1), reference(step))
    assert_decoded(*decode(step, num_parts=7), reference(step))


def test_huge_and_tiny_scores(device: str) -> None:
    step = make_step([130, 64], 16, device=device)
    for scale in (1e4, 1e-6):
        mla = decoder(step)
        mla.plan(step.cache_seqlens)
        out, lse = mla.run(*step.operands(), softmax_scale=scale)
        assert out.isfinite().all()
        assert lse.isfinite().all()


# ---- refusals


def test_what_does_not_fit_is_refused_before_anything_runs(device: str) -> None:
    step = make_step([10, 20, 30], 16, q_len=2, device=device)
    mla = decoder(step)
    with pytest.raises(ArgumentError, match="no plan yet"):
        mla.run(*step.operands())
    with pytest.raises(ArgumentError, match="at most 3"):
        mla.plan(torch.zeros(4, dtype=torch.int32, device=device))
    with pytest.raises(ArgumentError, match="int32"):
        mla.plan(step.cache_seqlens.long())
    with pytest.raises(ArgumentError, match="num_requests"):
        mla.plan(step.cache_seqlens, 2)
    with pytest.raises(ArgumentError, match="at most 2"):
        mla.plan(step.cache_seqlens, q_len=3)
    mla.plan(step.cache_seqlens, q_len=1)
    with pytest.raises(ArgumentError, match="q has 2 query tokens a request, the plan is for 1"):
        mla.run(*step.operands())
    first = mla.plan(step.cache_seqlens)
    mla.plan(step.cache_seqlens)
    with pytest.raises(ArgumentError, match="another plan"):
        mla.run(*step.operands(), plan=first)
    with pytest.raises(ArgumentError, match="the plan is for 3"):
        mla.run(*step.rows(0, 1).operands())
    out, lse = poisoned(step)
    for bad, message in (
        ((step.q[:, :, :8], *step.operands()[1:]), "q has shape"),
        ((step.q, step.k_cache[:, :32], *step.operands()[2:]), "k_cache has shape"),
        ((step.q, step.k_cache.half(), *step.operands()[2:]), "float16"),
        ((step.q, step.k_cache, step.block_table.long(), step.cache_seqlens), "block_table is torch.int64"),
        ((step.q, step.k_cache, step.block_table[:2], step.cache_seqlens), "block_table has shape"),
        ((step.q, step.k_cache, step.block_table, step.cache_seqlens[:2]), "cache_seqlens has shape"),
    ):
        with pytest.raises(ArgumentError, match=message):
            mla.run(*bad, out=out, lse=lse)
    with pytest.raises(ArgumentError, match="out has shape"):
        mla.run(*step.operands(), out=out[:2])
    with pytest.raises(ArgumentError, match="may overlap"):
        mla.run(*step.operands(), out=out[:1].expand(3, -1, -1, -1))
    assert out.isnan().all()
    assert lse.isnan().all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_batch": -1}, "max_batch"),
        ({"num_heads": 0}, "num_heads"),
        ({"num_heads_k": 3}, "no multiple"),
        ({"head_dim": 128}, "head_dim=128"),
        ({"page_size": 48}, "page_size=48"),
        ({"dtype": torch.float32}, "dtype"),
        ({"empty_lse": 0.0}, "empty_lse"),
        ({"num_parts": 0}, "num_parts"),
    ],
)
def test_an_object_that_cannot_be(wrong: dict[str, object], message: str) -> None:
    given: dict[str, object] = {"max_batch": 4, "num_heads": 16, "device": "cpu"}
    with pytest.raises((ArgumentError, UnsupportedError), match=message):
        MLADecode(**(given | wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["cuda:99", "nowhere", 3.5])
def test_a_device_that_is_not_there_is_named(name: Any) -> None:
    with pytest.raises(ArgumentError, match=r'cannot be used .*expected a CUDA device that is there, or "cpu"'):
        MLADecode(1, 16, device=name)
