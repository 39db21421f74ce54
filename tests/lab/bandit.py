"""The selector in the standard rehearsal world, in pure steps: choose, carry out, rate, learn; and what it is worth."""

from collections.abc import Mapping, Sequence
from functools import cache
from random import Random
from statistics import NormalDist

from app.core.plan.templates import Arm, arms
from app.core.pool.catalog import Card, Price, SelectorSpec, Worker
from app.core.rating.decision import ArmChoice, decide
from app.core.rating.features import Features, features
from app.core.rating.posterior import Posterior, Rating, estimates, update_posterior
from app.lab.lessons import draw_lesson
from app.lab.outcome import bill, outcome, right
from app.lab.plans import Plan, PlanStep
from app.lab.world import CLASSES, INPUT_SHARE, Setting, Weights, standard_pool
from app.providers.rehearsal.task_families import Problem

WEIGHTS = Weights()
SPEC = SelectorSpec(cost=WEIGHTS.cost, full_usd=round(WEIGHTS.full_usd * 1e6))
"""The usual templates; money weighs what it weighs in the world."""
ROLES: Mapping[str, Sequence[str]] = {
    "answer": ("solve",),
    "plan-reason": ("plan", "reason"),
    "answer-check": ("solve", "check"),
}


@cache
def workers() -> tuple[Worker, ...]:
    """The standard pool as a catalog has it."""
    return tuple(
        Worker(
            worker.name,
            "world",
            worker.name,
            Price(round(worker.price * INPUT_SHARE * 1e6), round(worker.price * 1e6)),
            Card(strengths=(worker.strengths,)),
        )
        for worker in standard_pool()
    )


@cache
def every_arm() -> tuple[Arm, ...]:
    """All arms over the standard pool."""
    return arms(SPEC, workers(), 4)


@cache
def as_plan(arm: Arm) -> Plan:
    """An arm as the world knows it."""
    places = {worker.name: place for place, worker in enumerate(standard_pool())}
    steps = zip(arm.steps, ROLES[arm.template], strict=True)
    return tuple(PlanStep(places[step.worker], role, True, step.access.steps) for step, role in steps)


@cache
def reward(arm: Arm, kind: tuple[int, int]) -> float:
    """The world's expected reward."""
    return outcome(as_plan(arm), kind, setting()).reward


@cache
def setting() -> Setting:
    """The standard pool under the usual weights."""
    return Setting(standard_pool(), WEIGHTS)


def score(answered: bool, waited: float) -> float:
    """Return a caller's rating of an answer that took so many seconds: nothing if it is wrong, else 1 less what the
    wait was worth. Money is the operator's affair, and on the bill."""
    return (1 - WEIGHTS.wait * min(1.0, waited / WEIGHTS.full_seconds)) if answered else 0.0


def problems(count: int, seed: int) -> list[Problem]:
    """Fresh tasks."""
    random = Random(f"selector|{seed}")
    return [draw_lesson(random, "held-out tasks").problem for _ in range(count)]


def choose(posterior: Posterior, sight: Features, random: Random, share: float | None = SPEC.explore) -> ArmChoice:
    """Choose an arm as the conductor does."""
    all_estimates = estimates(posterior, SPEC, every_arm(), workers(), sight)
    return decide(all_estimates, share, lambda count: random.choices(grains(), k=count), random.random)


@cache
def grains() -> tuple[float, ...]:
    """Normal draws."""
    return tuple(NormalDist().inv_cdf((n + 0.5) / 1024) for n in range(1024))


def play(posterior: Posterior, tasks: Sequence[Problem], random: Random, began: float = 1e9) -> Posterior:
    """Decide, carry out by the world's dice, rate and learn, one task after the other."""
    for place, task in enumerate(tasks):
        sight = features(task.text)
        choice = choose(posterior, sight, random)
        arm = arms_by_name()[choice.action]
        answered = random.random() < right(as_plan(arm), task.kind, standard_pool())
        usd, waited = bill(as_plan(arm), task.kind[1], standard_pool())
        rating = Rating(arm, sight, score(answered, waited), round(1e6 * usd), began + place)
        posterior = update_posterior(posterior, SPEC, workers(), rating)
    return posterior


@cache
def arms_by_name() -> Mapping[str, Arm]:
    """The arms by name."""
    return {arm.name: arm for arm in every_arm()}


def value(posterior: Posterior, tasks: Sequence[Problem]) -> float:
    """The mean expected reward of what is best at the posterior's mean."""
    total = 0.0
    for task in tasks:
        choice = choose(posterior, features(task.text), Random(0), None)
        total += reward(arms_by_name()[choice.action], task.kind)
    return total / len(tasks)


@cache
def single() -> Plan:
    """The best single worker for all tasks alike, at once or step by step."""
    alone = [(PlanStep(place, role),) for place in range(len(standard_pool())) for role in ("solve", "reason")]
    return max(alone, key=lambda plan: sum(outcome(plan, kind, setting()).reward for kind in CLASSES))


def share(worth: float, tasks: Sequence[Problem], optimum: Sequence[Plan]) -> float:
    """Return the share that is gained of the way from the best single worker to the optimum; `optimum` holds the best
    plan of each class."""
    low = sum(outcome(single(), task.kind, setting()).reward for task in tasks) / len(tasks)
    high = sum(outcome(optimum[CLASSES.index(task.kind)], task.kind, setting()).reward for task in tasks) / len(tasks)
    return (worth - low) / (high - low)


@cache
def best_by_class() -> tuple[Plan, ...]:
    """The best arm of each class: the searched optimum, as far as arms can express it."""
    return tuple(as_plan(max(every_arm(), key=lambda arm: reward(arm, kind))) for kind in CLASSES)
