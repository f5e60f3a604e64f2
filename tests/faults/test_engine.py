"""freeze, further roots, why, events and logging."""

from __future__ import annotations

import logging
import os
import threading

import pytest

from jitkern import binaries, cache, compilers, events, loader, settings, sources
from jitkern.errors import ArgumentError, MissError, SettingError
from jitkern.variants import Variant
from tests.faults import harness, injected

REAL = Variant("merge_attn_states", "bf16", 8, "sm_90", (("d", 64),))


@pytest.fixture
def compiler(here, monkeypatch):
    found = injected.Compiler(size=1000)
    monkeypatch.setattr(compilers, "get", lambda backend: found)
    return found


# ---- after the warm-up -------------------------------------------------------------------------------------


@pytest.mark.parametrize("late", ["event", "warning", "error"])
def test_a_compile_after_freeze_is_what_was_asked_for(compiler, heard, late):
    seen: list[events.Event] = []
    loader.obtain(injected.variant(1), injected.TEXT)
    loader.freeze(late)
    stop = events.listen(seen.append)
    try:
        assert loader.obtain(injected.variant(1), injected.TEXT)[1] == "cached"
        assert [event.kind for event in seen] == ["hit"]
        if late == "error":
            with pytest.raises(MissError, match="warmup"):
                loader.obtain(injected.variant(2), injected.TEXT)
            assert compiler.calls == 1
        else:
            assert loader.obtain(injected.variant(2), injected.TEXT)[1] == "compiled"
            assert loader.obtain(injected.variant(3), injected.TEXT)[1] == "compiled"
    finally:
        stop()
    assert [event.kind for event in seen].count("late_compile") == (1 if late == "error" else 2)
    assert len(heard) == {"event": 0, "warning": 2, "error": 0}[late]
    loader.thaw()
    assert loader.obtain(injected.variant(4), injected.TEXT)[1] == "compiled"


@pytest.mark.parametrize("late", ["event", "warning", "error"])
def test_the_variable_freezes_from_the_start(compiler, heard, late):
    seen: list[events.Event] = []
    assert loader.obtain(injected.variant(1), injected.TEXT)[1] == "compiled"
    stop = events.listen(seen.append)
    try:
        with settings.override(freeze=late):
            assert loader.obtain(injected.variant(1), injected.TEXT)[1] == "cached"
            if late == "error":
                with pytest.raises(MissError, match=r"JITKERN_FREEZE=error says .*warmup.*jitkern warm"):
                    loader.obtain(injected.variant(2), injected.TEXT)
            else:
                assert loader.obtain(injected.variant(2), injected.TEXT)[1] == "compiled"
            assert len(heard) == (late == "warning")
            loader.freeze("event")  # goes before the variable
            assert loader.obtain(injected.variant(3), injected.TEXT)[1] == "compiled"
            loader.thaw()
            if late == "error":
                with pytest.raises(MissError, match="JITKERN_FREEZE"):
                    loader.obtain(injected.variant(4), injected.TEXT)
    finally:
        loader.thaw()
        stop()
    late_ones = [event.detail for event in seen if event.kind == "late_compile"]
    assert late_ones == [late, "event", *([late] if late == "error" else [])]
    assert loader.obtain(injected.variant(5), injected.TEXT)[1] == "compiled"


def test_the_variable_takes_no_other_word():
    assert settings.from_environment({"JITKERN_FREEZE": "Error"}).freeze == "error"
    with pytest.raises(SettingError, match="JITKERN_FREEZE='panic': allowed are off, event, warning, error"):
        settings.from_environment({"JITKERN_FREEZE": "panic"})


def test_freeze_takes_no_other_word(here):
    with pytest.raises(ArgumentError, match="event, warning, error"):
        loader.freeze("panic")


# ---- further roots -----------------------------------------------------------------------------------------


@pytest.fixture
def shared(compiler, here, tmp_path):
    """A shared root that somebody filled."""
    root = tmp_path / "shared"
    root.mkdir()
    with settings.override(cache_dir=root):
        loader.obtain(injected.variant(1), injected.TEXT)
    for path, _, _ in cache.Store(root).entries():
        os.utime(path, (1e9, 1e9))  # long ago, so that a use would be noted if it were ours
    compiler.calls = 0
    return root


def snapshot(root):
    return {str(path): (path.lstat().st_mtime_ns, path.lstat().st_mode) for path in sorted(root.rglob("*"))}


def test_a_further_root_is_searched_before_compiling_and_never_written_to(compiler, shared, here, heard):
    before = snapshot(shared)
    with settings.override(cache_roots=(shared,)):
        assert loader.obtain(injected.variant(1), injected.TEXT)[1] == "cached"
        assert loader.obtain(injected.variant(2), injected.TEXT)[1] == "compiled"
    assert compiler.calls == 1
    assert snapshot(shared) == before
    assert heard == []
    assert len(list(cache.Store(here).entries())) == 1


def test_a_damaged_entry_of_a_further_root_is_told_and_made_here(compiler, shared, here, heard):
    path = next(cache.Store(shared).entries())[0] / "kernel.cubin"
    path.write_bytes(b"bad")
    before = snapshot(shared)
    with settings.override(cache_roots=(shared,)):
        assert loader.obtain(injected.variant(1), injected.TEXT)[1] == "compiled"
        assert loader.obtain(injected.variant(1), injected.TEXT)[1] == "cached"
    assert len(heard) == 1
    assert snapshot(shared) == before


@pytest.mark.parametrize("trap", ["open", "missing", "file", "open entry"])
def test_a_further_root_that_cannot_be_trusted_is_skipped_with_a_word(compiler, shared, here, heard, tmp_path, trap):
    root = shared
    if trap == "open":
        root.chmod(0o777)
    elif trap == "open entry":
        (next(cache.Store(shared).entries())[0] / "kernel.cubin").chmod(0o666)
    else:
        root = tmp_path / trap
        if trap == "file":
            root.write_text("")
    with settings.override(cache_roots=(root,)):
        assert loader.obtain(injected.variant(1), injected.TEXT)[1] == "compiled"
    assert len(heard) == (1 if trap != "file" else 0) or "file" in heard[0]


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to give files away")
def test_a_further_root_may_belong_to_whoever_fills_it_but_not_where_anyone_could_have_made_it(
    compiler, shared, here, heard, tmp_path
):
    for path in [shared, *shared.rglob("*")]:
        os.chown(path, 4242, 4242)
    with settings.override(cache_roots=(shared,)):
        how = loader.obtain(injected.variant(1), injected.TEXT)[1]
        reachable = not any(parent.stat().st_mode & 0o002 for parent in shared.parents)
        # Temporary folders mostly lie in /tmp, where anyone may make one: then it has to be refused.
        assert how == ("cached" if reachable else "compiled")
        assert len(heard) == (0 if reachable else 1)
    own = cache.Store(shared, read_only=True)
    key = compilers.key_of(injected.variant(1), injected.TEXT)
    assert own.get(key) is None, "somebody else's files were believed"
    trusting = cache.Store(shared, read_only=True, owners={0, 4242})
    assert trusting.get(key) is not None


def test_hit_only_names_every_root_and_compiles_nothing(compiler, shared, here):
    with settings.override(cache_roots=(shared,), mode="hit-only"):
        assert loader.obtain(injected.variant(1), injected.TEXT)[1] == "cached"
        with pytest.raises(MissError) as caught:
            loader.obtain(injected.variant(2), injected.TEXT)
    assert str(shared) in str(caught.value)
    assert str(here) in str(caught.value)
    assert compiler.calls == 0


# ---- why ---------------------------------------------------------------------------------------------------


def test_why_tells_what_differs_from_the_nearest_entry(here):
    assert binaries.why(REAL).state == "absent"
    loader.obtain(REAL)
    found = binaries.why(REAL)
    assert (found.state, found.differences) == ("cached", [])
    other = Variant(REAL.kernel, "f16", 8, "sm_90", REAL.constants)
    loader.obtain(other)
    found = binaries.why(Variant(REAL.kernel, "bf16", 8, "sm_80", REAL.constants))
    assert found.nearest is not None
    assert "-bf16-" in found.nearest.name, "the nearer one is that which differs in the target alone"
    assert [item.part for item in found.differences] == ["target", "options"]
    assert "sm_90 in the entry, sm_80 now" in str(found)


def test_why_is_short_where_everything_differs(here):
    loader.obtain(REAL)
    found = str(binaries.why(Variant(REAL.kernel, "bf16", 8, "cpu", REAL.constants, "cpu")))
    assert found.endswith("is of backend nvrtc")
    assert "\n" not in found
    found = str(binaries.why(Variant(REAL.kernel, "f16", 8, "sm_90", REAL.constants)))
    assert "symbol: " in found
    assert "JITKERN_ENTRY" not in found, "that is the symbol once more"


def test_why_names_the_line_of_an_edited_header(here, tmp_path):
    import shutil

    loader.obtain(REAL)
    shutil.copytree(sources.root(), tmp_path / "texts")
    header = tmp_path / "texts/include/pack.cuh"
    lines = header.read_text().splitlines()
    number = next(n for n, line in enumerate(lines) if "#include" in line)
    lines.insert(number + 3, "// edited")
    header.write_text("\n".join(lines))
    with settings.override(sources_dir=tmp_path / "texts"):
        found = binaries.why(REAL)
    assert [item.part for item in found.differences] == ["text"]
    assert f"pack.cuh:{number + 4} `// edited`" in found.differences[0].wanted


@pytest.mark.parametrize(
    ("change", "part"), [({"version": "99.0"}, "compiler.version"), ({"build": "x"}, "compiler.build")]
)
def test_why_names_the_compiler(here, monkeypatch, change, part):
    from dataclasses import replace

    from jitkern import toolchain

    loader.obtain(REAL)
    library = toolchain.nvrtc()
    monkeypatch.setattr(toolchain, "nvrtc", lambda: replace(library, **change))
    assert [item.part for item in binaries.why(REAL).differences] == [part]


def test_why_tells_damage_and_changes_nothing(here):
    loader.obtain(REAL)
    path = next(cache.Store(here).entries())[0]
    (path / "kernel.cubin").write_bytes(b"bad")
    before = snapshot(here)
    assert binaries.why(REAL).state == "damaged"
    assert "kernel.cubin" in str(binaries.why(REAL))
    assert snapshot(here) == before


def test_a_slow_compile_says_why_it_missed_and_how_long_it_took(tmp_path):
    root = tmp_path / "root"
    env = harness.with_root(root, JITKERN_QUIET=None)
    program = (
        "from jitkern import loader; from tests.faults import injected; c = injected.install();"
        "loader.obtain(injected.variant(1), injected.TEXT); c.seconds = 1.3;"
        "loader.obtain(injected.variant(1, 'sm_80'), injected.TEXT)"
    )
    first, last = python(program, env).splitlines()
    assert first == "jitkern: compiling injected-f32-p4-n1 for sm_80 (the nearest entry differs in target, options) ..."
    assert last.startswith("jitkern: compiling injected-f32-p4-n1 for sm_80: done after 1.3 s")


# ---- events and logging ------------------------------------------------------------------------------------


def test_events_and_counts_of_a_life(compiler):
    seen, before = [], events.stats()
    stop = events.listen(lambda event: seen.append(event.kind))
    loader.obtain(injected.variant(1), injected.TEXT)
    loader.obtain(injected.variant(1), injected.TEXT)
    stop()
    loader.obtain(injected.variant(2), injected.TEXT)
    assert seen == ["miss", "compiled", "hit"]
    after = events.stats()
    assert {kind: after[kind] - before[kind] for kind in ("miss", "compiled", "hit")} == {
        "miss": 2,
        "compiled": 2,
        "hit": 1,
    }
    assert after.seconds["compiled"] > before.seconds.get("compiled", 0.0)
    assert "compiled" in str(after)


def test_a_listener_that_raises_is_logged_and_breaks_nothing(compiler, caplog):
    stop = events.listen(lambda event: 1 / 0)
    with caplog.at_level(logging.ERROR, "jitkern"):
        assert loader.obtain(injected.variant(1), injected.TEXT)[1] == "compiled"
    stop()
    assert "ZeroDivisionError" in caplog.text


def test_counts_are_right_under_threads():
    before = events.stats()["probe"]

    def report() -> None:
        for _ in range(500):
            events.report("probe", "x")

    threads = [threading.Thread(target=report) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert events.stats()["probe"] - before == 4000


@pytest.mark.parametrize(
    ("level", "words", "not_words"),
    [
        (None, [], ["compiled", "miss", "hit"]),
        ("info", ["jitkern: compiled"], ["miss", "hit "]),
        ("debug", ["jitkern: compiled", "jitkern: miss", "jitkern: hit"], []),
        ("off", [], ["compiled", "miss"]),
    ],
)
def test_the_log_says_as_much_as_is_asked_for(tmp_path, level, words, not_words):
    root = tmp_path / "root"
    env = harness.with_root(root, JITKERN_LOG=level)
    wanted = "from jitkern import loader; from tests.faults.scenes_kill import real"
    said = python(f"{wanted}; [loader.obtain(real(1, 'nvrtc')) for _ in 'ab']", env)
    for word in words:
        assert word in said
    for word in not_words:
        assert word not in said


def test_a_program_that_configures_logging_later_gets_everything_once(tmp_path):
    env = harness.with_root(tmp_path / "root")
    said = python(
        "from jitkern import events; import logging, sys; events.warn_once('a', 'first');"
        "logging.basicConfig(format='APP %(message)s', stream=sys.stderr); events.warn_once('b', 'second')",
        env,
    )
    assert said.splitlines() == ["jitkern: first", "APP second"]


def test_a_level_that_the_program_set_stands(tmp_path):
    env = harness.with_root(tmp_path / "root")
    said = python(
        "import logging; logging.getLogger('jitkern').setLevel(logging.ERROR); from jitkern import events;"
        "events.warn_once('a', 'unwanted')",
        env,
    )
    assert said == ""


def python(program: str, env: dict[str, str]) -> str:
    import subprocess
    import sys

    run = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stderr
    return run.stderr


def test_a_wait_for_another_process_says_for_whom_and_since_when(tmp_path):
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    found, said = harness.scene(
        "scenes_wait",
        "wait_for_a_slow_one",
        str(root),
        env=harness.with_root(root, JITKERN_LOCK_TIMEOUT="30", JITKERN_QUIET=None),
    )
    assert found["how"] == "cached"
    assert found["events"].get("waiting") == 1
    assert found["events"].get("wait") == 1
    assert "compiled" not in found["events"]
    assert f"waiting for pid {found['holder']} on " in said
    assert "(since " in said


def test_a_holder_that_is_stopped_is_waited_for_as_long_as_the_setting_says(tmp_path):
    root = tmp_path / "root"
    root.mkdir(mode=0o700)
    found, said = harness.scene(
        "scenes_wait",
        "wait_for_a_stopped_one",
        str(root),
        env=harness.with_root(root, JITKERN_LOCK_TIMEOUT="1.5", JITKERN_QUIET=None),
    )
    assert found["how"] == "compiled"
    assert 1.4 < found["seconds"] < 4.0
    assert f"for pid {found['holder']} on " in said
    assert "compiling it here" in said


def test_a_wait_is_bounded_by_a_minute_unless_told_otherwise():
    assert settings.Settings().lock_timeout == 60.0
