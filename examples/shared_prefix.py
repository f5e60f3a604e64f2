"""MLA decode of requests that share a prefix (a system prompt, say): attend to the prefix once for all, then merge.

A plain decode reads the prefix again for every request. Here the queries of the whole batch are one request of
batch * q_len query tokens over the prefix; each request attends to its own suffix; the two states are merged. The results
are compared with the plain decode and with float64, and both are timed.

    python examples/shared_prefix.py                                     a few sizes, on a GPU if there is one
    python examples/shared_prefix.py --batch 64 --prefix 8192 --suffix 256 --heads 16
"""

from __future__ import annotations

import argparse
import functools
import sys
from dataclasses import dataclass

import torch

import jitkern
from jitkern import bench

PAGE, D, DV = 64, 576, 512
BOUND = 0.01  # relative; bfloat16 rounds the states before the merge and the result after it: about 0.003
COLD_BYTES = 800_000_000


@dataclass(frozen=True)
class Size:
    """`suffix` is the longest; each request has its own length, its query tokens included."""

    batch: int
    prefix: int
    suffix: int
    heads: int
    q_len: int = 1


ON_GPU = [
    *(Size(batch, prefix, 256, 16) for batch in (32, 128) for prefix in (2048, 16384)),
    *(Size(batch, prefix, 256, 128) for batch in (32, 128) for prefix in (2048, 16384)),
    Size(64, 8192, 256, 16, q_len=2),
]
ON_CPU = [Size(4, 256, 96, 16), Size(3, 128, 70, 16, q_len=2)]


class Step:
    """One decoding step: queries, and the keys of some layers on pages, the prefix's in front."""

    def __init__(self, size: Size, device: str) -> None:
        batch, heads, q_len = size.batch, size.heads, size.q_len
        prefix_pages, suffix_pages = size.prefix // PAGE, -(-size.suffix // PAGE)
        if size.prefix % PAGE or not prefix_pages:
            raise SystemExit(f"the prefix has {size.prefix} keys; only whole pages of {PAGE} can be shared")
        pages = prefix_pages + batch * suffix_pages
        # A model's layers follow each other, each with a cache of its own: what one left in the L2 does not help the next.
        layers = max(2, -(-COLD_BYTES // (pages * PAGE * D * 2))) if device == "cuda" else 1
        bf16 = {"dtype": torch.bfloat16, "device": device}
        self.size, self.device = size, device
        self.caches = [torch.randn(pages, PAGE, 1, D, **bf16) / 10 for _ in range(layers)]
        self.q = torch.randn(batch, q_len, heads, D, **bf16)
        order = torch.randperm(pages, device=device, dtype=torch.int32)
        self.prefix_table = order[:prefix_pages].view(1, -1)
        self.suffix_table = order[prefix_pages:].view(batch, -1)
        self.table = torch.cat((self.prefix_table.expand(batch, -1), self.suffix_table), 1)
        spread = torch.arange(batch, device=device, dtype=torch.int32) % 7
        self.suffix_lengths = (size.suffix - spread * size.suffix // 14).int()
        self.prefix_length = torch.full((1,), size.prefix, dtype=torch.int32, device=device)
        self.lengths = self.suffix_lengths + size.prefix


class Plain:
    """Every request attends to all of its keys."""

    def __init__(self, step: Step) -> None:
        size = step.size
        self.step = step
        self.decode = jitkern.MLADecode(size.batch, size.heads, max_q_len=size.q_len, device=step.device)
        self.out = torch.empty(*step.q.shape[:3], DV, dtype=torch.bfloat16, device=step.device)
        self.lse = torch.empty(size.batch, size.heads, size.q_len, device=step.device)

    def plan(self) -> None:
        self.decode.plan(self.step.lengths)

    def run(self, layer: int) -> torch.Tensor:
        step = self.step
        operands = (step.q, step.caches[layer], step.table, step.lengths)
        return self.decode.run(*operands, causal=True, out=self.out, lse=self.lse)[0]


class SharedPrefix:
    """The prefix once, the suffixes, a merge. All buffers are made here, so that it can be captured in a graph."""

    def __init__(self, step: Step) -> None:
        batch, heads, q_len = step.size.batch, step.size.heads, step.size.q_len
        tokens, device = batch * q_len, step.device
        self.step, self.tokens = step, tokens
        self.prefix = jitkern.MLADecode(1, heads, max_q_len=tokens, device=device)
        self.suffix = jitkern.MLADecode(batch, heads, max_q_len=q_len, device=device)
        self.prefix_out, self.suffix_out, self.out = (
            torch.empty(tokens, heads, DV, dtype=torch.bfloat16, device=device) for _ in range(3)
        )
        # The merge takes L as [heads, tokens]; the decode writes it with any strides.
        self.prefix_lse, self.suffix_lse = (torch.empty(heads, tokens, device=device) for _ in range(2))

    def plan(self) -> None:
        self.prefix.plan(self.step.prefix_length)
        self.suffix.plan(self.step.suffix_lengths)

    def run(self, layer: int) -> torch.Tensor:
        step, heads = self.step, self.step.size.heads
        batch, q_len = step.size.batch, step.size.q_len
        cache, q = step.caches[layer], step.q
        out, lse = self.prefix_out.view(1, self.tokens, heads, DV), self.prefix_lse.view(1, heads, self.tokens)
        q_of_all = q.view(1, self.tokens, heads, D)
        # Not causal: the whole prefix comes before every query token.
        self.prefix.run(q_of_all, cache, step.prefix_table, step.prefix_length, causal=False, out=out, lse=lse)
        out, lse = self.suffix_out.view(batch, q_len, heads, DV), self.suffix_lse.view(heads, batch, q_len)
        lse = lse.transpose(0, 1)
        self.suffix.run(q, cache, step.suffix_table, step.suffix_lengths, causal=True, out=out, lse=lse)
        states = (self.prefix_out, self.prefix_lse, self.suffix_out, self.suffix_lse)
        jitkern.merge_attn_states(self.out, *states)
        return self.out.view(batch, q_len, heads, DV)


def in_float64(step: Step, request: int) -> torch.Tensor:
    """O of one request of the first layer."""
    length, q_len = int(step.lengths[request]), step.size.q_len
    keys = step.caches[0][step.table[request].long()].view(-1, D)[:length].double()
    scores = torch.einsum("thd,kd->thk", step.q[request].double(), keys) * D**-0.5
    for t in range(q_len):
        scores[t, :, length - (q_len - 1 - t) :] = -torch.inf
    return torch.softmax(scores, -1) @ keys[:, :DV]


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    return float(((got.double() - want.double()).norm() / want.double().norm()).nan_to_num(torch.inf))


def time_of(way: Plain | SharedPrefix, repeats: int) -> float:
    """Microseconds of a layer; a step plans once for all of its layers, so that is not in it."""
    calls = [functools.partial(way.run, layer) for layer in range(len(way.step.caches))]
    if way.step.device == "cpu":
        return bench.cpu_microseconds(calls[0], repeats)
    return bench.gpu_microseconds(calls, max(1, 30 // len(calls)), repeats)


def compare(size: Size, device: str, repeats: int) -> dict[str, float | str]:
    step = Step(size, device)
    plain, shared = Plain(step), SharedPrefix(step)
    plain.plan()
    shared.plan()
    got, usual = shared.run(0).clone(), plain.run(0).clone()
    errors = [distance(got, usual), *(distance(got[i], in_float64(step, i)) for i in (0, size.batch - 1))]
    times = {"plain us": time_of(plain, repeats), "shared us": time_of(shared, repeats)}
    row: dict[str, float | str] = {**vars(size), **times, "plain/shared": times["plain us"] / times["shared us"]}
    return row | {"error": max(errors), "ok": "ok" if max(errors) < BOUND else "WRONG"}


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in vars(Size(64, 8192, 256, 16)).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=int, help=f"default: {default} if another is given")
    parser.add_argument("--repeats", type=int, default=7)
    arguments = parser.parse_args(argv)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    given = {name: value for name in vars(ON_CPU[0]) if (value := getattr(arguments, name)) is not None}
    sizes = ON_GPU if device == "cuda" else ON_CPU
    if given:
        sizes = [Size(**{"batch": 64, "prefix": 8192, "suffix": 256, "heads": 16} | given)]
    torch.manual_seed(0)
    rows = []
    for size in sizes:
        rows.append(compare(size, device, arguments.repeats))
        if device == "cuda":
            torch.cuda.empty_cache()
    print(f"jitkern {jitkern.__version__}, {torch.cuda.get_device_name() if device == 'cuda' else 'CPU'}, a layer:")
    print(bench.table(rows))
    return 0 if all(row["ok"] == "ok" for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
