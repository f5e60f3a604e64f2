"""nvrtc and nvcc give the same bits; the CPU gives them too; CuPy's loader runs the same cubin."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from jitkern import loader, settings
from tests.merge_oracle import States, random_states
from tests.test_merge_contract import BITS, DTYPES, run


def wild_states(dtype: torch.dtype) -> States:
    """Every magnitude that the type has, denormals and infinite values included, and L from tiny to huge."""
    generator = torch.Generator().manual_seed(7)
    shape, rows = (257, 5, 64), (5, 257)
    width = 32 if dtype == torch.float32 else 16

    def bits() -> torch.Tensor:
        raw = torch.randint(-(2 ** (width - 1)), 2 ** (width - 1), shape, generator=generator)
        return raw.to(BITS[dtype]).view(dtype)

    def logarithms() -> torch.Tensor:
        return torch.randn(rows, generator=generator) * 10 ** torch.randn(rows, generator=generator)

    return States(bits(), logarithms(), bits(), logarithms())


def equal(a: torch.Tensor, b: torch.Tensor) -> bool:
    """The same bits, where one NaN is as good as another."""
    a, b = a.cpu(), b.cpu()
    same = a.contiguous().view(BITS[a.dtype]) == b.contiguous().view(BITS[b.dtype])
    return bool((same | (a.isnan() & b.isnan())).all())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("other", ["nvcc", "cpu"])
def test_bit_for_bit(dtype: torch.dtype, other: str) -> None:
    for states in (wild_states(dtype), random_states(300, 7, 64, dtype, disjoint=False)):
        on_gpu = States(*(x.cuda() for x in (states.a, states.a_lse, states.b, states.b_lse)))
        out, lse = run(on_gpu, "nvrtc")
        got, got_lse = run(states if other == "cpu" else on_gpu, other)
        assert equal(out, got)
        assert equal(lse, got_lse)


def test_cupy_loads_the_same_cubin() -> None:
    pytest.importorskip("cupy")
    states = random_states(40, 3, 64, torch.bfloat16, "cuda")
    out, lse = run(states, "nvrtc")
    before = dict(loader._ready)
    try:
        loader._ready.clear()
        # Calls bound in this thread hold the other loader's function; a new thread has none.
        with settings.override(loader="cupy"), ThreadPoolExecutor(1) as pool:
            got, got_lse = pool.submit(run, states, "auto").result()
    finally:
        loader._ready.update(before)
    assert equal(out, got)
    assert equal(lse, got_lse)
