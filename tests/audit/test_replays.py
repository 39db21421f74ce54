"""The auditor compares what a replay has taken over with the run that it repeats."""

import sqlite3
from pathlib import Path

import orjson
import pytest

from app.__main__ import main
from tests.audit.scenes import Journal


@pytest.fixture
def copy(journal: Journal, tmp_path: Path) -> Path:
    """A copy of the journal's database."""
    path = tmp_path / "baton.db"
    source, target = sqlite3.connect(journal.folder / "baton.db"), sqlite3.connect(path)
    source.backup(target)
    source.close()
    target.close()
    return path


def rewrite(path: Path, run: str, kind: str = "step.done", **fields: object) -> None:
    """Change the first output that a run has taken over, or the plan of that step."""
    database = sqlite3.connect(path)
    with database:
        where = "FROM events WHERE run = ? AND kind = ? ORDER BY seq LIMIT 1"
        seq, body = database.execute(f"SELECT seq, body {where}", (run, kind)).fetchone()
        body = orjson.dumps(orjson.loads(body) | fields)
        database.execute("UPDATE events SET body = ? WHERE run = ? AND seq = ?", (body, run, seq))
    database.close()


@pytest.mark.parametrize("fields", [{"origin_step": 1}, {"origin_output": "f" * 64}, {"finish": "length"}], ids=str)
@pytest.mark.long
def test_an_output_that_is_not_the_one_that_is_named_is_found(
    journal: Journal, copy: Path, capsys: pytest.CaptureFixture[str], fields: dict[str, object]
) -> None:
    run = str(journal.runs["replayed"].row["id"])
    arguments = ["audit", "check", "--run", run]
    environ = {"BATON_DATABASE_URL": f"sqlite:///{copy}"}
    assert main(arguments, environ) == 0, capsys.readouterr().out
    rewrite(copy, run, **fields)
    assert main(arguments, environ) == 1
    assert "kept-altered" in capsys.readouterr().out


def test_a_stranger_in_the_place_of_the_worker_whose_output_was_kept_is_found(
    journal: Journal, copy: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = str(journal.runs["replayed"].row["id"])
    rewrite(copy, run, "plan.step", worker="stranger")
    assert main(["audit", "check", "--run", run], {"BATON_DATABASE_URL": f"sqlite:///{copy}"}) == 1
    assert "kept-altered" in capsys.readouterr().out


@pytest.mark.parametrize("kind", ["plan.opened", "run.cancel_asked"])
def test_a_malformed_run_of_which_outputs_were_taken_over_ends_nothing_with_a_traceback(
    journal: Journal, copy: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    """Its own faults are found where it is checked itself."""
    replay = journal.runs["replayed"]
    origin = orjson.loads(replay.events[0].body)["origin_run"]
    database = sqlite3.connect(copy)
    with database:
        if kind == "plan.opened":
            change = "UPDATE events SET body = json_set(CAST(body AS TEXT), '$.round', 'x') WHERE run = ? AND kind = ?"
        else:
            change = "INSERT INTO events (run, seq, at, body, kind) VALUES (?, 99, 1, '{\"n\": []}', ?)"
        database.execute(change, (origin, kind))
        database.execute("UPDATE events SET body = CAST(body AS BLOB) WHERE run = ?", (origin,))
    database.close()
    main(["audit", "check", "--run", str(replay.row["id"])], {"BATON_DATABASE_URL": f"sqlite:///{copy}"})
    assert main(["audit", "check", "--run", origin], {"BATON_DATABASE_URL": f"sqlite:///{copy}"}) == 1
    assert "Traceback" not in capsys.readouterr().err
