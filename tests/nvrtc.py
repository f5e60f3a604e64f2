"""Whether NVRTC is installed, for tests that compile for a GPU without one."""

from __future__ import annotations

import pytest

from jitkern import toolchain
from jitkern.errors import ToolchainError


def has_nvrtc() -> bool:
    try:
        toolchain.nvrtc()
    except ToolchainError:
        return False
    return True


def nvrtc_or_skip() -> None:
    try:
        toolchain.nvrtc()
    except ToolchainError as error:
        pytest.skip(str(error))
