"""From the journal to rollouts: the very prompt, the plan by ordinal, what it was worth, nobody who has not agreed."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from app.cli.arguments import Arguments
from app.cli.commands import parse
from app.cli.learning import rollouts as command
from app.cli.learning import task_set, train_chat
from app.core.message.chat import Message, Task, Text
from app.core.rating.feedback import Feedback, identify
from app.core.run.events import Kind
from app.errors import ConfigInvalid
from app.lab.journal_rollouts import RolloutFilter, score_of
from app.lab.offpolicy import effective_size
from app.lab.rollouts import (
    Rollout,
    advantage_weighted,
    from_lines,
    right_examples,
    split,
    to_line,
)
from app.lab.world import Weights
from app.process.wiring import Runtime
from tests.harness.in_process import finish, limits_with, order, plan_text, pool_text, running_service
from tests.stubs import Fail, ProviderStub, Reply

PLAN = plan_text((1, "Draft it.", ["user"]), (0, "Finish it.", ["user", 0]))
AGREED = RolloutFilter(consent=None)


@pytest.fixture
async def stub() -> AsyncIterator[ProviderStub]:
    async with ProviderStub() as running:
        running.always("planner", Reply(chunks=(PLAN,)))
        yield running


@pytest.fixture
async def runtime(stub: ProviderStub, tmp_path: Path) -> AsyncIterator[Runtime]:
    text = pool_text(stub).replace('strengths = ["general"]', 'strengths = ["general"]\nclearance = ["study", "phi"]')
    async with running_service(tmp_path, text) as running:
        yield running


async def ask(runtime: Runtime, text: str = "Why?", tier: str = "baton-ultra", **changes: Any) -> str:
    return (await finish(await runtime.runs.start(order(runtime, tier, text, **changes)))).ended.state.run


async def rate(runtime: Runtime, run: str, score: float, kind: str = "grader") -> None:
    rating = Feedback("", run, "tenant", "", 5.0, kind, "exact", "1", score)  # type: ignore[arg-type]
    await runtime.context.store.rate(identify(rating))


async def collect(runtime: Runtime, rollout_filter: RolloutFilter = AGREED) -> tuple[list[Rollout], Counter[str]]:
    return await command.collect(runtime.pool.configuration.settings, rollout_filter, None)


async def test_a_conductor_that_might_take_steps_itself_is_another_one(runtime: Runtime) -> None:
    limits = limits_with(runtime, "baton-nested", rounds=1)
    await ask(runtime, tier="baton-nested", limits=limits)
    assert await collect(runtime) == ([], Counter({"its conductor might take steps itself": 1}))


async def test_a_rollout_has_the_very_prompt_and_the_plan_as_it_was_written(
    runtime: Runtime, stub: ProviderStub
) -> None:
    run = await ask(runtime)
    await rate(runtime, run, 1.0)
    ((rollout,), skipped) = await collect(runtime)
    body_sent = json.loads(stub.requests_for("planner")[0].body)
    assert [dict(turn) for turn in rollout.prompt] == [
        {"role": turn["role"], "content": turn["content"]} for turn in body_sent["messages"]
    ]
    assert json.loads(rollout.completion) == json.loads(PLAN)
    assert " " not in rollout.completion.replace("Draft it.", "").replace("Finish it.", ""), "as servers decode it"
    assert (rollout.run, rollout.steps, rollout.score, rollout.verdict) == (run, 2, 1.0, "right")
    journal = (await runtime.context.store.journal(run)).events
    order_shown = next(event.body["order"] for event in journal if event.kind is Kind.PLAN_OPENED)
    assert list(rollout.workers) == order_shown
    steps = [event.body for event in journal if event.kind is Kind.CALL_FINISHED][1:]
    assert rollout.usd == pytest.approx(sum(body["usd"] for body in steps) / 1e6)
    assert rollout.usd > 0
    assert not skipped
    line = to_line(rollout)
    assert list(from_lines([line, ""])) == [rollout]
    assert "tenant" not in line.replace("content", "")


async def test_a_long_message_stands_in_a_rollout_as_the_conductor_was_shown_it(
    runtime: Runtime, stub: ProviderStub
) -> None:
    await ask(runtime, "# A heading\n" + "Words and words.\n" * 1_000)
    ((rollout,), _) = await collect(runtime)
    body_sent = json.loads(stub.requests_for("planner")[0].body)
    assert [turn["content"] for turn in rollout.prompt] == [turn["content"] for turn in body_sent["messages"]]


async def test_a_plan_that_no_model_wrote_is_shown_over_shuffled_ordinals(runtime: Runtime) -> None:
    """So it teaches the same prompt; and the worker's name stands nowhere in what is learned."""
    for n in range(8):
        await ask(runtime, f"Why {n}?", "baton-mini")
    rollouts, _ = await collect(runtime)
    assert len({json.loads(rollout.completion)["steps"][0]["worker"] for rollout in rollouts}) > 1
    for read_rollout in rollouts:
        assert read_rollout.workers[json.loads(read_rollout.completion)["steps"][0]["worker"]] == "alpha"
        assert "alpha" not in read_rollout.completion + "".join(turn["content"] for turn in read_rollout.prompt)


async def test_only_who_has_agreed_is_learned_from(runtime: Runtime) -> None:
    by_label = await ask(runtime, labels=frozenset({"study"}))
    words = (Message("user", (Text("And?"),)),)
    by_word = await ask(runtime, task=Task(words, metadata={"study": "Yes"}))
    refused = await ask(runtime, task=Task(words, metadata={"study": "no"}))
    silent = await ask(runtime, "Or?")
    private = await ask(runtime, labels=frozenset({"study", "phi"}))
    rollouts, skipped = await collect(runtime, RolloutFilter("study", frozenset({"phi"})))
    assert {rollout.run for rollout in rollouts} == {by_label, by_word}
    assert skipped == {"its caller has not agreed": 2, "it has the label phi": 1}
    everybody, _ = await collect(runtime)
    assert {rollout.run for rollout in everybody} == {by_label, by_word, refused, silent, private}
    await runtime.context.store.erase(by_label)
    rollouts, skipped = await collect(runtime, RolloutFilter("study"))
    assert {rollout.run for rollout in rollouts} == {by_word, private}
    assert skipped["its content was erased"] == 1


async def test_an_outage_teaches_nothing(runtime: Runtime, stub: ProviderStub) -> None:
    stub.always("alpha", Fail(status=401))
    await ask(runtime, "Why?", "baton-mini")
    stub.always("planner", Fail(status=401))
    await ask(runtime, "How?")
    rollouts, skipped = await collect(runtime)
    assert not rollouts
    assert sum(skipped.values()) == 2
    assert set(skipped) <= {"another worker stood in for a planned one", "a fallback decided, or a worker was out"}


async def test_the_command_writes_a_private_file_and_asks_for_consent(
    runtime: Runtime, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    await ask(runtime)
    await rate(runtime, await ask(runtime, "How?"), 0.0)
    path = tmp_path / "out.jsonl"
    environ = {"BATON_DATA_DIR": str(tmp_path), "BATON_PEPPER": "p" * 32}

    async def run_command(*options: str) -> int:
        asked = parse(["rollouts", str(path), *options])
        return await asyncio.to_thread(command.run, asked, environ, lambda: 2e9)

    with pytest.raises(ConfigInvalid, match="--consent"):
        await run_command()
    with pytest.raises(ConfigInvalid, match="--consent"):
        await run_command("--consent", "study", "--everybody")
    assert await run_command("--everybody", "--rated") == 0
    (rollout,) = from_lines(path.read_text().splitlines())
    assert (rollout.verdict, rollout.conversation[0]["content"]) == ("wrong", "How?")
    assert path.stat().st_mode & 0o77 == 0
    assert "left out: 1, because nobody has rated it" in capsys.readouterr().out
    written = path.read_bytes()
    assert await run_command("--consent", "study") == 1, "no caller has agreed to that"
    assert path.read_bytes() == written
    output = capsys.readouterr().out
    assert "was not written" in output
    assert "Wrote" not in output


def test_all_runs_of_a_conversation_are_on_one_side() -> None:
    talks = [({"role": "user", "content": f"Question {n}"},) for n in range(2_000)]
    sides = Counter(split(talk, 0.2) for talk in talks)
    assert 300 < sides["held-out"] < 500
    for talk in talks[:50]:
        longer = (*talk, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Sure?"})
        assert split(longer, 0.2) == split(talk, 0.2)


def test_rules_come_before_what_callers_say_and_signs_say_nothing() -> None:
    def feedback(kind: Any, score: float | None, source: str = "s", version: str = "1") -> Feedback:
        return Feedback("f", "r", "t", "", 1.0, kind, source, version, score=score)

    assert score_of([feedback("implicit", None)]) == (None, "")
    assert score_of([feedback("explicit", 0.0), feedback("explicit", 1.0)])[0] == 1.0
    assert score_of([feedback("explicit", 0.0), feedback("grader", 1.0), feedback("grader", 0.5, "other")])[0] == 0.75
    assert score_of([feedback("grader", 0.0), feedback("grader", 1.0, version="2")]) == (1.0, "grader s 2")


def make_rollout(question: str, score: float | None, usd: float = 0.0) -> Rollout:
    conversation = ({"role": "user", "content": question},)
    return Rollout("r", 0.0, "t", "fixed", "train", conversation, conversation, "{}", ("a",), "p", 1, usd, 0.0, score)


def test_weights_grow_with_the_advantage_and_are_capped() -> None:
    free = Weights()
    rollouts = [
        make_rollout("a", 1.0),
        make_rollout("a", 1.0, 0.006),
        make_rollout("a", 0.0),
        make_rollout("b", 1.0),
        make_rollout("c", None),
    ]
    examples = advantage_weighted(rollouts, free, 0.3, 20.0)
    assert len(examples) == 4
    cheap, dear, wrong, _ = (example.weight for example in examples)
    assert cheap > dear > wrong > 0
    assert sum(example.weight for example in examples) == pytest.approx(4)
    tight = [example.weight for example in advantage_weighted(rollouts, free, 0.01, 5.0)]
    assert max(tight) / sorted(tight)[-2] == pytest.approx(1.0)
    steep = [example.weight for example in advantage_weighted(rollouts, free, 1e-6, 5.0)]
    assert max(steep) == pytest.approx(tight[0], rel=0.2), "no weight is too large for a float"
    assert 1 <= effective_size([example.weight for example in examples]) < 4
    assert [example.weight for example in right_examples(rollouts)] == [1.0] * 3
    assert advantage_weighted([make_rollout("c", None)], free, 0.3, 20.0) == []


def test_a_line_of_another_schema_is_refused() -> None:
    line = to_line(replace(make_rollout("a", 1.0), schema="rollout-0"))
    with pytest.raises(ValueError, match="line 2 is no rollout"):
        list(from_lines([to_line(make_rollout("a", 1.0)), line]))


def test_every_option_that_chooses_runs_reaches_the_choice() -> None:
    options = Arguments(
        consent="study", everybody=False, without=["phi"], held_out=0.3, tier="t", tenant="n", rated=True
    )
    assert command.rollout_filter(options) == RolloutFilter("study", frozenset({"phi"}), 0.3, "t", "n", True)


def test_a_task_may_have_any_separator_of_lines_that_json_leaves_as_it_is(tmp_path: Path) -> None:
    question = "a\u2028b\u2029c\x85d"
    line = json.dumps({"question": question, "grader": {"kind": "exact", "expected": "x"}}, ensure_ascii=False)
    (tmp_path / "t.jsonl").write_text(f"{line}\r\n", encoding="utf-8")
    faults: list[str] = []
    assert [task.question for task in task_set.read(tmp_path / "t.jsonl", None, faults)] == [question]
    assert not faults


def test_a_rollout_may_have_any_separator_of_lines(tmp_path: Path) -> None:
    turns = ({"role": "user", "content": "a\u2028b\u2029c\x85d"},)
    kept = Rollout("r", 1.0, "t", "c", "train", turns, turns, "{}", ("w",), "p", 1, 0.0, 0.0)
    (tmp_path / "r.jsonl").write_text(f"{to_line(kept)}\n{to_line(kept)}\n", encoding="utf-8")
    assert train_chat._read(str(tmp_path / "r.jsonl"), "--warm-start") == [kept, kept]
