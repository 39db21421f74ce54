"""A second round of the small conductor's, exactly: what it is shown, what it may write, what the run comes to.

As in `rounds.py` the answer is looked at by one of the pool's workers, paid as such, which doubts it with the chances
that the world gives a checker; so badly in its own hand. The small conductor is shown its own plan and whether there is
doubt, not the answer: it can work nothing out. It takes the answer (the empty plan) or writes another plan, in which
step 0 stands for that answer. Who had a hand in the answer and solves anew says the same again.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from random import Random
from typing import NamedTuple

from app.lab import world
from app.lab.lessons import Lesson, draw_sensible_plan
from app.lab.outcome import bill, chances_with_bad_step, chances_with_good_step, parts_of, right_given_trait
from app.lab.plans import FURTHER, Plan, PlanStep, from_tokens, shift_by_one_step, to_tokens
from app.lab.prompt import over_places
from app.lab.rounds import ACCEPTS, PLANS, doubt_chance, judging_usd, writers
from app.lab.world import TRAITS, Pool, Profile, Setting, Weights

BEFORE = PlanStep(0, "reason")
"""Step 0 of a second plan: the answer of the first."""
TAKE: Plan = (BEFORE,)
"""The empty plan."""
TRUST, DOUBT = 2, 1
"""The last token of the second prompt: the end of a plan, or that there is more to come."""
SIGNS = (TRUST, DOUBT)
Kind = tuple[int, int]


class RunOutcome(NamedTuple):
    """The outcome of a run of up to two rounds."""

    reward: float
    right: float
    usd: float
    seconds: float
    again: float
    """The probability that it has a second round."""


class FirstAnswer(NamedTuple):
    """One way in which a first plan may have come out: chance, the task's trait, and whether its answer is right."""

    chance: float
    trait: float
    right: int


def judging_worker(pool: Pool) -> Profile:
    """Return the worker that judges answers: one whose card says checking, else the most expensive."""
    checkers = [worker for worker in pool if "checking" in worker.strengths.split()]
    return max(checkers or pool, key=lambda worker: worker.price)


@lru_cache(20_000)
def first_answers(first: Plan, kind: Kind, pool: Pool, sign: int) -> tuple[FirstAnswer, ...]:
    """Return the ways in which a first plan may have ended with this sign; their chances add up to that of the sign."""
    judge = judging_worker(pool)
    own = judge in [pool[place] for place in writers(first)]
    answers = []
    for trait in TRAITS:
        right_chance = right_given_trait(first, kind, trait, pool)
        for right, chance in ((0, 1 - right_chance), (1, right_chance)):
            chance_of_sign = doubt_chance(judge, right=right, own=own)
            if sign == TRUST:
                chance_of_sign = 1 - chance_of_sign
            answers.append(FirstAnswer(chance_of_sign * chance / len(TRAITS), trait, right))
    return tuple(answers)


@lru_cache(100_000)
def outcome_given_sign(first: Plan, second: Plan, kind: Kind, setting: Setting, sign: int) -> RunOutcome:
    """Return the outcome, from beginning to end, of a run whose first answer met this sign. `again` is the chance of
    the sign, and the other figures are given that sign."""
    pool, hands = setting.pool, writers(first)
    answers = first_answers(first, kind, pool, sign)
    chance_of_sign = sum([case.chance for case in answers])
    right = 0.0
    if chance_of_sign:
        rights = [case.chance * right_after_second_plan(second, kind, case, pool, hands) for case in answers]
        right = sum(rights) / chance_of_sign
    usd, seconds = bill(first, kind[1], pool)
    judge, output_tokens = judging_worker(pool), PLANS
    if second == TAKE:
        output_tokens = ACCEPTS
    usd += judging_usd(judge, kind[1], output_tokens)
    seconds += world.seconds(judge, output_tokens)
    second_usd, second_seconds = bill(second, kind[1], pool, finished=1)
    usd, seconds = usd + second_usd, seconds + second_seconds
    return RunOutcome(right * setting.weights.worth(usd, seconds), right, usd, seconds, chance_of_sign)


def right_after_second_plan(second: Plan, kind: Kind, case: FirstAnswer, pool: Pool, hands: frozenset[int]) -> float:
    """Return the probability that the run's answer is right after a second plan, in this case."""
    parts, answers = parts_of(second)
    if not answers:
        return 0.0
    odds = [1.0 - case.right, float(case.right)]
    for step, part in zip(second[1:], parts[1:], strict=True):
        if not part.works:
            odds += [0.0] * len(odds)
            continue
        if step.role in ("solve", "reason") and step.worker in hands:
            good = [p * (place & 1) for place, p in enumerate(odds)]  # it says the first answer again: bit 0
        else:
            own = _is_own_work(second, step.worker, part.hands, hands)
            good = chances_with_good_step(odds, pool[step.worker], kind, case.trait, part, own)
        odds = chances_with_bad_step(odds, good) + good
    return sum(odds[len(odds) // 2 :])


def _is_own_work(second: Plan, worker: int, steps: Sequence[int], hands: frozenset[int]) -> bool:
    """Return True if a worker had a hand in one of these steps; `hands` are those of step 0, the first answer."""
    for n in steps:
        if n == 0 and worker in hands:
            return True
        if n > 0 and worker == second[n].worker:
            return True
    return False


def run_outcome(first: Plan, seconds: Sequence[Plan], kind: Kind, setting: Setting) -> RunOutcome:
    """Return the outcome of a run whose conductor answers each of `SIGNS` with the plan at its place."""
    reward = right = usd = waited = again = 0.0
    for sign, second in zip(SIGNS, seconds, strict=True):
        run = outcome_given_sign(first, second, kind, setting, sign)
        reward += run.again * run.reward
        right += run.again * run.right
        usd += run.again * run.usd
        waited += run.again * run.seconds
        if second != TAKE:
            again += run.again
    return RunOutcome(reward, right, usd, waited, again)


# -- prompts and plans as tokens


def second_prompt(prompt: Sequence[int], lesson: Lesson, first: Plan, sign: int) -> list[int]:
    """Return the second prompt: the first one, with the first plan, over ordinals, between the task and the cards, and
    with the sign at the end."""
    cards = 3 * len(lesson.pool) + 1
    return [*prompt[:-cards], *to_tokens(first), *prompt[-cards:], sign]


def second_plan_tokens(second: Plan) -> list[int]:
    """Return the tokens of a second plan over ordinals."""
    if second != TAKE:
        return [0, *to_tokens(second)[5:]]
    return [0, 2]


def second_plan_of(tokens: Sequence[int]) -> Plan:
    """Return the second plan of these tokens, up to its end."""
    if tokens[1] == 2:
        return TAKE
    return from_tokens([*to_tokens(TAKE)[:4], 1, *tokens[1:]])


def place_plan(second: Plan, order: Sequence[int]) -> Plan:
    """Return a second plan over ordinals as the same over places of the pool."""
    return (BEFORE, *over_places(second[1:], order))


def draw_second_plan(random: Random, workers: int) -> Plan:
    """Draw a second plan of a sensible shape, that goes on from the answer or begins anew."""
    while True:
        plan = draw_sensible_plan(random, workers)
        if len(plan) <= FURTHER and random.random() < 0.5:
            return (BEFORE, *map(shift_by_one_step, plan))
        head, *others = plan
        if others and head.role in ("solve", "reason"):
            return (BEFORE, *others)


def run_outcomes(
    lessons: Sequence[Lesson], chosen: Sequence[tuple[Plan, Sequence[Plan]]], weights: Weights
) -> Iterator[RunOutcome]:
    """Yield the outcomes of the runs of some lessons, given each one's first plan and the second ones."""
    for lesson, (first, seconds) in zip(lessons, chosen, strict=True):
        yield run_outcome(first, seconds, lesson.problem.kind, Setting(lesson.pool, weights))
