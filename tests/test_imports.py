"""Who may import whom, and what `import jitkern` may do: nothing but define names."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGE = ROOT / "jitkern"

# Low to high, one level a line: a module imports only modules of the lines above its own.
# A new module goes into the highest line it can.
ORDER = (
    ("errors", "progress", "version", "completion", "flights", "limits", "switches"),
    ("settings", "dtypes", "streams", "derivatives"),
    ("events",),
    ("sources", "variants", "signing", "hosttools"),
    ("cache", "toolchain", "driver"),
    ("compilers", "modules", "bundle"),
    ("explain", "standby"),
    ("binaries",),
    ("loader", "pool"),
    ("launch",),
    ("prepared",),
    ("ops",),
    ("torch_ops", "torch_mla", "bench", "warm"),
    ("compat", "kernel"),
    ("doctor", "demo", "benches"),
    ("tables", "inspecting"),
    ("notebook", "commands"),
    ("cli",),
    ("__main__",),
)
LEVELS = {f"jitkern.{name}": level for level, names in enumerate(ORDER) for name in names}
LEVELS["jitkern"] = len(ORDER)
# Packages: every module inside has the package's level, and they may import each other.
GROUPS = ("jitkern.cache", "jitkern.compilers", "jitkern.ops", "jitkern.compat", "jitkern.benches", "jitkern.kernel")

# Slow to import, often absent, and never a condition for `import jitkern`.
FRAMEWORKS = {"torch", "cupy", "triton"}
FRAMEWORKS_AT_TOP_FROM = LEVELS["jitkern.ops"]


def group_of(module: str) -> str | None:
    return next((g for g in GROUPS if module == g or module.startswith(g + ".")), None)


def level_of(module: str) -> int | None:
    return LEVELS.get(group_of(module) or module)


def module_name(file: Path) -> str:
    parts = file.relative_to(PACKAGE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(f): f for f in sorted(PACKAGE.rglob("*.py")) if "kernels_src" not in f.parts}


# ---- reading imports ---------------------------------------------------------------------------------------


def imported(node: ast.AST, module: str, is_package: bool, known: set[str]) -> Iterator[str]:
    """Absolute names of what one node imports; `known` tells a submodule from a name inside a module."""
    if isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
        base = node.module or ""
        if node.level:
            parents = module.split(".")
            parents = parents[: len(parents) - node.level + is_package]
            base = ".".join([*parents, *([base] if base else [])])
        for alias in node.names:
            inner = f"{base}.{alias.name}"
            yield inner if inner in known else base
    elif isinstance(node, ast.Call) and node.args and isinstance(node.args[0], ast.Constant):
        callee = ast.unparse(node.func).split(".")[-1]
        if callee in {"import_module", "__import__"} and isinstance(node.args[0].value, str):
            yield node.args[0].value


def at_import_time(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that runs when the module is imported: not function bodies, not `if TYPE_CHECKING:`."""
    for node in ast.iter_child_nodes(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            continue
        if isinstance(node, ast.If) and ast.unparse(node.test).split(".")[-1] == "TYPE_CHECKING":
            for other in node.orelse:
                yield from [other, *at_import_time(other)]
            continue
        yield node
        yield from at_import_time(node)


def level_faults(module: str, source: str, *, is_package: bool, known: set[str]) -> list[str]:
    """What this module imports that lies too high; one line each."""
    own = level_of(module)
    if own is None:
        return [f"{module}: add it to ORDER in tests/test_imports.py, in the highest line that it can be in"]
    if module == "jitkern":  # the public names, lazily: it may name anything
        return []
    faults = []
    for node in ast.walk(ast.parse(source)):
        for target in imported(node, module, is_package, known):
            if target.split(".")[0] != "jitkern":
                continue
            if group_of(module) and group_of(module) == group_of(target):
                continue
            level = level_of(target)
            where = f"{module}:{getattr(node, 'lineno', '?')}"
            if level is None:
                faults.append(f"{where} imports {target}, which is not in ORDER")
            elif level >= own:
                faults.append(f"{where} imports {target}, which is not of a lower level")
    return faults


def framework_faults(module: str, source: str, *, is_package: bool, known: set[str]) -> list[str]:
    """The frameworks that this module imports as soon as it is imported, though it lies too low."""
    if (level_of(module) or 0) >= FRAMEWORKS_AT_TOP_FROM:
        return []
    return [
        f"{module}:{getattr(node, 'lineno', '?')} imports {target} at module level; do it inside the function"
        for node in at_import_time(ast.parse(source))
        for target in imported(node, module, is_package, known)
        if target.split(".")[0] in FRAMEWORKS
    ]


def faults_of(check: Callable[..., list[str]], module: str) -> list[str]:
    file = MODULES[module]
    return check(module, file.read_text(encoding="utf-8"), is_package=file.name == "__init__.py", known=set(MODULES))


# ---- the package -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("module", MODULES)
def test_a_module_imports_only_lower_ones(module):
    assert faults_of(level_faults, module) == []


@pytest.mark.parametrize("module", MODULES)
def test_frameworks_are_imported_inside_functions(module):
    assert faults_of(framework_faults, module) == []


# ---- the checkers see what they are for --------------------------------------------------------------------

KNOWN = {"jitkern", *LEVELS, "jitkern.compilers.nvrtc", "jitkern.compilers.cpu", "jitkern.ops.merge"}


@pytest.mark.parametrize(
    ("module", "source", "words"),
    [
        ("jitkern.errors", "import jitkern.cache", "imports jitkern.cache, which is not of a lower level"),
        ("jitkern.settings", "from jitkern import dtypes", "imports jitkern.dtypes, which"),
        (
            "jitkern.cache",
            "def f():\n    from . import loader",
            "jitkern.cache:2 imports jitkern.loader, which",
        ),
        ("jitkern.cache", "from .ops.merge import merge_state", "imports jitkern.ops.merge, which"),
        ("jitkern.cache", "from jitkern import __version__", "imports jitkern, which"),
        ("jitkern.cache", "importlib.import_module('jitkern.cli')", "imports jitkern.cli, which"),
        ("jitkern.cache", "from .nowhere import x", "jitkern.nowhere, which is not in ORDER"),
        ("jitkern.loader", "from jitkern.launch import go", "imports jitkern.launch, which"),
        ("jitkern.compilers.nvrtc", "from ..ops import merge", "imports jitkern.ops.merge, which"),
        ("jitkern.unheard_of", "", "add it to ORDER"),
    ],
)
def test_an_import_upwards_is_seen(module, source, words):
    faults = level_faults(module, source, is_package=False, known=KNOWN)
    assert len(faults) == 1
    assert words in faults[0]


@pytest.mark.parametrize(
    ("module", "source", "is_package"),
    [
        ("jitkern.cache", "import os, json\nfrom .errors import CacheError\nfrom . import variants", False),
        ("jitkern.compilers.nvrtc", "from .cpu import x\nfrom . import cpu\nfrom ..cache import y", False),
        ("jitkern.compilers", "from . import nvrtc\nfrom ..toolchain import z", True),
        ("jitkern.__main__", "from jitkern.cli import main", False),
        ("jitkern", "def __getattr__(name):\n    from . import ops", True),
    ],
)
def test_an_import_downwards_or_in_the_group_is_fine(module, source, is_package):
    assert level_faults(module, source, is_package=is_package, known=KNOWN) == []


@pytest.mark.parametrize(
    ("source", "seen"),
    [
        ("import torch", True),
        ("from torch.utils import cpp_extension", True),
        ("try:\n    import cupy\nexcept ImportError:\n    cupy = None", True),
        ("class A:\n    import triton", True),
        ("if TYPE_CHECKING:\n    pass\nelse:\n    import torch", True),
        ("torch = importlib.import_module('torch')", True),
        ("def f():\n    import torch", False),
        ("if TYPE_CHECKING:\n    import torch", False),
        ("if typing.TYPE_CHECKING:\n    from torch import Tensor", False),
        ("import torchless", False),
    ],
)
def test_a_framework_at_module_level_is_seen(source, seen):
    assert bool(framework_faults("jitkern.launch", source, is_package=False, known=KNOWN)) is seen
    assert framework_faults("jitkern.torch_ops", source, is_package=False, known=KNOWN) == []


# ---- import jitkern, in a process of its own ---------------------------------------------------------------

PROBE = textwrap.dedent(
    """
    import json, logging, os, sys, threading, time

    BLOCKED = {"torch", "cupy", "triton", "numpy", "filelock"}
    tried, effects = [], []

    class Block:
        def find_spec(self, name, path=None, target=None):
            if name.split(".")[0] in BLOCKED:
                tried.append(name)
                raise ImportError(name + " is blocked by this test")

    EFFECTS = ("os.mkdir", "os.rename", "os.link", "os.symlink", "os.remove", "os.putenv", "os.fork",
               "os.posix_spawn", "os.system", "subprocess.Popen", "socket.connect", "ctypes.dlopen")
    SLOW = {"argparse", "asyncio", "importlib.metadata", "rich", "IPython", "matplotlib"}

    def watch(event, args):
        if event == "open":
            path, mode, flags = args
            if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
                effects.append(f"open for writing: {path}")
        elif event in EFFECTS:
            effects.append(f"{event}: {args}")

    def handlers():
        loggers = [logging.root, *logging.root.manager.loggerDict.values()]
        return {(l.name, type(h).__name__) for l in loggers for h in getattr(l, "handlers", ())}

    before = handlers()
    sys.meta_path.insert(0, Block())
    sys.addaudithook(watch)
    begin = time.perf_counter()
    import jitkern
    seconds = time.perf_counter() - begin
    report = dict(
        seconds=seconds,
        tried=tried,
        effects=list(effects),
        handlers=sorted(handlers() - before),
        threads=threading.active_count(),
        tasks=len(os.listdir("/proc/self/task")) if os.path.isdir("/proc/self/task") else 1,
        slow=sorted(SLOW & set(sys.modules)),
        version=jitkern.__version__,
    )
    print(json.dumps(report))
    """
)


@pytest.fixture(scope="module")
def bare_import(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict, Path]:
    """`import jitkern` with the frameworks blocked, in an empty folder with an empty home."""
    empty = tmp_path_factory.mktemp("bare")
    xdg = [f"XDG_{name}_HOME" for name in ("CACHE", "CONFIG", "DATA", "STATE")]
    folders = {name: empty / name for name in ("HOME", "TMPDIR", "cwd", *xdg)}
    for folder in folders.values():
        folder.mkdir()
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JITKERN_", "PYTHON"))}
    env |= {name: str(folder) for name, folder in folders.items() if name != "cwd"}
    env |= {"PYTHONPATH": str(ROOT), "CUDA_VISIBLE_DEVICES": ""}
    run = subprocess.run(
        [sys.executable, "-B", "-W", "error", "-c", PROBE],
        cwd=folders["cwd"], env=env, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    assert run.stderr == ""
    return json.loads(run.stdout), empty


def test_import_needs_no_framework_and_asks_for_none(bare_import):
    assert bare_import[0]["tried"] == []


def test_import_touches_nothing(bare_import):
    report, empty = bare_import
    assert report["effects"] == []
    assert [str(p) for p in empty.rglob("*") if p.parent != empty] == []


def test_import_adds_no_log_handler_that_speaks(bare_import):
    assert [h for h in bare_import[0]["handlers"] if h[1] != "NullHandler"] == []


def test_import_starts_no_thread(bare_import):
    assert bare_import[0]["threads"] == 1
    assert bare_import[0]["tasks"] == 1


def test_import_is_quick(bare_import, record_property):
    seconds, slow = bare_import[0]["seconds"], ", ".join(bare_import[0]["slow"]) or "none"
    record_property("measured", f"import jitkern: {seconds * 1e3:.0f} ms; slow modules that it brings: {slow}")
    assert seconds < 1.0, "a loose bound on purpose: the figure to watch is the one that is printed"


def test_no_module_has_the_name_of_something_public():
    import jitkern

    modules = {path.stem for path in PACKAGE.glob("*.py")} | {path.name for path in PACKAGE.iterdir() if path.is_dir()}
    both = modules & {name for name in jitkern.__all__ if not name.startswith("__")}
    assert not both, f"importing jitkern.{both} would put the module where the function was"
