"""The emulator itself: it has to see kernels that are broken on purpose, and what a GPU forbids."""

from __future__ import annotations

import functools
import re
import struct
from collections.abc import Callable

import pytest
import torch

from jitkern import sources
from jitkern.variants import Variant
from tests.emulator.broken import CASES, LATE_QUERIES, LATE_WEIGHTS, Broken
from tests.emulator.device import EmulatedDevice
from tests.emulator.emulate import EmulationError, Emulator
from tests.emulator.translate import translated
from tests.mla_oracle import Step, assert_decoded, make_step, reference
from tests.test_emulated_mla import decode
from tests.test_mla_codes import decode as decode_codes
from tests.test_mla_codes import make

pytestmark = pytest.mark.usefixtures("one_thread")
SEEDS = range(3)  # asynchronous work early, at random, late


@functools.cache
def step_of(rows: int) -> tuple[Step, tuple[torch.Tensor, torch.Tensor]]:
    step = make_step([15, 330], rows // 2, q_len=2, page_size=64)
    return step, reference(step, True)


@pytest.mark.parametrize(("target", "rows", "case"), CASES, ids=[f"{t}-{r}-{case.what}" for t, r, case in CASES])
def test_a_broken_kernel_is_seen_with_every_seed(
    emulator: Emulator,
    monkeypatch: pytest.MonkeyPatch,
    target: str,
    rows: int,
    case: Broken,
) -> None:
    step, expected = step_of(rows)
    device = EmulatedDevice(emulator, target, monkeypatch)
    device.patches = {"mla_decode": [(case.old, case.new)]}
    for device.seed in SEEDS:
        with pytest.raises((EmulationError, AssertionError), match=case.words):
            assert_decoded(*decode(step, True, 1), expected)


@pytest.mark.parametrize("case", [None, LATE_QUERIES], ids=["shipped", "broken"])
def test_one_part_of_many_short_requests(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, case: Broken | None
) -> None:
    step = make_step([64] * 12, 64)
    expected = reference(step)
    _in_many_orders(emulator, monkeypatch, case, lambda: assert_decoded(*decode(step, False, 1), expected))


@pytest.mark.parametrize("case", [None, LATE_WEIGHTS], ids=["shipped", "broken"])
def test_many_blocks_of_codes(emulator: Emulator, monkeypatch: pytest.MonkeyPatch, case: Broken | None) -> None:
    coded = make("codes", [700, 700], 64)
    expected = reference(coded.values)
    _in_many_orders(
        emulator,
        monkeypatch,
        case,
        lambda: assert_decoded(*decode_codes(coded, "codes", num_parts=1), expected),
    )


def _in_many_orders(
    emulator: Emulator, monkeypatch: pytest.MonkeyPatch, case: Broken | None, run: Callable[[], None]
) -> None:
    """All orders of threads agree, or, of a broken text, some do not."""
    device = EmulatedDevice(emulator, "sm_90", monkeypatch)
    device.patches = {"mla_decode": [(case.old, case.new)]} if case else {}
    failures = []
    for device.seed in range(12):
        try:
            run()
        except EmulationError as error:
            failures.append(str(error))
    if case:
        assert any(re.search(case.words, failure) for failure in failures)
    else:
        assert not failures


# ---- small texts


HEAD = """#include "include/tensor_core.cuh"
struct Params { int* out; };
JITKERN_KERNEL(Params, 64) {
  using namespace jitkern;
  __shared__ int words[64];
  __shared__ u64 barrier;
  const int thread = static_cast<int>(threadIdx.x);
"""


def run(emulator: Emulator, body: str, seed: int = 0, target: str = "sm_90") -> list[int]:
    text = sources.flatten("small", f"{HEAD}{body}}}\n", "small.cu").flat
    out = torch.zeros(64, dtype=torch.int32)
    kernel = emulator.kernel(Variant("small", "f32", 1, target), text=text)
    kernel.run(struct.pack("P", out.data_ptr()), (1, 1, 1), (64, 1, 1), seed=seed)
    return [int(x) for x in out.tolist()]


def test_barriers_shuffles_and_votes(emulator: Emulator) -> None:
    body = """
    words[thread] = thread;
    __syncthreads();
    const int other = words[63 - thread], sum = __reduce_add_sync(~0u, static_cast<unsigned>(thread));
    const unsigned odd = __ballot_sync(~0u, thread % 2);
    p.out[thread] = other + 1000 * __shfl_xor_sync(~0u, thread, 1) + (odd == 0xaaaaaaaau ? 100000 : 0) + sum % 2;
    """
    for seed in SEEDS:
        assert run(emulator, body, seed) == [63 - t + 1000 * (t ^ 1) + 100000 for t in range(64)]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ("if (thread) named_barrier(1, 64);", "deadlock\n.*barrier 1 of 64 threads.*: threads 1 2 3"),
        ("if (thread % 2) __syncwarp(); else __any_sync(~0u, 1);", "lanes of one warp are at (syncwarp|vote) and at"),
        ("words[thread] = 1; p.out[thread] = words[thread ^ 32];", "race|nobody has written"),
        ("p.out[thread] = words[thread];", "which nobody has written"),
        ("barrier_wait(shared_address(&barrier), 0);", "no initialised mbarrier"),
        ("if (thread == 0) barrier_init(shared_address(&barrier), 1); block_barrier();"
         " barrier_wait(shared_address(&barrier), 0);", r"deadlock\n.*mbarrier 0x\w+, parity 0"),
        ("copy_async<16>(shared_address(words) + 4, p.out, true);", "is no multiple of 16"),
        ("copy_async<4>(shared_address(words) + 1024, p.out, true);", "outside of the block's shared memory"),
        ("copy_async<4>(shared_address(words + thread), p.out, true); p.out[thread] = words[thread];", "race"),
        ("*reinterpret_cast<float4*>(p.out + 1) = float4{};", "small.cu:8: .* which is no multiple of 16"),
        ('asm volatile("trap;");', "trap"),
    ],
)  # fmt: skip
def test_what_a_gpu_forbids_is_an_error(emulator: Emulator, body: str, words: str) -> None:
    for seed in SEEDS:
        with pytest.raises(EmulationError, match=words):
            run(emulator, body, seed)


def test_an_instruction_that_is_not_emulated_does_not_compile(emulator: Emulator) -> None:
    with pytest.raises(AssertionError, match="brkpt"):
        run(emulator, 'asm volatile("brkpt;");')


def test_asm_becomes_calls() -> None:
    text = 'a;\nasm volatile("{ .reg .pred p; setp.ne.b32 p, %1, 0;\\n"\n    "@!p foo.x::y {%0, %2}, [%1]; }" : "=r"(p) : "r"(f(1, 2)), "r"(c[0]) : "memory");\nb;'  # noqa: E501
    assert translated(text) == (
        "a;\ndo { bool ptx_p; ptx::setp_ne_b32(ptx_p, (f(1, 2)), 0);"
        " if (!ptx_p) ptx::foo_x__y(ptx::registers((p), (c[0])), ((f(1, 2)))); } while (0)\n;\nb;"
    )
