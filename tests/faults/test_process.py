"""Fork, signals, exit, and compilers that die: nothing hangs, nothing is left, the next call works."""

from __future__ import annotations

import os
import stat

import pytest

from tests.faults import harness


def scene(root, function, *args, **more):
    return harness.scene(
        "scenes_process", function, str(root), *args, env=harness.with_root(root, **more.pop("env", {})), **more
    )


@pytest.mark.parametrize("program", ["cc1plus", "ninja"])
def test_a_compiler_that_is_killed_is_no_fault_of_the_text(root, program):
    found, said = scene(root, "kill_the_compiler", program)
    if found["error"] == "none":
        pytest.skip(f"this compiler runs no {program}, or was too quick to be hit")
    assert found["error"].startswith("ToolchainError"), said
    assert found["next"] == "compiled", "the failure was remembered as the text's"
    assert found["left"] == []
    assert found["folders"] == ["root"]


@pytest.fixture
def endless_compiler(tmp_path):
    """A C++ compiler that answers what it is, and takes a minute for anything else, with a child of its own."""
    path = tmp_path / "slow-c++"
    path.write_text('#!/bin/sh\ncase "$*" in\n*--version*|*dump*|*-v) exec c++ "$@";;\nesac\nsleep 61 & wait\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


@pytest.mark.parametrize("after", [0.0, 0.05, 0.3])
def test_an_interrupt_ends_the_compilers_too(root, endless_compiler, after):
    found, said = scene(root, "interrupt_a_build", after, env={"CXX": endless_compiler})
    assert found["outcome"] == "interrupted", said
    assert found["left"] == [], "a compiler went on"
    assert [name for name in found["folders"] if "build" in name] == []
    assert found["seconds"] < 10
    assert found["path"] == os.environ["PATH"]


@pytest.mark.parametrize("backend", ["nvrtc", "cpu"])
def test_the_interpreter_may_end_during_a_compile(root, backend, record_property):
    draws = harness.amount(12, 60) if backend == "nvrtc" else harness.amount(4, 20)
    for number in range(draws):
        _, said = scene(root, "exit_during", backend, 0.02 + 0.3 * number / draws)
        assert "Traceback" not in said, said
        assert "pointer" not in said
    left = [name for name in os.listdir(root.parent) if name.startswith("jitkern-build")]
    record_property("measured", f"{draws} exits during {backend} compiles, exit code 0 each time")
    assert left == []


def test_an_exit_does_not_wait_for_a_compiler_that_takes_a_minute(root, endless_compiler):
    scene(root, "exit_during", "cpu", 1.0, False, env={"CXX": endless_compiler}, timeout=20)
    assert [name for name in os.listdir(root.parent) if name.startswith("jitkern-build")] == []


def test_a_fork_while_others_compile_and_count(root):
    found, said = scene(root, "fork_between")
    assert found["child"] == ["ok", ["cached", "compiled"]] or found["child"] == ["ok", ["compiled", "compiled"]], said
    assert (found["parent"], found["alive"]) == ("cached", 0)


def test_a_fork_in_the_middle_of_a_compile(root, record_property):
    times = harness.amount(15, 60)
    found, said = scene(root, "fork_in_compiles", times)
    assert found["results"] == [], said
    assert not found["alive"]
    record_property(
        "measured", f"{times} forks during NVRTC compiles; a fork waited for {found['longest']:.2f} s at most"
    )


def test_a_fork_that_cannot_wait_for_a_compile_is_told(root):
    found, said = scene(root, "fork_that_cannot_wait")
    assert found["result"][0] == "error", said
    assert "ToolchainError" in found["result"][1]
    assert "spawn" in found["result"][1]
    assert found["parent"] == "compiled"


def test_a_forked_child_uses_the_cpu_and_is_told_about_cuda(root):
    found, said = scene(root, "fork_after_use")
    assert found["before"][0] == found["after"][0] == "ok", said
    if not found["gpu"]:
        assert found["before"][1][1] == "ToolchainError"  # no driver: what is wrong is said as ever
    handle, message = found["after"][1]
    assert handle == "compiled"
    assert "forked" in message
    assert "spawn" in message


@pytest.mark.parametrize("how", ["compile", "count", "listener"])
def test_a_handler_may_want_what_its_own_thread_is_making(root, how):
    found, _ = scene(root, "reenter", how, env={"JITKERN_LOCK_TIMEOUT": "60"}, timeout=30)
    assert found["done"]
    assert found.get("seconds", 0.0) < 5.0, "it waited for a lock of its own"


@pytest.mark.parametrize("how", ["none", "closed", "broken"])
def test_nobody_has_to_listen_on_stderr(root, how):
    found, _ = scene(root, "without_stderr", how, env={"JITKERN_QUIET": None})
    assert found["results"] == ["compiled", "compiled"]


def test_no_thread_has_to_be_had(root):
    found, _ = scene(root, "without_threads")
    assert found["result"] == "compiled"


def test_leftovers_of_killed_builds_are_swept(root):
    found, _ = scene(root, "swept")
    assert found["left"] == ["jitkern-build-other", "jitkern-build-young", "root", "unrelated"]


GCC_SAYS = "kernels_src/k.cu:7:5: error: 'Killed' was not declared in this scope"


@pytest.mark.parametrize(
    ("log", "transient"),
    [
        ("c++: fatal error: Killed signal terminated program cc1plus\ncompilation terminated.", True),
        ("/tmp/cc1.s: fatal error: error writing to /tmp/cc1.s: No space left on device", True),
        ("kernel.cpp:9:1: fatal error: error writing to /tmp/cc1.s: No space left on device", True),
        ("as: out of memory allocating 4064 bytes", True),
        ("/bin/sh: 1: Cannot fork: Resource temporarily unavailable", True),
        (GCC_SAYS, False),
        (GCC_SAYS + "\n    7 | int Killed = out of memory; // No space left on device\n      |     ^~~~~~", False),
        ('kernels_src/k.cu(3): error: identifier "Terminated" is undefined', False),
    ],
)
def test_a_failure_of_the_machine_is_told_from_one_of_the_text(log, transient):
    from jitkern.compilers import building

    assert building.is_transient(log) is transient
