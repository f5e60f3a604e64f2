"""What autograd may want of a call: the gradient of an operand, or its forward-mode tangent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


class Getters:
    """torch's switches, and what counts tensors as changed in place."""

    def __init__(self) -> None:
        import torch
        import torch.autograd.forward_ad as forward_ad

        self.is_grad_enabled: Any = torch.is_grad_enabled
        self.forward_ad: Any = forward_ad
        self.tensor: Any = torch.Tensor
        self.increment: Any = _increment()


def _increment() -> Any:
    """What counts tensors as changed, as ``torch.autograd.graph.increment_version`` does in twice the time."""
    import torch

    found: Any = getattr(torch._C, "_increment_version", None)
    try:
        found(())
    except TypeError:  # it is missing, or that of a torch where it takes a single tensor
        return lambda tensors: [torch.autograd.graph.increment_version(x) for x in tensors]  # type: ignore[func-returns-value]
    return found


torch_getters: Getters | None = None


def getters() -> Getters:
    """The switches, looked up at the first call."""
    global torch_getters
    if torch_getters is None:
        torch_getters = Getters()
    return torch_getters


def gradient_wanted(*operands: Any) -> bool:
    """Whether autograd is on and one of the operands requires a gradient."""
    if (torch_getters or getters()).is_grad_enabled():
        for operand in operands:  # a generator in any() would cost more than all the rest
            if operand.requires_grad:
                return True
    return False


def wanted(*operands: Any) -> bool:
    """Whether operands may have to be refused: a gradient is wanted, or forward mode is on, whoever has a tangent."""
    return (torch_getters or getters()).forward_ad._current_level >= 0 or gradient_wanted(*operands)


def with_tangent(operands: Mapping[str, Any]) -> list[str]:
    """The names of those that carry a forward-mode tangent; almost free outside of ``forward_ad.dual_level()``."""
    ask = torch_getters or getters()
    if ask.forward_ad._current_level < 0:
        return []
    tensors = {name: x for name, x in operands.items() if isinstance(x, ask.tensor)}
    return [name for name, x in tensors.items() if ask.forward_ad.unpack_dual(x).tangent is not None]
