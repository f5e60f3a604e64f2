"""Streams: the handle of one that a caller gives, or of torch's current one."""

from __future__ import annotations

from typing import Any

from jitkern import switches
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


def resolve_stream(stream: Any, device: int) -> int:
    """The handle of ``stream``, or of torch's current stream of the device, asked anew at every call."""
    return int(switches.get().current_stream(device)) if stream is None else stream_handle(stream, device)
