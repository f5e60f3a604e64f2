"""The example of decoding with a shared prefix runs from empty, and its three steps are the plain decode."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

FILE = Path(__file__).parents[1] / "examples" / "shared_prefix.py"


@pytest.fixture(scope="module")
def example() -> Any:
    spec = importlib.util.spec_from_file_location("shared_prefix", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["shared_prefix"] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("q_len", [1, 3])
def test_prefix_and_suffixes_merged_are_the_whole_for_every_request(example: Any, q_len: int) -> None:
    torch.manual_seed(0)
    step = example.Step(example.Size(3, 64, 70, 16, q_len), "cpu")
    assert len(set(step.suffix_lengths.tolist())) == 3
    shared = example.SharedPrefix(step)
    shared.plan()
    got = shared.run(0)
    for request in range(3):
        assert example.distance(got[request], example.in_float64(step, request)) < example.BOUND


def test_it_prints_both_times_and_checks_the_values(example: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert example.main(["--batch", "2", "--prefix", "64", "--suffix", "20", "--heads", "16", "--repeats", "1"]) == 0
    said = capsys.readouterr().out
    for column in ("plain us", "shared us", "plain/shared"):
        assert column in said
    assert said.split()[-1] == "ok"


def test_it_fails_when_values_differ(example: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run = example.SharedPrefix.run
    monkeypatch.setattr(example.SharedPrefix, "run", lambda self, layer: run(self, layer).mul_(1.1))
    assert example.main(["--batch", "2", "--prefix", "64", "--suffix", "20", "--heads", "16", "--repeats", "1"]) == 1


def test_a_prefix_that_ends_inside_a_page_is_refused(example: Any) -> None:
    with pytest.raises(SystemExit, match="only whole pages of 64"):
        example.main(["--prefix", "100"])
