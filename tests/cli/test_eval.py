"""`baton eval`: in a service of its own over the rehearsal pool, as its documentation says; and as a client that waits,
gives up, and never counts the service's troubles as an arm's."""

import asyncio
import json
import os
import re
import shlex
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import httpx
import pytest

from app.__main__ import main
from app.cli import storage
from app.cli.commands import parse
from app.cli.embedded.gateway import run_embedded_service
from app.cli.learning import eval as evaluation
from app.cli.learning import eval_requests, plot, sample_tasks, task_set, train_chat
from app.cli.learning.eval_requests import Bench, Experiment
from app.cli.learning.sandbox import Sandbox
from app.core.rating.calibration import Trial
from app.errors import ConfigInvalid, ServiceUnavailable
from app.lab.comparison import Table, table
from app.lab.measurements import Measure
from app.lab.world2.constants import DOCUMENT_TOKENS
from app.lab.world2.provider import service_tasks
from app.process.config import configure
from tests.harness.waiting import wait_until

pytestmark = pytest.mark.long

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "deploy" / "docs" / "evaluation.md").read_text()
ENVIRON = {"BATON_REHEARSAL_DELAY": "0", "BATON_PEPPER": "p" * 32}
HELLO = {"messages": [{"role": "user", "content": "What is 2 + 2?"}]}
USUAL_DELAY, LATE_DELAY = 0.02, 9.0
"""The seconds that an answer takes."""
FEW = ("--limit", "3", "--repeats", "1", "--resamples", "50", "--arms")


def baton(*arguments: str, environ: Mapping[str, str] = ENVIRON) -> int:
    return main(["eval", *arguments], environ)


def rows(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "rows.jsonl").read_text().splitlines()]


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder in which commands are run."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_goes_on_where_it_was_interrupted_and_pays_for_nothing_twice(
    home: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert baton(*FEW, "tier,single:rehearsal-sage,static:pev", "--json") == 0
    first = rows(home / "evaluation")
    printed = json.loads(capsys.readouterr().out)
    assert json.loads((home / "evaluation" / "table.json").read_text()) == printed
    standings = {entry["arm"]: entry for entry in printed["standings"]}
    assert set(standings) == {
        "baton-ultra",
        "baton-ultra:single:rehearsal-sage",
        "baton-ultra:static:pev",
        "oracle",
    }
    assert len(first) == 9
    path = home / "evaluation" / "rows.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_bytes("".join(lines[:4]).encode() + lines[4][:40].encode() + b"\xff")  # killed while it wrote
    assert baton(*FEW, "tier,single:rehearsal-sage,static:pev") == 0
    again = evaluation.by_place(home / "evaluation")
    runs = {(row["task"], row["arm"], row["repeat"]): row["run"] for row in first}
    assert {place: row.run for place, row in again.items()} == runs, "the same runs, not others"
    with closing(sqlite3.connect(home / "evaluation" / "baton.db")) as database:
        assert database.execute("SELECT count(*) FROM runs").fetchone() == (9,)
    chain = [row for row in first if row["arm"].endswith("static:pev")]
    assert {(row["calls"], row["steps"], row["conductor_input"], row["degraded"]) for row in chain} == {
        (3, 3, 0, False)
    }
    conducted = [row for row in first if row["arm"] == "baton-ultra"]
    assert all(row["conductor_output"] and row["usd"] > 0 and row["wall"] > 0 and row["plan"] for row in conducted)
    assert {len(row["catalog"]) for row in first} == {64}


def test_runs_that_were_left_open_when_it_was_killed_are_made_anew(home: Path) -> None:
    slowly = ENVIRON | {"BATON_REHEARSAL_DELAY": "1"}
    assert baton(*FEW, "single:rehearsal-abacus", environ=slowly) == 0
    arguments = (*FEW, "single:rehearsal-sage")
    command = [sys.executable, "-m", "app", "eval", *arguments]
    environ = os.environ | slowly | {"PYTHONPATH": str(ROOT)}
    with subprocess.Popen(command, cwd=home, env=environ, stderr=subprocess.DEVNULL) as process:
        wait_until(lambda: len(states(home)) == 6)
        process.kill()
    assert baton(*arguments, environ=slowly) == 0
    assert [row["outcome"] for row in rows(home / "evaluation")] == ["answered"] * 6
    assert states(home).count("succeeded") == 6, "the others are cancelled once their leases have run out"


def states(folder: Path) -> list[str]:
    """The states of an evaluation's runs."""
    file = folder / "evaluation" / "baton.db"
    try:
        with closing(sqlite3.connect(f"file:{file}?mode=ro", uri=True)) as database:
            return [state for (state,) in database.execute("SELECT state FROM runs")]
    except sqlite3.OperationalError:  # there is none yet
        return []


@pytest.mark.usefixtures("embedded_database")
async def test_the_service_inside_knows_what_was_calibrated_outside(tmp_path: Path) -> None:
    configuration = configure(ENVIRON | {"BATON_DATA_DIR": str(tmp_path)})
    tried = Trial("rehearsal-sage", "sage", "calibration-1", "1", "numbers", "sums", 0, "q", "run_1", 1.0, 0.5, 10, 1.0)
    async with storage.open_configured_store(configuration.settings) as store:
        await store.note_trial(tried)
    async with run_embedded_service(configuration, tmp_path / "inside", 2) as client:
        listed = (await client.get("/v1/models")).json()["data"]
        options = evaluation._options(parse(["eval", "--no-explore", "--effort", "low"]))
        assert options == {"baton": {"explore": False}, "reasoning_effort": "low"}
        run = await client.post("/v1/chat/completions", json={"model": "baton-ultra", **HELLO, **options})
        assert run.status_code == 200
    never = configure(ENVIRON | {"BATON_DATA_DIR": str(tmp_path / "never")})
    async with run_embedded_service(never, tmp_path / "other", 2) as client:
        others = (await client.get("/v1/models")).json()["data"]
    assert listed[0]["baton"]["catalog"] != others[0]["baton"]["catalog"], "other cards are another pool"
    assert not (tmp_path / "never").exists()


def test_what_an_arm_cannot_do_is_wrong_and_not_dropped(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert baton(*FEW, "single:rehearsal-sage,sc:16") == 0
    refused = [row for row in rows(home / "evaluation") if row["arm"].endswith("sc:16")]
    assert [(row["right"], row["outcome"], row["reason"]) for row in refused] == [(0.0, "failed", "too_few_steps")] * 3
    assert "oracle" in capsys.readouterr().out


def test_rows_of_something_else_are_refused(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert baton(*FEW, "single:rehearsal-sage") == 0
    for other in (["--limit", "2"], ["--temperature", "0.5"]):
        assert baton(*FEW, "single:rehearsal-sage", *other) == 2
    assert "holds rows of another task set; name another folder" in (output := capsys.readouterr().err)
    assert "holds rows of other options" in output
    assert baton(*FEW, "single:rehearsal-sage", "--limit", "2", "--out", "two") == 0
    assert baton("--report", "--with", "two") == 2
    assert "rows of 2 task sets cannot be compared" in capsys.readouterr().err
    assert baton("--report", "--against", "moa:3") == 2
    assert "--against: there is no row of baton-ultra:moa:3; there are rows of baton-ultra" in capsys.readouterr().err
    assert baton("--report", "--arms", "moa:3") == 2
    assert "--arms: there are no rows of these; there are rows of baton-ultra" in capsys.readouterr().err
    for words in (["--out", "nowhere"], ["--with", "nowhere"]):
        assert baton("--report", *words) == 2
        assert "nowhere: there are no rows of an evaluation" in capsys.readouterr().err
    assert baton(*FEW, "random", "--tier", "baton-maxi", "--out", "three") == 2


def test_a_folder_that_has_no_rows_yet_takes_other_options(home: Path) -> None:
    assert baton(*FEW, "nothing", "--temperature", "0.5") == 1
    assert baton(*FEW, "single:rehearsal-sage") == 0
    assert len(rows(home / "evaluation")) == 3


def test_rows_of_other_options_are_not_compared(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for folder, options in (("cold", {"temperature": 0.0}), ("hot", {"temperature": 1.0}), ("hot2", {})):
        (home / folder).mkdir()
        (home / folder / "rows.jsonl").write_text(json.dumps({"task": "1", "arm": folder}) + "\n")
        (home / folder / "evaluation.json").write_text(json.dumps({"id": "1", "options": options}))
    assert baton("--report", "--out", "cold", "--with", "hot") == 2
    assert "rows of other options cannot be compared" in capsys.readouterr().err
    (home / "hot2" / "evaluation.json").write_text(json.dumps({"id": "2", "options": {"temperature": 1.0}}))
    assert baton("--report", "--out", "hot", "--with", "hot2", "--resamples", "50") == 0


def test_a_description_that_was_cut_off_is_refused_in_words(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (home / "evaluation").mkdir()
    for text in ("", '{"id": "1', "[]"):
        (home / "evaluation" / "evaluation.json").write_text(text)
        assert baton(*FEW, "random") == 2
        assert "evaluation.json: it does not describe an evaluation" in " ".join(capsys.readouterr().err.split())


def test_the_documented_commands_do_what_the_page_says(home: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tasks,) = re.findall(r"^```json\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    (home / "tasks.jsonl").write_text(tasks)
    lines = [
        line
        for block in re.findall(r"^```sh\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
        for line in block.splitlines()
    ]
    commands = [shlex.split(line, comments=True) for line in lines if line.startswith("baton ")]
    assert len(commands) == 4
    for command in commands:
        parse(command[1:])
        if "--url" not in command:
            assert main([*command[1:], "--resamples", "100"], ENVIRON) == 0, command
    output = capsys.readouterr().out
    assert "reference: baton-ultra:single:rehearsal-sage" in output
    assert {row["task"] for row in rows(home / "mine")} == {"1", "sum", "capital", "double"}


def test_the_built_in_tasks_have_right_answers_that_rehearsal_workers_can_find() -> None:
    faults: list[str] = []
    tasks = task_set.parse(sample_tasks.lines(), "built-in", None, faults)
    assert faults == []
    assert len(tasks) == 60
    for task, world_task in zip(tasks, service_tasks("fresh"), strict=False):
        slips = "; ".join(part.slip for part in world_task.parts)
        assert task.grader.grade(f"Worked out by sage. The answer is {world_task.answer}").score == 1.0, task.question
        assert task.grader.grade(f"Worked out by sage. The answer is {slips}").score == 0.0, task.question
        assert len(task.question) > 3 * DOCUMENT_TOKENS[world_task.document], "the document comes with the task"


def test_code_is_run_only_behind_walls_or_where_it_is_trusted(
    home: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(Sandbox, "isolations", lambda _: ("files",))
    (home / "t.jsonl").write_text('{"question": "?", "grader": {"kind": "tests", "tests": "assert True"}}')
    assert baton("--tasks", "t.jsonl", "--arms", "random") == 2
    assert "does not allow its network to be cut off" in capsys.readouterr().err
    assert main(["grade", "--tasks", "t.jsonl"], ENVIRON | {"BATON_DATA_DIR": str(home)}) == 2
    assert "does not allow its network to be cut off" in capsys.readouterr().err
    with pytest.raises(ConfigInvalid, match="does not allow its network to be cut off"):
        train_chat._rules(parse(["train", "--backend", "trl", "--tasks", "t.jsonl"]), 0)
    options = parse(["eval", "--tasks", "t.jsonl", "--trust-code"])
    assert len(evaluation._tasks(options, Sandbox(trusts=True))) == 1


def test_real_models_are_asked_only_if_they_are_named() -> None:
    served = evaluation.ServedTier(("baton-ultra", "baton-ultra:random"), "c", 60.0, False)
    with pytest.raises(ConfigInvalid, match="real models cost money; choose among tier, random"):
        evaluation._arms(parse(["eval"]), served)


# -- the client

TASK = {"id": "1", "question": "What is 2 + 2?", "grader": {"kind": "numeric", "expected": 4}}
ANSWER = {"choices": [{"message": {"content": "The answer is 4."}}]}
RUN: dict[str, Any] = {"proposals": [], "steps": [], "cost_usd": 0.5, "rounds": 1, "degraded": True, "catalog": "c"}
RUN |= {"created_at": 100.0, "ended_at": 103.0}
OF_A_RUN = {"x-baton-run": "run_1"}
WAITING = {"baton": {"state": "awaiting_approval"}}


def error(status: int, code: str, **headers: str) -> httpx.Response:
    return httpx.Response(status, json={"error": {"code": code}}, headers=headers)


async def measure_task(
    *replies: httpx.Response | Exception,
    run: httpx.Response | None = None,
    keys: list[str] | None = None,
    **changes: Any,
) -> Measure:
    """The row of one task over a service that gives these replies, then the last one for ever. `keys` gets the keys of
    all requests."""
    left = list(replies)

    def answer(request: httpx.Request) -> httpx.Response:
        if request.method == "GET":
            return run or httpx.Response(200, json=RUN)
        assert request.headers["idempotency-key"].startswith("eval-id-")
        if keys is not None:
            keys.append(request.headers["idempotency-key"])
        reply = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(reply, Exception):
            raise reply
        return reply

    tasks = tuple(task_set.parse([json.dumps(TASK)], "t", None, []))
    experiment = Experiment("id", tasks, ("arm",), 1, "t", "c", **changes)
    measures: list[Measure] = []
    ticks = iter(range(0, 100_000, 50))
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://baton") as client:
        await eval_requests.carry_out(
            Bench(client, lambda: float(next(ticks)), lambda: 1.0), experiment, {}, measures.append
        )
    [measure] = measures
    return measure


ADMITTED = httpx.Response(200, json=ANSWER, headers=OF_A_RUN)


async def test_a_busy_service_is_asked_again() -> None:
    busy = error(429, "rate_limit_exceeded", **{"retry-after": "0"})
    measure = await measure_task(busy, error(503, "overloaded", **{"retry-after": "0"}), ADMITTED)
    assert (measure.right, measure.outcome, measure.usd, measure.degraded, measure.run) == (
        1.0,
        "answered",
        0.5,
        True,
        "run_1",
    )
    with pytest.raises(ServiceUnavailable, match=r"refuses new work \(rate_limit_exceeded\)"):
        await measure_task(busy)


async def test_a_service_that_is_gone_ends_the_evaluation_and_makes_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(_: float) -> None:
        return

    monkeypatch.setattr(eval_requests.asyncio, "sleep", at_once)
    with pytest.raises(ServiceUnavailable, match="cannot be reached"):
        await measure_task(httpx.ConnectError("no"))
    assert (await measure_task(httpx.ReadError("cut"), ADMITTED)).right == 1.0


async def test_the_reply_of_a_run_that_came_too_late_is_fetched_by_its_key() -> None:
    replayed = httpx.Response(200, json=ANSWER, headers={**OF_A_RUN, "idempotent-replayed": "true"})
    measure = await measure_task(TimeoutError(), replayed)
    assert (measure.outcome, measure.run, measure.usd, measure.wall) == ("answered", "run_1", 0.5, 3.0)
    over = error(499, "run_cancelled", **OF_A_RUN, **{"idempotent-replayed": "true"})
    late = await measure_task(TimeoutError(), over, ADMITTED)
    assert (late.outcome, late.reason) == ("failed", "run_cancelled"), "this process sent it and has waited for it"
    lost = await measure_task(TimeoutError())
    assert (lost.outcome, lost.reason) == ("failed", "too_late")


async def test_a_run_that_was_cancelled_before_this_process_began_is_replaced() -> None:
    keys = []
    left = error(499, "run_cancelled", **OF_A_RUN, **{"idempotent-replayed": "true"})
    measure = await measure_task(left, left, ADMITTED, keys=keys)
    assert (measure.outcome, len(set(keys))) == ("answered", 3)


@pytest.mark.parametrize(
    ("reply", "outcome", "reason"),
    [
        (error(502, "worker_unavailable", **OF_A_RUN), "outage", "worker_unavailable"),
        (error(429, "rate_limit_exceeded", **OF_A_RUN), "outage", "rate_limit_exceeded"),
        (error(429, "insufficient_quota", **OF_A_RUN), "outage", "insufficient_quota"),
        (error(429, "run_over_budget", **OF_A_RUN), "failed", "run_over_budget"),
        (error(504, "run_expired", **OF_A_RUN), "failed", "run_expired"),
        (error(400, "too_few_steps"), "failed", "too_few_steps"),
        (httpx.Response(500, text="?"), "failed", "status 500"),
        (httpx.Response(200, json=ANSWER | WAITING, headers=OF_A_RUN), "outage", "awaiting_approval"),
    ],
)
async def test_what_is_no_answer_is_wrong_and_says_why(reply: httpx.Response, outcome: str, reason: str) -> None:
    measure = await measure_task(reply)
    assert (measure.right, measure.outcome, measure.reason) == (0.0, outcome, reason)
    assert measure.usd == (0.5 if "x-baton-run" in reply.headers else 0.0), "what it cost, it cost"


async def test_what_speaks_against_the_command_ends_it() -> None:
    for status in (401, 403, 404):
        with pytest.raises(ServiceUnavailable, match="refuses arm"):
            await measure_task(error(status, "model_not_found"))
    with pytest.raises(ServiceUnavailable, match="needs the scope runs:read"):
        await measure_task(ADMITTED, run=error(403, "insufficient_scope"))
    with pytest.raises(ServiceUnavailable, match="store_unavailable; run the same command to go on"):
        await measure_task(ADMITTED, run=error(503, "store_unavailable"))
    with pytest.raises(ServiceUnavailable, match="The pool was changed"):
        await measure_task(ADMITTED, run=httpx.Response(200, json=RUN | {"catalog": "other"}))


async def test_an_option_that_the_service_refuses_ends_the_evaluation_and_makes_no_row() -> None:
    refused = {"error": {"code": "invalid_value", "param": "temperature"}}
    with pytest.raises(ServiceUnavailable, match="refuses temperature: invalid_value"):
        await measure_task(httpx.Response(400, json=refused), options={"temperature": 3.0})
    assert (await measure_task(httpx.Response(400, json=refused))).outcome == "failed", "no option of the command"


@pytest.mark.usefixtures("embedded_database")
@pytest.mark.parametrize("options", [("--temperature", "3"), ("--effort", "hihg")])
async def test_the_service_names_the_option_that_it_refuses(tmp_path: Path, options: tuple[str, str]) -> None:
    fields = evaluation._options(parse(["eval", *options]))
    async with run_embedded_service(configure(ENVIRON), tmp_path / "inside", 1) as client:
        reply = await client.post("/v1/chat/completions", json={"model": "baton-ultra", **HELLO, **fields})
    assert reply.json()["error"]["param"] in fields


@pytest.mark.parametrize("status", [408, 502, 503, 504])
async def test_a_reply_of_a_proxy_before_a_run_begins_makes_no_row(
    status: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def at_once(_: float) -> None:
        return

    monkeypatch.setattr(eval_requests.asyncio, "sleep", at_once)
    proxy = httpx.Response(status, text="<html>")
    assert (await measure_task(proxy, ADMITTED)).outcome == "answered"
    with pytest.raises(ServiceUnavailable, match=f"refuses new work \\(status {status}\\)"):
        await measure_task(proxy)


async def test_the_wall_time_of_a_run_that_was_asked_before_is_the_runs_own() -> None:
    replayed = httpx.Response(200, json=ANSWER, headers={**OF_A_RUN, "idempotent-replayed": "true"})
    assert (await measure_task(replayed)).wall == 3.0
    assert (await measure_task(ADMITTED)).wall == 50.0 * 2


async def test_no_more_are_asked_at_one_time_than_is_allowed_and_a_late_one_is_wrong() -> None:
    at_once = most = 0

    async def answer(request: httpx.Request) -> httpx.Response:
        nonlocal at_once, most
        if request.method == "GET":
            return httpx.Response(200, json=RUN)
        at_once += 1
        most = max(most, at_once)
        await asyncio.sleep(LATE_DELAY if b"late" in request.content else USUAL_DELAY)
        at_once -= 1
        return ADMITTED

    tasks = tuple(task_set.parse([json.dumps(TASK | {"id": str(n)}) for n in range(6)], "t", None, []))
    measures: list[Measure] = []
    clock: Callable[[], float] = asyncio.get_running_loop().time
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://baton") as client:
        bench = Bench(client, clock, clock)
        await eval_requests.carry_out(bench, Experiment("id", tasks, ("arm",), 2, "t", "c", 4), {}, measures.append)
        assert (len(measures), most) == (12, 4)
        late = Experiment("id", tasks[:1], ("late",), 1, "t", "c", 4, deadline=0.05)
        await eval_requests.carry_out(bench, late, {}, measures.append)
    assert (measures[-1].outcome, measures[-1].reason) == ("failed", "too_late")


async def test_nothing_more_is_begun_once_the_money_is_spent() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=RUN) if request.method == "GET" else ADMITTED

    tasks = tuple(task_set.parse([json.dumps(TASK | {"id": str(n)}) for n in range(9)], "t", None, []))
    measures: list[Measure] = []
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer), base_url="http://baton") as client:
        bench = Bench(client, lambda: 0.0, lambda: 1.0)
        for cap, rows in ((1.2, 3), (1.4, 3), (2.0, 4), (99.0, 9)):  # each costs half a dollar; one is asked at a time
            by_place = {measure.place: measure for measure in measures}
            experiment = Experiment("id", tasks, ("arm",), 1, "t", "c", 1, usd=cap)
            if rows < 9:
                with pytest.raises(ServiceUnavailable, match="--usd is spent"):
                    await eval_requests.carry_out(bench, experiment, by_place, measures.append)
            else:
                await eval_requests.carry_out(bench, experiment, by_place, measures.append)
            assert len(measures) == rows
    assert len({measure.place for measure in measures}) == 9


def drawing() -> Table:
    rows = [
        Measure(task=str(n), arm=arm, right=right, usd=usd)
        for n in range(3)
        for arm, right, usd in (("cheap", 0.0, 0.001), ("dear", 1.0, 0.1))
    ]
    return table(rows, ["cheap", "dear"], "cheap", 0, 20)


def test_the_plot_has_every_arm_at_its_cost_and_accuracy() -> None:
    new_plot = drawing()
    assert [standing.arm for standing in new_plot.standings] == ["dear", "oracle", "cheap"]
    lines = plot.characters(new_plot).splitlines()
    assert lines[0].endswith("*"), "the dear arm and the oracle are the same point: best and dearest"
    assert lines[0].startswith(" 1.000 |")
    assert lines[plot.HEIGHT - 1] == " 0.000 |c"
    assert lines[-1].endswith("$0.001 to $0.10 for each task, logarithmic")


def test_a_png_is_drawn_where_matplotlib_is_installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pyplot = MagicMock()
    figure, axes = MagicMock(), MagicMock()
    pyplot.subplots.return_value = (figure, axes)
    monkeypatch.setattr(plot, "resolve_name", lambda name: {"matplotlib.pyplot": pyplot}[name])
    assert plot.png(drawing(), tmp_path / "plot.png")
    points = [(round(call.args[0][0], 6), call.args[1][0]) for call in axes.errorbar.call_args_list]
    assert points == [(0.1, 1.0), (0.1, 1.0), (0.001, 0.0)]
    assert figure.savefig.call_args.args == (tmp_path / "plot.png",)

    def missing(name: str) -> None:
        raise ModuleNotFoundError(name=name)

    monkeypatch.setattr(plot, "resolve_name", missing)
    assert not plot.png(drawing(), tmp_path / "plot.png")
