"""What some peers do to a log-sum-exp before they read it."""

from __future__ import annotations

from typing import Any

import torch


def to_float32(s: Any, v: Any) -> Any:
    """A floating-point ``s`` as float32 (float64 beside a ``v`` of float64); anything else as it is, to be refused."""
    if not isinstance(s, torch.Tensor) or not s.is_floating_point():
        return s
    return s.to(torch.float64 if getattr(v, "dtype", None) == torch.float64 else torch.float32)
