"""Plans carried out for a reward: by the real service in the rehearsal world, and what errors count for."""

import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from app.cli.embedded import process
from app.core.pool.catalog import Limits, Price
from app.errors import ConfigInvalid, WorkerUnavailable
from app.gateway.http.api_keys import mint
from app.lab import world_file
from app.lab.grading import grader
from app.lab.plan_execution import Executor, Place, PlanCache
from app.lab.plan_rewards import MAX_EQUAL_BATCHES, MAX_OUTAGE_BATCHES, Scorer
from app.lab.reward import MALFORMED
from app.lab.training_options import Recipe
from app.lab.training_questions import Question, Rule, draw_questions, draw_rules, of_rollouts, split_held_out
from app.lab.world import Weights, profiles
from app.process.wiring import Runtime
from tests.harness.in_process import running_service
from tests.harness.prepared_apps import lent_app
from tests.lab.test_rollouts import make_rollout

EMBER = {"subtask": "Solve the task step by step. Give the final answer.", "access": ["user"]}


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[Runtime]:
    async with running_service(tmp_path, world_file.pool_file(tuple(profiles().values()))) as running:
        yield running


def draw_batch(runtime: Runtime, count: int = 40, **changes: Any) -> list[Question]:
    catalog = runtime.pool.catalog()
    tier = catalog.tiers[world_file.TIER]
    pool = [catalog.workers[name] for name in tier.pool]
    options = {"random_pools": False, **changes}
    return list(draw_questions(draw_rules(60, 1), pool, tier.efforts["medium"], count, 2, **options))


async def place(runtime: Runtime) -> tuple[Place, httpx.ASGITransport]:
    key, row = mint(runtime.gateway.pepper, tenant="acme", name="trainer", scopes=["runs:write"], now=0.0)
    assert await runtime.gateway.store.add_key(row)
    return Place("http://baton", key, world_file.TIER), httpx.ASGITransport(lent_app(runtime.gateway))


def plan(question: Question, worker: str) -> str:
    return json.dumps({"steps": [{"worker": question.names.index(worker), **EMBER}]})


async def test_a_batch_is_rewarded_by_what_the_executor_made_of_it(runtime: Runtime) -> None:
    questions = draw_batch(runtime)
    where, transport = await place(runtime)
    lines: list[str] = []
    logged: dict[str, float] = {}
    scorer = Scorer(questions, where, Weights(), 0.0, lines.append, transport=transport)
    texts = [plan(question, "ember") for question in questions]
    completions = [[{"role": "assistant", "content": text}] for text in texts] + ["I would rather not.", "{"]
    rows = [*range(len(questions)), 0, 1]
    state = SimpleNamespace(global_step=3, max_steps=10)
    rewards = await scorer.executor_reward(completions, rows, trainer_state=state, log_metric=logged.__setitem__)
    assert rewards[-2:] == [MALFORMED, MALFORMED]
    right = [reward for reward in rewards[:-2] if reward]
    assert 10 < len(right) < len(questions), "the large generalist solves many and not all"
    assert all(reward == 0.0 or 0.6 < reward < 1 for reward in rewards[:-2] if reward is not None)
    assert scorer.carried == {"right": len(right), "wrong": len(questions) - len(right), "malformed": 2}
    assert logged["right"] == pytest.approx(len(right) / len(rows))
    assert logged["usd"] > 0
    assert lines[0].startswith(f"step 3: {len(rows)} plans: 2 malformed")


async def test_a_plan_is_bound_to_the_workers_that_were_shown(runtime: Runtime) -> None:
    questions = draw_batch(runtime, random_pools=True)
    assert {len(question.workers) for question in questions} >= {3, 8}
    small = next(question for question in questions if len(question.workers) == 3)
    where, transport = await place(runtime)
    async with Executor(where, transport) as executor:
        beyond = json.dumps({"steps": [{"worker": 3, **EMBER}]})
        assert (await executor.execute(small, beyond)).verdict == "malformed"
        good = await executor.execute(small, json.dumps({"steps": [{"worker": 2, **EMBER}]}))
        assert good.verdict in ("right", "wrong")
        (row,) = [await runtime.context.store.run(good.run)]
        assert row.state == "succeeded"
        journal = (await runtime.context.store.journal(good.run)).events
        assert sorted(journal[0].body["pool"]) == sorted(small.names)
        assert journal[1].body["order"]
        assert journal[0].body["conductor"] == "caller"


async def test_a_plan_that_waits_for_an_approval_has_no_verdict(tmp_path: Path) -> None:
    tier = f"[tiers.{world_file.TIER}]\n"
    pool = world_file.pool_file(tuple(profiles().values()))
    assert tier in pool
    pool = pool.replace(tier, f'{tier}approval = {{ workers = ["ember"] }}\n')
    async with running_service(tmp_path, pool) as runtime:
        [drawn] = draw_batch(runtime, 1)
        where, transport = await place(runtime)
        async with Executor(where, transport) as executor:
            result = await executor.execute(drawn, plan(drawn, "ember"))
        assert result.verdict == "outage"
        assert (await runtime.context.store.run(result.run)).state == "awaiting_approval"


async def test_another_tier_or_key_stops_training(runtime: Runtime) -> None:
    question = draw_batch(runtime, 1)[0]
    where, transport = await place(runtime)
    for wrong in (
        Place(where.url, where.key, "no-such-tier"),
        Place(where.url, "bt_nobody_0123456789abcdef", where.tier),
    ):
        async with Executor(wrong, transport) as executor:
            with pytest.raises(ConfigInvalid):
                await executor.execute(question, plan(question, "ember"))


def four(text: str) -> Rule:
    """A question whose answer is 4."""
    return Rule(({"role": "user", "content": text},), grader({"kind": "numeric", "expected": 4}), "")


def question(text: str = "What is 2 + 2?") -> Question:
    rule = four(text)
    worker: Any = SimpleNamespace(name="ember", model="large", price=Price(2, 3))
    return Question(rule, (worker,), Limits())


def replying(status: int, body: Any, **headers: str) -> httpx.MockTransport:
    return httpx.MockTransport(lambda _request: httpx.Response(status, json=body, headers=headers))


def reply(worker: str = "ember", degraded: bool = False) -> dict[str, Any]:
    body: dict[str, Any] = {"run": "run_1", "state": "succeeded", "degraded": degraded, "cost_usd": 0.001}
    body["steps"] = [{"worker": worker, "seconds": 1.5}]
    return {"choices": [{"message": {"content": "It is 4."}}], "baton": body}


def error(code: str) -> dict[str, Any]:
    return {"error": {"message": "No.", "code": code}}


def cut(_request: httpx.Request) -> httpx.Response:
    raise httpx.ConnectError("gone")


@pytest.mark.parametrize(
    ("transport", "verdict"),
    [
        (replying(200, reply()), "right"),
        (replying(200, reply(degraded=True)), "outage"),
        (replying(200, reply(worker="flint")), "outage"),
        (replying(429, error("rate_limited")), "outage"),
        (replying(429, error("run_over_budget")), "wrong"),
        (replying(502, error("run_failed")), "outage"),
        (replying(400, error("worker_refused"), **{"x-baton-run": "run_1"}), "outage"),
        (replying(400, error("context_length_exceeded")), "outage"),
        (replying(504, error("run_expired")), "outage"),
        (replying(503, "not even JSON's object"), "outage"),
        (httpx.MockTransport(cut), "outage"),
    ],
)
async def test_only_the_plan_is_blamed_for_what_is_its_own(transport: httpx.MockTransport, verdict: str) -> None:
    async with Executor(Place("http://baton", "key", "tier"), transport) as executor:
        result = await executor.execute(question(), json.dumps({"steps": [{"worker": 0, **EMBER}]}))
    assert result.verdict == verdict
    assert result.usd == (0.001 if verdict == "right" else 0.0)
    assert not result.told


async def test_plans_that_contain_the_conductors_own_answer_are_counted() -> None:
    logged: dict[str, float] = {}
    transport = replying(200, reply())
    scorer = Scorer([question()], Place("http://b", "k", "t"), Weights(), 0.0, lambda _: None, transport=transport)
    asks, tells = ({**EMBER, "subtask": text} for text in ("Add 2 and 2.", "Say that it is 4."))
    texts = [json.dumps({"steps": [{"worker": 0, **step}]}) for step in (asks, tells)]
    await scorer.executor_reward([*texts, "?", "?"], [0] * 4, log_metric=logged.__setitem__)
    assert logged["told"] == 0.25
    assert logged["executor_seconds"] > 0


@pytest.mark.parametrize(("asked", "micro", "batch"), [(400, 128, 100), (128, 4, 4), (9, 4, 3), (3, 4, 3), (1, 1, 1)])
def test_held_out_questions_are_looked_at_in_batches_of_one_size(asked: int, micro: int, batch: int) -> None:
    """TRL takes the mean of its batches' means: of 400 questions the last 16 would count as much as 128."""
    assert Recipe("model", micro=micro).held_out_batch(asked) == batch


def test_the_service_of_a_training_ends_with_the_training(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scheduler's SIGTERM ends the command; what carries out its plans must not run on without it."""
    started: Any = SimpleNamespace(terminate=lambda: ended.append(True), wait=lambda _seconds: 0)
    ended: list[bool] = []
    monkeypatch.setattr(process.subprocess, "Popen", lambda *_words, **_options: started)
    monkeypatch.setattr(process, "_wait_for_url", lambda *_: "http://127.0.0.1:1")
    before = signal.getsignal(signal.SIGTERM)

    def train() -> None:
        with process.service_process("", {}, runs=1):
            assert signal.getsignal(signal.SIGTERM) is not before, "else the signal would end these tests"
            os.kill(os.getpid(), signal.SIGTERM)

    with pytest.raises(SystemExit) as left:
        train()
    assert (left.value.code, ended) == (143, [True])
    assert signal.getsignal(signal.SIGTERM) is before


async def test_an_outage_gives_no_reward_and_a_lasting_one_ends_training() -> None:
    transport = replying(503, error("overloaded"))
    scorer = Scorer(
        [question()], Place("http://baton", "key", "tier"), Weights(), 0.0, lambda _: None, transport=transport
    )
    text = json.dumps({"steps": [{"worker": 0, **EMBER}]})
    for _ in range(MAX_OUTAGE_BATCHES - 1):
        assert await scorer.executor_reward([text, text, "?"], [0, 0, 0]) == [None, None, MALFORMED]
    assert await scorer.executor_reward(["?"], [0]) == [MALFORMED]
    for _ in range(MAX_OUTAGE_BATCHES - 1):
        assert await scorer.executor_reward([text], [0]) == [None]
    with pytest.raises(WorkerUnavailable):
        await scorer.executor_reward([text], [0])


async def test_a_conductor_with_one_plan_for_everything_has_collapsed() -> None:
    """Single plans and batches with a second plan are no sign of it."""
    lines: list[str] = []
    scorer = Scorer([question()], Place("http://b", "k", "t"), Weights(), 0.0, lines.append)
    for texts in (
        ["?", "?"],
        ["?", "!"],
        *[["?", "?"]] * (MAX_EQUAL_BATCHES - 1),
        ["?"],
        *[["?", "?"]] * (MAX_EQUAL_BATCHES - 1),
    ):
        await scorer.executor_reward(texts, [0] * len(texts))
        assert not scorer.collapsed
    await scorer.executor_reward(["?", "?"], [0, 0])
    assert scorer.collapsed
    assert sum("training ends here" in line for line in lines) == 1


async def test_a_plan_that_was_carried_out_before_is_known_from_the_file(tmp_path: Path) -> None:
    """Equal plans are carried out once, also at the same time and after a restart; outages are tried again."""
    posted: list[str] = []

    def carry_out(request: httpx.Request) -> httpx.Response:
        posted.append(json.loads(request.content)["messages"][0]["content"])
        return httpx.Response(
            503 if len(posted) == 1 else 200, json=error("overloaded") if len(posted) == 1 else reply()
        )

    file, logged = tmp_path / "known.jsonl", dict[str, float]()
    text, other = (json.dumps({"steps": [{"worker": 0, **EMBER, "subtask": words}]}) for words in ("Solve.", "Do."))
    for place, texts in enumerate(([text], [text, text, other], [text, other])):
        scorer = Scorer(
            [question()], Place("http://b", "k", "t"), Weights(), 0.0, lambda _: None,
            cache=PlanCache(file), transport=httpx.MockTransport(carry_out),
        )  # fmt: skip
        rewards = await scorer.executor_reward(texts, [0] * len(texts), log_metric=logged.__setitem__)
        assert len(posted) == (1, 3, 3)[place]
        assert [reward is None for reward in rewards] == [place == 0] * len(texts)
    assert logged["known"] == 1.0
    assert logged["usd"] > 0, "what it cost counts each time"
    ember: Any = SimpleNamespace(name="ember", model="large", price=Price(4, 6))
    dearer = replace(question(), workers=(ember,))
    again = Scorer(
        [dearer],
        Place("http://b", "k", "t"),
        Weights(),
        0.0,
        lambda _: None,
        cache=PlanCache(file),
        transport=httpx.MockTransport(carry_out),
    )
    await again.executor_reward([text], [0])
    assert len(posted) == 4, "at other prices it is another plan"
    file.write_bytes(file.read_bytes()[:-20])
    for expected in (5, 5):  # what was cut off is carried out again, and what was kept before is not
        again = Scorer(
            [question()],
            Place("http://b", "k", "t"),
            Weights(),
            0.0,
            lambda _: None,
            cache=PlanCache(file),
            transport=httpx.MockTransport(carry_out),
        )
        await again.executor_reward(
            [text, other, json.dumps({"steps": [{"worker": 0, **EMBER, "subtask": "New."}]})], [0, 0, 0]
        )
        assert len(posted) == expected
    (tmp_path / "else.txt").write_text("no JSON")
    with pytest.raises(ConfigInvalid, match="no file of carried out plans"):
        PlanCache(tmp_path / "else.txt")


async def test_held_out_questions_are_judged_by_the_whole_weights_and_teach_nothing() -> None:
    lines: list[str] = []
    state = SimpleNamespace(global_step=0, max_steps=10)
    text = json.dumps({"steps": [{"worker": 0, **EMBER}]})
    scorer = Scorer(
        [question(), question()], Place("http://b", "k", "t"), Weights(), 0.4, lines.append,
        held_out=1, transport=replying(200, reply()),
    )  # fmt: skip
    learned = await scorer.executor_reward([text], [0], trainer_state=state)
    judged = await scorer.executor_reward([text] * 3, [1] * 3, trainer_state=state)
    assert learned == [1.0], "cost does not count yet"
    assert judged[0] is not None
    assert judged[0] < 1.0
    assert not scorer.collapsed
    assert scorer.carried.total() == 1
    assert lines[-1].startswith("step 0: 3 held-out questions, reward 0.")


def test_questions_are_held_out_by_the_seed_and_at_most_a_tenth() -> None:
    rules = draw_rules(60, 1)
    learned, held_out = split_held_out(rules, 128, 7)
    assert (len(learned), len(held_out)) == (54, 6)
    assert not {rule.conversation[0]["content"] for rule in learned} & {
        rule.conversation[0]["content"] for rule in held_out
    }
    assert split_held_out(rules, 128, 7) == (learned, held_out)
    assert split_held_out(rules, 0, 7) == (rules, [])


def test_all_turns_of_a_conversation_and_equal_questions_are_on_one_side() -> None:
    rules = []
    for rule in draw_rules(60, 1):
        longer = (*rule.conversation, {"role": "assistant", "content": "Yes."}, {"role": "user", "content": "Sure?"})
        rules += [rule, replace(rule, conversation=longer), replace(rule)]
    learned, held_out = split_held_out(rules, 128, 7)
    assert (len(learned), len(held_out)) == (162, 18)
    learned_openings = {rule.conversation[0]["content"] for rule in learned}
    assert not learned_openings & {rule.conversation[0]["content"] for rule in held_out}


def test_a_question_under_several_system_prompts_is_on_one_side() -> None:
    rules = []
    for rule in draw_rules(60, 1):
        for date in ("Monday", "Tuesday", "Wednesday"):
            rules.append(replace(rule, conversation=({"role": "system", "content": date}, *rule.conversation)))
    learned, held_out = split_held_out(rules, 128, 7)
    assert (len(learned), len(held_out)) == (162, 18)
    learned_questions = {rule.conversation[1]["content"] for rule in learned}
    assert not learned_questions & {rule.conversation[1]["content"] for rule in held_out}


async def test_cost_counts_only_as_far_as_training_has_come() -> None:
    transport: Callable[[], httpx.MockTransport] = lambda: replying(200, reply())  # noqa: E731
    text = json.dumps({"steps": [{"worker": 0, **EMBER}]})
    rewards = []
    for step in (0, 2, 4, 9):
        scorer = Scorer(
            [question()], Place("http://b", "k", "t"), Weights(), 0.4, lambda _: None, transport=transport()
        )
        state = SimpleNamespace(global_step=step, max_steps=10)
        rewards += await scorer.executor_reward([text], [0], trainer_state=state)
    assert rewards[0] == 1.0
    assert rewards[0] > rewards[1] > rewards[2] == rewards[3]


def test_conversations_of_the_journal_are_asked_again_by_the_rules_of_a_task_set() -> None:
    rules = [four("What is  2 + 2?")]
    longer = make_rollout("What is 2 + 2?", None)
    held_out_rollout = replace(longer, split="held-out", conversation=(*longer.conversation, *longer.conversation))
    rules_of_journal = of_rollouts([longer, longer, held_out_rollout, make_rollout("Else?", None)], rules)
    assert [question.conversation for question in rules_of_journal] == [longer.conversation]
    assert rules_of_journal[0].grader.grade("4").score == 1


def test_questions_come_by_turns_and_depend_on_the_seed_alone() -> None:
    rules = draw_rules(5, 0)
    workers: Any = [SimpleNamespace(name=name) for name in "abcd"]

    def draw_names(seed: int) -> list[tuple[str, list[str]]]:
        drawn_questions = draw_questions(rules, workers, Limits(), 15, seed, random_pools=False)
        return [(question.rule.conversation[0]["content"], question.names) for question in drawn_questions]

    first = draw_names(1)
    assert first == draw_names(1) != draw_names(2)
    texts = [text for text, _ in first]
    assert all(texts.count(rule.conversation[0]["content"]) == 3 for rule in rules)
    assert len({tuple(names) for _, names in first}) > 3
