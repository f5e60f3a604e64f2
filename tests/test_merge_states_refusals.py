"""Bad input to merge_states and merge_state: each refusal names the op, the operand, what is given, what is allowed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import jitkern
from jitkern import ArgumentError

N, COUNT, H, D = 5, 3, 2, 16


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype)


V, S = zeros(N, COUNT, H, D), zeros(N, COUNT, H)
LIST, LOGS = [zeros(N, H, D) for _ in range(COUNT)], [zeros(N, H) for _ in range(COUNT)]
ENDS = torch.tensor([0, 2, 5], dtype=torch.int32)

REFUSED: dict[str, tuple[tuple[Any, Any], dict[str, Any], list[str]]] = {
    "nothing": ((None, None), {}, ["v is a NoneType", "[tokens, N, heads, head size]"]),
    "an empty list": (([], []), {}, ["0 tensors of v and 0 of s", "at least one"]),
    "lists of two lengths": ((LIST, LOGS[:2]), {}, ["3 tensors of v and 2 of s"]),
    "a list and a stack": ((LIST, S), {}, ["3 tensors of v and 1 of s"]),
    "a list of numbers": (([1.0], [2.0]), {}, ["v[0] is a float"]),
    "v of three dimensions": ((V[0], S), {}, ["v has shape [3, 2, 16]", "[tokens, N, heads, head size]"]),
    "s of another shape": ((V, S[:, :2]), {}, ["s has shape [5, 2, 2]", "[5, 3, 2]"]),
    "s token by head first": ((V, zeros(N, H, COUNT)), {}, ["s has shape [5, 2, 3]", "[5, 3, 2]"]),
    "a list of two shapes": (([LIST[0], zeros(N, H, 8)], LOGS[:2]), {}, ["v[1] has shape [5, 2, 8]", "[5, 2, 16]"]),
    "a list of two types": (([LIST[0], LIST[1].half()], LOGS[:2]), {}, ["v[1] is torch.float16", "torch.float32"]),
    "a strided head": ((zeros(N, COUNT, H, 2 * D)[..., ::2], S), {}, ["v has strides", "contiguous"]),
    "integers": ((V.int(), S), {}, ["v is torch.int32"]),
    "s in 16 bits": ((V.half(), S.half()), {}, ["s is torch.float16; expected torch.float32"]),
    "sink of other heads": ((V, S), {"sink": zeros(H + 1)}, ["sink has shape [3]", "2 contiguous"]),
    "sink in 16 bits": ((V, S), {"sink": zeros(H).bfloat16()}, ["sink is torch.bfloat16; expected torch.float32"]),
    "sink of a number": ((V, S), {"sink": 0.5}, ["sink is a float"]),
    "counts in 64 bits": ((V, S), {"num_valid": zeros(N).long()}, ["num_valid is torch.int64; expected torch.int32"]),
    "too few counts": ((V, S), {"num_valid": zeros(N - 1).int()}, ["num_valid has shape [4]", "5 contiguous"]),
    "indptr in 64 bits": ((V[0], S[0]), {"indptr": ENDS.long()}, ["indptr is torch.int64"]),
    "indptr empty": ((V[0], S[0]), {"indptr": ENDS[:0]}, ["indptr is empty", "[tokens + 1]"]),
    "indptr of a list": ((V[0], S[0]), {"indptr": [0, 3]}, ["indptr is a list"]),
    "indptr and a list": ((LIST, LOGS), {"indptr": ENDS}, ["a list of partials and indptr"]),
    "indptr and counts": ((V[0], S[0]), {"indptr": ENDS, "num_valid": zeros(2).int()}, ["both num_valid and indptr"]),
    "two bases of partials": ((V, S), {"lse_base": ("e", "2", "e")}, ["lse_base=('e', '2', 'e')", "one base"]),
    "a base below 1": ((V, S), {"lse_base": 0.5}, ["lse_base=0.5", "above 1"]),
    "out of another type": ((V, S), {"out": zeros(N, H, D).half()}, ["out is torch.float16; expected torch.float32"]),
    "out of other heads": ((V, S), {"out": zeros(N, 1, D)}, ["out has shape [5, 1, 16]", "[5, 2, 16]"]),
    "out expanded": ((V, S), {"out": zeros(1, H, D).expand(N, H, D)}, ["out has strides", "overlap"]),
    "out_lse of heads first": ((V, S), {"out_lse": zeros(H, N)}, ["out_lse has shape [2, 5]", "[5, 2]"]),
    "out as another view of v": ((V, S), {"out": V.flatten(0, 1)[:N]}, ["out lies in v", "same view"]),
    "out as another view of v[1]": ((LIST, LOGS), {"out": LIST[1].view(H, N, D).transpose(0, 1)}, ["out lies in v"]),
    "out in ragged rows": ((V[0], S[0]), {"indptr": ENDS, "out": V[0][:2]}, ["out lies in v", "not of a ragged one"]),
    "another device": ((V.to("meta"), S), {}, ["several devices", "meta"]),
    "a GPU's backend": ((V, S), {"backend": "nvrtc"}, ["backend='nvrtc'", "cpu"]),
    "sparse": ((V.to_sparse(), S), {}, ["v is torch.sparse_coo"]),
}


@pytest.mark.parametrize("with_outputs", [False, True])
@pytest.mark.parametrize("name", REFUSED)
def test_merge_states_refuses(name: str, with_outputs: bool) -> None:
    operands, more, words = REFUSED[name]
    tokens = 2 if "indptr" in more else N
    outputs = {"out": zeros(tokens, H, D), "out_lse": zeros(tokens, H)} if with_outputs else {}
    for _ in range(2):  # a refused signature must not be remembered as a good one
        with pytest.raises(ArgumentError) as caught:
            jitkern.merge_states(*operands, **outputs | more)
        for word in ("merge_states", *words):
            assert word in str(caught.value)


def test_more_tensors_than_a_list_takes() -> None:
    with pytest.raises(ArgumentError, match="a list of 257 tensors; expected at most 256, or one stacked tensor"):
        jitkern.merge_states(LIST[:1] * 257, LOGS[:1] * 257)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda v, s: jitkern.merge_state([0.0], s, v, s), "merge_state: v_a is a list"),
        (lambda v, s: jitkern.merge_state(v, None, v, s), "merge_state: s_a is a NoneType"),
        (lambda v, s: jitkern.merge_state(v, s, v, 1.0), "merge_state: s_b is a float"),
        (lambda v, s: jitkern.merge_state(v.to_sparse(), s, v, s), "merge_state: v_a is torch.sparse_coo"),
        (lambda v, s: jitkern.merge_state(v, s.T, v, s.T), r"merge_state: s_a has shape \[2, 5\]; expected \[tokens"),
        (
            lambda v, s: jitkern.merge_state_in_place(v, s, v, s.half()),
            "merge_state_in_place: s_other is torch.float16",
        ),
        (
            lambda v, s: jitkern.merge_state_in_place(v, None, v, s),
            r"merge_state_in_place: s \(as input\) is a NoneType",
        ),
        (
            lambda v, s: jitkern.merge_state_in_place(v[:1].expand(N, H, D), s, v, s),
            "merge_state_in_place: v .*overlap",
        ),
    ],
)
def test_pairs_refuse(call: Callable[[torch.Tensor, torch.Tensor], Any], words: str) -> None:
    with pytest.raises(ArgumentError, match=words):
        call(LIST[0].clone(), LOGS[0].clone())


def test_partials_that_may_be_outputs() -> None:
    """What the refusals above must not catch: a partial itself, and a view in the gaps of a stack."""
    torch.manual_seed(0)
    v, s = torch.randn(N, COUNT, H, D), torch.randn(N, COUNT, H)
    expected, expected_lse = jitkern.merge_states(v, s)
    for i in range(COUNT):
        mine, mine_s = v.clone(), s.clone()
        jitkern.merge_states(mine, mine_s, out=mine[:, i], out_lse=mine_s[:, i])
        assert torch.equal(mine[:, i], expected)
        assert torch.equal(mine_s[:, i], expected_lse)
        listed, logs = [x.clone() for x in v.unbind(1)], [x.clone() for x in s.unbind(1)]
        jitkern.merge_states(listed, logs, out=listed[i], out_lse=logs[i])
        assert torch.equal(listed[i], expected)
        assert torch.equal(logs[i], expected_lse)
    room = torch.zeros(N, COUNT, H, 2 * D)
    room[..., :D] = v
    jitkern.merge_states(room[..., :D], s, out=room[:, 1, :, D:])
    assert torch.equal(room[:, 1, :, D:], expected)
    assert torch.equal(room[..., :D], v)
