"""Pictures of the notebooks' outputs for the documentation, taken by a real browser from executed notebooks.

python examples/execute.py --out /tmp/executed
python examples/screenshots.py /tmp/executed [--browser chromium] [--into docs/img]
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import nbformat
from nbconvert import HTMLExporter
from PIL import Image, ImageChops

NOTEBOOK = "2_own_kernel.ipynb"
# picture -> what its cell says
SHOTS = {"error": "/ dim + eps", "kernel": "rmsnorm", "bench": "%jitkern bench"}
WIDTH, HEIGHT, MARGIN = 1000, 1600, 12


def find(notebook: Any, words: str) -> Any:
    """The first code cell that is these words, or else has them."""
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    exact = [cell for cell in cells if cell.source.strip() == words]
    return (exact or [cell for cell in cells if words in cell.source])[0]


def page(cell: Any) -> str:
    """The cell as nbconvert shows it; of a long text the last lines only."""
    shown = nbformat.from_dict(dict(cell))
    if len(lines := shown.source.splitlines()) > 8:
        shown.source = "\n".join([lines[0], "...", *lines[-6:]])
    shown.outputs = [output for output in shown.outputs if output.output_type != "stream"]
    body, _ = HTMLExporter(template_name="lab").from_notebook_node(nbformat.v4.new_notebook(cells=[shown]))
    return str(body)


def picture(browser: str, html: str, to: Path) -> None:
    """Let the browser draw it, twice as fine, and cut off the empty rest."""
    with tempfile.TemporaryDirectory() as folder:
        source, raw = Path(folder) / "page.html", Path(folder) / "page.png"
        source.write_text(html, encoding="utf-8")
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--force-device-scale-factor=2"]
        options += [f"--window-size={WIDTH},{HEIGHT}", "--virtual-time-budget=3000", f"--screenshot={raw}"]
        subprocess.run([browser, *options, source.as_uri()], check=True, capture_output=True, timeout=120)
        image = Image.open(raw).convert("RGB")
    blank = Image.new("RGB", image.size, image.getpixel((0, image.height - 1)))
    box = ImageChops.difference(image, blank).getbbox()
    bottom = min(box[3] + 2 * MARGIN, image.height) if box else image.height
    image.crop((0, 0, image.width, bottom)).quantize(128).save(to, optimize=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("executed", type=Path, help="a folder with the executed notebooks")
    parser.add_argument("--browser", default="chromium")
    parser.add_argument("--into", type=Path, default=Path(__file__).parents[1] / "docs" / "img")
    arguments = parser.parse_args()
    if shutil.which(arguments.browser) is None:
        parser.error(f"there is no browser {arguments.browser}")
    notebook = nbformat.read(arguments.executed / NOTEBOOK, as_version=4)
    arguments.into.mkdir(parents=True, exist_ok=True)
    for name, words in SHOTS.items():
        to = arguments.into / f"{name}.png"
        picture(arguments.browser, page(find(notebook, words)), to)
        print(f"{to}: {to.stat().st_size / 1000:.0f} KB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
