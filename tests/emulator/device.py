"""A stand-in for a GPU: the public ops, called with CPU tensors, launch their GPU kernels on the emulator.

device = EmulatedDevice(emulator, "sm_90", monkeypatch)
device.seed = 7
jitkern.merge_state(...)        # geometry, variants and parameter blocks as on that GPU
"""

from __future__ import annotations

import contextlib
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from jitkern import driver, launch, loader, streams
from jitkern.ops import checks, mla_geometry, mla_launch, nway, pairwise, quantised
from jitkern.ops.recent import PerThread, RecentCalls
from jitkern.variants import Variant
from tests.emulator.emulate import Emulator, Size


@dataclass(frozen=True)
class Function:
    """What the loader would give."""

    variant: Variant
    device: int = 0
    handle: int = 1


class _Everything:
    def __contains__(self, _: object) -> bool:
        return True


@contextlib.contextmanager
def _nothing(*_: Any) -> Iterator[None]:
    yield


class EmulatedDevice:
    """Until the test ends, every op runs on the emulator.

    Attributes:
        seed: of the launches to come.
        timing: of asynchronous work; None: by the seed.
        patches: for each kernel's name, strings of its text and what takes their place.
        launched: the variants, as they were launched.
    """

    def __init__(self, emulator: Emulator, target: str, patch: pytest.MonkeyPatch, workers: int = 4) -> None:
        self._emulator = emulator
        self.seed = 0
        self.timing: str | None = None
        self.patches: dict[str, Sequence[tuple[str, str]]] = {}
        self.launched: list[Variant] = []
        known = mla_geometry.device_of_target(target)
        sizes = mla_geometry.Device(0, workers, known.shared if known else 0, target)
        patch.setattr(checks, "device_number", lambda _: 0)
        patch.setattr(checks, "backend_for", lambda *_: "nvrtc")
        patch.setattr(mla_geometry, "device_of", lambda _: sizes)
        patch.setattr(mla_launch, "_announced", _Everything())
        patch.setattr(driver, "current", _nothing)
        patch.setattr(loader, "get", lambda variant, *_, **__: Function(variant))
        patch.setattr(launch, "target", lambda _: target)
        patch.setattr(streams, "resolve_stream", lambda *_: 0)
        patch.setattr(launch, "Call", Call)
        patch.setattr(launch, "on", self._on)
        for module in (pairwise, nway, quantised):  # calls bound before are for the CPU
            patch.setattr(module, "_thread", PerThread())
        patch.setattr(pairwise, "_recent", RecentCalls())

    def _on(self, call: Call, stream: Any, *values: Any) -> None:
        variant = call.function.variant
        self.launched.append(variant)
        kernel = self._emulator.kernel(variant, self.patches.get(variant.kernel, ()))
        params = bytearray(call.parameters)
        struct.pack_into(call.patch, params, 0, *values)
        kernel.run(bytes(params), call.grid, call.block, call.shared, self.seed, self.timing)


class Call:
    """A bound call, as :class:`jitkern.launch.Call`."""

    def __init__(
        self,
        function: Function,
        grid: Size,
        block: Size,
        layout: str,
        values: Sequence[Any],
        patch: str,
        shared: int = 0,
        work: int = 0,
        pdl: bool = False,
    ) -> None:
        self.function, self.grid, self.block, self.shared = function, grid, block, shared
        self.parameters, self.patch = struct.pack(layout, *values), patch
