"""``jitkern bench mla`` on the CPU: rows, checks of values, peers that are missing or wrong, and fakes of real ones."""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from jitkern import bench, benches, cli
from jitkern.benches import common, mla, mla_peers, mla_problem, plot
from jitkern.benches.mla_problem import DV, SCALE, D, Problem, Shape
from jitkern.errors import ArgumentError
from tests.test_bench_merge import options

SMALL = Shape(2, 130, 16, 2)


@pytest.fixture
def few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mla_problem, "ON_CPU", [Shape(1, 100, 16, 1), SMALL])
    monkeypatch.setattr(common, "bandwidth", lambda device: 10.0)
    monkeypatch.setattr(common, "matrix_rate", lambda device: 0.1)


@pytest.fixture
def problem() -> Problem:
    torch.manual_seed(0)
    return mla_problem.make(SMALL, "cpu")


def test_the_command_writes_rows_with_facts_and_plots(
    few_shapes: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "mla.csv"
    assert cli.main(["bench", "mla", "--repeats", "1", "--out", str(out), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert [row["library"] for row in result["rows"]] == [*mla_peers.ON_CPU] * 2
    assert all(0 < row["error"] < mla.ERROR_BOUND and row["decode"] > 0 for row in result["rows"])
    assert result["rows"][0]["plan"] > 0
    plain, codes, tokens, _ = result["rows"][:4]
    assert plain["MB"] > tokens["MB"] > codes["MB"] > plain["MB"] / 2  # the bytes of a token are counted as they are
    assert plain["error"] == pytest.approx(codes["error"], rel=0.2) == pytest.approx(tokens["error"], rel=0.2)
    with open(out, newline="", encoding="utf-8") as file:
        written = list(csv.DictReader(file))
    assert len(written) == 8 + 2  # and the ceilings
    assert {"date", "device", "torch", "triton", "commit", "command"} <= written[0].keys()
    assert written[0]["device"] == "CPU"
    pytest.importorskip("matplotlib")
    assert out.with_suffix(".png").stat().st_size > 1000
    assert "decode" in out.with_suffix(".svg").read_text(encoding="utf-8")


def test_the_text_has_a_line_for_each_shape_and_the_ratios(
    few_shapes: None, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", "mla", "--repeats", "1"]) == 0
    said, told = capsys.readouterr()
    assert "2/2 (2, 130, 16, 2): jitkern " in told
    assert "100" in said
    assert "eager:" in said
    assert "geometric mean of 2" in said
    assert "ceiling (torch.add), GB/s: 10" in said


def test_a_peer_that_is_not_there_is_left_out_with_the_reason(
    few_shapes: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    mla_peers._library.cache_clear()
    for variable in ("FLASHMLA_OPS", "FA3_OPS"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(mla_peers, "ON_CPU", ("jitkern", "flashmla", "fa3"))
    result = mla.run(options())
    notes = {row["library"]: row["note"] for row in result["rows"]}
    assert "FLASHMLA_OPS is not set" in notes["flashmla"]
    assert "FA3_OPS is not set" in notes["fa3"]
    assert "fa3: left out (ImportError: FA3_OPS is not set" in mla.text(result)


@pytest.mark.parametrize(("name", "code"), [("eager", 0), ("jitkern", 1)])
def test_wrong_values_are_not_timed(
    name: str, code: int, few_shapes: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    good = mla_peers.MAKERS[name]

    def wrong(problem: Problem) -> mla_peers.Decode:
        decode = good(problem)
        return mla_peers.Decode(lambda i: decode.step(i) * 1.1 if decode.step else decode.run(i) * 1.1)

    monkeypatch.setitem(mla_peers.MAKERS, name, wrong)
    assert cli.main(["bench", "mla", "--repeats", "1"]) == code
    assert f"{name}: WRONG, not timed: off by 0.1" in capsys.readouterr().out


def test_results_that_nobody_wrote_do_not_pass(problem: Problem) -> None:
    row = mla.measure(lambda p: mla_peers.Decode(lambda i: p.out[i]), problem, 1)
    assert "WRONG" in row["note"]
    assert "decode" not in row


def test_an_unknown_peer_or_shape_is_refused(few_shapes: None) -> None:
    with pytest.raises(ArgumentError, match="no peer flash; there are jitkern"):
        mla.run(options(peers="jitkern,flash"))
    assert len(mla.run(options(rows="1", peers="jitkern", tuning="slack=10"))["rows"]) == 1


def test_shapes_move_what_they_say() -> None:
    shape = Shape(2, 64, 16, 1)
    assert mla_problem.traffic(shape) == 2 * 64 * 576 * 2 + 2 * 16 * (576 + 512) * 2
    assert mla_problem.operations(shape) == 2 * 2 * 64 * 16 * (576 + 512)
    assert len(set(mla_problem.GRID)) == len(mla_problem.GRID) > 50
    assert max(map(mla_problem.traffic, mla_problem.GRID + mla_problem.BASELINE)) < 2e9


def test_on_a_gpu_each_turn_is_a_call_and_a_graph_has_thirty(monkeypatch: pytest.MonkeyPatch) -> None:
    graphs = []

    def clock(calls: Any, rounds: int, repeats: int) -> float:
        graphs.append(([call() for call in calls], rounds, repeats))
        return 1.0

    monkeypatch.setattr(bench, "gpu_microseconds", clock)
    fake: Any = argparse.Namespace(turns=3, cache=argparse.Namespace(device=torch.device("cuda")))
    assert mla._time(lambda i: 10 * i, fake, 5) == 1.0
    assert mla._plan_time(lambda: 7, fake, 5) == 1.0
    assert graphs == [([0, 10, 20], 10, 5), ([7], 30, 5)]


@dataclass(frozen=True)
class Config:
    name: str
    splits: int = 1


class TooLarge(Exception):
    """What Triton throws at a launch that needs more shared memory than there is."""


@pytest.mark.parametrize("fitting", [("slow", "quick"), ("slow",), ()])
def test_tritons_quickest_configuration_that_fits_counts(
    fitting: tuple[str, ...], problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[str] = []

    def decode(q, cache, table, lengths, out, lse, pieces, config, causal):
        if config.name not in fitting:
            raise TooLarge
        ran.append(config.name)

    def clock(calls: Any, repeats: int) -> float:
        for call in calls:
            call()
        return {"slow": 9.0, "quick": 3.0}[ran[-1]]

    fake = ModuleType("jitkern.benches.triton_mla")
    vars(fake).update(
        configs=lambda batch, rows, keys, workers: [Config(name) for name in ("slow", "huge", "quick")],
        scratch=lambda *sizes: None,
        decode=decode,
        OutOfResources=TooLarge,
    )
    monkeypatch.setitem(sys.modules, fake.__name__, fake)
    monkeypatch.setattr(benches, "triton_mla", fake, raising=False)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: argparse.Namespace(multi_processor_count=132)
    )
    monkeypatch.setattr(bench, "gpu_microseconds", clock)
    if not fitting:
        with pytest.raises(RuntimeError, match="no tile fits"):
            mla_peers.triton(problem)
        return
    bound = mla_peers.triton(problem)
    assert fitting[-1] in bound.note
    ran.clear()
    assert bound.run(0) is problem.out[0]
    assert ran == [fitting[-1]]


# ---- peers' ops, as fakes that have the real names -------------------------------------------------------------------


def attend(
    q: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, length: int, scale: float, causal: bool
) -> torch.Tensor:
    """[tokens, heads, d] over [keys, d]."""
    scores = torch.einsum("thd,kd->thk", q.double(), keys[:length].double()) * scale
    if causal:
        for t in range(len(q)):
            scores[t, :, length - (len(q) - 1 - t) :] = -torch.inf
    return torch.softmax(scores, -1) @ values[:length].double()


def flashmla_op(q, cache, d_v, lengths, table, scale, causal, metadata, splits):
    planned = metadata is not None
    metadata = metadata if planned else torch.zeros(4, 8, dtype=torch.int32)
    splits = splits if planned else torch.zeros(len(q) + 1, dtype=torch.int32)
    out = torch.empty(*q.shape[:3], d_v, dtype=q.dtype)
    for i in range(len(q)):
        keys = cache[table[i].long()].view(-1, D)
        out[i] = attend(q[i], keys, keys[:, :d_v], int(lengths[i]), scale, causal).to(q.dtype)
    return out, torch.zeros(len(q), q.shape[2], q.shape[1]), metadata.clone(), splits.clone()


FA3_FORWARD = (
    "Tensor(a!) q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor(b!)? out,"
    " Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k,"
    " int? max_seqlen_q, int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k,"
    " Tensor? rotary_cos, Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale,"
    " Tensor? v_descale, float softmax_scale, bool is_causal, int window_size_left, int window_size_right,"
    " float softcap, bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa,"
    " int sm_margin, Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k"
)
FA3_PLAN = (
    "int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, int headdim, int headdim_v,"
    " ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new,"
    " Tensor? seqused_q, Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, bool is_causal,"
    " int window_size_left, int window_size_right, bool has_softcap, int num_splits, bool? pack_gqa, int sm_margin"
)


def names(schema: str) -> list[str]:
    return [part.split()[-1] for part in schema.split(",")]


def fa3_forward(*values):
    given = dict(zip(names(FA3_FORWARD), values, strict=True))
    assert (given["window_size_left"], given["window_size_right"], given["cp_world_size"]) == (-1, -1, 1)
    assert int(given["scheduler_metadata"][0]) == given["num_splits"]
    starts, table = given["cu_seqlens_q"].tolist(), given["page_table"]
    for i, (first, last) in enumerate(itertools.pairwise(starts)):
        rotary, latent = (given[name][table[i].long()].flatten(0, 2) for name in ("k", "v"))
        q = torch.cat((given["q_v"][first:last], given["q"][first:last]), -1)
        length, scale = int(given["seqused_k"][i]), given["softmax_scale"]
        result = attend(q, torch.cat((latent, rotary), -1), latent, length, scale, given["is_causal"])
        given["out"][first:last] = result.to(q.dtype)
    return [given["out"].clone(), torch.zeros(1), torch.zeros(1), torch.zeros(1)]


def fa3_plan(*values):
    given = dict(zip(names(FA3_PLAN), values, strict=True))
    assert (given["headdim"], given["headdim_v"], given["num_heads_k"], given["page_size"]) == (64, 512, 1, 64)
    return torch.tensor([given["num_splits"]], dtype=torch.int32)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(mla_peers, "_library", lambda variable, what: None)
    kept = []
    for space, name, schema, implementation in (
        ("_vllm_fa3_C", "fwd", f"({FA3_FORWARD}) -> Tensor[]", fa3_forward),
        ("_vllm_fa3_C", "get_scheduler_metadata", f"({FA3_PLAN}) -> Tensor", fa3_plan),
        (
            "sgl_kernel",
            "dense_decode_fwd",
            "(Tensor q, Tensor cache, int d_v, Tensor lengths, Tensor table, float scale, bool causal,"
            " Tensor? metadata, Tensor? splits) -> (Tensor, Tensor, Tensor, Tensor)",
            flashmla_op,
        ),
    ):
        library = torch.library.Library(space, "FRAGMENT")
        library.define(name + schema)
        library.impl(name, implementation, "CPU")
        kept.append(library)
    yield
    for library in kept:
        library._destroy()


@pytest.mark.parametrize("name", ["flashmla", "fa3", "fa3-auto"])
@pytest.mark.parametrize("shape", [SMALL, Shape(3, 64, 16, 1)])
def test_a_peers_op_is_given_what_it_wants(name: str, shape: Shape, libraries: None) -> None:
    problem = mla_problem.make(shape, "cpu")
    row = mla.measure(mla_peers.MAKERS[name], problem, 1)
    assert row["error"] < mla.ERROR_BOUND, row
    assert row["decode"] > 0
    assert row["decode_plan"] > 0
    assert ("plan" in row) is (name != "flashmla")


def test_an_argument_that_an_op_does_not_have_is_named(libraries: None) -> None:
    plan = mla_peers.by_name(torch.ops._vllm_fa3_C.get_scheduler_metadata.default, number_of_splits=1)
    with pytest.raises(AttributeError, match="no argument number_of_splits"):
        plan()


def test_the_scale_is_that_of_the_whole_head() -> None:
    assert pytest.approx((DV + 64) ** -0.5) == SCALE


# ---- plots -----------------------------------------------------------------------------------------------------------


def test_a_figure_is_the_same_bytes_each_time(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    rows = [
        {"heads": heads, "q_len": 1, "library": name, "MB": 4.0, "decode": 10.0, "decode_plan": 12.0}
        for heads in (16, 128)
        for name in ("jitkern", "fa3")
    ]
    panels = plot.mla_panels([*rows, {"heads": 16, "q_len": 1, "library": "triton", "MB": 1.0}], 4000.0)
    assert len(panels) == 4
    assert panels[0].lines["fa3"] == [(4.0, 400.0)]
    first = [path.read_bytes() for path in plot.roofline(panels, "title", tmp_path / "a")]
    assert first == [path.read_bytes() for path in plot.roofline(panels, "title", tmp_path / "b")]
