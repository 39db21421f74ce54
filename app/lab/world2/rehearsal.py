"""Exact figures of the rehearsal pool: its learned conductor beside fixed plans that are tuned for accuracy.

`python -m app.lab.world2 --rehearsal` prints them. Each fixed plan is the most accurate of its kind on validation tasks
over this pool, of which it knows the exact chances; the last one has the best reward of all plans. The conductor
chooses by `app/providers/rehearsal/policy.py`, from words, length and cards. Expectations are over the workers' dice,
so that intervals are about tasks alone.
"""

from collections.abc import Callable, Sequence

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from app.lab.world2 import tasks as composed
from app.lab.world2.baselines import combines_answers, is_self_consistent
from app.lab.world2.constants import constants
from app.lab.world2.outcome import Rewards, all_plans, rewards_of_all_plans
from app.lab.world2.provider import REHEARSAL_NAMES, rehearsal_workers, service_tasks, text_with_document
from app.lab.world2.rules import size_of
from app.lab.world2.shapes import SUBTASKS, Plan, catalogue
from app.lab.world2.shipped import STRENGTHS
from app.lab.world2.standings import bootstrap_pools_and_tasks, format_interval
from app.lab.world2.tasks import Task
from app.lab.world2.workers import Pool
from app.providers.rehearsal import policy

TESTED, VALIDATION = 400, 60
CONDUCTOR = "rehearsal conductor"
KINDS: dict[str, Callable[[Plan], bool]] = {
    "best single worker": lambda plan: len(plan.workers) == 1,
    "self-consistency": lambda plan: _is_vote(plan) and is_self_consistent(plan),
    "mixture of agents": lambda plan: _is_vote(plan) and not is_self_consistent(plan),
    "planner-executor-checker": lambda plan: plan.shape in ("plan solve check", "plan reason check"),
}


class Row(Struct, frozen=True):
    """One policy: its chance of a right answer by task, and means of dollars, the workers' tokens and reward."""

    name: str
    plan: Plan | None
    right: NDArray[np.float64]
    usd: float
    tokens: float
    reward: float


def compare_policies(tested: Sequence[Task], validation: Sequence[Task]) -> list[Row]:
    """Return the conductor's row, then those of the fixed plans."""
    pool: Pool = tuple(worker for worker, _ in rehearsal_workers())
    rewards = Rewards(pool)
    rows = [_row(CONDUCTOR, None, [conductor_plan(pool, task) for task in tested], tested, rewards)]
    for name, admits in KINDS.items():
        plan = _most_accurate([plan for plan in all_plans(len(pool)) if admits(plan)], validation, rewards)
        rows.append(_row(name, plan, [plan] * len(tested), tested, rewards))
    total = sum([rewards_of_all_plans(rewards, task) for task in validation])
    plan = all_plans(len(pool))[int(np.asarray(total).argmax())]
    return [*rows, _row("best fixed plan by reward", plan, [plan] * len(tested), tested, rewards)]


def conductor_plan(pool: Pool, task: Task) -> Plan:
    """Return the plan that the learned policy holds for best, with all the money it wants."""
    question, share = text_with_document(task), constants().input_share
    cards = []
    for place, (worker, name) in enumerate(zip(pool, REHEARSAL_NAMES, strict=True)):
        cards.append(policy.Card(place, STRENGTHS[name], share * worker.price / 1e6, worker.price / 1e6))
    steps = policy.best(policy.read(question, len(question)), cards, 5, 1.0)
    assert steps is not None
    subtasks = [(step.subtask, step.access) for _, step in steps]
    shape = next(name for name in catalogue() if _subtasks_and_access(name) == subtasks)
    return Plan(shape, tuple(ordinal for ordinal, _ in steps))


def report(tested: int = TESTED) -> str:
    """Return the table in Markdown."""
    tasks = service_tasks("fresh")[:tested]
    rows = compare_policies(tasks, composed.draw_tasks("train", "rehearsal validation", VALIDATION))
    lines = [
        f"{len(tasks)} fresh tasks, {VALIDATION} validation tasks; exact expectations, 95 % intervals over tasks.",
        "",
        "| policy | accuracy | less the conductor | workers' tokens | m$ | reward | plan |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        less = row.right - rows[0].right
        draws = bootstrap_pools_and_tasks(less[None], np.random.default_rng(1))
        difference = plan = ""
        if row is not rows[0]:
            difference = f"{less.mean():+.3f} {format_interval(draws)}"
        if row.plan is not None:
            names = [REHEARSAL_NAMES[place] for place in row.plan.workers]
            plan = f"{row.plan.shape}: {', '.join(names)}"
        lines.append(
            f"| {row.name} | {row.right.mean():.3f} | {difference} | {row.tokens:,.0f} | {1e3 * row.usd:.2f} | "
            f"{row.reward:.3f} | {plan} |"
        )
    return "\n".join(lines)


def _is_vote(plan: Plan) -> bool:
    return combines_answers(plan) and "check" not in plan.shape


def _subtasks_and_access(shape: str) -> list[tuple[str, tuple[str | int, ...]]]:
    """Return the subtasks and access lists of a shape, as a plan states them."""
    entries = []
    for step in catalogue()[shape]:
        entries.append((SUBTASKS[step.role], (*(("user",) if step.user else ()), *step.sees)))
    return entries


def _most_accurate(of: Sequence[Plan], tasks: Sequence[Task], rewards: Rewards) -> Plan:
    chances: dict[str, NDArray[np.float64]] = {}
    for shape in {plan.shape for plan in of}:
        chances[shape] = np.stack([rewards.right(shape, task).mean(axis=0) for task in tasks]).sum(axis=0)
    return max(of, key=lambda plan: float(chances[plan.shape][plan.workers]))


def _row(name: str, plan: Plan | None, chosen: Sequence[Plan], tasks: Sequence[Task], rewards: Rewards) -> Row:
    right, usd, tokens, reward = [], [], [], []
    for choice, task in zip(chosen, tasks, strict=True):
        size = size_of(task)
        right.append(float(rewards.right(choice.shape, task).mean(axis=0)[choice.workers]))
        usd.append(float(rewards.bill(choice.shape, size)[0][choice.workers]))
        tokens.append(float(rewards.tokens(choice.shape, size)[choice.workers]))
        reward.append(right[-1] * float(rewards.worth(choice.shape, size)[choice.workers]))
    return Row(name, plan, np.array(right), float(np.mean(usd)), float(np.mean(tokens)), float(np.mean(reward)))
