"""The auditor tells runs that were pruned from runs that were lost, and compares with an earlier export."""

import asyncio
import sqlite3
from collections.abc import Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest

from app.__main__ import main
from app.audit import missing_runs
from app.cli.terminal import count
from app.core.run import journal_hash
from app.engine.retention import Pruner, PruneResult, archiving
from app.store.archive import StoredEvent, open_archive
from app.store.protocol import PruneQuery
from app.store.sql import open_store
from tests.audit.scenes import Journal
from tests.harness.sealing import seal_all

CLEAN, VIOLATIONS, UNREADABLE = 0, 1, 2
EVERYTHING = PruneQuery(ended_before=1e12, deadline_before=1e12)


@dataclass
class Desk:
    """A copy of the journal, an export of it, and the command."""

    folder: Path
    capsys: pytest.CaptureFixture[str]

    @property
    def url(self) -> str:
        return f"sqlite:///{self.folder}/baton.db"

    @property
    def export(self) -> str:
        return f"{self.folder}/export.jsonl"

    def check(self, *arguments: str) -> tuple[int, str]:
        """Exit status and output of `baton audit check`."""
        return self.run("check", *arguments)

    def run(self, *arguments: str) -> tuple[int, str]:
        status = main(["audit", *arguments], {"BATON_DATABASE_URL": self.url})
        captured = self.capsys.readouterr()
        return status, captured.out + captured.err

    def falsify(self, statement: str, *values: object) -> None:
        with closing(sqlite3.connect(self.folder / "baton.db")) as database, database:
            assert database.execute(statement, values).rowcount > 0

    def prune(self, archive: str = "") -> PruneResult:
        """Prune every run that has ended."""
        return asyncio.run(self._prune(archive))

    async def _prune(self, archive: str) -> PruneResult:
        async def rest() -> bool:
            return True

        archiving_to = archiving(archive, None, contents=False)
        async with open_store(self.url) as store, open_archive(self.url) as journals:
            await seal_all(store)
            return await Pruner(store, journals, archiving_to, now=lambda: 1.0, name=str, pause=rest).prune(EVERYTHING)


@pytest.fixture
def desk(journal: Journal, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Desk:
    with closing(sqlite3.connect(journal.folder / "baton.db")) as original, original:
        original.execute("VACUUM INTO ?", (f"{tmp_path}/baton.db",))
    original.close()
    new_desk = Desk(tmp_path, capsys)
    assert new_desk.run("export", new_desk.export)[0] == CLEAN
    return new_desk


def some_run(journal: Journal) -> str:
    return str(journal.runs["single"].row["id"])


@pytest.mark.long
def test_pruned_runs_are_counted_and_no_violation(desk: Desk, journal: Journal) -> None:
    result = desk.prune(f"{desk.folder}/archive")
    assert result.runs > 0
    words = f"{count(result.runs, 'run')} pruned"
    for arguments in ((), ("--against", desk.export), ("--against", result.files[0])):
        status, output = desk.check(*arguments)
        assert status == CLEAN, output
        assert words in output
    assert desk.check("--run", some_run(journal)) == (CLEAN, desk.check("--run", some_run(journal))[1])
    again = f"{desk.folder}/later.jsonl"
    assert desk.run("export", again)[0] == CLEAN
    assert words in desk.check(again, "--against", desk.export)[1]


@pytest.mark.long
def test_a_run_whose_row_alone_is_gone_is_lost(desk: Desk, journal: Journal) -> None:
    desk.falsify("DELETE FROM runs WHERE id = ?", some_run(journal))
    status, output = desk.check()
    assert status == VIOLATIONS
    assert f"{some_run(journal)} seq 0 run-lost" in output


@pytest.mark.long
def test_a_run_that_is_gone_altogether_is_missed_against_an_earlier_export(desk: Desk, journal: Journal) -> None:
    run = some_run(journal)
    desk.falsify("DELETE FROM runs WHERE id = ?", run)
    for table in ("events", "contents"):
        desk.falsify(f"DELETE FROM {table} WHERE run = ?", run)
    assert desk.check("--run", run)[0] == UNREADABLE
    status, output = desk.check("--against", desk.export)
    assert status == VIOLATIONS
    assert output.count("run-lost (") == 1
    assert f"{run} seq 0 run-lost" in output


def test_an_export_of_a_part_lacks_nothing_of_an_earlier_one_of_everything(desk: Desk, journal: Journal) -> None:
    part = f"{desk.folder}/part.jsonl"
    assert desk.run("export", part, "--run", some_run(journal))[0] == CLEAN
    status, output = desk.check(part, "--against", desk.export)
    assert status == CLEAN, output
    assert "(not in the file, which does not say that it has every run: " in output


@pytest.mark.parametrize(
    ("statement", "rule"),
    [
        ("UPDATE pruned_runs SET root = x'00' WHERE id = ?", "journal-rewritten"),
        ("DELETE FROM pruned_runs WHERE id = ?", "run-lost"),
        ("INSERT INTO events (run, seq, kind, at, body) VALUES (?, 1, 'run.admitted', 1, '{}')", "pruned-left"),
    ],
)
@pytest.mark.long
def test_what_is_left_of_a_pruned_run_cannot_be_changed(
    desk: Desk, journal: Journal, statement: str, rule: str
) -> None:
    desk.prune()
    desk.falsify(statement, some_run(journal))
    status, output = desk.check("--against", desk.export)
    assert status == VIOLATIONS
    assert f"{some_run(journal)} seq 0 {rule}" in output


@pytest.mark.long
def test_a_run_that_was_rewritten_consistently_differs_from_the_export(desk: Desk, journal: Journal) -> None:
    desk.falsify("UPDATE events SET at = at + 0.001 WHERE run = ? AND seq = 2", some_run(journal))
    assert "journal-rewritten" not in desk.check()[1]
    assert f"{some_run(journal)} seq 0 journal-rewritten" in desk.check("--against", desk.export)[1]


@pytest.mark.parametrize("count", [0, 1, 2, 3, 6, 7, 8, 13])
def test_the_auditor_computes_the_hash_that_was_stored(count: int) -> None:
    events: Sequence[StoredEvent] = [StoredEvent(seq, "kind", seq / 3, b"%d" % seq) for seq in range(1, count + 1)]
    stored = journal_hash.root("run", [(event.seq, event.kind, event.at, event.body) for event in events])
    assert missing_runs.merkle_root("run", events) == stored
