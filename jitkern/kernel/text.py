"""From a user's text to the text that is compiled: holes filled in, the entry exported, on the CPU wrapped.

The compiled text is complete, as a shipped one is: it stands in the cache entry, and lines keep their numbers, so that
an error points into the user's own text.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from jitkern import sources
from jitkern.errors import CompileError, UnsupportedError
from jitkern.kernel.signature import Declaration, Parameter, blank
from jitkern.sources import Text

Value = int | float | bool | str  # a str is a CUDA type
_INDICES = re.compile(r"\b(?:threadIdx|blockIdx|blockDim|gridDim)\b")
_REFUSED = re.compile(r"jitkern_not_on_the_cpu__(\w+)")
_MISSING_HEADER = re.compile(r"fatal error: (\S+): No such file")
_INDEX_PARAMETERS = ", ".join(
    f"[[maybe_unused]] jitkern::Index3 {name}" for name in ("blockIdx", "threadIdx", "blockDim", "gridDim")
)
_EXPORT = (
    ' extern "C" __attribute__((visibility("default"))) int jitkern_function(void** f)'
    " { return static_cast<int>(cudaGetFuncBySymbol(reinterpret_cast<cudaFunction_t*>(f),"
    " (const void*)JITKERN_ENTRY)); }"
)
_HEADERS = {"__half": "cuda_fp16.h", "__nv_bfloat16": "cuda_bf16.h"}


def define(name: str, value: Value, kind: str = "") -> str:
    """C++ that gives a hole its value."""
    if isinstance(value, str):
        return f"using {name} = {value};"
    if isinstance(value, bool):
        return f"[[maybe_unused]] constexpr {kind or 'bool'} {name} = {'true' if value else 'false'};"
    if isinstance(value, int):
        return (
            f"[[maybe_unused]] constexpr {kind or ('int' if abs(value) < 1 << 31 else 'long long')} {name} = {value};"
        )
    return f"[[maybe_unused]] constexpr {kind or 'float'} {name} = {value!r}{'' if kind == 'double' else 'f'};"


def literal(value: Value) -> str:
    """A value as a macro's replacement."""
    if isinstance(value, bool):
        return "true" if value else "false"
    return f"{value!r}f" if isinstance(value, float) else str(value)


def instantiate(
    source: str,
    label: str,
    declared: Declaration,
    holes: Mapping[str, Value],
    backend: str,
    folder: Path | None = None,
) -> Text:
    """The flattened text with these values in its holes.

    Args:
        source: the user's text.
        label: what errors call it.
        declared: its kernel.
        holes: a value for each hole.
        backend: which compiler will read it.
        folder: where the text's quoted includes are looked up first.
    """
    edits = _holes(source, declared, holes)
    edits += _for_cpu(source, declared) if backend == "cpu" else _for_gpu(source, declared, backend == "nvcc")
    text = source
    for begin, end, new in sorted(edits, reverse=True):
        text = text[:begin] + new + text[end:]
    flat = sources.flatten(declared.name, text, label, folder, before=_prelude(source, declared, holes, backend))
    return replace(flat, originals=((label, source),))


Edit = tuple[int, int, str]


def _prelude(source: str, declared: Declaration, holes: Mapping[str, Value], backend: str) -> str:
    """What stands in front of the user's text: element types, the host's words, the holes that are plain names."""
    lines = ['#include "include/number.cuh"']
    if backend == "cpu":
        lines = [
            f"#define JITKERN_HOST_INDICES {int(_asks_elsewhere(source, declared))}",
            '#include "include/host_cuda.h"',
            *lines,
        ]
    types = set(holes.values()) & set(_HEADERS)
    lines += [f"#include <{_HEADERS[str(name)]}>" for name in sorted(map(str, types))]
    inside = {name for _, name in declared.template}
    lines += [define(n, v) for n, v in holes.items() if n not in inside and not _default(source, n)]
    return "\n".join(lines)


def _asks_elsewhere(source: str, declared: Declaration) -> bool:
    return bool(_INDICES.search(blank(source[: declared.start]) + blank(source[declared.end :])))


def _default(source: str, name: str) -> re.Match[str] | None:
    """Where the text gives a hole a default: ``#ifndef D``, then ``#define D 128``."""
    return re.search(
        rf"^[ \t]*#[ \t]*ifndef[ \t]+{name}\b[^\n]*\n[ \t]*(#[ \t]*define[ \t]+{name}\b[^\n]*)", source, re.MULTILINE
    )


def _holes(source: str, declared: Declaration, holes: Mapping[str, Value]) -> list[Edit]:
    """Template parameters become definitions in place of the template header; a default gives way to the value."""
    kinds = {name: "" if kind == "typename" else kind for kind, name in declared.template}
    edits = []
    if kinds:
        lines = "\n" * source.count("\n", declared.start, declared.head)
        inside = " ".join(define(name, holes[name], kind) for name, kind in kinds.items())
        edits.append((declared.start, declared.head, f"{inside} {lines}"))
    for name, value in holes.items():
        default = None if name in kinds else _default(source, name)
        if default:
            edits.append((*default.span(1), f"#define {name} {literal(value)}"))
    return edits


def _for_gpu(source: str, declared: Declaration, export: bool) -> list[Edit]:
    words = source[declared.head : declared.name_at]
    words = re.sub(r'extern\s*"C"|\bstatic\b|\binline\b', "", words)
    return [
        (declared.head, declared.name_at, f'extern "C" {words.lstrip(" ")}'),
        (declared.name_at, declared.name_at + len(declared.name), "JITKERN_ENTRY"),
        (declared.end, declared.end, _EXPORT if export else ""),
    ]


def _for_cpu(source: str, declared: Declaration) -> list[Edit]:
    lines = "\n" * source.count("\n", declared.head, declared.name_at)
    opening = source.index("(", declared.name_at) + 1
    return [
        (declared.head, declared.name_at, f"static inline void {lines}"),
        (declared.name_at, declared.name_at + len(declared.name), "jitkern_body"),
        (
            opening,
            opening,
            _INDEX_PARAMETERS + (", " if declared.parameters else ""),
        ),  # first: others may have defaults
        (declared.end, declared.end, f" {_host_entry(source, declared)}"),
    ]


def offsets(parameters: tuple[Parameter, ...]) -> list[int]:
    """Where each parameter lies in the parameter block, as ``struct`` and the compilers align it."""
    layout, places = "", []
    for parameter in parameters:
        layout += parameter.format
        places.append(struct.calcsize(layout) - struct.calcsize(parameter.format))
    return places


def block_bytes(parameters: tuple[Parameter, ...]) -> int:
    """The size of the parameter block."""
    return struct.calcsize("".join(parameter.format for parameter in parameters))


def _host_entry(source: str, declared: Declaration) -> str:
    """The exported function: takes the parameter block apart and calls the body for every thread."""
    reads = "".join(
        f", *reinterpret_cast<std::remove_const_t<{parameter.whole}>*>(const_cast<char*>(p.bytes) + {at})"
        for parameter, at in zip(declared.parameters, offsets(declared.parameters), strict=True)
    )
    names = "threadIdx = t; blockIdx = b; blockDim = d; gridDim = g; " if _asks_elsewhere(source, declared) else ""
    return (
        f"struct jitkern_block {{ alignas(8) char bytes[{max(block_bytes(declared.parameters), 1)}]; }}; "
        "static inline __attribute__((always_inline)) void jitkern_thread(const jitkern_block& p, jitkern::Index3 b,"
        f" jitkern::Index3 t, jitkern::Index3 d, jitkern::Index3 g) {{ (void)p; {names}"
        f"jitkern_body(b, t, d, g{reads}); }} "
        'extern "C" __attribute__((visibility("default"))) int JITKERN_ENTRY(const void* params,'
        " const jitkern::HostLaunch* launch) { return jitkern::run_grid<jitkern_block, jitkern_thread>("
        "*static_cast<const jitkern_block*>(params), *launch); }"
    )


def explain_cpu(name: str, label: str, error: CompileError) -> Exception:
    """What to raise for a text that the host compiler refused: say it if the CPU backend cannot run such a text."""
    what = sorted({word.replace("shared_memory", "__shared__") for word in _REFUSED.findall(error.log)})
    header = _MISSING_HEADER.search(error.log)
    if not what and not (header and "cuda" in header[1]):
        return error
    used = ", ".join(what) if what else f"#include <{header[1]}>" if header else ""
    where = re.search(rf"{re.escape(label)}:(\d+):\d+: error", error.log)
    return UnsupportedError(
        f"{name}: {used}{f' (line {where[1]})' if where else ''} does not exist on the CPU, where every thread"
        " of a block runs to its end before the next begins: no shared memory, no barrier, no shuffle, no CUDA header."
        " Pass CUDA tensors, or keep such lines under `#if JITKERN_ON_GPU` and give the CPU its own in the `#else`."
    )
