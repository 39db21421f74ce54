"""Baselines and the comparison: each arm does what its name says, nothing passes the optimum, intervals mean what they
say."""

from itertools import combinations
from random import Random

import pytest
from msgspec.structs import replace

from app.lab import search
from app.lab.baselines import ARMS, FIXED, OPTIMUM, plans_of_arm, search_arms
from app.lab.evaluate import TRAINED, bootstrap_lessons, compare, draw_exam, format_table, gap_closed
from app.lab.lessons import SPLITS, Lesson, draw_lesson
from app.lab.paired_statistics import interval, paired_bootstrap
from app.lab.world import HELD_OUT_PRICES, Setting, Weights, is_held_out, profiles
from app.providers.rehearsal.task_families import FAMILIES

SMALL = tuple(profiles()[name] for name in ("birch", "cedar", "flint"))
"""Three workers: searched whole in a blink."""


def lessons(count: int) -> list[Lesson]:
    """Fresh tasks over the small pool."""
    random = Random(4)
    drawn_ = [draw_lesson(random, "held-out tasks") for _ in range(count)]
    return [Lesson(lesson.problem, SMALL, (2, 0, 1)) for lesson in drawn_]


def test_each_fixed_arm_has_the_shape_of_its_name_and_none_beats_the_best_fixed_plan() -> None:
    setting = Setting(SMALL)
    arms_by_name = search_arms(setting)
    roles = {}
    for arm, plan in arms_by_name.fixed.items():
        roles[arm] = [step.role for step in plan]
    assert len(roles["best single worker"]) == 1
    assert roles["best planner-executor-checker"][0::2] == ["plan", "check"]
    assert roles["mixture of agents"][-1] == "combine"
    worth = {arm: search.mean_reward(plan, setting) for arm, plan in arms_by_name.fixed.items()}
    assert max(worth.values()) == worth[FIXED]
    assert arms_by_name.tried == sum(len(SMALL) ** len(shape) for shape in search.shapes())


def test_nothing_passes_the_optimum_and_every_arm_is_in_the_table() -> None:
    tasks = lessons(60)
    table = compare("held-out tasks", tasks, plans_of_arm("random sensible plan", tasks, Weights(), 9), Weights(), 0)
    assert [row.arm for row in table.rows] == [*ARMS, TRAINED]
    assert max(row.reward for row in table.rows) == table.row(OPTIMUM).reward
    assert table.constant <= 1e-12
    assert all(arm in format_table(table) for arm in ARMS)


def test_the_share_of_the_gap_is_nothing_for_the_fixed_plan_and_all_for_the_optimum() -> None:
    tasks, weights = lessons(60), Weights()
    fixed = compare("held-out tasks", tasks, plans_of_arm(FIXED, tasks, weights, 0), weights, 0)
    optimum = compare("held-out tasks", tasks, plans_of_arm(OPTIMUM, tasks, weights, 0), weights, 0)
    assert (fixed.closed.value, fixed.closed.low, fixed.closed.high) == (0, 0, 0)
    assert optimum.closed.value == pytest.approx(1)
    assert optimum.row(FIXED).ahead.low > 0
    assert fixed.row(FIXED).ahead.value == 0


def test_the_bootstrap_is_paired() -> None:
    """Two arms that differ by the same on every lesson differ by that in every resample."""
    random = Random(1)
    values = [random.random() for _ in range(50)]
    means = paired_bootstrap({"a": values, "b": [value + 0.1 for value in values]}, Random(0), 200)
    assert all(mean["b"] - mean["a"] == pytest.approx(0.1) for mean in means)
    assert means[0]["a"] == pytest.approx(sum(values) / 50)
    assert len({round(mean["a"], 9) for mean in means}) > 100


def test_over_several_pools_it_is_pools_that_are_drawn_again() -> None:
    """Each pool has a value of its own, which all of its lessons share: twenty times as many say nothing more."""
    pools = list(combinations(profiles().values(), 3))[:16]
    widths = []
    for each in (1, 20):
        drawn = [replace(lesson, pool=pool) for pool in pools for lesson in lessons(each)]
        values = [float(pools.index(lesson.pool)) for lesson in drawn]
        means = bootstrap_lessons(drawn, {"a": values}, 0)
        assert means[0]["a"] == pytest.approx(7.5)
        found = interval([mean["a"] for mean in means])
        widths.append(found.high - found.low)
    assert widths[1] == pytest.approx(widths[0])


@pytest.mark.parametrize("split", SPLITS)
def test_what_is_held_out_is_not_what_is_trained_on(split: str) -> None:
    assert split in SPLITS
    by_name = {family.name: family for family in FAMILIES}
    trained = {draw_lesson(Random(f"t{n}"), "train").problem.text for n in range(300)}
    for lesson in draw_exam(split, 80, 1):
        family = by_name[lesson.problem.family]
        assert family.held_out is (split == "unseen families")
        assert is_held_out([worker.name for worker in lesson.pool]) is (split == "random pools")
        if split == "random pools":
            factors = {round(worker.price / profiles()[worker.name].price, 3) for worker in lesson.pool}
            assert factors <= set(HELD_OUT_PRICES)
        if split in ("unseen paraphrases", "unseen families"):
            assert lesson.problem.text not in trained


def test_tasks_without_a_gap_have_a_share_of_it_too() -> None:
    assert gap_closed({TRAINED: 0.5, FIXED: 0.6, OPTIMUM: 0.6}) == 0.0
    assert gap_closed({TRAINED: 0.7, FIXED: 0.6, OPTIMUM: 0.8}) == pytest.approx(0.5)
