"""Turn a compiler's log into an error that shows the first mistake where it is."""

from __future__ import annotations

import re
import tempfile
from dataclasses import dataclass

from jitkern.errors import CompileError
from jitkern.sources import Text

_NVIDIA = re.compile(
    r"^(?P<file>[^\s()]+)\((?P<line>\d+)\): (?:catastrophic |fatal )?error:? ?(?P<text>.*)$", re.MULTILINE
)
_GNU = re.compile(
    r"^(?P<file>[^\s:]+):(?P<line>\d+):(?:(?P<column>\d+):)? (?:fatal )?error: (?P<text>.*)$", re.MULTILINE
)
_LINE_MARK = re.compile(r'^#line (\d+) "([^"]+)"$')
_AROUND = 2


def source_lines(text: Text, file: str) -> dict[int, str]:
    """The lines of one file of a flattened text, by their number in that file."""
    for label, original in text.originals:
        if label == file:
            return dict(enumerate(original.splitlines(), start=1))
    lines: dict[int, str] = {}
    current, number = "", 0
    for line in text.flat.splitlines():
        mark = _LINE_MARK.match(line)
        if mark:
            number, current = int(mark[1]), mark[2]
            continue
        if current == file:
            lines[number] = line
        number += 1
    return lines


def excerpt(text: Text, file: str, line: int, column: int | None = None) -> str:
    """A few lines around an error, with a caret where the column is known."""
    lines = source_lines(text, file)
    shown = []
    for number in range(line - _AROUND, line + _AROUND + 1):
        if number not in lines:
            continue
        shown.append(f"{'>' if number == line else ' '} {number:4} | {lines[number]}")
        if number == line and column:
            shown.append(f"       | {' ' * (column - 1)}^")
    return "\n".join(shown)


def caret_column(log: str, match: re.Match[str]) -> int | None:
    """NVIDIA's compilers show the column only as a caret below a copy of the line."""
    following = log[match.end() :].splitlines()[1:3]
    if len(following) == 2 and following[1].strip() == "^":
        return following[1].index("^") + 1
    return None


@dataclass(frozen=True)
class Diagnostic:
    """The first mistake that a compiler found.

    Attributes:
        file: what the text calls the file.
        line: the line in that file.
        column: counted from 1, where the compiler shows one.
        message: what it says.
    """

    file: str
    line: int
    column: int | None
    message: str


def locate(text: Text, log: str) -> Diagnostic | None:
    """The first mistake in a compiler's log; None if it cannot be made out."""
    match = _NVIDIA.search(log)
    if match is None:
        match = _GNU.search(log)
        if match is None:
            return None
        column = int(match["column"]) if match["column"] else None
        return Diagnostic(match["file"].strip('"'), int(match["line"]), column, match["text"].strip())
    file, line, column = match["file"].strip('"'), int(match["line"]), caret_column(log, match)
    copy = log[match.end() :].splitlines()[1:2]
    if column and copy:  # the copy of the line is indented differently from the line
        own = source_lines(text, file).get(line, "")
        column += (len(own) - len(own.lstrip())) - (len(copy[0]) - len(copy[0].lstrip()))
    return Diagnostic(file, line, column, match["text"].strip())


def compile_error(what: str, text: Text, log: str) -> CompileError:
    """The error for a rejected text: first diagnostic, place, excerpt, and where the whole log is."""
    found = locate(text, log)
    parts = [f"{what} does not compile."]
    if found:
        parts.append(f"{found.file}:{found.line}: {found.message}")
        shown_lines = excerpt(text, found.file, found.line, found.column)
        if shown_lines:
            parts.append(shown_lines)
    else:
        tail = "\n".join(log.strip().splitlines()[-12:])
        parts.append(tail or "The compiler said nothing.")
    path = _keep(log, text)
    if path:
        parts.append(f"The whole log and the text are in {path}.")
    return CompileError("\n".join(parts), log=log, source=text.flat)


def _keep(log: str, text: Text) -> str | None:
    try:
        with tempfile.NamedTemporaryFile("w", prefix="jitkern-log-", suffix=".txt", delete=False) as file:
            file.write(f"{log}\n\n----- text -----\n{text.flat}\n")
            return file.name
    except OSError:
        return None
