"""Fixtures of the fault suite."""

from __future__ import annotations

import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from jitkern import binaries, cache, events, loader, settings
from tests.faults import harness


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """An empty cache root."""
    folder = tmp_path / "root"
    folder.mkdir(mode=0o700)
    return folder


@pytest.fixture
def here(root: Path) -> Iterator[Path]:
    """An empty cache root that this process uses, with nothing remembered before and after."""
    loader.forget()
    events.forget_warnings()
    with settings.override(cache_dir=root, cache_roots=(), lock_timeout=5.0, quiet=True):
        yield root
    binaries.thaw()
    loader.forget()


class Heard(logging.Handler):
    """The warnings that jitkern gave."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def heard() -> Iterator[list[str]]:
    """The warnings given while a test runs."""
    handler = Heard()
    events.logger.addHandler(handler)
    yield handler.lines
    events.logger.removeHandler(handler)


@pytest.fixture(scope="session", autouse=True)
def _seed() -> Iterator[None]:
    yield
    print(f"JITKERN_FAULTS_SEED={harness.SEED} repeats what was drawn at random")


def the_store() -> cache.Store:
    """The store that this process uses."""
    found = binaries.store()
    assert found is not None
    return found


needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to mount or to become another user")


def need(tool: str) -> None:
    """Skip if a program is missing."""
    if shutil.which(tool) is None:
        pytest.skip(f"{tool} is not installed")
