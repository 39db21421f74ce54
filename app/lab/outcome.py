"""The exact outcome of a plan in a world: the chance of a right answer, its cost and its wait.

Each step that yields a plan or an answer has one hidden bit, good or right; the chance of each bit follows from the
bits that the step sees. Summing over all bits of at most four steps and both traits of a task is exact and takes
microseconds, so that training rolls out thousands of plans a second. `workers.py` is the same world as workers that
read and write messages; a test runs plans through the executor's core and finds the same figures.
"""

from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

from app.lab import world
from app.lab.plans import Plan, PlanStep, contributing_steps, results_of_steps, steps_used
from app.lab.subtask_wording import shift
from app.lab.world import OUTPUT, PER_LEVEL, QUESTION, TRAITS, Profile, Setting


class Outcome(NamedTuple):
    """The expectation of one plan for one class of tasks."""

    right: float
    usd: float
    seconds: float
    worth: float
    """The worth of a right answer under the setting's weights."""

    @property
    def reward(self) -> float:
        """Return the expected reward: nothing for a wrong answer."""
        return self.right * self.worth


def outcome(plan: Plan, kind: tuple[int, int], setting: Setting) -> Outcome:
    """Return the outcome of `plan` for tasks of class `kind` = (domain, level)."""
    usd, seconds = bill(plan, kind[1], setting.pool)
    return Outcome(right(plan, kind, setting.pool), usd, seconds, setting.weights.worth(usd, seconds))


class _StepFacts(NamedTuple):
    """The facts that a step's odds and price depend on in addition to its worker."""

    role: str
    works: bool
    crowd: int
    hands: tuple[int, ...]
    """For a check, the steps that contributed to the checked answer."""
    input_bits: tuple[tuple[int, ...], ...]
    """For each combination of the earlier bits, those that it works on."""
    output_tokens: int
    input_tokens: int
    """The tokens that it reads apart from the question."""
    user: bool
    sees: tuple[int, ...]


@lru_cache(20_000)
def _layout(shape: tuple[tuple[str, bool, tuple[int, ...]], ...]) -> tuple[tuple[_StepFacts, ...], bool]:
    """Return the parts of all plans of this shape, and whether they answer at all."""
    plan = tuple([PlanStep(0, role, user, sees) for role, user, sees in shape])
    results = results_of_steps(plan)
    used = [steps_used(plan, place, results) for place in range(len(plan))]
    output_tokens: list[int] = []
    parts: list[_StepFacts] = []
    for place, step in enumerate(plan):
        works = results[place] != "nothing"
        output = step.role
        if not works:
            output = "nothing"
        output_tokens.append(OUTPUT[output])
        hands: tuple[int, ...] = ()
        if step.role == "check" and used[place]:
            hands = tuple(contributing_steps(used, results, used[place][0]))
        part = _StepFacts(
            role=step.role,
            works=works,
            crowd=len(step.sees) - len(used[place]),
            hands=hands,
            input_bits=tuple([bits_at(used[place], bits) for bits in range(1 << place)]),
            output_tokens=output_tokens[place],
            input_tokens=sum([output_tokens[n] for n in step.sees]),
            user=step.user,
            sees=step.sees,
        )
        parts.append(part)
    return tuple(parts), results[-1] == "answer"


def bits_at(places: Sequence[int], bits: int) -> tuple[int, ...]:
    """Return the bits of a number at some places, each 0 or 1."""
    return tuple([bits >> n & 1 for n in places])


def parts_of(plan: Plan) -> tuple[tuple[_StepFacts, ...], bool]:
    """Return the facts that each step of a plan depends on, and whether the plan answers at all."""
    return _layout(tuple([step[1:4] for step in plan]))


@lru_cache(20_000)
def right(plan: Plan, kind: tuple[int, int], pool: tuple[Profile, ...]) -> float:
    """Return the chance that the plan's answer is right."""
    parts, answers = parts_of(plan)
    if not answers:
        return 0.0
    return sum([_right_given_trait(plan, parts, kind, trait, pool) for trait in TRAITS]) / len(TRAITS)


def right_given_trait(plan: Plan, kind: tuple[int, int], trait: float, pool: tuple[Profile, ...]) -> float:
    """Return the chance of a right answer for tasks of one trait."""
    parts, answers = parts_of(plan)
    if not answers:
        return 0.0
    return _right_given_trait(plan, parts, kind, trait, pool)


def _right_given_trait(
    plan: Plan, parts: tuple[_StepFacts, ...], kind: tuple[int, int], trait: float, pool: tuple[Profile, ...]
) -> float:
    odds = [1.0]
    """The chance of each combination of bits so far; bit n is step n's."""
    for step, part in zip(plan, parts, strict=True):
        if not part.works:
            odds += [0.0] * len(odds)
            continue
        own = step.worker in [plan[n].worker for n in part.hands]
        worker = pool[step.worker]
        if step.text:
            worker = world.shift_skills(worker, shift(step.text, kind[0]))
        good = chances_with_good_step(odds, worker, kind, trait, part, own)
        odds = chances_with_bad_step(odds, good) + good
    return sum(odds[len(odds) // 2 :])


def chances_with_good_step(
    odds: Sequence[float], worker: Profile, kind: tuple[int, int], trait: float, part: _StepFacts, own: bool
) -> list[float]:
    """Return for each combination of the earlier bits, whose chances are `odds`, the chance of it together with a good
    step."""
    chances = {}
    for bits in set(part.input_bits):
        chances[bits] = step_chance(worker, kind, trait, part.role, bits, own, part.crowd)
    return [p * chances[bits] for p, bits in zip(odds, part.input_bits, strict=True)]


def chances_with_bad_step(odds: Sequence[float], good: Sequence[float]) -> list[float]:
    """Return for each combination of the earlier bits the chance of it together with a step that is not good."""
    return [p - g for p, g in zip(odds, good, strict=True)]


@lru_cache(50_000)
def step_chance(
    worker: Profile, kind: tuple[int, int], trait: float, role: str, bits: tuple[int, ...], own: bool, crowd: int
) -> float:
    """Return the chance that a step is good, or right, given the bits of the steps that it works on."""
    if role == "plan":
        return world.plan_chance(worker, kind[1], crowd)
    if role == "check":
        return world.check_chance(worker, kind, trait, bits[0], own, crowd)
    if role == "combine":
        return world.combine_chance(worker, kind, trait, sum(bits), len(bits), crowd)
    plan_is_good = None
    if bits:
        plan_is_good = bits[0]
    return world.solve_chance(worker, kind, trait, role, plan_is_good, crowd)


def bill(plan: Plan, level: int, pool: tuple[Profile, ...], *, finished: int = 0) -> tuple[float, float]:
    """Return the dollars of all calls, and the seconds on the critical path to the last step.

    The first `finished` steps were carried out before: they cost nothing and take no time.
    """
    ends = [0.0] * finished
    dollars = 0.0
    for step, part in zip(plan[finished:], parts_of(plan)[0][finished:], strict=True):
        worker = pool[step.worker]
        input_tokens = part.input_tokens
        if part.user:
            input_tokens += QUESTION + PER_LEVEL * level
        dollars += world.usd(worker, input_tokens, part.output_tokens)
        begins = max([ends[n] for n in part.sees], default=0.0)
        ends.append(begins + world.seconds(worker, part.output_tokens))
    return dollars, max(ends)
