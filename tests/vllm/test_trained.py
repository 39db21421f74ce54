"""The trained checkpoint, served by a real vLLM, conducts through the service as it does in the trainer.

`trained/` holds what `make learn` and `baton conductor export` made; its card is `baton.json`.
"""

import json
import os
import subprocess
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from math import sqrt
from pathlib import Path
from typing import Any, Final

import pytest

from app.core.plan import proposals
from app.lab import manifest
from app.lab.evaluate import draw_exam
from app.lab.lessons import Lesson, Split
from app.lab.outcome import Outcome, outcome
from app.lab.plans import STEPS, SUBTASKS, Plan, PlanStep
from app.lab.workers import final_answer
from app.lab.world import Setting, standard_pool
from tests.harness.processes import Caller, open_caller, running_process
from tests.lab.pure_execution import to_workflow
from tests.vllm.server import OFFLINE, PYTHON, ROOT, TRAINED, VllmServer
from tests.vllm.test_conductor import check_journal, check_plan, check_usage, write_environment

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600)]

SPLIT: Final[Split] = "held-out tasks"
TASKS, SEED, THREADS = 160, 11, 8
ROLES: Final = {words: role for role, words in SUBTASKS.items()}
NAMES: Final = [worker.name for worker in standard_pool()]


def pool(server: VllmServer) -> str:
    """The world's standard pool, conducted by the checkpoint."""
    workers = "".join(
        f"""
[workers.{worker.name}]
provider = "world"
model = "{worker.name}"
price = {{ input = {worker.price * 0.35:.6f}, output = {worker.price:.6f}, cached = 0 }}
strengths = {json.dumps(worker.strengths.split())}
"""
        for worker in standard_pool()
    )
    return f"""
[providers.world]
format = "rehearsal"
options = {{ world = "standard", delay = "0" }}
{workers}
[providers.trained]
format = "openai"
base_url = "{server.base_url}"
options = {{ positional = true, logprobs = true }}
[workers.conductor]
provider = "trained"
model = "{server.model}"
price = {{ input = 0, output = 0 }}
pooled = false
[tiers.baton-ultra]
pool = "all"
conductor = {{ kind = "model", worker = "conductor", prompt = "compact" }}
fallback = "ember"
limits = {{ steps = {STEPS}, output_tokens = 1000, seconds = 120 }}
"""


@dataclass(frozen=True)
class ConductedTask:
    """One held-out task through the service."""

    order: tuple[int, ...]
    plan: Plan
    right: bool


def conduct(caller: Caller, lesson: Lesson) -> ConductedTask:
    """Ask, and read the plan from the journal."""
    answer, reply = caller.ask_whole("baton-ultra", lesson.problem.text)
    run, events = caller.run(reply["baton"]["run"]), caller.events(reply["baton"]["run"])
    check_journal(events)
    check_plan(run, tuple(NAMES))
    check_usage(reply, run, events)
    assert (run["state"], run["degraded"]) == ("succeeded", False)
    subtasks = [caller.read(f"/v1/runs/{run['id']}/steps/{step['n']}")["subtask"] for step in run["steps"]]
    order = tuple(NAMES.index(name) for name in run["proposals"][0]["order"])
    steps = zip(run["steps"], subtasks, strict=True)
    return ConductedTask(
        order, tuple(step_of(step, subtask) for step, subtask in steps), final_answer(answer) == lesson.problem.answer
    )


def step_of(step: dict[str, Any], subtask: str) -> PlanStep:
    """A journaled step as the world has it."""
    sees = tuple(name for name in step["access"] if name != "user")
    return PlanStep(NAMES.index(step["planned_worker"]), ROLES[subtask], "user" in step["access"], sees)


def reference(results: list[ConductedTask]) -> list[Plan]:
    """The trainer's plan for each task under the order in which the service has shown the workers."""
    request = {"model": str(TRAINED), "split": SPLIT, "seed": SEED, "orders": [result.order for result in results]}
    process = subprocess.run(
        [str(PYTHON), "-m", "tests.vllm.reference"],
        input=json.dumps(request),
        env=os.environ | OFFLINE | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert process.returncode == 0, process.stderr
    plans = []
    for text, result in zip(json.loads(process.stdout), results, strict=True):
        names = [NAMES[place] for place in result.order]
        steps = proposals.read_plan(json.loads(text), proposals.by_ordinal(names), STEPS)
        plans.append(
            tuple(
                PlanStep(NAMES.index(step.worker), ROLES[step.subtask], step.access.user, step.access.steps)
                for step in steps
            )
        )
        assert to_workflow(plans[-1], NAMES).steps == steps
    return plans


def worth(lesson: Lesson, plan: Plan) -> Outcome:
    """Return the exact worth of a plan."""
    return outcome(plan, lesson.problem.kind, Setting(lesson.pool))


def test_it_conducts_through_the_service_as_it_does_in_the_trainer(trained_server: VllmServer, tmp_path: Path) -> None:
    """Every plan is valid, nearly every one is the trainer's, and so is the reward; what the workers then really
    answered is as often right as the plans promise."""
    lessons = draw_exam(SPLIT, TASKS, SEED)
    environ = write_environment(tmp_path, pool(trained_server))
    with running_process("serve", tmp_path, environ) as process, open_caller(process.url, timeout=120) as caller:
        with ThreadPoolExecutor(THREADS) as threads:
            results = list(threads.map(lambda lesson: conduct(caller, lesson), lessons))
        assert caller.read("/v1/runs", tier="baton-ultra", degraded="true")["data"] == []
    trainers = reference(results)
    same = sum(answer.plan == theirs for answer, theirs in zip(results, trainers, strict=True))
    served_ = [worth(lesson, answer.plan) for lesson, answer in zip(lessons, results, strict=True)]
    trained = [worth(lesson, plan) for lesson, plan in zip(lessons, trainers, strict=True)]
    rewards = []
    for outcomes in (served_, trained):
        rewards.append(sum(outcome.reward for outcome in outcomes) / TASKS)
    print(f"{same} of {TASKS} plans are the trainer's; reward {rewards[0]:.4f}, in the trainer {rewards[1]:.4f}")
    assert same >= 0.98 * TASKS
    assert rewards[0] == pytest.approx(rewards[1], abs=0.005)
    spread = sqrt(sum(answer.right * (1 - answer.right) for answer in served_))
    assert sum(answer.right for answer in results) == pytest.approx(
        sum(answer.right for answer in served_), abs=4 * spread
    )


def test_what_it_reaches_is_what_its_card_says(trained_server: VllmServer) -> None:
    """The card's figures are of other tasks of the same split, and no plan is one for all."""
    card, golden = manifest.read(TRAINED)
    assert card.evaluation[SPLIT]["reward"] > 0.75
    assert len({prompt.plan for prompt in golden}) > 4
