"""GPU attention kernels with no build step: CUDA text, compiled at first use, cached, launched on your own stream.

Importing this package makes no file, opens no device and imports neither torch nor CuPy; the ops do, at first use.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from jitkern.version import __version__

if TYPE_CHECKING:
    from jitkern.binaries import freeze, thaw
    from jitkern.errors import (
        ArgumentError,
        CacheError,
        CaptureError,
        CompileError,
        JitkernError,
        LaunchError,
        MissError,
        SettingError,
        ToolchainError,
        UnsupportedError,
    )
    from jitkern.events import Event, Stats, listen, stats
    from jitkern.kernel import Kernel, Scalar, Tensor
    from jitkern.ops.merge import merge_attn_states
    from jitkern.ops.mla import MLADecode
    from jitkern.ops.nway import merge_states
    from jitkern.ops.state import merge_state, merge_state_in_place
    from jitkern.prepared import Prepared, prepare
    from jitkern.warm import warmup

# Public name -> module. Ops come with their torch registration, which torch.compile needs.
_HOMES = {
    **dict.fromkeys(
        (
            "ArgumentError",
            "CacheError",
            "CaptureError",
            "CompileError",
            "JitkernError",
            "LaunchError",
            "MissError",
            "SettingError",
            "ToolchainError",
            "UnsupportedError",
        ),
        "jitkern.errors",
    ),
    **dict.fromkeys(("freeze", "thaw"), "jitkern.binaries"),
    **dict.fromkeys(("Event", "Stats", "listen", "stats"), "jitkern.events"),
    **dict.fromkeys(("merge_attn_states", "merge_state", "merge_state_in_place", "merge_states"), "jitkern.torch_ops"),
    **dict.fromkeys(("Prepared", "prepare"), "jitkern.prepared"),
    **dict.fromkeys(("Kernel", "Scalar", "Tensor"), "jitkern.kernel"),
    "load_ipython_extension": "jitkern.notebook",
    "MLADecode": "jitkern.torch_mla",
    "warmup": "jitkern.warm",
}

__all__ = [
    "ArgumentError",
    "CacheError",
    "CaptureError",
    "CompileError",
    "Event",
    "JitkernError",
    "Kernel",
    "LaunchError",
    "MLADecode",
    "MissError",
    "Prepared",
    "Scalar",
    "SettingError",
    "Stats",
    "Tensor",
    "ToolchainError",
    "UnsupportedError",
    "__version__",
    "freeze",
    "listen",
    "merge_attn_states",
    "merge_state",
    "merge_state_in_place",
    "merge_states",
    "prepare",
    "stats",
    "thaw",
    "warmup",
]


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'jitkern' has no attribute {name!r}")
    try:
        value = getattr(importlib.import_module(home), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from jitkern.errors import ToolchainError

        raise ToolchainError(f"jitkern.{name} needs torch, which is not installed. Run: pip install torch") from None
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
