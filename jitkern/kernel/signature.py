"""Read a kernel's declaration: its name, its parameters, and the holes in its text.

Only what has to be known to launch it is parsed: the one ``__global__`` definition with that name. Everything else of
the text is the compiler's business.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from jitkern import dtypes
from jitkern.errors import ArgumentError

_SCALARS = {  # CUDA type -> struct format
    **dict.fromkeys(("bool",), "?"),
    **dict.fromkeys(("char", "signed char", "int8_t"), "b"),
    **dict.fromkeys(("unsigned char", "uint8_t", "u8", "jitkern::u8"), "B"),
    **dict.fromkeys(("short", "int16_t"), "h"),
    **dict.fromkeys(("unsigned short", "uint16_t", "u16", "jitkern::u16"), "H"),
    **dict.fromkeys(("int", "int32_t", "i32", "jitkern::i32"), "i"),
    **dict.fromkeys(("unsigned", "unsigned int", "uint32_t", "u32", "jitkern::u32"), "I"),
    **dict.fromkeys(("long", "long long", "long long int", "int64_t", "i64", "jitkern::i64", "ptrdiff_t"), "q"),
    **dict.fromkeys(("unsigned long", "unsigned long long", "uint64_t", "u64", "jitkern::u64", "size_t"), "Q"),
    **dict.fromkeys(("float", "f32", "jitkern::f32"), "f"),
    **dict.fromkeys(("double", "f64", "jitkern::f64"), "d"),
}
_ELEMENTS = {  # CUDA type -> tags of tensors that it may point to
    **dict.fromkeys(("float", "f32", "jitkern::f32"), ("f32",)),
    **dict.fromkeys(("double", "f64", "jitkern::f64"), ("f64",)),
    **dict.fromkeys(("half", "__half", "f16", "jitkern::f16"), ("f16",)),
    **dict.fromkeys(("__nv_bfloat16", "bf16", "jitkern::bf16"), ("bf16",)),
    **dict.fromkeys(("int", "int32_t", "i32", "jitkern::i32"), ("i32",)),
    **dict.fromkeys(("long", "long long", "int64_t", "i64", "jitkern::i64"), ("i64",)),
    **dict.fromkeys(("unsigned char", "uint8_t", "u8", "jitkern::u8"), ("u8", "bool")),
    **dict.fromkeys(("char", "signed char", "int8_t"), ("u8",)),
    **dict.fromkeys(("bool",), ("bool",)),
    **dict.fromkeys(("unsigned", "unsigned int", "uint32_t", "u32", "jitkern::u32"), ("i32",)),
    **dict.fromkeys(("void",), tuple(dtypes.BY_TAG)),
}
_RESTRICT = re.compile(r"\b(?:__restrict__|__restrict|__grid_constant__)(?!\w)")
_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])'", re.DOTALL)
_GLOBAL = re.compile(r"\b__global__\b")
_TEMPLATE = re.compile(r"template\s*<([^<>]*)>\s*(?=(?:extern|static|inline|__global__|\s)*\Z)", re.DOTALL)
_HEAD = re.compile(r"(?:(?!__global__)[^;{}])*?\b(?P<name>[A-Za-z_]\w*)\s*\(", re.DOTALL)
_NOT_NAMES = ("__launch_bounds__", "__maxnreg__", "__cluster_dims__", "__attribute__", "alignas")


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel.

    Attributes:
        name: as declared.
        type: its type as declared, without ``const``, ``__restrict__`` and the pointer.
        pointer: whether it takes a tensor.
        const: whether the kernel only reads the tensor.
        default: the text of its default value, if the declaration has one.
        whole: the full type, as a declaration of a variable needs it.
    """

    name: str
    type: str
    pointer: bool
    const: bool
    default: str | None
    whole: str

    @property
    def format(self) -> str:
        """The ``struct`` format of its place in the parameter block."""
        return "P" if self.pointer else _SCALARS[self.type]

    @property
    def elements(self) -> tuple[str, ...] | None:
        """Tags of the dtypes it may point to; None when its type is a hole."""
        return _ELEMENTS.get(self.type)


@dataclass(frozen=True)
class Declaration:
    """A kernel's definition, and where its parts are in the text.

    Attributes:
        name: the function's name.
        parameters: in order.
        template: (kind, name) of its template parameters: ``("typename", "T")``, ``("int", "PACK")``.
        start: where the definition begins, a template header included.
        head: where ``extern "C"``, ``__global__`` or the like begins.
        name_at: where the name begins.
        close: where the parenthesis closes the parameters.
        end: one past the closing brace of the body.
    """

    name: str
    parameters: tuple[Parameter, ...]
    template: tuple[tuple[str, str], ...]
    start: int
    head: int
    name_at: int
    close: int
    end: int


def blank(text: str) -> str:
    """The text with comments, strings and characters overwritten by spaces, every position kept."""
    return _COMMENT.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)


def declaration(text: str, name: str | None = None) -> Declaration:
    """Find the kernel in a text.

    Args:
        text: CUDA text.
        name: which, when there are several.

    Raises:
        ArgumentError: there is none, or several and none was named, or a parameter cannot be passed.
    """
    clean = blank(text)
    found = [item for match in _GLOBAL.finditer(clean) if (item := _definition(text, clean, match.start()))]
    names = [item.name for item in found]
    if name is not None:
        chosen = [item for item in found if item.name == name]
        if not chosen:
            raise ArgumentError(
                f"Kernel: no `__global__ void {name}(...)` is defined here; there are {names or 'none'}"
            )
        return chosen[0]
    if len(found) == 1:
        return found[0]
    if not found:
        raise ArgumentError("Kernel: the text defines no kernel; it needs one `__global__ void name(...) { ... }`")
    raise ArgumentError(f"Kernel: the text defines {', '.join(names)}; say which with name={names[-1]!r}")


def _definition(text: str, clean: str, at: int) -> Declaration | None:
    position, name, name_at = at + len("__global__"), "", 0
    while True:
        head = _HEAD.match(clean, position)
        if head is None:
            return None
        name, name_at, opening = head["name"], head.start("name"), head.end() - 1
        close = _matching(clean, opening, "(", ")")
        if close is None:
            return None
        if name not in _NOT_NAMES:
            break
        position = close + 1
    body = re.compile(r"\s*\{").match(clean, close + 1)
    end = _matching(clean, body.end() - 1, "{", "}") if body else None
    if end is None:  # a prototype
        return None
    head_at = _head(text, clean, at)
    template = _TEMPLATE.search(clean, max(clean.rfind(";", 0, head_at), clean.rfind("}", 0, head_at), 0), head_at)
    return Declaration(
        name,
        tuple(_parameter(name, part) for part in _split(clean[opening + 1 : close])),
        _template(template[1]) if template else (),
        template.start() if template else head_at,
        head_at,
        name_at,
        close,
        end + 1,
    )


def _head(text: str, clean: str, at: int) -> int:
    """Where the words before ``__global__`` begin: ``extern "C"`` (a string, hence blank), static, inline."""
    before = re.search(r'(?:(?:extern\s*"C"|static|inline)\s+)*\Z', text[:at])
    return before.start() if before else at


def _matching(clean: str, at: int, opening: str, closing: str) -> int | None:
    depth = 0
    for position in range(at, len(clean)):
        depth += (clean[position] == opening) - (clean[position] == closing)
        if depth == 0:
            return position
    return None


def _split(text: str) -> list[str]:
    """Split at the commas outside of every kind of bracket."""
    parts, depth, begin = [], 0, 0
    for position, letter in enumerate(text):
        depth += (letter in "(<[{") - (letter in ")>]}")
        if letter == "," and depth == 0:
            parts.append(text[begin:position])
            begin = position + 1
    parts.append(text[begin:])
    return [part.strip() for part in parts if part.strip() not in ("", "void")]


def _template(text: str) -> tuple[tuple[str, str], ...]:
    holes = []
    for part in _split(text):
        words = part.split("=")[0].split()
        if len(words) < 2 or "..." in part:
            raise ArgumentError(f"Kernel: template parameter `{part}`; expected `typename T` or `int N`")
        kind = "typename" if words[0] in ("typename", "class") else " ".join(words[:-1])
        holes.append((kind, words[-1]))
    return tuple(holes)


def _parameter(kernel: str, text: str) -> Parameter:
    declared, _, default = (part.strip() for part in text.partition("="))
    declared = _RESTRICT.sub(" ", declared)
    match = re.fullmatch(r"(?P<type>.*?[\s*&])\s*(?P<name>[A-Za-z_]\w*)\s*(?P<array>\[\s*\])?", declared, re.DOTALL)
    if match is None or "&" in declared:
        raise ArgumentError(
            f"{kernel}: parameter `{text}`; expected `T* name`, `const T* name` or a number such as `int name`"
        )
    whole = " ".join(match["type"].split()) + (" *" if match["array"] else "")
    pointer = "*" in whole
    type_ = " ".join(word for word in whole.replace("*", " ").split() if word not in ("const", "volatile"))
    if whole.count("*") > 1 or not (pointer or type_ in _SCALARS):
        raise ArgumentError(
            f"{kernel}: parameter `{text}`: a `{whole}` cannot be passed; expected a pointer to elements, or one of"
            f" {', '.join(sorted(name for name in _SCALARS if ':' not in name))}"
        )
    return Parameter(
        match["name"], type_, pointer, pointer and "const" in whole.split("*")[0].split(), default or None, whole
    )
