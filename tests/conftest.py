"""What every test gets: a cache of its own, and a skip with a reason where a GPU is missing.

Nothing here imports torch or jitkern before a test needs it.
"""

from __future__ import annotations

import functools
import os
import stat
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:
    from tests.emulator.emulate import Emulator

TESTS = Path(__file__).parent

# A first call compiles, so a time limit on one example would only measure that.
# CI's profile draws the same examples each time.
hypothesis.settings.register_profile(
    "jitkern", hypothesis.settings.get_profile("ci" if os.environ.get("CI") else "default"), deadline=None
)
hypothesis.settings.load_profile("jitkern")


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--require-gpu", action="store_true", help="a gpu test without a usable CUDA device fails, not skips"
    )


@pytest.hookimpl(tryfirst=True)  # before -m looks at the markers
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for folder in ("gpu", "faults"):
            if TESTS / folder in item.path.parents:
                item.add_marker(folder)


@functools.cache
def why_no_gpu() -> str | None:
    """Say why no CUDA device can be used; None when one can."""
    try:
        import torch
    except ImportError:
        return "torch is not installed"
    if torch.version.cuda is None:
        return f"no CUDA device: torch {torch.__version__} is built without CUDA"
    with warnings.catch_warnings(record=True) as seen:  # a driver that is too old is told as a warning
        warnings.simplefilter("always")
        if torch.cuda.is_available():
            return None
    return "; ".join(["no CUDA device", *(str(w.message).splitlines()[0] for w in seen)])


def pytest_runtest_setup(item: pytest.Item) -> None:
    if item.get_closest_marker("gpu") and (reason := why_no_gpu()):
        if item.config.getoption("--require-gpu"):
            pytest.fail(f"--require-gpu: {reason}", pytrace=False)
        pytest.skip(reason)


@pytest.fixture(scope="session", autouse=True)
def session_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Point jitkern at an empty cache for this worker; drop what the caller's shell has set."""
    root = tmp_path_factory.mktemp("jitkern-cache")
    root.chmod(0o700)
    with pytest.MonkeyPatch.context() as patch:
        for name in [n for n in os.environ if n.startswith("JITKERN_")]:
            patch.delenv(name)
        patch.setenv("JITKERN_CACHE_DIR", str(root))
        yield root


@pytest.fixture(autouse=True)
def _the_session_cache_is_in_use(session_cache: Path) -> None:
    # A test that wants another cache sets the variable with monkeypatch, which ends with that test.
    assert os.environ.get("JITKERN_CACHE_DIR") == str(session_cache), "a test left JITKERN_CACHE_DIR changed"
    assert stat.S_IMODE(session_cache.stat().st_mode) == 0o700


@pytest.fixture(
    params=["cpu", pytest.param("nvrtc", marks=pytest.mark.gpu), pytest.param("nvcc", marks=pytest.mark.gpu)]
)
def backend(request: pytest.FixtureRequest) -> str:
    """Each backend; those of a GPU are marked so."""
    return str(request.param)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request: pytest.FixtureRequest) -> str:
    """Each kind of device."""
    return str(request.param)


@pytest.fixture(scope="session")
def emulator(tmp_path_factory: pytest.TempPathFactory) -> Emulator:
    """Runs the kernels' GPU branches on the CPU; keeps what it builds for the session."""
    from tests.emulator.emulate import Emulator

    return Emulator(tmp_path_factory.mktemp("emulator"))


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small tensors only: torch's threads would wait for each other longer than they work."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print what tests measured without judging it: `record_property("measured", "...")`."""
    reports = [r for group in terminalreporter.stats.values() for r in group if hasattr(r, "user_properties")]
    lines = sorted({v for r in reports for k, v in r.user_properties if k == "measured"})
    if lines:
        terminalreporter.section("measured")
        for line in lines:
            terminalreporter.line(line)
