"""A machine that fills a cache for others needs no torch: the command works where it cannot be imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from jitkern import compilers
from jitkern.errors import ToolchainError

ROOT = Path(__file__).parents[1]
RUN = textwrap.dedent(
    """
    import sys

    class Block:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in ("torch", "cupy", "numpy", "triton"):
                raise ModuleNotFoundError(f"No module named {name!r}", name=name)

    sys.meta_path.insert(0, Block())
    from jitkern.cli import main
    sys.exit(main(sys.argv[1:]))
    """
)


def jitkern(*arguments: str, cache: Path, code: int = 0, **variables: str) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith("JITKERN_")}
    env |= {"PYTHONPATH": str(ROOT), "JITKERN_CACHE_DIR": str(cache), **variables}
    ran = subprocess.run(
        [sys.executable, "-c", RUN, *arguments], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == code, f"{ran.returncode}: {ran.stdout}{ran.stderr}"
    return ran.stdout + ran.stderr if code else ran.stdout


@pytest.fixture
def nvrtc() -> None:
    try:
        compilers.get("nvrtc")
    except ToolchainError as error:
        pytest.skip(f"no NVRTC: {error}")


@pytest.fixture
def place(tmp_path: Path) -> Path:
    folder = tmp_path / "cache"
    folder.mkdir(mode=0o700)
    return folder


@pytest.mark.parametrize("kernel", ["merge_attn_states", "merge_states", "merge_backward", "merge_quantise"])
def test_every_merge_is_warmed_and_found(kernel: str, place: Path, nvrtc: None) -> None:
    more = ["out=jitkern::e4m3"] if kernel == "merge_quantise" else []
    constants = [x for c in ("d=64", *more) for x in ("--constant", c)]
    named = (kernel, "--target", "sm_90", "--dtype", "f16", "--pack", "8", *constants)
    done = json.loads(jitkern("warm", *named, "--json", cache=place))
    assert {row["how"] for row in done["variants"]} == {"compiled"}
    again = json.loads(jitkern("warm", *named, "--json", cache=place))
    assert {row["how"] for row in again["variants"]} == {"cached"}
    assert [row["state"] for row in json.loads(jitkern("why", *named, "--json", cache=place))] == ["cached"]


def test_what_was_warmed_without_torch_is_a_hit_with_it(place: Path, nvrtc: None) -> None:
    named = ("merge_states", "--target", "sm_80", "--dtype", "f32", "--pack", "4", "--constant", "d=64")
    jitkern("warm", *named, cache=place)
    env = os.environ | {"PYTHONPATH": str(ROOT), "JITKERN_CACHE_DIR": str(place), "JITKERN_MODE": "hit-only"}
    program = [sys.executable, "-m", "jitkern", "warm", *named, "--json"]
    ran = subprocess.run(program, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert {row["how"] for row in json.loads(ran.stdout)["variants"]} == {"cached"}, ran.stderr


def test_the_cache_and_bundles(place: Path, tmp_path: Path, nvrtc: None) -> None:
    named = ("merge_states", "--target", "sm_90", "--dtype", "f32", "--pack", "4", "--constant", "d=64")
    jitkern("warm", *named, cache=place)
    made = json.loads(jitkern("cache", "size", "--json", cache=place))["entries"]
    assert made == 3  # for any number of partials, for 4, for 8
    assert "merge_states-f32" in jitkern("cache", "list", cache=place)
    jitkern("cache", "export", str(tmp_path / "bundle"), cache=place)
    jitkern("cache", "verify", str(tmp_path / "bundle"), cache=place)
    jitkern("cache", "clear", cache=place)
    jitkern("cache", "import", str(tmp_path / "bundle"), cache=place)
    assert json.loads(jitkern("cache", "size", "--json", cache=place))["entries"] == made


@pytest.mark.parametrize("kernel", ["merge_attn_states", "merge_states", "merge_backward", "merge_quantise"])
def test_a_kernel_is_shown(kernel: str, place: Path) -> None:
    assert kernel in jitkern("show", cache=place)
    assert "__global__" in jitkern("show", kernel, "--target", "sm_90", cache=place)


def test_ptx_is_shown(place: Path, nvrtc: None) -> None:
    assert ".target sm_90" in jitkern("show", "merge_states", "--target", "sm_90", "--ptx", cache=place)


def test_doctor_says_that_torch_is_missing(place: Path) -> None:
    found = json.loads(jitkern("doctor", "--json", cache=place, code=1).strip())
    torch = next(item for item in found["findings"] if item["part"] == "torch")
    assert torch["status"] != "ok"
    assert "pip install torch" in found["verdict"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("warm", "merge_states", "--target", "cpu"), "build with torch, which cannot be imported"),
        (("demo",), "torch is not installed"),
        (("bench", "merge"), "torch is not installed"),
    ],
)
def test_what_needs_torch_says_so(arguments: tuple[str, ...], words: str, place: Path) -> None:
    assert words in jitkern(*arguments, cache=place, code=3)
