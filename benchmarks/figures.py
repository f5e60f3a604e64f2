"""The documentation's figures from the results in benchmarks/results: docs/img/<benchmark>-<device>.svg.

    python benchmarks/figures.py [--results FOLDER] [--into FOLDER] [--png]

Of each benchmark and device the newest file counts, by the date in its name.
"""

from __future__ import annotations

import argparse
import csv
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from jitkern.benches import plot
from jitkern.benches.mla_problem import Shape, traffic

ROOT = Path(__file__).parents[1]
NAME = re.compile(r"\d{4}-\d\d-\d\d-(?P<benchmark>merge|mla|states)-(?P<device>[a-z0-9]+)\.csv")
Row = dict[str, Any]


def read(path: Path) -> list[Row]:
    """Rows with numbers as numbers, without the columns that they do not have."""
    with open(path, newline="", encoding="utf-8") as file:
        return [{name: number(text) for name, text in row.items() if text} for row in csv.DictReader(file)]


def number(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


def newest(results: Path) -> dict[tuple[str, str], Path]:
    """The file of each benchmark and device."""
    found = [(match, path) for path in sorted(results.iterdir()) if (match := NAME.fullmatch(path.name))]
    return {(match["benchmark"], match["device"]): path for match, path in found}


def ceiling_of(rows: Sequence[Row]) -> float | None:
    """GB/s of torch.add, which stands in a row of its own."""
    for row in rows:
        if "ceiling (torch.add), GB/s" in (row.get("host us/call"), row.get("library")):
            return float(row["us"] if "us" in row else row["GB/s"])
    return None


def draw_merge(rows: list[Row], device: str, ceiling: float | None, stem: Path, kinds: Sequence[str]) -> list[Path]:
    shapes = [row for row in rows if "dtype" in row]
    names = list(dict.fromkeys(name for row in shapes for name in row))
    # A peer that has not the first shape is in the panel all the same.
    shapes = [{name: row.get(name) for name in names} for row in shapes]
    return plot.roofline(plot.merge_panels(shapes, ceiling), f"merge_attn_states on {device}", stem, kinds)


def draw_mla(rows: list[Row], device: str, ceiling: float | None, stem: Path, kinds: Sequence[str]) -> list[Path]:
    shapes = [row for row in rows if "batch" in row]
    for row in shapes:
        row.setdefault("MB", traffic(Shape(*(row[name] for name in Shape._fields))) / 1e6)
    title = f"MLA decode on {device}, bfloat16, page 64"
    return plot.roofline(plot.mla_panels(shapes, ceiling), title, stem, kinds)


def draw_states(rows: list[Row], device: str, ceiling: float | None, stem: Path, kinds: Sequence[str]) -> list[Path]:
    """N-way merges over N, and 8-bit output; the peers are what one does without."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(11, 4.5), layout="constrained")
    left, right = figure.subplots(1, 2)
    draw_many([row for row in rows if "stacked us" in row], left)
    draw_quantised([row for row in rows if "fused us" in row], right)
    figure.suptitle(f"merge_states and 8-bit output on {device}")
    return plot.save(figure, stem, kinds)


def draw_many(rows: list[Row], axes: Any) -> None:
    for i, shape in enumerate(dict.fromkeys((row["n"], row["h"], row["d"]) for row in rows)):
        some = [row for row in rows if (row["n"], row["h"], row["d"]) == shape]
        counts, label = [row["N"] for row in some], "n={}, h={}, d={}".format(*shape)
        axes.plot(counts, [row["stacked us"] for row in some], color=f"C{i}", marker="o", label=label)
        axes.plot(counts, [row["chain us"] for row in some], color=f"C{i}", marker="x", ls=":")
    axes.set(
        xlabel="states", ylabel="µs", yscale="log", title="merge_states (lines), a chain of pairwise merges (dots)"
    )
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def draw_quantised(rows: list[Row], axes: Any) -> None:
    columns = list(dict.fromkeys(name for row in rows for name in row if name.endswith(" us")))
    width = 0.8 / max(len(columns), 1)
    for i, column in enumerate(columns):
        places = [k + (i - (len(columns) - 1) / 2) * width for k in range(len(rows))]
        axes.bar(places, [row.get(column, 0) for row in rows], width, label=column.removesuffix(" us"))
    axes.set_xticks(range(len(rows)), ["{n}, {h}, {d}".format(**row) for row in rows])
    axes.set(xlabel="n, h, d", ylabel="µs", title="8-bit output, fused into the merge or after it")
    axes.grid(alpha=0.3, axis="y")
    axes.legend(fontsize="small")


DRAW = {"merge": draw_merge, "mla": draw_mla, "states": draw_states}
DEVICES = {"h200": "NVIDIA H200", "cpu": "a CPU"}


def draw_all(results: Path, into: Path, kinds: Sequence[str]) -> list[Path]:
    files = {key: read(path) for key, path in newest(results).items()}
    written: list[Path] = []
    for (benchmark, device), rows in files.items():
        # A run that did not measure the ceiling takes that of the merges on the same device.
        ceiling = ceiling_of(rows) or ceiling_of(files.get(("merge", device), []))
        shown, stem = DEVICES.get(device, device.upper()), into / f"{benchmark}-{device}"
        written += DRAW[benchmark](rows, shown, ceiling, stem, kinds)
    return written


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "benchmarks" / "results")
    parser.add_argument("--into", type=Path, default=ROOT / "docs" / "img")
    parser.add_argument("--png", action="store_true", help="PNG as well")
    arguments = parser.parse_args(argv)
    arguments.into.mkdir(parents=True, exist_ok=True)
    for path in draw_all(arguments.results, arguments.into, plot.BOTH if arguments.png else (".svg",)):
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
