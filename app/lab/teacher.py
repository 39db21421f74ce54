"""The teacher of the warm start: carries out plans for one lesson and keeps the best, which the conductor imitates.

It knows nothing but what the plans that it carried out were worth: a few of sensible shapes with workers by chance,
then changes of the best so far. None is carried out twice.
"""

import math
from collections.abc import Callable
from random import Random

from app.lab.lessons import draw_sensible_plan
from app.lab.plans import STEPS, Plan, PlanStep, shift_by_one_step, without_needless_steps
from app.lab.subtask_wording import SUBJECTS, phrase

RANDOM_SHARE = 0.25
"""The share of the plans that are drawn at random, before any is changed."""
RESHAPE_SHARE, SWAP_ROLE_SHARE = 0.3, 0.3
"""The share of the changes that alter the number of steps; and of the others that can, the share that switches between
answering at once and step by step. The rest change a worker."""


def search_best_plan(random: Random, workers: int, worth: Callable[[Plan], float], tries: int) -> tuple[Plan, float]:
    """Return the best of at most `tries` different plans over so many workers, and what it was worth."""
    rewards: dict[Plan, float] = {}
    leader: Plan = ()
    most = -math.inf
    for turn in range(tries):
        if turn < RANDOM_SHARE * tries:
            plan = draw_sensible_plan(random, workers)
        else:
            plan = mutate(random, leader, workers)
        if plan in rewards:
            plan = mutate(random, plan, workers)
        if plan in rewards:
            continue
        rewards[plan] = worth(plan)
        if rewards[plan] > most:
            leader, most = plan, rewards[plan]
    return leader, most


def put_in_words(random: Random, plan: Plan, worth: Callable[[Plan], float], count: int) -> tuple[list[Plan], float]:
    """Return the plan put into words in `count` ways, about the subject of `SUBJECTS` with which it was worth most, and
    what it was worth."""
    rewards = [worth(_with_subject(random, plan, subject)) for subject in range(len(SUBJECTS))]
    best = rewards.index(max(rewards))
    return [_with_subject(random, plan, best) for _ in range(count)], rewards[best]


def _with_subject(random: Random, plan: Plan, subject: int) -> Plan:
    return tuple(step._replace(text=phrase(random, step.role, subject)) for step in plan)


def mutate(random: Random, plan: Plan, workers: int) -> Plan:
    """Return the plan with one random change: a step more or less, another worker, at once or step by step."""
    if random.random() < RESHAPE_SHARE:
        shorter = len(plan) == STEPS or (len(plan) > 1 and random.random() < 0.5)
        if shorter:
            return _shorter(plan)
        return _longer(random, plan, workers)
    place = random.randrange(len(plan))
    step = plan[place]
    other = {"solve": "reason", "reason": "solve"}.get(step.role)
    if other and random.random() < SWAP_ROLE_SHARE:
        return (*plan[:place], step._replace(role=other), *plan[place + 1 :])
    return (*plan[:place], step._replace(worker=random.randrange(workers)), *plan[place + 1 :])


def _shorter(plan: Plan) -> Plan:
    """Return the plan without its last step, where the others answer too."""
    return without_needless_steps(plan[:-1]) or plan


def _longer(random: Random, plan: Plan, workers: int) -> Plan:
    """Return the plan with a check of its answer, or a plan for its first step."""
    worker = random.randrange(workers)
    if random.random() < 0.5:
        return (*plan, PlanStep(worker, "check", True, (len(plan) - 1,)))
    first, *others = map(shift_by_one_step, plan)
    return without_needless_steps((PlanStep(worker, "plan"), first._replace(sees=(0, *first.sees)), *others)) or plan
