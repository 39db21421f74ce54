"""Lessons for a conductor of words in world 2: prompts as the service writes them, and plans to imitate as JSON.

The teacher is the policy of `learning.py`: it has executed plans over pools of training once each, and was told the
verdicts of a judge who errs. For a lesson it knows what the operator knows of its own training texts (families and
confidence are labels there), and of workers only their cards: those of a lesson are invented around the cards of
training workers, so that a conductor has nobody to recognise and must read numbers. Its plans are drawn by how good it
believes them to be, less a price of their tokens. Nothing here knows a worker's hidden skills, nor the searched
optimum.
"""

import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache, partial
from random import Random
from typing import TypeAlias

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from app.conductor import cards
from app.core.plan import proposals
from app.core.pool import catalog
from app.errors import PlanRejected
from app.lab.world2.constants import DOMAINS, constants
from app.lab.world2.execution import role_of
from app.lab.world2.learning import READ_TASKS, Learner
from app.lab.world2.outcome import Rewards, all_plans, rewards_of_all_plans, tokens_of_all_plans
from app.lab.world2.reading import Reading
from app.lab.world2.rules import size_of
from app.lab.world2.shapes import MOST_STEPS, SUBTASKS, Plan, ShapeStep, catalogue
from app.lab.world2.tasks import Task, draw_task
from app.lab.world2.workers import LARGEST, SAMPLES, SMALLEST, Card, Pool, Worker, worker_profiles

Array: TypeAlias = NDArray[np.float64]
TOKEN_PRICE = 1e-5
"""Reward that a plan loses in the teacher's eyes for each token that its workers read and write. The world's own price
is in dollars; with this one the teacher's plans take two to five parts in a hundred fewer tokens."""
TEMPERATURE = 0.004
"""Reward: a plan that is believed to be worth so much less than the best is imitated 1/e as often."""
BEST_PLANS = 12
"""The best plans of a task, among which the imitated one is drawn."""
SHARED_DEVIATION, OWN_DEVIATION = 0.12, 0.08
"""Deviations of an invented worker's pass rates from those of the training worker that it is like: of all together, and
of each."""
DOUBLINGS = 0.5
"""Deviation of its price and speed, in doublings."""


class PosedTask(Struct, frozen=True):
    """One task of a lesson: its text, plans with the chances that they are imitated, and what the text says."""

    text: str
    plans: tuple[Plan, ...]
    chances: tuple[float, ...]
    families: tuple[int, ...]
    """Places among the families of training, one for each part."""
    document: int
    confidential: bool


class Lesson(Struct, frozen=True):
    """One pool with several tasks. `facts` are what its cards say, one row for each worker."""

    pool: Pool
    tasks: tuple[PosedTask, ...]
    facts: tuple[tuple[float, ...], ...]


class Question(Struct, frozen=True):
    """One task of an exam, with what each plan over the pool is believed to be worth."""

    pool: Pool
    text: str
    worth: Mapping[Plan, float]


class Teacher:
    """A policy that has learned from some verdicts (0: from none), which makes lessons of its beliefs."""

    def __init__(self, seed: int, verdicts: int, texts: int = READ_TASKS) -> None:
        learner = Learner(seed, [], texts)
        if verdicts:
            learner.train_until(verdicts)
        self._beliefs = learner.posterior_mode()
        self._family_index: Mapping[str, int] = {
            family.name: place for place, family in enumerate(self._beliefs.families)
        }

    @property
    def families(self) -> int:
        """Return the number of families of training."""
        return len(self._family_index)

    def lessons(self, seed: str, count: int, tasks: int, processes: int = 1) -> list[Lesson]:
        """Return so many lessons with so many tasks each, the same ones whatever the number of processes."""
        make = partial(self._make_numbered_lesson, seed, tasks)
        if processes == 1:
            return [make(number) for number in range(count)]
        with ProcessPoolExecutor(processes) as pool:
            return list(pool.map(make, range(count), chunksize=16))

    def lesson(self, random: Random, tasks: int) -> Lesson:
        """Return one pool of invented workers with so many tasks of training."""
        pool = tuple(invent_worker(random) for _ in range(random.randint(SMALLEST, LARGEST)))
        believed = self.estimate_rewards(pool)
        every, posed_tasks = all_plans(len(pool)), []
        for _ in range(tasks):
            task = draw_task(random, "train")
            worth = self._values_of_all_plans(believed, task)
            best = np.argpartition(-worth, BEST_PLANS)[:BEST_PLANS]
            weights = np.exp((worth[best] - worth[best].max()) / TEMPERATURE)
            chosen, chances = tuple(every[place] for place in best), tuple((weights / weights.sum()).tolist())
            posed_tasks.append(
                PosedTask(task.text, chosen, chances, self._family_indices(task), task.document, task.confidential)
            )
        return Lesson(pool, tuple(posed_tasks), tuple(_facts(worker) for worker in believed.pool))

    def exam(self, seed: str, count: int, tasks: int) -> list[Question]:
        """Return so many lessons' tasks, one after the other, with what is believed of every plan: what training is
        stopped by knows no more than what it imitates."""
        questions = []
        for number in range(count):
            random = Random(f"{seed}|{number}")
            pool = tuple(invent_worker(random) for _ in range(random.randint(SMALLEST, LARGEST)))
            believed = self.estimate_rewards(pool)
            for task in [draw_task(random, "train") for _ in range(tasks)]:
                worth = self._values_of_all_plans(believed, task)
                worth_of_plan = dict(zip(all_plans(len(pool)), worth.tolist(), strict=True))
                questions.append(Question(pool, task.text, worth_of_plan))
        return questions

    def _make_numbered_lesson(self, seed: str, tasks: int, number: int) -> Lesson:
        return self.lesson(Random(f"{seed}|{number}"), tasks)

    def estimate_rewards(self, pool: Pool) -> Rewards:
        """Return the rewards that would be true if what is believed were."""
        return self._beliefs.rewards(pool)

    def task_as_read(self, task: Task) -> Task:
        """Return a task of known families as the teacher knows it, whose training texts are labelled."""
        return self._beliefs.task_as_read(task, Reading(self._family_indices(task), task.document, task.confidential))

    def _family_indices(self, task: Task) -> tuple[int, ...]:
        return tuple(self._family_index[part.family.name] for part in task.parts)

    def _values_of_all_plans(self, believed: Rewards, task: Task) -> Array:
        """Return the believed rewards of all plans for a task, less the price of their tokens."""
        rewards = rewards_of_all_plans(believed, self.task_as_read(task))
        worth: Array = rewards.astype(np.float64) - TOKEN_PRICE * tokens_of_all_plans(believed, size_of(task))
        return worth


def invent_worker(random: Random) -> Worker:
    """Return a worker whom nobody has met: a card like those of training workers, and no skills."""
    like, priced = random.choice(worker_profiles(unseen=False)), random.choice(worker_profiles(unseen=False))
    priced = like if random.random() < 0.5 else priced
    questions, better = random.choice(SAMPLES), random.gauss(0, SHARED_DEVIATION)
    right = []
    for passes in like.card.right:
        rate = min(0.98, max(0.02, passes / like.card.questions + better + random.gauss(0, OWN_DEVIATION)))
        right.append(sum(random.random() < rate for _ in range(questions)))
    card = Card(
        right=tuple(right),
        questions=questions,
        price=round(priced.card.price * 2 ** random.gauss(0, DOUBLINGS), 3),
        speed=round(priced.card.speed * 2 ** random.gauss(0, DOUBLINGS / 2)),
        context=priced.card.context,
        retains=random.random() < 0.5,
    )
    return Worker("invented", 0.0, (0.0,) * len(DOMAINS), card)


def _facts(worker: Worker) -> tuple[float, ...]:
    """Return what is believed of a worker by its card: skill in each domain, price, speed and context by ratio, and
    whether it retains data."""
    card = worker.card
    skills = [worker.ability + edge for edge in worker.edges]
    sizes = [float(np.log2(card.price)), float(np.log2(card.speed / 100)), float(np.log2(card.context / 32_000))]
    return (*skills, *sizes, float(card.retains))


# Prompts and plans as the service has them.


def prompt(pool: Pool, order: Sequence[int]) -> str:
    """Return the cards as the service writes them, where ordinal n stands for the worker `pool[order[n]]`."""
    lines = []
    for ordinal, place in enumerate(order):
        lines.append(cards.card(ordinal, as_catalog(pool[place])))
    return "\n".join(lines)


@cache
def as_catalog(worker: Worker) -> catalog.Worker:
    """Return the worker as the service's catalog has it once it was calibrated."""
    rates = zip(DOMAINS, worker.card.right, strict=True)
    measured = [catalog.CalibrationResult(name, float(right), worker.card.questions) for name, right in sorted(rates)]
    price = catalog.Price(round(worker.price * constants().input_share * 1e6), round(worker.price * 1e6))
    card = catalog.Card(
        context=worker.card.context,
        speed=float(worker.card.speed),
        retention=None if worker.card.retains else "none",
        measured=tuple(measured),
    )
    return catalog.Worker(worker.name, "world", worker.name, price, card)


def plan_text(plan: Plan, order: Sequence[int]) -> str:
    """Return a plan over places of the pool as the conductor writes it, over ordinals."""
    steps = []
    for (role, sees, user), place in zip(catalogue()[plan.shape], plan.workers, strict=True):
        access: list[str | int] = list(sees)
        if user:
            access.insert(0, "user")
        steps.append({"worker": list(order).index(place), "subtask": SUBTASKS[role], "access": access})
    return json.dumps({"steps": steps}, separators=(",", ":"))


def parse_plan(text: str, order: Sequence[int]) -> Plan | None:
    """Return the plan that a text states, over places of the pool; None if it is none of `shapes.catalogue`."""
    names = [str(place) for place in order]
    try:
        steps = proposals.read_plan(json.loads(text), proposals.by_ordinal(names), MOST_STEPS)
    except (ValueError, PlanRejected):
        return None
    shape_steps = []
    for step in steps:
        shape_steps.append(ShapeStep(role_of(step.subtask), step.access.steps, step.access.user))
    shape = _shape_names().get(tuple(shape_steps))
    if not shape:
        return None
    return Plan(shape, tuple(int(step.worker) for step in steps))


@cache
def _shape_names() -> Mapping[tuple[ShapeStep, ...], str]:
    return {steps: name for name, steps in catalogue().items()}
