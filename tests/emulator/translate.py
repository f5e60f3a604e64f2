"""A kernel's text for the emulator: each `asm` statement becomes calls of functions named like its instructions.

``asm volatile("bar.sync 1, %0;" ::"r"(n));`` becomes ``do { ptx::bar_sync(1, (n)); } while (0);``, so that the shipped
wrappers themselves are what runs, with the order of their operands. Line numbers stay.
"""

from __future__ import annotations

import re

_ASM = re.compile(r"\basm\b\s*(?:volatile\b)?\s*\(")
_STRING = re.compile(r'"((?:[^"\\]|\\.)*)"')
_DYNAMIC = re.compile(r"extern\s+__shared__\s+(?:__align__\(\d+\)\s+)?([\w: ]+?)\s+(\w+)\[\];")
_REGISTER = re.compile(r"\.reg\s+\.(\w+)\s+(\w+)")
_PLACEHOLDER = re.compile(r"%(\d+)")
_CPP_TYPES = {"pred": "bool", "b64": "unsigned long long", "b32": "unsigned", "b16": "unsigned short", "f32": "float"}


def translated(text: str) -> str:
    """The text with its `asm` statements and its dynamic shared memory replaced."""
    parts, end = [], 0
    for found in _ASM.finditer(text):
        if found.start() < end or "//" in text[text.rfind("\n", 0, found.start()) + 1 : found.start()]:
            continue
        close = _closing(text, found.end())
        lines = "\n" * text.count("\n", found.start(), close)
        parts += [text[end : found.start()], _calls(text[found.end() : close - 1]), lines]
        end = close
    text = "".join([*parts, text[end:]])
    return _DYNAMIC.sub(r"\1* const \2 = reinterpret_cast<\1*>(emulator::dynamic_shared());", text)


def _closing(text: str, start: int) -> int:
    """The place behind the parenthesis that closes the one before `start`."""
    depth, at = 1, start
    while depth:
        if text[at] == '"':
            string = _STRING.match(text, at)
            assert string, f"a string without an end: {text[at : at + 80]!r}"
            at = string.end()
            continue
        depth += {"(": 1, ")": -1}.get(text[at], 0)
        at += 1
    return at


def split_at(text: str, separator: str, opening: str = "([{", closing: str = ")]}") -> list[str]:
    """Split where no bracket and no string is open."""
    parts, depth, at, begin = [], 0, 0, 0
    while at < len(text):
        string = _STRING.match(text, at)
        if string:
            at = string.end()
            continue
        depth += (text[at] in opening) - (text[at] in closing)
        if depth == 0 and text[at] == separator:
            parts.append(text[begin:at])
            begin = at + 1
        at += 1
    return [*parts, text[begin:]]


def _calls(statement: str) -> str:
    template, *operands = split_at(statement, ":")
    code = "".join(_STRING.findall(template)).replace("\\n", "\n").replace("\\t", " ").strip()
    values = [value for section in operands[:2] for value in _expressions(section)]
    if code.startswith("{") and code.endswith("}"):
        code = code[1:-1]
    for name in {found[2] for found in _REGISTER.finditer(code)}:  # the values may have such names as well
        code = re.sub(rf"(?<![\w.%]){name}\b", f"ptx_{name}", code)
    calls = [_call(" ".join(one.split()), values) for one in code.split(";") if one.strip()]
    return f"do {{ {' '.join(calls)} }} while (0)"


def _expressions(section: str) -> list[str]:
    found = []
    for operand in split_at(section, ","):
        if operand.strip():
            string = _STRING.search(operand)
            assert string, f"an operand without a constraint: {operand!r}"
            found.append(operand[string.end() :].strip())
    return found


def _call(instruction: str, values: list[str]) -> str:
    register = _REGISTER.fullmatch(instruction)
    if register:
        return f"{_CPP_TYPES[register[1]]} {register[2]};"
    condition = ""
    if instruction.startswith("@"):
        predicate, instruction = instruction[1:].split(" ", 1)
        condition = f"if ({_PLACEHOLDER.sub(lambda m: values[int(m[1])], predicate)}) "
    opcode, _, rest = instruction.partition(" ")
    operands = ", ".join(_operand(one.strip(), values) for one in split_at(rest, ",") if one.strip())
    return f"{condition}ptx::{opcode.replace('.', '_').replace(':', '_')}({operands});"


def _operand(operand: str, values: list[str]) -> str:
    expression = _PLACEHOLDER.sub(lambda m: values[int(m[1])], operand)
    if operand.startswith("{"):
        return f"ptx::registers({expression[1:-1]})"
    if operand.startswith("["):
        return f"({expression[1:-1]})"
    return expression
