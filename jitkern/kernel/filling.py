"""Values for the holes of a kernel, and the variant that they make."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from jitkern import driver, dtypes, launch, variants
from jitkern.errors import ArgumentError
from jitkern.kernel.holes import cuda_type
from jitkern.kernel.instance import Instance, UserVariant
from jitkern.kernel.text import Value, instantiate
from jitkern.loader import CPU
from jitkern.ops import checks

if TYPE_CHECKING:
    from jitkern.kernel.api import Kernel


def is_dtype(value: Any) -> bool:
    """Whether a value names an element type."""
    try:
        dtypes.resolve(value)
    except (ArgumentError, TypeError):
        return False
    return not isinstance(value, int | float)


def place(device: Any) -> tuple[int, str]:
    """(device number of the loader, target) of a torch device or its name; None: the first GPU, else the CPU."""
    if device is None:
        return (0, driver.target(0)) if driver.available() else (CPU, "cpu")
    import torch

    number = checks.device_number(torch.device("cuda", device) if isinstance(device, int) else torch.device(device))
    return number, launch.target(number)


def make(kernel: Kernel, holes: Mapping[str, Any], target: str, backend: str) -> Instance:
    """The variant with these values in its holes.

    Raises:
        ArgumentError: one is unknown or missing, or has a value that cannot stand there.
    """
    names = kernel.holes.names
    unknown = [name for name in holes if name not in names]
    missing = [name for name in names if holes.get(name) is None]
    if unknown or missing:
        what = (
            f"no parameter or hole {unknown[0]!r}"
            if unknown
            else f"{missing[0]} has no value; give it by name, {missing[0]}=..."
        )
        raise ArgumentError(f"{kernel.name}: {what}; its holes are {', '.join(names) or 'none'}")
    filled = {name: _value(kernel, name, holes[name]) for name in names}
    main = next(iter(kernel.holes.types), None)
    shown = {name: dtypes.resolve(holes[name]).tag if is_dtype(holes[name]) else filled[name] for name in names}
    variant = UserVariant(
        kernel.name,
        str(shown.pop(main)) if main else "",
        int(shown.pop(kernel.holes.pack)) if kernel.holes.pack else 0,
        target,
        tuple((name, value if isinstance(value, int) else str(value)) for name, value in shown.items()),
        backend,
    )
    folder = kernel.path.parent if kernel.path else None
    text = instantiate(kernel.source, kernel.label, kernel.declared, filled, backend, folder)
    return Instance(variant, text, kernel.label)


def _value(kernel: Kernel, name: str, value: Any) -> Value:
    if is_dtype(value):
        return cuda_type(value, kernel.source)
    if isinstance(value, bool | int | float | str):
        return value
    if hasattr(value, "__index__"):
        return int(value)
    raise ArgumentError(
        f"{kernel.name}: {name}={value!r}; expected a number, True or False, a dtype, or a CUDA type's name"
    )


def default_holes(kernel: Kernel, given: Mapping[str, Any]) -> dict[str, Any]:
    """Values of all holes without arguments: given, else those of the last call, else float32, widest, first choice."""
    fixed = {name: rule for name, rule in kernel.holes.rules.items() if not is_rule(rule)}
    first = {name: candidates[0] for name, candidates in kernel.holes.choices.items()}
    last = dict(kernel.last.holes) if kernel.last else {}
    values = {**dict.fromkeys(kernel.holes.types, "f32"), **first, **fixed, **last, **given}
    if kernel.holes.pack:
        main = next(iter(kernel.holes.types), None)
        values.setdefault(kernel.holes.pack, variants.PACK_BYTES // (dtypes.resolve(values[main]).size if main else 4))
    return values


def is_rule(value: Any) -> bool:
    """Whether a value has to be computed from a call's arguments."""
    return value is None or callable(value) or (isinstance(value, str) and not is_dtype(value))
