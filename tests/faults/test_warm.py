"""The warm path: few file-system calls, no process, no lock, and no slower in a full cache."""

from __future__ import annotations

import re

from tests.faults import harness
from tests.faults.conftest import need

_CALL = re.compile(r"^(?:\[pid +\d+\] |\d+ +)?(\w+)\((.*)")
# What needs no file system: memory, time, signals, and who we are.
_NOT_FILES = {
    "brk", "mmap", "munmap", "mprotect", "madvise", "mremap", "futex", "clock_gettime", "clock_nanosleep", "getpid",
    "gettid", "geteuid", "getuid", "rt_sigaction", "rt_sigprocmask", "sched_yield", "getrandom",
}  # fmt: skip


def test_a_warm_call_makes_few_calls_starts_nothing_and_takes_no_lock(root, tmp_path, record_property):
    need("strace")
    harness.scene("scenes_warm", "fill", str(root), env=harness.with_root(root))
    log = tmp_path / "strace"
    prefix = ["strace", "-f", "-o", str(log)]
    env = harness.with_root(root)
    harness.scene("scenes_warm", "trace", str(root), env=env, prefix=prefix)
    lines = log.read_text(errors="replace").splitlines()
    begin, end = (next(n for n, line in enumerate(lines) if f"@@{mark}" in line) for mark in ("begin", "end"))
    made = [match for line in lines[begin + 1 : end] if (match := _CALL.match(line))]
    calls = [(match[1], match[2]) for match in made if match[1] not in _NOT_FILES]
    started = [name for name, _ in calls if name in ("clone", "clone3", "fork", "vfork", "execve")]
    locks = [name for name, arguments in calls if name == "flock" or "F_SETLK" in arguments]
    # Reading the entry: its folder and its two files opened, the files read to their end, all three closed.
    reading = [name for name, _ in calls if name in ("openat", "read", "close")]
    beyond = [name for name, _ in calls if name not in ("openat", "read", "close")]
    shown = "\n".join(f"{name}({arguments}" for name, arguments in calls)
    print(shown)
    record_property(
        "measured",
        f"a warm call: {len(reading)} calls read the entry, {len(beyond)} others: {beyond}; no lock, no process",
    )
    assert started == [], shown
    assert locks == [], shown
    assert len(beyond) <= 6, shown
    assert "utimensat" in beyond, "the use is not noted, and the entry will be evicted"
    assert (reading.count("openat"), reading.count("close")) == (3, 3), shown
    assert len(reading) <= 9, shown


def test_a_warm_load_of_100_kb(root, record_property):
    found, _ = harness.scene("scenes_warm", "load_times", str(root), 100_000, 1, 0, env=harness.with_root(root))
    record_property("measured", f"warm load of 100 KB (key, check, read): {found['load']:.3f} ms, median of 200")
    assert found["load"] < 2.0 * 10  # ten times the aim, since this machine may be busy


def test_a_process_that_is_all_warm_imports_neither_torch_nor_filelock(root, record_property):
    harness.scene("scenes_warm", "fill", str(root), env=harness.with_root(root))
    found, _ = harness.scene("scenes_warm", "first_call", str(root), env=harness.with_root(root))
    record_property(
        "measured", f"first warm call of a process {found['first']:.1f} ms, the next {found['second']:.2f} ms"
    )
    assert found["modules"] == []


def test_loading_again_and_again_uses_up_no_descriptors(root, record_property):
    found, _ = harness.scene("scenes_warm", "cpu_load", str(root), env=harness.with_root(root))
    record_property("measured", f"warm load of a CPU variant, mapped and ready: {found['load']:.2f} ms, median of 200")
    assert found["more"] == 0
    assert found["handles"] == 200, "one object was taken for another"


def test_ten_thousand_entries_make_nothing_slower(root, tmp_path, record_property):
    many = harness.amount(3000, 10_000)
    few_root = tmp_path / "few"
    few_root.mkdir(mode=0o700)
    few, _ = harness.scene("scenes_warm", "load_times", str(few_root), 20_000, 10, 100, env=harness.with_root(few_root))
    full, _ = harness.scene("scenes_warm", "load_times", str(root), 20_000, many, 100, env=harness.with_root(root))
    record_property(
        "measured",
        f"{many} entries against 10: warm load {full['load']:.3f} against {few['load']:.3f} ms, cold with publish"
        f" {full['publish']:.2f} against {few['publish']:.2f} ms",
    )
    assert full["entries"] == many + 100
    assert full["load"] < 3 * few["load"] + 0.5
    assert full["publish"] < 3 * few["publish"] + 5.0
