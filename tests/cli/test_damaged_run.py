"""Commands over many runs, one of which cannot be read: it is named or counted, and the others have their turn."""

import asyncio
import json
from collections.abc import Awaitable, Callable
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from app.__main__ import main
from app.core.run.kinds import TERMINAL
from tests.gateway.test_damaged_data import change
from tests.harness.in_process import ask, client_of, plan, pool_text, running_service
from tests.stubs import ProviderStub

pytestmark = pytest.mark.long
Command = Callable[..., Awaitable[tuple[int, Any]]]
PLAN = plan(("alpha", "Answer.", ["user"]))


@pytest.fixture
async def runs(stub: ProviderStub, tmp_path: Path) -> tuple[str, str, str, str]:
    """Two runs that have ended and two that wait for an approval; the first of either cannot be read."""
    async with running_service(tmp_path, pool_text(stub), audits=False) as runtime, client_of(runtime) as client:
        replies = [await ask(client, baton={"plan": PLAN}) for _ in range(2)]
        replies += [await ask(client, baton={"plan": PLAN, "approval": "required"}) for _ in range(2)]
    damaged, whole, damaged_open, whole_open = [reply.json()["baton"]["run"] for reply in replies]
    change(tmp_path, f"UPDATE events SET body = 'no json' WHERE run IN ('{damaged}', '{damaged_open}') AND seq = 3")
    return damaged, whole, damaged_open, whole_open


@pytest.fixture
async def baton(tmp_path: Path) -> Command:
    async def run_command(*arguments: str) -> tuple[int, Any]:
        environ = {"BATON_DATA_DIR": str(tmp_path), "BATON_POOL": str(tmp_path / "pool.toml")}
        with redirect_stdout(StringIO()) as output:
            status = await asyncio.to_thread(main, [*arguments, "--json"], environ)
        return status, json.loads(output.getvalue())

    return run_command


async def test_the_other_runs_are_rated(baton: Command, runs: tuple[str, ...]) -> None:
    status, ratings = await baton("grade", "--grader", '{"kind": "exact", "expected": "6"}')
    assert (status, [rating["run"] for rating in ratings]) == (0, [runs[1]])


async def test_the_other_runs_are_exported_for_training(baton: Command, runs: tuple[str, ...], tmp_path: Path) -> None:
    status, summary = await baton("rollouts", str(tmp_path / "rollouts.jsonl"), "--everybody")
    assert (status, summary["rollouts"]) == (0, 1)
    assert summary["left_out"]["its journal cannot be read"] == 2


async def test_the_other_runs_are_replayed(baton: Command, runs: tuple[str, ...]) -> None:
    status, replays = await baton("replay", "--since", "1h", "--max-usd", "1")
    refusals = {pair["run"]: pair["refused"] for pair in replays["pairs"]}
    assert (status, refusals[runs[1]]) == (1, None)
    assert f"The event 3 of the run {runs[0]} cannot be read" in refusals[runs[0]]


async def test_the_other_runs_get_rows_of_the_ledger_of_disclosures(
    baton: Command, runs: tuple[str, ...], tmp_path: Path
) -> None:
    change(tmp_path, "DELETE FROM disclosures")
    assert await baton("disclosures", "rebuild") == (1, {"runs": 4, "rows": 1, "damaged": [runs[0]]})
    status, row = await baton("disclosures")
    assert (status, row["run"]) == (0, runs[1])


async def test_the_other_plans_that_wait_are_listed(
    baton: Command, runs: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    status, approvals = await baton("approvals", "ls")
    assert (status, [approval["run"] for approval in approvals]) == (0, [runs[3]])
    assert f"A plan is left out: The event 3 of the run {runs[2]} cannot be read" in capsys.readouterr().err


async def test_the_other_open_runs_of_a_restored_database_are_ended(baton: Command, runs: tuple[str, ...]) -> None:
    for options in (["--dry-run"], []):
        status, restored = await baton("restored", *options)
        assert status == 0
        assert restored["unreadable"] == [runs[2]]
        assert [run["run"] for run in restored["open"]] == [runs[3]]
    _, shown = await baton("runs", "ls")
    states = {run["id"]: run["state"] for run in shown}
    assert states[runs[3]] == "failed"
    assert states[runs[2]] not in TERMINAL.values()
