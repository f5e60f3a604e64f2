"""Faults that other merge kernels had, by the project and number of their report, with their input and right outcome.

Where another file has the test already, `ELSEWHERE` names it. Not tests of their own: vllm#26042 (a symptom of the
first group), vllm#26130 (not a fault of a merge), and reports of speed (ATOM#1938, vllm#56954, flashinfer#459, #313),
which are the benchmarks' matter.
"""

from __future__ import annotations

import ast
import math
from pathlib import Path

import pytest
import torch

import jitkern
from jitkern.compat import vllm
from tests.merge_oracle import States, random_states
from tests.states_oracle import Partials, assert_states, random_partials
from tests.test_merge_contract import device_of, run, same_bits

TESTS = Path(__file__).parent
LARGE = "test_merge_contract.py::test_finite_sentinels_and_large_logarithms_are_ordinary_numbers"
ELSEWHERE = {
    "TE#716": LARGE,
    "ring-flash-attention#34": LARGE,
    "absorption in the sigmoid form": "test_merge_contract.py::test_absorption",
    "vllm#28840": "test_merge_contract.py::test_known_values_of_two_bases",
    "flashinfer#2113": "test_merge_family.py::test_every_operand_has_a_base_of_its_own",
    "vllm#45500": "gpu/test_merge_grid.py::test_more_than_2_to_the_32_elements",
    "sglang#29720": "gpu/test_compat_grids.py::test_sglang_overflow_regression",
    "flashinfer#761": "test_merge_contract.py::test_any_head_size",
    "sglang#38952": "test_merge_family.py::test_nothing_to_do_is_legal",
    "MSLK 4c82fc33": "test_merge_guard_pages.py::test_no_access_outside_the_operands",
    "pytorch#131277": "gpu/sanitizer_cases.py::narrow_and_ragged_grids",
    "sglang#5404": "gpu/test_launch.py::test_current_stream_behind_a_long_kernel",
    "vllm#16693": "gpu/test_launch.py::test_capture_and_replay_with_changed_inputs_on_another_stream",
    "TE#1624": "gpu/test_field_bugs_gpu.py::test_transposed_logarithms_of_another_stream",
    "sglang#5318": "test_merge_traced.py::test_compiled_whole_and_for_any_number_of_tokens",
    "vllm#48739": "test_torch_op.py::test_other_prefill_counts_neither_compile_nor_bind_again",
    "local-inference-lab/vllm#468": "gpu/test_field_bugs_gpu.py::test_aliased_a_thousand_times",
    "flashinfer#372": "test_merge_family.py::test_a_mask_of_another_type_is_refused_not_misread",
    "vllm#33097": "test_merge_float8.py::test_every_code_tie_and_special_value",
    "vllm#36518": "test_merge_float8.py::test_a_merge_is_rounded_to_the_nearest_code",
    "ROCm/vllm#569": "test_merge_float8.py::test_every_code_tie_and_special_value",
    "vllm#40930": "test_merge_quantise.py::test_groups",
    "pytorch#156012": "test_merge_states.py::test_eight_partials_are_rounded_once_where_a_chain_rounds_seven_times",
    "xformers 8354497d": "test_merge_gradients.py::test_against_autograd_of_the_formula",
    "flash-attention cute#1782": "gpu/test_launch.py::test_the_tensors_device_counts_not_the_current_one",
}


@pytest.mark.parametrize("report", ELSEWHERE)
def test_the_tests_named_above_exist(report: str) -> None:
    file, name = ELSEWHERE[report].split("::")
    tree = ast.parse((TESTS / file).read_text(encoding="utf-8"))
    assert name in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


# ---- empty and infinite states -----------------------------------------------------------------------------


def test_vllm_15492_flash_attention_2_says_plus_infinity(backend: str) -> None:
    states = random_states(4, 2, 64, torch.float16, device_of(backend), empty=0)
    states.a_lse.fill_(math.inf), states.b_lse.fill_(0.3)
    out, lse = run(states, backend)
    assert same_bits(out, states.b)
    assert same_bits(lse, states.b_lse)


@pytest.mark.parametrize("garbage", [0.0, 7.0, math.nan])
def test_vllm_27491_two_empty_chunks(backend: str, garbage: float) -> None:
    states = random_states(4, 2, 64, torch.bfloat16, device_of(backend), empty=0)
    states.a_lse.fill_(-math.inf), states.b_lse.fill_(-math.inf)
    states.a.fill_(garbage), states.b.fill_(garbage)
    out, lse = run(states, backend)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


@pytest.mark.parametrize("d", [32, 512])
def test_vllm_39148_some_rows_empty_on_both_sides(backend: str, d: int) -> None:
    states = random_states(64, 4, d, torch.float16, device_of(backend), empty=0)
    whole, whole_lse = run(states, backend)
    draw = torch.rand(4, 64, generator=torch.Generator().manual_seed(d)).to(states.a.device)
    empty = draw < 0.35
    for lse in (states.a_lse, states.b_lse):
        lse[draw < 0.25], lse[(draw >= 0.25) & empty] = -math.inf, math.inf
    states.a[empty.T], states.b[empty.T] = math.nan, math.nan
    out, lse = run(states, backend)
    assert (out[empty.T] == 0).all()
    assert (lse[empty] == -math.inf).all()
    assert same_bits(out[~empty.T], whole[~empty.T])
    assert same_bits(lse[~empty], whole_lse[~empty])


def test_flashinfer_4051_empties_of_every_kind(backend: str) -> None:
    device = device_of(backend)
    for count in (0, 1, 3):
        v = torch.full((4, count, 2, 64), math.nan, dtype=torch.float16, device=device)
        out, lse = jitkern.merge_states(v, torch.full((4, count, 2), -math.inf, device=device), backend=backend)
        assert (out == 0).all()
        assert (lse == -math.inf).all()
    v, s = torch.full((3, 2, 64), 5.0, device=device), torch.full((3, 2), -math.inf, device=device)
    other, mask = torch.full_like(v, math.nan), torch.tensor([True, False, True], device=device)
    jitkern.merge_state_in_place(v, s, other, s.clone(), mask, backend=backend)
    assert (v[[0, 2]] == 0).all()
    assert (v[1] == 5).all(), "a masked row stays as it is, empty or not"
    assert (s == -math.inf).all()


def test_vllm_49334_requests_without_keys(backend: str) -> None:
    """Rows 2 to 132 have no context; their prefix has a finite L and NaN for O."""
    states = random_states(134, 3, 64, torch.bfloat16, device_of(backend), empty=0)
    whole, whole_lse = run(states, backend)
    states.a[2:133], states.a_lse[:, 2:133] = math.nan, 7.0
    queries, context = (
        torch.tensor(x, dtype=torch.int32).to(states.a.device) for x in ([0, 2, 133, 134], [0, 4, 4, 7])
    )
    vllm.mask_empty_context_lse(states.a_lse, queries, context)
    out, lse = run(states, backend)
    assert same_bits(out[2:133], states.b[2:133])
    assert same_bits(lse[:, 2:133], states.b_lse[:, 2:133])
    for rest in (slice(0, 2), slice(133, 134)):
        assert same_bits(out[rest], whole[rest])
        assert same_bits(lse[:, rest], whole_lse[:, rest])


def test_atom_1832_nothing_of_an_empty_side_is_multiplied_by_zero(backend: str) -> None:
    states = random_states(5, 2, 64, torch.float32, device_of(backend), empty=0)
    states.a_lse.fill_(-math.inf)
    states.a.copy_(torch.tensor([math.nan, math.inf, 1e38, -math.inf]).repeat(16))
    out, lse = run(states, backend)
    assert same_bits(out, states.b)
    assert same_bits(lse, states.b_lse)


def test_sglang_36990_all_shards_empty(backend: str) -> None:
    v = torch.full((6, 8, 2, 64), math.nan, dtype=torch.bfloat16, device=device_of(backend))
    s = torch.full((6, 8, 2), -math.inf, device=v.device)
    out, lse = jitkern.merge_states(list(v.unbind(1)), list(s.unbind(1)), backend=backend)
    assert (out == 0).all()
    assert (lse == -math.inf).all()


# ---- layout, strides, base ---------------------------------------------------------------------------------


def test_vllm_21996_logarithms_made_token_first(backend: str) -> None:
    states = random_states(7, 3, 64, torch.float16, device_of(backend), empty=0)
    other = States(states.a, states.a_lse, states.b, states.b_lse.T.contiguous().T)
    for x, y in zip(run(states, backend), run(other, backend), strict=True):
        assert same_bits(x, y)


def test_vllm_57012_the_layout_of_a_square_is_in_the_name_of_the_op(backend: str) -> None:
    states = random_states(16, 16, 64, torch.float32, device_of(backend), empty=0)
    out, lse = run(states, backend)
    v, s = jitkern.merge_state(states.a, states.a_lse.T, states.b, states.b_lse.T, backend=backend)
    assert same_bits(v, out)
    assert same_bits(s, lse.T)
    wrong, _ = jitkern.merge_state(states.a, states.a_lse, states.b, states.b_lse, backend=backend)
    assert not torch.equal(wrong, out), "a square L by the other op is another L"
    oblong = random_states(16, 8, 64, torch.float32, device_of(backend), empty=0)
    with pytest.raises(jitkern.ArgumentError, match=r"prefix_lse has shape \[16, 8\]; expected \[heads, tokens\]"):
        jitkern.merge_attn_states(out[:, :8].clone(), oblong.a, oblong.a_lse.T, oblong.b, oblong.b_lse)


def test_vllm_42642_a_padded_suffix_has_strides_of_its_own(backend: str) -> None:
    states = random_states(33, 4, 128, torch.bfloat16, device_of(backend))
    expected = run(states, backend)
    padded = torch.nn.functional.pad(states.b, (0, 64), value=math.nan)[..., :128]
    for x, y in zip(run(States(states.a, states.a_lse, padded, states.b_lse), backend), expected, strict=True):
        assert same_bits(x, y)
    room = torch.full((33, 4, 192), 99.0, dtype=torch.bfloat16, device=padded.device)
    out = room[..., :128]
    jitkern.merge_attn_states(out, states.a, states.a_lse, padded, states.b_lse, backend=backend)
    assert same_bits(out, expected[0])
    assert (room[..., 128:] == 99).all()


def test_sglang_33064_a_prefix_in_base_2_and_a_suffix_in_base_e(backend: str) -> None:
    """Z = [2, 8]: the answer is 8 whatever the notation; 7.2330 and 8.8080 are the two ways of mixing them up."""
    states = random_states(1, 1, 64, torch.float32, device_of(backend), empty=0)
    states.a.fill_(0), states.b.fill_(10)
    in_base = {"e": (math.log(2), math.log(8)), "2": (1.0, 3.0)}
    for bases in (("e", "e", "e"), ("2", "2", "2"), ("2", "e", "e"), ("e", "2", "2")):
        states.a_lse.fill_(in_base[bases[0]][0]), states.b_lse.fill_(in_base[bases[1]][1])
        out, lse = run(states, backend, lse_base=bases)
        assert torch.allclose(out, torch.full_like(out, 8.0), atol=1e-5)
        assert torch.allclose(lse, torch.full_like(lse, math.log(10) if bases[2] == "e" else math.log2(10)))
    states.a_lse.fill_(1.0), states.b_lse.fill_(3.0)
    assert abs(run(states, backend)[0][0, 0, 0].item() - 8.8080) < 1e-4


# ---- size and geometry -------------------------------------------------------------------------------------


@pytest.mark.parametrize(("heads", "d"), [(65, 128), (96, 128), (97, 128), (128, 128), (96, 256), (33, 256), (96, 512)])
def test_sglang_23993_many_heads(backend: str, heads: int, d: int) -> None:
    p = random_partials(3, 3, heads, d, torch.bfloat16, device_of(backend))
    assert_states(*jitkern.merge_states(p.v, p.s, backend=backend), p)
    pair = Partials(p.v[:, :2], p.s[:, :2])
    v, s = pair.v[:, 0].clone(), pair.s[:, 0].clone()
    jitkern.merge_state_in_place(v, s, pair.v[:, 1], pair.s[:, 1], backend=backend)
    assert_states(v, s, pair)


@pytest.mark.parametrize("d", [1, 3, 16, 24, 59, 80, 111, 192, 576])
def test_flashinfer_761_any_head_size_of_many_partials(backend: str, d: int) -> None:
    p = random_partials(5, 4, 3, d, torch.bfloat16, device_of(backend))
    assert_states(*jitkern.merge_states(p.v, p.s, backend=backend), p)


def test_vllm_45527_padded_strides_beyond_2_to_the_32(backend: str, tmp_path: Path) -> None:
    """Little data, far apart: a file with holes stands for 8.6 GB."""
    if device_of(backend) != "cpu":
        pytest.skip("on a GPU by tests/gpu/test_merge_grid.py, in real memory")
    stride, states = (1 << 31) + 8, random_states(3, 2, 64, torch.bfloat16, disjoint=False)
    file = tmp_path / "holes"
    with file.open("wb") as opened:
        opened.truncate(2 * (2 * stride + 1024))
    room = torch.from_file(str(file), shared=True, size=2 * stride + 1024, dtype=torch.bfloat16)
    far = room.as_strided((3, 2, 64), (stride, 128, 1), 8)
    out, lse = run(states, backend)
    far.copy_(states.a)
    for x, y in zip(run(States(far, states.a_lse, states.b, states.b_lse), backend), (out, lse), strict=True):
        assert same_bits(x, y)
    jitkern.merge_attn_states(far, states.a, states.a_lse, states.b, states.b_lse, backend=backend)
    assert same_bits(far.clone(), out)
    wide = room.as_strided((1, 3, 2, 64), (128, stride, 64, 1), 8)
    wide.copy_(torch.stack([states.a, states.b], 1)[:1, :1].expand(1, 3, 2, 64))
    s = torch.zeros(1, 3, 2)
    v, _ = jitkern.merge_states(wide, s)
    assert_states(v, None, Partials(wide.clone(), s))
