"""What every launch asks torch, by the quickest ways. Looked up at the first call, so that no import brings torch."""

from __future__ import annotations

from typing import Any


class Switches:
    """torch's current device and stream, its autograd modes, and what counts tensors as changed in place."""

    def __init__(self) -> None:
        import torch
        import torch.autograd.forward_ad as forward_ad

        private = torch._C
        self.current_device: Any = getattr(private, "_cuda_getDevice", None) or torch.cuda.current_device
        self.current_stream: Any = getattr(private, "_cuda_getCurrentRawStream", None) or (
            lambda device: torch.cuda.current_stream(device).cuda_stream
        )
        self.on_device: Any = torch.cuda.device
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


known: Switches | None = None  # `known or get()` saves a call


def get() -> Switches:
    """The switches, made at the first call."""
    global known
    if known is None:
        known = Switches()
    return known
