"""Scales of MLADecode: what is no plain number is refused, warm or not; a bound call never reads an old one."""

from __future__ import annotations

import gc
import warnings
import weakref
from collections.abc import Callable

import pytest
import torch
from torch._subclasses import FakeTensorMode
from torch.autograd import forward_ad

import jitkern
from jitkern.errors import ArgumentError, UnsupportedError
from tests.mla_oracle import make_step, with_codes


def fake() -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(1)


def nested() -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that nested tensors are a prototype
        return torch.nested.nested_tensor([torch.ones(1)])


ODD: dict[str, tuple[Callable[[], torch.Tensor], str]] = {
    "negated": (lambda: torch._neg_view(torch.ones(1)), "lazy view, whose sign is not in its memory"),
    "zeros without memory": (lambda: torch._efficientzerotensor(1), "zeros without memory"),
    "fake": (fake, "FakeTensor without memory"),
    "nested": (nested, "is a nested tensor"),
    "sparse": (lambda: torch.ones(1).to_sparse(), "expected a strided tensor"),
    "elsewhere": (lambda: torch.ones(1, device="meta"), "on meta; expected one element on cpu"),
    "none": (lambda: torch.ones(0), r"has shape \[0\]"),
    "half": (lambda: torch.ones(1).half(), "expected torch.float32"),
    "a parameter": (lambda: torch.nn.Parameter(torch.ones(1)), "requires a gradient"),
}


class Made:
    """An object, a step, and a run of it."""

    def __init__(self) -> None:
        self.coded = with_codes(make_step([100, 3], 16))
        self.mla = jitkern.MLADecode(2, 16, device="cpu", cache_dtype=torch.float8_e4m3fn)
        self.mla.plan(self.coded.step.cache_seqlens)

    def run(self, k_scale: torch.Tensor | None = None, q_scale: torch.Tensor | None = None) -> torch.Tensor:
        return self.mla.run(*self.coded.step.operands(), k_scale=k_scale, q_scale=q_scale)[0]


@pytest.mark.parametrize("odd", ODD)
@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
def test_odd_scales_are_refused(odd: str) -> None:
    make, message = ODD[odd]
    made = Made()
    made.run(torch.ones(1), torch.ones(1))
    made.run()
    with pytest.raises((ArgumentError, UnsupportedError), match=f"k_scale .*{message}"):
        made.run(make())
    with pytest.raises((ArgumentError, UnsupportedError), match=f"q_scale .*{message}"):
        made.run(q_scale=make())


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_scales_of_transforms_and_tangents_are_refused() -> None:
    made = Made()
    with pytest.raises(UnsupportedError, match="k_scale is wrapped by a transform"):
        torch.func.vmap(made.run)(torch.ones(2, 1))
    with forward_ad.dual_level(), pytest.raises(UnsupportedError, match="k_scale carries a forward-mode tangent"):
        made.run(forward_ad.make_dual(torch.ones(1), torch.ones(1)))
    with torch.no_grad():
        assert torch.equal(made.run(torch.nn.Parameter(torch.ones(1))), made.run())


def test_one_element_of_any_shape_and_stride_will_do() -> None:
    made = Made()
    assert made.coded.k_scale is not None
    expected, scale = made.run(made.coded.k_scale), float(made.coded.k_scale)
    for same in (torch.tensor(scale), torch.full((5,), scale)[3:4], torch.full((1,), scale).expand(1, 1, 1)):
        assert torch.equal(made.run(same), expected)


def test_a_scale_that_is_gone_is_never_read() -> None:
    """A bound call holds addresses of scales: a new tensor gets its own, or one whose address is the same."""
    made = Made()
    made.coded.step.q.zero_()  # then the result is the mean of the codes, times the scale
    plain, addresses = made.run().double(), set()
    for i in range(200):  # more than are kept
        scale = torch.full((1,), 2.0 ** (i % 5))
        addresses.add(scale.data_ptr())
        assert torch.equal(made.run(scale).double(), plain * 2.0 ** (i % 5))
        del scale
        if i % 50 == 0:
            gc.collect()
    assert len(addresses) < 200, "no address came twice: the test has not seen what it is for"
    assert torch.equal(made.run().double(), plain)


def test_results_over_a_scale_are_refused() -> None:
    made = Made()
    lse = torch.zeros(2, 16, 1)
    with pytest.raises(ArgumentError, match=r"lse .* shares memory with k_scale"):
        made.mla.run(*made.coded.step.operands(), lse=lse, k_scale=lse[1, 3])


def test_prepared_calls_keep_the_scale_and_read_it_anew() -> None:
    made = Made()
    out, lse, scale = torch.zeros(2, 1, 16, 512, dtype=torch.bfloat16), torch.zeros(2, 16, 1), torch.ones(1)
    prepared = jitkern.prepare(made.mla.run, *made.coded.step.operands(), out=out, lse=lse, k_scale=scale)
    for value in (1.0, 0.25):
        scale.fill_(value)
        prepared()
        assert torch.equal(out, made.run(torch.tensor([value])))
    kept = weakref.ref(scale)
    del scale
    gc.collect()
    assert kept() is not None


@pytest.mark.parametrize("name", ["q", "k_scale", "q_scale"])
def test_traced_gradients_are_refused(name: str) -> None:
    made = Made()
    operands = {"q": made.coded.step.q, "k_scale": torch.ones(1), "q_scale": torch.ones(1)}
    operands[name].requires_grad_()

    def layer(q: torch.Tensor, k_scale: torch.Tensor, q_scale: torch.Tensor) -> torch.Tensor:
        return made.mla.run(q, *made.coded.step.operands()[1:], k_scale=k_scale, q_scale=q_scale)[0]

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    with pytest.raises(torch._dynamo.exc.TorchDynamoException, match=f"{name} requires a gradient"):
        compiled(**operands)
    with torch.no_grad():
        assert torch.equal(compiled(**operands), layer(**operands))


def test_traced_with_scales_that_change() -> None:
    made = Made()
    compiled = torch.compile(lambda k, q: made.run(k * 1, q) * 1, fullgraph=True, backend="aot_eager")
    for value in (0.02, 1.0, 0.5):
        k_scale, q_scale = torch.tensor([value]), torch.tensor(2.0 * value)
        assert torch.equal(compiled(k_scale, q_scale), made.run(k_scale, q_scale))
