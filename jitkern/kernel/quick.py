"""The function that a call of a kernel runs: written for the kernel's parameters, as ``dataclasses`` does it.

It reads the addresses, looks the bound call up by everything that the checks depend on (shapes, strides, dtypes,
devices, alignment, and the numbers that the grid or a constant is computed from), and launches. What is new goes the
slow way. A call that is like one of the last few is known by one check of all tensors (see jitkern/ops/recent.py).
"""

from __future__ import annotations

import itertools
import keyword
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

from jitkern.errors import ArgumentError
from jitkern.kernel.arguments import Scalar, Tensor
from jitkern.kernel.signature import Declaration, Parameter
from jitkern.ops.recent import RecentCalls

_OWN = ("stream", "grid", "block", "holes", "self")


def python_name(name: str) -> str:
    """A parameter's name in Python: ``in`` is ``in_`` there."""
    return f"{name}_" if keyword.iskeyword(name) else name


def write(declared: Declaration, rules: Mapping[str, Tensor | Scalar], watched: Collection[str]) -> str:
    """The function's text.

    Args:
        declared: the kernel.
        rules: of its parameters.
        watched: scalars whose value decides more than the value itself.

    Raises:
        ArgumentError: a parameter has a name that a call needs itself.
    """
    taken = [p.name for p in declared.parameters if p.name in _OWN]
    if taken:
        raise ArgumentError(f"{declared.name}: a parameter is called {taken[0]}, which a call needs itself; rename it")
    tensors = [p for p in declared.parameters if p.pointer]
    listed = [_argument(p, rules[p.name]) for p in declared.parameters]
    late = next((b for a, b in itertools.pairwise(listed) if "=" in a and "=" not in b), None)
    if late:
        raise ArgumentError(f"{declared.name}: {late} comes after a parameter with a default, and needs one, too")
    arguments = ", ".join(listed)
    separator = ", " if arguments else ""
    names = ", ".join(f"{p.name!r}: {python_name(p.name)}" for p in declared.parameters)
    whole = ", ".join(python_name(p.name) for p in tensors)
    lines = [
        f"def call({arguments}{separator}*, stream=None, grid=None, block=None, **holes):",
        "    try:",
        *(f"        {_address(p)}" for p in tensors),
        f"        if {_odd(tensors, rules)}: raise TypeError",
        f"        options = ({_options(declared, watched)})",
        "        for recent in recents.entries:",
        f"            if recent.options == options and recent.same({whole}):",
        "                bound = recent.call",
        "                break",
        "        else:",
        f"            key = ({_tensor_key(tensors, rules)}, options)",
        "            bound = here.calls.get(key)",
        f"            if bound is not None: recents.met_again(key, options, ({whole}{',' if tensors else ''}), bound)",
        "    except ODD:",
        "        bound = key = None",
        "    if bound is None:",
        f"        return slow({{{names}}}, key, stream, grid, block, holes)",
        *_ranges(declared, rules),
        "    if bound is not nothing:",
        "        try:",
        f"            on(bound, stream, {', '.join(_value(p) for p in declared.parameters)})",
        *_told_to_autograd(declared, rules),
        "        except (StructError, OverflowError):",
        f"            refuse({{{names}}})",
        "            raise",
    ]
    return "\n".join(lines)


def _argument(parameter: Parameter, rule: Tensor | Scalar) -> str:
    name = python_name(parameter.name)
    if isinstance(rule, Tensor):
        return f"{name}=None" if rule.optional and parameter.default is not None else name
    return name if rule.default is None else f"{name}={rule.default!r}"


def _address(parameter: Parameter) -> str:
    name = python_name(parameter.name)
    return f"a_{parameter.name} = 0 if {name} is None else {name}.data_ptr()"


def written(declared: Declaration) -> list[Parameter]:
    """The tensors that a kernel may write to."""
    return [p for p in declared.parameters if p.pointer and not p.const]


def _told_to_autograd(declared: Declaration, rules: Mapping[str, Tensor | Scalar]) -> list[str]:
    always = [python_name(p.name) for p in written(declared) if not _optional(p, rules)]
    sometimes = [python_name(p.name) for p in written(declared) if _optional(p, rules)]
    lines = [f"            wrote({', '.join(always)})"] if always else []
    return lines + [f"            if {name} is not None: wrote({name})" for name in sometimes]


def _optional(parameter: Parameter, rules: Mapping[str, Tensor | Scalar]) -> bool:
    rule = rules[parameter.name]
    return isinstance(rule, Tensor) and rule.optional


def _odd(tensors: Collection[Parameter], rules: Mapping[str, Tensor | Scalar]) -> str:
    """What neither a key nor a guard may be asked about: the slow way looks closer at tensors without memory, at nested
    ones (a guard would end the process), and at everything while there are forward-mode tangents."""
    parts = ["forward_ad._current_level >= 0"]
    for parameter in tensors:
        name, odd = python_name(parameter.name), f"not a_{parameter.name} or {python_name(parameter.name)}.is_nested"
        parts.append(f"{name} is not None and ({odd})" if _optional(parameter, rules) else odd)
    return " or ".join(parts)


def _options(declared: Declaration, watched: Collection[str]) -> str:
    """What a bound call depends on beside the tensors themselves."""
    scalars = [p.name for p in declared.parameters if not p.pointer]
    parts = [f"{python_name(n)}.__class__" if n not in watched else f"{python_name(n)}.__class__, {python_name(n)}"
             for n in scalars]  # fmt: skip
    addresses = [f"a_{p.name}" for p in declared.parameters if p.pointer]
    parts.append(f"({' | '.join(addresses) or '0'}) & 15")
    parts += ["grid", "block", "tuple(holes.items()) if holes else None"]
    return ", ".join(parts)


def _tensor_key(tensors: Collection[Parameter], rules: Mapping[str, Tensor | Scalar]) -> str:
    parts, gradients, lazy = [], [], []
    for parameter in tensors:
        name = python_name(parameter.name)
        guard = f"{name} is not None and " if _optional(parameter, rules) else ""
        whole = f"{name}.shape, {name}.stride(), {name}.dtype, {name}.device"
        parts.append(f"None if {name} is None else ({whole})" if guard else whole)
        gradients.append(f"({guard}{name}.requires_grad)")
        lazy.append(f"({guard}{name}.is_neg())")
    parts.append(f"({' or '.join(gradients) or 'False'}) and is_grad_enabled()")
    parts.append(" or ".join(lazy) or "False")
    return ", ".join(parts)


class Recents(RecentCalls):
    """The last few calls of a kernel in one thread, of those that came twice in a row."""

    def __init__(self) -> None:
        super().__init__()
        self._last: Any = None

    def met_again(self, key: Any, options: Any, tensors: Sequence[Any], bound: Any) -> None:
        """Remember a call that is the same as the one before: to remember costs more than one call's look-up."""
        if key != self._last:
            self._last = key
        elif tensors and all(x is not None for x in tensors):
            self.remember(options, tensors, bound)


def _ranges(declared: Declaration, rules: Mapping[str, Tensor | Scalar]) -> list[str]:
    lines = []
    for parameter in declared.parameters:
        rule, name = rules[parameter.name], python_name(parameter.name)
        if not isinstance(rule, Scalar) or (rule.low is None and rule.high is None):
            continue
        low = f"{rule.low!r} <= " if rule.low is not None else ""
        high = f" <= {rule.high!r}" if rule.high is not None else ""
        lines.append(f"    if not {low}{name}{high}: refuse({{{parameter.name!r}: {name}}})")
    return lines


def _value(parameter: Parameter) -> str:
    return f"a_{parameter.name}" if parameter.pointer else python_name(parameter.name)


def build(text: str, kernel: str, **names: Any) -> Callable[..., None]:
    """Make the function; ``names`` is what its text refers to."""
    exec(compile(text, f"<the call of {kernel}>", "exec"), names)
    function: Callable[..., None] = names["call"]
    function.__name__ = function.__qualname__ = kernel
    return function
