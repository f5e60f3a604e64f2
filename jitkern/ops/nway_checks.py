"""The operands of an N-way merge: their arrangement, and what is refused before anything runs."""

from __future__ import annotations

from typing import Any

import torch

from jitkern.errors import ArgumentError
from jitkern.ops import checks, overlap

_KINDS = (torch.float32, torch.float16, torch.bfloat16)


class Inputs:
    """Partials in one of three arrangements, with the outputs.

    Attributes:
        values, logs: the tensors; one of each where they are stacked or ragged.
        listed: how many tensors ``values`` has.
        is_list: whether they came as a list.
    """

    def __init__(self, v: Any, s: Any, sink: Any, num_valid: Any, indptr: Any, out: Any, out_lse: Any) -> None:
        self.is_list = isinstance(v, list | tuple)
        self.values: list[Any] = list(v) if self.is_list else [v]
        self.logs: list[Any] = list(s) if isinstance(s, list | tuple) else [s]
        self.sink, self.num_valid, self.indptr = sink, num_valid, indptr
        self.out, self.out_lse = out, out_lse
        self.listed = len(self.values)

    @property
    def count(self) -> int:
        """Partials of a token at most; ragged: rows of the stack."""
        if self.is_list:
            return self.listed
        return int(self.values[0].shape[0 if self.indptr is not None else 1])

    @property
    def out_shape(self) -> tuple[int, int, int]:
        """[tokens, heads, head size] of the result."""
        *_, heads, d = self.values[0].shape
        tokens = self.values[0].shape[0] if self.indptr is None else self.indptr.shape[0] - 1
        return int(tokens), int(heads), int(d)

    def with_outputs(self) -> Inputs:
        """The same with outputs allocated where there are none."""
        first, log = self.values[0], self.logs[0]
        out = first.new_empty(self.out_shape) if self.out is None else self.out
        out_lse = log.new_empty(self.out_shape[:2]) if self.out_lse is None else self.out_lse
        inputs = Inputs(self.values, self.logs, self.sink, self.num_valid, self.indptr, out, out_lse)
        inputs.is_list = self.is_list
        return inputs

    def pair(self) -> tuple[Any, Any, Any, Any] | None:
        """(v0, s0, v1, s1) of exactly two partials with nothing else to them, else None. Nothing is checked."""
        if self.sink is not None or self.num_valid is not None or self.indptr is not None:
            return None
        try:
            if self.is_list:
                (a, b), (a_lse, b_lse) = self.values, self.logs
            elif self.values[0].dim() == 4 and self.logs[0].dim() == 3:
                (a, b), (a_lse, b_lse) = self.values[0].unbind(1), self.logs[0].unbind(1)
            else:
                return None
        except checks.ODD:  # not two, or no tensors
            return None
        return a, a_lse, b, b_lse

    def outputs_and_inputs(self) -> list[Any]:
        """All that can have a derivative."""
        return [x for x in (*self.values, *self.logs, self.sink, self.out, self.out_lse) if x is not None]

    def addresses(self) -> tuple[int, ...]:
        """In the parameter block's order: values, logs, out, out_lse, sink, num_valid, indptr."""
        optional = (self.out, self.out_lse, self.sink, self.num_valid, self.indptr)
        return (
            *(x.data_ptr() for x in self.values),
            *(x.data_ptr() for x in self.logs),
            *(0 if x is None else x.data_ptr() for x in optional),
        )

    def signature(self, addresses: tuple[int, ...]) -> tuple[Any, ...]:
        """What a bound call depends on beside the addresses."""
        operands = (*self.values, *self.logs, self.out, self.out_lse, self.sink, self.num_valid, self.indptr)
        alignment = addresses[2 * self.listed]
        for address in addresses[: self.listed]:
            alignment |= address
        return (
            self.is_list,
            alignment & 15,
            self.shares_lse(),
            self.overlap(),
            addresses.count(0),  # more than the bound call's: one has no memory of its own
            *(None if x is None else (x.shape, x.stride(), x.dtype, x.device, x.is_neg()) for x in operands),
        )

    def shares_lse(self) -> bool:
        """Whether the result's L may overwrite an input's."""
        address = self.out_lse.data_ptr()
        reach = [(x.data_ptr(), x.data_ptr() + _extent(x)) for x in self.logs]
        return any(start <= address < end for start, end in reach)

    def overlap(self) -> int | tuple[bool, ...] | None:
        """How ``out`` lies in the partials: bytes behind a stack's start, or which of a list start where it does."""
        if self.out is None:
            return None
        address = self.out.data_ptr()
        if self.is_list:
            starts = tuple(address == x.data_ptr() for x in self.values)
            return starts if True in starts and address else None
        behind = int(address - self.values[0].data_ptr())
        return behind if 0 <= behind < _extent(self.values[0]) else None

    def alike(self) -> bool:
        """Whether every token has all partials, and all tensors of a list have the strides of the first."""
        if self.num_valid is not None or self.indptr is not None:
            return False
        v, s = self.values[0].stride(), self.logs[0].stride()
        return all(x.stride() == v for x in self.values) and all(x.stride() == s for x in self.logs)

    def row_strides(self, room: int) -> list[int]:
        """v_partial, s_partial, partials, then (token, head) strides of v and of s, padded to ``room`` tensors.

        Of a list with no room (0): those of the first, which are those of all.
        """
        if self.is_list and not room:
            return [0, 0, self.listed, *self.values[0].stride()[:2], *self.logs[0].stride()]
        padding = [0, 0] * (room - self.listed)
        if self.is_list:
            v = [stride for x in self.values for stride in x.stride()[:2]]
            s = [stride for x in self.logs for stride in x.stride()]
            return [0, 0, self.listed, *v, *padding, *s, *padding]
        v, s = list(self.values[0].stride()), list(self.logs[0].stride())
        if self.indptr is not None:
            return [v[0], s[0], self.count, 0, v[1], 0, s[1]]
        return [v[1], s[1], self.count, v[0], v[2], s[0], s[2]]


def _extent(x: Any) -> int:
    """Bytes from a tensor's first to behind its last element."""
    if x.numel() == 0:
        return 0
    reach = sum((n - 1) * stride for n, stride in zip(x.shape, x.stride(), strict=True))
    return int(reach + 1) * int(x.element_size())


def check(op: str, inputs: Inputs) -> None:
    """Refuse what the kernel cannot take."""
    if not inputs.values or len(inputs.values) != len(inputs.logs):
        raise ArgumentError(
            f"{op}: {len(inputs.values)} tensors of v and {len(inputs.logs)} of s; expected as many, at least one"
        )
    if inputs.is_list and inputs.indptr is not None:
        raise ArgumentError(
            f"{op}: a list of partials and indptr are given; indptr goes with one tensor [rows, heads, head size]"
        )
    if inputs.num_valid is not None and inputs.indptr is not None:
        raise ArgumentError(
            f"{op}: both num_valid and indptr are given; indptr alone says how many partials a token has"
        )
    stacked = not inputs.is_list and inputs.indptr is None
    layout = "[tokens, N, heads, head size]" if stacked else "[tokens, heads, head size]"
    first = inputs.values[0]
    for i, (value, log) in enumerate(zip(inputs.values, inputs.logs, strict=True)):
        at = f"[{i}]" if inputs.is_list else ""
        checks.tensor(op, f"v{at}", value, 4 if stacked else 3, layout)
        checks.tensor(op, f"s{at}", log, 3 if stacked else 2, layout.replace(", head size", ""))
        checks.same_shape(op, f"v{at}", value, tuple(first.shape), layout, "the first")
        checks.same_shape(op, f"s{at}", log, tuple(value.shape[:-1]), "v's shape without the head size", f"v{at}")
        checks.last_stride_one(op, f"v{at}", value)
        checks.dtype(op, f"v{at}", value, *(_KINDS if value.device.type != "cpu" else (*_KINDS, torch.float64)))
        checks.dtype(op, f"v{at}", value, first.dtype)
        checks.dtype(op, f"s{at}", log, torch.float64 if value.dtype == torch.float64 else torch.float32)
    if inputs.indptr is not None:
        checks.tensor(op, "indptr", inputs.indptr, 1, "[tokens + 1]")
        if inputs.indptr.shape[0] == 0:
            raise ArgumentError(f"{op}: indptr is empty; expected [tokens + 1], at least one number")
    _check_outputs(op, inputs)
    named = {f"v{i}": x for i, x in enumerate(inputs.values)} | {f"s{i}": x for i, x in enumerate(inputs.logs)}
    device = checks.same_device(op, **named, out=inputs.out, out_lse=inputs.out_lse)
    checks.memory(op, **named, out=inputs.out, out_lse=inputs.out_lse)
    tokens, heads, _ = inputs.out_shape
    vectors = (("sink", inputs.sink, heads, torch.float32), ("num_valid", inputs.num_valid, tokens, torch.int32))
    for name, value, length, kind in (*vectors, ("indptr", inputs.indptr, tokens + 1, torch.int32)):
        if value is not None:
            checks.vector(op, name, value, length, device, kind)
    if max(tokens, heads, inputs.count) >= 1 << 31:
        raise ArgumentError(
            f"{op}: {tokens} tokens, {heads} heads, {inputs.count} partials; less than 2^31 of each are allowed"
        )
    checks.no_gradient(op, **named, out=inputs.out, out_lse=inputs.out_lse, sink=inputs.sink)
    if inputs.overlap() is not None:
        _check_alias(op, inputs)
    check_overlaps(op, inputs)


def check_overlaps(op: str, inputs: Inputs) -> None:
    """Outputs share no memory with anything, unless one is a partial as the same view of it."""
    outputs = {"out": inputs.out, "out_lse": inputs.out_lse}
    values = {f"v{i}": x for i, x in enumerate(inputs.values)}
    logs = {f"s{i}": x for i, x in enumerate(inputs.logs)}
    further = {"sink": inputs.sink, "num_valid": inputs.num_valid, "indptr": inputs.indptr}
    same = set()
    for output_name, group in (("out", values), ("out_lse", logs)):
        for name, x in group.items():
            if inputs.indptr is None and _is_partial(outputs[output_name], x, stacked=not inputs.is_list):
                same.add((output_name, name))
    overlap.refuse(op, outputs, {**values, **logs, **further}, same)


def _is_partial(output: Any, x: Any, stacked: bool) -> bool:
    if output is None or not stacked or x.numel() == 0:
        return overlap.same_view(output, x)
    step = x.stride(1) * x.element_size()
    number, between = divmod(output.data_ptr() - x.data_ptr(), step) if step else (0, 0)
    return between == 0 and 0 <= number < x.shape[1] and overlap.same_view(output, x[:, number])


def _check_alias(op: str, inputs: Inputs) -> None:
    """``out`` may be a partial, as the same view of it: then no row is written before it has been read."""
    first, found = inputs.values[0], inputs.overlap()
    if isinstance(found, tuple):
        same = all(x.stride() == inputs.out.stride() for x, is_out in zip(inputs.values, found, strict=True) if is_out)
    elif inputs.indptr is not None or found is None:
        same = False
    else:
        step = max(first.stride(1), 1) * first.element_size()
        between = found % step != 0 or found // step >= first.shape[1]  # in a gap of v, as far as one can tell
        same = between or (first.stride(0), first.stride(2)) == inputs.out.stride()[:2]
    if not same:
        raise ArgumentError(
            f"{op}: out lies in v, with strides {list(inputs.out.stride())} beside {list(first.stride())};"
            " it may be a partial of a stack or list only as the same view of it, and not of a ragged one"
        )


def _check_outputs(op: str, inputs: Inputs) -> None:
    if inputs.out is not None:
        checks.tensor(op, "out", inputs.out, 3, "[tokens, heads, head size]")
        checks.same_shape(op, "out", inputs.out, inputs.out_shape, "[tokens, heads, head size]", "v")
        checks.dtype(op, "out", inputs.out, inputs.values[0].dtype)
        checks.last_stride_one(op, "out", inputs.out)
        checks.writable(op, "out", inputs.out)
    if inputs.out_lse is not None:
        checks.tensor(op, "out_lse", inputs.out_lse, 2, "[tokens, heads]")
        checks.same_shape(op, "out_lse", inputs.out_lse, inputs.out_shape[:2], "[tokens, heads]", "v")
        checks.dtype(op, "out_lse", inputs.out_lse, inputs.logs[0].dtype)
        checks.writable(op, "out_lse", inputs.out_lse)
