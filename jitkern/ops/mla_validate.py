"""What a run of MLA decode looks at beyond shapes: shared memory, and with ``JITKERN_VALIDATE=1`` values.

With it every run waits for the device a few times, for the scales, the lengths and the plan. Keys are not read.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from jitkern.errors import ArgumentError
from jitkern.ops import overlap, validate

if TYPE_CHECKING:
    from jitkern.ops.mla import MLADecode

_NAMES = ("out", "lse", "q", "k_cache", "block_table", "cache_seqlens", "k_scale", "q_scale")
_EMPTY = -2  # kEmpty of kernels_src/include/mla_schedule.cuh


def overlaps(op: str, operands: tuple[Any, ...]) -> None:
    """Refuse results that share memory with each other or with anything that is read."""
    inputs = dict(zip(_NAMES, operands, strict=True))
    overlap.refuse(op, {name: inputs.pop(name) for name in ("out", "lse")}, inputs, set())


def values(op: str, made: MLADecode, operands: tuple[Any, ...]) -> None:
    """Refuse scales and lengths that the kernels take without a word, and what :func:`overlaps` refuses.

    Raises:
        ArgumentError: a scale is not a finite number above 0; a request is longer than its row of the block table; a
            request had no keys when the plan was made, which left its rows out, and has some now.
    """
    overlaps(op, operands)
    if validate.capturing():
        return
    table, lengths, k_scale, q_scale = operands[4:]
    validate.check_values(op, [], {"k_scale": k_scale, "q_scale": q_scale}, {})
    planned = made._plan.rows[: lengths.shape[0]] != _EMPTY
    reach = int(table.shape[1]) * made.page_size
    _refuse(
        op, lengths, planned & (lengths > reach), f"the block table reaches {reach}; keys beyond it would be left out"
    )
    if made._all_real and made._planned is not None:
        late = ~planned & (lengths > 0)
        late[made._planned[0] :] = False
        _refuse(op, lengths, late, "the plan was made when it had no keys; plan again")


def _refuse(op: str, lengths: Any, wrong: Any, why: str) -> None:
    if bool(wrong.any()):
        first = int(wrong.nonzero()[0])
        raise ArgumentError(f"{op}: cache_seqlens[{first}] is {int(lengths[first])}, but {why}")
