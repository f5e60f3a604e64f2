"""How a launch reaches the driver, with a driver that only takes notes: streams, devices, parameters, errors."""

from __future__ import annotations

import contextlib
import ctypes
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from jitkern import driver, launch, switches
from jitkern.errors import LaunchError
from jitkern.variants import Variant

VARIANT = Variant("merge_attn_states", "f32", 4, "sm_90", (("d", 64),))


class Driver:
    """Notes of every launch: (stream, parameter block)."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.launches: list[tuple[int, bytes]] = []
        self.result, self.device, self.stream = 0, 0, 0x10
        self.entered: list[int] = []
        self.call: Any = None
        self.entry = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)(self._launch)
        monkeypatch.setattr(driver, "ensure_context", lambda _: None)
        monkeypatch.setattr(driver, "library", lambda: SimpleNamespace(cuLaunchKernelEx=self.entry))
        monkeypatch.setattr(driver, "_describe", lambda _, result: f"CUDA error {result}")
        getters = SimpleNamespace(
            current_device=lambda: self.device, current_stream=lambda device: self.stream, on_device=self._on_device
        )
        monkeypatch.setattr(switches, "known", getters)

    def _launch(self, config: int, function: int, parameters: int, extra: int) -> int:
        assert function == 7
        (stream,) = struct.unpack_from("P", ctypes.string_at(config, 64), launch._STREAM_AT)
        (block,) = struct.unpack("P", ctypes.string_at(parameters, 8))
        self.launches.append((stream, ctypes.string_at(block, 24)))
        return self.result

    @contextlib.contextmanager
    def _on_device(self, device: int) -> Iterator[None]:
        self.entered.append(device)
        before, self.device = self.device, device
        yield
        self.device = before


@pytest.fixture
def noted(monkeypatch: pytest.MonkeyPatch) -> Driver:
    return Driver(monkeypatch)


def make(device: int = 0) -> launch.Call:
    function: Any = SimpleNamespace(device=device, handle=7, variant=VARIANT)
    return launch.Call(function, (1, 1, 1), (32, 1, 1), "3q", [1, 2, 3], "2q")


def test_the_current_stream_at_each_call(noted: Driver) -> None:
    call = make()
    for stream in (0x10, 0x10, 0x20, 0, 0x10):
        noted.stream = stream
        launch.on(call, None, 5, 6)
    launch.on(call, 0x30, 7, 8)
    launch.on(call, None, 9, 10)
    assert [stream for stream, _ in noted.launches] == [0x10, 0x10, 0x20, 0, 0x10, 0x30, 0x10]
    assert struct.unpack("3q", noted.launches[-1][1]) == (9, 10, 3)
    assert noted.entered == []


def test_another_device_is_current_for_the_launch_only(noted: Driver) -> None:
    call = make(device=1)
    for _ in range(2):
        launch.on(call, None, 5, 6)
    assert (noted.entered, noted.device) == ([1, 1], 0)
    noted.device = 1
    launch.on(call, None, 5, 6)
    assert (noted.entered, len(noted.launches)) == ([1, 1], 3)


def test_a_twin_has_its_own_parameters(noted: Driver) -> None:
    call = make(device=1)
    twin = call.bound(7, 8)
    launch.on(call, None, 5, 6)
    noted.device = 1
    launch.again(twin)
    launch.again(call)
    assert [struct.unpack("3q", block) for _, block in noted.launches] == [(5, 6, 3), (7, 8, 3), (5, 6, 3)]


@pytest.mark.parametrize("launches_before", [0, 1, 2])
def test_what_the_driver_refuses_is_an_error_each_time(noted: Driver, launches_before: int) -> None:
    call = make()
    for _ in range(launches_before):
        launch.on(call, None, 5, 6)
    noted.result = 201
    for _ in range(2):
        with pytest.raises(LaunchError, match="launching jitkern_merge_attn_states_f32_p4_d64 on cuda:0"):
            launch.on(call, None, 5, 6)
    noted.result = 0
    launch.on(call, None, 5, 6)
