"""``MLADecode``: attention of a few query tokens over a paged latent cache, for CUDA graphs of fixed capacity."""

from __future__ import annotations

import math
from typing import Any

from jitkern import launch
from jitkern.errors import ArgumentError
from jitkern.ops import (
    checks,
    mla_cache,
    mla_checks,
    mla_geometry,
    mla_launch,
    mla_plan,
    mla_torch,
    mla_validate,
    validate,
)
from jitkern.ops.recent import PerThread

OP = "MLADecode.run"
_OPERANDS = ("out", "lse", "q", "k_cache", "block_table", "cache_seqlens")


class MLADecode:
    """MLA decode with a plan, for up to ``max_batch`` requests of up to ``max_q_len`` query tokens.

    Everything is allocated, compiled and loaded here: later calls never allocate (when outputs are given), never wait
    for the device, and always use the same addresses, so that they can be captured in CUDA graphs. One object serves
    one step at a time; several steps under way at once need an object each.

    Args:
        max_batch: the most requests of a call. More raises before anything runs.
        num_heads, num_heads_k: query heads, KV heads.
        max_q_len: the most query tokens of a request.
        dtype: ``torch.bfloat16`` or ``torch.float16``.
        device: where all tensors are.
        head_dim, head_dim_v: 576 or 512, and 512: the values are the first columns of the keys.
        page_size: tokens of a page, a power of two.
        cache_dtype: what the cache holds: ``None`` for ``dtype``; ``torch.float8_e4m3fn`` for e4m3 codes, all times one
            ``k_scale``; ``"fp8_ds_mla"`` for tokens of 656 bytes: 512 e4m3 codes, four float32 scales, each of 128
            codes, 64 bfloat16.
        empty_lse: L of a row that sees no key: ``+inf`` as FlashMLA has it, or ``-inf`` as merges like it.
        num_parts: workers that share the keys; default: what the device has.
        tuning: how requests are cut.
        pdl: let each kernel start while the one ahead of it ends (programmatic dependent launch); it waits for that one
            before it touches anything. Default: up to 32 rows (query tokens times heads of a KV head) and for the plan.
            Only on Hopper.
        backend: ``auto``, ``nvrtc``, ``nvcc`` or ``cpu``.
    """

    def __init__(
        self,
        max_batch: int,
        num_heads: int,
        num_heads_k: int = 1,
        max_q_len: int = 1,
        dtype: Any = None,
        device: Any = "cuda",
        head_dim: int = 576,
        head_dim_v: int = 512,
        page_size: int = 64,
        *,
        cache_dtype: Any = None,
        empty_lse: float = math.inf,
        num_parts: int | None = None,
        tuning: Any = mla_plan.Tuning,
        pdl: bool | None = None,
        backend: str = "auto",
    ) -> None:
        import torch

        self.max_batch, self.num_heads, self.num_heads_k, self.max_q_len = max_batch, num_heads, num_heads_k, max_q_len
        self.dtype = torch.bfloat16 if dtype is None else dtype
        self.head_dim, self.head_dim_v, self.page_size = head_dim, head_dim_v, page_size
        mla_checks.shape("MLADecode", **vars(self))
        self.cache_dtype = self.dtype if cache_dtype is None else cache_dtype
        self.cache_format = mla_cache.of("MLADecode", cache_dtype, self.dtype, head_dim)
        mla_checks.options("MLADecode", empty_lse, num_parts, pdl)
        self.empty_lse = empty_lse
        self.device = mla_checks.usable_device("MLADecode", device)
        self.backend = checks.backend_for("MLADecode", backend, self.device)
        self._number = checks.device_number(self.device)
        self._sizes = mla_geometry.device_of(self._number)
        self._num_parts = num_parts
        self._pdl = pdl if self._sizes.warpgroups else False
        self._plan = mla_plan.Plan(max_batch, self.parts(1), self.device, tuning, self._pdl is not False)
        rows = max(mla_geometry.partial_rows(self.parts(n)) * n for n in range(1, max_q_len + 1)) * num_heads
        self._partial_out = torch.empty((rows, head_dim_v), dtype=torch.float32, device=self.device)
        self._partial_lse = torch.empty((rows,), dtype=torch.float32, device=self.device)
        self._planned: tuple[int, int, int] | None = None
        self._all_real = False  # whether the plan was made without num_requests
        self._calls: dict[Any, tuple[launch.Call, launch.Call]] = {}
        self._number_in_graphs = mla_torch.register(self)
        mla_launch.load(self)

    def parts(self, q_len: int) -> int:
        """Workers that share the keys when each request has ``q_len`` query tokens."""
        if self._num_parts is not None:
            return self._num_parts
        return mla_geometry.parts(
            q_len * (self.num_heads // self.num_heads_k), self.num_heads_k, self.head_dim, self._sizes
        )

    @property
    def tile_scheduler_metadata(self) -> Any:
        """The plan's records, [parts, 8] int32; the first seven words mean what FlashMLA's do. Always one tensor."""
        return self._plan.records

    @property
    def num_splits(self) -> Any:
        """[max_batch + 1] int32: request i has ``num_splits[i + 1] - num_splits[i]`` pieces. Always the same tensor."""
        return self._plan.num_splits

    def plan(
        self, cache_seqlens: Any, num_requests: Any = None, *, q_len: int | None = None, stream: Any = None
    ) -> int:
        """Make the plan of a step from the lengths on the device, on the caller's stream.

        It may be recorded in the graph of the step, or called before each replay: its buffers keep their addresses, and
        all of them are written each time. Lengths may change afterwards as long as no request goes from 0 to some keys:
        every key is then still attended to once, only the shares are uneven.

        Args:
            cache_seqlens: [batch] int32, each counting the request's query tokens; 0 for a pad.
            num_requests: int32 tensor of one element: rows from this one on are pads, whatever their length.
            q_len: query tokens of a request; default: ``max_q_len``.
            stream: as everywhere.

        Returns:
            The plan's number, which :meth:`run` takes as ``plan`` to make sure that no other came in between.
        """
        import torch

        if torch.compiler.is_compiling():  # what follows cannot be traced; see jitkern/torch_mla.py
            planned_q_len = self.max_q_len if q_len is None else q_len
            torch.ops.jitkern.mla_plan(
                self._plan.storage, cache_seqlens, num_requests, planned_q_len, self._number_in_graphs
            )
            return 0
        op = mla_plan.OP
        mla_checks.lengths(op, cache_seqlens, self.device)
        mla_checks.count(op, num_requests, self.device)
        checks.addresses(op, ("cache_seqlens", "num_requests"), (cache_seqlens, num_requests))
        q_len = self.max_q_len if q_len is None else q_len
        batch = int(cache_seqlens.shape[0])
        self._check_capacity(op, batch, q_len)
        self._plan.make(cache_seqlens, num_requests, self.parts(q_len), stream)
        generation = 1 if self._planned is None else self._planned[2] + 1
        self._planned, self._all_real = (batch, q_len, generation), num_requests is None
        return generation

    def run(
        self,
        q: Any,
        k_cache: Any,
        block_table: Any,
        cache_seqlens: Any,
        softmax_scale: float | None = None,
        causal: bool = False,
        out: Any = None,
        lse: Any = None,
        lse_base: str | float = "e",
        *,
        k_scale: Any = None,
        q_scale: Any = None,
        plan: int | None = None,
        stream: Any = None,
    ) -> tuple[Any, Any]:
        """Attend: ``out`` [batch, q_len, heads, head_dim_v] and ``lse`` [batch, heads, q_len] float32.

        Rows without a visible key get O = 0 and L = ``empty_lse``. Requests beyond the planned batch are pads.

        Args:
            q: [batch, q_len, heads, head_dim], any strides, the last dimension contiguous.
            k_cache: [pages, page_size, KV heads, head_dim], any strides, the last dimension contiguous. 656 uint8 (or
                float8_e4m3fn) instead of head_dim for ``cache_dtype="fp8_ds_mla"``.
            block_table: [batch, columns] int32. Entries behind a request's last page are not read; keys on a page
                outside the cache (-1, say) are masked, as are those beyond the table's columns.
            cache_seqlens: [batch] int32, as planned. A length beyond the table counts as what the table reaches.
            softmax_scale: default ``head_dim ** -0.5``.
            causal: query token t sees the keys before ``length - (q_len - 1 - t)``.
            out, lse: where the results go; any strides with the last dimension of ``out`` contiguous.
            lse_base: base of ``lse``: ``"e"``, ``"2"``, ``"10"`` or a number.
            k_scale, q_scale: float32 tensors of one element, read on the device: what the codes of a float8_e4m3fn
                cache, and ``q``, are to be multiplied with; default 1.
            plan: number of the plan that this run belongs to; a later plan of the same object then raises.
            stream: as everywhere.
        """
        import torch

        if torch.compiler.is_compiling():
            base = checks.lse_base(OP, lse_base)
            checks.no_gradient(OP, q=q, k_cache=k_cache, k_scale=k_scale, q_scale=q_scale)
            traced = (self._plan.storage, q, k_cache, block_table, cache_seqlens, k_scale, q_scale)
            results = torch.ops.jitkern.mla_run(*traced, softmax_scale, causal, base, self._number_in_graphs)
            return mla_torch.copied(OP, results, out, lse)
        checks.flag(OP, "causal", causal)
        mla_checks.operands(OP, self, q, k_cache, block_table, cache_seqlens, out, lse)
        batch, q_len = q.shape[:2]
        self._check_capacity(OP, batch, q_len)
        if k_scale is not None or q_scale is not None:
            mla_cache.scales(OP, self, k_scale, q_scale)
        mla_checks.planned(OP, self._planned, batch, q_len, plan)
        if out is None:
            out = torch.empty((batch, q_len, self.num_heads, self.head_dim_v), dtype=self.dtype, device=self.device)
        if lse is None:
            lse = torch.empty((batch, self.num_heads, q_len), dtype=torch.float32, device=self.device)
        if batch == 0 or q_len == 0:
            return out, lse
        operands = (out, lse, q, k_cache, block_table, cache_seqlens)
        addresses = checks.addresses(OP, _OPERANDS, operands)
        aligned = (addresses[2] | addresses[3]) % 16, addresses[0] % 8
        strides = tuple(operand.stride() for operand in operands[:5])
        scales = tuple([0 if scale is None else scale.data_ptr() for scale in (k_scale, q_scale)])
        sizes = (batch, q_len, k_cache.shape[0], block_table.shape[1])
        # With their types: True is 1.0 to a dictionary. A scale's address belongs to a bound call.
        options = (softmax_scale, type(softmax_scale), causal, lse_base, type(lse_base))
        key = (sizes, strides, aligned, options, scales)
        try:
            calls = self._calls.get(key)
        except checks.ODD:  # cannot be hashed or compared
            calls = None
        if calls is None:
            scale = mla_checks.scale(OP, softmax_scale, self.head_dim)
            base = checks.lse_base(OP, lse_base)
            mla_validate.overlaps(OP, (*operands, k_scale, q_scale))
            calls = self._keep(key, mla_launch.bind(self, operands, scale, bool(causal), base, scales, stream))
        if validate.wanted():
            mla_validate.values(OP, self, (*operands, k_scale, q_scale))
        for call in calls:
            launch.on(call, stream, *addresses)
        launch.wrote(out, lse)
        return out, lse

    def _check_capacity(self, op: str, batch: int, q_len: int) -> None:
        if batch > self.max_batch:
            raise ArgumentError(
                f"{op}: {batch} requests; this object was made for at most {self.max_batch} (max_batch)"
            )
        if type(q_len) is not int or not 0 <= q_len <= self.max_q_len:
            raise ArgumentError(
                f"{op}: {q_len} query tokens a request; this object was made for at most {self.max_q_len} (max_q_len)"
            )

    def _keep(self, key: Any, calls: tuple[launch.Call, launch.Call]) -> tuple[launch.Call, launch.Call]:
        if len(self._calls) >= PerThread.limit:
            self._calls.clear()
        self._calls[key] = calls
        return calls

    def _tile(self, q_len: int) -> mla_geometry.Tile:
        return mla_geometry.tile(q_len * (self.num_heads // self.num_heads_k), self.head_dim, self._sizes)
