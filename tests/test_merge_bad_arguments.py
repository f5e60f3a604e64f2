"""Options of a wrong type or value, to every public function: a refusal that names them, cold and warm."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import jitkern
from jitkern import ArgumentError, UnsupportedError
from jitkern.compat import flash_mla, flashinfer, sglang, vllm
from jitkern.errors import JitkernError
from tests.merge_oracle import random_states
from tests.mla_oracle import make_step

N, H, D = 4, 2, 8
Arguments = dict[str, Any]


def attn() -> Arguments:
    s = random_states(N, H, D, torch.float32, empty=0)
    inputs = {"prefix_output": s.a, "prefix_lse": s.a_lse, "suffix_output": s.b, "suffix_lse": s.b_lse}
    return {"output": torch.empty_like(s.a), **inputs, "output_lse": torch.empty_like(s.a_lse)}


def grouped() -> Arguments:
    small = torch.empty(N, H, D, dtype=torch.float8_e4m3fn)
    return attn() | {"output": small, "output_group_scale": torch.empty(N, 1)}


def pair() -> Arguments:
    s = random_states(N, H, D, torch.float32, empty=0)
    return {"v_a": s.a, "s_a": s.a_lse.T.contiguous(), "v_b": s.b, "s_b": s.b_lse.T.contiguous()}


def in_place() -> Arguments:
    return dict(zip(("v", "s", "v_other", "s_other"), pair().values(), strict=True))


def states() -> Arguments:
    p = pair()
    return {"v": torch.stack([p["v_a"], p["v_b"]], 1), "s": torch.stack([p["s_a"], p["s_b"]], 1)}


def context() -> Arguments:
    starts = torch.tensor([0, 2, N])
    return {"lse": torch.zeros(H, N), "query_start_loc": starts, "context_start_loc": starts}


def decode(**options: Any) -> Any:
    step = make_step([5, 8], 2, page_size=4)
    made = jitkern.MLADecode(2, 2, device="cpu", page_size=4)
    made.plan(step.cache_seqlens, q_len=options.pop("q_len", None))
    return made.run(*step.operands(), **options)


CALLS: dict[str, tuple[Callable[..., Any], Callable[[], Arguments]]] = {
    "merge_attn_states": (jitkern.merge_attn_states, attn),
    "grouped": (jitkern.merge_attn_states, grouped),
    "merge_state": (jitkern.merge_state, pair),
    "merge_state_in_place": (jitkern.merge_state_in_place, in_place),
    "merge_states": (jitkern.merge_states, states),
    "vllm": (vllm.merge_attn_states, attn),
    "vllm mask": (vllm.mask_empty_context_lse, context),
    "sglang": (sglang.merge_state_v2, pair),
    "flashinfer": (flashinfer.merge_state, pair),
    "flashinfer in place": (flashinfer.merge_state_in_place, in_place),
    "flashinfer states": (flashinfer.merge_states, states),
    "decode": (decode, dict),
}
TAKES_BASE = ("merge_attn_states", "grouped", "merge_state", "merge_state_in_place", "merge_states", "decode")
BASES = [np.ones(3), np.bool_(True), torch.ones(2), torch.tensor(2.0), 10**400, [2], {}, True, ("e", None, 2), b"e"]
COUNTS = [True, 1.5, "2", np.int64(2), np.ones(1), [2], 10**30, -1]
FLAGS: list[Any] = [None, 1, 0.0, "yes", np.bool_(True), torch.tensor(True), [], math.nan, 10**30]
REFUSED: list[tuple[str, str, Any]] = [
    *((call, "lse_base", value) for call in TAKES_BASE for value in BASES),
    *((call, "prefill_tokens_with_context", k) for call in ("merge_attn_states", "grouped", "vllm") for k in COUNTS),
    *((call, "backend", x) for call in TAKES_BASE[:-1] for x in (None, 3, np.ones(2), ["cpu"], torch.ones(2))),
    *(("merge_states", "sink_in_lse", value) for value in FLAGS),
    *(("grouped", "scale_ue8m0", value) for value in FLAGS),
    *(("decode", "causal", value) for value in FLAGS),
    *(("decode", "softmax_scale", x) for x in (True, "1", math.nan, math.inf, 10**400, [1], torch.tensor(1.0), 1j)),
    *(("decode", "plan", value) for value in ("1", np.ones(2), torch.ones(2), torch.empty(0), True, 1.0, 7)),
    *(("decode", "q_len", value) for value in ("1", 1.0, True, [1], torch.tensor(1), 10**30, -1)),
]


@pytest.mark.filterwarnings("ignore:elementwise comparison failed")
@pytest.mark.parametrize(("call", "name", "value"), REFUSED, ids=lambda x: repr(x)[:24])
def test_refused_by_name(call: str, name: str, value: Any) -> None:
    function, arguments = CALLS[call]
    for _ in range(2):
        with pytest.raises(JitkernError) as caught:
            function(**arguments() | {name: value})
        said = str(caught.value)
        assert name in said or (name == "q_len" and "query tokens" in said), said
        function(**arguments())  # the next time it would be remembered


def test_a_number_of_numpy_does_not_upset_later_calls() -> None:
    for base in (np.float64(2), "e", np.float64(2), ("e", 2, 10), 2):
        jitkern.merge_state(**pair(), lse_base=base)
        jitkern.merge_state(**pair(), lse_base=("e", 2, 10))


@pytest.mark.parametrize("call", [name for name in CALLS if name != "decode"])
def test_every_operand_of_a_wrong_type(call: str) -> None:
    function, arguments = CALLS[call]
    function(**arguments())
    for name in arguments():
        given = arguments()[name]
        wrong = [object(), 3, True, "x", [], {}, [[0.0]], np.zeros(given.shape), torch.tensor(1.0), torch.empty(0)]
        wrong += [
            given[None],
            *([] if name == "lse" else [given[:-1]]),  # any number of heads will do there
            given.flatten()[:-1],
            given.to(torch.complex64),
            given.float().to(torch.int16),
        ]
        for value in [*wrong, torch.empty_like(given, device="meta"), given.to_sparse() if call != "grouped" else 1j]:
            if name == "context_start_loc" and isinstance(value, torch.Tensor) and value.dtype == torch.int64:
                continue
            with pytest.raises((ArgumentError, UnsupportedError), match=name.split("_")[-1]):
                function(**arguments() | {name: value})


@pytest.mark.parametrize("name", ["lse", "query_start_loc", "context_start_loc"])
def test_the_mask_of_contexts(name: str) -> None:
    wrong: dict[str, Any] = {
        "lse": [
            torch.zeros(H, N, dtype=torch.int64),
            torch.zeros(1, N).expand(H, N),
            torch.zeros(H, N).to(torch.uint16),
        ],
        "query_start_loc": [torch.tensor([0.0, 2, N]), torch.tensor([0, N])],
        "context_start_loc": [torch.tensor([0.0, 2, N]), torch.tensor([0, N])],
    }
    for value in wrong[name]:
        with pytest.raises(ArgumentError, match=r"lse|start_loc"):
            vllm.mask_empty_context_lse(**context() | {name: value})
    leaf = torch.zeros(H, N, requires_grad=True)
    with pytest.raises(UnsupportedError, match="lse requires a gradient"):
        vllm.mask_empty_context_lse(**context() | {"lse": leaf})
    vllm.mask_empty_context_lse(**context() | {"lse": leaf * 1})


def test_an_output_lse_that_requires_a_gradient_is_refused_warm_too() -> None:
    wanting = torch.empty(H, N, requires_grad=True)
    for _ in range(2):
        with pytest.raises(UnsupportedError, match="output_lse requires a gradient"):
            jitkern.merge_attn_states(**attn() | {"output_lse": wanting})
        jitkern.merge_attn_states(**attn())


@pytest.mark.parametrize("name", ["max_batch", "num_heads", "num_heads_k", "max_q_len"])
@pytest.mark.parametrize("value", [1 << 31, 10**30, True, 2.0, "2", None, -1])
def test_sizes_of_a_decoder(name: str, value: Any) -> None:
    given: Arguments = {"max_batch": 2, "num_heads": 2, "device": "cpu"}
    with pytest.raises(ArgumentError, match=name):
        jitkern.MLADecode(**given | {name: value})


@pytest.mark.filterwarnings("ignore:Accessing the data pointer of FakeTensor")
@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")
def test_a_decoder_refuses_tensors_that_are_not_memory() -> None:
    import torch.autograd.forward_ad as forward_ad
    from torch._subclasses import FakeTensorMode

    step = make_step([5, 8], 2, page_size=4)
    made: Any = jitkern.MLADecode(2, 2, device="cpu", page_size=4)
    made.plan(step.cache_seqlens)
    made.run(*step.operands())
    for i, name in enumerate(("q", "k_cache", "block_table", "cache_seqlens")):
        given = list(step.operands())
        fake = FakeTensorMode().from_tensor(given[i])
        zeros = torch._efficientzerotensor(fake.shape, dtype=fake.dtype)
        for odd in (fake, zeros):
            with pytest.raises(ArgumentError, match=f"{name} is a .*without memory"):
                made.run(*given[:i], odd, *given[i + 1 :])
        with pytest.raises(UnsupportedError, match="wrapped by a transform"):
            torch.vmap(lambda x, i=i, given=given: made.run(*given[:i], x, *given[i + 1 :])[0])(given[i][None])
    with pytest.raises(ArgumentError, match="cache_seqlens is a FakeTensor"):
        made.plan(FakeTensorMode().from_tensor(step.cache_seqlens))
    q, *others = step.operands()
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        with pytest.raises(UnsupportedError, match="q carries a forward-mode tangent"):
            made.run(dual, *others)


@pytest.mark.parametrize("name", ["num_q_tokens_per_head_k", "num_heads_k"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "1", True, 10**30, [1], np.ones(2), torch.tensor(1), math.nan])
def test_the_metadata_of_flash_mla(name: str, value: Any) -> None:
    given: Arguments = {"num_q_tokens_per_head_k": 2, "num_heads_k": 1}
    lengths = torch.tensor([5, 8], dtype=torch.int32)
    with pytest.raises(ArgumentError, match=name):
        flash_mla.get_mla_metadata(lengths, **given | {name: value})
    with pytest.raises(JitkernError, match="meta"):
        flash_mla.get_mla_metadata(lengths.to("meta"), **given)


@pytest.mark.parametrize("head_dim_v", [None, 256, "512", 512.0, np.ones(2), torch.empty(0)])
def test_the_value_size_of_flash_mla(head_dim_v: Any) -> None:
    step, (plan, _) = make_step([5, 8], 2, page_size=4), flash_mla.get_mla_metadata()
    with pytest.raises(UnsupportedError, match="head_dim_v"):
        flash_mla.flash_mla_with_kvcache(*step.operands(), head_dim_v, plan)
    q, k_cache, block_table, lengths = step.operands()
    with pytest.raises(ArgumentError, match="q on meta"):
        flash_mla.flash_mla_with_kvcache(q.to("meta"), k_cache, block_table, lengths, 512, plan)


@pytest.mark.parametrize("op", [None, 3, "merge_state", int, torch.tensor(1.0)])
def test_what_is_no_op_is_not_prepared(op: Any) -> None:
    with pytest.raises(ArgumentError, match="op is"):
        jitkern.prepare(op, **pair())


WARM: dict[str, list[Any]] = {
    "kernel": [[], {}, 3, np.ones(2), "nothing"],
    "pack": [[], "4", 0, True, 1.5, torch.empty(0), np.ones(2)],
    "device": [-1, 10**30, True, 1.5, "gpu", b"gpu", [], torch.ones(1), object()],
    "d": [[], {}, 1.5, np.ones(2), None],
}


@pytest.mark.parametrize(("name", "value"), [(n, x) for n, values in WARM.items() for x in values])
def test_what_is_warmed(name: str, value: Any) -> None:
    given: Arguments = {"kernel": "merge_states", "dtype": "f32", "pack": 4, "device": "cpu", "d": 8}
    with pytest.raises(ArgumentError, match=name):
        jitkern.warmup(**given | {name: value})
