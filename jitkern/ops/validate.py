"""``JITKERN_VALIDATE=1``: look at the values as well, on the device, before an op runs.

It costs a merge two passes over the inputs and a synchronisation per call, so it is for finding where a bad value comes
from. What it looks at in MLA decode: jitkern/ops/mla_validate.py.
During the capture of a CUDA graph nothing is looked at, since waiting for the device is illegal there.
"""

from __future__ import annotations

from typing import Any

from jitkern import events, settings
from jitkern.errors import ArgumentError


def wanted() -> bool:
    """Whether values are to be looked at."""
    return settings.get().validate


def capturing() -> bool:
    """Whether a CUDA graph is being captured, so that nothing can be looked at; says so, once."""
    import torch

    if not (torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()):
        return False
    events.warn_once("validate", "JITKERN_VALIDATE: values are not looked at while a CUDA graph is being captured")
    return True


def check_values(
    op: str, pairs: list[tuple[str, Any, str, Any]], scales: dict[str, Any], counts: dict[str, Any]
) -> None:
    """Refuse values that no kernel refuses.

    Args:
        op: the op.
        pairs: (name of O, O [tokens, heads, head size], name of L, L [tokens, heads]).
        scales: by name, one number on the device each, or None: they must be finite and above 0.
        counts: by name, (tensor on the device, the most it may hold), or None.

    Raises:
        ArgumentError: an L is NaN; an O whose L is finite is not finite itself; a scale or a count makes no sense.
    """
    import torch

    if capturing():
        return
    for name, scale in scales.items():
        if scale is not None and not (bool(torch.isfinite(scale).all()) and bool((scale > 0).all())):
            raise ArgumentError(f"{op}: {name} is {scale.flatten().tolist()}; expected a finite number above 0")
    for name, count in counts.items():
        if count is not None and not bool(((count[0] >= 0) & (count[0] <= count[1])).all()):
            raise ArgumentError(f"{op}: {name} is {count[0].flatten().tolist()[:8]}; expected 0 to {count[1]}")
    for value_name, value, lse_name, lse in pairs:
        _refuse(op, lse_name, torch.isnan(lse), "NaN", "[token, head]")
        broken = ~torch.isfinite(value.float()).all(-1) & torch.isfinite(lse)
        _refuse(op, value_name, broken, f"not finite in rows whose {lse_name} is finite,", "[token, head]")


def _refuse(op: str, name: str, wrong: Any, what: str, where: str) -> None:
    if bool(wrong.any()):
        first = wrong.nonzero()[0].tolist()
        raise ArgumentError(f"{op}: {name} is {what} at {int(wrong.sum())} places, the first {where} = {first}")
