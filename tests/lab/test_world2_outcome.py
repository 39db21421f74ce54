"""World 2: the exact simulator and the executor agree on every shape and role, and there is nothing to exploit."""

import math
from random import Random

import pytest
from msgspec.structs import replace

from app.lab.world2 import tasks as composed
from app.lab.world2.constants import TRAITS, constants
from app.lab.world2.execution import Library, draw_verdict, execute_plan, final_answer
from app.lab.world2.outcome import Rewards, all_plans, expected_reward, rewards_of_all_plans
from app.lab.world2.rules import size_of
from app.lab.world2.shapes import MOST_STEPS, SUBTASKS, Plan, catalogue
from app.lab.world2.tasks import Task
from app.lab.world2.workers import Pool, draw_pool


class Die(float):
    """A draw that is not a number but a branch: a comparison with a chance goes both ways, one after the other."""

    dice: "Dice"

    def __lt__(self, chance: float) -> bool:
        return self.dice.decide(chance)

    def __ge__(self, chance: float) -> bool:
        return not self.dice.decide(chance)


class Dice(Random):
    """Dice that go through all that can happen, and keep how probable each of it is."""

    def begin(self, script: list[bool]) -> None:
        """Begin one execution, whose first decisions are given."""
        self.script, self.answers, self.weight = script, list[bool](), 1.0

    def random(self) -> float:
        """Return a branch."""
        die = Die(0.5)
        die.dice = self
        return die

    def decide(self, chance: float) -> bool:
        """Decide by the script, and beyond it for true."""
        answer = self.script[len(self.answers)] if len(self.answers) < len(self.script) else True
        self.answers.append(answer)
        self.weight *= chance if answer else 1 - chance
        return answer


def exactly(plan: Plan, task: Task, chosen: Pool) -> tuple[float, float]:
    """The chance of a right answer by executing every branch; and the reward."""
    dice, script, right, reward, total = Dice(), list[bool](), 0.0, 0.0, 0.0
    while True:
        dice.begin(script)
        execution = execute_plan(plan, task, chosen, dice)
        total += dice.weight
        right += dice.weight * execution.right
        reward += dice.weight * execution.reward
        script = dice.answers
        while script and not script[-1]:
            script.pop()
        if not script:
            break
        script[-1] = False
    assert total == pytest.approx(1)
    return right, reward


def test_the_executor_and_the_simulator_agree_in_distribution_on_every_shape_and_role() -> None:
    """Every branch of every execution is carried out by messages; the sum is what the simulator says, to the digit."""
    random, roles = Random(2), set[str]()
    tasks = composed.draw_tasks("train", "agree", 200)
    settings = [Rewards(draw_pool(random)) for _ in range(3)]
    for number, (name, steps) in enumerate(catalogue().items()):
        rewards, parts = settings[number % 3], 2 if len(steps) <= 3 - ("combine" in name) else 1
        task = next(task for task in tasks[number:] if len(task.parts) == parts and task.document == number % 3)
        workers = [random.randrange(len(rewards.pool)) for _ in steps]
        workers[-1] = workers[0] if number % 2 else workers[-1]
        plan = Plan(name, tuple(workers))
        right, reward = exactly(plan, task, rewards.pool)
        assert right == pytest.approx(float(rewards.right(name, task)[task.trait][plan.workers])), name
        worth = float(rewards.worth(name, size_of(task))[plan.workers])
        assert reward == pytest.approx(right * worth), name
        roles |= {step.role for step in steps}
    assert roles == set(SUBTASKS)


def test_three_parts_agree_where_parts_are_handed_over() -> None:
    task = next(task for task in composed.draw_tasks("train", "three", 100) if len(task.parts) == 3)
    rewards = Rewards(draw_pool(Random(6)))
    for plan in (Plan("first+second solve", (0, 1, 2)), Plan("first reason", (1, 1)), Plan("solve check", (0, 0))):
        expected_right = float(rewards.right(plan.shape, task)[task.trait][plan.workers])
        assert exactly(plan, task, rewards.pool)[0] == pytest.approx(expected_right), plan


def test_bills_agree_and_executions_are_not_all_alike() -> None:
    random, surplus, variance = Random(2), 0.0, 0.0
    tasks, rewards = composed.draw_tasks("train", "bills", 60), Rewards(draw_pool(random))
    for _ in range(300):
        task, name = random.choice(tasks), random.choice(sorted(catalogue()))
        plan = Plan(name, tuple(random.randrange(len(rewards.pool)) for _ in catalogue()[name]))
        execution = execute_plan(plan, task, rewards.pool, random)
        usd, seconds, _ = rewards.bill(name, size_of(task))
        assert execution.usd == pytest.approx(usd[plan.workers])
        assert execution.seconds == pytest.approx(seconds[plan.workers])
        chance = float(rewards.right(name, task)[task.trait][plan.workers])
        surplus += execution.right - chance
        variance += chance * (1 - chance)
    assert abs(surplus) <= 4 * math.sqrt(variance)


@pytest.fixture(scope="module")
def chosen() -> Pool:
    """A pool."""
    return draw_pool(Random(5))


def test_the_same_call_twice_has_dice_of_its_own(chosen: Pool) -> None:
    """In world 1 the same subtask asked three times gave three identical answers: asking again was worthless."""
    task = next(task for task in composed.draw_tasks("train", "dice", 50) if len(task.parts) == 1 and task.trait == 2)
    random, single = Random(0), Plan("solve", (0,))
    assert {execute_plan(single, task, chosen, random).right for _ in range(60)} == {True, False}
    rewards = Rewards(chosen)
    alone = rewards.right("solve", task)[1, 0]
    thrice = rewards.right("solve+solve+solve combine", task)[1, 0, 0, 0]
    assert alone > 0.5
    assert abs(float(thrice[0]) - float(alone)) > 0.001


def test_steps_that_may_not_see_the_task_fail_without_a_digest(chosen: Pool) -> None:
    (task,) = composed.draw_tasks("train", "withheld", 1)
    random = Random(1)
    executions = [execute_plan(Plan("digest solve", (0, 1)), task, chosen, random, Library([])).right for _ in range(5)]
    assert not any(executions)
    assert final_answer("I was not shown what this needs, so I cannot know.") == ""


def test_withholding_the_task_pays_where_it_is_long_and_costs_where_it_is_short() -> None:
    random, gains = Random(8), {0: 0.0, 2: 0.0}
    for _ in range(12):
        rewards = Rewards(draw_pool(random))
        for document in gains:
            task = next(
                task for task in composed.draw_tasks("train", str(random.random()), 80) if task.document == document
            )
            open_, digested = rewards.table("reason", task).max(), rewards.table("digest reason", task).max()
            gains[document] += float(digested - open_)
    assert gains[0] < 0 < gains[2]


def test_a_judge_errs_as_often_as_published() -> None:
    random = Random(4)
    passed = sum(draw_verdict(False, random) for _ in range(4_000)) / 4_000
    failed = sum(not draw_verdict(True, random) for _ in range(4_000)) / 4_000
    assert passed == pytest.approx(constants().judge_false_pass, abs=0.025)
    assert failed == pytest.approx(constants().judge_false_fail, abs=0.025)


def test_roles_are_worth_no_more_than_was_published(chosen: Pool) -> None:
    """A plan helps by at most 0.1 logits, a check of one's own by at most 0.2, and a mixture with weak members can be
    worse than the best worker alone."""
    task = next(
        task for task in composed.draw_tasks("train", "roles", 200) if len(task.parts) == 1 and not task.document
    )
    rewards = Rewards(chosen)
    alone = _logit(rewards, "reason", task, 0)
    for worker in range(len(chosen)):
        assert abs(_logit(rewards, "plan reason", task, worker, 0) - alone) <= 0.12
    best = rewards.right("reason", task).mean(axis=0)
    strongest, weakest = int(best.argmax()), int(best.argmin())
    mixed = rewards.right("reason+reason+reason combine", task).mean(axis=0)
    assert mixed[strongest, weakest, weakest, weakest] < best[strongest]


def _logit(rewards: Rewards, shape: str, task: Task, *workers: int) -> float:
    chance = float(rewards.right(shape, task).mean(axis=0)[workers])
    return math.log(chance / (1 - chance))


def test_the_table_of_all_plans_holds_each_plan_at_its_place(chosen: Pool) -> None:
    (task,) = composed.draw_tasks("train", "table", 1)
    rewards = Rewards(chosen)
    values, every = rewards_of_all_plans(rewards, task), all_plans(len(chosen))
    assert len(values) == len(every) == sum(len(chosen) ** len(steps) for steps in catalogue().values())
    for place in range(0, len(every), 997):
        assert values[place] == pytest.approx(expected_reward(every[place], task, rewards), rel=1e-5)
    assert values.max() <= 1
    assert values.min() >= 0
    assert max(map(len, catalogue().values())) == MOST_STEPS


def test_rewards_over_several_pools_that_may_be_true_are_their_mean(chosen: Pool) -> None:
    (task,) = composed.draw_tasks("train", "several", 1)
    abler = tuple([replace(worker, ability=worker.ability + 1, edges=worker.edges[::-1]) for worker in chosen])
    apart = (rewards_of_all_plans(Rewards(chosen), task) + rewards_of_all_plans(Rewards(abler), task)) / 2
    assert rewards_of_all_plans(Rewards(chosen, others=[abler]), task) == pytest.approx(apart, rel=1e-5)


def test_right_is_worth_more_than_wrong_at_any_cost(chosen: Pool) -> None:
    for task in composed.draw_tasks("train", "worth", 20):
        rewards = Rewards(chosen)
        assert min(float(rewards.worth(name, size_of(task)).min()) for name in catalogue()) > 0.4
    assert len(TRAITS) == 4
