"""``jitkern.Kernel``: the engine under the shipped ops, open to your own CUDA text."""

from __future__ import annotations

from jitkern.kernel.api import Kernel
from jitkern.kernel.arguments import Scalar, Tensor
from jitkern.kernel.holes import cdiv
from jitkern.kernel.measure import Bench

__all__ = ["Bench", "Kernel", "Scalar", "Tensor", "cdiv"]
