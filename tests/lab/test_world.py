"""The rehearsal world: tasks that are what they say, an outcome that the executor agrees with, nothing to exploit."""

import math
from collections.abc import Iterator
from functools import cache
from random import Random

import pytest

from app.core.plan.proposals import read_plan_text
from app.lab import search, workers
from app.lab.outcome import bill, outcome, right
from app.lab.plans import (
    FIRST_ACCESS,
    LONGEST,
    ROLES,
    STEPS,
    Plan,
    PlanStep,
    accesses,
    from_tokens,
    legal,
    to_text,
    to_tokens,
    without_needless_steps,
)
from app.lab.world import CLASSES, DEAR, Setting, Weights, draw_pool, is_held_out, profiles, standard_pool
from app.providers.rehearsal.task_families import DOMAINS, FAMILIES, LEVELS, Problem, read, write
from tests.lab.pure_execution import Stage, to_workflow


def any_plan(random: Random, workers: int = 6) -> Plan:
    """Any plan of the grammar."""
    tokens = [0]
    while tokens[-1] != 2:
        tokens.append(random.choice(legal(len(tokens), workers)))
    return from_tokens(tokens)


def any_problem(random: Random, kind: tuple[int, int]) -> Problem:
    """Any task of this class."""
    families = [family for family in FAMILIES if family.domain == DOMAINS[kind[0]]]
    return write(random, random.choice(families), kind[1], random.randrange(5))


# Tasks.


@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: family.name)
def test_a_task_is_read_back_from_its_text_alone(family: object) -> None:
    assert isinstance(family, type(FAMILIES[0]))
    random = Random(7)
    for level in range(LEVELS):
        for phrasing in range(len(family.phrasings)):
            for _ in range(5):
                written = write(random, family, level, phrasing)
                assert read(written.text) == written
                assert written.answer != written.slip


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("What is 2 + 3 * 4?", "14"),
        ("What is the greatest common divisor of 84 and 36?", "12"),
        ("Compute 17 modulo 5.", "2"),
        ("Solve 3x + 4 = 19 for x.", "5"),
        ("Which x satisfies 12(x + 2) = 4x + 64?", "5"),
        ("What is x if 2x + 3y = 16 and 4x + 9y = 44?", "2"),
        ("I think of a number, multiply it by 3, add 4, and get 19. What is the number?", "5"),
        ("The sum of 3 consecutive integers is 33. What is the smallest?", "10"),
        ("Sort these words: tunnel, apple, kettle.", "apple, kettle, tunnel"),
        ("Count the letter e in: kettle, needle.", "5"),
        ("How many days are there from 1 March 2024 to 1 March 2025?", "365"),
        ("What day of the week is 21 November 2026?", "Saturday"),
        ("Which date is 10 days after 25 February 2024?", "6 March 2024"),
    ],
)
def test_answers_are_really_computed(text: str, answer: str) -> None:
    problem = read(text)
    assert problem is not None
    assert problem.answer == answer


@pytest.mark.parametrize(
    "text", ["", "What is love?", "Compute 5 modulo 0.", "On which weekday does 31 February 2024 fall?"]
)
def test_what_is_no_task_is_not_read_as_one(text: str) -> None:
    assert read(text) is None


# Pools.


def test_training_never_meets_a_pool_or_a_price_that_is_held_out() -> None:
    random = Random(1)
    for unseen in (False, True):
        for _ in range(200):
            pool = draw_pool(random, unseen=unseen)
            assert is_held_out([worker.name for worker in pool]) is unseen
            factors = {round(worker.price / profiles()[worker.name].price, 3) for worker in pool}
            assert factors <= ({0.7, 1.4} if unseen else {0.5, 1.0, 2.0})
    assert not is_held_out([worker.name for worker in standard_pool()])


# The outcome of a plan.


KIND = (1, 1)


@pytest.fixture(scope="module")
def problems() -> Iterator[list[Problem]]:
    """Six hundred tasks of one class, each of which is read once: that is most of what a worker does."""
    random = Random(13)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(workers, "read", cache(read))
        yield [any_problem(random, KIND) for _ in range(600)]


PLANS = {
    "single": (PlanStep(1, "solve"),),
    "by a plan": (PlanStep(5, "plan"), PlanStep(2, "reason", True, (0,))),
    "with needless access": (PlanStep(5, "plan"), PlanStep(3, "solve"), PlanStep(1, "reason", True, (0, 1))),
    "chain": (PlanStep(0, "plan"), PlanStep(0, "solve", True, (0,)), PlanStep(5, "check", True, (1,))),
    "own check": (PlanStep(0, "solve"), PlanStep(5, "check", True, (0,)), PlanStep(0, "check", True, (1,))),
    "combined": (PlanStep(0, "solve"), PlanStep(5, "solve"), PlanStep(4, "combine", True, (0, 1))),
    "debate": (
        PlanStep(0, "solve"),
        PlanStep(3, "reason"),
        PlanStep(5, "check", True, (0, 1)),
        PlanStep(2, "combine", True, (0, 1, 2)),
    ),
    "checks of nothing": (PlanStep(5, "check"), PlanStep(5, "check", True, (0,)), PlanStep(5, "check", True, (0, 1))),
    "without the question": (PlanStep(1, "solve"), PlanStep(4, "check", False, (0,))),
}


@pytest.mark.parametrize("name", PLANS)
def test_the_executor_finds_what_the_simulator_says(name: str, problems: list[Problem]) -> None:
    """The same plan by the executor's own fold and composer, with workers that only read their messages."""
    pool, plan = standard_pool(), PLANS[name]
    played = [Stage(plan, pool, problem, f"{name} {n}").play() for n, problem in enumerate(problems)]
    chance, share_right = right(plan, KIND, pool), sum(execution.right for execution in played) / len(played)
    assert abs(share_right - chance) <= 4 * math.sqrt(max(chance * (1 - chance), 0.002) / len(played))
    dollars, wait = bill(plan, KIND[1], pool)
    assert {round(execution.usd, 9) for execution in played} == {round(dollars, 9)}
    assert {round(execution.seconds, 6) for execution in played} == {round(wait, 6)}


def test_the_executor_agrees_on_any_plan_of_the_grammar() -> None:
    """Many plans, few runs of each: what they miss the simulator's figures by adds up to nothing but chance."""
    random = Random(3)
    surplus = spread = 0.0
    for n in range(600):
        plan, kind = any_plan(random), random.choice(CLASSES)
        pool = standard_pool() if n % 2 else tuple(profiles()[name] for name in random.sample(list(profiles()), 6))
        chance, played = right(plan, kind, pool), Stage(plan, pool, any_problem(random, kind), str(n)).play()
        surplus, spread = surplus + played.right - chance, spread + chance * (1 - chance)
        assert played.usd == pytest.approx(bill(plan, kind[1], pool)[0])
        assert played.right <= (chance > 0)
    assert abs(surplus) <= 4 * math.sqrt(spread)


# Nothing to exploit.


@pytest.fixture(scope="module")
def optimum() -> search.SearchResult:
    """The exhaustive search over plans of up to three steps of the standard pool."""
    return search.search(Setting(standard_pool()), most=3)


def test_no_plan_beats_the_searched_optimum(optimum: search.SearchResult) -> None:
    """Any plan, valid but wasteful, is no better than its lean form; and no lean form escapes the search."""
    random, setting, shapes = Random(11), Setting(standard_pool()), set(search.shapes())
    for _ in range(4_000):
        plan, kind = any_plan(random), random.choice(CLASSES)
        reward, slim = outcome(plan, kind, setting).reward, without_needless_steps(plan)
        if slim is None:
            assert reward == 0
            continue
        assert reward <= outcome(slim, kind, setting).reward + 1e-12
        assert search.canonical_order(tuple((step.role, step.sees) for step in slim)) in shapes
        if len(slim) <= 3:
            assert reward <= optimum.best_rewards[CLASSES.index(kind)] + 1e-12


def test_a_climber_that_changes_one_thing_at_a_time_ends_below_the_optimum(optimum: search.SearchResult) -> None:
    random, setting = Random(5), Setting(standard_pool())
    for place, kind in enumerate(CLASSES):
        best = max((_climb(any_plan(random), kind, setting, random) for _ in range(3)), default=0.0)
        assert best <= optimum.best_rewards[place] + 1e-12


def _climb(plan: Plan, kind: tuple[int, int], setting: Setting, random: Random) -> float:
    plan = plan[:3]
    reward = outcome(plan, kind, setting).reward
    for _ in range(150):
        steps = list(plan)
        place = random.randrange(len(steps))
        user, sees = accesses()[random.randrange((1 << place + 1) - 1)]
        steps[place] = PlanStep(random.randrange(6), random.choice(ROLES), user, sees)
        changed = outcome(tuple(steps), kind, setting).reward
        plan, reward = (tuple(steps), changed) if changed >= reward else (plan, reward)
    return reward


def test_the_search_sums_as_the_simulator_does(optimum: search.SearchResult) -> None:
    setting = Setting(standard_pool())
    for kind, plan, reward in zip(CLASSES, optimum.best, optimum.best_rewards, strict=True):
        assert outcome(plan, kind, setting).reward == pytest.approx(reward)
    mean = sum(outcome(optimum.fixed, kind, setting).reward for kind in CLASSES) / len(CLASSES)
    assert mean == pytest.approx(optimum.fixed_reward)


def test_checks_of_nothing_solve_nothing() -> None:
    """A policy once found chains of checks that solved tasks, because an empty answer counted as one."""
    checks = tuple(PlanStep(5, "check", True, tuple(range(place))) for place in range(STEPS))
    assert all(right(checks, kind, standard_pool()) == 0 for kind in CLASSES)


def test_an_answer_that_passed_through_other_hands_is_still_ones_own() -> None:
    """The search once found that a combiner in between made a checker forget that the answer was its own."""
    pool, kind = standard_pool(), (0, 2)
    others = (PlanStep(1, "solve"), PlanStep(0, "check", True, (0,)))
    own = right((*others, PlanStep(1, "check", True, (1,))), kind, pool)
    twin = (*pool[:5], profiles()["birch"])
    assert right((*others, PlanStep(5, "check", True, (1,))), kind, twin) > own


def test_asking_for_more_is_never_free() -> None:
    """Needless access costs tokens and odds; without the question a step fails."""
    pool, kind = standard_pool(), (0, 1)
    plain = (PlanStep(3, "solve"), PlanStep(5, "plan"), PlanStep(1, "solve", True, (1,)))
    crowded = (*plain[:2], PlanStep(1, "solve", True, (0, 1)))
    blind = (*plain[:2], PlanStep(1, "solve", False, (1,)))
    assert right(crowded, kind, pool) < right(plain, kind, pool)
    assert bill(crowded, 1, pool) > bill(plain, 1, pool)
    assert right(blind, kind, pool) == 0


def test_there_is_something_to_learn(optimum: search.SearchResult) -> None:
    """The best plan for each class is worth at least 0.06 more than the best plan for all."""
    assert optimum.optimum - optimum.fixed_reward >= 0.06


@pytest.mark.parametrize("weights", [Weights(), DEAR])
def test_wrong_is_worth_less_than_the_dearest_right_answer(weights: Weights) -> None:
    assert 0 < weights.worth(1.0, 1_000.0) < weights.worth(0.001, 2.0) < 1


# The grammar.


def test_whatever_the_grammar_lets_through_the_plan_parser_takes() -> None:
    random = Random(9)
    names = [worker.name for worker in standard_pool()]
    for _ in range(300):
        plan = any_plan(random)
        tokens = to_tokens(plan)
        assert len(tokens) <= LONGEST
        assert from_tokens(tokens) == plan
        assert read_plan_text(to_text(tokens), names, STEPS) == to_workflow(plan, names).steps


def test_what_is_no_plan_is_refused() -> None:
    good = to_tokens((PlanStep(0, "solve"), PlanStep(1, "check", True, (0,))))
    forward = [*good[:3], FIRST_ACCESS + 2, *good[4:]]
    for tokens in ([], good[1:], good[:-1], good[:4], forward, [0, *good]):
        with pytest.raises(ValueError, match=r"plan|step"):
            from_tokens(tokens)
