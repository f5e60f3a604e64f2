"""HTML for notebooks: kernels, tables, bars, boxes. Strings with inline styles, readable in light and dark themes."""

from __future__ import annotations

import html as escaping
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jitkern.kernel.api import Kernel

_MONO = "font-family:ui-monospace,SFMono-Regular,Menlo,monospace;font-size:12px;line-height:1.45"
_CELL = "padding:3px 10px;text-align:{side};border-bottom:1px solid rgba(128,128,128,.25)"
_BOX = "border:1px solid rgba(128,128,128,.35);border-radius:6px;padding:8px 12px;margin:4px 0;overflow-x:auto"


def text(value: Any) -> str:
    """Escaped."""
    return escaping.escape(str(value))


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Rows as a table; columns in the order of the first row, numbers to the right."""
    if not rows:
        return "<em>(nothing)</em>"
    names = list(rows[0])
    numeric = {name: all(isinstance(row.get(name), int | float) for row in rows) for name in names}

    def cells(tag: str, values: Sequence[Any]) -> str:
        sides = ("right" if numeric[name] else "left" for name in names)
        return "".join(
            f'<{tag} style="{_CELL.format(side=side)}">{text("-" if value is None else value)}</{tag}>'
            for side, value in zip(sides, values, strict=True)
        )

    body = "".join(f"<tr>{cells('td', [row.get(name) for name in names])}</tr>" for row in rows)
    return f'<table style="border-collapse:collapse;{_MONO}"><tr>{cells("th", names)}</tr>{body}</table>'


def bars(items: Sequence[tuple[str, float]], ceiling: float | None, unit: str) -> str:
    """Horizontal bars as SVG, with a line at the ceiling."""
    width, left, step = 420, 190, 24
    most = max([value for _, value in items] + ([ceiling] if ceiling else []), default=0) or 1.0
    height = step * len(items) + 22
    parts = []
    for number, (name, value) in enumerate(items):
        y = 4 + number * step
        long = width * value / most
        at, look = long + 5, 'fill="currentColor"'
        if long > width / 2:  # beside a long bar's end the ceiling's line would cross the number
            at, look = long - 6, 'text-anchor="end" fill="#fff"'
        parts.append(
            f'<text x="{left - 8}" y="{y + 13}" text-anchor="end" fill="currentColor">{text(name)}</text>'
            f'<rect x="{left}" y="{y}" width="{long:.1f}" height="{step - 8}" rx="2" fill="#2a9d8f"/>'
            f'<text x="{left + at:.1f}" y="{y + 13}" {look}>{value:.4g} {text(unit)}</text>'
        )
    if ceiling:
        x = left + width * ceiling / most
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="0" y2="{height - 18}" stroke="#e76f51" stroke-dasharray="4 3"/>'
            f'<text x="{x:.1f}" y="{height - 4}" text-anchor="middle" fill="#e76f51">ceiling {ceiling:.4g}</text>'
        )
    return (
        f'<svg width="{left + width + 110}" height="{height}" role="img" style="max-width:100%;'
        f'font:12px ui-monospace,Menlo,monospace">{"".join(parts)}</svg>'
    )


def pre(markup: str) -> str:
    """Preformatted HTML."""
    return f'<pre style="{_MONO};margin:6px 0;background:transparent;white-space:pre">{markup}</pre>'


def code(lines: Sequence[str]) -> str:
    """Preformatted lines of text."""
    return pre(text("\n".join(lines)))


def box(title: str, body: str, colour: str = "rgba(128,128,128,.6)") -> str:
    """A framed block with a title."""
    head = f'<div style="font-weight:600;{_MONO}">{title}</div>'
    return f'<div style="{_BOX};border-left:4px solid {colour}">{head}{body}</div>'


def details(summary: str, body: str) -> str:
    """A block that opens on a click."""
    return f'<details style="{_MONO}"><summary style="cursor:pointer">{text(summary)}</summary>{body}</details>'


def kernel(shown: Kernel) -> str:
    """A kernel: its signature, what it takes, its text. Compiles nothing that was not compiled before."""
    facts = ""
    if shown.last is not None:
        found = shown.attributes
        facts = table([{"": name.replace("_", " "), " ": value} for name, value in found.items()])
    holes = ", ".join(shown.holes.names)
    line = f'<div style="{_MONO}">holes: {text(holes)}</div>' if holes else ""
    source = details(f"{shown.label}, {len(shown.source.splitlines())} lines", code(shown.source.splitlines()))
    return box(text(shown.signature), line + facts + source, "#2a9d8f")
