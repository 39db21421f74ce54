"""`baton replay` and `baton runs diff` over a journal of simulated workers."""

import asyncio
import json
from collections.abc import Mapping
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from app.__main__ import main
from app.cli.runs.replay import Money
from app.core.pool.conductor_versions import Change
from tests.bench.caps import QUIET, pool_of
from tests.harness.in_process import client_of, plan_text, pool_text, running_service, script_answers
from tests.stubs import ProviderStub, Reply

HARD = "Solve 3(x + 2) = 2x + 11"
RUNS = 2
SECOND = "rehearsal-second"
CONDUCTOR = f"""
[providers.second]
format = "rehearsal"

[workers.{SECOND}]
provider = "second"
model = "conductor"
price = {{ input = 0.10, output = 0.40 }}
context = 64_000
pooled = false
"""


@dataclass
class Desk:
    """A database with some runs, and the commands over it."""

    environ: Mapping[str, str]
    runs: list[str]

    def say(self, *arguments: str) -> tuple[int, str]:
        with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
            status = main(arguments, dict(self.environ))
        return status, out.getvalue() or err.getvalue()

    def read(self, *arguments: str) -> Any:
        return json.loads(self.say(*arguments, "--json")[1])


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Desk:
    folder = tmp_path_factory.mktemp("replays")
    environ = {
        "BATON_POOL": str(folder / "pool.toml"),
        "BATON_DATA_DIR": str(folder),
        "BATON_PEPPER": "p" * 32,
        "BATON_REHEARSAL_DELAY": "0",
    }
    return Desk(environ, asyncio.run(make_runs(folder)))


async def make_runs(folder: Path) -> list[str]:
    body = {"model": "baton-ultra", "messages": [{"role": "user", "content": HARD}]}
    async with running_service(folder, pool_of(0) + CONDUCTOR, QUIET) as runtime, client_of(runtime) as client:
        return [(await client.post("/v1/chat/completions", json=body)).headers["x-baton-run"] for _ in range(RUNS)]


@pytest.mark.long
def test_past_runs_are_replayed_once_and_compared(desk: Desk, tmp_path: Path) -> None:
    out = ("--out", str(tmp_path / "replayed.jsonl"))
    report = desk.read("replay", "--since", "1h", "--tier", "baton-ultra", *out)
    assert {pair["run"] for pair in report["pairs"]} == set(desk.runs)
    for pair in report["pairs"]:
        assert pair["comparison"]["same_answer"], "simulated workers answer equal requests equally"
        assert pair["comparison"]["disclosures"]["only_second"] == []
    [cost] = [metric for metric in report["metrics"] if metric["metric"] == "cost_usd"]
    assert (cost["pairs"], cost["lower"]) == (RUNS, RUNS), "nobody plans again"
    assert cost["interval_95"][0] <= cost["difference"] <= cost["interval_95"][1]
    status, again = desk.say("replay", "--since", "1h", *out, "--json")
    assert (status, json.loads(again)["left_out"]) == (0, {"replayed before": RUNS})
    notes = tmp_path / "notes.json"
    notes.write_text('{"a": 1}')
    status, text = desk.say("replay", "--since", "1h", "--out", str(notes))
    assert (status, notes.read_text()) == (2, '{"a": 1}')
    assert f"--out: {notes} has something other than replays in it" in text


@pytest.mark.long
def test_two_runs_are_compared_in_words(desk: Desk) -> None:
    status, text = desk.say("replay", desk.runs[0], "--from-step", "1", "--under", "worker=rehearsal-sage")
    assert status == 0, text
    assert desk.runs[0] in text
    [listed] = desk.read("runs", "ls", "--origin", "replay", "--origin-run", desk.runs[0], "--limit", "1")
    assert "succeeded (replay)" in desk.say("runs", "ls", "--origin", "replay")[1]
    text = desk.say("runs", "diff", desk.runs[0], listed["id"])[1]
    assert "step 1.0: " in text
    assert "(conductor) saw user" in text
    assert not {"None", "False"} & set(text.split())
    readings = desk.read("audit", "reads", "--run", desk.runs[0])
    assert [reading["what"] for reading in readings][:2] == ["comparison", "replay"]


def test_no_replay_begins_that_the_money_does_not_suffice_for(desk: Desk) -> None:
    report = desk.read("replay", *desk.runs, "--max-usd", "0.000001")
    assert (report["pairs"], report["left_out"]) == ([], {"no money left": RUNS})


def test_a_replay_that_waits_for_an_approval_is_listed_and_ends_the_command(desk: Desk, tmp_path: Path) -> None:
    """Nobody knows what it will have cost, so its whole part counts as spent."""
    pool = tmp_path / "pool.toml"
    pool.write_text(Path(desk.environ["BATON_POOL"]).read_text() + "[tiers.baton-ultra.approval]\nalways = true\n")
    careful = Desk({**desk.environ, "BATON_POOL": str(pool)}, desk.runs)
    report = careful.read("replay", *desk.runs, "--max-usd", "1", "--concurrency", "1")
    assert [pair["comparison"]["second"]["state"] for pair in report["pairs"]] == ["awaiting_approval"]
    assert report["metrics"] == [], "nor how it compares with its run"
    assert report["left_out"] == {"no money left": 1}


def find_replay(desk: Desk, run: str, under: str) -> dict[str, Any]:
    """The one replay of a run under something else, as `runs show` has it."""
    (pair,) = desk.read("replay", run, "--under", under)["pairs"]
    record: dict[str, Any] = desk.read("runs", "show", pair["replay"])
    assert (record["origin"], record["state"]) == ({"kind": "replay", "run": run}, "succeeded")
    return record


def test_a_run_is_replayed_under_a_plan_from_a_file(desk: Desk, tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    steps = [("rehearsal-scribe", "Read it.", ["user"]), ("rehearsal-abacus", "Solve it.", ["user", 0])]
    plan.write_text(
        json.dumps({"steps": [dict(zip(("worker", "subtask", "access"), step, strict=True)) for step in steps]})
    )
    record = find_replay(desk, desk.runs[0], f"plan={plan}")
    assert [(step["worker"], step["access"]) for step in record["steps"]] == [(step[0], step[2]) for step in steps]
    assert [proposal["attempts"] for proposal in record["proposals"]] == [[]], "nobody plans"


def test_a_run_is_replayed_under_another_conductor(desk: Desk) -> None:
    record = find_replay(desk, desk.runs[0], f"conductor={SECOND}")
    (attempt,) = record["proposals"][0]["attempts"]
    assert (attempt["worker"], record["model"]) == (SECOND, f"baton-ultra:conductor:{SECOND}")


@pytest.mark.long
def test_a_run_is_replayed_with_the_pool_as_it_was(desk: Desk, tmp_path: Path) -> None:
    """Since then the operator has made all workers dearer."""
    dearer = tmp_path / "pool.toml"
    dearer.write_text(Path(desk.environ["BATON_POOL"]).read_text().replace("output = ", "output = 10"))
    today = Desk({**desk.environ, "BATON_POOL": str(dearer)}, desk.runs)
    was = desk.read("runs", "show", desk.runs[0])
    now, then = (
        find_replay(today, desk.runs[0], "worker=rehearsal-sage"),
        find_replay(today, desk.runs[0], f"snapshot={was['catalog']}"),
    )
    assert then["catalog"] == was["catalog"] != now["catalog"]
    prices = []
    for run in (was, then):
        prices.append([step["cost_usd"] for step in run["steps"]])
    assert prices[0] == prices[1]


async def test_a_run_is_replayed_under_another_version_of_its_conductor(tmp_path: Path) -> None:
    plan = Reply(chunks=(plan_text((0, "Solve it.", ["user"])),))
    async with ProviderStub() as stub:
        for model in ("planner", "planner@1"):
            stub.always(model, plan)
        pool = pool_text(stub)
        async with running_service(tmp_path, pool, QUIET) as runtime, client_of(runtime) as client:
            body = {"model": "baton-ultra", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}
            run = (await client.post("/v1/chat/completions", json=body)).headers["x-baton-run"]
            change = Change("change_1", 0.0, "me", "planner", "loaded", "planner@1")
            await runtime.context.store.change(change)
        environ = {"BATON_POOL": str(tmp_path / "pool.toml"), "BATON_DATA_DIR": str(tmp_path), "BATON_PEPPER": "p" * 32}
        record = await asyncio.to_thread(find_replay, Desk(environ, [run]), run, "version=planner@1")
        assert [attempt["version"] for attempt in record["proposals"][0]["attempts"]] == ["planner@1"]
        assert [request.json["model"] for request in stub.requests if "planner" in request.json["model"]] == [
            "planner",
            "planner@1",
        ]
        refused = await asyncio.to_thread(Desk(environ, [run]).say, "replay", run, "--under", "version=planner@2")
        assert refused[0] == 1
        assert "these are: planner@1" in refused[1]


async def test_money_that_is_limited_goes_to_no_worker_of_unknown_price(tmp_path: Path) -> None:
    async with ProviderStub() as stub:
        script_answers(stub)
        pool = pool_text(stub).replace("price = { input = 1.00, output = 2.00, cached = 0.50 }", "")
        async with running_service(tmp_path, pool, QUIET) as runtime, client_of(runtime) as client:
            body = {"model": "baton-mini", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}
            run = (await client.post("/v1/chat/completions", json=body)).headers["x-baton-run"]
        environ = {"BATON_POOL": str(tmp_path / "pool.toml"), "BATON_DATA_DIR": str(tmp_path), "BATON_PEPPER": "p" * 32}
        calls = len(stub.requests)
        refused = await asyncio.to_thread(Desk(environ, [run]).say, "replay", run, "--max-usd", "1")
        assert (refused[0], len(stub.requests)) == (1, calls)


def test_what_a_replay_of_unknown_end_may_cost_is_spent() -> None:
    money = Money(most=100, slots=1)
    part = money.part(60, 10)
    assert part == 60
    money.settle(part, None)
    assert money.part(60, 10) == 40
    assert money.part(60, 10) is None


@pytest.mark.parametrize(
    ("words", "word"),
    [
        (["--under", "moon=full"], "--under"),
        (["--under", "snapshot=0123"], "0123"),
        (["--since", "1h", "--from-step", "1"], "--from-step"),
        ([], "which runs"),
    ],
)
def test_a_wrong_command_line_says_what_is_missing(desk: Desk, words: list[str], word: str) -> None:
    runs = desk.runs[:1] if words and words[0] == "--under" else []
    status, output = desk.say("replay", *runs, *words)
    assert status == 2
    assert word in output


def test_filters_beside_ids_of_runs_are_refused(tmp_path: Path) -> None:
    with redirect_stderr(StringIO()) as err:
        status = main(["replay", "run_1", "--tier", "baton-mini"], {"BATON_DATA_DIR": str(tmp_path)})
    assert (status, "--tier: chooses runs, and their ids are given" in err.getvalue()) == (2, True)
