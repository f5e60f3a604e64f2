"""Every code block of the README and the documentation runs, and the site builds with no warning."""

from __future__ import annotations

import argparse
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from jitkern import cli
from tests.nvrtc import has_nvrtc

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCE = re.compile(
    r"^(?P<indent> *)```(?P<language>[a-z]*)[^\n]*\n(?P<body>.*?)^(?P=indent)```$", re.MULTILINE | re.DOTALL
)
RUN = ("python", "bash", "sh", "cuda", "dockerfile")  # `text` is output
ELSEWHERE = ("export", "apt-get", "cd", "docker", "#")  # words that begin a line which is not ours to run


@dataclass(frozen=True)
class Block:
    """One fenced block."""

    page: str
    line: int
    language: str
    body: str


def blocks(page: Path) -> Iterator[Block]:
    text = page.read_text(encoding="utf-8")
    for match in FENCE.finditer(text):
        body = re.sub(rf"^{match['indent']}", "", match["body"], flags=re.MULTILINE)
        line = text.count("\n", 0, match.start()) + 1
        yield Block(str(page.relative_to(ROOT)), line, match["language"], body)


ALL = [block for page in PAGES for block in blocks(page)]


def with_language(*names: str) -> list[Block]:
    return [block for block in ALL if block.language in names]


def name_of(block: Block) -> str:
    return f"{block.page}:{block.line}"


def test_every_block_says_what_it_is() -> None:
    assert [name_of(block) for block in ALL if block.language not in (*RUN, "text")] == []
    assert len(ALL) > 20


@pytest.mark.timeout(600)
@pytest.mark.parametrize("page", sorted({block.page for block in with_language("python")}))
def test_the_python_of_a_page_runs_from_top_to_bottom(page: str, tmp_path: Path) -> None:
    pytest.importorskip("torch")
    pieces = []
    for block in with_language("python"):
        if block.page == page:
            pieces += [f"\n# {name_of(block)}", block.body]
    program = tmp_path / "page.py"
    program.write_text("\n".join(pieces), encoding="utf-8")
    env = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])}
    done = subprocess.run(
        [sys.executable, str(program)], capture_output=True, text=True, check=False, cwd=tmp_path, env=env
    )
    assert done.returncode == 0, done.stderr[-3000:]


def lines_of(block: Block) -> list[list[str]]:
    joined = block.body.replace("\\\n", " ")
    return [words for line in joined.splitlines() if (words := shlex.split(line, comments=True))]


def extras() -> dict[str, list[str]]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found: dict[str, list[str]] = project["optional-dependencies"]
    return found


def targets() -> set[str]:
    found = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)
    assert found is not None
    return set(found[1].split())


def run_line(words: list[str], where: Path) -> None:
    """Run what is ours; of the rest, check that it names something that exists."""
    while words and re.fullmatch(r"[A-Z_]+=\S*", words[0]):
        words = words[1:]
    if words[:3] == ["python", "-m", "jitkern"]:
        words = ["jitkern", *words[3:]]
    if not words or words[0] in ELSEWHERE:
        return
    if words[0] == "pip":
        for extra in re.findall(r"jitkern\[([\w,]+)\]", " ".join(words)):
            assert set(extra.split(",")) <= set(extras()), f"there is no extra {extra}"
        for word in words[2:]:
            assert not word.startswith("./") or (ROOT / word).exists()
    elif words[0] == "make":
        named = [word for word in words[1:] if "=" not in word and not word.startswith("-")]
        assert set(named) <= targets(), f"make has no {named}"
    elif words[0] == "jitkern":
        run_ours(words[1:], where)
    elif words[0] == "python" and words[1].endswith(".py"):
        assert (ROOT / words[1]).is_file()
    elif words[0] == "python" and words[1:3] == ["-m", "pytest"]:
        assert all((ROOT / word).exists() for word in words[3:] if not word.startswith("-"))
    elif words[0].startswith(".ci/"):
        assert os.access(ROOT / words[0], os.X_OK)
    else:
        pytest.fail(f"nobody knows how to check {words}")


def run_ours(words: list[str], where: Path) -> None:
    arguments = cli._parser().parse_args(words)  # exits where it makes no sense
    if words[0] in ("demo", "doctor"):  # tested by themselves, and slow
        return
    env = os.environ | {"JITKERN_CACHE_DIR": str(where / "cache"), "PYTHONPATH": str(ROOT)}
    (where / "cache").mkdir(mode=0o700, exist_ok=True)
    done = subprocess.run(
        [sys.executable, "-m", "jitkern", *words], capture_output=True, text=True, check=False, cwd=where, env=env
    )
    needs_nvrtc = any(word.startswith("sm_") for word in words)
    if needs_nvrtc and done.returncode == 3 and not has_nvrtc():
        return
    fine = (0, 1) if words[0] == "why" else (0,)  # it says so when a variant is not cached
    assert done.returncode in fine, f"{words}: {done.stderr}"
    assert "Traceback" not in done.stderr
    assert isinstance(arguments, argparse.Namespace)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("block", with_language("bash", "sh"), ids=name_of)
def test_shell_lines_run_or_name_what_exists(block: Block, tmp_path: Path) -> None:
    for words in lines_of(block):
        run_line(words, tmp_path)


@pytest.mark.parametrize("block", with_language("dockerfile"), ids=name_of)
def test_dockerfiles_use_lines_that_exist(block: Block) -> None:
    for words in lines_of(block):
        if words[0] == "RUN" and words[1] == "jitkern":
            cli._parser().parse_args(words[2:])
        elif words[0] == "RUN":
            assert words[1] == "pip"
            run_line(words[1:], Path())
        elif words[0] == "ENV":
            from jitkern import settings

            known = {name for name, _, _ in settings.table()}
            assert {word.split("=")[0] for word in words[1:]} <= known
        else:
            assert words[0] in ("FROM", "COPY")


@pytest.mark.parametrize("block", with_language("cuda"), ids=name_of)
def test_kernel_texts_compile(block: Block) -> None:
    if not has_nvrtc():
        pytest.skip("NVRTC is not installed")
    from jitkern import compilers, sources
    from jitkern.variants import Variant

    text = sources.flatten("page", block.body, "page.cu")
    for dtype in ("f32", "bf16"):
        assert compilers.get("nvrtc").compile(Variant("page", dtype, 4, "sm_80"), text).binary


def test_the_exit_codes_are_those_of_the_command() -> None:
    page = (ROOT / "docs" / "command.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \| (.*) \|$", page, re.MULTILINE)
    told = re.findall(r"^  (\d+) +(.*)$", cli._EXIT_CODES, re.MULTILINE)
    assert [(code, text.replace("`", "")) for code, text in rows] == told
    from jitkern import completion

    for name in completion._commands(cli._parser()):
        assert f"`jitkern {name}`" in page


def test_links_between_pages_lead_somewhere() -> None:
    for page in PAGES:
        for target in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            if not target.startswith(("http", "benchmarks/results")):  # results come with the runs on a GPU
                assert (page.parent / target).exists(), f"{page.name}: {target}"


@pytest.mark.timeout(600)
def test_the_site_builds_strictly(tmp_path: Path) -> None:
    for needed in ("mkdocs", "material", "mkdocstrings"):
        if importlib.util.find_spec(needed) is None:
            pytest.skip(f"{needed} is not installed (pip install --group docs)")
    program = shutil.which("mkdocs", path=str(Path(sys.executable).parent)) or "mkdocs"
    env = os.environ | {"NO_MKDOCS_2_WARNING": "1", "DISABLE_MKDOCS_2_WARNING": "true"}
    done = subprocess.run(
        [program, "build", "--strict", "--site-dir", str(tmp_path / "site")],
        capture_output=True, text=True, check=False, cwd=ROOT, env=env,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    reference = (tmp_path / "site" / "reference" / "index.html").read_text(encoding="utf-8")
    for name in ("merge_attn_states", "merge_states", "Kernel", "warmup", "CaptureError", "strided"):
        assert name in reference, name
