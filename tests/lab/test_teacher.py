"""The teacher of the warm start: what it may do, and that trying differently beats trying by chance."""

from random import Random

import pytest

from app.lab import prompt, teacher
from app.lab.lessons import draw_lesson, draw_sensible_plan
from app.lab.outcome import outcome
from app.lab.plans import STEPS, Plan, from_tokens, results_of_steps, to_tokens, without_needless_steps
from app.lab.world import Setting


class Tries:
    """The worth of plans for one lesson, and the plans that were carried out."""

    def __init__(self, seed: int) -> None:
        self.lesson = draw_lesson(Random(seed), "train", standard=0.3)
        self.workers = len(self.lesson.pool)
        self.rewards: dict[Plan, float] = {}
        self.times = 0

    def worth(self, plan: Plan) -> float:
        placed = prompt.over_places(plan, self.lesson.order)
        self.times += 1
        self.rewards[plan] = outcome(placed, self.lesson.problem.kind, Setting(self.lesson.pool)).reward
        return self.rewards[plan]


@pytest.mark.parametrize("count", [1, 8, 64])
def test_it_carries_no_plan_out_twice_and_keeps_the_best(count: int) -> None:
    for seed in range(30):
        tries = Tries(seed)
        plan, most = teacher.search_best_plan(Random(seed), tries.workers, tries.worth, count)
        assert tries.times == len(tries.rewards) <= count
        assert most == tries.rewards[plan] == max(tries.rewards.values())


def test_a_changed_plan_is_one_that_answers_and_wastes_nothing() -> None:
    random = Random(3)
    lengths = set()
    for _ in range(2_000):
        before = draw_sensible_plan(random, 4)
        plan = teacher.mutate(random, before, 4)
        lengths.add(len(plan) - len(before))
        assert 1 <= len(plan) <= STEPS
        assert results_of_steps(plan)[-1] == "answer"
        assert without_needless_steps(plan) == plan
        assert from_tokens(to_tokens(plan)) == plan
    assert {-1, 0, 1} <= lengths


def test_changes_of_the_best_find_more_than_chance() -> None:
    """With as many tries; what one leaves between them is most of what a conductor could not learn by imitation."""
    searched = by_chance = 0.0
    for seed in range(40):
        tries, random = Tries(seed), Random(seed)
        searched += teacher.search_best_plan(random, tries.workers, tries.worth, 64)[1]
        by_chance += max(tries.worth(draw_sensible_plan(random, tries.workers)) for _ in range(64))
    assert searched / 40 > by_chance / 40 + 0.02
