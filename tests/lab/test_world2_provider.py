"""World 2 through the whole service: a plan is executed by its workers, and the answer is graded as the world says."""

import json
from pathlib import Path

from app.core.message.chat import Message, Text
from app.lab.grading import grader
from app.lab.world2.outcome import Rewards
from app.lab.world2.provider import TIER, SecondWorld, draw_numbered_pool, pool_file, service_tasks, task_set
from app.lab.world2.rules import size_of
from app.lab.world2.shapes import Plan, workflow
from tests.harness.in_process import finish, order, running_service


async def test_the_service_executes_plans_of_the_second_world_at_the_simulators_price(tmp_path: Path) -> None:
    chosen = draw_numbered_pool(0, unseen=True)
    names = [worker.name for worker in chosen]
    plan = Plan("digest solve check", (0, 1, 0))
    steps = [
        {"worker": step.worker, "subtask": step.subtask, "access": step.access.as_list()}
        for step in workflow(plan, tuple(names)).steps
    ]
    answers = []
    async with running_service(tmp_path, pool_file(0, unseen=True)) as runtime:
        for task in [task for task in service_tasks("fresh") if task.document < 2][:4]:
            followed_run = await runtime.runs.start(order(runtime, TIER, task.text, plan={"steps": steps}))
            ended = (await finish(followed_run)).ended
            assert ended.error is None
            answers.append(ended.answer)
            usd = float(Rewards(chosen).bill(plan.shape, size_of(task))[0][plan.workers])
            assert 0 <= ended.state.usd - 1e6 * usd <= len(steps), "in micro-dollars, rounded up for each call"
    assert all(answer.startswith("Worked out by ") for answer in answers)


def test_a_task_set_grades_the_answers_of_this_world() -> None:
    line = json.loads(next(task_set("fresh")))
    rule = grader(line["grader"])
    expected = line["grader"]["expected"]
    assert rule.grade(f"Worked out by beleth. The answer is {expected}").score == 1
    assert rule.grade("Worked out by beleth. The answer is nothing").score == 0


def test_the_same_call_twice_is_two_draws() -> None:
    world = SecondWorld("0")
    texts = set()
    for task in service_tasks("train")[:12]:
        for _ in range(4):
            answer = world.answer("beleth", (Message("user", (Text(task.text),)),))
            assert answer is not None
            texts.add((task.text, answer.text))
    assert len(texts) > 12
    assert world.answer("nobody", ()) is None
