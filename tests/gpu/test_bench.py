"""``jitkern bench`` on a GPU, with shapes that take no time: graphs are captured, values checked, all peers timed."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from jitkern.benches import common, merge, mla, mla_problem  # noqa: E402


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "sets_for", lambda size: 3)
    monkeypatch.setattr(mla_problem, "BASELINE", [mla_problem.Shape(3, 200, 16, 1), mla_problem.Shape(2, 130, 128, 2)])
    monkeypatch.setattr(merge, "BASELINE", [(64, 4, 64, "float32"), (33, 8, 128, "bfloat16")])


def options(peers: str) -> argparse.Namespace:
    return argparse.Namespace(peers=peers, shapes="baseline", repeats=2, out=None, json=True)


def needs_triton(peer: str) -> None:
    if peer in ("triton", "compile"):
        pytest.importorskip("triton", reason="triton is not installed")


@pytest.mark.parametrize("peer", ["jitkern-pdl", "jitkern-no-pdl", "triton", "eager"])
def test_mla_is_right_before_it_is_timed(peer: str) -> None:
    needs_triton(peer)
    result = mla.run(options(f"jitkern,{peer}"))
    for row in result["rows"]:
        assert "decode" in row, row
        assert row["error"] < mla.ERROR_BOUND
    assert result["ok"]
    assert len(result["decode ratios"]) == 1


@pytest.mark.parametrize("peer", ["triton", "compile", "eager"])
def test_merges_are_timed_on_the_same_buffers(peer: str) -> None:
    needs_triton(peer)
    result: dict[str, Any] = merge.run(options(f"jitkern,{peer}"))
    for row in result["rows"]:
        assert row["jitkern us"] > 0
        assert row[f"{peer} us"] > 0
