"""How many compilers may run at once here: cores, memory and processes, as far as the system and its cgroups allow."""

from __future__ import annotations

import contextlib
import os
import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_UNLIMITED = 1 << 60  # cgroup v1 says "no limit" with a number of this kind


@dataclass(frozen=True)
class Limits:
    """What is left for new work.

    Attributes:
        cores: processors that this process may use.
        memory: free bytes; None: unknown.
        processes: processes and threads that may still be started; None: unknown.
    """

    cores: int
    memory: int | None
    processes: int | None


def jobs(memory_each: int, processes_each: int, found: Limits | None = None) -> int:
    """How many jobs fit, at least one.

    Args:
        memory_each: the bytes that one needs at its peak.
        processes_each: the processes and threads that one needs.
        found: the limits; default: those of this machine.
    """
    found = found or here()
    most = found.cores
    if found.memory is not None:
        most = min(most, found.memory // memory_each)
    if found.processes is not None:
        most = min(most, found.processes // processes_each)
    return max(int(most), 1)


def here(root: Path = Path("/")) -> Limits:
    """The limits of this process.

    Args:
        root: where ``proc`` and ``sys`` are (tests).
    """
    cores = len(os.sched_getaffinity(0))
    memory, processes = [_available(root)], [_process_limit()]
    for kind, folder in _groups(root):
        if kind == "cpu":
            cores = min(cores, _quota(folder) or cores)
        if kind == "memory":
            memory.append(_left(folder, "memory.max", "memory.current", reclaim=True))
            memory.append(_left(folder, "memory.limit_in_bytes", "memory.usage_in_bytes", reclaim=True))
        if kind == "pids":
            processes.append(_left(folder, "pids.max", "pids.current"))
    return Limits(cores, _least(memory), _least(processes))


def _least(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None]
    return max(min(known), 0) if known else None


def _available(root: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        for line in (root / "proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    return None


def _process_limit() -> int | None:
    most = resource.getrlimit(resource.RLIMIT_NPROC)[0]
    if most == resource.RLIM_INFINITY or os.geteuid() == 0:
        return None
    mine = 0
    with contextlib.suppress(OSError):
        for item in os.scandir("/proc"):
            with contextlib.suppress(OSError):
                mine += item.name.isdigit() and item.stat().st_uid == os.geteuid()
    return most - mine


def _groups(root: Path) -> Iterator[tuple[str, Path]]:
    """(controller, folder) of this process's cgroups and all above them, of both versions."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        for kind in controllers.split(",") if controllers else ("cpu", "memory", "pids"):
            mount, inner = root / "sys/fs/cgroup" / (controllers and kind), Path(path.lstrip("/"))
            # In a container the path may be that of the host; the mount's own top is then our group.
            for folder in dict.fromkeys([inner, *inner.parents]):
                if os.path.isdir(mount / folder):
                    yield kind, mount / folder


def _number(path: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        value = int(path.read_text().strip())  # "max" is a ValueError
        return value if 0 <= value < _UNLIMITED else None
    return None


def _left(folder: Path, limit: str, current: str, reclaim: bool = False) -> int | None:
    most, now = _number(folder / limit), _number(folder / current)
    if most is None or now is None:
        return None
    return most - now + (_reclaimable(folder) if reclaim else 0)


def _reclaimable(folder: Path) -> int:
    """Bytes of file cache that the kernel gives up before it refuses anything."""
    with contextlib.suppress(OSError, ValueError):
        fields = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
        return int(fields.get("total_inactive_file", fields.get("inactive_file", 0)))
    return 0


def _quota(folder: Path) -> int | None:
    with contextlib.suppress(OSError, ValueError):
        quota, period = (folder / "cpu.max").read_text().split()
        return max(int(quota) // int(period), 1)
    quota_us, period_us = _number(folder / "cpu.cfs_quota_us"), _number(folder / "cpu.cfs_period_us")
    return max(quota_us // period_us, 1) if quota_us and period_us else None
