"""%load_ext jitkern in a real IPython shell, on the CPU and compile-only."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

pytest.importorskip("IPython", reason="IPython is not installed (pip install 'jitkern[notebook]')")
pytest.importorskip("torch")

import jitkern
from jitkern import driver
from jitkern.kernel import html
from tests.nvrtc import has_nvrtc

AXPY = "__global__ void axpy(T* y, const T* x, float a, int n) {\n  int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
AXPY += "  if (i < n) y[i] = y[i] + a * x[i];\n}\n"
SHUFFLE = "__global__ void s(float* y) {\n  y[0] = __shfl_xor_sync(~0u, y[0], 1);\n}\n"


@pytest.fixture(scope="module")
def shared_shell() -> Iterator[Any]:
    from IPython.core.interactiveshell import InteractiveShell

    shell = InteractiveShell()
    assert shell.run_line_magic("load_ext", "jitkern") is None
    shell.run_cell("import torch")
    yield shell
    shell.restore_sys_module_state()


@pytest.fixture
def shell(shared_shell: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    shown: list[Any] = []
    monkeypatch.setattr("IPython.display.display", shown.append)
    shared_shell.user_ns["shown"] = shown
    return shared_shell


def test_a_cell_becomes_a_kernel_that_is_called(shell: Any) -> None:
    said = shell.run_cell_magic("kernel", "axpy --grid 'cdiv(n, 128)' --block 128", AXPY)
    assert re.match(r"axpy-f32 for \w+: (compiled|cached) in \d+ ms", repr(said))
    if has_nvrtc():
        assert re.search(r"\d+ registers, no spills", repr(said))
    assert "✓ axpy-f32" in said._repr_html_()
    shell.run_cell_magic("kernel", "again --grid 'cdiv(n, 128)' --block 128", AXPY.replace("axpy", "again"))
    run = shell.run_cell("import torch\ny = torch.zeros(1000)\naxpy(y, torch.ones(1000), 2.0, 1000)\ny.sum().item()")
    assert run.result == 2000


def test_editing_and_rerunning_compiles_the_new_text(shell: Any) -> None:
    for factor in ("2.0f", "3.0f"):
        shell.run_cell_magic(
            "kernel", "f --grid 1 --block 4", f"__global__ void f(float* y) {{ y[threadIdx.x] = {factor}; }}"
        )
        assert shell.run_cell("z = torch.zeros(4); f(z); z[3].item()").result == float(factor[:3])


def test_a_compile_error_is_html_with_the_line_and_a_caret(shell: Any) -> None:
    shell.user_ns["broken"] = "as before"
    with pytest.raises(jitkern.CompileError, match=r"^broken\.cu:3: .*wrong") as caught:
        shell.run_cell_magic("kernel", "broken", "__global__ void broken(float* y) {\n  y[0] = wrong < 1;\n}\n")
    (message,) = shell.user_ns["shown"]
    shown = message._repr_html_()
    assert "broken.cu:3" in shown, "the line of the cell, the magic's own being the first"
    assert "wrong &lt; 1;" in shown, "the line of the source, escaped"
    column = re.search(r"\n<span[^>]*>     \| ( *)\^", shown)
    assert column is not None
    assert len(column[1]) == "  y[0] = wrong".index("wrong")
    assert shell.user_ns["broken"] == "as before"
    assert caught.value._render_traceback_() == [f"CompileError: {caught.value}"]  # type: ignore[attr-defined]
    assert "\n" not in str(caught.value)


def test_a_text_for_the_gpu_only_is_compiled_only(shell: Any) -> None:
    if not has_nvrtc():
        pytest.skip("NVRTC is not installed")
    if driver.available():
        pytest.skip("there is a GPU, where it simply loads")
    said = repr(shell.run_cell_magic("kernel", "s --grid 1 --block 32", SHUFFLE))
    assert said.startswith("s for sm_90: ")
    assert said.endswith("compiled only: this text needs a GPU")
    with pytest.raises(jitkern.UnsupportedError, match="__shfl_xor_sync"):
        shell.user_ns["s"](shell.run_cell("torch.zeros(2)").result)


@pytest.mark.parametrize("target", ["sm_80", "cpu"])
def test_a_target_by_name(shell: Any, target: str) -> None:
    if target != "cpu" and not has_nvrtc():
        pytest.skip("NVRTC is not installed")
    said = repr(shell.run_cell_magic("kernel", f"axpy --dtype f64 --target {target}", AXPY))
    assert said.startswith(f"axpy-f64 for {target}: ")


def test_constants_by_option_and_holes_that_wait_for_arguments(shell: Any) -> None:
    text = "__global__ void put(int* y) { y[threadIdx.x] = D + K; }"
    said = repr(shell.run_cell_magic("kernel", "put --grid 1 --block D --const D=y.shape[0] --const K=[5]", text))
    assert said == "put(int* y): compiles at the first call, since a hole depends on the arguments"
    assert shell.run_cell("y = torch.zeros(6, dtype=torch.int32); put(y); y.tolist()").result == [11] * 6


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("k --blocks 3", "unrecognized arguments: --blocks 3"),
        ("", "the following arguments are required: name"),
        ("k --const D", "--const D: expected NAME=VALUE"),
        ("k --target sm90", "unknown target 'sm90'"),
    ],
)
def test_options_that_make_no_sense(shell: Any, line: str, words: str) -> None:
    with pytest.raises(jitkern.ArgumentError, match=words) as caught:
        shell.run_cell_magic("kernel", line, "__global__ void k(float* y) { y[0] = 1; }")
    assert hasattr(caught.value, "_render_traceback_")


def test_help_shows_the_options(shell: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert shell.run_cell_magic("kernel", "--help", "x") is None
    assert "--cpu-block" in capsys.readouterr().out


def test_bench_times_calls_and_draws_them(shell: Any) -> None:
    shell.run_cell_magic("kernel", "axpy --grid 'cdiv(n, 128)' --block 128", AXPY)
    shell.run_cell("import torch; y, x = torch.zeros(4096), torch.ones(4096)")
    table = shell.run_line_magic("jitkern", "bench axpy(y, x, 1.0, 4096); axpy(y, x, 1.0, n=64)")
    assert [row["call"] for row in table.rows] == ["axpy", "axpy"]
    assert all(row["µs"] > 0 for row in table.rows)
    assert table._repr_html_().count("<rect") == 2
    assert "of ceiling" in repr(table)
    with pytest.raises(jitkern.ArgumentError, match="expected a call of a kernel"):
        shell.run_line_magic("jitkern", "bench 3")
    with pytest.raises(jitkern.ArgumentError, match="print is a builtin"):
        shell.run_line_magic("jitkern", "bench print(3)")


def test_the_cache_and_the_doctor(shell: Any) -> None:
    shell.run_cell_magic("kernel", "axpy --target cpu", AXPY)
    table = shell.run_line_magic("jitkern", "cache")
    assert any(row["entry"].startswith("axpy-f32-") for row in table.rows)
    assert "ago" in repr(table)
    assert "<table" in table._repr_html_()
    found = shell.run_line_magic("jitkern", "doctor")
    assert {"torch", "cache"} <= {row["part"] for row in found.rows}
    with pytest.raises(jitkern.ArgumentError, match="expected bench, cache or doctor"):
        shell.run_line_magic("jitkern", "nothing")


def test_no_number_stands_where_the_line_of_the_ceiling_is() -> None:
    drawn = html.bars([("near", 96.0), ("far", 10.0)], 100.0, "GB/s")
    line = float(re.findall(r'<line x1="([\d.]+)"', drawn)[0])
    ends = {anchor: float(x) for x, anchor in re.findall(r'<text x="([\d.]+)" y="\d+" ([^>]*)>[\d.]+ GB/s', drawn)}
    assert len(ends) == 2
    for look, x in ends.items():
        assert x < line if "end" in look else x + 100 < line
