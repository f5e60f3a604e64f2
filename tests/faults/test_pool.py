"""Compiling many at once, within the limits of the machine and of its cgroups."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from jitkern import binaries, compilers, limits, pool, sources
from jitkern.errors import CompileError
from jitkern.limits import Limits
from tests.faults import injected

GIB = 1 << 30


@pytest.fixture
def compiler(here, monkeypatch):
    monkeypatch.setattr(sources, "shipped", lambda name: injected.TEXT)

    class Watched(injected.Compiler):
        def __init__(self) -> None:
            super().__init__(seconds=0.2, size=1000)  # so that all meet, on a busy machine too
            self.now = self.most = 0
            self.bad: set[int] = set()
            self.lock = threading.Lock()

        def compile(self, variant, text):
            with self.lock:
                self.now += 1
                self.most = max(self.most, self.now)
            try:
                if dict(variant.constants)["n"] in self.bad:
                    raise CompileError("bad text")
                return super().compile(variant, text)
            finally:
                with self.lock:
                    self.now -= 1

    found = Watched()
    monkeypatch.setattr(compilers, "get", lambda backend: found)
    return found


@pytest.mark.parametrize("jobs", [1, 3, 8])
def test_as_many_compile_at_once_as_are_allowed(compiler, jobs):
    wanted = [injected.variant(number) for number in range(24)]
    outcomes = pool.compile_all(wanted, jobs=jobs)
    assert [item.variant for item in outcomes] == wanted
    assert {item.how for item in outcomes} == {"compiled"}
    assert compiler.most == jobs


def test_one_that_fails_does_not_keep_the_others_from_it(compiler):
    compiler.bad = {3, 5}
    seen = []
    outcomes = pool.compile_all(
        map(injected.variant, range(8)), 4, lambda done, count, item: seen.append((done, count, item.how))
    )
    assert [item.how for item in outcomes] == ["failed" if n in (3, 5) else "compiled" for n in range(8)]
    assert "bad text" in str(outcomes[3].error)
    assert [item[:2] for item in seen] == [(n, 8) for n in range(1, 9)]
    assert {item.how for item in pool.compile_all(map(injected.variant, (0, 1)))} == {"cached"}


def test_double_ones_are_made_once(compiler):
    assert len(pool.compile_all([injected.variant(1)] * 10, 4)) == 1
    assert compiler.calls == 1


def test_an_interrupt_stops_what_has_not_begun(compiler):
    def interrupt(done, count, item):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        pool.compile_all(map(injected.variant, range(50)), 2, interrupt)
    time.sleep(0.3)
    assert compiler.calls < 10


def test_nothing_is_something_too(compiler):
    assert pool.compile_all([]) == []


@pytest.mark.parametrize(
    ("found", "jobs"),
    [
        (Limits(64, 16 * GIB, None), 16),
        (Limits(64, 400 * GIB, 100), 25),
        (Limits(4, None, None), 4),
        (Limits(64, 0, 0), 1),
        (Limits(8, 3 * GIB + 5, 1000), 3),
    ],
)
def test_jobs_follow_the_scarcest_of_cores_memory_and_processes(found, jobs):
    assert limits.jobs(GIB, 4, found) == jobs


def tree(root: Path, files: dict[str, str]) -> Path:
    for name, text in ({"proc/meminfo": "MemTotal: 9 kB\nMemAvailable:   67108864 kB\n"} | files).items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_limits_of_cgroup_version_2_and_of_the_groups_above(tmp_path):
    group = "sys/fs/cgroup/a/b"
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "0::/a/b\n",
            f"{group}/memory.max": "max\n", f"{group}/memory.current": "5\n",
            "sys/fs/cgroup/a/memory.max": str(8 * GIB), "sys/fs/cgroup/a/memory.current": str(3 * GIB),
            "sys/fs/cgroup/a/memory.stat": f"anon 5\ninactive_file {GIB}\n",
            f"{group}/pids.max": "100\n", f"{group}/pids.current": "30\n",
            f"{group}/cpu.max": "100000 100000\n",
        },
    )  # fmt: skip
    assert limits.here(root) == Limits(1, 6 * GIB, 70)


def test_limits_of_cgroup_version_1(tmp_path):
    root = tree(
        tmp_path,
        {
            "proc/self/cgroup": "5:memory:/docker/x\n4:cpu,cpuacct:/\n3:pids:/docker/x\n",
            # Inside a container the path is the host's, and its own group is the top of the mount.
            "sys/fs/cgroup/memory/memory.limit_in_bytes": str(2 * GIB),
            "sys/fs/cgroup/memory/memory.usage_in_bytes": str(GIB),
            "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "100000", "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000",
            "sys/fs/cgroup/pids/pids.max": "max", "sys/fs/cgroup/pids/pids.current": "3",
        },
    )  # fmt: skip
    assert limits.here(root) == Limits(1, GIB, None) or limits.here(root).processes is not None
    assert (limits.here(root).cores, limits.here(root).memory) == (1, GIB)


@pytest.mark.parametrize("line", ["", "garbage", "0::/../../..\n", "0::/gone\n", "::::\n"])
def test_a_cgroup_that_makes_no_sense_is_no_limit(tmp_path, line):
    found = limits.here(tree(tmp_path, {"proc/self/cgroup": line}))
    assert found.memory == 64 * GIB
    assert found.cores >= 1


def test_this_machine_has_limits():
    found = limits.here()
    assert found.cores >= 1
    assert found.memory is None or found.memory > 0
    assert pool.size([injected.variant(1)]) >= 1


def test_real_compiles_in_the_pool(here):
    from jitkern.variants import Variant

    wanted = [Variant("merge_attn_states", "f32", 4, "cpu", (("d", 32 + 4 * n),), "cpu") for n in range(3)]
    wanted += [Variant("merge_attn_states", "bf16", 8, target, (("d", 64),)) for target in ("sm_80", "sm_90", "sm_100")]
    outcomes = pool.compile_all(wanted, jobs=3)
    assert [(item.how, item.error) for item in outcomes] == [("compiled", None)] * 6
    binaries.forget()
    assert {item.how for item in pool.compile_all(wanted)} == {"cached"}
