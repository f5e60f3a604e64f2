"""Run the notebooks of this folder from empty, and keep or drop what they print.

    python examples/execute.py                     run all, write the results in place
    python examples/execute.py 2_own_kernel.ipynb --out /tmp/executed

A cell that fails stops it, unless the cell carries the tag `raises-exception`. `make notebooks` makes an environment with all
that it needs; in another one: pip install -e '.[torch]' --group notebooks (pip 25.1 or newer).
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

try:
    import nbformat
    from nbclient import NotebookClient
except ModuleNotFoundError as error:
    sys.exit(
        f"{error.name} is not installed, and notebooks need it. Run: make notebooks, or pip install --group notebooks"
    )

HERE = Path(__file__).parent


def notebooks() -> list[Path]:
    return sorted(HERE.glob("*.ipynb"))


def execute(path: Path, timeout: int = 600) -> nbformat.NotebookNode:
    """The notebook with fresh outputs; the file stays as it is."""
    notebook = nbformat.read(path, as_version=4)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    client = NotebookClient(
        notebook, timeout=timeout, kernel_name="python3", resources={"metadata": {"path": str(path.parent)}}
    )
    client.execute()
    for cell in notebook.cells:
        cell.metadata.pop("execution", None)  # the time of day
    return notebook


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="default: all")
    parser.add_argument("--out", type=Path, help="a folder for the results; default: in place")
    arguments = parser.parse_args()
    for path in [HERE / name for name in arguments.names] or notebooks():
        start = time.perf_counter()
        executed = execute(path)
        target = (arguments.out or path.parent) / path.name
        target.parent.mkdir(parents=True, exist_ok=True)
        nbformat.write(executed, target)
        print(f"{path.name}: {time.perf_counter() - start:.1f} s -> {target}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
