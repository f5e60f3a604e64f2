"""Many at once: one compile per variant where locks work, right results where they do not."""

from __future__ import annotations

import pytest

from tests.faults import harness

CROWD = 32


def cold(root, count, different, kind, real=False, timeout="20"):
    env = harness.with_root(root, JITKERN_LOCK_TIMEOUT=timeout)
    found, said = harness.scene("scenes_race", "cold_processes", str(root), count, different, kind, real, env=env)
    assert found["failed"] == [], said
    assert found["versions"] == [1] * different
    assert found["trouble"] == 0
    assert found["left"] == 0
    return found


@pytest.mark.parametrize("different", [1, 8, 32])
@pytest.mark.parametrize("real", [True, False], ids=["nvrtc", "injected"])
def test_a_crowd_of_cold_processes_compiles_each_variant_once(root, different, real, record_property):
    found = cold(root, CROWD, different, "works", real)
    record_property("measured", f"{CROWD} cold processes, {different} variants: {sum(found['compiles'])} compiles")
    assert found["compiles"] == [1] * different
    assert found["entries"] == different


@pytest.mark.parametrize("kind", ["ENOLCK", "ENOSYS", "EIO"])
@pytest.mark.parametrize("different", [1, 8])
def test_where_no_lock_works_everybody_compiles_and_all_is_right(root, kind, different, record_property):
    found = cold(root, CROWD, different, kind)
    record_property(
        "measured", f"{CROWD} cold processes, {different} variants, flock {kind}: {sum(found['compiles'])} compiles"
    )
    assert found["entries"] == different


def test_a_lock_that_is_always_busy_is_given_up(root):
    found = cold(root, 8, 2, "busy", timeout="0.3")
    assert found["entries"] == 2


def test_locks_that_do_not_reach_the_other_node_cost_one_compile_more(root, record_property):
    found = cold(root, CROWD, 1, "node-local")
    record_property(
        "measured", f"{CROWD} cold processes on two nodes with local locks: {found['compiles'][0]} compiles"
    )
    assert found["compiles"][0] <= 2
    assert found["entries"] == 1


@pytest.mark.parametrize("different", [1, 4])
@pytest.mark.parametrize("in_memory", [False, True], ids=["disk", "memory"])
def test_a_crowd_of_threads_compiles_and_loads_each_variant_once(root, different, in_memory, record_property):
    found, said = harness.scene(
        "scenes_race", "cold_threads", str(root), CROWD, different, in_memory, env=harness.with_root(root)
    )
    assert found["wrong"] == [], said
    assert (found["compiled"], found["loaded"], found["handles"]) == (different, different, different)
    assert found["flights"] == 0, "waiting leaves something behind for each variant"
    record_property(
        "measured",
        f"{CROWD} threads, {different} variants: {found['compiled']} compiles; another thread paused for at most"
        f" {found['longest pause'] * 1000:.0f} ms",
    )
    assert found["longest pause"] < 1.0, "waiting threads held the interpreter"


def test_threads_that_want_a_broken_text_share_one_compile(root):
    found, _ = harness.scene("scenes_race", "failing_threads", str(root), CROWD, env=harness.with_root(root))
    assert found["errors"] == {"True True": CROWD}
    assert found["tries"] == 1


def test_readers_see_a_whole_entry_or_none(root, record_property):
    seconds = harness.amount(5, 60)
    found, said = harness.scene(
        "scenes_race", "readers_and_writers", str(root), 6, 3, seconds, env=harness.with_root(root)
    )
    record_property("measured", f"{found['reads']} reads against {found['writes']} writes in {seconds} s, none torn")
    assert found["failed"] == [], said
    assert found["reads"] > 50
    assert found["writes"] > 50


@pytest.mark.parametrize("how", ["clear", "trim", "remove"])
def test_removal_while_others_compile_and_read_hurts_nobody(root, how, record_property):
    seconds = harness.amount(2, 20)
    found, said = harness.scene(
        "scenes_race", "removal_under_way", str(root), how, 6, seconds, env=harness.with_root(root), timeout=120
    )
    record_property("measured", f"{how} {found['removals']} times while six processes got {found['uses']} binaries")
    assert found["failed"] == [], said
    assert found["removals"] > 10
    assert found["uses"] > 100
