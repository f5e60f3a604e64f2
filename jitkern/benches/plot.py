"""Plots of benchmark results, as PNG and SVG. Needs matplotlib; without it there are no plots."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}
BOTH = (".png", ".svg")
_MOST_JOINED = 40  # points of a grid are a cloud: shapes of one size differ


@dataclass(frozen=True)
class Panel:
    """One pair of axes: points (MB, GB/s) of each line, under a ceiling in GB/s."""

    title: str
    lines: dict[str, list[tuple[float, float]]]
    ceiling: float | None = None


def megabytes(row: dict[str, Any]) -> float:
    """What a pairwise merge of a row's shape moves."""
    rows = row["n"] * row["h"]
    return float(3 * rows * row["d"] * _SIZES[row["dtype"]] + 12 * rows) / 1e6


def merge_panels(rows: Sequence[dict[str, Any]], ceiling: float | None) -> list[Panel]:
    """Rows of the merge benchmark, with a column ``<peer> us`` for each peer: a panel for each dtype."""
    peers = [name.removesuffix(" us") for name in rows[0] if name.endswith(" us")]
    panels = []
    for dtype in dict.fromkeys(row["dtype"] for row in rows):
        some = [row for row in rows if row["dtype"] == dtype]
        panels.append(Panel(dtype, {peer: sorted(_points(some, f"{peer} us")) for peer in peers}, ceiling))
    return panels


def _points(rows: Sequence[dict[str, Any]], column: str) -> list[tuple[float, float]]:
    return [(megabytes(row), megabytes(row) * 1e3 / row[column]) for row in rows if row.get(column)]


def mla_panels(rows: Sequence[dict[str, Any]], ceiling: float | None) -> list[Panel]:
    """Rows of the MLA benchmark: few heads and many, the decode alone and with its plan."""
    panels = []
    for few in (True, False):
        some = [row for row in rows if (row["heads"] * row["q_len"] <= 64) is few]
        for figure, words in (("decode", "decode"), ("decode_plan", "plan and decode")):
            lines = {
                name: sorted((row["MB"], row["MB"] * 1e3 / row[figure]) for row in some if _has(row, name, figure))
                for name in dict.fromkeys(row["library"] for row in rows)
            }
            heads = "up to 64 rows (heads × query tokens)" if few else "more rows"
            if any(lines.values()):
                panels.append(Panel(f"{words}, {heads}", lines, ceiling))
    return panels


def _has(row: dict[str, Any], library: str, figure: str) -> bool:
    return row["library"] == library and bool(row.get(figure))


def save(figure: Any, stem: Path, kinds: Sequence[str] = BOTH) -> list[Path]:
    """Write PNG and SVG; the same figure gives the same bytes. Returns the files."""
    import matplotlib

    written = [stem.with_suffix(kind) for kind in kinds]
    with matplotlib.rc_context({"svg.hashsalt": "jitkern"}):  # else its ids are random, and there is a date
        for path in written:
            figure.savefig(path, dpi=150, metadata={"Date": None} if path.suffix == ".svg" else None)
    return written


def roofline(panels: Sequence[Panel], title: str, stem: Path, kinds: Sequence[str] = BOTH) -> list[Path]:
    """Bandwidth over bytes moved, one line a peer, under the measured ceiling. Returns the files written.

    Args:
        panels: two in a row.
        title: of the whole.
        stem: the files are named after it.
        kinds: their suffixes.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    columns = 1 if len(panels) == 1 else 2
    lines = -(-len(panels) // columns)
    figure = Figure(figsize=(5.5 * columns + 2.5 * (columns == 1), 4.5 * lines), layout="constrained")
    places = figure.subplots(lines, columns, squeeze=False).flatten()
    shown: dict[str, Any] = {}
    for panel, axes in zip(panels, places, strict=False):
        draw(panel, axes)
        shown |= {label: line for line, label in zip(*axes.get_legend_handles_labels(), strict=True)}
    for unused in places[len(panels) :]:
        unused.remove()
    figure.legend(shown.values(), shown.keys(), loc="outside lower center", ncols=4, fontsize="small")
    figure.suptitle(title)
    return save(figure, stem, kinds)


def draw(panel: Panel, axes: Any) -> None:
    """One panel. A peer keeps its colour in every panel, whichever others are there."""
    for number, (name, points) in enumerate(panel.lines.items()):
        if points:
            style: dict[str, Any] = {"linewidth": 2.2, "zorder": 3} if name == "jitkern" else {"linewidth": 1.2}
            if len(points) > _MOST_JOINED:
                style |= {"linestyle": "", "alpha": 0.6}
            axes.plot(*zip(*points, strict=True), color=f"C{number}", marker="o", markersize=3, label=name, **style)
    if panel.ceiling:
        label = f"torch.add, {panel.ceiling:.0f} GB/s"
        axes.axhline(panel.ceiling, color="black", linestyle="--", linewidth=1, label=label)
    axes.set(xscale="log", xlabel="bytes moved, MB", ylabel="GB/s", title=panel.title)
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
