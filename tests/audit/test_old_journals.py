"""Journals that released versions wrote pass this version's audit, requests rendered again included."""

import base64
import json
import time
from pathlib import Path
from typing import Any

import orjson
import pytest

from app.audit.check import Auditor
from app.audit.report import Report
from app.audit.requests import Pools
from app.audit.versions import VersionHistory
from app.core.pool.conductor_versions import Change
from app.providers.formats import adapter
from app.store.archive import Record, StoredEvent
from tests.core.journals import FOLDER

RELEASES = sorted(path for path in FOLDER.iterdir() if path.is_dir() and path.name != "__pycache__")


def decode(line: dict[str, Any]) -> Any:
    """A JSON object, or the bytes that it stands for."""
    return base64.b64decode(line["base64"]) if line.keys() == {"base64"} else line


def lines(path: Path) -> list[dict[str, Any]]:
    """The objects of a file, with bytes for what JSON does not have."""
    return [json.loads(line, object_hook=decode) for line in path.read_text().splitlines()]


def record(path: Path) -> Record:
    """A run as the archive reads it."""
    header, *rest = lines(path)
    stored = [
        StoredEvent(line["seq"], line["kind"], line["at"], orjson.dumps(line["body"])) for line in rest if "seq" in line
    ]
    contents = {line["ref"]: line["content"] for line in rest if "ref" in line}
    return Record(header["row"], tuple(stored), contents, tuple(header["tickets"]))


@pytest.mark.parametrize("release", RELEASES, ids=lambda path: path.name)
def test_the_journals_of_a_release_pass_the_audit(release: Path) -> None:
    catalogs = {line["digest"]: line["content"] for line in lines(release / "catalogs.jsonl")}
    changes = [Change(**line) for line in lines(release / "changes.jsonl")]
    pools, reigns, report = Pools(adapter, catalogs), VersionHistory.from_changes(changes), Report()
    runs = [path for path in sorted(release.glob("*.jsonl")) if path.stem not in ("catalogs", "changes")]
    for path in runs:
        recorded_run = record(path)
        waits = recorded_run.row["state"] == "awaiting_tool"
        Auditor(recorded_run.row["created_at"] + 60.0 if waits else time.time(), adapter).check(
            recorded_run, pools, reigns, report
        )
    assert [str(violation) for violation in report.violations] == []
    assert (report.runs, report.rebuilt_requests, report.unverifiable.total()) == (len(runs), report.calls, 0)
    assert report.calls
