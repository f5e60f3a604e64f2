"""The holes of a user's text: which there are, and how a call fills them.

A hole is a template parameter, or a plain name: ``T`` (an element type), ``PACK`` (elements of one access), or a
constant that was given a value, some values to choose from, or a function of the arguments.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jitkern import dtypes, variants
from jitkern.errors import ArgumentError
from jitkern.kernel.signature import Declaration, blank
from jitkern.kernel.text import Value

_VECTOR = re.compile(r"u?(?:char|short|int|long|longlong|float|double)[1-4]")
_WORDS = {"min": min, "max": max, "abs": abs, "int": int, "len": len, "range": range}


def cdiv(a: int, b: int) -> int:
    """``a / b``, rounded up.

    >>> cdiv(1000, 256)
    4
    """
    return -(-a // b)


class Args:
    """What a function of the arguments gets: arguments and holes by name, as attributes. Remembers what was asked for.

    Args:
        values: by name.
    """

    def __init__(self, values: dict[str, Any]) -> None:
        self._values = values
        self._asked: set[str] = set()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in self._values:
            raise AttributeError(f"no argument {name!r}; there are {', '.join(self._values)}")
        self._asked.add(name)
        return self._values[name]


class _Names(dict[str, Any]):
    """An expression's names: looked up in the arguments when they are used, so that it is known which were."""

    def __init__(self, args: Args) -> None:
        super().__init__()
        self._args = args

    def __missing__(self, name: str) -> Any:
        if name in self._args._values:
            return getattr(self._args, name)
        raise KeyError(name)


Rule = int | float | Sequence[Any] | str | Callable[[Args], Any] | None


def compute(kernel: str, what: str, rule: Any, args: Args) -> Any:
    """The value of a rule: a function of the arguments, a Python expression over their names, or the value itself.

    Raises:
        ArgumentError: the function or the expression fails.
    """
    if not callable(rule) and not isinstance(rule, str):
        return rule
    try:
        if callable(rule):
            return rule(args)
        return eval(rule, {"__builtins__": _WORDS, "cdiv": cdiv}, _Names(args))
    except Exception as error:
        shown = rule if isinstance(rule, str) else getattr(rule, "__name__", "function")
        names = ", ".join(args._values)
        usable = (
            f"it is called with one object, whose attributes are {names}: lambda a: a.{next(iter(args._values), 'n')}"
            if callable(rule)
            else f"it can use {names}, cdiv, {', '.join(_WORDS)}"
        )
        raise ArgumentError(
            f"{kernel}: {what}={shown!r} fails with {type(error).__name__}: {error}; {usable}"
        ) from None


@dataclass(frozen=True)
class Holes:
    """The holes of one text.

    Attributes:
        types: holes that are element types, with the parameters that point to them.
        pack: the name of the pack hole, if there is one.
        rules: the other holes: what was given for them.
        choices: the holes that autotuning chooses, with their candidates.
    """

    types: dict[str, tuple[str, ...]]
    pack: str | None
    rules: dict[str, Any]
    choices: dict[str, tuple[Value, ...]]

    @property
    def names(self) -> tuple[str, ...]:
        """All of them."""
        return (*self.types, *([self.pack] if self.pack else ()), *self.rules, *self.choices)


def find(source: str, declared: Declaration, constants: Mapping[str, Any]) -> Holes:
    """The holes of a text.

    Args:
        source: the text.
        declared: its kernel.
        constants: what was given for names in it.

    Raises:
        ArgumentError: a name that was given a value is nowhere in the text.
    """
    clean = blank(source)
    template = {name: kind for kind, name in declared.template}
    pointed: dict[str, list[str]] = {}
    for parameter in declared.parameters:
        is_hole = parameter.pointer and parameter.elements is None and _is_open(parameter.type, clean, template)
        if is_hole:
            pointed.setdefault(parameter.type, []).append(parameter.name)
    for name, kind in template.items():
        if kind == "typename":
            pointed.setdefault(name, [])
    if re.search(r"\bT\b", clean) and "T" not in template and _is_open("T", clean, {}):
        pointed.setdefault("T", [])
    types = {name: tuple(users) for name, users in pointed.items() if name not in constants}
    pack = "PACK" if re.search(r"\bPACK\b", clean) and "PACK" not in constants else None
    if pack and "PACK" not in template and re.search(r"\bPACK\s*=", clean):
        pack = None
    for name in constants:
        if not re.search(rf"\b{re.escape(name)}\b", clean):
            raise ArgumentError(f"{declared.name}: constants={{{name!r}: ...}}, but `{name}` is nowhere in the text")
    choices = {n: tuple(v) for n, v in constants.items() if isinstance(v, list | tuple)}
    rules = {n: v for n, v in constants.items() if n not in choices}
    for name in template:
        if name not in types and name not in constants and name != pack:
            rules[name] = None
    return Holes(types, pack, rules, choices)


def _is_open(name: str, clean: str, template: Mapping[str, str]) -> bool:
    """Whether a type name is left for somebody else to define."""
    if name in template:
        return True
    if "::" in name or " " in name or _VECTOR.fullmatch(name):
        return False
    without_templates = re.sub(r"template\s*<[^<>]*>", " ", clean)
    defined = rf"\b(?:using|struct|class|union|enum)\s+{name}\b|\btypedef\b[^;]*\b{name}\s*;"
    return re.search(defined, without_templates) is None


def cuda_type(value: Any, source: str) -> str:
    """The CUDA type for a dtype: CUDA's own 16-bit types where the text includes their headers, else ours."""
    found = dtypes.resolve(value)
    own = {"f16": ("cuda_fp16.h", "__half"), "bf16": ("cuda_bf16.h", "__nv_bfloat16")}.get(found.tag)
    if own and own[0] in source:
        return own[1]
    if own:
        return f"jitkern::Number<{found.cuda}>"
    plain = {"f32": "float", "f64": "double", "i32": "int", "i64": "long long", "u8": "unsigned char"}
    return plain.get(found.tag, found.cuda)


def bind_types(kernel: str, holes: Holes, tensors: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, str]:
    """The dtype tag of each type hole: given by name, else that of the tensors that it is used for.

    Raises:
        ArgumentError: two tensors disagree, or nothing says.
    """
    bound: dict[str, str] = {}
    for hole, users in holes.types.items():
        here = {name: dtypes.resolve(tensors[name].dtype).tag for name in users if tensors.get(name) is not None}
        if hole in given:
            bound[hole] = dtypes.resolve(given[hole]).tag
            here["you"] = bound[hole]
        elif here:
            bound[hole] = next(iter(here.values()))
        else:
            raise ArgumentError(
                f"{kernel}: no tensor says what {hole} is; pass it by name, for example {hole}=torch.float32"
            )
        if len(set(here.values())) > 1:
            said = ", ".join(f"{name} says {tag}" for name, tag in here.items())
            raise ArgumentError(f"{kernel}: {hole} is one dtype, but {said}; convert one with .to(...)")
    return bound


def widest(element_bytes: int, tensors: Sequence[Any]) -> int:
    """The widest pack of which every row of every tensor holds a whole number, and at whose multiples rows begin."""
    multiples: list[int] = []
    for value in tensors:
        size = value.element_size()
        if value.dim() and value.shape[-1] > 1 and value.stride(-1) != 1:
            return 1
        rows = zip(value.shape[:-1], value.stride()[:-1], strict=True)
        multiples += [value.data_ptr(), *(stride * size for n, stride in rows if n > 1)]
        multiples += [value.shape[-1] * size] if value.dim() else []
    return variants.widest_pack(element_bytes, *multiples)


def combinations(choices: Mapping[str, tuple[Value, ...]]) -> Iterator[dict[str, Value]]:
    """Every way to choose, the first candidates first."""
    import itertools

    for values in itertools.product(*choices.values()):
        yield dict(zip(choices, values, strict=True))
