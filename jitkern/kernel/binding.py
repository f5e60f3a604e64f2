"""From arguments to a launch: fill the holes, load the variant, compute grid and block, pack the parameters."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jitkern import dtypes, launch, streams
from jitkern.errors import ArgumentError, UnsupportedError
from jitkern.kernel import filling, tuning
from jitkern.kernel.arguments import Scalar, Tensor, check_scalar, check_tensor, same_device
from jitkern.kernel.holes import Args, bind_types, compute, widest
from jitkern.kernel.instance import Instance
from jitkern.kernel.text import Value, offsets
from jitkern.launch import Call, Dim3
from jitkern.loader import CPU
from jitkern.ops import checks

if TYPE_CHECKING:
    from jitkern.kernel.api import Kernel

_MAX_BLOCK = (1024, 1024, 64)


@dataclass(frozen=True)
class Bound:
    """A call that is ready.

    Attributes:
        instance: the variant.
        call: what is launched; None when the grid is empty.
        holes: every hole's value, dtypes as tags.
        watched: scalars that the grid, a constant or the like was computed from.
        block: threads of a block.
        shared: bytes of dynamic shared memory.
        device: the number that the loader uses.
    """

    instance: Instance
    call: Call | None
    holes: dict[str, Any]
    watched: frozenset[str]
    block: Dim3
    shared: int
    device: int


def bind(kernel: Kernel, values: dict[str, Any], stream: Any, grid: Any, block: Any, given: Mapping[str, Any]) -> Bound:
    """Check a call's arguments and make it ready.

    Args:
        kernel: what is called.
        values: every parameter's value by its name.
        stream, grid, block: as given in the call.
        given: holes given in the call.
    """
    device = _check(kernel, values)
    number = checks.device_number(device)
    args = Args(dict(values))
    holes = _types_and_pack(kernel, values, given)
    backend = checks.backend_for(kernel.name, "auto", device)
    handle = None if number == CPU else streams.resolve_stream(stream, number)

    def ready(choice: Mapping[str, Value]) -> Bound:
        args._values.update({**holes, **choice})
        chosen = {**holes, **choice, **_rules(kernel, given, args)}
        instance = filling.make(kernel, chosen, launch.target(number), backend)
        return _pack(kernel, instance, values, args, number, handle, grid, block, chosen)

    given_choices = {name: given[name] for name in kernel.holes.choices if name in given}
    open_choices = {name: candidates for name, candidates in kernel.holes.choices.items() if name not in given}
    if not open_choices:
        return ready(given_choices)
    holes |= given_choices
    return ready(tuning.choose(kernel, values, holes, open_choices, ready, number, handle))


def _check(kernel: Kernel, values: Mapping[str, Any]) -> Any:
    import torch

    tensors = {name: value for name, value in values.items() if isinstance(kernel.rules[name], Tensor)}
    for parameter in kernel.declared.parameters:
        rule, value = kernel.rules[parameter.name], values[parameter.name]
        if isinstance(rule, Scalar):
            check_scalar(kernel.name, parameter, rule, value)
        elif value is not None:
            check_tensor(kernel.name, parameter, rule, value)
        elif not rule.optional:
            raise ArgumentError(
                f"{kernel.name}: {parameter.name} is None; declare it `= nullptr`, or"
                f' signature={{"{parameter.name}": jitkern.Tensor(optional=True)}}, if the kernel looks before it reads'
            )
    device = same_device(kernel.name, tensors)
    checks.memory(kernel.name, **tensors)
    checks.no_tangent(kernel.name, **tensors)
    wanted = [name for name, value in tensors.items() if value is not None and value.requires_grad]
    if wanted and torch.is_grad_enabled():
        raise UnsupportedError(
            f"{kernel.name}: {', '.join(wanted)} requires a gradient, which a kernel does not give;"
            " use torch.no_grad() or .detach()"
        )
    return device


def _types_and_pack(kernel: Kernel, values: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """The holes that the tensors fill."""
    unknown = [name for name in given if name not in kernel.holes.names]
    if unknown:
        raise ArgumentError(
            f"{kernel.name}: no parameter or hole {unknown[0]!r}; a call takes {kernel.signature}, stream=, grid=,"
            f" block= and the holes {', '.join(kernel.holes.names) or '(none)'}"
        )
    tensors = {name: value for name, value in values.items() if isinstance(kernel.rules[name], Tensor)}
    bound: dict[str, Any] = dict(bind_types(kernel.name, kernel.holes, tensors, given))
    if kernel.holes.pack:
        bound[kernel.holes.pack] = given.get(kernel.holes.pack) or _pack_of(kernel, bound, tensors)
    return bound


def _rules(kernel: Kernel, given: Mapping[str, Any], args: Args) -> dict[str, Any]:
    """The constants, in the order in which they were given: each may use those before it."""
    found: dict[str, Any] = {}
    for name, rule in kernel.holes.rules.items():
        value = given.get(name, rule)
        if filling.is_rule(value) and value is not None:
            value = compute(kernel.name, name, value, args)
        found[name] = args._values[name] = value
    return found


def _pack_of(kernel: Kernel, bound: Mapping[str, Any], tensors: Mapping[str, Any]) -> int:
    """The widest pack that every tensor of the main element type allows."""
    main = next(iter(kernel.holes.types), None)
    users = kernel.holes.types[main] if main else tuple(tensors)
    present = [tensors[name] for name in users if tensors.get(name) is not None]
    size = dtypes.resolve(bound[main]).size if main else max((value.element_size() for value in present), default=4)
    return widest(size, present)


def _pack(
    kernel: Kernel,
    instance: Instance,
    values: Mapping[str, Any],
    args: Args,
    number: int,
    handle: int | None,
    grid: Any,
    block: Any,
    holes: dict[str, Any],
) -> Bound:
    """Compute the launch's shape, load the variant and pack the parameters."""
    name = kernel.name
    block_rule = block if block is not None else kernel.block
    if number == CPU and kernel.cpu_block is not None:
        block_rule = kernel.cpu_block
    threads = dim3(name, "block", compute(name, "block", block_rule, args))
    args._values.setdefault("threads", threads[0])
    blocks = dim3(name, "grid", compute(name, "grid", grid if grid is not None else kernel.grid, args))
    shared = int(compute(name, "shared", kernel.shared, args) or 0)
    scalars = {p.name for p in kernel.declared.parameters if not p.pointer}
    watched = frozenset(args._asked & scalars)
    if shared and number == CPU:
        raise UnsupportedError(f"{name}: shared={shared}; the CPU has no shared memory. Pass CUDA tensors")
    call = None
    function = instance.load(number, handle, shared)
    if 0 not in blocks:
        tensors = [
            value for key, value in values.items() if isinstance(kernel.rules[key], Tensor) and value is not None
        ]
        work = sum(value.numel() * value.element_size() for value in tensors)
        places = offsets(kernel.declared.parameters)
        call = Call(
            function,
            blocks,
            threads,
            kernel.layout,
            packed(kernel, values),
            kernel.layout,
            shared,
            work,
            offsets=places,
        )
    return Bound(instance, call, holes, watched, threads, shared, number)


def packed(kernel: Kernel, values: Mapping[str, Any]) -> list[Any]:
    """The parameters as they go into the block: an address for a tensor, 0 for None, numbers as they are."""
    return [
        (0 if values[p.name] is None else values[p.name].data_ptr()) if p.pointer else values[p.name]
        for p in kernel.declared.parameters
    ]


def dim3(kernel: str, what: str, value: Any) -> Dim3:
    """Up to three numbers, completed with ones.

    Raises:
        ArgumentError: there is none, or one is negative, or a block is larger than a device takes.
    """
    if value is None:
        raise ArgumentError(
            f"{kernel}: no {what}; give {what}= to Kernel or to the call: numbers, a function of the arguments"
            f' (lambda a: a.x.numel()), or an expression ("cdiv(x.numel(), 256)")'
        )
    try:
        sizes = [int(size) for size in value] if isinstance(value, list | tuple) else [int(value)]
    except (TypeError, ValueError):
        sizes = []
    if not 1 <= len(sizes) <= 3 or min(sizes) < 0:
        raise ArgumentError(f"{kernel}: {what}={value!r}; expected one to three whole numbers that are not negative")
    sizes += [1] * (3 - len(sizes))
    x, y, z = sizes
    if what == "block":
        over = any(size > most for size, most in zip(sizes, _MAX_BLOCK, strict=True)) or x * y * z > 1024
        if over or x * y * z == 0:
            raise ArgumentError(f"{kernel}: block={value!r} has {x * y * z} threads; a block takes 1 to 1024, 64 in z")
    return x, y, z
