"""Choose constants by measuring, once: the choice is kept in the disk cache beside the kernels.

It is made for a text, a device, and the shapes, dtypes and numbers of a call. Trials run on copies of what the kernel
writes, so that the caller's tensors are touched by the real call only.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from jitkern import binaries, driver, events, launch, loader, settings
from jitkern.cache import Key
from jitkern.errors import CaptureError, JitkernError, MissError
from jitkern.kernel.holes import combinations
from jitkern.kernel.text import Value
from jitkern.loader import CPU

if TYPE_CHECKING:
    from jitkern.kernel.api import Kernel
    from jitkern.kernel.binding import Bound

_SCHEMA = 1
_WARM, _LAUNCHES, _REPEATS = 2, 10, 5
_CPU_SECONDS = 0.01

_chosen: dict[str, dict[str, Value]] = {}


def choose(
    kernel: Kernel,
    values: Mapping[str, Any],
    holes: Mapping[str, Any],
    choices: Mapping[str, tuple[Value, ...]],
    ready: Callable[[Mapping[str, Value]], Bound],
    device: int,
    stream: int | None,
) -> dict[str, Value]:
    """The best candidates: remembered, else on disk, else measured now.

    Raises:
        CaptureError: they are to be measured while a CUDA graph is being captured.
        MissError: they are to be measured, and ``JITKERN_MODE`` is ``hit-only``.
    """
    key = _key(kernel, values, holes, choices, device)
    known = _chosen.get(key.digest) or _read(key)
    if known is None:
        _allow(kernel, choices, stream)
        known = _measure(kernel, values, choices, ready, device)
        _write(key, known)
    _chosen[key.digest] = known
    return known


def _key(
    kernel: Kernel, values: Mapping[str, Any], holes: Mapping[str, Any], choices: Mapping[str, Any], device: int
) -> Key:
    shapes = {
        name: [list(value.shape), str(value.dtype)] if hasattr(value, "shape") else value
        for name, value in values.items()
    }
    parts = {
        "schema": _SCHEMA,
        "text": kernel.source,
        "kernel": kernel.name,
        "holes": {name: str(value) for name, value in holes.items()},
        "rules": {
            name: rule if isinstance(rule, str | int | float) else "" for name, rule in kernel.holes.rules.items()
        },
        "launch": [rule if isinstance(rule, str | int) else "" for rule in (kernel.grid, kernel.block, kernel.shared)],
        "choices": {name: list(candidates) for name, candidates in choices.items()},
        "arguments": shapes,
        "device": _device_name(device),
    }
    return Key(parts, launch.target(device), f"{kernel.name}-tuning")


def _device_name(device: int) -> str:
    if device == CPU:
        import platform

        return f"{platform.machine()} {platform.processor()} {launch.host_threads(1 << 40)} threads"
    import torch

    return torch.cuda.get_device_name(device)


def _read(key: Key) -> dict[str, Value] | None:
    entry = next((found for place in binaries.places() if (found := place.get(key))), None)
    if entry is None:
        return None
    choice: dict[str, Value] = json.loads(entry.binary)["choice"]
    return choice


def _write(key: Key, choice: Mapping[str, Value]) -> None:
    place = loader.store()
    if place is not None:
        content = json.dumps({"choice": choice}, sort_keys=True).encode()
        place.publish(key, content, "kernel.json", key.parts["text"], {"variant": key.stem, "schema": _SCHEMA})


def _allow(kernel: Kernel, choices: Mapping[str, Any], stream: int | None) -> None:
    names = ", ".join(choices)
    if stream is not None and driver.is_capturing(stream):
        raise CaptureError(
            f"{kernel.name}: {names} would be measured now, and a CUDA graph is being captured. Before it, run"
            f" {kernel.name}.warmup(...) with the call's arguments, or pass {names} by name"
        )
    if settings.get().mode == "hit-only":
        raise MissError(
            f"{kernel.name}: {names} was not measured for such a call, and JITKERN_MODE is hit-only. Run it once where"
            f" compiling is allowed, or pass {names} by name"
        )


def _measure(
    kernel: Kernel,
    values: Mapping[str, Any],
    choices: Mapping[str, tuple[Value, ...]],
    ready: Callable[[Mapping[str, Value]], Bound],
    device: int,
) -> dict[str, Value]:
    """Time every combination; one that does not compile or launch is left out, unless none does."""
    from jitkern.kernel.binding import packed

    written = {p.name for p in kernel.declared.parameters if p.pointer and not p.const}
    copies = {name: value.clone() if name in written and value is not None else value for name, value in values.items()}
    times: list[tuple[float, dict[str, Value]]] = []
    problem: JitkernError | None = None
    for candidate in combinations(choices):
        try:
            bound = ready(candidate)
        except JitkernError as error:
            problem = problem or error
            continue
        if bound.call is None:
            return candidate
        call, arguments = bound.call, packed(kernel, copies)
        try:
            seconds = _time(lambda call=call, arguments=arguments: launch.on(call, None, *arguments), device)  # type: ignore[misc]
        except JitkernError as error:
            problem = problem or error
            continue
        times.append((seconds, candidate))
        events.logger.debug("%s: %s takes %.2f us", kernel.name, candidate, seconds * 1e6)
    if not times and problem is not None:
        raise problem
    return min(times, key=lambda item: item[0])[1]


def _time(call: Callable[[], None], device: int) -> float:
    """Seconds of one call, the median of a few runs."""
    if device == CPU:
        return _time_cpu(call)
    import torch

    for _ in range(_WARM):
        call()
    times = []
    for _ in range(_REPEATS):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        for _ in range(_LAUNCHES):
            call()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1000 / _LAUNCHES)
    return float(statistics.median(times))


def _time_cpu(call: Callable[[], None]) -> float:
    call()
    times = []
    for _ in range(_REPEATS):
        start, count = time.perf_counter(), 0
        while time.perf_counter() - start < _CPU_SECONDS / _REPEATS or count == 0:
            call()
            count += 1
        times.append((time.perf_counter() - start) / count)
    return statistics.median(times)
