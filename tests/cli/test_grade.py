"""`baton grade` over a journal that the real service wrote: what is graded, what is noted, and that twice is once."""

import asyncio
import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from app.cli.commands import parse
from app.cli.learning import grade, task_set
from app.core.rating.feedback import Feedback
from app.errors import ConfigInvalid
from app.process.wiring import Runtime
from tests.harness.in_process import finish, order, pool_text, running_service
from tests.stubs import Fail, Hang, ProviderStub, Reply

SIX, TEN = "What is 2 * 3?", "What is 2 * 5?"


@pytest.fixture
async def stub() -> AsyncIterator[ProviderStub]:
    async with ProviderStub() as running:
        running.always("alpha", Reply(chunks=("The answer is 6.",)))
        yield running


@pytest.fixture
async def runtime(stub: ProviderStub, tmp_path: Path) -> AsyncIterator[Runtime]:
    async with running_service(tmp_path, pool_text(stub)) as running:
        yield running


async def ask(runtime: Runtime, text: str = SIX, **changes: Any) -> str:
    return (await finish(await runtime.runs.start(order(runtime, "baton-mini", text, **changes)))).ended.state.run


async def run_grade(folder: Path, capsys: pytest.CaptureFixture[str], *arguments: str) -> Any:
    """Return the JSON that the command prints."""
    environ = {"BATON_DATA_DIR": str(folder), "BATON_PEPPER": "p" * 32}
    options = parse(["grade", *arguments, "--json"])
    capsys.readouterr()
    assert await asyncio.to_thread(grade.run, options, environ, lambda: 2e9) == 0
    return json.loads(capsys.readouterr().out)


def tasks(folder: Path, *lines: object) -> str:
    path = folder / "tasks.jsonl"
    path.write_text("\n\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return str(path)


def task(question: str, expected: int) -> dict[str, Any]:
    return {"id": 1, "question": question, "grader": {"kind": "numeric", "expected": expected}}


def regex(pattern: str) -> str:
    return json.dumps({"kind": "regex", "pattern": pattern})


async def feedback_of(runtime: Runtime, run: str) -> list[Feedback]:
    return list(await runtime.context.store.feedback(run))


@pytest.mark.long
async def test_answers_are_graded_by_the_rule_of_their_question(
    runtime: Runtime, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    right, wrong, other = await ask(runtime, f" {SIX}\n"), await ask(runtime, TEN), await ask(runtime, "Who?")
    file = tasks(tmp_path, task(SIX, 6), task(TEN, 10))
    assert len(await run_grade(tmp_path, capsys, "--tasks", file, "--dry-run")) == 2
    assert not await feedback_of(runtime, right)
    for _ in range(2):  # twice is once
        ratings = await run_grade(tmp_path, capsys, "--tasks", file)
        assert {rating["run"]: rating["score"] for rating in ratings} == {right: 1.0, wrong: 0.0}
    [stored_rating] = await feedback_of(runtime, right)
    assert (
        stored_rating.kind,
        stored_rating.source,
        stored_rating.version,
        stored_rating.score,
        stored_rating.tenant,
        stored_rating.key,
    ) == (
        "grader",
        "numeric",
        "grading-2",
        1.0,
        "tenant",
        "",
    )
    assert not await feedback_of(runtime, other)
    another = '{"kind": "numeric", "expected": 7}'
    await run_grade(tmp_path, capsys, "--grader", another, "--run", right)
    assert sorted(rating.score or 0.0 for rating in await feedback_of(runtime, right)) == [0.0, 1.0], (
        "another rule, another rating"
    )


async def test_several_rules_of_one_kind_for_a_run_are_one_rating_with_their_mean(
    runtime: Runtime, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of one source the latest rating counts, so that one of the rules would not."""
    run = await ask(runtime)
    rules = [argument for pattern in ("6", "7", "8", "6") for argument in ("--grader", regex(pattern))]
    for _ in range(2):
        ratings = await run_grade(tmp_path, capsys, *rules, "--grader", '{"kind": "numeric", "expected": 6}')
        assert {rating["source"]: rating["score"] for rating in ratings} == {
            "regex": pytest.approx(1 / 3),
            "numeric": 1,
        }
    assert sorted((rating.source, rating.score or 0.0) for rating in await feedback_of(runtime, run)) == [
        ("numeric", 1.0),
        ("regex", pytest.approx(1 / 3)),
    ]


async def test_a_rating_has_the_time_when_it_was_stored(
    runtime: Runtime, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Selectors learn no rating that comes more than some seconds later than its time says."""
    run = await ask(runtime)
    environ = {"BATON_DATA_DIR": str(tmp_path), "BATON_PEPPER": "p" * 32}
    times = iter((2e9, 2e9 + 60))
    options = parse(["grade", "--grader", regex("6"), "--json"])
    assert await asyncio.to_thread(grade.run, options, environ, lambda: next(times)) == 0
    assert [rating.at for rating in await feedback_of(runtime, run)] == [2e9 + 60]


@pytest.mark.long
async def test_only_answers_are_graded(
    stub: ProviderStub, runtime: Runtime, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An outage is no wrong answer, nor is a plan one, nor what was erased."""
    erased = await ask(runtime)
    await runtime.context.store.erase(erased)
    await ask(runtime, preview=True)
    stub.always("*", Fail(status=400))
    stub.always("alpha", Fail(status=400))
    await ask(runtime)
    assert await run_grade(tmp_path, capsys, "--grader", '{"kind": "exact", "expected": "6"}') == []


async def test_who_asks_for_a_plan_asks_for_no_other_answer(
    runtime: Runtime, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await ask(runtime)
    await ask(runtime, preview=True)
    assert await run_grade(tmp_path, capsys, "--signs") == []
    again = await ask(runtime, TEN)
    await ask(runtime, preview=True)
    await ask(runtime, TEN)
    ratings = await run_grade(tmp_path, capsys, "--signs")
    assert [(rating["run"], rating["label"]) for rating in ratings] == [(again, "regenerated")]


@pytest.mark.long
async def test_what_callers_did_is_kept_apart(
    stub: ProviderStub, runtime: Runtime, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first, again, other = await ask(runtime), await ask(runtime), await ask(runtime, TEN)
    stopped = {}
    for by in ("client", "caller", "operator"):
        stub.script("alpha", Hang())
        before = len(stub.requests_for("alpha"))
        followed_run = await runtime.runs.start(order(runtime, "baton-mini", f"Stopped by the {by}"))
        await stub.wait_for(before + 1, "alpha")
        runtime.runs.cancellations.ask(followed_run.run, by)
        await finish(followed_run)
        stopped[by] = followed_run.run
    for _ in range(2):
        ratings = await run_grade(tmp_path, capsys, "--signs")
        assert {rating["run"]: rating["label"] for rating in ratings} == {
            first: "regenerated",
            stopped["client"]: "abandoned",
            stopped["caller"]: "cancelled",
        }
    assert not await feedback_of(runtime, again)
    assert not await feedback_of(runtime, other)
    [stored_rating] = await feedback_of(runtime, first)
    assert (stored_rating.kind, stored_rating.score, stored_rating.version) == ("implicit", None, "signs-1")
    assert await run_grade(tmp_path, capsys, "--signs", "--tier", "baton-ultra") == []


async def test_a_shadow_is_no_question_asked_again(
    runtime: Runtime, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    first = (await finish(await runtime.runs.start(order(runtime, "baton-mini")))).ended.state.run
    again = order(runtime, "baton-mini", origin_kind="shadow", origin_run=first)
    await finish(await runtime.runs.start(again))
    assert await run_grade(tmp_path, capsys, "--signs") == []


async def test_questions_asked_side_by_side_are_not_asked_again(
    stub: ProviderStub, runtime: Runtime, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    stub.always("alpha", Reply(header_delay=0.3))
    driven = [await runtime.runs.start(order(runtime, "baton-mini")) for _ in range(3)]
    for run in driven:
        await finish(run)
    assert await run_grade(tmp_path, capsys, "--signs") == []


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        (["{"], "tasks.jsonl:1: is not JSON"),
        ([], "tasks.jsonl: there is no task in it"),
        ([{"question": "\ud800", "grader": {"kind": "exact", "expected": "x"}}], "tasks.jsonl:1: is not JSON: no low"),
        ([{"question": "x", "grader": {"kind": []}}], "tasks.jsonl:1: a grader must be an object whose kind is one of"),
        ([task(SIX, 6), {"grader": {}}], "tasks.jsonl:3: is no task"),
        ([{"question": "x"}], "tasks.jsonl:1: a grader must be an object"),
        ([{"question": " ", "grader": {"kind": "exact", "expected": "x"}}], "tasks.jsonl:1: is no task"),
        ([{"question": "x", "grader": {"kind": "regex", "pattern": "("}}], "tasks.jsonl:1: a regex grader needs"),
    ],
)
def test_faults_of_a_file_are_told_by_line(tmp_path: Path, lines: list[object], words: str) -> None:
    options = parse(["grade", "--tasks", tasks(tmp_path, *lines)])
    with pytest.raises(ConfigInvalid) as caught:
        grade.run(options, {"BATON_DATA_DIR": str(tmp_path)}, lambda: 0.0)
    assert words in caught.value.faults[0]


def test_a_file_of_a_windows_editor_is_read(tmp_path: Path) -> None:
    lines = ['{"question": "2 + 2?", "grader": {"kind": "numeric", "expected": 4}}', ""]
    path = tmp_path / "tasks.jsonl"
    path.write_bytes("\r\n".join(lines).encode("utf-8-sig"))
    faults: list[str] = []
    assert [task.question for task in task_set.read(path, None, faults)] == ["2 + 2?"]
    assert faults == []


@pytest.mark.parametrize("arguments", [[], ["--tasks", "/nowhere"], ["--grader", "42"], ["--grader", "{"]])
def test_a_command_that_looks_for_nothing_is_refused(tmp_path: Path, arguments: list[str]) -> None:
    with pytest.raises(ConfigInvalid):
        grade.run(parse(["grade", *arguments]), {"BATON_DATA_DIR": str(tmp_path)}, lambda: 0.0)


async def test_a_person_is_told_in_a_table(
    runtime: Runtime, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await ask(runtime)
    environ = {"BATON_DATA_DIR": str(tmp_path), "BATON_PEPPER": "p" * 32}
    options = parse(["grade", "--grader", '{"kind": "numeric", "expected": 6}', "--dry-run"])
    assert await asyncio.to_thread(grade.run, options, environ, lambda: 2e9) == 0
    output = capsys.readouterr().out
    for words in ("grader", "numeric", "grading-2", "1.000", "Nothing was stored (--dry-run)."):
        assert words in output
