"""Journaled runs as the small conductor can imitate them: read back as they were, weighed, and the rest counted."""

import json
from collections import Counter
from collections.abc import Sequence
from random import Random
from typing import Any

import pytest
from msgspec.structs import replace

from app.conductor.protocol import Brief
from app.core.message.chat import Message, Task, Text
from app.core.pool.catalog import Card, Limits, Price, Worker
from app.errors import ConfigInvalid
from app.lab.journal_imitation import build_examples, digest_of, examples_for
from app.lab.plans import Plan, PlanStep
from app.lab.rollouts import Rollout, conductor_prompt, from_lines, plan_json, to_line
from app.lab.world import INPUT_SHARE, Pool, Weights, is_held_out, profiles, standard_pool
from app.providers.rehearsal.task_families import FAMILIES, Problem, write
from tests.lab.pure_execution import to_workflow

PLAN = (PlanStep(5, "plan"), PlanStep(1, "reason", True, (0,)))


def offer_workers(pool: Pool) -> tuple[Worker, ...]:
    """The workers of a pool as the service knows them."""
    cards = [Card(strengths=tuple(worker.strengths.split()), speed=worker.pace) for worker in pool]
    prices = [Price(int(worker.price * INPUT_SHARE * 1e6), int(worker.price * 1e6), 0) for worker in pool]
    return tuple(
        Worker(worker.name, "world", worker.name, price=price, card=card)
        for worker, price, card in zip(pool, prices, cards, strict=True)
    )


def rollout(problem: Problem, plan: Plan, score: float | None, pool: Pool | None = None, **more: Any) -> Rollout:
    """Return the rollout of a run over this pool, whose places are the ordinals."""
    pool = pool or standard_pool()
    names = tuple(worker.name for worker in pool)
    conversation = ({"role": "user", "content": problem.text},)
    task = Task((Message("user", (Text(problem.text),)),))
    prompt = conductor_prompt(Brief(task, offer_workers(pool), Limits(), Limits().usd))
    completion = plan_json(to_workflow(plan, names).steps, names)
    values = (
        "r",
        0.0,
        "t",
        "model",
        "train",
        conversation,
        prompt,
        completion,
        names,
        "p",
        len(plan),
        0.0006,
        1.0,
        score,
    )
    return replace(Rollout(*values), **more)


def problem(family: int = 0, phrasing: int = 0, seed: int = 1) -> Problem:
    return write(Random(seed), FAMILIES[family], 1, phrasing)


def read(*rollouts: Rollout) -> tuple[list[Any], Counter[str]]:
    """Through the file, as the command reads them."""
    return build_examples(list(from_lines(map(to_line, rollouts))), Weights())


def test_a_run_is_read_back_as_it_was() -> None:
    dear = tuple(replace(worker, price=worker.price * 2) for worker in standard_pool()[::-1])
    ((example,), skipped) = read(rollout(problem(), PLAN, 1.0, dear))
    assert (example.problem, example.pool, example.plan, example.weight) == (problem(), dear, PLAN, 1.0)
    assert not skipped


def test_the_pool_is_shown_in_another_order_each_time_and_the_plan_follows() -> None:
    ((example,), _) = read(rollout(problem(), PLAN, 1.0))
    random = Random(0)
    lessons = [example.lesson(random) for _ in range(40)]
    assert len({lesson.order for lesson in lessons}) > 30
    assert {lesson.pool for lesson in lessons} == {standard_pool()}


@pytest.mark.parametrize(
    ("unusable", "reason"),
    [
        (rollout(problem(), PLAN, 1.0, split="held-out"), "it is held out"),
        (rollout(problem(), PLAN, None), "nobody has rated it"),
        (rollout(problem(phrasing=4), PLAN, 1.0), "its task is kept for examinations"),
        (rollout(problem(family=2), PLAN, 1.0), "its task is kept for examinations"),
        (
            rollout(replace(problem(), text="Why is the sky blue?"), PLAN, 1.0),
            "its task is none of the world's",
        ),
        (rollout(problem(), PLAN, 1.0, workers=("a", "b")), "its pool has workers that are not of the world"),
        (rollout(problem(), PLAN, 1.0, workers=tuple(profiles())), "its pool has more than 6 workers"),
        (rollout(problem(), PLAN, 1.0, completion="{}"), "its plan is none that the small conductor can write"),
        (
            rollout(problem(), PLAN, 1.0, completion='{"steps":[]}'),
            "its plan is none that the small conductor can write",
        ),
        (
            rollout(problem(), PLAN, 1.0, workers=tuple(worker.name for worker in standard_pool()[:3])),
            "its plan names a worker that was not offered",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_learned_from_is_left_out_by_its_reason(unusable: Rollout, reason: str) -> None:
    examples, skipped = read(unusable, rollout(problem(), PLAN, 1.0))
    assert len(examples) == 1
    assert skipped == {reason: 1}


def test_a_pool_that_is_kept_for_examinations_is_left_out() -> None:
    names = list(profiles())
    pool_kept_apart = next(pool for n in range(3, 7) for pool in [names[n - 3 : n]] if is_held_out(pool))
    pool = tuple(profiles()[name] for name in pool_kept_apart)
    examples, skipped = read(rollout(problem(), (PlanStep(0, "solve"),), 1.0, pool))
    assert (examples, skipped) == ([], {"its pool is kept for examinations": 1})


@pytest.mark.parametrize(
    "change",
    [
        {"worker": 6},
        {"subtask": "Solve it."},
        {"access": ["user", 1]},
        {"access": ["previous"]},
        {"access": []},
        {"tools": True},
    ],
    ids=str,
)
def test_a_plan_of_another_grammar_is_left_out(change: dict[str, Any]) -> None:
    usable = rollout(problem(), PLAN, 1.0)
    steps = json.loads(usable.completion)["steps"]
    changed = json.dumps({"steps": [steps[0], steps[1] | change]})
    assert read(replace(usable, completion=changed))[1] == {"its plan is none that the small conductor can write": 1}


def test_the_weights_are_those_of_the_advantage() -> None:
    right, wrong = rollout(problem(), PLAN, 1.0), rollout(problem(), (PlanStep(0, "solve"),), 0.0)
    examples, _ = read(right, wrong, rollout(problem(seed=2), PLAN, None))
    assert examples[0].weight > 5 * examples[1].weight
    assert sum(run.weight for run in examples) == pytest.approx(2)
    assert digest_of(examples) != digest_of(examples[::-1])
    assert digest_of([]) == ""


def lines_of_examples(rollouts: Sequence[Rollout]) -> list[str]:
    lines: list[str] = []
    examples_for(rollouts, Weights(), 0.3, lines.append)
    return lines


def test_what_is_left_out_is_said_and_nothing_at_all_is_an_error() -> None:
    some = [rollout(problem(seed=n), PLAN, float(n % 2)) for n in range(4)]
    lines = lines_of_examples([*some, rollout(problem(phrasing=4), PLAN, 1.0)])
    assert lines[0].startswith("4 of 5 rollouts are imitated, by their weights worth ")
    assert lines[1:] == ["left out: 1, because its task is kept for examinations"]
    with pytest.raises(ConfigInvalid, match="from none of these"):
        lines_of_examples([rollout(problem(), PLAN, None)])
