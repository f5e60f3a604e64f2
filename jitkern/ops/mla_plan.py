"""The plan of one decode step: its buffers, and the kernel that fills them on the device."""

from __future__ import annotations

from typing import Any

from jitkern import launch, loader, variants
from jitkern.ops import checks
from jitkern.variants import Variant

OP = "MLADecode.plan"
KERNEL = variants.register(variants.Kernel("mla_plan", {}, (("i32", 1, ()),)))
_LAYOUT = "8P10i"  # struct PlanParams of kernels_src/include/mla_plan.cuh
_PATCH = "2P"
_THREADS = 256  # kThreads of kernels_src/include/mla_plan.cuh
RECORD_WORDS = 8
_LARGEST = (1 << 31) - 1  # sum of costs, an i32 of kernels_src/include/mla_plan.cuh


class Tuning:
    """How requests are cut, in blocks of 64 tokens. Changes speed, never results beyond rounding."""

    min_blocks = 1  # no piece of an even cut is shorter
    crumb = 4  # nor one of a level cut, unless its request is
    request_cost = 2  # what starting a request costs beside its blocks
    split_cost = 3  # how much longer the longest part may be before even requests are cut,
    slack = 25  # and by how many per cent


class Plan:
    """Buffers of fixed address, sized for a capacity.

    Attributes:
        records: [parts, 8] int32, a part's share (kernels_src/include/mla_schedule.cuh).
        num_splits: [capacity + 1] int32, prefix sums of the pieces.
        rows, order, split: int32, what the decode and the merge look up.
    """

    def __init__(
        self, capacity: int, parts: int, device: Any, tuning: type[Tuning] | Tuning = Tuning, pdl: bool = False
    ) -> None:
        import torch

        self.capacity, self.parts, self.tuning, self._pdl = capacity, parts, tuning, pdl
        words = {
            "records": parts * RECORD_WORDS,
            "num_splits": capacity + 1,
            "rows": capacity,
            "order": capacity + 1,
            "split": 4 * parts,
            "scratch": 2 * (capacity + 1),
        }
        # One allocation, each buffer on a boundary of 128 bytes.
        places, end = {}, 0
        for name, size in words.items():
            places[name] = (end, size)
            end += -(-size // 32) * 32
        self.storage = torch.full((end,), -1, dtype=torch.int32, device=device)
        views = {name: self.storage[start : start + size] for name, (start, size) in places.items()}
        self.records = views["records"].view(parts, RECORD_WORDS)
        self.num_splits, self.rows, self.order = views["num_splits"], views["rows"], views["order"]
        self.split, self._scratch = views["split"], views["scratch"]
        self._calls: dict[tuple[int, int], launch.Call] = {}
        self._device = checks.device_number(self.storage.device)

    def load(self, backend: str) -> None:
        """Compile and load the kernel, so that a capture finds it ready."""
        variant = Variant(KERNEL.name, "i32", 1, launch.target(self._device), (), backend)
        self._function = loader.get(variant, self._device)

    def make(self, lengths: Any, count: Any, parts: int, stream: Any) -> None:
        """Fill the buffers, all of them, for ``parts`` workers."""
        batch = int(lengths.shape[0])
        call = self._calls.get((batch, parts))
        if call is None:
            call = self._calls[batch, parts] = self._bind(batch, parts)
        launch.on(call, stream, lengths.data_ptr(), 0 if count is None else count.data_ptr())

    def _bind(self, batch: int, parts: int) -> launch.Call:
        tuning = self.tuning
        values = [
            *(0, 0, self.records.data_ptr(), self.num_splits.data_ptr(), self.rows.data_ptr()),
            *(self.order.data_ptr(), self.split.data_ptr(), self._scratch.data_ptr()),
            *(batch, self.capacity, parts, self.parts),
            *(tuning.min_blocks, tuning.crumb, tuning.request_cost, tuning.split_cost, tuning.slack),
            max(_LARGEST // max(batch, 1) - tuning.request_cost, 1),
        ]
        block = (1 if self._device == loader.CPU else _THREADS, 1, 1)
        return launch.Call(self._function, (1, 1, 1), block, _LAYOUT, values, _PATCH, pdl=self._pdl)


def view_addresses(plan: Plan) -> tuple[int, int, int, int, int]:
    """``struct PlanView`` of kernels_src/include/mla_schedule.cuh."""
    views = (plan.records, plan.order, plan.rows, plan.num_splits, plan.split)
    return tuple(view.data_ptr() for view in views)  # type: ignore[return-value]
