"""`baton report` over some 200 runs: every figure equals the one that a script without Baton's code makes of the export
of the same journal, and the tables say the same as the JSON."""

import asyncio
import csv
import io
import json
import random
import re
import sqlite3
import subprocess
import sys
import time
from collections.abc import Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson
import pytest

from app.__main__ import main
from app.core.rating.economics import GROUPINGS
from app.gateway.runs import reports
from tests.audit.scenes import play

WEEK_SECONDS = 604_800.0
COPIES = 9
SCRIPT = Path(__file__).with_name("recompute_report.py")
ROOT = Path(__file__).resolve().parents[2]
BY = ("tier", "tenant", "key", "user", "metadata.team", "worker", "topology", "week")


@dataclass
class SeededDatabase:
    """A database with runs of every kind, and an export of it with its ratings."""

    environ: Mapping[str, str]
    export: Path
    ratings: Path


@pytest.fixture(scope="module")
def seeded(tmp_path_factory: pytest.TempPathFactory) -> SeededDatabase:
    folder = tmp_path_factory.mktemp("report")
    asyncio.run(play(folder))
    with closing(sqlite3.connect(folder / "baton.db")) as database, database:
        database.row_factory = sqlite3.Row
        ratings = RunCopier(database, random.Random(18)).spread()
    environ = {"BATON_DATA_DIR": str(folder), "BATON_PEPPER": "p" * 32}
    export, rated = folder / "export.jsonl", folder / "ratings.jsonl"
    rated.write_text("".join(json.dumps(rating) + "\n" for rating in ratings))
    assert main(["audit", "export", str(export)], environ) == 0
    return SeededDatabase(environ, export, rated)


class RunCopier:
    """Copies of recorded runs with other times, tenants, users, tokens, prices and ratings."""

    def __init__(self, database: sqlite3.Connection, chance: random.Random) -> None:
        self.database = database
        self.chance = chance

    def spread(self) -> list[dict[str, Any]]:
        """Copy every run, and price the workers differently. Returns the ratings."""
        for row in self.rows("SELECT * FROM catalogs"):
            pool = json.loads(row["body"])
            for worker in pool["workers"].values():
                worker["price"] = {name: self.chance.randrange(1, 4_000_000) for name in ("input", "output", "cached")}
            pool["workers"]["gamma"] |= {"priced": False, "price": {"input": 0, "output": 0, "cached": 0}}
            self.database.execute(
                "UPDATE catalogs SET body = ? WHERE digest = ?", (json.dumps(pool).encode(), row["digest"])
            )
        recorded = self.rows("SELECT * FROM runs ORDER BY created_at")
        return [
            copied_row
            for number in range(COPIES)
            for row in recorded[number % 2 :]
            for copied_row in self.copy(row, number)
        ]

    def copy(self, row: dict[str, Any], number: int) -> list[dict[str, Any]]:
        run, name = row["id"], f"{row['id']}c{number}"
        shift = time.time() - self.chance.random() * 5 * WEEK_SECONDS - row["created_at"]
        ended_at = row["ended_at"] and row["ended_at"] + shift
        tenant, key = self.chance.choice(["acme", "=umbrella"]), self.chance.choice(["k1", "k2", "k3"])
        changes = {"tenant": tenant, "key": key, "created_at": row["created_at"] + shift, "ended_at": ended_at}
        self.insert("runs", row | {"id": name} | changes)
        task = ""
        for event in self.rows("SELECT * FROM events WHERE run = ?", run):
            task = task or json.loads(event["body"])["task"]
            body = self.billed(event["kind"], json.loads(event["body"]))
            self.insert("events", event | {"run": name, "at": event["at"] + shift, "body": orjson.dumps(body)})
        for content in self.rows("SELECT * FROM contents WHERE run = ?", run):
            body = self.add_user(name, content["body"]) if content["ref"] == task else content["body"]
            self.insert("contents", content | {"run": name, "body": body})
        for content in self.rows("SELECT * FROM shared_contents WHERE run = ?", run):
            self.insert("shared_contents", content | {"run": name})
        return [self.rating(name, tenant) for _ in range(self.chance.choice([0, 0, 1, 2, 4])) if ended_at]

    def billed(self, kind: str, body: dict[str, Any]) -> dict[str, Any]:
        if kind == "call.intended" and body["n"] is not None and self.chance.random() < 0.3:
            return body | {"access": [place for place in body["access"] if self.chance.random() < 0.6]}
        if kind == "run.admitted" and self.chance.random() < 0.1:
            return body | {"pool": ["gamma"]}  # whose price is not known
        if kind != "call.finished":
            return body
        if self.chance.random() < 0.2:
            body |= {"outcome": "error", "error": "worker_timeout", "reason": self.chance.choice(["slow", "silent"])}
        input_tokens, output_tokens = self.chance.randrange(5_000), self.chance.randrange(2_000)
        usage = {
            "input": input_tokens,
            "cached": input_tokens // self.chance.randrange(1, 5),
            "output": output_tokens,
            "reasoning": output_tokens // 3,
        }
        return body | {"usage": usage | {"estimated": False}, "usd": self.chance.randrange(100) ** 3}

    def add_user(self, run: str, body: bytes) -> bytes:
        """A task with an end user and metadata, and their tags."""
        task = json.loads(body)
        user, identifier = self.chance.choice([None, "ann", "bob"]), self.chance.choice([None, None, "ann", "hash"])
        team = self.chance.choice([{}, {"team": "search"}, {"team": "a=b", "other": "search"}])
        tags = {("user", name) for name in (user, identifier) if name} | {
            ("metadata", f"{k}={v}") for k, v in team.items()
        }
        for name, value in tags:
            self.insert("tags", {"name": name, "value": value, "run": run})
        user_fields = {"user": user, "metadata": team, "echoed": {"safety_identifier": identifier}}
        return json.dumps(task | user_fields).encode()

    def rating(self, run: str, tenant: str) -> dict[str, Any]:
        kind, number = self.chance.choice(["explicit", "grader", "implicit"]), self.chance.random()
        score = None if kind == "implicit" or number < 0.1 else round(number, 2)
        source = {"explicit": "user", "grader": "numeric", "implicit": "regenerated"}[kind]
        row = {"id": f"fb_{self.chance.random()}", "run": run, "tenant": tenant, "key": "k1", "at": number}
        row |= {"kind": kind, "source": self.chance.choice([source, f"{source} 2"]), "version": "1", "score": score}
        self.insert("feedback", row | {"label": "seen", "comment": ""})
        return row

    def rows(self, query: str, *values: Any) -> list[dict[str, Any]]:
        return [dict(row) for row in self.database.execute(query, values)]

    def insert(self, table: str, row: Mapping[str, Any]) -> None:
        columns, places = ", ".join(f'"{name}"' for name in row), ", ".join("?" * len(row))
        self.database.execute(f"INSERT INTO {table} ({columns}) VALUES ({places})", list(row.values()))


def run_report(seeded: SeededDatabase, capsys: pytest.CaptureFixture[str], *arguments: str, status: int = 0) -> str:
    capsys.readouterr()
    by = [part for name in BY for part in ("--by", name)]
    words = ["report", "--since", "520w", *by, *arguments]
    assert main(words, seeded.environ) == status
    return capsys.readouterr().out


def without(figures: Mapping[str, Any], *names: str) -> dict[str, Any]:
    return {name: value for name, value in figures.items() if name not in names}


PARTS: tuple[reports.Part, ...] = ("summary", "groups", "dearest", "failures")
SHAPE = ("level", "cause", "reason", "topology", "position", "worker")


@pytest.mark.parametrize(
    ("success", "threshold", "zone"),
    [("feedback", 0.6, "UTC"), ("graders", 0.5, "Asia/Kolkata"), ("signals", 0.5, "America/Los_Angeles")],
)
@pytest.mark.long
def test_every_figure_is_the_one_that_the_export_gives(
    seeded: SeededDatabase, capsys: pytest.CaptureFixture[str], success: str, threshold: float, zone: str
) -> None:
    arguments = ("--success", success, "--threshold", str(threshold), "--zone", zone, "--json")
    figures = json.loads(run_report(seeded, capsys, *arguments))
    options = json.dumps({"by": BY, "success": success, "threshold": threshold, "zone": zone})
    command = [sys.executable, str(SCRIPT), str(seeded.export), str(seeded.ratings), options]
    again = json.loads(subprocess.run(command, check=True, capture_output=True, timeout=100).stdout)
    assert figures["total"]["runs"] > 190
    assert figures["total"]["runs"] % 5, "one fifth of them is no whole number"
    for part in ("total", "left_out", "sources"):
        assert figures[part] == again[part]
    for part in ("access_lists", "cheapest"):
        assert without(figures[part], "method") == again[part]
    groups = {(group["by"], group["group"]): group for group in again["groups"]}
    assert {(group["by"], group["group"]): group for group in figures["groups"]} == groups
    assert {by for by, _ in groups} == set(BY)
    assert without(figures["dearest"], "features") == without(again["dearest"], "features")
    features = sorted(
        again["dearest"]["features"], key=lambda entry: (-entry["lift"], -entry["runs"], *list(entry.values())[:2])
    )
    assert figures["dearest"]["features"] == features
    failures = {tuple(entry["shape"]): without(entry, "shape") for entry in again["failures"]}
    clusters = {}
    for failure in figures["failures"]:
        clusters[tuple(failure[name] for name in SHAPE)] = without(failure, *SHAPE)
    assert clusters == failures
    assert {figure["level"] for figure in figures["failures"]} == {"call", "plan", "step", "run"}
    assert len(SCRIPT.read_text().splitlines()) <= 100


def as_cell(value: object) -> str:
    """The text of a value in a CSV file, where nothing may be taken for a formula."""
    if value is None:
        return ""
    text = str(value)
    return f"'{text}" if text.startswith("=") else text


def test_every_grouping_is_recomputed_and_told(capsys: pytest.CaptureFixture[str]) -> None:
    """A new one belongs into `BY` and the script, into the help of the command, and into its page."""
    assert set(BY) == {*GROUPINGS, "metadata.team"}
    with pytest.raises(SystemExit):
        main(["report", "--help"])
    words, page = re.findall(r"\w+", capsys.readouterr().out), (ROOT / "deploy/docs/reports.md").read_text()
    assert set(GROUPINGS) <= set(words)
    assert [name for name in GROUPINGS if f"`{name}`" not in page] == []


@pytest.mark.parametrize("sign", ["=", "+", "-", "@", "\t", "\r", "\n", "\uff1d", "\uff0b", "\uff0d", "\uff20"])
def test_no_text_of_a_caller_is_a_formula_to_a_spreadsheet(sign: str) -> None:
    assert reports.csv_cell(f"{sign}1+1") == f"'{sign}1+1"


@pytest.mark.long
def test_a_table_is_the_same_as_csv_and_as_parquet(
    seeded: SeededDatabase, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    import duckdb  # here: its import takes a tenth of a second, and most runs of pytest have no use for it

    figures = json.loads(run_report(seeded, capsys, "--json"))
    file = tmp_path / "table.parquet"
    run_report(seeded, capsys, "--part", "dearest", "--parquet", str(file))
    assert file.read_bytes().startswith(b"PAR1")
    for part in PARTS:
        table = reports.table(figures, part)
        rows = list(csv.DictReader(io.StringIO(reports.as_csv(table, part))))
        file.write_bytes(reports.as_parquet(table, part))
        with duckdb.connect(":memory:") as database:
            exported_table = database.execute(f"SELECT * FROM '{file}'").fetchall()
        assert len(rows) == len(exported_table) > 3
        guarded = []
        for row in exported_table:
            guarded.append([as_cell(value) for value in row])
        assert [list(row.values()) for row in rows] == guarded
        assert any("'=umbrella" in row.values() for row in rows) == (part == "groups")


@pytest.mark.long
def test_the_report_is_readable(seeded: SeededDatabase, capsys: pytest.CaptureFixture[str]) -> None:
    text = run_report(seeded, capsys, "--success", "signals")
    assert re.search(r"^Runs admitted from \d{4}-\d\d-\d\d \d\d:\d\d UTC to .* that have ended", text)
    for words in ("Cost of a successful query", "asked the same again", "The most expensive 20%", "Access lists"):
        assert words in text
    assert "Failures" in text
    assert "worker_refused" in text
    parts = re.findall(r"^\.\.\. and \d+ more: .*--csv --part (\w+)$", text, re.MULTILINE)
    assert "failures" in parts, "the part that --csv needs is named"
    assert run_report(seeded, capsys, "--part", "failures", "--csv").startswith("level,cause,reason,")
    empty = run_report(seeded, capsys, "--tier", "nobody's")
    assert "that have ended: 0." in empty
    for wrong in (("--by", "colour"), ("--zone", "Mars/Base"), ("--csv", "--json"), ("--metadata", "team")):
        run_report(seeded, capsys, *wrong, status=2)
