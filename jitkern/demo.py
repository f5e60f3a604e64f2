"""``jitkern demo``: real attention, its keys split in two, merged by a kernel compiled on the spot, and checked.

Each case computes attention over a prefix and a suffix of the keys, merges the two partial states with
``merge_attn_states``, and compares with attention over all keys in float64. It then times the first call with nothing
cached, with a warm disk cache, and the call itself beside the same formula in eager torch.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from jitkern import bench, loader, settings
from jitkern.errors import ToolchainError
from jitkern.ops.merge import merge_attn_states
from jitkern.progress import Progress
from jitkern.warm import warmup


@dataclass(frozen=True)
class Case:
    """One attention layer, its keys split into a prefix and a suffix.

    Attributes:
        name: what it stands for.
        queries, heads, head_dim: shape of the states.
        prefix, suffix: number of keys; the suffix is causal, as in chunked prefill, where ``causal``.
        timed: tokens at which the merge is timed (states are repeated up to it).
    """

    name: str
    queries: int
    heads: int
    head_dim: int
    prefix: int
    suffix: int
    dtype: torch.dtype
    causal: bool
    timed: int


def cases(device: str) -> list[Case]:
    """The cases: full size on a GPU, fewer queries and keys on a CPU; the merge is timed at full size on both."""
    bf16, f32 = torch.bfloat16, torch.float32
    if device == "cuda":
        return [
            Case("chunked prefill", 4096, 32, 128, 8192, 4096, bf16, True, 4096),
            Case("chunked prefill", 4096, 32, 128, 8192, 4096, f32, True, 4096),
            Case("cascade decode", 256, 32, 128, 16384, 512, bf16, False, 256),
            Case("DeepSeek prefill", 1024, 128, 128, 4096, 1024, bf16, True, 1024),
            Case("DeepSeek latent", 128, 128, 512, 4096, 256, bf16, False, 128),
        ]
    return [
        Case("chunked prefill", 128, 32, 128, 512, 256, f32, True, 4096),
        Case("chunked prefill", 128, 32, 128, 512, 256, bf16, True, 4096),
        Case("cascade decode", 64, 32, 128, 1024, 64, bf16, False, 256),
        Case("DeepSeek latent", 16, 128, 512, 128, 16, bf16, False, 128),
    ]


def partial_attention(q: Any, k: Any, v: Any, causal: bool) -> tuple[Any, Any]:
    """(O [n, h, d], L [h, n]) of one part of the keys, in float64; q [n, h, d], k and v [m, h, d]."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    scores = q @ k.transpose(1, 2) * q.shape[-1] ** -0.5
    if causal:
        n, m = scores.shape[1:]
        hidden = torch.ones(n, m, dtype=torch.bool, device=q.device).triu(1 + m - n)
        scores.masked_fill_(hidden, -torch.inf)
    lse = scores.logsumexp(-1)
    return (scores.softmax(-1) @ v).transpose(0, 1).contiguous(), lse


def eager_merge(a: Any, a_lse: Any, b: Any, b_lse: Any) -> tuple[Any, Any]:
    """The merge as one writes it in torch."""
    top = torch.maximum(a_lse, b_lse)
    wa, wb = torch.exp(a_lse - top), torch.exp(b_lse - top)
    total = wa + wb
    merged = a * (wa / total).T.unsqueeze(-1) + b * (wb / total).T.unsqueeze(-1)
    return merged.to(a.dtype), top + torch.log(total)


@dataclass
class _States:
    case: Case
    device: str
    out: Any
    out_lse: Any
    a: Any
    a_lse: Any
    b: Any
    b_lse: Any
    reference: Any

    def call(self) -> None:
        merge_attn_states(self.out, self.a, self.a_lse, self.b, self.b_lse, self.out_lse)


def make_states(case: Case, device: str, seed: int = 0) -> _States:
    """Both partial states of a case, and the float64 answer over all keys, a few heads at a time."""
    generator = torch.Generator(device).manual_seed(seed)

    def random(rows: int) -> Any:
        return torch.randn(rows, case.heads, case.head_dim, generator=generator, device=device).to(case.dtype)

    q, k, v = random(case.queries), random(case.prefix + case.suffix), random(case.prefix + case.suffix)
    shape = (case.queries, case.heads, case.head_dim)
    a, b = (torch.empty(shape, dtype=case.dtype, device=device) for _ in range(2))
    reference = torch.empty(shape, dtype=torch.float64, device=device)
    a_lse, b_lse = (torch.empty(case.heads, case.queries, device=device) for _ in range(2))
    step = 4
    for first in range(0, case.heads, step):
        part = slice(first, first + step)
        qs, ks, vs = (x[:, part] for x in (q, k, v))
        cut = case.prefix
        a[:, part], a_lse[part] = partial_attention(qs, ks[:cut], vs[:cut], False)
        b[:, part], b_lse[part] = partial_attention(qs, ks[cut:], vs[cut:], case.causal)
        reference[:, part], _ = partial_attention(qs, ks, vs, case.causal)
    return _States(case, device, torch.empty_like(a), torch.empty_like(a_lse), a, a_lse, b, b_lse, reference)


def _first_call_ms(call: Callable[[], None], device: str) -> float:
    def run() -> float:
        start = time.perf_counter()
        with torch.inference_mode():
            call()
        if device == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - start) * 1000

    loader.forget()
    # Calls that were bound before hold their function, per thread: a new thread has none.
    with ThreadPoolExecutor(1) as pool:
        if device == "cuda":
            pool.submit(torch.cuda.synchronize).result()
        return pool.submit(run).result()


def _time(states: _States, times: int) -> tuple[float, float]:
    """(microseconds of a merge, of the eager formula) at the case's timed size."""
    a, b, out = (x.repeat(times, 1, 1) for x in (states.a, states.b, states.out))
    a_lse, b_lse, out_lse = (x.repeat(1, times) for x in (states.a_lse, states.b_lse, states.out_lse))
    if states.device != "cuda":
        merge = bench.cpu_microseconds(lambda: merge_attn_states(out, a, a_lse, b, b_lse, out_lse))
        return merge, bench.cpu_microseconds(lambda: eager_merge(a, a_lse, b, b_lse), repeats=3, at_least=0)
    copies = max(2, -(-200_000_000 // (3 * a.numel() * a.element_size())))  # more than the L2 holds
    sets = [(out.clone(), a.clone(), a_lse.clone(), b.clone(), b_lse.clone(), out_lse.clone()) for _ in range(copies)]
    merge = bench.gpu_microseconds([lambda s=s: merge_attn_states(*s) for s in sets])  # type: ignore[misc]
    eager = bench.gpu_microseconds([lambda s=s: eager_merge(*s[1:5]) for s in sets])  # type: ignore[misc]
    return merge, eager


def run_case(case: Case, device: str, say: Callable[[str], None]) -> dict[str, Any]:
    """Run one case; the row of the demo's table."""
    what = f"{case.name} {case.timed}x{case.heads}x{case.head_dim} {str(case.dtype).removeprefix('torch.')}"
    say(f"{what}: attention over {case.prefix} + {case.suffix} keys, and over all of them in float64")
    states = make_states(case, device)
    say(f"{what}: compiling, merging")
    with tempfile.TemporaryDirectory(prefix="jitkern-demo-") as folder, settings.override(cache_dir=Path(folder)):
        cold = _first_call_ms(states.call, device)
        warm = _first_call_ms(states.call, device)
        say(f"{what}: timing")
        merge, eager = _time(states, case.timed // case.queries)
    loader.forget()
    error = (states.out.double() - states.reference).abs().max().item()
    # Each partial output was rounded to the dtype, and so is the result (half a unit in the last place each time); the
    # merge itself is a handful of float32 operations.
    unit = torch.finfo(case.dtype).eps + 4 * torch.finfo(torch.float32).eps
    allowed = unit * states.reference.abs().max().item()
    elements = case.timed * case.heads * case.head_dim
    traffic = 3 * elements * states.out.element_size() + 12 * case.timed * case.heads
    return {
        "case": what,
        "cold ms": round(cold, 1),
        "warm ms": round(warm, 2),
        "us/call": round(merge, 2),
        "GB/s": round(traffic / merge / 1000, 1),
        "x eager": round(eager / merge, 1),
        "max error": float(f"{error:.2e}"),
        "allowed": float(f"{allowed:.2e}"),
        "ok": bool(error <= allowed),
    }


def run(device: str = "auto", quiet: bool = False) -> dict[str, Any]:
    """Run every case on ``cpu``, ``cuda`` or whichever is there (``auto``)."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cuda" and not torch.cuda.is_available():
        raise ToolchainError("torch finds no usable GPU; jitkern doctor says what is missing. --device cpu needs none")
    name = torch.cuda.get_device_name() if device == "cuda" else f"CPU, {torch.get_num_threads()} threads"
    # Torch, the driver and the compilers start with the first use; that is not what is timed.
    with Progress("jitkern demo", quiet) as say, torch.inference_mode():
        say(f"starting {name}")
        torch.zeros(1, device=device)
        warmup("merge_attn_states", dtype="f32", pack=4, d=64, device=device)  # a missing compiler is told at once
        rows = [run_case(case, device, say) for case in cases(device)]
    return {"device": name, "rows": rows, "ok": all(row["ok"] for row in rows)}
