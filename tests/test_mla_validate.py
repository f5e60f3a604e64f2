"""MLADecode under JITKERN_VALIDATE=1, and what its constructor and its traced form refuse."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import jitkern
from jitkern import settings
from jitkern.errors import ArgumentError, UnsupportedError
from jitkern.ops import mla_launch
from tests.emulator.device import EmulatedDevice
from tests.emulator.emulate import Emulator
from tests.mla_oracle import assert_decoded, make_step, reference, with_codes


@pytest.fixture
def validating() -> Iterator[None]:
    with settings.override(validate=True):
        yield


def given(name: str, value: torch.Tensor) -> dict[str, Any]:
    return {name: value}


def test_good_steps_pass(validating: None) -> None:
    coded = with_codes(make_step([100, 0, 3, 64], 16))
    coded.step.cache_seqlens[1] = -5  # empty
    mla = jitkern.MLADecode(6, 16, device="cpu", cache_dtype=torch.float8_e4m3fn)
    for _ in range(2):
        mla.plan(coded.step.cache_seqlens)
        out, lse = mla.run(*coded.step.operands(), k_scale=coded.k_scale)
        assert_decoded(out, lse, reference(coded.values))


@pytest.mark.parametrize("scale", [0.0, -1.0, math.nan, math.inf])
def test_scales(validating: None, scale: float) -> None:
    coded = with_codes(make_step([100], 16))
    mla = jitkern.MLADecode(1, 16, device="cpu", cache_dtype=torch.float8_e4m3fn)
    mla.plan(coded.step.cache_seqlens)
    operands = coded.step.operands()
    for name in ("k_scale", "q_scale"):
        good, bad = torch.ones(1), torch.tensor([scale])
        mla.run(*operands, **given(name, good))
        with pytest.raises(ArgumentError, match=rf"{name} is \[.*\]; expected a finite number above 0"):
            mla.run(*operands, **given(name, bad))
        good.copy_(bad)
        with pytest.raises(ArgumentError, match=f"{name} is "):
            mla.run(*operands, **given(name, good))


def test_lengths_beyond_the_table(validating: None) -> None:
    step = make_step([100, 3, 300], 16, columns=2)
    mla = jitkern.MLADecode(3, 16, device="cpu")
    mla.plan(step.cache_seqlens)
    with pytest.raises(ArgumentError, match=r"cache_seqlens\[2\] is 300, but the block table reaches 128"):
        mla.run(*step.operands())
    mla.plan(step.cache_seqlens, torch.tensor([2], dtype=torch.int32))  # then it is a pad
    mla.run(*step.operands())


def test_a_plan_that_left_a_request_out(validating: None) -> None:
    step = make_step([100, 3, 64], 16)
    planned = torch.tensor([100, 0], dtype=torch.int32)
    mla = jitkern.MLADecode(3, 16, device="cpu")
    mla.plan(planned)
    with pytest.raises(ArgumentError, match=r"cache_seqlens\[1\] is 3, but the plan was made when it had no keys"):
        mla.run(*step.operands())
    step.cache_seqlens[1] = 0
    mla.run(*step.operands())
    step.cache_seqlens[1] = 3
    mla.plan(planned, torch.tensor([1], dtype=torch.int32))  # the device says which are real
    mla.run(*step.operands())


def test_shared_memory_is_found_at_every_call(validating: None) -> None:
    step = make_step([100], 16)
    mla = jitkern.MLADecode(1, 16, device="cpu")
    mla.plan(step.cache_seqlens)
    room = torch.zeros(1, 1, 16, 576 + 512, dtype=torch.bfloat16)
    step.q = room[..., :576].copy_(step.q)
    mla.run(*step.operands(), out=room[..., 576:])
    with pytest.raises(ArgumentError, match=r"out .* shares memory with q"):
        mla.run(*step.operands(), out=room[..., 8:520])


def test_off_by_default() -> None:
    step = make_step([100, 3, 300], 16, columns=2)
    mla = jitkern.MLADecode(3, 16, device="cpu")
    mla.plan(step.cache_seqlens)
    mla.run(*step.operands())


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"num_parts": 2.5}, "num_parts=2.5; expected 1 to 1024, or None"),
        ({"num_parts": True}, "num_parts=True"),
        ({"num_parts": "3"}, "num_parts='3'"),
        ({"empty_lse": None}, "empty_lse=None; expected inf or -inf"),
        ({"empty_lse": torch.tensor(math.inf)}, "empty_lse=tensor"),
        ({"page_size": 64.0}, "page_size=64.0; expected an int"),
        ({"page_size": True}, "page_size=True"),
        ({"head_dim": 576.0}, "head_dim=576.0"),
        ({"head_dim_v": 512.0}, "head_dim_v=512.0"),
        ({"pdl": "no"}, "pdl='no'; expected True or False"),
        ({"device": "meta"}, "there are kernels for CUDA devices and the CPU"),
    ],
    ids=str,
)
def test_arguments_of_a_wrong_type(wrong: dict[str, object], message: str) -> None:
    with pytest.raises((ArgumentError, UnsupportedError), match=message):
        jitkern.MLADecode(**({"max_batch": 4, "num_heads": 16, "device": "cpu"} | wrong))  # type: ignore[arg-type]


@pytest.mark.parametrize("scale", [3e38, -2.4e38, True])
def test_a_softmax_scale_that_no_float_holds(scale: float) -> None:
    step = make_step([100], 16)
    mla = jitkern.MLADecode(1, 16, device="cpu")
    mla.plan(step.cache_seqlens)
    mla.run(*step.operands(), 1.0)  # to a dictionary True is that
    with pytest.raises(ArgumentError, match="softmax_scale="):
        mla.run(*step.operands(), scale)


@pytest.mark.parametrize(("target", "rows"), [("sm_90", {16, 32, 64}), ("sm_80", {16, 32}), ("sm_89", {16})])
@pytest.mark.parametrize(("heads", "q_len"), [(16, 4), (1, 200)])
def test_the_tiles_of_every_query_length_are_loaded_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, target: str, rows: set[int], heads: int, q_len: int
) -> None:
    """Else a capture at a length between 1 and the longest would find its kernel missing."""
    EmulatedDevice(Emulator(tmp_path), target, monkeypatch)
    asked, decode = set(), mla_launch._decode

    def recorded(made: object, tile: object, *more: object) -> object:
        asked.add(tile.rows)  # type: ignore[attr-defined]
        return decode(made, tile, *more)  # type: ignore[arg-type]

    monkeypatch.setattr(mla_launch, "_decode", recorded)
    mla = jitkern.MLADecode(2, heads, 1, q_len, device="cpu")
    assert asked == {mla._tile(n).rows for n in range(1, q_len + 1)} == rows


def test_traced_results_are_not_converted() -> None:
    step = make_step([100, 3], 16)
    mla = jitkern.MLADecode(2, 16, device="cpu")
    mla.plan(step.cache_seqlens)

    def layer(q: torch.Tensor, **results: Any) -> torch.Tensor:
        return mla.run(q, *step.operands()[1:], **results)[0]

    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    expected = mla.run(*step.operands())[0]
    out = torch.zeros(2, 1, 16, 512, dtype=torch.bfloat16)
    assert torch.equal(compiled(step.q, out=out), expected)
    assert torch.equal(out, expected)
    for wrong in ({"out": out.float()}, {"out": out.expand(3, 2, 1, 16, 512)}, {"lse": torch.zeros(3, 2, 16, 1)}):
        with pytest.raises(Exception, match=r"expected \[2, 1"):
            compiled(step.q, **wrong)
