"""The N-way merge in float64, from its definition by softmax and logsumexp; differentiable; and its tolerance.

Everything is brought to one arrangement first: partials stacked, [tokens, N, heads, head size], with a mask of those
that count. A partial that does not count is replaced by zeros, so that nothing of it can come through.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from tests.merge_oracle import unit

WIDE = torch.float64


@dataclass
class Partials:
    """Stacked partials of [tokens, N, heads, head size] with L of [tokens, N, heads]; `valid` [tokens] or None."""

    v: torch.Tensor
    s: torch.Tensor
    valid: torch.Tensor | None = None

    def cpu(self) -> Partials:
        return Partials(self.v.cpu(), self.s.cpu(), None if self.valid is None else self.valid.cpu())

    def to(self, device: str) -> Partials:
        return Partials(self.v.to(device), self.s.to(device), None if self.valid is None else self.valid.to(device))

    def clone(self) -> Partials:
        return replace(self, v=self.v.clone(), s=self.s.clone())

    def lists(self) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
        """Separate tensors, each with storage of its own."""
        return [x.clone() for x in self.v.unbind(1)], [x.clone() for x in self.s.unbind(1)]

    def ragged(self, counts: list[int]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """(v, s, indptr) of the first `counts[t]` partials of every token t."""
        v = torch.cat([self.v[t, :count] for t, count in enumerate(counts)])
        s = torch.cat([self.s[t, :count] for t, count in enumerate(counts)])
        ends = torch.tensor([0, *counts]).cumsum(0).to(torch.int32)
        return v, s, ends.to(v.device)

    @property
    def live(self) -> torch.Tensor:
        """Which partials count: [tokens, N, heads]."""
        live = ~self.s.isinf()
        if self.valid is not None:
            number = torch.arange(self.v.shape[1], device=self.v.device).view(1, -1, 1)
            live = live & (number < self.valid.view(-1, 1, 1))
        return live


def random_partials(
    tokens: int,
    count: int,
    heads: int,
    d: int,
    dtype: torch.dtype,
    device: str = "cpu",
    empty: float = 0.2,
    seed: int = 0,
) -> Partials:
    """Random partials, a share `empty` of them with an infinite L of either sign and NaN in O."""
    generator = torch.Generator().manual_seed(seed * 7919 + count * 31 + tokens)
    v = torch.randn(tokens, count, heads, d, generator=generator).to(dtype)
    s = torch.randn(tokens, count, heads, generator=generator).mul(3).to(WIDE if dtype == WIDE else torch.float32)
    gone = torch.rand(tokens, count, heads, generator=generator) < empty
    sign = torch.where(torch.rand(s.shape, generator=generator) < 0.5, math.inf, -math.inf).to(s.dtype)
    s[gone] = sign[gone]
    v[gone] = math.nan
    return Partials(v.to(device), s.to(device))


def merge(
    p: Partials,
    base: float = math.e,
    base_out: float | None = None,
    sink: torch.Tensor | None = None,
    sink_in_lse: bool = True,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(O [tokens, heads, head size], L [tokens, heads]) in float64; `sink` [heads] in natural units."""
    to_out = math.log(base if base_out is None else base_out)
    live = p.live
    values = torch.where(live.unsqueeze(-1), p.v.to(WIDE), 0.0)
    logits = torch.where(live, p.s.to(WIDE), -math.inf) * math.log(base)
    tokens, _, heads = logits.shape
    if sink is None:
        last = logits.new_full((tokens, 1, heads), -math.inf)
    else:
        last = sink.to(WIDE).view(1, 1, heads).expand(tokens, 1, heads)
    every = torch.cat([logits, last], 1)
    # A token with nothing at all has no softmax; with +inf as its sink the sink takes everything.
    nothing = (every == -math.inf).all(1, keepdim=True)
    drowned = (last == math.inf).expand_as(logits)
    finite = torch.where(nothing | (every == math.inf), 0.0, every)
    weights = torch.where(drowned | ~live, 0.0, torch.softmax(finite, 1)[:, :-1])
    out = (weights.unsqueeze(-1) * values).sum(1)
    counted = every if sink_in_lse else logits
    none = (counted == -math.inf).all(1)
    # An infinite maximum has no gradient worth the name: leave those rows out before, put them back after.
    total = torch.logsumexp(torch.where(none.unsqueeze(1) | (counted == math.inf), 0.0, counted), 1) / to_out
    total = torch.where(none, -math.inf, total)
    return out, torch.where((counted == math.inf).any(1), math.inf, total)


def assert_states(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    p: Partials,
    base: float = math.e,
    base_out: float | None = None,
    sink: torch.Tensor | None = None,
    sink_in_lse: bool = True,
) -> None:
    """O within one unit of its type and the float32 arithmetic's error, L within 2e-6 of its size.

    The arithmetic: each of N terms is rounded twice and its weight is good to 4 units; where a logarithm changes its
    base, rounding it moves the weight by as many units as the logarithm is large.
    """
    p = p.cpu()
    sink = None if sink is None else sink.cpu()
    reference, reference_lse = merge(p, base, base_out, sink, sink_in_lse)
    got = out.cpu().to(WIDE)
    assert got.shape == reference.shape
    assert torch.equal(got.isnan(), reference.isnan()), "NaN in other places than the reference"
    live = p.live
    epsilon = torch.finfo(WIDE if out.dtype == WIDE else torch.float32).eps
    converted = base_out not in (None, base) or (sink is not None and base != math.e)
    logits = torch.where(live, p.s.to(WIDE).abs(), 0.0).nan_to_num(0).flatten().tolist() if converted else []
    largest_logit = max([0.0, *logits, *([] if sink is None else sink.abs().nan_to_num(0, posinf=0).tolist())])
    values = torch.where(live.unsqueeze(-1), p.v.to(WIDE).abs(), 0.0).nan_to_num(0, posinf=0)
    largest = values.amax(1) if values.shape[1] else torch.zeros_like(reference)
    arithmetic = (p.v.shape[1] + 4 + 2 * largest_logit * converted) * epsilon * largest
    excess = (got - reference).abs() - unit(reference, out.dtype) - arithmetic
    worst = torch.where(got == reference, -1.0, excess.nan_to_num(-1, posinf=1e9)).max().item() if got.numel() else -1
    assert worst <= 0, f"O is off by {worst:.3g} more than one unit of {out.dtype}"
    if lse is not None:
        assert_lse(lse, reference_lse)


def assert_lse(lse: torch.Tensor, reference: torch.Tensor) -> None:
    """L within 2e-6 of its size; infinite and NaN where the reference is."""
    got = lse.cpu().to(WIDE)
    assert torch.equal(got.isnan(), reference.isnan()), "NaN in L in other places than the reference"
    finite = reference.isfinite()
    assert torch.equal(got[~finite].nan_to_num(7), reference[~finite].nan_to_num(7)), "infinite L differs"
    bound = 2e-6 * reference[finite].abs().clamp_min(1)
    off = (got[finite] - reference[finite]).abs() - bound
    assert off.numel() == 0 or off.max().item() <= 0, f"L is off by {off.max().item():.3g} more than its bound"
