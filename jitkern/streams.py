"""Streams: the handle of one that a caller gives, and torch's current device and stream by their quickest getters."""

from __future__ import annotations

from typing import Any

from jitkern.errors import ArgumentError


def stream_handle(stream: Any, device: int) -> int:
    """The raw handle of a stream: an int as it is (0 too), a torch or CuPy stream, anything with ``__cuda_stream__``.

    Raises:
        ArgumentError: it is none of these, or belongs to another device.
    """
    if isinstance(stream, int) and not isinstance(stream, bool):
        return stream
    owner = getattr(getattr(stream, "device", None), "index", None)
    if owner is not None and owner != device:
        raise ArgumentError(
            f"stream= belongs to cuda:{owner}, the tensors to cuda:{device}; pass a stream of their device"
        )
    for name in ("cuda_stream", "ptr"):
        handle = getattr(stream, name, None)
        if isinstance(handle, int):
            return handle
    protocol = getattr(stream, "__cuda_stream__", None)
    if protocol is not None:
        return int((protocol() if callable(protocol) else protocol)[1])
    raise ArgumentError(f"stream={stream!r}: expected a torch.cuda.Stream, a CuPy stream, an int handle or None")


class Getters:
    """torch's current device and stream by their quickest getters, looked up at the first launch."""

    def __init__(self) -> None:
        import torch

        private = torch._C
        self.current_device: Any = getattr(private, "_cuda_getDevice", None) or torch.cuda.current_device
        self.current_stream: Any = getattr(private, "_cuda_getCurrentRawStream", None) or (
            lambda device: torch.cuda.current_stream(device).cuda_stream
        )
        self.on_device: Any = torch.cuda.device


torch_getters: Getters | None = None


def getters() -> Getters:
    """The getters, made at the first call."""
    global torch_getters
    if torch_getters is None:
        torch_getters = Getters()
    return torch_getters


def resolve_stream(stream: Any, device: int) -> int:
    """The handle of ``stream``, or of torch's current stream of the device, asked anew at every call."""
    return int(getters().current_stream(device)) if stream is None else stream_handle(stream, device)
