"""The MLA decodes that are compared: each binds a problem, and says how to plan, to decode, and to do both."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from jitkern import bench
from jitkern.benches.mla_problem import CODE_SCALE, DV, PAGE, SCALE, D, Problem, codes_of, tokens_of
from jitkern.ops.mla import MLADecode
from jitkern.ops.mla_plan import Tuning

# vLLM's bound under CUDA graphs. FlashAttention sizes its partial results by it, so a capture has to fix one.
_FA3_SPLITS_IN_GRAPHS = 32


@dataclass(frozen=True)
class Decode:
    """One implementation bound to one problem.

    Attributes:
        run: decode a turn with the plan that is ready; returns O, and nothing else: what it returns is kept.
        step: plan, then decode, as a serving step does; None where nothing is planned.
        plan: the plan alone; None where it cannot be had alone.
        note: what is worth knowing of the row, such as a configuration that was chosen.
    """

    run: Callable[[int], Any]
    step: Callable[[int], Any] | None = None
    plan: Callable[[], Any] | None = None
    note: str = ""


def jitkern(problem: Problem, tuning: Any = Tuning, pdl: bool | None = None, cache_dtype: Any = None) -> Decode:
    """This package."""
    batch, _, heads, q_len = problem.shape
    device, k_scale, cache = problem.cache.device, None, problem.cache
    if cache_dtype == torch.float8_e4m3fn:
        cache, k_scale = codes_of(cache), torch.full((1,), CODE_SCALE, device=device)
    elif cache_dtype is not None:
        cache = tokens_of(cache)
    sizes = (batch, heads, 1, q_len, torch.bfloat16, device, D, DV, PAGE)
    decode = MLADecode(*sizes, tuning=tuning, pdl=pdl, cache_dtype=cache_dtype)

    def plan() -> Any:
        return decode.plan(problem.lengths)

    def run(i: int) -> Any:
        operands = (problem.q[i], cache, problem.tables[i], problem.lengths)
        return decode.run(*operands, None, problem.causal, problem.out[i], problem.lse[i], k_scale=k_scale)[0]

    return Decode(run, lambda i: (plan(), run(i))[1], plan)


@functools.cache
def _library(variable: str, what: str) -> None:
    """Load the op library that an environment variable names."""
    path = os.environ.get(variable)
    if not path:
        raise ImportError(f"{variable} is not set; it names {what}")
    torch.ops.load_library(path)


def flashmla(problem: Problem) -> Decode:
    """FlashMLA's dense kernel, as sglang ships it. Without a plan, the op makes one."""
    _library("FLASHMLA_OPS", "sglang-kernel's flashmla_ops.abi3.so")
    op = torch.ops.sgl_kernel.dense_decode_fwd.default

    def call(i: int, metadata: Any = None, splits: Any = None) -> Any:
        operands = (problem.q[i], problem.cache, DV, problem.lengths, problem.tables[i])
        return op(*operands, SCALE, problem.causal, metadata, splits)

    *_, metadata, splits = call(0)
    return Decode(lambda i: call(i, metadata, splits)[0], lambda i: call(i)[0])


def by_name(op: Any, **given: Any) -> Callable[..., Any]:
    """An op whose arguments are given by name, ``given`` once for all; what nobody gives is None.

    The order of these ops' arguments changes between versions, their schema tells it.
    """
    names = [argument.name for argument in op._schema.arguments]

    def call(**more: Any) -> Any:
        values = given | more
        if unknown := values.keys() - set(names):
            raise AttributeError(f"{op} has no argument {', '.join(sorted(unknown))}")
        return op(*(values.get(name) for name in names))

    return call


def fa3(problem: Problem, num_splits: int = _FA3_SPLITS_IN_GRAPHS) -> Decode:
    """FlashAttention-3 as vLLM ships it: the 64 rotary columns as q and k, the 512 latent ones as q_v and v."""
    _library("FA3_OPS", "vLLM's vllm_flash_attn/_vllm_fa3_C.abi3.so")
    ops = torch.ops._vllm_fa3_C
    batch, keys, heads, q_len = problem.shape
    starts = torch.arange(0, (batch + 1) * q_len, q_len, dtype=torch.int32, device=problem.cache.device)
    shared = {"max_seqlen_q": q_len, "max_seqlen_k": keys, "seqused_k": problem.lengths, "cu_seqlens_q": starts}
    shared |= {"is_causal": problem.causal, "window_size_left": -1, "window_size_right": -1}
    shared |= {"num_splits": num_splits, "sm_margin": 0}
    sizes = {"batch_size": batch, "num_heads": heads, "num_heads_k": 1, "headdim": D - DV, "headdim_v": DV}
    kinds = {"qkv_dtype": torch.bfloat16, "page_size": PAGE, "max_seqlen_k_new": 0, "has_softcap": False}
    plan = by_name(ops.get_scheduler_metadata.default, **shared, **sizes, **kinds)
    world = {"cp_world_size": 1, "cp_rank": 0}
    parts = {"k": problem.cache[..., DV:], "v": problem.cache[..., :DV], "softmax_scale": SCALE, "softcap": 0.0}
    forward = by_name(ops.fwd.default, **shared, **parts, **world, is_rotary_interleaved=True)

    def call(i: int, metadata: Any) -> Any:
        q = problem.q[i].view(batch * q_len, heads, D)
        out = problem.out[i].view(batch * q_len, heads, DV)
        operands = {"q": q[..., DV:], "q_v": q[..., :DV], "out": out, "page_table": problem.tables[i]}
        return forward(**operands, scheduler_metadata=metadata)[0]

    ready = plan()
    return Decode(lambda i: call(i, ready), lambda i: call(i, plan()), plan)


def triton(problem: Problem) -> Decode:
    """Split over the keys, then reduced, in Triton: the quickest of some configurations for each shape."""
    from jitkern.benches import triton_mla

    batch, keys, heads, q_len = problem.shape
    rows, device = heads * q_len, problem.cache.device
    workers = torch.cuda.get_device_properties(device).multi_processor_count

    def bind(config: triton_mla.Config) -> Callable[[int], Any]:
        pieces = triton_mla.scratch(batch, rows, DV, config.splits, device)

        def run(i: int) -> Any:
            operands = (problem.q[i], problem.cache, problem.tables[i], problem.lengths)
            triton_mla.decode(*operands, problem.out[i], problem.lse[i], pieces, config, problem.causal)
            return problem.out[i]

        return run

    tried = {}
    for config in triton_mla.configs(batch, rows, keys, workers):
        run = bind(config)
        calls = [functools.partial(run, i) for i in range(problem.turns)]
        with contextlib.suppress(triton_mla.OutOfResources):
            tried[config] = bench.gpu_microseconds(calls, repeats=3)
    if not tried:
        raise RuntimeError("no tile fits this device")
    best = min(tried, key=lambda config: tried[config])
    return Decode(bind(best), note=str(best))


def eager(problem: Problem) -> Decode:
    """The formula in torch, on keys that are gathered from their pages first."""
    batch, keys, heads, q_len = problem.shape

    def run(i: int) -> Any:
        k = problem.cache[problem.tables[i].long()].view(batch, -1, D)[:, :keys]
        q = problem.q[i].view(batch, q_len * heads, D)
        scores = torch.bmm(q, k.transpose(1, 2)).view(batch, q_len, heads, keys).float() * SCALE
        if problem.causal:
            place = torch.arange(keys, device=q.device)
            last = keys - q_len + torch.arange(q_len, device=q.device)
            scores = scores.masked_fill((place > last[:, None])[None, :, None, :], -torch.inf)
        weights = torch.softmax(scores, -1).to(k.dtype).view(batch, q_len * heads, keys)
        return torch.bmm(weights, k[..., :DV]).view(batch, q_len, heads, DV)

    return Decode(run)


EARLY = {
    "jitkern": None,
    "jitkern-pdl": True,
    "jitkern-no-pdl": False,
}  # whether kernels start early; None: the default
MAKERS: dict[str, Callable[[Problem], Decode]] = {
    **{name: functools.partial(jitkern, pdl=early) for name, early in EARLY.items()},
    "jitkern-fp8": functools.partial(jitkern, cache_dtype=torch.float8_e4m3fn),
    "jitkern-fp8_ds_mla": functools.partial(jitkern, cache_dtype="fp8_ds_mla"),
    "flashmla": flashmla,
    "fa3": fa3,
    "fa3-auto": functools.partial(fa3, num_splits=0),
    "triton": triton,
    "eager": eager,
}
TOKEN_BYTES = {"jitkern-fp8": 576, "jitkern-fp8_ds_mla": 656}  # else that of bf16
ON_CPU = ("jitkern", "jitkern-fp8", "jitkern-fp8_ds_mla", "eager")
