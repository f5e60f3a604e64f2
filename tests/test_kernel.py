"""jitkern.Kernel on the CPU: holes, arguments, refusals, editing; what needs a GPU is in tests/gpu/test_kernel.py."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

import jitkern
from jitkern import dtypes, loader, settings
from jitkern.kernel import Kernel
from tests.nvrtc import nvrtc_or_skip

AXPY = """
__global__ void axpy(T* y, const T* x, float a, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < n) jitkern::narrow(jitkern::widen(y[i]) + a * jitkern::widen(x[i]), y[i]);
}
"""
SCALE = "__global__ void scale(float* out, const float* x, int n) {\n  int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
SCALE += "  if (i < n) out[i] = FACTOR * x[i];\n}\n"


@pytest.fixture
def axpy() -> Kernel:
    return Kernel(AXPY, grid="cdiv(n, 256)", block=256)


def scaled(kernel: Kernel, n: int = 100, **more: Any) -> torch.Tensor:
    out = torch.zeros(n)
    kernel(out, torch.ones(n), n, **more)
    return out


# ---- holes ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("n", [0, 1, 255, 256, 257, 5000])
def test_the_dtype_of_the_tensors_fills_T(axpy: Kernel, dtype: torch.dtype, n: int) -> None:
    x, y = torch.randn(n).to(dtype), torch.randn(n).to(dtype)
    expected = (y.float() + 0.5 * x.float()).to(dtype)
    axpy(y, x, 0.5, n)
    assert torch.equal(y, expected)
    assert axpy.last is not None
    assert axpy.last.holes["T"] == dtypes.resolve(dtype).tag


def test_template_parameters_are_holes() -> None:
    text = """
    template <class T> __device__ T twice(T v) { return v + v; }
    template <typename T, int PACK, int D>
    __global__ void fill(T* out) {
      for (int i = 0; i < PACK; ++i) out[threadIdx.x * PACK + i] = twice(static_cast<T>(D));
    }"""
    fill = Kernel(text, grid=1, block="out.numel() // PACK", constants={"D": lambda a: a.out.shape[0]})
    out = torch.zeros(64)
    fill(out)
    assert (out == 128).all()
    assert fill.last is not None
    assert fill.last.holes == {"T": "f32", "PACK": 4, "D": 64}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_plain_arithmetic_is_one_text_for_every_dtype(dtype: torch.dtype) -> None:
    text = """
    #include "include/elements.cuh"
    __global__ void f(T* y, const T* x, int n) {
      for (int i = 0; i < n; i += PACK) {
        auto a = jitkern::load<PACK>(x + i), b = jitkern::load<PACK>(y + i);
        for (int j = 0; j < PACK; ++j) {
          T v = 2 * a[j] + b[j];
          v *= fmaxf(a[j], 0.5f);
          b[j] = v;
        }
        jitkern::store(y + i, b);
      }
    }"""
    x, y = torch.randn(64).to(dtype), torch.randn(64).to(dtype)
    expected = ((2 * x.float() + y.float()).to(dtype).float() * x.float().clamp(min=0.5)).to(dtype)
    kernel = Kernel(text, grid=1, block=1)
    kernel(y, x, 64)
    assert torch.equal(y, expected)
    nvrtc_or_skip()
    assert "ld.global.v4" in kernel.instance(target="sm_75").ptx, "16 bytes by one access"


@pytest.mark.parametrize(("offset", "pack"), [(0, 4), (2, 2), (1, 1)])
def test_PACK_is_the_widest_that_the_addresses_allow(offset: int, pack: int) -> None:
    copy = Kernel(
        "__global__ void copy(T* out, const T* x) { for (int i = 0; i < PACK; ++i)"
        " out[threadIdx.x * PACK + i] = x[threadIdx.x * PACK + i]; }",
        grid=1,
        block="out.numel() // PACK",
    )
    x = torch.randn(64 + offset)[offset:]
    out = torch.zeros(64)
    copy(out, x)
    assert torch.equal(out, x)
    assert copy.last is not None
    assert copy.last.holes["PACK"] == pack


def test_a_constant_by_name_and_a_default_in_the_text() -> None:
    plain = Kernel(SCALE, grid="cdiv(n, 64)", block=64, constants={"FACTOR": 3})
    assert (scaled(plain) == 3).all()
    assert (scaled(plain, FACTOR=5) == 5).all()
    assert (scaled(plain) == 3).all()
    text = f"#ifndef FACTOR\n#define FACTOR 2\n#endif\n{SCALE}"
    assert (scaled(Kernel(text, grid="cdiv(n, 64)", block=64)) == 2).all()
    assert (scaled(Kernel(text, grid="cdiv(n, 64)", block=64, constants={"FACTOR": 7})) == 7).all()


def test_tensors_that_disagree_about_T_are_named(axpy: Kernel) -> None:
    with pytest.raises(jitkern.ArgumentError, match="T is one dtype, but y says f32, x says f64"):
        axpy(torch.ones(4), torch.ones(4).double(), 1.0, 4)


def test_a_constant_that_is_nowhere_in_the_text_is_told() -> None:
    with pytest.raises(jitkern.ArgumentError, match="`WIDTH` is nowhere in the text"):
        Kernel(AXPY, constants={"WIDTH": 3})


# ---- the signature -------------------------------------------------------------------------------------------------


def test_defaults_optional_tensors_and_ranges() -> None:
    text = """__global__ void add(float* out, const float* x, const float* bias = nullptr, float p = 0.5f, int n = 4) {
      for (int i = 0; i < n; ++i) out[i] = x[i] * p + (bias ? bias[i] : 0.0f);
    }"""
    add = Kernel(text, grid=1, block=1, signature={"p": jitkern.Scalar(low=0, high=1, default=0.5)})
    out, x = torch.zeros(4), torch.ones(4)
    add(out, x)
    assert (out == 0.5).all()
    add(out, x, torch.full((4,), 2.0), p=1.0)
    assert (out == 3.0).all()
    with pytest.raises(jitkern.ArgumentError, match=r"p=1.5; `float` takes a number from 0 to 1"):
        add(out, x, None, 1.5)
    add(out, x, None, 0.25)
    with pytest.raises(jitkern.ArgumentError, match=r"p=-1.0"):  # the quick way checks too
        add(out, x, None, -1.0)
    assert (out == 0.25).all()


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("y", "x", "a", 10), "a='a'; `float` takes a number"),
        (("y", "x", 1.0, 1 << 40), "n=1099511627776; `int` takes a whole number from -2147483648 to 2147483647"),
        (("y", "x", 1.0, 2.5), "n=2.5; `int` takes a whole number"),
        (("y", "x", 1.0, "tensor"), "n is a tensor; `int` takes a number"),
        (("y[::2]", "x", 1.0, 3), r"y has strides \[2\] for shape \[5\]"),
        (("expanded", "x", 1.0, 3), "strides"),
        (("y", None, 1.0, 3), "x is None; declare it `= nullptr`"),
        (("y", [1.0], 1.0, 3), "x is a list; expected a torch tensor"),
        (("y", "x.requires_grad", 1.0, 3), "x requires a gradient"),
    ],
)
@pytest.mark.parametrize("warm", [False, True])
def test_refusals_say_what_was_given_and_what_is_allowed(axpy: Kernel, arguments: Any, words: str, warm: bool) -> None:
    y, x = torch.ones(10), torch.ones(10)
    if warm:
        axpy(y, x, 1.0, 10)
    values = {
        "y": y,
        "x": x,
        "y[::2]": y[::2],
        "expanded": torch.ones(1).expand(10),
        "x.requires_grad": x.clone().requires_grad_(),
        "tensor": torch.tensor(3),
    }
    before = y.clone()
    with pytest.raises(jitkern.JitkernError, match=words):
        axpy(*(values.get(item, item) if isinstance(item, str) else item for item in arguments))
    assert torch.equal(y, before), "something ran"


def test_unknown_names_and_missing_shapes() -> None:
    kernel = Kernel(AXPY)
    y = torch.ones(4)
    with pytest.raises(jitkern.ArgumentError, match="no block; give block="):
        kernel(y, y, 1.0, 4)
    with pytest.raises(jitkern.ArgumentError, match="no grid; give grid="):
        kernel(y, y, 1.0, 4, block=32)
    with pytest.raises(jitkern.ArgumentError, match="no parameter or hole 'WIDTH'"):
        kernel(y, y, 1.0, 4, WIDTH=1)
    with pytest.raises(jitkern.ArgumentError, match="a block takes 1 to 1024"):
        kernel(y, y, 1.0, 4, grid=1, block=2048)
    with pytest.raises(jitkern.ArgumentError, match="grid='m' fails with NameError"):
        kernel(y, y, 1.0, 4, grid="m", block=32)
    kernel(y, y.clone(), 1.0, 4, grid=1, block=32)
    assert (y == 2).all()


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("int f() { return 0; }", "defines no kernel"),
        ("__global__ void a(int n) {}\n__global__ void b(int n) {}", "defines a, b; say which"),
        ("__global__ void a(Box box) {}", "parameter `Box box`: a `Box` cannot be passed"),
        ("__global__ void a(float** rows) {}", "cannot be passed"),
        ("__global__ void a(int stream) {}", "called stream, which a call needs itself"),
        ("// __global__ void a(int n) {}", "defines no kernel"),
        ('const char* s = "__global__ void a(int n) {}";', "defines no kernel"),
    ],
)
def test_texts_that_are_no_kernel(text: str, words: str) -> None:
    with pytest.raises(jitkern.ArgumentError, match=words):
        Kernel(text)


def test_a_default_before_a_parameter_without_one_is_told() -> None:
    text = "__global__ void f(float* y, float a, int n) { y[0] = a * n; }"
    with pytest.raises(jitkern.ArgumentError, match="n comes after a parameter with a default"):
        Kernel(text, signature={"a": jitkern.Scalar(default=1.0)})


def test_one_of_several_and_a_name_that_python_keeps() -> None:
    text = "__global__ void a(float* in) { in[0] = 1; }\n__global__ void b(float* in) { in[0] = 2; }"
    value = torch.zeros(1)
    Kernel(text, "b", grid=1, block=1)(in_=value)
    assert value.item() == 2


# ---- the grid ------------------------------------------------------------------------------------------------------


def test_a_number_that_the_grid_depends_on_is_part_of_the_signature(axpy: Kernel) -> None:
    for n in (10, 20, 1000, 300, 1000, 10):
        y = torch.zeros(1000)
        axpy(y, torch.ones(1000), 1.0, n)
        assert y.sum().item() == n


def test_a_number_that_decides_nothing_binds_once(axpy: Kernel) -> None:
    y, x = torch.zeros(8), torch.ones(8)
    for _ in range(3):
        axpy(y, x, 0.0, 8)
    count = len(axpy._calls.calls)
    for i in range(10):
        axpy(y, x, float(i), 8)
    assert len(axpy._calls.calls) == count
    assert (y == sum(range(10))).all()


CHANGES: dict[str, Callable[[torch.Tensor, torch.Tensor], dict[str, Any]]] = {
    "another shape": lambda y, x: {"y": torch.zeros(2, 500), "x": torch.ones(2, 500)},
    "strides": lambda y, x: {"x": torch.ones(2000)[::2]},
    "dtype": lambda y, x: {"y": y.half(), "x": x.half()},
    "one dtype": lambda y, x: {"x": x.double()},
    "alignment": lambda y, x: {"x": torch.ones(1001)[1:]},
    "gradient": lambda y, x: {"y": torch.zeros(1000, requires_grad=True)},
    "negative view": lambda y, x: {"x": torch._neg_view(torch.ones(1000))},
    "a list": lambda y, x: {"x": [1.0] * 1000},
    "no tensor": lambda y, x: {"x": None},
    "meta": lambda y, x: {"x": torch.ones(1000, device="meta")},
    "a subclass": lambda y, x: {"x": torch.nn.Parameter(x)},
    "inference": lambda y, x: {"x": torch.ones(1000)},
    "a whole number": lambda y, x: {"a": 2},
    "no number": lambda y, x: {"a": "2"},
    "a number that the grid uses": lambda y, x: {"n": 300},
    "too large a number": lambda y, x: {"n": 1 << 40},
    "grid": lambda y, x: {"grid": 1},
    "block": lambda y, x: {"block": 32},
    "hole": lambda y, x: {"T": "f64"},
}


def outcome_of(kernel: Kernel, given: dict[str, Any]) -> tuple[str, Any]:
    try:
        kernel(**given)
    except (jitkern.JitkernError, TypeError, ValueError) as error:
        return type(error).__name__, str(error)
    return "ran", given["y"].detach().clone()


@pytest.mark.parametrize("what", CHANGES)
def test_a_call_unlike_the_recent_one_is_as_a_first_call(axpy: Kernel, what: str) -> None:
    y, x = torch.zeros(1000), torch.ones(1000)
    for _ in range(4):  # from the third on, one check of all tensors knows it
        axpy(y, x, 1.0, 1000)
    assert torch.equal(y, torch.full((1000,), 4.0))
    change, other = CHANGES[what], Kernel(AXPY, grid="cdiv(n, 256)", block=256)
    with torch.inference_mode(what == "inference"):
        results = []
        for kernel in (axpy, other):
            y.zero_()
            results.append(outcome_of(kernel, {"y": y, "x": x, "a": 1.0, "n": 1000} | change(y, x)))
    (how, got), (expected_how, expected) = results
    assert how == expected_how
    assert torch.equal(got, expected) if how == "ran" else got == expected
    y.zero_()
    axpy(y, x, 1.0, 1000)
    assert (y == 1).all()


def test_recent_calls_are_those_that_come_twice_in_a_row(axpy: Kernel) -> None:
    sizes = [10, 20, 30, 40, 50, 60]
    for _ in range(3):
        for n in sizes:
            axpy(torch.zeros(n), torch.ones(n), 1.0, n)
    assert axpy._recents.entries == []
    for n in sizes:
        for _ in range(4):
            y = torch.zeros(n)
            axpy(y, torch.ones(n), 1.0, n)
            assert (y == 1).all()
    assert len(axpy._recents.entries) == 4


def test_grid_and_block_of_functions_and_of_the_call() -> None:
    kernel = Kernel(AXPY, grid=lambda a: (jitkern.kernel.cdiv(a.y.numel(), a.threads),), block=lambda a: min(a.n, 64))
    y = torch.zeros(1000)
    kernel(y, torch.ones(1000), 1.0, 1000)
    assert (y == 1).all()
    kernel(y, torch.ones(1000), 1.0, 1000, grid=1, block=10)
    assert y.sum().item() == 1010
    kernel(y, torch.ones(1000), 1.0, 1000)
    assert y.sum().item() == 2010


# ---- other frameworks ----------------------------------------------------------------------------------------------


def test_numpy_arrays_come_in_by_dlpack(axpy: Kernel) -> None:
    numpy = pytest.importorskip("numpy")
    y = numpy.zeros(100, dtype=numpy.float32)
    for _ in range(2):
        axpy(y, numpy.ones(100, dtype=numpy.float32), 3.0, 100)
    assert (y == 6).all()


# ---- the CPU's limits ----------------------------------------------------------------------------------------------

ROW_SUM = """
#include "include/reduce.cuh"
__global__ void row_sum(float* out, const float* x, int d) {
  float sum = 0;
  for (int i = threadIdx.x; i < d; i += blockDim.x) sum += x[blockIdx.x * d + i];
  sum = jitkern::block_sum(sum);
  if (threadIdx.x == 0) out[blockIdx.x] = sum;
}
"""


def test_a_row_kernel_runs_with_one_thread_a_block() -> None:
    row_sum = Kernel(ROW_SUM, grid="out.shape[0]", block=128, cpu_block=1)
    x, out = torch.randn(7, 1000, dtype=torch.float64).float(), torch.zeros(7)
    row_sum(out, x, 1000)
    torch.testing.assert_close(out, x.double().sum(1).float(), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("body", "word"),
    [
        ("__shared__ float s[32]; s[0] = 1; out[0] = s[0];", "__shared__"),
        ("extern __shared__ float s[]; s[0] = 1; out[0] = s[0];", "__shared__"),
        ("__syncthreads(); out[0] = 1;", "__syncthreads"),
        ("out[0] = __shfl_xor_sync(~0u, out[0], 1);", "__shfl_xor_sync"),
    ],
)
def test_what_the_cpu_cannot_do_is_said_with_the_line(body: str, word: str) -> None:
    kernel = Kernel(f"\n__global__ void f(float* out) {{\n  {body}\n}}", grid=1, block=1)
    with pytest.raises(jitkern.UnsupportedError, match=rf"f: {word} \(line 3\) does not exist on the CPU"):
        kernel(torch.zeros(4))
    guarded = f"__global__ void f(float* out) {{\n#if JITKERN_ON_GPU\n{body}\n#else\nout[0] = 5;\n#endif\n}}"
    out = torch.zeros(4)
    Kernel(guarded, grid=1, block=1)(out)
    assert out[0] == 5


def test_dynamic_shared_memory_is_refused_on_the_cpu() -> None:
    with pytest.raises(jitkern.UnsupportedError, match="shared=128; the CPU has no shared memory"):
        Kernel("__global__ void f(float* out) { out[0] = 1; }", grid=1, block=1, shared=128)(torch.zeros(1))


def test_helper_functions_see_the_indices() -> None:
    text = """
    __device__ __forceinline__ int where() { return blockIdx.x * blockDim.x + threadIdx.x; }
    __global__ void iota(int* out, int n) { if (where() < n) out[where()] = where(); }
    """
    out = torch.zeros(1000, dtype=torch.int32)
    with settings.override(threads=4):
        Kernel(text, grid="cdiv(n, 8)", block=8)(out, 1000)
    assert torch.equal(out, torch.arange(1000, dtype=torch.int32))


# ---- editing -------------------------------------------------------------------------------------------------------


def test_an_edited_text_is_a_new_kernel_and_the_old_one_goes_on(axpy: Kernel) -> None:
    y, x = torch.zeros(8), torch.ones(8)
    axpy(y, x, 1.0, 8)
    edited = Kernel(AXPY.replace("a *", "10.0f * a *"), grid="cdiv(n, 256)", block=256)
    edited(y, x, 1.0, 8)
    assert (y == 11).all()
    axpy(y, x, 1.0, 8)
    assert (y == 12).all()
    compiled = jitkern.stats()["compiled"]
    Kernel(AXPY, grid="cdiv(n, 256)", block=256)(y, x, 1.0, 8)
    assert jitkern.stats()["compiled"] == compiled, "the same text again is a hit"


def test_a_compile_error_points_into_the_users_text() -> None:
    text = '// a comment\n#include "include/reduce.cuh"\n\n__global__ void f(float* out) {\n  out[0] = wrong;\n}'
    with pytest.raises(jitkern.CompileError) as caught:
        Kernel(text, grid=1, block=1)(torch.zeros(1))
    assert "f.cu:5:" in str(caught.value)
    assert ">    5" in str(caught.value).split("f.cu:5:")[1]
    assert "jitkern_" not in str(caught.value).split("The whole log")[0], "only the user's own text is shown"
    assert ">    5 |   out[0] = wrong;\n       |            ^" in str(caught.value)


def test_a_kernel_from_a_file_reads_its_own_includes_and_reloads(tmp_path: Path) -> None:
    (tmp_path / "value.cuh").write_text("#define VALUE 3\n")
    file = tmp_path / "put.cu"
    file.write_text('#include "value.cuh"\n__global__ void put(int* out) { out[0] = VALUE; }\n')
    put = Kernel(file, grid=1, block=1)
    out = torch.zeros(1, dtype=torch.int32)
    put(out)
    assert out.item() == 3
    (tmp_path / "value.cuh").write_text("#define VALUE 4\n")
    put.reload()(out)
    assert out.item() == 4
    with pytest.raises(jitkern.ArgumentError, match=r"there is no file .*nowhere\.cu"):
        Kernel(tmp_path / "nowhere.cu")
    with pytest.raises(jitkern.ArgumentError, match="only a kernel from a file can be read again"):
        Kernel(AXPY).reload()


def test_several_threads(axpy: Kernel) -> None:
    def call(n: int) -> bool:
        y = torch.zeros(n)
        for _ in range(20):
            axpy(y, torch.ones(n), 1.0, n)
        return bool((y == 20).all())

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(call, range(1, 40)))


def test_forgotten_kernels_leave_loaded_code_alone(axpy: Kernel) -> None:
    y, x = torch.zeros(8), torch.ones(8)
    axpy(y, x, 1.0, 8)
    loader.forget()
    gc.collect()
    axpy(y, x, 1.0, 8)
    assert (y == 2).all()


# ---- tuning --------------------------------------------------------------------------------------------------------

SLOW = """
#ifndef REPEAT
#define REPEAT 1
#endif
__global__ void work(float* out, const float* x, int n) {
  int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i >= n) return;
  float sum = 0;
  for (int r = 0; r < REPEAT; ++r) sum = sqrtf(sum * sum + x[i] * x[i] + r);
  out[i] += 1.0f + 0.0f * sum;
}
"""


@pytest.fixture
def own_cache(tmp_path: Path) -> Iterator[Path]:
    with settings.override(cache_dir=tmp_path):
        loader.forget()
        yield tmp_path
    loader.forget()


def test_the_quickest_candidate_is_chosen_once_and_kept_on_disk(own_cache: Path) -> None:
    from jitkern.kernel import tuning

    def make() -> Kernel:
        return Kernel(SLOW, grid="cdiv(n, 256)", block=256, constants={"REPEAT": [400, 1, 200]})

    work, out, x = make(), torch.zeros(4096), torch.ones(4096)
    work(out, x, 4096)
    assert work.last is not None
    assert work.last.holes["REPEAT"] == 1
    assert (out == 1).all(), "the trials must not touch the caller's tensors"
    assert len(list(own_cache.glob("v*/cpu/work-tuning-*/kernel.json"))) == 1
    tuning._chosen.clear()
    loader.forget()
    before = jitkern.stats()["compiled"]
    with settings.override(mode="hit-only"):
        make()(out, x, 4096)
        assert (out == 2).all()
        with pytest.raises(jitkern.MissError, match="REPEAT was not measured for such a call"):
            make()(torch.zeros(8), torch.ones(8), 8)
    assert jitkern.stats()["compiled"] == before
    work(out, x, 4096, REPEAT=200)
    assert work.last.holes["REPEAT"] == 200


def test_a_choice_travels_with_the_kernels(own_cache: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    """In a bundle, and in a root that is only read."""
    from jitkern import bundle, cache
    from jitkern.kernel import tuning

    def call() -> None:
        work = Kernel(SLOW, grid="cdiv(n, 256)", block=256, constants={"REPEAT": [40, 1]})
        work(torch.zeros(4096), torch.ones(4096), 4096)

    call()
    place = tmp_path_factory.mktemp("image")
    file = place / "kernels.bundle"
    assert sum("-tuning-" in name for name in bundle.export_bundle(file).entries) == 1
    root = place / "root"
    root.mkdir(mode=0o700)
    assert bundle.import_bundle(file, store=cache.Store(root)).added == 3
    tuning._chosen.clear()
    with settings.override(cache_dir=place / "empty", cache_roots=(root,), mode="hit-only"):
        loader.forget()
        call()


def test_a_candidate_that_does_not_compile_is_left_out(own_cache: Path) -> None:
    text = '__global__ void f(float* out) {\n  static_assert(W < 4, "too wide");\n  out[0] = W;\n}'
    out = torch.zeros(1)
    Kernel(text, grid=1, block=1, constants={"W": (8, 2)})(out)
    assert out.item() == 2
    with pytest.raises(jitkern.CompileError, match="too wide"):
        Kernel(text, grid=1, block=1, constants={"W": (8, 9)})(out)


# ---- looking at it -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("target", ["sm_75", "sm_90", "sm_120"])
@pytest.mark.parametrize("dtype", ["f32", "bf16"])
def test_compile_only_without_a_gpu(axpy: Kernel, target: str, dtype: str) -> None:
    nvrtc_or_skip()
    instance = axpy.instance(target=target, T=dtype)
    assert instance.variant.name == f"axpy-{dtype} for {target}"
    assert f".target {target}" in instance.ptx
    assert ".entry jitkern_axpy_" in instance.ptx
    resources = instance.resources
    assert resources is not None
    assert 4 <= resources.registers <= 64
    assert resources.local_bytes == 0


def test_resources_out_of_the_cubin() -> None:
    nvrtc_or_skip()
    text = """__global__ void f(float* x, int n) {
      __shared__ float s[123];
      float local[200];
      for (int i = 0; i < 200; ++i) local[i] = x[i * n];
      s[threadIdx.x] = local[n];
      __syncthreads();
      x[0] = s[n] + local[n + 1];
    }"""
    for target in ("sm_80", "sm_90"):
        found = Kernel(text).instance(target=target).resources
        assert found is not None
        assert (found.local_bytes, found.shared_bytes) == (800, 492)


def test_what_has_no_ptx_says_so(axpy: Kernel) -> None:
    with pytest.raises(jitkern.UnsupportedError, match=r'axpy.instance\(target="sm_90"\)'):
        _ = axpy.instance(target="cpu").ptx


def test_bench_leaves_the_arguments_alone(axpy: Kernel) -> None:
    y = torch.zeros(1 << 16)
    result = axpy.bench(y, torch.ones(1 << 16), 1.0, 1 << 16)
    assert (y == 0).all()
    assert result.bytes == 2 * 4 * (1 << 16)
    assert result.microseconds > 0
    assert result.gb_s == pytest.approx(result.bytes / result.microseconds / 1000)
    assert result.ceiling > 0
    assert "<svg" in result._repr_html_()
    assert "of ceiling" in str(result)


def test_a_kernel_shows_itself(axpy: Kernel) -> None:
    assert repr(axpy) == "<jitkern.Kernel axpy(T* y, const T* x, float a, int n)>"
    axpy(torch.zeros(8), torch.ones(8), 1.0, 8)
    shown = axpy._repr_html_()
    assert "axpy" in shown
    assert "blockIdx.x * blockDim.x" in shown
    assert "&lt;" in shown, "text has to be escaped"


def test_warmup_makes_a_call_that_compiles_nothing(axpy: Kernel) -> None:
    y, x = torch.zeros(8), torch.ones(8)
    axpy.warmup(y, x, 1.0, 8)
    assert (y == 0).all()
    axpy.warmup(T="f16", device="cpu")
    compiled = jitkern.stats()["compiled"]
    axpy(y, x, 1.0, 8)
    axpy(y.half(), x.half(), 1.0, 8)
    assert jitkern.stats()["compiled"] == compiled


def test_launch_time(axpy: Kernel, record_property: Any) -> None:
    from jitkern import bench

    y, x = torch.zeros(16), torch.ones(16)
    us = bench.host_microseconds(lambda: axpy(y, x, 1.0, 16), cuda=False)
    record_property("measured", f"Kernel call on the CPU, 2 tensors and 2 scalars: {us:.1f} us")
    assert us < 1000
