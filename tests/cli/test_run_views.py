"""`baton runs show --view` and `baton runs watch --view`: the drawings of a run at 80 columns and without colour."""

import asyncio
import json
import sqlite3
from contextlib import closing, redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from app.__main__ import main
from app.cli.runs import run_views
from tests.harness.in_process import ask, client_of, plan, pool_text, running_service
from tests.harness.processes import environment
from tests.stubs import ProviderStub

STEPS = plan(("alpha", "Think", ["user"]), ("beta", "Answer", [0]))


def baton(folder: Path, *arguments: str) -> str:
    """The output of one command."""
    with redirect_stdout(StringIO()) as out:
        assert main(arguments, environment(folder, BATON_DATA_DIR=str(folder))) == 0
    return out.getvalue()


@pytest.fixture
async def folder(tmp_path: Path, stub: ProviderStub, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The data folder of a service that has carried out one run of two steps; terminals are 80 columns wide."""
    monkeypatch.setenv("COLUMNS", "80")
    async with running_service(tmp_path, pool_text(stub)) as runtime, client_of(runtime) as client:
        assert (await ask(client, baton={"plan": STEPS})).status_code == 200
    return tmp_path


async def test_a_graph_says_what_was_granted_and_what_was_withheld(folder: Path) -> None:
    words = await asyncio.to_thread(baton, folder, "runs", "show", "--view", "graph")
    graph = json.loads(await asyncio.to_thread(baton, folder, "runs", "show", "--view", "graph", "--json"))
    lines = words.splitlines()
    beta = next(n for n, line in enumerate(lines) if "step 1" in line and "beta" in line)
    behind = " ".join(lines[beta : beta + 4])
    assert "<== step 0: the output" in behind
    assert "x.. caller: the conversation withheld" in behind
    assert "not on the access list" in behind
    assert words.count("<==") + words.count("x..") == len(graph["edges"])
    assert "\x1b" not in words


async def test_a_timeline_fits_80_columns_by_time_and_by_money(folder: Path) -> None:
    by_time = await asyncio.to_thread(baton, folder, "runs", "show", "--view", "timeline")
    by_money = await asyncio.to_thread(baton, folder, "runs", "show", "--view", "timeline", "--by", "money")
    for words in (by_time, by_money):
        bars = words.splitlines()[1:]
        assert max(len(line) for line in bars) <= 80
        assert any(line.strip().startswith("step 1") for line in bars)
    assert "- waits for the first word" in by_time
    assert "$" in by_money.splitlines()[1]


async def test_the_state_at_an_event_knows_nothing_of_what_came_later(folder: Path) -> None:
    early = json.loads(await asyncio.to_thread(baton, folder, "runs", "show", "--view", "state", "--at", "1", "--json"))
    assert (early["seq"], early["state"], early["steps"]) == (1, "admitted", [])
    words = await asyncio.to_thread(baton, folder, "runs", "show", "--view", "state", "--at", "1")
    assert "admitted" in words
    assert f"at event 1 of {early['last_seq']}" in words
    whole = await asyncio.to_thread(baton, folder, "runs", "show", "--view", "state")
    assert "step 1  beta  done" in whole


async def test_an_event_that_there_is_not_is_refused(folder: Path) -> None:
    def code(*words: str) -> int:
        return main(["runs", "show", *words], environment(folder, BATON_DATA_DIR=str(folder)))

    assert await asyncio.to_thread(code, "--view", "state", "--at", "999") != 0
    assert await asyncio.to_thread(code, "--at", "1") != 0


async def test_watching_a_view_prints_the_last_drawing_where_there_is_no_terminal(folder: Path) -> None:
    words = await asyncio.to_thread(baton, folder, "runs", "watch", "--view", "state")
    assert "succeeded" in words
    assert words.count("latest event") == 1


def test_what_a_call_did_not_contain_is_not_announced_of_a_run_that_has_ended() -> None:
    node = {"state": "skipped", "worker": None, "planned_worker": "ada", "y": 0, "error": "input_lost", "attempts": []}
    node |= {"replaced": False, "answers": False}
    nodes = [{**node, "id": "caller", "kind": "caller", "x": 0}, {**node, "id": "step:0", "kind": "step", "x": 1}]
    edge = {"source": "caller", "target": "step:0", "kind": "granted", "what": "conversation", "sent": False}
    instant = {"run": "run", "state": "failed", "seq": 9, "last_seq": 9, "length_seconds": 1.0}
    lines = [line.plain for line in run_views.graph(instant | {"nodes": nodes, "edges": [edge]})]
    assert lines[-1].endswith("<== caller: the conversation (not sent)")


def test_a_short_span_still_has_a_mark() -> None:
    bar = run_views._bar([(0.0, 0.0001, "-", ""), (0.0001, 9.9, "=", "")], 10.0, 20)
    assert bar.plain == "-" + "=" * 19


@pytest.mark.long
@pytest.mark.parametrize("change", ["body = '{}'", "body = 'no json'", "kind = 'plan.dreamt'"])
async def test_an_altered_event_is_named_in_place_of_a_traceback(folder: Path, change: str) -> None:
    with closing(sqlite3.connect(folder / "baton.db")) as database, database:
        ((run, seq),) = database.execute("SELECT run, seq FROM events WHERE kind = 'plan.opened'")
        database.execute(f"UPDATE events SET {change} WHERE kind = 'plan.opened'")
    commands = ["runs show", "runs show --view graph", "runs explain", "runs watch"]
    for command in commands:
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as said:
            environ = environment(folder, BATON_DATA_DIR=str(folder))
            assert await asyncio.to_thread(main, command.split(), environ) == 1, command
        assert said.getvalue().splitlines()[-1].startswith(f"baton: The event {seq} of the run {run} cannot be read: ")


@pytest.mark.long
async def test_a_report_leaves_out_a_run_with_an_altered_event(folder: Path) -> None:
    with closing(sqlite3.connect(folder / "baton.db")) as database, database:
        database.execute("UPDATE events SET body = '{}' WHERE kind = 'plan.opened'")
    with redirect_stdout(StringIO()) as said:
        assert await asyncio.to_thread(main, ["report"], environment(folder, BATON_DATA_DIR=str(folder))) == 0
    assert "Left out, too: 1 run whose journal cannot be read" in said.getvalue()
