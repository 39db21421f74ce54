"""`baton calibrate` over the simulated workers of a world and over a stub: what it keeps, what it costs, where it
stops, and what becomes of it."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from app.__main__ import main
from app.cli import event_loop, storage, terminal
from app.cli.arguments import Arguments
from app.cli.commands import parse
from app.cli.learning import calibrate
from app.core.rating.calibration import Trial, rates
from app.core.run.events import Kind
from app.errors import ConfigInvalid
from app.lab.calibration_tasks import VERSION, make_built_in_tasks
from app.process import serve
from app.process.config import configure
from app.process.wiring import Runtime
from app.store.protocol import RunQuery
from tests.deploy.test_readme import blocks
from tests.harness.in_process import await_ended_row, client_of, plan_text, pool_text, running_service
from tests.harness.waiting import until
from tests.lab.test_provider import pool_text as world_text
from tests.stubs import Fail, ProviderStub, Reply

LEARNING = (Path(__file__).resolve().parents[2] / "deploy" / "docs" / "learning.md").read_text()
HERE: Any = {"BATON_PEPPER": "p" * 32, "BATON_LEASE_SECONDS": "2"}

pytestmark = [pytest.mark.long, pytest.mark.usefixtures("embedded_database")]


def at(folder: Path, pool: str) -> dict[str, str]:
    """The environment of a command over this pool."""
    (folder / "pool.toml").write_text(pool)
    return {"BATON_POOL": str(folder / "pool.toml"), "BATON_DATA_DIR": str(folder), **HERE}


def parse_arguments(*arguments: str) -> Arguments:
    return parse(["calibrate", *arguments])


def read_stored_trials(environ: dict[str, str], capsys: pytest.CaptureFixture[str]) -> list[dict[str, Any]]:
    """The trials that are kept."""
    capsys.readouterr()
    assert calibrate.run(parse_arguments("--show", "--json"), environ, lambda: 2e9) == 0
    trials: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return trials


def test_each_worker_gets_each_task_once_and_is_known_for_what_it_can(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = at(tmp_path, world_text())
    two = ("--worker", "birch", "--worker", "delta")
    assert calibrate.run(parse_arguments("--each", "1", *two, "--concurrency", "8"), environ, lambda: 2e9) == 0
    output = capsys.readouterr()
    assert "72 tasks for birch, delta (0 were tried before): likely $" in output.err
    for words in ("birch", "delta", "neighbours", "level 3", "72 trials, $"):
        assert words in output.out
    configuration = configure(environ)
    trials = event_loop.run(calibrate._read_trials(configuration))
    assert {(trial.worker, trial.task) for trial in trials} == {
        (worker, task.name) for worker in ("birch", "delta") for task in make_built_in_tasks(1)
    }
    assert len(trials) == 72
    rates_by_group = rates(trials, lambda trial: f"{trial.worker} {trial.domain}")
    assert rates_by_group["birch numbers"].value > rates_by_group["delta numbers"].value + 0.2
    assert rates_by_group["delta calendar"].value > rates_by_group["birch calendar"].value + 0.2
    event_loop.run(_assert_journaled(configuration, len(trials)))

    assert calibrate.run(parse_arguments("--each", "1", *two), environ, lambda: 3e9) == 0, "nothing is left"
    assert "tasks for" not in capsys.readouterr().err
    assert calibrate.run(parse_arguments("--each", "1", "--worker", "birch", "--again"), environ, lambda: 3e9) == 0
    again = read_stored_trials(environ, capsys)
    assert sum(trial["at"] == 3e9 for trial in again) == 36
    assert len(again) == 72


async def _assert_journaled(configuration: Any, count: int) -> None:
    """Each trial is a run of one call, rated beside what callers say."""
    async with storage.open_configured_store(configuration.settings) as store:
        rows = await store.runs(RunQuery(limit=200))
        assert len(rows) == count
        assert {row.key for row in rows} == {calibrate.KEY}
        trials = {trial.run: trial for trial in await store.trials()}
        for row in rows[:5]:
            [rating] = await store.feedback(row.id)
            assert (rating.kind, rating.source, rating.version) == ("grader", "calibration", VERSION)
            assert rating.score == trials[row.id].score
            assert row.spent.usd == trials[row.id].usd > 0
            [call] = [event for event in (await store.journal(row.id)).events if event.kind is Kind.CALL_INTENDED]
            assert call.body["worker"] == trials[row.id].worker


@pytest.fixture
async def stub() -> AsyncIterator[ProviderStub]:
    async with ProviderStub() as running:
        running.always("alpha", Reply(chunks=("Answer: 46",)))
        yield running


async def run(environ: dict[str, str], *arguments: str) -> int:
    """The command beside this loop."""
    return await asyncio.to_thread(calibrate.run, parse_arguments(*arguments), environ, lambda: 2e9)


async def test_nobody_is_asked_before_the_cost_is_agreed_to(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environ = at(tmp_path, pool_text(stub))
    with pytest.raises(ConfigInvalid, match="--yes"):
        await run(environ, "--worker", "alpha")
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("builtins.input", lambda *_: "n")
    assert await run(environ, "--worker", "alpha") == 1
    assert not stub.requests_for("alpha")


async def test_what_nobody_knows_the_price_of_is_neither_free_nor_within_a_limit(
    stub: ProviderStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    priced = "price = { input = 1.00, output = 2.00, cached = 0.50 }"
    environ = at(tmp_path, pool_text(stub).replace(priced, ""))
    with pytest.raises(ConfigInvalid, match="nobody knows what alpha costs"):
        await run(environ, "--worker", "alpha", "--usd", "1", "--yes")
    with pytest.raises(ConfigInvalid, match="--yes"):
        await run(environ, "--worker", "alpha")
    assert "What alpha costs is not in the pool file" in capsys.readouterr().err
    assert not stub.requests_for("alpha")


async def test_an_outage_is_no_wrong_answer_and_is_tried_again(
    stub: ProviderStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = at(tmp_path, pool_text(stub))
    stub.always("alpha", Fail(status=400))
    assert await run(environ, "--worker", "alpha", "--each", "1", "--concurrency", "1", "--yes") == 1
    output = capsys.readouterr().out
    assert f"alpha: {calibrate.MAX_OUTAGES_IN_A_ROW} calls failed; what failed is no trial" in output
    assert "got no further tasks" in output
    assert len(stub.requests_for("alpha")) == calibrate.MAX_OUTAGES_IN_A_ROW
    assert not await asyncio.to_thread(read_stored_trials, environ, capsys)
    assert not stub.requests_for("beta"), "nobody answers in its place"
    stub.always("alpha", Reply(chunks=("Answer: 46",)))
    assert await run(environ, "--worker", "alpha", "--each", "1", "--yes") == 0
    trials = await asyncio.to_thread(read_stored_trials, environ, capsys)
    assert len(trials) == 36
    stub.always("alpha", Fail(status=400))
    arguments = ("--worker", "alpha", "--each", "1", "--concurrency", "1", "--yes")
    assert await run(environ, *arguments, "--again") == 1, "earlier trials do not stand for calls that failed"
    assert await run(environ, *arguments) == 0
    right = [task.name for task in make_built_in_tasks(1) if task.grader.grade("46").score]
    assert [trial["task"] for trial in trials if trial["score"]] == right


async def test_a_run_that_waits_for_an_approval_is_no_wrong_answer(
    stub: ProviderStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rule = '[tiers.baton-mini]\napproval = { workers = ["alpha"] }\n'
    environ = at(tmp_path, pool_text(stub).replace("[tiers.baton-mini]\n", rule))
    assert await run(environ, "--worker", "alpha", "--each", "1", "--concurrency", "1", "--yes") == 1
    output = " ".join(capsys.readouterr().out.split())
    assert not await asyncio.to_thread(read_stored_trials, environ, capsys)
    assert not stub.requests_for("alpha")
    assert "alpha: 5 runs waited for an approval; they are no trials, and were cancelled." in output
    assert "alpha: 5 of them in a row, so it got no further tasks." in output
    async with running_service(tmp_path, (tmp_path / "pool.toml").read_text()) as runtime:
        rows = await runtime.context.store.runs(RunQuery())
        ended = [await await_ended_row(runtime.context.store, row.id) for row in rows]
    assert [row.state for row in ended] == ["cancelled"] * 5, "nobody is asked to decide on them"


async def test_workers_are_measured_by_the_tasks_of_a_file(
    stub: ProviderStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file with other tasks is another version, so that its trials take the place of the earlier ones."""
    environ = at(tmp_path, pool_text(stub))
    stub.always("alpha", Reply(chunks=("Paris",)))
    stub.always("beta", Reply(chunks=("Rome",)))
    tasks = tmp_path / "tasks.jsonl"
    rule = {"kind": "exact", "expected": "Paris"}
    lines: list[dict[str, Any]] = [{"id": f"{n}", "question": f"{n}?", "grader": rule} for n in range(9)]
    lines += [{"messages": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Capital?"}]}]
    lines[-1] |= {"grader": rule, "family": "geography"}
    tasks.write_text("\n".join(map(json.dumps, lines)))
    arguments = ("--tasks", str(tasks), "--worker", "alpha", "--worker", "beta", "--yes")
    assert await run(environ, *arguments) == 0
    output = capsys.readouterr()
    assert "20 tasks for alpha, beta" in output.err
    assert "geography" in output.out
    assert "tell no two of the workers apart" not in output.out
    assert json.loads(stub.requests_for("alpha")[-1].body)["messages"][0] == {"role": "system", "content": "Be brief."}
    trials = await asyncio.to_thread(read_stored_trials, environ, capsys)
    assert {(trial["worker"], trial["score"]) for trial in trials} == {("alpha", 1.0), ("beta", 0.0)}
    [version] = {trial["version"] for trial in trials}
    assert await run(environ, *arguments) == 0
    assert len(stub.requests_for("alpha")) == 10, "each task is given once"
    tasks.write_text("\n".join(map(json.dumps, lines[:2])))
    assert await run(environ, *arguments) == 0
    again = await asyncio.to_thread(read_stored_trials, environ, capsys)
    assert len({trial["version"] for trial in again} - {version}) == 1
    assert len(again) == 24
    tasks.write_text('{"question": 1}')
    with pytest.raises(ConfigInvalid, match="is no task"):
        await run(environ, *arguments)


async def test_it_warns_where_the_tasks_say_nothing(
    stub: ProviderStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = at(tmp_path, pool_text(stub))
    for name in ("alpha", "beta"):
        stub.always(name, Reply(chunks=("Answer: nothing",)))
    assert await run(environ, "--worker", "alpha", "--worker", "beta", "--each", "1", "--yes") == 0
    output = " ".join(capsys.readouterr().out.split())
    assert "tell no two of the workers apart" in output
    assert "baton calibrate --tasks FILE" in output


async def test_it_stops_before_the_money_is_spent(
    stub: ProviderStub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    environ = at(tmp_path, pool_text(stub))
    assignments = calibrate._assignments(
        configure(environ).catalog, parse_arguments("--tokens", "100"), make_built_in_tasks()
    )
    worst = max(assignment.limits.usd for assignment in assignments)
    cap = worst * 3
    arguments = ("--worker", "alpha", "--tokens", "100", "--yes", "--usd", f"{cap / 1e6:.6f}", "--concurrency", "2")
    assert await run(environ, *arguments) == 1
    assert "was not enough for the rest" in capsys.readouterr().out
    trials = await asyncio.to_thread(read_stored_trials, environ, capsys)
    assert 0 < len(trials) < 72
    assert sum(trial["usd"] for trial in trials) <= cap


def test_the_documented_commands_are_carried_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    [block] = [block for block in blocks("sh", LEARNING) if "calibrate" in block]
    environ = {"BATON_DATA_DIR": str(tmp_path), "BATON_REHEARSAL_DELAY": "0", **HERE}
    for line in block.splitlines():
        assert main(line.removeprefix("baton ").split(), environ) == 0
        assert "rehearsal-sage" in capsys.readouterr().out


async def _follow_calibration(runtime: Runtime, folder: Path) -> None:
    """As in a service that runs while somebody calibrates; a pool file that is read again changes nothing of it."""
    stopping = asyncio.Event()
    async with asyncio.TaskGroup() as group:
        group.create_task(serve._apply_calibration_results(runtime, stopping))
        await until(lambda: runtime.pool.catalog().workers["alpha"].card.measured)
        stopping.set()
    runtime.pool.install(configure(at(folder, (folder / "pool.toml").read_text())))


async def test_conductors_are_shown_what_was_measured(stub: ProviderStub, tmp_path: Path) -> None:
    pool = pool_text(stub)
    environ = at(tmp_path, pool)
    assert await run(environ, "--worker", "alpha", "--each", "1", "--yes") == 0
    stub.always("planner", Reply(chunks=(plan_text((0, "Solve.", ["user"])),)))
    async with running_service(tmp_path, pool) as runtime, client_of(runtime) as client:
        await _follow_calibration(runtime, tmp_path)
        body = {"model": "baton-ultra", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}
        assert (await client.post("/v1/chat/completions", json=body)).status_code == 200
        prompt = stub.requests_for("planner")[0].body.decode()
    assert prompt.count("measured pass rates: calendar 0% of 9, equations ") == 1


@pytest.mark.parametrize("family", ["[/x]", "[red] sums"])
def test_a_name_of_a_file_is_printed_as_it_stands(family: str, capsys: pytest.CaptureFixture[str]) -> None:
    trial = Trial("alpha", "model", "1", "task", "maths", family, 0, "?", "run_1", 1.0, 1.0, 0, 0.1)
    terminal.print_table(calibrate._table({"alpha": [trial]}), "There is none.")
    assert f" {family} " in capsys.readouterr().out
