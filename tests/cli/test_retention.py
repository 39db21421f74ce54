"""`baton retention show`: how long texts and runs are kept."""

import json
from pathlib import Path

import pytest

from tests.cli.test_commands import baton

CLASSES = "label=phi=>content=7,events=3650; tenant=bank,tier=baton-mini=>content=never"


def test_the_times_of_all_classes_are_shown(tmp_path: Path) -> None:
    text = baton(tmp_path, "retention", "show", BATON_RETENTION_CLASSES=CLASSES, BATON_RETENTION_CONTENT="30").out
    assert "label phi" in text
    assert "tenant bank, tier baton-mini" in text
    for words in ("for 7 days", "for 3650 days", "for 30 days", "for ever"):
        assert words in text
    classes = json.loads(baton(tmp_path, "retention", "show", "--json", BATON_RETENTION_CLASSES=CLASSES).out)
    assert classes["default"] == {"content": None, "events": None}
    assert [entry["content"] for entry in classes["classes"]] == [7.0, "never"]


@pytest.mark.parametrize(
    "text",
    ["label=phi", "label=phi=>content=x", "team=a=>content=1", "label=phi=>days=1", "label=p h i=>content=1"],
)
def test_a_class_that_cannot_be_read_is_a_fault_of_the_settings(tmp_path: Path, text: str) -> None:
    result = baton(tmp_path, "retention", "show", BATON_RETENTION_CLASSES=text)
    assert result.status == 2
    assert "class 1" in result.err


def test_the_database_is_named_in_which_content_is_erased(tmp_path: Path) -> None:
    result = baton(tmp_path, "runs", "erase", "--user", "ann", "--dry-run")
    assert result.err.startswith("database: sqlite")
