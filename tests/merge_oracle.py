"""The merge in float64, written from the definition and from nothing of the kernel; and its tolerance."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

WIDE = torch.float64


@dataclass
class States:
    """Operands of a merge; L in [heads, tokens]."""

    a: torch.Tensor
    a_lse: torch.Tensor
    b: torch.Tensor
    b_lse: torch.Tensor

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.a.shape)

    def outputs(self, poison: float = -123.0) -> tuple[torch.Tensor, torch.Tensor]:
        return torch.full_like(self.a, poison), torch.full_like(self.a_lse, poison)

    def swapped(self) -> States:
        return States(self.b, self.b_lse, self.a, self.a_lse)

    def clone(self) -> States:
        return States(self.a.clone(), self.a_lse.clone(), self.b.clone(), self.b_lse.clone())


def random_states(
    tokens: int,
    heads: int,
    d: int,
    dtype: torch.dtype,
    device: str = "cpu",
    empty: float = 0.1,
    seed: int = 0,
    disjoint: bool = True,
) -> States:
    """Random states; a share ``empty`` of the rows of either side has an infinite L (both signs) and NaN in its O."""
    generator = torch.Generator().manual_seed(seed * 1_000_003 + tokens * 31 + heads * 7 + d)
    lse_dtype = torch.float64 if dtype == torch.float64 else torch.float32
    a, b = (torch.randn(tokens, heads, d, generator=generator).to(dtype) for _ in range(2))
    a_lse, b_lse = (torch.randn(heads, tokens, generator=generator).mul(3).to(lse_dtype) for _ in range(2))
    draw = torch.rand(heads, tokens, generator=generator)
    sign = torch.where(torch.rand(heads, tokens, generator=generator) < 0.5, math.inf, -math.inf).to(lse_dtype)
    no_a = draw < empty
    no_b = (draw >= empty) & (draw < 2 * empty) if disjoint else torch.rand(heads, tokens, generator=generator) < empty
    a_lse[no_a], b_lse[no_b] = sign[no_a], sign[no_b]
    a[no_a.T], b[no_b.T] = math.nan, math.nan
    return States(a.to(device), a_lse.to(device), b.to(device), b_lse.to(device))


def merge(states: States, merged_tokens: int | None = None, base: float = math.e) -> tuple[torch.Tensor, torch.Tensor]:
    """(O, L) in float64 on the CPU."""
    a, b = (x.cpu().to(WIDE) for x in (states.a, states.b))
    a_lse, b_lse = (x.cpu().to(WIDE) for x in (states.a_lse, states.b_lse))
    tokens, heads, _ = a.shape
    out, lse = torch.empty_like(a), torch.empty_like(a_lse)
    no_a, no_b = a_lse.isinf(), b_lse.isinf()
    top = torch.maximum(torch.where(no_a, -math.inf, a_lse), torch.where(no_b, -math.inf, b_lse))
    top = torch.where(a_lse.isnan() | b_lse.isnan(), math.nan, top)
    wa = torch.where(no_a, 0.0, base ** (a_lse - top))
    wb = torch.where(no_b, 0.0, base ** (b_lse - top))
    both_empty = no_a & no_b
    # An empty side's O is undefined, NaN included: take it out before it is multiplied by zero.
    clean_a = torch.where(no_a.T.unsqueeze(-1), 0.0, a)
    clean_b = torch.where(no_b.T.unsqueeze(-1), 0.0, b)
    out = (clean_a * wa.T.unsqueeze(-1) + clean_b * wb.T.unsqueeze(-1)) / (wa + wb).T.unsqueeze(-1)
    lse = top + torch.log(wa + wb) / math.log(base)
    # NaN of one side beside an empty other side is that side, as it is.
    out = torch.where((no_a & ~no_b).T.unsqueeze(-1), b, out)
    out = torch.where((no_b & ~no_a).T.unsqueeze(-1), a, out)
    lse = torch.where(no_a & ~no_b, b_lse, torch.where(no_b & ~no_a, a_lse, lse))
    out = torch.where(both_empty.T.unsqueeze(-1), 0.0, out)
    lse = torch.where(both_empty, -math.inf, lse)
    if merged_tokens is not None:
        out[merged_tokens:], lse[:, merged_tokens:] = b[merged_tokens:], b_lse[:, merged_tokens:]
    assert out.shape == (tokens, heads, a.shape[2])
    return out, lse


def unit(reference: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The distance from |reference| to the next number of ``dtype``."""
    info = torch.finfo(dtype)
    magnitude = reference.abs().clamp_min(info.smallest_normal)
    return torch.exp2(torch.floor(torch.log2(magnitude))) * info.eps


def assert_merged(
    out: torch.Tensor,
    lse: torch.Tensor | None,
    states: States,
    merged_tokens: int | None = None,
    base: float = math.e,
) -> None:
    """O within one unit of its type plus the float32 arithmetic's error; L within 2e-6 of its size; NaN where NaN."""
    reference, reference_lse = merge(states, merged_tokens, base)
    got = out.cpu().to(WIDE)
    assert torch.equal(got.isnan(), reference.isnan()), "NaN in other places than the reference"
    sides = torch.nan_to_num(
        torch.maximum(states.a.cpu().to(WIDE).abs().nan_to_num(0), states.b.cpu().to(WIDE).abs().nan_to_num(0))
    )
    arithmetic = 4 * torch.finfo(torch.float64 if out.dtype == WIDE else torch.float32).eps * sides
    excess = ((got - reference).abs() - unit(reference, out.dtype) - arithmetic).nan_to_num(-1, posinf=1, neginf=-1)
    equal = got == reference  # covers infinities
    worst = torch.where(equal, torch.full_like(excess, -1), excess).max().item() if excess.numel() else -1
    assert worst <= 0, f"O is off by {worst:.3g} more than one unit of {out.dtype}"
    if lse is not None:
        got_lse = lse.cpu().to(WIDE)
        assert torch.equal(got_lse.isnan(), reference_lse.isnan()), "NaN in L in other places than the reference"
        finite = reference_lse.isfinite()
        assert torch.equal(got_lse[~finite].nan_to_num(7), reference_lse[~finite].nan_to_num(7)), "infinite L differs"
        bound = 2e-6 * reference_lse[finite].abs().clamp_min(1)
        assert ((got_lse[finite] - reference_lse[finite]).abs() <= bound).all(), "L is off"
