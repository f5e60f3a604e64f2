"""Whether two tensors share a byte: exact for strided views, as far as a bounded search gets."""

from __future__ import annotations

from typing import Any

from jitkern.errors import ArgumentError

_MOST_STEPS = 20_000  # views of one buffer, as there are in practice, take a few dozen


def share(x: Any, y: Any) -> bool:
    """Whether a byte belongs to both. What is not decided in so many steps counts as not shared.

    A shared byte is a solution of ``x0 + sum(i_k s_k) + p = y0 + sum(j_k t_k) + q``, with each index below its size and
    p, q below the size of an element: one equation of bounded integers.
    """
    if x.numel() == 0 or y.numel() == 0 or x.device != y.device:
        return False
    terms = {1: (1 - y.element_size(), x.element_size() - 1)}  # stride in bytes: what may be multiplied with it
    for value, sign in ((x, 1), (y, -1)):
        for size, stride in zip(value.shape, value.stride(), strict=True):
            low, high = sorted((0, sign * (size - 1)))
            step = stride * value.element_size()
            if size > 1 and step:
                before = terms.get(step, (0, 0))
                terms[step] = before[0] + low, before[1] + high
    return _solvable(y.data_ptr() - x.data_ptr(), sorted(terms.items(), reverse=True), [_MOST_STEPS])


def _span(x: Any) -> tuple[int, int]:
    """Where a tensor begins, and where it ends."""
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    start = int(x.data_ptr())
    return start, start + int(reach + 1) * int(x.element_size())


def _solvable(wanted: int, terms: list[tuple[int, tuple[int, int]]], steps: list[int]) -> bool:
    """Whether ``wanted`` is a sum of one multiple of each term, the largest stride first."""
    (step, (low, high)), *rest = terms
    if not rest:  # the stride of one byte
        return low <= wanted <= high
    least = sum(other * bounds[0] for other, bounds in rest)
    most = sum(other * bounds[1] for other, bounds in rest)
    for count in range(max(low, -((most - wanted) // step)), min(high, (wanted - least) // step) + 1):
        steps[0] -= 1
        if steps[0] < 0:
            return False
        if _solvable(wanted - count * step, rest, steps):
            return True
    return False


def refuse(op: str, outputs: dict[str, Any], inputs: dict[str, Any], allowed: set[tuple[str, str]]) -> None:
    """Refuse outputs that share bytes with one another or with an input.

    Args:
        op: the op.
        outputs, inputs: by name; None is none.
        allowed: pairs (output, input) that may, since no element is written before it has been read.
    """
    named = {name: x for name, x in {**outputs, **inputs}.items() if x is not None and x.numel()}
    spans = {name: _span(x) for name, x in named.items()}
    written = [name for name in outputs if name in spans]
    for i, name in enumerate(written):
        for other in (*written[i + 1 :], *(n for n in inputs if n in spans)):
            if (name, other) in allowed or spans[name][0] >= spans[other][1] or spans[other][0] >= spans[name][1]:
                continue
            x, y = named[name], named[other]
            if share(x, y):
                raise ArgumentError(
                    f"{op}: {name} (shape {list(x.shape)}, strides {list(x.stride())}) shares memory with {other}"
                    f" ({list(y.shape)}, {list(y.stride())}); an output may be an input as the same view of it, and"
                    " nothing else: make one of them a copy"
                )


def same_view(x: Any, y: Any) -> bool:
    """Whether two tensors are the same elements in the same order."""
    if x is None or y is None or x.data_ptr() != y.data_ptr() or x.dtype != y.dtype or x.shape != y.shape:
        return False
    return all(a == b for a, b, size in zip(x.stride(), y.stride(), x.shape, strict=True) if size > 1)
