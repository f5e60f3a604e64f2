"""Disks and users as they are elsewhere: jitkern goes on, in memory if need be, and says so once."""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from jitkern import cache
from tests.faults import harness
from tests.faults.conftest import need, needs_root

GOOD = ["compiled", "cached", True]
STRANGER = 12345  # a uid without a passwd entry


@pytest.mark.parametrize("name", ["ENOSPC", "EDQUOT", "EROFS", "EACCES", "EIO", "ESTALE", "EMFILE", "EINTR", "ENOENT"])
def test_any_step_may_fail_in_any_way(root, name, record_property):
    found, said = harness.scene("scenes_disk", "every_step_fails", str(root), name, env=harness.with_root(root))
    record_property(
        "measured", f"{name} at each of {found['points']} file-system calls, cold and warm: {found['outcomes']}"
    )
    assert found["wrong"] == [], said
    assert found["points"] > 40
    if name not in ("EINTR", "ENOENT"):  # a call that is repeated, and one whose failure is an answer, need not be told
        assert found["outcomes"]["told"] > 10


@contextlib.contextmanager
def tmpfs(path: Path, size: int):
    """A tiny disk."""
    path.mkdir(mode=0o700, exist_ok=True)
    run = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={size},mode=0700", "none", str(path)],
        capture_output=True,
        text=True,
        check=False,
    )
    if run.returncode:
        pytest.skip(f"cannot mount a tmpfs here: {run.stderr.strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(path)], check=True)


def said_once(found: dict, words: str) -> None:
    assert len(found["heard"]) == 1, found["heard"]
    assert words in found["heard"][0]


@needs_root
def test_a_full_disk_at_every_fill_level(root, record_property):
    told, kept = 0, 0
    sizes = [4096 * n for n in (list(range(1, 40, 3)) if not harness.LONG else range(1, 60))]
    for size in sizes:
        with tmpfs(root, size):
            found, _ = harness.scene("scenes_disk", "use", str(root), env=harness.with_root(root))
            assert found["got"] == [GOOD]
            told += len(found["heard"])
            kept += found["entries"]
            assert len(found["heard"]) + found["entries"] == 1, found
            if not found["entries"]:
                said_once(found, "No space left on device")
                assert not list(root.glob("v1/tmp/*")), "leftovers fill the disk even more"
    record_property(
        "measured", f"disks of {sizes[0]} to {sizes[-1]} bytes: {told} went on in memory, {kept} could publish"
    )
    assert told > 0
    assert kept > 0


@needs_root
def test_a_full_temporary_folder_is_no_reason_not_to_build(root, tmp_path):
    full = tmp_path / "full"
    with tmpfs(full, 16384):
        (full / "ballast").write_bytes(bytes(8192))
        env = harness.with_root(root, TMPDIR=str(full))
        found, said = harness.scene("scenes_disk", "use", str(root), "cpu", env=env)
        assert found["got"] == [GOOD], said
        assert found["heard"] == []
        assert [path.name for path in full.iterdir()] == ["ballast"]


@needs_root
def test_a_read_only_disk_serves_what_it_has_and_is_told_once_for_what_it_lacks(root):
    env = harness.with_root(root)
    with tmpfs(root, 1 << 20):
        harness.scene("scenes_disk", "use", str(root), env=env)
        subprocess.run(["mount", "-o", "remount,ro", str(root)], check=True)
        found, said = harness.scene("scenes_disk", "use", str(root), env=env)
        assert found["got"] == [["cached", "cached", True]]
        assert (found["heard"], said) == ([], "")
        found, _ = harness.scene("scenes_disk", "use", str(root), "nvrtc", [1, 2, 3], env=env)
        assert [item[0] for item in found["got"]] == ["cached", "compiled", "compiled"]
        assert [item[1] for item in found["got"]] == ["cached"] * 3
        said_once(found, "going on in memory")


@needs_root
@pytest.mark.parametrize("mode", [0o755, 0o711, 0o700])
def test_a_forbidden_folder(outside, stranger, mode):
    root = outside / "root"
    root.mkdir()
    root.chmod(mode)
    found, _ = harness.scene("scenes_disk", "use", str(root), env=harness.with_root(root), prefix=stranger)
    assert found["got"] == [GOOD]
    assert len(found["heard"]) == 1


@pytest.fixture
def outside():
    """A folder that another user can reach; not in that of all test runs, which every start of pytest closes."""
    folder = Path(tempfile.mkdtemp(prefix="jitkern-test-"))
    folder.chmod(0o755)
    with alone(), reachable(folder):  # folders that all workers of a run share are opened here, and closed again
        yield folder
    shutil.rmtree(folder)


@contextlib.contextmanager
def alone():
    """One process of the test run at a time."""
    descriptor = os.open(Path(__file__).parent, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


@contextlib.contextmanager
def reachable(folder: Path):
    """Let others search the folders above."""
    opened = []
    try:
        for parent in folder.parents:
            mode = parent.stat().st_mode
            if not mode & 0o001:
                opened.append((parent, mode & 0o7777))
                parent.chmod(mode & 0o7777 | 0o011)
        yield
    finally:
        for parent, mode in opened:
            parent.chmod(mode)


@pytest.fixture
def stranger(outside):
    """A command prefix that makes a user whom no file knows, who can reach ``outside`` and the interpreter."""
    need("setpriv")
    prefix = ["setpriv", f"--reuid={STRANGER}", f"--regid={STRANGER}", "--clear-groups"]
    for what in ([sys.executable, "-c", "import jitkern"], ["ls", str(outside)]):
        probe = subprocess.run([*prefix, *what], env=harness.environment(), capture_output=True, check=False)
        if probe.returncode:
            pytest.skip(f"another user cannot run {what[0]} here: {probe.stderr.decode()}")
    return prefix


@needs_root
@pytest.mark.parametrize("what", ["JITKERN_CACHE_DIR", "JITKERN_CACHE_ROOTS", "HOME", "XDG_CACHE_HOME", "TMPDIR"])
def test_a_root_below_a_folder_that_may_not_be_searched(outside, stranger, what):
    """Then even to ask whether it exists is refused, and pathlib raises where one expects an answer."""
    closed, shared = outside / "closed", outside / "tmp"
    (closed / "root").mkdir(parents=True)
    shared.mkdir()
    shared.chmod(0o1777)
    closed.chmod(0o700)
    env = harness.environment(
        **{"HOME": "/nonexistent", "TMPDIR": str(shared), "JITKERN_QUIET": "1", what: str(closed / "root")}
    )
    found, _ = harness.scene("scenes_disk", "use", "", env=env, prefix=stranger)
    if what == "TMPDIR":  # Python itself falls back to /tmp
        shutil.rmtree(f"/tmp/jitkern-{STRANGER}", ignore_errors=True)
        assert found["got"] in ([GOOD], [["cached", "cached", True]])
        return
    assert found["got"] == [GOOD]
    assert len(found["heard"]) == (what in ("JITKERN_CACHE_DIR", "JITKERN_CACHE_ROOTS"))


@needs_root
@pytest.mark.parametrize("what", ["PYTHONPATH", "CUDA_HOME", "JITKERN_SOURCES_DIR"])
def test_a_place_to_look_into_that_may_not_be_searched(outside, stranger, what):
    closed, root = outside / "closed", outside / "root"
    (closed / "inner").mkdir(parents=True)
    closed.chmod(0o700)
    root.mkdir(mode=0o755)
    env = harness.with_root(root)
    env[what] = os.pathsep.join(filter(None, [str(closed / "inner"), env.get(what) if what == "PYTHONPATH" else None]))
    code = 1 if what == "JITKERN_SOURCES_DIR" else 0
    found, said = harness.scene("scenes_disk", "use_shipped", env=env, prefix=stranger, code=code)
    if code:
        assert "ToolchainError: the kernel texts are missing" in said
    else:
        assert found == "compiled"


@needs_root
def test_a_user_without_home_and_name_gets_a_private_temporary_root(outside, stranger):
    shared = outside / "tmp"
    shared.mkdir()
    shared.chmod(0o1777)
    env = harness.environment(HOME=None, USER=None, LOGNAME=None, TMPDIR=str(shared), JITKERN_QUIET="1")
    found, said = harness.scene("scenes_disk", "use", "", env=env, prefix=stranger)
    assert found["root"] == str(shared / f"jitkern-{STRANGER}"), said
    assert (found["mode"], found["heard"], found["got"]) == ("0o700", [], [GOOD])
    again, _ = harness.scene("scenes_disk", "use", "", env=env, prefix=stranger)
    assert again["got"][0][0] == "cached"


@needs_root
@pytest.mark.parametrize("trap", ["link", "open", "foreign", "file"])
def test_a_trap_laid_in_the_temporary_folder_is_refused(outside, stranger, trap):
    shared, place = outside / "tmp", outside / "tmp" / f"jitkern-{STRANGER}"
    shared.mkdir()
    shared.chmod(0o1777)
    elsewhere = outside / "elsewhere"
    elsewhere.mkdir()
    os.chown(elsewhere, STRANGER, STRANGER)
    if trap == "link":
        place.symlink_to(elsewhere)
    elif trap == "file":
        place.write_text("")
    else:
        place.mkdir()
        os.chown(place, STRANGER if trap == "open" else 54321, STRANGER)
        place.chmod(0o777 if trap == "open" else 0o755)
    env = harness.environment(HOME="/nonexistent", TMPDIR=str(shared), JITKERN_QUIET="1")
    found, _ = harness.scene("scenes_disk", "use", "", env=env, prefix=stranger)
    assert found["root"] is None
    assert found["got"] == [GOOD]
    reason = {
        "link": "it is a symbolic link",
        "open": "others can write",
        "foreign": "belongs to uid 54321",
        "file": "File exists",
    }
    said_once(found, reason[trap])
    assert list(elsewhere.iterdir()) == []
    assert place.is_file() or list(place.iterdir()) == []


@pytest.mark.parametrize("mode", [0o777, 0o770, 0o722])
def test_a_root_that_others_could_write_to_is_refused(root, mode):
    root.chmod(mode)
    found, _ = harness.scene("scenes_disk", "use", str(root), env=harness.with_root(root))
    assert found["root"] is None
    assert found["got"] == [GOOD]
    said_once(found, f"mode {mode:04o}")
    assert list(root.iterdir()) == []


@pytest.mark.parametrize("name", ["v1", "v1/tmp", "v1/sm_90"])
@pytest.mark.parametrize("trap", ["link", "open", "file"])
def test_a_trap_laid_inside_the_root_gets_nothing(root, tmp_path, name, trap):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    inner = root / name
    inner.parent.mkdir(parents=True, exist_ok=True)
    if trap == "link":
        inner.symlink_to(elsewhere)
    elif trap == "file":
        inner.write_text("")
    else:
        inner.mkdir()
        inner.chmod(0o777)
    found, _ = harness.scene("scenes_disk", "use", str(root), env=harness.with_root(root))
    assert found["got"] == [GOOD]
    assert len(found["heard"]) == 1
    assert list(elsewhere.iterdir()) == []


def test_no_folder_at_all(tmp_path):
    """No home, no temporary folder: not even the build of a CPU kernel can go there, but a GPU's needs no folder."""
    env = harness.environment(HOME=None, XDG_CACHE_HOME="/proc/none", TMPDIR="/proc/none", JITKERN_QUIET="1")
    env["HOME"] = "/proc/none"
    prefix = [
        "unshare",
        "-m",
        "sh",
        "-c",
        'for d in /tmp /var/tmp; do mount --bind $d $d && mount -o remount,ro,bind $d; done; exec "$@"',
        "sh",
    ]
    if os.geteuid() != 0 or subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode:
        pytest.skip("needs a mount namespace of its own, to take the temporary folders away")
    found, _ = harness.scene("scenes_disk", "use", "", env=env, prefix=prefix)
    assert found["root"] is None
    assert found["got"] == [GOOD]
    said_once(found, "no disk cache")


@needs_root
def test_a_cache_that_came_with_an_image(root, tmp_path):
    """Entries of a container's image lie below an overlay, where folders cannot be renamed."""
    env = harness.with_root(root)
    harness.scene("scenes_disk", "use", str(root), "nvrtc", [1, 2], env=env)
    for name in ("upper", "work", "seen"):
        (tmp_path / name).mkdir(mode=0o700)
    layers = f"lowerdir={root},upperdir={tmp_path}/upper,workdir={tmp_path}/work"
    seen = tmp_path / "seen"
    mount = ["mount", "-t", "overlay", "overlay", "-o", layers, str(seen)]
    run = subprocess.run(mount, capture_output=True, text=True, check=False)
    if run.returncode:
        pytest.skip(f"cannot mount an overlay here: {run.stderr.strip()}")
    try:
        env = harness.with_root(seen)
        found, _ = harness.scene("scenes_disk", "use", str(seen), "nvrtc", [1, 2], env=env)
        assert ([item[0] for item in found["got"]], found["heard"]) == (["cached", "cached"], [])
        path = next(seen.glob("v1/sm_90/*/kernel.cubin"))
        path.write_bytes(b"bad")
        found, _ = harness.scene("scenes_disk", "use", str(seen), "nvrtc", [1, 2], env=env)
        assert sorted(item[0] for item in found["got"]) == ["cached", "compiled"]
        said_once(found, "damaged")
        found, _ = harness.scene("scenes_disk", "use", str(seen), "nvrtc", [1, 2], env=env)
        assert ([item[0] for item in found["got"]], found["heard"]) == (["cached", "cached"], [])
        assert cache.Store(seen).clear() == 2
        assert list(cache.Store(seen).entries()) == []
        assert len(list(cache.Store(root).entries())) == 2
    finally:
        subprocess.run(["umount", "-l", str(seen)], check=True)


ODD = {
    "spaces": "a folder with  spaces",
    "non-ASCII": "ключ-鍵-🗝",
    "long": "x" * 100 + "/" + "y" * 97,
    "quotes": """it's "quoted" $HOME `id` %s""",
    "newline": "two\nlines",
}


@pytest.mark.parametrize("backend", ["nvrtc", "cpu"])
@pytest.mark.parametrize("odd", ODD)
def test_a_root_with_an_odd_name(tmp_path, odd, backend):
    root = tmp_path / ODD[odd]
    env = harness.with_root(root, TMPDIR=str(tmp_path))
    found, said = harness.scene("scenes_disk", "use", str(root), backend, env=env)
    assert found["heard"] == [], said
    assert found["got"] == [GOOD]
    found, _ = harness.scene("scenes_disk", "use", str(root), backend, env=env)
    assert found["got"] == [["cached", "cached", True]]


def test_a_home_reached_through_links(tmp_path):
    (tmp_path / "real/home").mkdir(parents=True)
    (tmp_path / "link").symlink_to(tmp_path / "real")
    (tmp_path / "real/me").symlink_to("home")
    env = harness.environment(HOME=str(tmp_path / "link/me"), TMPDIR=str(tmp_path), JITKERN_QUIET="1")
    found, _ = harness.scene("scenes_disk", "use", "", env=env)
    assert (found["heard"], found["got"]) == ([], [GOOD])
    assert found["root"].startswith(str(tmp_path / "link/me"))
    found, _ = harness.scene("scenes_disk", "use", "", env=env)
    assert found["got"][0][0] == "cached"


@pytest.mark.parametrize("umask", [0o000, 0o077, 0o277, 0o777])
def test_every_folder_is_private_whatever_the_umask(tmp_path, umask):
    root = tmp_path / "deep" / "root"
    prefix = ["sh", "-c", f'umask {umask:04o}; exec "$@"', "sh"]
    found, _ = harness.scene(
        "scenes_disk", "use", str(root), env=harness.with_root(root, TMPDIR=str(tmp_path)), prefix=prefix
    )
    assert found["got"] == [GOOD]
    open_ones = [str(path) for path in [root.parent, root, *root.rglob("*")] if path.stat().st_mode & 0o077]
    assert open_ones == []


def test_no_path_is_asked_about_in_the_form_that_raises():
    """``Path.is_dir()`` raises where a folder may not be searched; ``os.path.isdir`` says no."""
    package = Path(cache.__file__).parents[1]
    asked = re.compile(r"\.(is_dir|is_file|exists|is_symlink)\(\)")
    found = [
        f"{path.relative_to(package)}:{number}"
        for path in package.rglob("*.py")
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1)
        if asked.search(line)
    ]
    assert found == []
