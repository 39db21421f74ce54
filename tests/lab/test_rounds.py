"""Two rounds against one: the figures are those of the executor, and the comparison is at equal cost."""

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest

from app.core.plan.workflow import Access, Step
from app.lab import rounds
from app.lab.plans import PlanStep
from app.lab.rounds import Point, Second
from app.lab.workers import final_answer
from app.lab.world import CLASSES, Setting, standard_pool
from tests.lab.pure_execution import Stage, to_workflow
from tests.lab.test_world import any_problem

POOL = standard_pool()
NAMES = [worker.name for worker in POOL]
BIRCH, EMBER, FLINT = (NAMES.index(name) for name in ("birch", "ember", "flint"))
KIND = (0, 2)
PLAYS = 700


def _steps(second: Second) -> Sequence[Step]:
    """The second plan, as a conductor writes it."""
    if second.solver is None:
        assert second.checker is not None
        pair = (PlanStep(0, "solve"), PlanStep(second.checker, "check", True, (0,)))
        check = to_workflow(pair, NAMES).steps[1]
        return [Step(check.worker, check.subtask, Access(True, (), previous=True), answers=True)]
    plan = [PlanStep(second.solver, second.role)]
    plan += [PlanStep(second.checker, "check", True, (0,))] if second.checker is not None else []
    return to_workflow(tuple(plan), NAMES).steps


@pytest.mark.parametrize(
    "second", [Second(None, "", FLINT), Second(None, "", BIRCH), Second(EMBER, "reason", FLINT)], ids=str
)
def test_the_figures_are_those_of_runs_of_two_rounds(second: Second) -> None:
    """Played by the executor's core: fold, access lists, composed messages, workers that know nothing else."""
    setting, plan = Setting(POOL), (PlanStep(BIRCH, "solve"),)
    exact = dict(zip(CLASSES, rounds.policy(setting, plan, FLINT, second), strict=True))[KIND]
    random, right, again, usd = Random(7), 0, 0, 0.0
    for play in range(PLAYS):
        problem = any_problem(random, KIND)
        opened = []

        def judge(answer: str, answered: str = problem.answer, opened: list[int] = opened) -> Sequence[Step]:
            doubts = rounds.doubt_chance(POOL[FLINT], right=int(final_answer(answer) == answered), own=False)
            opened.append(int(random.random() < doubts))
            return _steps(second) if opened[0] else ()

        played = Stage(plan, POOL, problem, f"rounds|{play}", judge).play()
        right, again, usd = right + played.right, again + opened[0], usd + played.usd
        usd += rounds.judging_usd(POOL[FLINT], problem.level, rounds.PLANS if opened[0] else rounds.ACCEPTS)
    assert abs(right / PLAYS - exact.right) < 4 * (0.25 / PLAYS) ** 0.5
    assert abs(again / PLAYS - exact.again) < 4 * (0.25 / PLAYS) ** 0.5
    assert usd / PLAYS == pytest.approx(exact.usd, rel=0.08)


def test_a_frontier_holds_what_is_worth_its_price() -> None:
    points = [Point(1, 0.2), Point(2, 0.1), Point(2, 0.3), Point(3, 0.6), Point(4, 0.6), Point(5, 0.7)]
    assert rounds.frontier(points) == [Point(1, 0.2), Point(3, 0.6), Point(5, 0.7)]
    random = Random(3)
    hull = rounds.frontier([Point(random.random(), random.random()) for _ in range(400)])
    slopes = [(b.right - a.right) / (b.usd - a.usd) for a, b in pairwise(hull)]
    assert slopes == sorted(slopes, reverse=True)
    assert min(slopes) > 0


def test_both_arms_spend_the_same() -> None:
    classes = [[Point(1, 0.2), Point(3, 0.6)], [Point(1, 0.5), Point(2, 0.9), Point(9, 1.0)]]
    for budget in (1.0, 1.2, 1.5, 2.0, 4.0):
        chosen = rounds.by_class(classes, budget)
        assert chosen is not None
        assert sum(point.usd for point in chosen) / 2 == pytest.approx(budget)
    chosen = rounds.by_class(classes, 1.5)
    assert chosen == [Point(1, 0.2), Point(2, 0.9)], "where it helps most"
    assert rounds.by_class(classes, 0.9) is None
    same = [[Point(1, 0.2), Point(3, 0.6)], [Point(1, 0.4), Point(3, 1.0)]]
    assert rounds.same_for_all(same, 0.5) is None
    half = rounds.same_for_all(same, 2.0)
    assert half is not None
    assert [point.right for point in half] == pytest.approx([0.4, 0.7])
    assert rounds.same_for_all(same, 9.0) == [Point(3, 0.6), Point(3, 1.0)]


def test_two_rounds_win_only_with_a_conductor_that_sees_faults() -> None:
    """Over plans of at most two steps in the first round of either arm; the page has all."""
    setting = Setting(POOL[1:2] + POOL[5:] + POOL[:1])
    single = rounds.by_class(rounds.one_round(setting, 3), 0.0007)
    assert single is not None
    ahead = []
    for conductor in (1, 2):  # flint and atlas
        double = rounds.by_class(rounds.two_rounds(setting, conductor), 0.0007)
        assert double is not None
        ahead.append(rounds.compare_rounds(single, double).ahead)
    assert ahead[0].low > 0 > ahead[1].high
