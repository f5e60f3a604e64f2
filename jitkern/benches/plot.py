"""Plots of benchmark results, as PNG and SVG beside the CSV. Needs matplotlib; without it there are no plots."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}


def megabytes(row: dict[str, Any]) -> float:
    """What a pairwise merge of a row's shape moves."""
    rows = row["n"] * row["h"]
    return float(3 * rows * row["d"] * _SIZES[row["dtype"]] + 12 * rows) / 1e6


def merge_roofline(rows: Sequence[dict[str, Any]], ceiling: float, device: str, csv: Path) -> list[Path]:
    """Bandwidth over size, one line a peer, under the measured ceiling. Returns the files written.

    Args:
        rows: rows of the merge benchmark, with a column ``<peer> us`` for each peer.
        ceiling: GB/s of two reads and one write.
        device: for the title.
        csv: the plots are named after it.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return []
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    peers = [name.removesuffix(" us") for name in rows[0] if name.endswith(" us")]
    for peer in peers:
        points = sorted(
            (megabytes(row), megabytes(row) * 1e3 / row[f"{peer} us"]) for row in rows if row.get(f"{peer} us")
        )
        style = {"linewidth": 2.2, "zorder": 3} if peer == "jitkern" else {"linewidth": 1.2}
        axes.plot(*zip(*points, strict=True), marker="o", markersize=3, label=peer, **style)
    axes.axhline(ceiling, color="black", linestyle="--", linewidth=1, label=f"torch.add, {ceiling:.0f} GB/s")
    axes.set(xscale="log", xlabel="bytes moved, MB", ylabel="GB/s", title=f"merge_attn_states on {device}")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")
    written = [csv.with_suffix(suffix) for suffix in (".png", ".svg")]
    for path in written:
        figure.savefig(path, dpi=150)
    return written
