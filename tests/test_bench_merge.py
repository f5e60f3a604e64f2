"""``jitkern bench merge``: what it compares and how, with a clock in place of the GPU's."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from jitkern import bench, cli
from jitkern.benches import common, merge, peers
from jitkern.errors import ArgumentError

FEW = [(16, 4, 32, "float32"), (5, 3, 64, "bfloat16")]


@pytest.fixture
def few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merge, "ON_CPU", FEW)
    monkeypatch.setattr(common, "bandwidth", lambda device: 10.0)


def options(**given: Any) -> argparse.Namespace:
    return argparse.Namespace(**{"peers": None, "shapes": "baseline", "repeats": 1, "out": None} | given)


def test_the_command_writes_rows_and_ratios(
    few_shapes: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "merge.csv"
    assert cli.main(["bench", "merge", "--repeats", "1", "--out", str(out), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [(row["n"], row["h"], row["d"], row["dtype"]) for row in result["rows"]] == FEW
    assert all(row["jitkern us"] > 0 and row["eager us"] > 0 for row in result["rows"])
    assert "geometric mean of 2" in result["ratios"][0]
    assert len(out.read_text(encoding="utf-8").splitlines()) > 3


def test_the_grid_is_vllms_and_every_peer_is_in_it() -> None:
    assert len(merge.GRID) == len(set(merge.GRID)) == 648
    assert {"jitkern", "sglang", "triton", "compile", "eager", "flashinfer"} == set(merge.PEERS) == set(peers.MAKERS)


def test_a_grid_takes_fewer_repeats() -> None:
    assert common.repeats(options(shapes="grid", repeats=None)) < common.repeats(options(repeats=None))
    assert common.repeats(options(shapes="grid", repeats=9)) == 9


def test_peers_ahead_by_more_than_two_per_cent_are_told() -> None:
    shapes = [(n, 4, 32, "float32") for n in range(3)]
    results = {
        "jitkern": dict.fromkeys(shapes, 10.0),
        "sglang": dict(zip(shapes, (9.0, 9.9, 20.0), strict=True)),
        "eager": {shapes[0]: 8.0},
    }
    behind = common.ahead(results, ("n", "h", "d", "dtype"), results)
    assert [(row["n"], row["peer"], row["ratio"]) for row in behind] == [(0, "eager", 0.8), (0, "sglang", 0.9)]
    lines = common.ratios(results)
    assert lines[0] == "sglang: 1.212 x jitkern's time (geometric mean of 3), least 0.900, ahead in 1"
    assert common.ratios({"eager": {shapes[0]: 8.0}}) == []


def test_a_grid_is_told_in_short(few_shapes: None) -> None:
    result = merge.run(options(peers="jitkern,eager"))
    assert "geometric mean" in merge.text(result)
    assert "648 shapes" in merge.text(result | {"rows": result["rows"][:1] * 648})
    behind = [{"n": 1, "h": 2, "d": 3, "dtype": "float32", "peer": "eager", "ratio": 0.5}]
    assert "peers ahead by more than 2 %, 1 times:" in merge.text(result | {"behind": behind})


def test_an_unknown_peer_is_refused(few_shapes: None) -> None:
    with pytest.raises(ArgumentError, match="no peer sgl; there are jitkern"):
        merge.run(options(peers="jitkern,sgl"))


def test_sets_share_nothing_and_are_laid_out_as_if_alone() -> None:
    first, second = peers.rotating((5, 3, 34, "bfloat16"), 2, "cpu")
    for name in ("a", "b", "out", "a_lse", "b_lse", "out_lse"):
        one, other = getattr(first, name), getattr(second, name)
        assert one.is_contiguous()
        assert one.shape == ((5, 3) if "lse" in name else (5, 3, 34))
        assert (other.data_ptr() - one.data_ptr()) % 128 == 0
        assert other.data_ptr() >= one.data_ptr() + one.numel() * one.element_size()


def test_on_a_gpu_all_peers_run_on_the_same_buffers_shape_by_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def clock(calls: Any, rounds: int, repeats: int) -> float:
        for call in calls:
            call()
        graphs.append((len(calls), rounds))
        return 1.0

    monkeypatch.setattr(bench, "gpu_microseconds", clock)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    monkeypatch.setattr(common, "sets_for", lambda size: 40)
    monkeypatch.setattr(merge, "rotating", lambda shape, count, device: peers.rotating(shape, count, "cpu"))
    seen: list[tuple[str, int]] = []
    calls: dict[str, merge.Call] = {}
    for name in ("jitkern", "eager", "flashinfer"):
        calls[name] = lambda o, name=name: seen.append((name, id(o)))  # type: ignore[misc]
    order = [(peer, shape) for peer, shape, _ in merge._measure_all(calls, FEW, 3, "cuda")]
    assert order == [
        ("jitkern", FEW[0]),
        ("eager", FEW[0]),
        ("jitkern", FEW[1]),
        ("eager", FEW[1]),
        ("flashinfer", FEW[1]),  # has no float32
    ]
    assert graphs == [(40, 1), (10, 3), (40, 1), (10, 3), (40, 1)]
    assert [one for name, one in seen if name == "jitkern"][:10] == [one for name, one in seen if name == "eager"][:10]


@pytest.mark.parametrize(
    ("program", "found", "told"),
    [
        ("print('[1, 2, 64, \"bfloat16\", 3.5]')", {(1, 2, 64, "bfloat16"): 3.5}, None),
        ("print('[1, 2, 64, \"float16\", 3.5]', flush=True); 1 / 0", {(1, 2, 64, "float16"): 3.5}, "ZeroDivisionError"),
        ("print('[1, 2,', flush=True); import time; time.sleep(60)", {}, "stopped after 1 s"),
    ],
)
def test_a_peer_in_a_process_of_its_own_tells_what_it_measured_before_it_failed(
    program: str, found: Any, told: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = subprocess.Popen
    asked: list[list[str]] = []

    def start(command: list[str], **more: Any) -> Any:
        asked.append(command)
        return real([sys.executable, "-c", program], **more)

    monkeypatch.setattr(subprocess, "Popen", start)
    monkeypatch.setattr(merge, "_ALONE_SECONDS", 1 if told and "stopped" in told else 60)
    assert merge._in_a_process("flashinfer", options(shapes="grid", repeats=None)) == found
    assert asked[0][1:] == ["-m", "jitkern.benches.merge", "--only", "flashinfer", "--repeats", "5", "--shapes", "grid"]
    said = capsys.readouterr().err
    assert (told in said) if told else not said


def test_a_library_that_is_not_named_is_left_out_with_the_reason(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("SGLANG_OPS", raising=False)
    assert merge._available(["sglang"]) == {}
    assert "SGLANG_OPS is not set" in capsys.readouterr().err


def test_the_compiled_formula_compiles_once_for_each_dtype_and_agrees(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled = []

    def backend(module: Any, examples: Any) -> Any:
        compiled.append(module)
        return module.forward

    compile_ = torch.compile
    monkeypatch.setattr(torch, "compile", lambda f, **more: compile_(f, backend=backend, **more))
    call = peers.MAKERS["compile"]()
    for shape in ((8, 4, 32, "float32"), (7, 4, 48, "float32"), (9, 6, 64, "bfloat16"), (32, 32, 32, "bfloat16")):
        operands = peers.rotating(shape, 1, "cpu")[0]
        for got, want in zip(call(operands), peers.eager(operands), strict=True):
            assert torch.equal(got, want)
    assert len(compiled) <= 4
