"""`baton holds`: what is placed, listed and released, and what the commands that erase say then."""

import json
from pathlib import Path

import pytest

from tests.cli.test_commands import baton

pytestmark = pytest.mark.usefixtures("database_of_commands")


@pytest.mark.long
def test_a_hold_lives_from_add_to_release(tmp_path: Path) -> None:
    assert baton(tmp_path, "tenants", "add", "acme").status == 0
    assert "No legal hold" in baton(tmp_path, "holds", "ls").out
    (placed,) = json.loads(baton(tmp_path, "holds", "add", "--tenant", "acme", "--reason", "case 12", "--json").out)
    (user,) = json.loads(
        baton(tmp_path, "holds", "add", "--user", "ann", "--tenant", "acme", "--reason", "case 13", "--json").out
    )
    assert (user["scope"], user["name"], user["tenant"]) == ("user", "ann", "acme")
    listed = baton(tmp_path, "holds", "ls").out
    assert "tenant acme" in listed
    assert "case 12" in listed
    assert "content keys are kept" in baton(tmp_path, "runs", "erase", "--tenant", "acme").err
    for hold in (placed, user):
        assert baton(tmp_path, "holds", "release", hold["id"]).status == 0
    assert "No legal hold" in baton(tmp_path, "holds", "ls").out
    assert len(json.loads(baton(tmp_path, "holds", "ls", "--all", "--json").out)) == 2
    changes = json.loads(baton(tmp_path, "audit", "changes", "--target", placed["id"], "--json").out)
    assert [change["action"] for change in changes] == ["hold.released", "hold.placed"]
    assert {change["via"] for change in changes} == {"command"}


def test_a_hold_that_covers_nothing_or_two_things_is_refused(tmp_path: Path) -> None:
    for line in ("", "--run last --key ci", "--user a --key ci"):
        result = baton(tmp_path, "holds", "add", "--reason", "case", *line.split())
        assert result.status == 2, line
        assert "name one of --run, --user, --tenant and --key" in result.err
    assert "`baton holds ls` lists them" in baton(tmp_path, "holds", "release", "hold_none").err
    assert "no tenant of this name" in baton(tmp_path, "holds", "add", "--reason", "x", "--tenant", "acme").err
