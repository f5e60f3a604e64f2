"""``%load_ext jitkern``: a cell of CUDA text becomes a kernel; results, errors and the cache show as HTML.

``%%kernel name [options]`` compiles the cell at once: for the GPU if there is one, else for the CPU if the text can run
there, else only for a GPU's target. ``%jitkern bench ...``, ``%jitkern cache`` and ``%jitkern doctor`` print tables.
"""

from __future__ import annotations

import argparse
import ast
import shlex
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from jitkern import tables, toolchain
from jitkern.compilers import diagnostics
from jitkern.errors import ArgumentError, CompileError, JitkernError, ToolchainError, UnsupportedError
from jitkern.kernel import Kernel, html
from jitkern.kernel.filling import place
from jitkern.kernel.instance import Instance
from jitkern.sources import Text

_GREEN, _RED = "#2a9d8f", "#e76f51"
_AROUND = 2


class _Parser(argparse.ArgumentParser):
    """A parser whose complaints are errors of jitkern: in a notebook, exiting is no answer."""

    def error(self, message: str) -> NoReturn:
        raise ArgumentError(f"%%{self.prog}: {message}\n{self.format_usage()}")

    def exit(self, status: int = 0, message: str | None = None) -> NoReturn:
        raise _HelpShown


class _HelpShown(Exception):
    """``--help`` was asked for and printed."""


def kernel_parser() -> argparse.ArgumentParser:
    """The options of ``%%kernel``."""
    parser = _Parser(prog="kernel", description="Make a kernel of this cell's CUDA text and give it a name here.")
    parser.add_argument("name", help="the variable; the __global__ function may be called something else")
    parser.add_argument("--grid", help='blocks, an expression over the arguments: "cdiv(x.numel(), 256)"')
    parser.add_argument("--block", help="threads of a block, likewise")
    parser.add_argument("--cpu-block", help="threads of a block on the CPU; 1 for a kernel that works on rows")
    parser.add_argument("--shared", default="0", help="bytes of dynamic shared memory, likewise")
    parser.add_argument("--function", help="which __global__ function, if there are several")
    parser.add_argument("--dtype", help="what T is for the first compile: f32, f16, bf16, ...")
    parser.add_argument("--pack", type=int, help="what PACK is for the first compile")
    parser.add_argument(
        "--const",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help='a hole: D=128, "D=x.shape[-1]", or candidates to choose from: WARPS=[2,4,8]; may be repeated',
    )
    parser.add_argument("--target", help="compile for this only: cpu, sm_90, ...")
    return parser


@dataclass(frozen=True)
class Message:
    """Something to show: text in a terminal, HTML in a notebook.

    Attributes:
        text, markup: the two forms.
    """

    text: str
    markup: str

    def __repr__(self) -> str:
        return self.text

    def _repr_html_(self) -> str:
        return self.markup


def load_ipython_extension(shell: Any) -> None:
    """What ``%load_ext jitkern`` runs."""
    shell.register_magic_function(lambda line, cell: _briefly(cell_magic, shell, line, cell), "cell", "kernel")
    shell.register_magic_function(lambda line: _briefly(line_magic, shell, line), "line", "jitkern")


def _briefly(magic: Callable[..., Any], *arguments: Any) -> Any:
    """Run a magic; an error of jitkern is shown by its message, without the way that led to it."""
    try:
        return magic(*arguments)
    except JitkernError as error:
        lines = [f"{type(error).__name__}: {error}"]
        error._render_traceback_ = lambda: lines  # type: ignore[attr-defined]  # what IPython looks for
        raise


def cell_magic(shell: Any, line: str, cell: str) -> Message | None:
    """``%%kernel``: make the kernel, compile it, put it into the notebook's namespace."""
    try:
        options = kernel_parser().parse_args(shlex.split(line))
    except _HelpShown:
        return None
    kernel = Kernel(
        f"\n{cell}",  # the magic's own line counts, as it does for the editor's line numbers
        options.function,
        grid=options.grid,
        block=options.block,
        cpu_block=options.cpu_block,
        shared=options.shared,
        constants=dict(map(_constant, options.const)),
    )
    kernel.label = f"{options.name}.cu"
    try:
        said = compile_now(kernel, options)
    except CompileError as error:
        from IPython.display import display

        text = Text(kernel.name, error.source, (), ((kernel.label, kernel.source),))
        found = diagnostics.locate(text, error.log)
        display(Message(str(error), error_html(options.name, text, error.log)))
        brief = f"{found.file}:{found.line}: {found.message}" if found else f"{options.name} does not compile"
        raise CompileError(brief, log=error.log, source=error.source) from None
    shell.user_ns[options.name] = kernel
    return Message(said, html.box(f"✓ {html.text(said)}", "", _GREEN))


def _constant(text: str) -> tuple[str, Any]:
    name, equals, value = text.partition("=")
    if not equals:
        raise ArgumentError(f"%%kernel: --const {text}: expected NAME=VALUE")
    try:
        return name, ast.literal_eval(value)
    except (ValueError, SyntaxError):
        return name, value  # an expression, or a dtype


def compile_now(kernel: Kernel, options: argparse.Namespace) -> str:
    """Compile a cell's kernel for the best target there is; one line about it."""
    given = {} if options.dtype is None else dict.fromkeys(kernel.holes.types, options.dtype)
    if options.pack is not None and kernel.holes.pack:
        given[kernel.holes.pack] = options.pack
    start = time.perf_counter()
    try:
        instance, how, note = _compile_best(kernel, options.target, given)
    except ArgumentError as error:
        if "has no value" not in str(error):
            raise
        return f"{kernel.signature}: compiles at the first call, since a hole depends on the arguments"
    line = f"{instance.variant.name}: {how} in {(time.perf_counter() - start) * 1000:.0f} ms"
    line += "".join(f", {part}" for part in _taken(instance)) + (f", {note}" if note else "")
    if instance.variant.target == "cpu" and _has_nvrtc():
        line += f"; for sm_90: {', '.join(_taken(kernel.instance(target='sm_90', **given)))}"
    return line


def _taken(instance: Instance) -> list[str]:
    """Registers and memory in words."""
    found = instance.resources
    if found is None:
        return []
    spills = f"{found.local_bytes} bytes of local memory" if found.local_bytes else "no spills"
    shared = [f"{found.shared_bytes} bytes of shared memory"] if found.shared_bytes else []
    return [f"{found.registers} registers", spills, *shared]


def _compile_best(kernel: Kernel, wish: str | None, given: dict[str, Any]) -> tuple[Instance, str, str]:
    """(instance, how, a remark): for the wish, else this GPU, else the CPU, else a GPU's target without a GPU."""
    device, here = place(None)
    if wish not in (None, here):
        instance = kernel.instance(target=wish, **given)
        return instance, instance.binary()[1], "compiled only"
    instance = kernel.instance(target=here, **given)
    try:
        return instance, instance.load(device).how, ""
    except (UnsupportedError, ToolchainError) as error:
        if here != "cpu" or wish is not None or not _has_nvrtc():
            raise
        why = "this text needs a GPU" if isinstance(error, UnsupportedError) else "no C++ compiler here"
    instance = kernel.instance(target="sm_90", **given)
    return instance, instance.binary()[1], f"compiled only: {why}"


def _has_nvrtc() -> bool:
    try:
        toolchain.nvrtc()
    except ToolchainError:
        return False
    return True


def error_html(name: str, text: Text, log: str) -> str:
    """A compile error: the first diagnostic, the lines around it with a caret, the whole log on a click."""
    found = diagnostics.locate(text, log)
    log = html.details("the compiler's whole log", html.code(log.strip().splitlines()))
    if found is None:
        return html.box(f"✗ {html.text(name)} does not compile", log, _RED)
    lines = diagnostics.source_lines(text, found.file)
    shown = []
    for number in range(found.line - _AROUND, found.line + _AROUND + 1):
        if number not in lines:
            continue
        row = html.text(f"{number:4} | {lines[number]}")
        shown.append(f'<b style="background:rgba(231,111,81,.18)">{row}</b>' if number == found.line else row)
        if number == found.line and found.column:
            shown.append(
                f'<span style="color:{_RED}">     | {" " * (found.column - 1)}^ {html.text(found.message)}</span>'
            )
    title = f"✗ {html.text(found.file)}:{found.line}: {html.text(found.message)}"
    return html.box(title, html.pre("\n".join(shown)) + log, _RED)


def line_magic(shell: Any, line: str) -> tables.Table:
    """``%jitkern bench CALL; CALL``, ``%jitkern cache``, ``%jitkern doctor``."""
    word, _, rest = line.strip().partition(" ")
    if word == "bench":
        return tables.calls(rest, shell.user_ns)
    if word == "cache":
        return tables.cache()
    if word == "doctor":
        return tables.doctor()
    raise ArgumentError(f"%jitkern {line}: expected bench, cache or doctor, for example %jitkern bench k(out, x, n)")
