"""`baton audit changes` and `baton tenants`: who changed which key and tenant, by the command line."""

import getpass
import json
from pathlib import Path

import pytest

from tests.cli.test_commands import baton

pytestmark = pytest.mark.usefixtures("database_of_commands")


@pytest.mark.long
def test_the_log_names_the_user_and_what_changed(tmp_path: Path) -> None:
    for command in ("changes", "reads"):
        assert "is logged" in baton(tmp_path, "audit", command, "--actor", "nobody").out
    key = json.loads(baton(tmp_path, "keys", "add", "ci", "--role", "auditor", "--json").out)
    assert baton(tmp_path, "keys", "add", "cd").status == 0
    assert baton(tmp_path, "keys", "revoke", "ci").status == 0
    logged = json.loads(baton(tmp_path, "audit", "changes", "--target", key["id"], "--json").out)
    assert "a key is named by its id" in baton(tmp_path, "audit", "changes", "--target", "ci").out
    user = getpass.getuser()
    assert [(entry["action"], entry["actor"], entry["via"]) for entry in logged] == [
        ("key.revoked", user, "command"),
        ("key.added", user, "command"),
    ]
    assert key["key"].split("_", 2)[2] not in json.dumps(logged)
    text = baton(tmp_path, "audit", "changes", "--limit", "1").out
    assert "key.revoked" in text
    assert "Revoked at: was none, is " in text
    assert "key.added" not in text
    assert baton(tmp_path, "tenants", "disable", "default").status == 0
    (tenant,) = json.loads(baton(tmp_path, "tenants", "ls", "--json").out)
    assert (tenant["name"], tenant["keys"], tenant["disabled_at"] is None) == ("default", 2, False)
    assert "in force" in baton(tmp_path, "tenants", "enable", "default").out
    assert "in force" in baton(tmp_path, "tenants", "add", "acme").out
    assert "no such tenant" in baton(tmp_path, "tenants", "disable", "none").err
    newest = json.loads(baton(tmp_path, "audit", "changes", "--limit", "1", "--json").out)
    assert [(entry["action"], entry["target"], entry["actor"]) for entry in newest] == [
        ("tenant.created", "acme", user)
    ]
    assert baton(tmp_path, "audit", "check").status == 0
