"""docs/settings.md says what jitkern.settings says."""

from __future__ import annotations

from pathlib import Path

from jitkern import settings

ROOT = Path(__file__).parents[1]


def test_the_table_of_settings_is_the_settings() -> None:
    text = (ROOT / "docs" / "settings.md").read_text(encoding="utf-8")
    rows = [line for line in text.splitlines() if line.startswith("| `")]
    assert rows == [f"| `{name}` | `{default}` | {meaning} |" for name, default, meaning in settings.table()]
