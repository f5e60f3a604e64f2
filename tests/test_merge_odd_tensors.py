"""Tensors that are not what their memory says: every op refuses them by name, warm or not, and none is read.

The kinds that torch has: forward-mode duals, what torch.func and torch.vmap wrap, FakeTensors, sparse and nested ones,
lazy views, zeros without memory, tensors on `meta`, subclasses around other tensors.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import jitkern
import jitkern.torch_ops  # registers torch.ops.jitkern
from jitkern import ArgumentError, UnsupportedError
from tests.merge_oracle import assert_merged, random_states

# torch's own: the first dual tensor imports a module that scripts.
pytestmark = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

N, H, D = 4, 2, 8
OPERANDS = ("a", "a_lse", "b", "b_lse")
Operands = dict[str, Any]


class Around(torch.Tensor):
    """As DTensor and AsyncCollectiveTensor: no memory, another tensor inside."""

    inside: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Around:
        made: Around = torch.Tensor._make_wrapper_subclass(cls, inner.shape, strides=inner.stride(), dtype=inner.dtype)
        made.inside = inner
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        plain = torch.utils._pytree.tree_map_only(Around, lambda x: x.inside, (args, kwargs or {}))
        return Around(function(*plain[0], **plain[1]))


class Closed(Around):
    """One that nothing can be made from."""

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        raise NotImplementedError(f"{function} of {cls.__name__}")


def nested(x: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return torch.nested.nested_tensor(list(x))


def compressed(x: torch.Tensor) -> torch.Tensor:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return x.to_sparse_csr()


KINDS: dict[str, tuple[Callable[[torch.Tensor], Any], str]] = {
    "dual": (lambda x: forward_ad.make_dual(x, torch.ones_like(x)), "forward-mode tangent"),
    "fake": (lambda x: FakeTensorMode().from_tensor(x), "FakeTensor without memory"),
    "wrapper": (Around, "Around without memory"),
    "closed": (Closed, "Closed without memory|has shape"),
    "zeros": (lambda x: torch._efficientzerotensor(x.shape), "zeros without memory"),
    "meta": (lambda x: x.to("meta"), "on meta"),
    "sparse": (lambda x: x.to_sparse(), r"torch.sparse_coo; expected a strided tensor"),
    "csr": (compressed, "sparse_csr; expected a strided tensor"),
    "mkldnn": (lambda x: x.to_mkldnn(), "_mkldnn; expected a strided tensor"),
    "nested": (nested, "a nested tensor; expected a plain one"),
    "negative": (torch._neg_view, "lazy view.*resolve_neg"),
    "conjugate": (lambda x: x.to(torch.complex64).conj(), "lazy view.*resolve_conj"),
    "array": (lambda x: x.numpy(), "ndarray; expected a torch tensor"),
    "list": (lambda x: x.tolist(), "(list|tensors of v)"),
    "none": (lambda x: None, "NoneType; expected a torch tensor"),
    "one number": (lambda x: x.sum(), r"shape \[\]; expected"),
}


def operands() -> Operands:
    states = random_states(N, H, D, torch.float32, empty=0)
    logs = states.a_lse.T.contiguous(), states.b_lse.T.contiguous()
    return {"a": states.a, "a_lse": logs[0], "b": states.b, "b_lse": logs[1]}


def head_major(x: Any) -> Any:
    """L as [heads, tokens]: a transposed view where the kind has one."""
    if (
        not isinstance(x, torch.Tensor)
        or isinstance(x, Closed)
        or x.layout is not torch.strided
        or x.is_nested
        or x.dim() < 2
    ):
        return x
    return x.T


def attn_states(a: Any, a_lse: Any, b: Any, b_lse: Any, **more: Any) -> Any:
    out, lse = more.pop("output", torch.empty(N, H, D)), torch.empty(H, N)
    return jitkern.merge_attn_states(out, a, head_major(a_lse), b, head_major(b_lse), lse, **more)


def group_scaled(**given: Any) -> Any:
    small = torch.empty(N, H, D, dtype=torch.float8_e4m3fn)
    return attn_states(**given, output=small, output_group_scale=torch.empty(N, 1))


def scaled(**given: Any) -> Any:
    return attn_states(**given, output=torch.empty(N, H, D, dtype=torch.float8_e5m2), output_scale=torch.ones(1))


def into(a: Any, a_lse: Any, b: Any, b_lse: Any) -> Any:
    return jitkern.merge_state(a, a_lse, b, b_lse, out=torch.empty(N, H, D), out_lse=torch.empty(N, H))


def masked(a: Any, a_lse: Any, b: Any, b_lse: Any) -> Any:
    return jitkern.merge_state_in_place(a, a_lse, b, b_lse, torch.ones(N, dtype=torch.bool))


CALLS: dict[str, Callable[..., Any]] = {
    "merge_attn_states": attn_states,
    "output_scale": scaled,
    "output_group_scale": group_scaled,
    "merge_state": lambda a, a_lse, b, b_lse: jitkern.merge_state(a, a_lse, b, b_lse),
    "merge_state into": into,
    "merge_state_in_place": lambda a, a_lse, b, b_lse: jitkern.merge_state_in_place(a, a_lse, b, b_lse),
    "masked": masked,
    "merge_states": lambda a, a_lse, b, b_lse: jitkern.merge_states([a, b], [a_lse, b_lse]),
    "merge_states into": lambda a, a_lse, b, b_lse: jitkern.merge_states(
        [a, b], [a_lse, b_lse], out=torch.empty(N, H, D), out_lse=torch.empty(N, H)
    ),
    "prepared": lambda a, a_lse, b, b_lse: jitkern.prepare(jitkern.merge_state, a, a_lse, b, b_lse)(),
    "prepared states": lambda a, a_lse, b, b_lse: jitkern.prepare(jitkern.merge_states, [a, b], [a_lse, b_lse])(),
}
OPS: dict[str, Callable[..., Any]] = {
    "op merge_attn_states": lambda a, a_lse, b, b_lse: torch.ops.jitkern.merge_attn_states(
        torch.empty(N, H, D), a, head_major(a_lse), b, head_major(b_lse)
    ),
    "op merge_state": lambda a, a_lse, b, b_lse: torch.ops.jitkern.merge_state(a, a_lse, b, b_lse, -1, 2.0, 2.0, 2.0),
    "op merge_state_in_place": lambda a, a_lse, b, b_lse: torch.ops.jitkern.merge_state_in_place(
        a, a_lse, b, b_lse, None, None, 2.0, 2.0, 2.0
    ),
    "op merge_states": lambda a, a_lse, b, b_lse: torch.ops.jitkern.merge_states(
        [a, b], [a_lse, b_lse], None, None, None, True, True, 2.0, 2.0
    ),
}


def made(kind: str, which: str) -> Operands:
    given = operands()
    if kind == "csr" and which.endswith("e"):
        return given | {which: KINDS[kind][0](given[which])}
    if kind == "csr":
        return given | {which: KINDS[kind][0](given[which].reshape(N, -1))}
    return given | {which: KINDS[kind][0](given[which])}


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.parametrize("which", OPERANDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("call", CALLS)
def test_refused_by_name(call: str, kind: str, which: str) -> None:
    function = CALLS[call]
    for _ in range(2):
        function(**operands())  # remembered, so that the quick way would be taken
        with forward_ad.dual_level():
            given = made(kind, which)
            before = {name: x.clone() for name, x in given.items() if isinstance(x, torch.Tensor) and name != which}
            with pytest.raises((ArgumentError, UnsupportedError), match=KINDS[kind][1]):
                function(**given)
        for name, x in before.items():
            assert torch.equal(x, given[name]), "something was written before the refusal"


@pytest.mark.parametrize("which", OPERANDS)
@pytest.mark.parametrize("kind", ["dual", "sparse", "csr", "mkldnn", "nested"])
@pytest.mark.parametrize("op", OPS)
def test_the_op_refuses_by_name(op: str, kind: str, which: str) -> None:
    OPS[op](**operands())
    with forward_ad.dual_level(), pytest.raises((ArgumentError, UnsupportedError), match=KINDS[kind][1]):
        OPS[op](**made(kind, which))


@pytest.mark.parametrize("which", OPERANDS)
@pytest.mark.parametrize("op", ["op merge_state", "op merge_states"])
def test_the_op_materialises_lazy_views(op: str, which: str) -> None:
    """As torch does for every op that does not know of them."""
    given = operands()
    out, lse = OPS[op](**given | {which: torch._neg_view(-given[which])})
    assert torch.equal(out, OPS[op](**given)[0])
    assert torch.equal(lse, OPS[op](**given)[1])


@pytest.mark.parametrize("op", OPS)
def test_the_op_describes_fake_tensors_and_refuses_a_mixture(op: str) -> None:
    real = operands()
    with FakeTensorMode() as mode:
        given: Operands = {name: mode.from_tensor(x) for name, x in real.items()}
        results = OPS[op](**given)
        for result in results or ():
            assert result.shape in ((N, H, D), (N, H))
        given["b"] = torch.empty(N, H, D, device="meta")
        with pytest.raises(ArgumentError, match="on several devices"):
            OPS[op](**given)


TRANSFORMS: dict[str, Callable[..., Any]] = {
    "vmap": lambda function, x: torch.vmap(function)(torch.stack([x, x])),
    "grad": lambda function, x: torch.func.grad(lambda y: function(y).sum())(x),
    "jvp": lambda function, x: torch.func.jvp(function, (x,), (torch.ones_like(x),)),
    "jacfwd": lambda function, x: torch.func.jacfwd(function)(x),
    "functionalize": lambda function, x: torch.func.functionalize(function)(x),
    "vmap of grad": lambda function, x: torch.vmap(torch.func.grad(lambda y: function(y).sum()))(torch.stack([x, x])),
}


@pytest.mark.parametrize("which", OPERANDS)
@pytest.mark.parametrize("transform", TRANSFORMS)
@pytest.mark.parametrize("call", [*CALLS, *OPS])
def test_transforms_are_refused(call: str, transform: str, which: str) -> None:
    given, call_it = operands(), (CALLS | OPS)[call]

    def function(x: torch.Tensor) -> torch.Tensor:
        result = call_it(**given | {which: x})
        out: torch.Tensor = result[0] if result else x
        return out

    call_it(**operands())
    with pytest.raises(UnsupportedError, match=r"wrapped by a transform|requires a gradient"):
        TRANSFORMS[transform](function, given[which])


@pytest.mark.parametrize("call", ["op merge_state", "merge_state"])
def test_inside_of_a_transform_plain_tensors_are_plain(call: str) -> None:
    given = operands()
    expected = (CALLS | OPS)[call](**given)[0]
    found = torch.vmap(lambda x: (CALLS | OPS)[call](**given)[0].sum() + x)(torch.zeros(3))
    assert torch.allclose(found, expected.sum().expand(3))


@pytest.mark.parametrize("call", CALLS)
def test_outside_of_tangents_a_dual_level_changes_nothing(call: str) -> None:
    if call == "merge_attn_states":
        states = random_states(N, H, D, torch.float32)
        with forward_ad.dual_level():
            out, lse = states.outputs()
            jitkern.merge_attn_states(out, states.a, states.a_lse, states.b, states.b_lse, lse)
            assert_merged(out, lse, states)
    with forward_ad.dual_level():
        CALLS[call](**operands())


def test_a_scale_with_a_derivative_is_refused() -> None:
    given, small = operands(), torch.empty(N, H, D, dtype=torch.float8_e5m2)
    for _ in range(2):
        scaled(**given)
        with pytest.raises(UnsupportedError, match="output_scale requires a gradient"):
            attn_states(**given, output=small, output_scale=torch.ones(1, requires_grad=True))
        with forward_ad.dual_level():
            scale = forward_ad.make_dual(torch.ones(1), torch.ones(1))
            with pytest.raises(UnsupportedError, match="output_scale carries a forward-mode"):
                attn_states(**given, output=small, output_scale=scale)


def test_a_tangent_beside_a_gradient_is_refused() -> None:
    with forward_ad.dual_level():
        given = operands()
        given["a"] = forward_ad.make_dual(given["a"].requires_grad_(), torch.ones(N, H, D))
        for call in ("merge_attn_states", "merge_state", "merge_states"):
            with pytest.raises(UnsupportedError, match="forward-mode tangent"):
                CALLS[call](**given)


class Plain(torch.Tensor):
    """A subclass with memory of its own, as nn.Parameter is one."""


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ["subclass", "parameter", "inference"])
def test_tensors_with_memory_pass(call: str, kind: str) -> None:
    given = operands()
    expected = CALLS["merge_state"](**given)[0]
    if kind == "inference":
        with torch.inference_mode():
            odd = {name: x.clone() for name, x in given.items()}
    elif kind == "subclass":
        odd = {name: x.as_subclass(Plain) for name, x in given.items()}
    else:
        odd = {name: torch.nn.Parameter(x, requires_grad=False) for name, x in given.items()}
    result = CALLS[call](**odd)
    if result is not None:
        assert torch.allclose(result[0].as_subclass(torch.Tensor), expected, atol=1e-6)


@pytest.mark.parametrize("mode", ["real", "fake", "symbolic"])
@pytest.mark.parametrize("call", ["merge_attn_states", "merge_state", "merge_states", "merge_state_in_place", "masked"])
def test_make_fx_sees_the_op(call: str, mode: Any) -> None:
    """A call that torch's tracer did not see would be a constant in the program."""

    def function(a: Any, a_lse: Any, b: Any, b_lse: Any) -> Any:
        v, s = a.clone(), a_lse.clone()
        return CALLS[call](v, s, b, b_lse) or v

    graph = make_fx(function, tracing_mode=mode)(*operands().values())
    assert "jitkern.merge" in graph.code
