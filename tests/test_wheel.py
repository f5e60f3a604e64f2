"""What a release contains: all of jitkern and kernels_src, and nothing that only lies about in a checkout."""

from __future__ import annotations

import email
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parents[1]
IS_GIT = (ROOT / ".git").exists()  # a file in a linked worktree

WORKING_TREE = ("--cached", "--others", "--exclude-standard")  # tracked, or new and not ignored

# Lies about in a checkout, is ignored by git, and must reach neither archive.
PLANTED = (
    ".env",
    "jitkern/.env",
    "jitkern/__pycache__/cli.cpython-311.pyc",
    "kernels_src/.env",
    "kernels_src/junk.cubin",
    "kernels_src/include/junk.so",
    "cache/v1/cpu/merge-f32-p4-0123456789ab/kernel.cu",
    "cache/v1/cpu/merge-f32-p4-0123456789ab/meta.json",
    "tests/.env",
)


def git(*args: str) -> list[str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("GIT_")}  # a git hook sets these
    run = subprocess.run(["git", *args, "-z"], cwd=ROOT, env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return [name for name in run.stdout.split("\0") if name]


def copy_tree(to: Path) -> None:
    """Copy what a developer would commit; without git (an unpacked sdist), all but caches."""
    if not IS_GIT:
        junk = shutil.ignore_patterns(".*cache", ".venv*", "__pycache__", ".hypothesis", "dist", "build")
        shutil.copytree(ROOT, to, ignore=junk, dirs_exist_ok=True)
        return
    for name in git("ls-files", *WORKING_TREE):
        if (ROOT / name).is_file():  # not one that is deleted but not yet committed so
            (to / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, to / name)


def build(tree: Path, to: Path, *what: str) -> None:
    """Build with no network and no environment of its own: hatchling is one of the tests' requirements."""
    run = subprocess.run(
        [sys.executable, "-m", "build", "--no-isolation", *what, "--outdir", str(to), str(tree)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr


def only(folder: Path, pattern: str) -> Path:
    (found,) = folder.glob(pattern)
    return found


def read_wheel(file: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(file) as archive:
        return {name: archive.read(name) for name in archive.namelist() if not name.endswith("/")}


def read_sdist(file: Path) -> dict[str, bytes]:
    with tarfile.open(file) as archive:
        files = [(m.name, archive.extractfile(m)) for m in archive.getmembers() if m.isfile()]
        return {name.split("/", 1)[1]: f.read() for name, f in files if f is not None}


class Built(NamedTuple):
    """The three archives, each as file name to bytes."""

    wheel: dict[str, bytes]
    sdist: dict[str, bytes]
    wheel_of_sdist: dict[str, bytes]
    wheel_name: str


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    work = tmp_path_factory.mktemp("wheel")
    tree, dist, again = work / "tree", work / "dist", work / "again"
    copy_tree(tree)
    for name in PLANTED:
        (tree / name).parent.mkdir(parents=True, exist_ok=True)
        (tree / name).write_text("SECRET=1\n")
    build(tree, dist, "--sdist", "--wheel")  # both from the tree
    with tarfile.open(only(dist, "*.tar.gz")) as archive:
        archive.extractall(work / "unpacked", filter="data")
    build(only(work / "unpacked", "*"), again, "--wheel")
    wheel, sdist, wheel_of_sdist = only(dist, "*.whl"), only(dist, "*.tar.gz"), only(again, "*.whl")
    return Built(read_wheel(wheel), read_sdist(sdist), read_wheel(wheel_of_sdist), wheel.name)


def under(names, folder: str) -> set[str]:
    return {n.removeprefix(folder + "/") for n in names if n.startswith(folder + "/")}


def test_the_wheel_has_every_kernel_text(built):
    # A file that is new and not yet known to git fails here on purpose: `git add` it.
    expected = git("ls-files", "kernels_src") if IS_GIT else built.sdist
    assert under(built.wheel, "jitkern/kernels_src") == under(expected, "kernels_src")
    assert under(expected, "kernels_src"), "there is no kernel text at all"


def test_the_wheel_has_every_module_and_says_that_it_is_typed(built):
    expected = git("ls-files", *WORKING_TREE, "jitkern") if IS_GIT else built.sdist
    inside = {n for n in under(built.wheel, "jitkern") if not n.startswith("kernels_src/")}
    assert inside == under(expected, "jitkern")
    assert "py.typed" in inside


def test_the_wheel_has_nothing_else(built):
    tops = {PurePosixPath(name).parts[0] for name in built.wheel}
    assert {t for t in tops if not t.endswith(".dist-info")} == {"jitkern"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in built.wheel)


@pytest.mark.parametrize("planted", PLANTED)
def test_nothing_ignored_is_released(built, planted):
    assert planted not in built.sdist
    assert planted not in built.wheel
    assert f"jitkern/{planted}" not in built.wheel
    assert not [name for name, data in (built.wheel | built.sdist).items() if data == b"SECRET=1\n"]


def test_the_sdist_can_run_the_tests(built):
    needed = {
        "pyproject.toml",
        "constraints.txt",
        "Makefile",
        ".gitignore",
        "tests/conftest.py",
        "cache/README.md",
    }
    assert needed - set(built.sdist) == set()


def test_the_wheel_made_from_the_sdist_is_the_same(built):
    assert sorted(built.wheel_of_sdist) == sorted(built.wheel)
    assert [n for n in built.wheel if built.wheel[n] != built.wheel_of_sdist[n]] == []


def test_metadata(built):
    import jitkern

    assert built.wheel_name == f"jitkern-{jitkern.__version__}-py3-none-any.whl"
    (name,) = [n for n in built.wheel if n.endswith(".dist-info/METADATA")]
    meta = email.message_from_bytes(built.wheel[name])
    assert meta["Requires-Python"] == ">=3.11"
    assert meta["Version"] == jitkern.__version__
    assert meta["License-Expression"] == "Apache-2.0"
    base = [r for r in meta.get_all("Requires-Dist", []) if "extra ==" not in r]
    assert sorted(r.split(">")[0] for r in base) == ["cuda-pathfinder", "filelock", "platformdirs"]
    extras = {r.split(">")[0].split(";")[0].strip() for r in meta.get_all("Requires-Dist", [])} - set(base)
    assert {"torch", "cupy-cuda12x", "cupy-cuda13x"} <= extras
    (points,) = [n for n in built.wheel if n.endswith(".dist-info/entry_points.txt")]
    assert b"jitkern = jitkern.cli:main" in built.wheel[points]
