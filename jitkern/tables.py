"""Tables that print as text and show as HTML: timed calls, the cache, the doctor's findings."""

from __future__ import annotations

import ast
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jitkern import bench, loader
from jitkern.errors import ArgumentError, ToolchainError
from jitkern.kernel import Bench, Kernel, html


@dataclass(frozen=True)
class Table:
    """Rows that print as text and show as HTML, with bars where there is something to compare.

    Attributes:
        rows: each a mapping of column to value.
        bars: (name, value) of each bar.
        ceiling: the line to compare them with.
        title: what stands above.
    """

    rows: Sequence[dict[str, Any]]
    bars: Sequence[tuple[str, float]] = ()
    ceiling: float | None = None
    title: str = ""

    def __repr__(self) -> str:
        return "\n".join([*([self.title] if self.title else []), bench.table(self.rows)])

    def _repr_html_(self) -> str:
        body = html.table(self.rows) + (html.bars(self.bars, self.ceiling, "GB/s") if self.bars else "")
        return html.box(html.text(self.title), body) if self.title else body


def calls(line: str, names: dict[str, Any]) -> Table:
    """Time calls of kernels, written as they are called and separated by ``;``."""
    results: list[tuple[str, Bench]] = []
    for text in filter(None, (part.strip() for part in line.split(";"))):
        call = ast.parse(text, mode="eval").body
        if not isinstance(call, ast.Call):
            raise ArgumentError(f"%jitkern bench {text}: expected a call of a kernel, for example k(out, x, n)")
        name = ast.unparse(call.func)
        kernel = eval(name, names)
        if not isinstance(kernel, Kernel):
            raise ArgumentError(f"%jitkern bench: {name} is a {type(kernel).__name__}; expected a jitkern.Kernel")
        call.func = ast.Attribute(call.func, "bench", ast.Load())
        results.append((name, eval(ast.unparse(call), names)))
    if not results:
        raise ArgumentError("%jitkern bench: expected calls of kernels, for example %jitkern bench k(out, x, n)")
    rows = [{"call": name, **result.row} for name, result in results]
    return Table(rows, [(name, result.gb_s) for name, result in results], results[0][1].ceiling)


def cache() -> Table:
    """The entries of the disk cache, the latest first."""
    store = loader.store()
    if store is None:
        raise ToolchainError("there is no cache folder that can be used; %jitkern doctor says why")
    entries = sorted(store.entries(), key=lambda item: item[1].st_mtime, reverse=True)
    rows = [
        {"target": path.parent.name, "entry": path.name, "KB": round(size / 1000, 1), "used": _age(info.st_mtime)}
        for path, info, size in entries
    ]
    total = sum(size for _, _, size in entries)
    return Table(rows, title=f"{len(rows)} entries, {total / 1e6:.2f} MB in {store.root}")


def _age(moment: float) -> str:
    seconds = max(time.time() - moment, 0)
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"{seconds / size:.0f} {unit} ago"
    return f"{seconds:.0f} s ago"


def doctor() -> Table:
    """What ``jitkern doctor`` says."""
    from jitkern import doctor as looks

    report = looks.report()
    rows = [
        {
            "": item["status"],
            "part": item["part"],
            "found": item["text"],
            "to do": item["fix"] if item["status"] != "ok" else "",
        }
        for item in report["findings"]
    ]
    return Table(rows, title=report["verdict"])
