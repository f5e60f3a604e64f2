"""A user's kernel refuses tensors that are not what their memory says, warm or not: the kinds of the merge's test."""

from __future__ import annotations

import pytest
import torch
import torch.autograd.forward_ad as forward_ad

import jitkern
from jitkern import ArgumentError, Kernel, UnsupportedError
from tests.test_merge_odd_tensors import KINDS

TEXT = """
__global__ void add(float* out, const float* x, const float* more = nullptr, int n = 8) {
  for (int i = 0; i < n; ++i) out[i] = x[i] + (more ? more[i] : 0.0f);
}
"""
WORDS = {
    "sparse": "torch.sparse_coo or a lazy view",
    "csr": "torch.sparse_csr or a lazy view",
    "mkldnn": "_mkldnn or a lazy view",
    "negative": "a lazy view",
    "conjugate": "a lazy view",
    "list": "is a list; expected a torch tensor",
    "none": "x is None|out is None",
    "closed": "Closed",
    "meta": "meta",
}
NOT_REFUSED = ("array", "one number")  # numpy's arrays are taken as they are; a kernel may want one number


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
@pytest.mark.parametrize("which", ["out", "x", "more"])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in NOT_REFUSED])
def test_refused_by_name(kind: str, which: str) -> None:
    if (kind, which) == ("none", "more"):
        pytest.skip("it is optional")
    add = Kernel(TEXT, grid=1, block=1)
    x = torch.ones(2, 4)
    for calls in (1, 4):  # remembered by its key, then by a guard
        for _ in range(calls):
            out = torch.zeros(2, 4)
            add(out, x, x.clone())
            assert (out == 2).all()
        with forward_ad.dual_level():
            given = {"out": torch.zeros(2, 4), "x": x, "more": torch.ones(2, 4)}
            given[which] = KINDS[kind][0](given[which])
            with pytest.raises((ArgumentError, UnsupportedError), match=WORDS.get(kind, KINDS[kind][1])):
                add(**given)
            assert which == "out" or not given["out"].any(), "something was written before the refusal"


@pytest.mark.parametrize("transform", ["vmap", "grad", "jvp", "functionalize"])
def test_inside_a_transform(transform: str) -> None:
    add = Kernel(TEXT, grid=1, block=1)
    for _ in range(4):
        add(torch.zeros(8), torch.ones(8))

    def function(x: torch.Tensor) -> torch.Tensor:
        out = torch.zeros(8)
        add(out, x)
        return out.sum()

    calls = {
        "vmap": lambda: torch.vmap(function)(torch.ones(3, 8)),
        "grad": lambda: torch.func.grad(function)(torch.ones(8)),
        "jvp": lambda: torch.func.jvp(function, (torch.ones(8),), (torch.ones(8),)),
        "functionalize": lambda: torch.func.functionalize(function)(torch.ones(8)),
    }
    with pytest.raises(UnsupportedError, match=r"wrapped by a transform|forward-mode tangent|requires a gradient"):
        calls[transform]()


def test_an_optional_tensor_comes_and_goes() -> None:
    add = Kernel(TEXT, grid=1, block=1)
    x = torch.ones(8)
    for turn in range(12):
        out, more = torch.zeros(8), torch.full((8,), float(turn)) if turn % 4 < 3 else None
        add(out, x, more)
        assert (out == 1 + (turn if more is not None else 0)).all()


def test_no_element_is_no_launch() -> None:
    launches = jitkern.Kernel(TEXT, grid="min(n, 1)", block=1)
    for _ in range(3):
        launches(torch.zeros(0), torch.zeros(0), n=0)
