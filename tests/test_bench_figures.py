"""The documentation's figures can be made again from the committed results."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(sys, "path", [str(ROOT), *sys.path])
    from benchmarks import figures as module

    return module


def test_every_figure_of_the_page_comes_from_the_results(figures: ModuleType, tmp_path: Path) -> None:
    written = figures.draw_all(ROOT / "benchmarks" / "results", tmp_path, (".svg",))
    page = (ROOT / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    embedded = set(re.findall(r"\]\(img/([\w.-]+)\)", page))
    assert embedded
    assert embedded <= {path.name for path in written}
    for name in embedded:
        assert (ROOT / "docs" / "img" / name).is_file()


def test_the_newest_file_of_a_device_counts_and_others_are_no_results(figures: ModuleType, tmp_path: Path) -> None:
    names = ("2026-01-02-merge-h200.csv", "2026-01-03-merge-h200.csv", "2026-01-02-mla-a100.csv")
    for name in (*names, "2026-01-04-merge-h200-earlier.csv", "2026-01-04-merge-h200.png", "notes.txt"):
        (tmp_path / name).touch()
    found = figures.newest(tmp_path)
    assert {key: path.name for key, path in found.items()} == {("merge", "h200"): names[1], ("mla", "a100"): names[2]}


def test_rows_have_numbers_and_nothing_where_nothing_is(figures: ModuleType, tmp_path: Path) -> None:
    file = tmp_path / "rows.csv"
    file.write_text('library,decode,GB/s\njitkern,1.5,\n"ceiling (torch.add), GB/s",,4000\n', encoding="utf-8")
    rows = figures.read(file)
    assert rows[0] == {"library": "jitkern", "decode": 1.5}
    assert figures.ceiling_of(rows) == 4000.0
    assert figures.ceiling_of(rows[:1]) is None
