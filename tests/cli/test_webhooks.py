"""`baton webhooks`: the messages that were given up, and sending them again."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from tests.cli.test_commands import baton

pytestmark = pytest.mark.usefixtures("database_of_commands")

ROW = (
    "INSERT INTO notices (run, turn, word, at, tries, due, failed_at, reason) VALUES (?, 0, 'failed', 5, 3, 9e9, 9, ?)"
)


def test_messages_that_were_given_up_are_listed_and_sent_again(tmp_path: Path) -> None:
    assert baton(tmp_path, "webhooks", "failed").out == "No message was given up.\n"
    (file,) = tmp_path.rglob("baton.db")
    with closing(sqlite3.connect(file)) as database, database:
        database.executemany(ROW, [("run_a", "HTTP 410"), ("run_b", "timeout"), ("run_c", "timeout")])
    assert "response.failed" in baton(tmp_path, "webhooks", "failed").out
    (first, *_) = json.loads(baton(tmp_path, "webhooks", "failed", "--json").out)
    assert (first["id"], first["about"], first["reason"], first["tries"]) == ("evt_a", "run_a", "HTTP 410", 3)
    assert baton(tmp_path, "webhooks", "resend").status == 2
    assert "evt_z" in baton(tmp_path, "webhooks", "resend", "evt_a", "evt_z").err
    assert baton(tmp_path, "webhooks", "resend", "evt_a").out == "1 message is due again.\n"
    assert baton(tmp_path, "webhooks", "resend", "--all").out == "2 messages are due again.\n"
    assert json.loads(baton(tmp_path, "webhooks", "failed", "--json").out) == []
