"""`baton audit` as an auditor uses it: what it says, how it exits, and that the executor is not even loaded."""

import contextlib
import json
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from app.__main__ import main
from app.audit.report import RULES
from tests.audit.scenes import RUNS, Journal

ROOT = Path(__file__).resolve().parents[2]


@dataclass
class Desk:
    """A database of one's own to audit, and the command."""

    folder: Path
    out: Callable[[], tuple[str, str]]

    def __call__(self, *arguments: str) -> tuple[int, str, str]:
        """Exit status, standard output and standard error of `baton audit ...`."""
        environ = {"BATON_DATABASE_URL": f"sqlite:///{self.folder}/baton.db"}
        status = main(["audit", *arguments], environ)
        return (status, *self.out())

    def falsify(self, statement: str, *values: Any) -> None:
        """Change the database behind everybody's back."""
        with closing(sqlite3.connect(self.folder / "baton.db")) as database, database:
            assert database.execute(statement, values).rowcount > 0


@pytest.fixture
def desk(journal: Journal, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Desk:
    with closing(sqlite3.connect(journal.folder / "baton.db")) as original, original:
        original.execute("VACUUM INTO ?", (f"{tmp_path}/baton.db",))
    original.close()

    def read() -> tuple[str, str]:
        captured = capsys.readouterr()
        return captured.out, captured.err

    return Desk(tmp_path, read)


@contextlib.contextmanager
def reader_left() -> Iterator[None]:
    """Standard output is a pipe that nobody reads any more, as after `| head -1`."""
    reading, writing = os.pipe()
    os.close(reading)
    with os.fdopen(writing, "w") as unread, contextlib.redirect_stdout(unread):
        yield


@pytest.mark.long
def test_the_exit_status_tells_the_verdict_though_nobody_reads_the_report(desk: Desk, journal: Journal) -> None:
    for options in ((), ("--json",)):
        with reader_left():
            assert desk("check", *options)[0] == 0
    desk.falsify("UPDATE runs SET spent_usd = spent_usd - 1 WHERE id = ?", journal.runs["conducted"].row["id"])
    for options in ((), ("--json",)):
        with reader_left():
            assert desk("check", *options)[0] == 1


@pytest.mark.long
def test_output_that_cannot_be_written_is_no_violation(desk: Desk) -> None:
    for options in (("check",), ("check", "--json"), ("rules",)):
        with open("/dev/full", "w") as full, contextlib.redirect_stdout(full):
            status, _, err = desk(*options)
        assert (status, "The output cannot be written: No space left on device." in err) == (2, True)


@pytest.mark.long
def test_a_clean_journal(desk: Desk) -> None:
    status, out, _ = desk("check")
    assert status == 0
    assert f"{RUNS} runs" in out
    assert "0 violations" in out


@pytest.mark.long
def test_a_falsified_journal(desk: Desk, journal: Journal) -> None:
    run = journal.runs["conducted"].row["id"]
    desk.falsify("UPDATE runs SET spent_usd = spent_usd - 1 WHERE id = ?", run)
    desk.falsify("DELETE FROM events WHERE run = ? AND seq = 9", run)
    status, out, _ = desk("check")
    assert status == 1
    assert f"{run} seq 10 seq-gap: event 10 follows event 8" in out
    assert "1 x row-ledger (N-7)" in out
    status, out, _ = desk("check", "--json", "--run", run)
    report = json.loads(out)
    assert (status, report["clean"], report["runs"]) == (1, False, 1)
    assert (
        {violation["rule"] for violation in report["violations"]} == set(report["rules"]) >= {"seq-gap", "row-ledger"}
    )
    assert {
        (violation["run"], type(violation["seq"]), type(violation["what"])) for violation in report["violations"]
    } == {(run, int, str)}
    assert desk("check", "--run", journal.runs["single"].row["id"])[0] == 0


@pytest.mark.long
def test_an_export_is_audited_like_the_database(desk: Desk, journal: Journal, tmp_path: Path) -> None:
    path = str(tmp_path / "journal.jsonl")
    assert desk("export", path)[0] == 0
    fresh = json.loads(desk("check", "--json")[1])
    (desk.folder / "baton.db").unlink()
    status, out, _ = desk("check", path, "--json")
    assert (status, json.loads(out)) == (0, fresh)
    lines = Path(path).read_text().splitlines(keepends=True)
    place = next(n for n, line in enumerate(lines) if '"kind":"call.finished"' in line)
    Path(path).write_text("".join([*lines[:place], *lines[place + 1 :]]))
    status, out, _ = desk("check", path)
    assert status == 1
    assert "seq-gap" in out


@pytest.mark.long
def test_an_export_says_which_version_of_a_conductor_was_in_force(desk: Desk, journal: Journal, tmp_path: Path) -> None:
    """Off line, from the file alone; one of the version before this did not say, and is not held against anybody."""
    run, path = journal.runs["versioned"].row["id"], tmp_path / "journal.jsonl"
    desk.falsify("UPDATE conductor_changes SET at = at - 60")
    assert desk("export", str(path))[0] == 0
    (desk.folder / "baton.db").unlink()
    status, out, _ = desk("check", str(path))
    assert status == 1
    assert f"{run} seq 3 version-not-in-force: " in out
    assert "asks version planner@1" in out
    assert "1 violation" in out
    lines = [line for line in path.read_text().splitlines() if not line.startswith('{"change":')]
    path.write_text("\n".join([lines[0].replace('"version":3', '"version":1'), *lines[1:]]))
    status, out, _ = desk("check", str(path))
    assert status == 0
    assert "1 unverifiable (no changes of versions in the export: 1)" in out


@pytest.mark.long
def test_erased_content_is_told_and_no_violation(desk: Desk, journal: Journal) -> None:
    run = journal.runs["conducted"].row["id"]
    desk.falsify("UPDATE runs SET salt = NULL WHERE id = ?", run)
    desk.falsify("DELETE FROM contents WHERE run = ?", run)
    status, out, _ = desk("check")
    assert status == 0
    assert "5 unverifiable (erased: 4, plan: erased: 1)" in out


@pytest.mark.long
def test_only_newer_runs(desk: Desk, journal: Journal) -> None:
    desk.falsify("UPDATE runs SET created_at = created_at - 7200")
    assert "0 runs" in desk("check", "--since", "1h")[1]
    assert f"{RUNS} runs" in desk("check", "--since", "3h")[1]


@pytest.mark.parametrize(
    "arguments", [("check", "absent.jsonl"), ("check", "--run", "run_0"), ("export", "absent/journal.jsonl")]
)
def test_what_cannot_be_read_exits_with_2(desk: Desk, arguments: tuple[str, ...]) -> None:
    status, out, err = desk(*arguments)
    assert (status, out) == (2, "")
    assert err


def test_no_database_exits_with_2(desk: Desk) -> None:
    (desk.folder / "baton.db").unlink()
    for arguments in (("check",), ("export", str(desk.folder / "journal.jsonl"))):
        status, _, err = desk(*arguments)
        assert status == 2
        assert "There is no database sqlite:" in err


def test_the_rules_are_listed(desk: Desk) -> None:
    status, out, _ = desk("rules")
    assert status == 0
    assert all(name in out for name in RULES)


@pytest.mark.long
def test_the_executor_is_not_loaded(desk: Desk, tmp_path: Path) -> None:
    """A module that is not loaded cannot have been used."""
    shutil.copytree(ROOT / "app", tmp_path / "app", ignore=shutil.ignore_patterns("__pycache__"))
    for name in ("progress", "state", "caller_view", "visibility"):
        (tmp_path / "app" / "core" / "run" / f"{name}.py").unlink()
    (tmp_path / "app" / "core" / "pool" / "policy.py").unlink()
    (tmp_path / "app" / "process" / "wiring.py").unlink()
    shutil.rmtree(tmp_path / "app" / "engine")
    shutil.rmtree(tmp_path / "app" / "gateway")
    process = subprocess.run(
        [sys.executable, "-P", "-c", "import sys; from app.__main__ import main; sys.exit(main(['audit', 'check']))"],
        cwd=tmp_path,
        env={"PYTHONPATH": str(tmp_path), "BATON_DATABASE_URL": f"sqlite:///{tmp_path}/baton.db"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert (process.returncode, process.stderr) == (0, f"database: sqlite:///{tmp_path}/baton.db\n")
    assert "0 violations" in process.stdout


def test_an_export_replaces_a_file_and_neither_a_link_nor_a_device(desk: Desk) -> None:
    file, link = desk.folder / "export.jsonl", desk.folder / "link.jsonl"
    file.touch()
    link.symlink_to(file)
    planted, elsewhere = desk.folder / "export.jsonl.part", desk.folder / "elsewhere"
    planted.symlink_to(elsewhere)
    assert desk("export", str(link))[0] == 0
    assert not elsewhere.exists()
    assert [path for path in desk.folder.glob("*.part") if path != planted] == []
    assert (link.is_symlink(), file.stat().st_size > 0, file.stat().st_mode & 0o777) == (True, True, 0o600)
    pipe = desk.folder / "pipe"
    os.mkfifo(pipe)
    status, _, err = desk("export", str(pipe))
    assert (status, "it is no file" in err, pipe.is_fifo()) == (2, True, True)


def test_an_export_of_one_run_is_logged_for_its_tenant_and_one_of_no_run_is_refused(
    desk: Desk, journal: Journal
) -> None:
    row, file = journal.runs["single"].row, desk.folder / "one.jsonl"
    assert desk("export", str(file), "--run", "run_0")[:2] == (2, "")
    assert not file.exists()
    assert desk("export", str(file), "--run", row["id"])[0] == 0
    (reading,) = json.loads(desk("reads", "--json", "--tenant", row["tenant"])[1])
    assert (reading["run"], reading["what"]) == (row["id"], "export of 1 run")


def test_a_field_of_a_wrong_type_is_a_violation_and_stops_no_other_rule(desk: Desk, journal: Journal) -> None:
    run = journal.runs["conducted"].row["id"]
    falsified = "CAST(json_set(CAST(body AS TEXT), '$.passed_over', 1) AS BLOB)"
    desk.falsify(f"UPDATE events SET body = {falsified} WHERE run = ? AND kind = 'call.intended'", run)
    desk.falsify("UPDATE runs SET spent_usd = spent_usd - 1 WHERE id = ?", run)
    status, out, err = desk("check")
    assert (status, "Traceback" in err) == (1, False)
    assert f"{run} seq 0 body-malformed: a field is of a wrong type, so check_requests could not go on" in out
    assert f"{RUNS} runs" in out
    assert "row-ledger" in out


def test_a_number_of_steps_that_no_run_has_is_a_violation_and_fills_no_memory(desk: Desk, journal: Journal) -> None:
    run = journal.runs["nested"].row["id"]
    falsified = "CAST(json_set(CAST(body AS TEXT), '$.room', 200000) AS BLOB)"
    desk.falsify(f"UPDATE events SET body = {falsified} WHERE run = ? AND kind = 'plan.opened'", run)
    assert "body-malformed: plan.opened: room" in desk("check")[1]
