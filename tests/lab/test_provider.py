"""The world's workers through the whole service: the same plan, the same chances, the same bill, and a clean audit."""

import math
from pathlib import Path
from random import Random

import pytest

from app.core.message.chat import Message, Sampling, Text
from app.core.pool.catalog import Deadlines, ProviderSpec, Worker
from app.errors import WorkerTimeout
from app.lab.outcome import bill, right
from app.lab.plans import Plan, PlanStep
from app.lab.provider import WorldProvider
from app.lab.workers import final_answer
from app.lab.world import standard_pool
from app.providers.protocol import Request
from app.providers.rehearsal.provider import RehearsalProvider
from tests.harness.in_process import finish, order, running_service
from tests.lab.pure_execution import to_workflow
from tests.lab.test_world import any_problem

PLANS: tuple[Plan, ...] = (
    (PlanStep(0, "solve"),),
    (PlanStep(5, "plan"), PlanStep(0, "reason", True, (0,)), PlanStep(5, "check", True, (1,))),
    (PlanStep(0, "solve"), PlanStep(3, "solve"), PlanStep(4, "combine", True, (0, 1))),
)
KIND = (0, 1)
RUNS = 30


def pool_text() -> str:
    """The standard pool as a pool file."""
    workers = "".join(
        f"""
[workers.{worker.name}]
provider = "world"
model = "{worker.name}"
price = {{ input = {worker.price * 0.35:.6f}, output = {worker.price:.6f}, cached = 0 }}
strengths = ["{worker.strengths}"]
"""
        for worker in standard_pool()
    )
    return f"""
[providers.world]
format = "rehearsal"
options = {{ world = "standard", delay = "0" }}
{workers}
[tiers.baton-mini]
pool = [{", ".join(f'"{worker.name}"' for worker in standard_pool())}]
conductor = {{ kind = "fixed", shape = "single", workers = ["atlas"] }}
limits = {{ steps = 4, seconds = 30, output_tokens = 1000 }}
"""


async def test_the_service_finds_what_the_simulator_says(tmp_path: Path) -> None:
    random = Random(0)
    names = [worker.name for worker in standard_pool()]
    surplus = spread = 0.0
    async with running_service(tmp_path, pool_text()) as runtime:
        for plan in PLANS:
            steps = to_workflow(plan, names).steps
            steps_json = [{"worker": s.worker, "subtask": s.subtask, "access": s.access.as_list()} for s in steps]
            chance, dollars = right(plan, KIND, standard_pool()), bill(plan, KIND[1], standard_pool())[0]
            for _ in range(RUNS):
                problem = any_problem(random, KIND)
                followed_run = await runtime.runs.start(
                    order(runtime, "baton-mini", problem.text, plan={"steps": steps_json})
                )
                ended = (await finish(followed_run)).ended
                assert ended.error is None
                surplus += (final_answer(ended.answer) == problem.answer) - chance
                spread += chance * (1 - chance)
                assert 0 <= ended.state.usd - 1e6 * dollars <= len(plan), "in micro-dollars, rounded up for each call"
    assert abs(surplus) <= 4 * math.sqrt(spread)


def asking(model: str, text: str) -> Request:
    """A call of this worker."""
    return Request(Worker("w", "world", model), (Message("user", (Text(text),)),), Sampling(max_tokens=100))


def provider(**options: str) -> WorldProvider:
    """A world behind the seam."""
    spec = ProviderSpec("world", "rehearsal", options={"world": "standard", **options})
    return WorldProvider(spec, RehearsalProvider(spec))


async def test_a_worker_takes_its_time_and_keeps_its_deadline() -> None:
    slow = provider(delay="1000")
    request = asking("ember", "What is 2 + 3?")
    with pytest.raises(WorkerTimeout):
        async for _ in slow.stream(request, slow.render(request), Deadlines(first=0.01, total=0.01)):
            pass


async def test_whoever_is_no_worker_of_the_world_is_one_of_the_rehearsal_pool() -> None:
    both = provider(delay="0")
    request = asking("sage", "What is 17 * 23?")
    pieces = [piece async for some in both.stream(request, both.render(request), Deadlines()) for piece in some]
    assert "391" in "".join(getattr(piece, "text", "") for piece in pieces)


async def test_the_same_question_asked_again_gets_an_answer_of_its_own_unless_the_request_has_a_seed() -> None:
    """Three identical answers to the same subtask made self-consistency worthless."""
    question = any_problem(Random(1), (0, 1)).text
    worlds = provider(delay="0")
    for sampling, different in ((Sampling(max_tokens=100), 2), (Sampling(max_tokens=100, seed=7), 1)):
        request = Request(Worker("w", "world", "atlas"), (Message("user", (Text(question),)),), sampling)
        answers = set()
        for _ in range(30):
            pieces = [
                piece async for some in worlds.stream(request, worlds.render(request), Deadlines()) for piece in some
            ]
            answers.add("".join(getattr(piece, "text", "") for piece in pieces))
        assert len(answers) == different
