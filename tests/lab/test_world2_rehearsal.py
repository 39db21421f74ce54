"""The rehearsal pool over world 2: its profiles, its learned conductor, and what that is worth beside fixed plans."""

import json
import subprocess
import sys
from importlib.resources import files

import pytest

from app.core.message.chat import Message, Text
from app.core.plan import pricing
from app.core.plan.proposals import schema
from app.core.pool.catalog import Limits
from app.lab.world2 import constants, tasks
from app.lab.world2.execution import role_of
from app.lab.world2.provider import SecondWorld, rehearsal_workers, service_tasks, text_with_document
from app.lab.world2.rehearsal import compare_policies
from app.lab.world2.shipped import STRENGTHS
from app.process.config import configure
from app.providers.rehearsal import planner, policy

CARDS = "\n".join(
    f"Worker {n}: strengths: {STRENGTHS[name]}; price per million tokens: ${able.price / 5:g} in, ${able.price:g} out"
    for n, (able, name) in enumerate(reversed(rehearsal_workers()))
)
"""The cards in another order than the policy has them in."""


def plan_for(question: str, usd: float = 1.0, most: int = 5) -> list[planner.Choice]:
    request_prompt = f"<question>\nuser: {question}\n</question>\n\nBudget left: ${usd:.4f}."
    prompt = (Message("system", (Text(f"Workers:\n{CARDS}"),)), Message("user", (Text(request_prompt),)))
    plan_text = planner.plan(prompt, schema(5, most, 600))
    assert plan_text is not None
    return plan_text


def test_the_rehearsal_pool_has_the_profiles_of_its_cast_at_their_prices() -> None:
    workers = configure({"BATON_DATA_DIR": "."}).catalog.workers
    for profile, name in rehearsal_workers():
        worker = workers[f"rehearsal-{name}"]
        assert worker.model == name
        assert worker.price.output == round(1e6 * profile.price)
        assert worker.price.input == round(1e6 * profile.price * constants.constants().input_share)
        assert worker.card.context == profile.card.context
        assert worker.card.speed == profile.card.speed
        assert (worker.card.retention == "none") is not profile.card.retains
        assert ", ".join(worker.card.strengths) == STRENGTHS[name]


def test_the_shipped_policy_says_what_it_was_learned_from() -> None:
    policy_file = json.loads(files("app.providers.rehearsal").joinpath("policy.json").read_text())
    assert policy_file["constants"] == constants.FROZEN
    assert policy_file["families"] == tasks.FROZEN_FAMILIES
    assert policy_file["workers"] == list(STRENGTHS.values())
    assert policy_file["learned_from"]["verdicts"] == 64_000


def test_the_conductor_is_more_accurate_than_tuned_plans_for_half_of_a_mixtures_tokens() -> None:
    by_name = {
        row.name: row
        for row in compare_policies(service_tasks("fresh")[:80], tasks.draw_tasks("train", "rehearsal validation", 20))
    }
    ours, mixture = by_name["rehearsal conductor"], by_name["mixture of agents"]
    for name in ("best single worker", "mixture of agents", "planner-executor-checker", "best fixed plan by reward"):
        assert ours.right.mean() > by_name[name].right.mean(), name
        assert ours.reward > by_name[name].reward, name
    assert ours.tokens < mixture.tokens / 2


def test_a_long_document_is_read_by_one_worker_alone() -> None:
    task = next(task for task in service_tasks("fresh") if task.document == 2)
    steps = plan_for(text_with_document(task))
    assert len(steps) > 1
    assert [("user" in step.access) for step in steps] == [True] + [False] * (len(steps) - 1)
    assert role_of(steps[0].subtask) == "digest"


def test_the_conductor_counts_as_budgets_do() -> None:
    assert policy.FRAME_BYTES == pricing.FRAME_BYTES
    assert pricing.step_bytes_at_floor(policy.FLOOR) == policy.SEEN_BYTES
    assert Limits().floor == policy.FLOOR


def test_the_plan_gets_cheaper_with_the_money() -> None:
    task = next(task for task in service_tasks("fresh") if task.document == 0 and len(task.parts) == 2)
    counts = [len(plan_for(task.text, usd)) for usd in (1.0, 0.003)]
    assert counts[1] < counts[0]
    assert len(plan_for(task.text, most=1)) == 1
    assert len(plan_for(task.text, usd=0.0)) == 1, "too little for any plan that was learned: one worker answers"


@pytest.mark.parametrize(("words", "role"), [
    ("Write a plan for the task. Do not solve it.", "plan"),
    ("Work out how to solve the task, step by step. Do not solve it yet.", "plan"),
    ("Solve the task by following the plan. Give the complete final answer.", "reason"),
    ("Check the answer against the task and correct what is wrong.", "check"),
    ("Several experts have answered the task. Weigh their answers against each other.", "combine"),
    ("Summarise what the task needs.", "digest"),
    ("Work out the first part only, step by step.", "first"),
    ("Answer the user.", "solve"),
])  # fmt: skip
def test_workers_read_from_its_words_what_a_subtask_asks_for(words: str, role: str) -> None:
    assert role_of(words) == role


def test_ordinary_questions_are_none_of_those_that_the_policy_knows() -> None:
    assert policy.familiarity("What is 15% of 80?") == 0
    assert policy.familiarity("Solve 3(x + 2) = 2x + 11") == 0
    fresh = service_tasks("fresh")[:50]
    assert sum(policy.familiarity(task.text) > policy.SURE for task in fresh) > 45


def test_a_worker_of_the_pool_answers_by_its_profile_and_is_asked_the_rest_as_before() -> None:
    world, task = SecondWorld("0"), service_tasks("fresh")[0]
    messages = (Message("user", (Text(text_with_document(task)),)),)
    answers = {world.answer("lawyer", messages, seed=7) for _ in range(3)}
    assert len(answers) == 1, "a request with a seed of its own always gets the same answer"
    cut = world.answer("lawyer", messages, most=10)
    assert cut is not None
    assert (cut.finish, cut.output_tokens) == ("length", 10)
    assert world.answer("lawyer", (Message("user", (Text("What is 17 * 23?"),)),)) is None


def test_the_rehearsal_pool_needs_no_numpy() -> None:
    loaded = "import sys, app.lab.provider; print('numpy' in sys.modules)"
    process = subprocess.run([sys.executable, "-c", loaded], capture_output=True, text=True, check=True)
    assert process.stdout.strip() == "False"
