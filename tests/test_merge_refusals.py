"""Bad input to merge_attn_states: every refusal names the op, the operand, what was given and what is allowed."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import jitkern
from jitkern import ArgumentError, UnsupportedError
from tests.merge_oracle import random_states

N, H, D = 6, 4, 32


def operands(**changes: Any) -> dict[str, Any]:
    states = random_states(N, H, D, torch.float32, empty=0)
    return {
        "output": torch.full_like(states.a, 5.0),
        "prefix_output": states.a,
        "prefix_lse": states.a_lse,
        "suffix_output": states.b,
        "suffix_lse": states.b_lse,
        "output_lse": torch.full_like(states.a_lse, 5.0),
    } | changes


def tensor(*shape: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


REFUSED: dict[str, tuple[dict[str, Any], list[str]]] = {
    "prefix of another shape": ({"prefix_output": tensor(N, H, D + 1)}, ["prefix_output", "[6, 4, 33]", "[6, 4, 32]"]),
    "suffix of other tokens": ({"suffix_output": tensor(N + 1, H, D)}, ["suffix_output", "[7, 4, 32]"]),
    "two dimensions": ({"suffix_output": tensor(N, H)}, ["suffix_output", "[6, 4]", "[tokens, heads, head size]"]),
    "L as [n, h]": ({"prefix_lse": tensor(N, H)}, ["prefix_lse", "[6, 4]", "[heads, tokens]", "[4, 6]"]),
    "mixed dtypes": (
        {"suffix_output": tensor(N, H, D, dtype=torch.bfloat16)},
        ["suffix_output", "bfloat16", "float32"],
    ),
    "f16 beside bf16": (
        {
            "output": tensor(N, H, D, dtype=torch.float16),
            "prefix_output": tensor(N, H, D, dtype=torch.float16),
            "suffix_output": tensor(N, H, D, dtype=torch.bfloat16),
        },
        ["suffix_output", "bfloat16", "float16"],
    ),
    "bf16 L": ({"suffix_lse": tensor(H, N, dtype=torch.bfloat16)}, ["suffix_lse", "bfloat16", "float32"]),
    "f64 output L": ({"output_lse": tensor(H, N, dtype=torch.float64)}, ["output_lse", "float64", "float32"]),
    "integers": ({"output": tensor(N, H, D, dtype=torch.int32)}, ["output", "int32", "float32"]),
    "another device": ({"prefix_output": tensor(N, H, D, device="meta")}, ["prefix_output", "meta"]),
    "no tensor": ({"prefix_lse": [0.0]}, ["prefix_lse", "list", "torch tensor"]),
    "last dimension strided": ({"suffix_output": tensor(N, H, 2 * D)[..., ::2]}, ["suffix_output", "contiguous"]),
    "output expanded": ({"output": tensor(1, H, D).expand(N, H, D)}, ["output", "overlap"]),
    "output overlapping itself": (
        {"output": tensor(4 * H * D).as_strided((N, H, D), (8, D, 1))},
        ["output", "overlap"],
    ),
    "output L expanded": ({"output_lse": tensor(1, N).expand(H, N)}, ["output_lse", "overlap"]),
    "negative view": ({"prefix_output": torch._neg_view(tensor(N, H, D))}, ["prefix_output", "lazy"]),
    "scale without an 8-bit output": ({"output_scale": tensor(1)}, ["output", "float32", "float8_e4m3fn"]),
    "8-bit output without a scale": (
        {"output": tensor(N, H, D, dtype=torch.float8_e4m3fn)},
        ["output", "float8_e4m3fn", "scale"],
    ),
    "8-bit input without a scale": (
        {
            "prefix_output": tensor(N, H, D, dtype=torch.float8_e4m3fn),
            "suffix_output": tensor(N, H, D, dtype=torch.float8_e4m3fn),
        },
        ["prefix_output", "float8_e4m3fn", "scale"],
    ),
    "scale of two numbers": (
        {"output": tensor(N, H, D, dtype=torch.float8_e5m2), "output_scale": tensor(2)},
        ["output_scale", "[2]", "1 contiguous"],
    ),
    "k on the device as int64": (
        {"prefill_tokens_with_context": torch.tensor(3)},
        ["prefill_tokens_with_context", "int64", "int32"],
    ),
    "two bases": ({"lse_base": ("e", 2)}, ["lse_base=('e', 2)", "three"]),
    "k too large": ({"prefill_tokens_with_context": N + 1}, ["prefill_tokens_with_context=7", "0 to 6"]),
    "k negative": ({"prefill_tokens_with_context": -1}, ["prefill_tokens_with_context=-1"]),
    "base 1": ({"lse_base": 1}, ["lse_base=1"]),
    "base of words": ({"lse_base": "ten"}, ["lse_base='ten'", '"10"']),
    "base of a list": ({"lse_base": [2]}, ["lse_base=[2]"]),
    "base NaN": ({"lse_base": float("nan")}, ["lse_base=nan"]),
    "GPU backend for CPU tensors": ({"backend": "nvrtc"}, ["backend='nvrtc'", "cpu"]),
    "unknown backend": ({"backend": "hip"}, ["backend='hip'"]),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused(name: str) -> None:
    changes, words = REFUSED[name]
    given = operands(**changes)
    before = given["output"].clone()
    with pytest.raises(ArgumentError) as caught:
        jitkern.merge_attn_states(**given)
    for word in ["merge_attn_states", *words]:
        assert word in str(caught.value)
    assert torch.equal(given["output"], before), "something was written before the refusal"


@pytest.mark.parametrize("name", REFUSED)
def test_a_refusal_is_repeated(name: str) -> None:
    """A refused signature must not be remembered as a good one."""
    changes, _ = REFUSED[name]
    for _ in range(2):
        with pytest.raises(ArgumentError):
            jitkern.merge_attn_states(**operands(**changes))


def test_an_output_that_is_another_view_of_an_input() -> None:
    square = torch.zeros(H, H)
    with pytest.raises(ArgumentError, match="output_lse starts where prefix_lse does"):
        jitkern.merge_attn_states(
            tensor(H, H, D), tensor(H, H, D), square, tensor(H, H, D), torch.zeros(H, H), square.T
        )


def test_gradients_are_not_lost_silently() -> None:
    given = operands(prefill_tokens_with_context=torch.tensor(3, dtype=torch.int32))
    jitkern.merge_attn_states(**given)  # remembered as good
    given["prefix_lse"].requires_grad_()
    with pytest.raises(UnsupportedError, match="prefix_lse requires a gradient"):
        jitkern.merge_attn_states(**given)
    with torch.no_grad():
        jitkern.merge_attn_states(**given)


def test_stream_of_a_wrong_kind_is_refused_by_name() -> None:
    from jitkern import streams

    with pytest.raises(ArgumentError, match="stream='main'"):
        streams.stream_handle("main", 0)
    assert streams.stream_handle(0, 0) == 0
