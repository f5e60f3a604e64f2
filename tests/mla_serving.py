"""A serving engine in small: requests join, grow by one token a step, finish; pages come from a free list."""

from __future__ import annotations

import math
import random

import torch

from tests.mla_oracle import GARBAGE_PAGE, Step


class Engine:
    """Keeps buffers of fixed address for `capacity` requests and rewrites them in place at each step."""

    def __init__(
        self,
        capacity: int,
        heads: int,
        q_len: int = 1,
        page_size: int = 16,
        pages: int = 160,
        columns: int = 12,
        device: str = "cpu",
        seed: int = 0,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.capacity, self.page_size, self.columns, self.q_len = capacity, page_size, columns, q_len
        cache = torch.full((pages, page_size, 1, 576), math.nan, dtype=dtype)
        self.step = Step(
            torch.zeros(capacity, q_len, heads, 576, dtype=dtype, device=device),
            cache.to(device),
            torch.full((capacity, columns), GARBAGE_PAGE, dtype=torch.int32, device=device),
            torch.zeros(capacity, dtype=torch.int32, device=device),
        )
        self.count = torch.zeros(1, dtype=torch.int32, device=device)
        self.free = list(range(1, pages))  # page 0 is where pads point
        self.requests: list[tuple[list[int], int]] = []  # (pages, length)

    def _write(self, pages: list[int], first: int, last: int) -> None:
        for token in range(first, last):
            row = torch.randn(576, generator=self.generator).mul_(0.1)
            page, slot = pages[token // self.page_size], token % self.page_size
            self.step.k_cache[page, slot, 0] = row.to(self.step.k_cache.dtype)

    def _grow(self, pages: list[int], length: int, more: int) -> int | None:
        longer = length + more
        while len(pages) * self.page_size < longer:
            if not self.free or len(pages) == self.columns:
                return None
            pages.append(self.free.pop(self.random.randrange(len(self.free))))
        self._write(pages, length, longer)
        return longer

    def _finish(self, pages: list[int]) -> None:
        for page in pages:
            self.step.k_cache[page] = math.nan  # whoever still reads it will show it
        self.free += pages

    def advance(self) -> None:
        """One step of the scheduler: finish some, grow all, let some join; now and then a dummy step."""
        dummy = self.random.random() < 0.08
        going: list[tuple[list[int], int]] = []
        for pages, length in self.requests:
            longer = None if self.random.random() < 0.06 else self._grow(pages, length, self.q_len)
            if longer is None or (dummy and self.random.random() < 0.9):
                self._finish(pages)
            else:
                going.append((pages, longer))
        while not dummy and len(going) < self.capacity and self.random.random() < 0.55:
            mine: list[int] = []
            joined = self._grow(mine, 0, self.random.choice([self.q_len, 1, 15, 16, 17, 40, 100, 150]))
            if joined is None:
                self._finish(mine)
                break
            going.append((mine, joined))
        self.requests = going
        self._publish()

    def _publish(self) -> None:
        """What the engine copies into the buffers that graphs know: requests, and anything at all behind them."""
        table = torch.full(self.step.block_table.shape, self.random.choice([GARBAGE_PAGE, -1, 0]), dtype=torch.int32)
        lengths = torch.full((self.capacity,), self.random.choice([0, 1, 7]), dtype=torch.int32)
        for i, (pages, length) in enumerate(self.requests):
            table[i, : len(pages)] = torch.tensor(pages, dtype=torch.int32)
            lengths[i] = length
        self.step.block_table.copy_(table)
        self.step.cache_seqlens.copy_(lengths)
        self.count.fill_(len(self.requests))
        q = torch.randn(self.step.q.shape, generator=self.generator)
        self.step.q.copy_(q.to(self.step.q.dtype))

    def truth(self, rows: int) -> Step:
        """The step as it is meant: pads have no keys."""
        lengths = self.step.cache_seqlens[:rows].clone()
        lengths[len(self.requests) :] = 0
        return Step(self.step.q[:rows], self.step.k_cache, self.step.block_table[:rows], lengths)
