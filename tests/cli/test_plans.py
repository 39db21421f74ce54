"""`baton plans`: a plan from its making to its answer, in the configured database."""

import json
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from typing import Any

import pytest

from app.__main__ import main
from app.cli.embedded import engine
from app.engine.delivery.messages import FollowedRun
from app.engine.runs.admission import Order
from app.engine.runs.client import RunClient
from app.errors import Overloaded
from tests.harness import processes

REHEARSAL = Path(__file__).parents[2] / "app/process/config/rehearsal.toml"
HARD = "Solve 3(x + 2) = 2x + 11"
Baton = Callable[..., tuple[int, str]]


@pytest.fixture(scope="module")
def baton(tmp_path_factory: pytest.TempPathFactory) -> Baton:
    """Run a command over a database of its own: its exit status, and what it printed."""
    environ = processes.environment(tmp_path_factory.mktemp("plans"), BATON_REHEARSAL_DELAY="0")

    def run(*arguments: str) -> tuple[int, str]:
        out, err = StringIO(), StringIO()
        with redirect_stdout(out), redirect_stderr(err):
            status = main(arguments, environ)
        return status, out.getvalue() if status == 0 else err.getvalue()

    assert run("migrate")[0] == 0
    return run


def make_plan(baton: Baton) -> dict[str, Any]:
    """A plan of three steps, nothing of which was executed."""
    status, output = baton("plans", "make", HARD, "--json")
    assert status == 0, output
    preview: dict[str, Any] = json.loads(output)
    assert (preview["revision"], len(preview["plan"]["steps"])) == (1, 3)
    return preview


@pytest.mark.parametrize("command", [("plan",), ("plans", "make")])
def test_a_worker_that_there_is_not_is_named_with_the_options(baton: Baton, command: tuple[str, ...]) -> None:
    status, text = baton(*command, HARD, "--allow", "nope")
    assert status == 2
    assert "--allow, --deny, --pin: nope: not in the pool of baton-ultra; there are rehearsal-sage, " in text


@pytest.mark.long
def test_a_plan_is_made_edited_and_executed(baton: Baton) -> None:
    plan = make_plan(baton)["id"]
    edited = json.loads(baton("plans", "edit", plan, "--change", "1", "--worker", "rehearsal-sage", "--json")[1])
    assert [step["worker"] for step in edited["plan"]["steps"]][1] == "rehearsal-sage"
    text = baton("plans", "show", "last")[1]
    for words in (
        "revision 2 of 2",
        "sees: the conversation, step 0",
        "withheld: step:0",
        "estimate: $0.0",
        edited["digest"],
    ):
        assert words in text
    ran = json.loads(baton("plans", "run", plan, "--json")[1])
    assert (ran["revision"], ran["answer"]) == (2, "The answer is x = 5.")
    run_of_plan = plan.removeprefix("plan_")
    reads = [(entry["run"], entry["what"]) for entry in json.loads(baton("audit", "reads", "--json")[1])]
    assert reads == [(ran["run"], "answer"), (run_of_plan, "plan"), (run_of_plan, "plan")]
    run = json.loads(baton("runs", "show", ran["run"], "--json")[1])
    assert run["origin"]["kind"] == "plan"
    assert [step["worker"] for step in run["steps"]][1] == "rehearsal-sage"


@pytest.mark.long
def test_a_long_answer_is_printed_in_its_own_lines(baton: Baton) -> None:
    assert baton("plans", "make", "Write a poem.", "--tier", "baton-mini")[0] == 0
    (answer,) = baton("plans", "run", "last")[1].splitlines()
    assert len(answer) > 200


@pytest.mark.long
def test_an_engine_that_is_not_ready_in_time_is_said_so(baton: Baton, monkeypatch: pytest.MonkeyPatch) -> None:
    async def refuse(_client: RunClient, _order: Order) -> FollowedRun:
        raise Overloaded()

    plan = make_plan(baton)["id"]
    monkeypatch.setattr(RunClient, "start", refuse)
    monkeypatch.setattr(engine, "START_SECONDS", 0.0)
    status, text = baton("plans", "run", plan)
    assert status == 1
    assert "at capacity" in text


@pytest.mark.long
def test_a_plan_comes_and_goes_in_the_published_form(baton: Baton, tmp_path: Path) -> None:
    preview = make_plan(baton)
    path = tmp_path / "plan.json"
    path.write_text(baton("plans", "show", preview["id"], "--lists")[1])
    again = json.loads(baton("plans", "edit", preview["id"], "--file", str(path), "--json")[1])
    assert (again["revision"], again["digest"]) == (2, preview["digest"])


@pytest.mark.long
def test_what_cannot_be_done_is_said(baton: Baton) -> None:
    plan = make_plan(baton)["id"]
    assert (
        baton(
            "plans", "edit", plan, "--add", "0", "--worker", "rehearsal-sage", "--subtask", "Look.", "--access", "user"
        )[0]
        == 0
    )
    for arguments, expected, words in (
        (("edit", plan, "--revision", "1", "--remove", "0"), 1, "later revision"),
        (("edit", plan, "--change", "0", "--worker", "nobody"), 1, "not an eligible worker"),
        (("edit", plan, "--change", "0", "--remove", "1"), 2, "one of --change, --add, --remove, --move and --file"),
        (("edit", plan, "--file", "/nowhere.json"), 2, "/nowhere.json: cannot be used: No such file"),
        (("edit", plan, "--change", "0", "--access", "9" * 5000), 1, "edits[0].access[0]"),
        (("show", "plan_run_none"), 1, "There is no such plan"),
        (("run", plan, "--revision", "9"), 1, "no revision of that number"),
    ):
        status, output = baton("plans", *arguments)
        assert (status, words in output) == (expected, True), output


def test_a_plan_that_waits_for_an_approval_has_no_answer_yet(tmp_path: Path) -> None:
    pool = tmp_path / "pool.toml"
    pool.write_text(REHEARSAL.read_text() + "[tiers.baton-ultra.approval]\nalways = true\n")
    environ = processes.environment(tmp_path, BATON_REHEARSAL_DELAY="0", BATON_POOL=str(pool))
    with redirect_stdout(StringIO()) as out, redirect_stderr(StringIO()) as err:
        statuses = [main(words, environ) for words in (("migrate",), ("plans", "make", HARD), ("plans", "run", "last"))]
    assert statuses == [0, 0, 1]
    assert "waits for an approval; `baton approvals show run_" in err.getvalue()
    assert "{" not in out.getvalue()
