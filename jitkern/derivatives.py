"""What autograd wants of a call: the gradient of an operand."""

from __future__ import annotations

from typing import Any


class _Getters:
    """torch's switch, looked up at the first call."""

    def __init__(self) -> None:
        import torch

        self.is_grad_enabled: Any = torch.is_grad_enabled


_getters: _Getters | None = None


def _ask() -> _Getters:
    global _getters
    if _getters is None:
        _getters = _Getters()
    return _getters


def wanted(*operands: Any) -> bool:
    """Whether autograd is on and one of the operands requires a gradient."""
    return bool((_getters or _ask()).is_grad_enabled()) and any(operand.requires_grad for operand in operands)
