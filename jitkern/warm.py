"""Make variants ready ahead of time: on a device (``warmup``), or in the cache only (``fill_cache``)."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from jitkern import dtypes, launch, loader, ops, pool, variants
from jitkern.errors import ArgumentError
from jitkern.variants import Kernel, Variant


@dataclass(frozen=True)
class Warmed:
    """A variant that is ready.

    Attributes:
        variant: which.
        how: ``compiled`` or ``cached``.
        seconds: how long it took.
    """

    variant: Variant
    how: str
    seconds: float


def _kernels(name: str | None) -> list[Kernel]:
    ops.register_all()
    known = variants.registered()
    if name is None:
        return list(known.values())
    if name not in known:
        raise ArgumentError(f"no kernel {name!r}; there are {', '.join(sorted(known))}")
    return [known[name]]


def choose(
    kernel: str | None,
    target: str,
    backend: str,
    dtype: Any = None,
    pack: int | None = None,
    constants: dict[str, int | str] | None = None,
    siblings: bool = False,
) -> list[Variant]:
    """The variants that a request means.

    With dtype, pack and the constants that have no default: the one so named, and where ``siblings`` those that differ
    in the other constants as common variants do. With less: the common variants that fit.

    Raises:
        ArgumentError: the kernel or a constant is unknown, or nothing fits.
    """
    given = constants or {}
    tag = None if dtype is None else dtypes.resolve(dtype).tag
    chosen: list[Variant] = []
    for item in _kernels(kernel):
        unknown = [name for name in given if name not in item.constants]
        if unknown:
            raise ArgumentError(
                f"{item.name} has no constant {', '.join(unknown)}; it has {', '.join(item.constants) or 'none'}"
            )
        needed = [name for name, default in item.constants.items() if default is None]
        if tag and pack and all(name in given for name in needed):
            # Whoever warms by dtype, pack and head size wants calls on contiguous tensors to be warm, too.
            others = item.variants(target, backend) if siblings else ()
            holes = [given, *(dict(common.constants) | given for common in others)]
            exact = dict.fromkeys(variants.make_constants(item, hole) for hole in holes)
            chosen += [Variant(item.name, tag, pack, target, constants, backend) for constants in exact]
            continue
        for variant in item.variants(target, backend):
            fits = tag in (None, variant.dtype) and pack in (None, variant.pack)
            if fits and variant.constants == variants.make_constants(item, dict(variant.constants) | given):
                chosen.append(variant)
    if not chosen:
        raise ArgumentError(_none_fits(kernel, target, {"dtype": tag, "pack": pack, **given}))
    return chosen


def _none_fits(kernel: str | None, target: str, asked: dict[str, Any]) -> str:
    said = ", ".join(f"{name}={value}" for name, value in asked.items() if value is not None)
    message = f"no common variant of {kernel or 'any kernel'} for {target}" + (f" has {said}" if said else "")
    if kernel is None:
        return f"{message}; name the kernel"
    needed = [name for name, default in _kernels(kernel)[0].constants.items() if default is None]
    return f"{message}; to name one exactly, give {' and '.join(['dtype', 'pack', *needed])}"


def _check_request(kernel: Any, pack: Any, constants: dict[str, Any]) -> None:
    """Refuse what names no variant, by its type."""
    if kernel is not None and not isinstance(kernel, str):
        raise ArgumentError(f"warmup: kernel={kernel!r}; expected a kernel's name, or None for all")
    if pack is not None and (type(pack) is not int or pack < 1):
        raise ArgumentError(f"warmup: pack={pack!r}; expected elements per access, an int above 0, or None")
    for name, value in constants.items():
        if not isinstance(value, int | str):
            raise ArgumentError(f"warmup: {name}={value!r}; a constant is an int or a word")


def warmup(
    kernel: str | None = None,
    *,
    dtype: Any = None,
    pack: int | None = None,
    device: Any = None,
    backend: str = "auto",
    **constants: int | str,
) -> list[Warmed]:
    """Compile, load and resolve variants on a device, so that a later call is warm and can be captured in a graph.

    With nothing given, every kernel's common variants. With ``dtype``, ``pack`` and the constants that have no default,
    the variant so named (this is the form that :class:`~jitkern.CaptureError` prints) and its siblings for other
    layouts; with less, the common variants that fit.

    Args:
        kernel: ``"merge_attn_states"`` and so on; None: all.
        dtype: a torch dtype, or a tag such as ``"bf16"``.
        pack: elements per access.
        device: a torch device, its name or number; None: the current CUDA device, or the CPU if there is none.
        backend: ``auto``, ``nvrtc``, ``nvcc`` or ``cpu``.
        constants: the kernel's further compile-time constants, for example ``d=128``.

    Raises:
        ArgumentError: the request names nothing.
        CompileError, ToolchainError, LaunchError: a variant cannot be made.
    """
    import torch

    from jitkern.ops import checks

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    _check_request(kernel, pack, constants)
    try:
        numbered = isinstance(device, int) and not isinstance(device, bool)
        place = torch.device("cuda", device) if numbered else torch.device(device)
    except (TypeError, ValueError, RuntimeError) as error:
        first = str(error).splitlines()[0]
        raise ArgumentError(
            f"warmup: device={device!r}; expected a torch device, its name or number ({first})"
        ) from None
    number = checks.device_number(place)
    chosen = checks.backend_for("warmup", backend, place)
    warmed = []
    for variant in choose(kernel, launch.target(number), chosen, dtype, pack, constants, siblings=True):
        start = time.perf_counter()
        function = loader.get(variant, number)
        warmed.append(Warmed(variant, function.how, time.perf_counter() - start))
    return warmed


def fill_cache(
    wanted: Iterable[Variant],
    progress: Callable[[int, int, pool.Outcome], None] | None = None,
    jobs: int | None = None,
) -> list[Warmed]:
    """Compile variants into the cache, for any targets, several at once; needs no GPU.

    Args:
        wanted: the variants.
        progress: called after each with (how many are done, count, outcome).
        jobs: how many at once; None: what cores, memory and limits allow.

    Raises:
        CompileError, ToolchainError: one cannot be made; the others are.
    """
    outcomes = pool.compile_all(wanted, jobs, progress)
    for outcome in outcomes:
        if outcome.error is not None:
            raise outcome.error
    return [Warmed(outcome.variant, outcome.how, outcome.seconds) for outcome in outcomes]
