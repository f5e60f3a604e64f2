"""The suite's own rules: a gpu test says why it skips, and the cache in use is this run's."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def suite(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small suite with this conftest: one test anywhere, one under gpu/, one under faults/."""
    root = tmp_path_factory.mktemp("suite")
    for folder in ("tests/gpu", "tests/faults"):
        (root / folder).mkdir(parents=True)
        (root / folder / "test_one.py").write_text("def test_one():\n    pass\n")
    (root / "tests" / "test_one.py").write_text(
        "import os\n\ndef test_one(session_cache):\n"
        "    assert os.environ['JITKERN_CACHE_DIR'] == str(session_cache)\n"
        "    assert not list(session_cache.iterdir())\n"
        "    assert 'JITKERN_MODE' not in os.environ\n"
    )
    shutil.copy(ROOT / "pyproject.toml", root)
    shutil.copy(ROOT / "tests" / "conftest.py", root / "tests")
    return root


def pytest_says(suite: Path, *args: str) -> tuple[int, str]:
    env = {k: v for k, v in os.environ.items() if not k.startswith("PYTEST_")}
    env |= {"CUDA_VISIBLE_DEVICES": "", "JITKERN_MODE": "hit-only"}
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *args],
        cwd=suite, env=env, capture_output=True, text=True, check=False,
    )  # fmt: skip
    return run.returncode, run.stdout + run.stderr


def test_a_gpu_test_skips_with_the_reason(suite):
    code, said = pytest_says(suite)
    assert code == 0, said
    assert "2 passed, 1 skipped" in said
    assert "no CUDA device" in said or "torch is not installed" in said


def test_a_gpu_test_fails_where_a_gpu_was_promised(suite):
    code, said = pytest_says(suite, "--require-gpu")
    assert code == 1
    assert "--require-gpu: " in said


@pytest.mark.parametrize(("marker", "outcome"), [("not gpu", "2 passed, 1 desel"), ("faults", "1 passed, 2 desel")])
def test_the_folder_gives_the_marker(suite, marker, outcome):
    code, said = pytest_says(suite, "-m", marker)
    assert code == 0, said
    assert outcome in said


def test_a_marker_that_nobody_declared_is_an_error(suite, tmp_path):
    copy = shutil.copytree(suite, tmp_path / "suite")
    (copy / "tests" / "test_two.py").write_text("import pytest\n\n@pytest.mark.gqu\ndef test_two(): pass\n")
    code, said = pytest_says(copy)
    assert code != 0
    assert "gqu" in said
