"""What autograd may want of a call: the gradient of an operand, or its forward-mode tangent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jitkern import switches


def gradient_wanted(*operands: Any) -> bool:
    """Whether autograd is on and one of the operands requires a gradient."""
    if (switches.known or switches.get()).is_grad_enabled():
        for operand in operands:  # a generator in any() would cost more than all the rest
            if operand.requires_grad:
                return True
    return False


def wanted(*operands: Any) -> bool:
    """Whether operands may have to be refused: a gradient is wanted, or forward mode is on, whoever has a tangent."""
    return (switches.known or switches.get()).forward_ad._current_level >= 0 or gradient_wanted(*operands)


def with_tangent(operands: Mapping[str, Any]) -> list[str]:
    """The names of those that carry a forward-mode tangent; almost free outside of ``forward_ad.dual_level()``."""
    ask = switches.known or switches.get()
    if ask.forward_ad._current_level < 0:
        return []
    tensors = {name: x for name, x in operands.items() if isinstance(x, ask.tensor)}
    return [name for name, x in tensors.items() if ask.forward_ad.unpack_dual(x).tangent is not None]
