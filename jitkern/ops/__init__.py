"""The ops, one public one a module: check, choose the variant, make outputs, launch."""

from __future__ import annotations

import importlib

_WITH_KERNELS = ("kernels", "mla_plan", "mla_launch")


def register_all() -> None:
    """Import every module that makes a kernel known to warm-up and the command line; none of them needs torch."""
    for name in _WITH_KERNELS:
        importlib.import_module(f"jitkern.ops.{name}")
