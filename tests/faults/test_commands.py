"""`jitkern why` and `jitkern cache export, import, verify`."""

from __future__ import annotations

import json

import pytest

from jitkern import cli, loader, settings
from jitkern.variants import Variant

REAL = Variant("merge_attn_states", "bf16", 8, "sm_90", (("d", 64),))
NAME = ["merge_attn_states", "--dtype", "bf16", "--pack", "8", "--constant", "d=64", "--target", "sm_90"]


def test_entries_travel_by_command(here, tmp_path, capsys):
    other = tmp_path / "other"
    loader.obtain(REAL)
    assert cli.main(["cache", "export", str(tmp_path / "b"), "--target", "sm_90", "--json"]) == 0
    assert len(json.loads(capsys.readouterr().out)["entries"]) == 1
    assert cli.main(["cache", "verify", str(tmp_path / "b")]) == 0
    assert "1 entries" in capsys.readouterr().out
    with settings.override(cache_dir=other):
        loader.forget()
        assert cli.main(["why", *NAME]) == 1
        assert "nothing of merge_attn_states" in capsys.readouterr().out
        assert cli.main(["cache", "import", str(tmp_path / "b"), "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["added"] == 1
        assert cli.main(["why", *NAME, "--json"]) == 0
        assert json.loads(capsys.readouterr().out)[0]["state"] == "cached"
        assert loader.obtain(REAL)[1] == "cached"


@pytest.mark.parametrize("action", ["verify", "import"])
def test_a_bad_bundle_is_refused_in_one_line(here, tmp_path, capsys, action):
    (tmp_path / "b").write_bytes(b"jitkern-bundle 1 5 0 -\nwrong")
    assert cli.main(["cache", action, str(tmp_path / "b")]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "is refused" in said.err
    assert len(said.err.splitlines()) == 1


def test_nothing_to_export_says_what_to_do(here, tmp_path, capsys):
    assert cli.main(["cache", "export", str(tmp_path / "b")]) == 1
    assert "jitkern warm" in capsys.readouterr().err
    assert not (tmp_path / "b").exists()


def test_why_names_the_difference(here, capsys):
    loader.obtain(REAL)
    assert cli.main(["why", *NAME[:-1], "sm_80"]) == 1
    assert "target: sm_90 in the entry, sm_80 now" in capsys.readouterr().out
