"""A file of which a line is malformed cannot be read, which is an error in words and no verdict."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from app.audit.export import Export
from app.errors import ConfigInvalid

HEAD = {"baton": "journal", "version": 3, "whole": True, "at": 9.0}
LINES: tuple[dict[str, Any], ...] = (
    {"catalog": "digest", "body": "eA=="},
    {"change": {"id": "c1", "at": 1.0, "who": "anna", "conductor": "planner", "kind": "promoted", "version": "v2"}},
    {"run": {"id": "run_1", "created_at": 1.0, "salt": {"base64": "eA=="}}},
    {"event": 1, "kind": "run.admitted", "at": 1.0, "body": {"task": "x"}},
    {"content": "ref", "body": "eA=="},
    {"ticket": {"step": 0}},
    {"disclosure": {"call": "call_1"}},
    {"rating": {"id": "rating_1"}},
    {
        "pruned": {
            "id": "run_2",
            "tenant": "acme",
            "state": "failed",
            "created_at": 1.0,
            "ended_at": 2.0,
            "pruned_at": 3.0,
            "events": 1,
            "root": {"base64": "eA=="},
            "archive": "",
        }
    },
)
NEEDED = ("id", "at", "conductor", "kind", "version", "created_at", "events", "root", "salt")
"""Columns that are read by the audit before a rule is applied."""
TIMES = ("at", "created_at", "ended_at")
"""Those that are compared with other times."""
OF_ANOTHER_TYPE = (*[(name, {}) for name in NEEDED], *[(name, "today") for name in TIMES])


def malformed_lines() -> Iterator[tuple[int, dict[str, Any]]]:
    """Yield the place of a line, and what stands there in its stead."""
    for place, line in enumerate(LINES):
        subject = next(iter(line))
        for name in line:
            without = {key: value for key, value in line.items() if key != name}
            if name != subject:
                yield place, without
            if name in ("body", "at"):
                yield place, {**line, name: {"base64": "!"}}
        if isinstance(line[subject], dict):
            for value in (None, 5, "text", []):
                yield place, {subject: value}
        for name, wrong in OF_ANOTHER_TYPE:
            if isinstance(line[subject], dict) and name in line[subject]:
                yield place, {subject: {**line[subject], name: wrong}}


async def read_all(export: Export) -> None:
    await export.catalogs()
    await export.changes()
    assert [record async for record in export.records(since=0.5)]
    assert [pruned async for pruned in export.pruned_runs(since=0.5)]


def write(path: Path, lines: tuple[dict[str, Any], ...]) -> None:
    path.write_text("".join([f"{json.dumps(line)}\n" for line in (HEAD, *lines, {"end": 1})]))


@pytest.mark.parametrize(("place", "line"), list(malformed_lines()))
async def test_a_malformed_line_is_named(tmp_path: Path, place: int, line: dict[str, Any]) -> None:
    path = tmp_path / "export.jsonl"
    write(path, LINES)
    await read_all(Export(path))
    write(path, (*LINES[:place], line, *LINES[place + 1 :]))
    with pytest.raises(ConfigInvalid, match=f"export.jsonl:{place + 2}: is no line of an export"):
        await read_all(Export(path))


@pytest.mark.parametrize("said", [0, 2, "1", None])
async def test_a_file_that_has_not_as_many_runs_as_it_says_is_refused(tmp_path: Path, said: object) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, LINES)
    path.write_text(path.read_text().replace('{"end": 1}', json.dumps({"end": said})))
    with pytest.raises(ConfigInvalid, match=f":{len(LINES) + 2}: says {said} runs, but the file has 1;"):
        await read_all(Export(path))


async def test_a_file_that_has_a_run_twice_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "journal.jsonl"
    write(path, (*LINES, LINES[2], LINES[3]))
    path.write_text(path.read_text().replace('{"end": 1}', '{"end": 2}'))
    with pytest.raises(ConfigInvalid, match=f":{len(LINES) + 2}: is the run run_1 once more; a file has each run once"):
        await read_all(Export(path))
