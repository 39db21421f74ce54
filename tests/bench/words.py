"""`python -m tests.bench.words FOLDER`: a conductor of words (`app/lab/world2/words.py`) in a real vLLM on CPU.

The folder is what `python -m app.lab.world2.words --out FOLDER` has left. vLLM serves it (`tests/vllm/run` builds its
environment), a process of the service conducts with it over the workers of world 2, and held-out tasks are asked over
HTTP, over several pools of workers that training has never met. The cards are those of the world, stored as trials of a
calibration. Printed are: valid plans; the exact expected reward of the plans that the journal has, and of those that
the trainer's own decoding of the same weights writes for the same prompts; answers that were right; and tokens of whole
runs, the conductor's included. The tuned fixed plans answer the first `--compared` tasks through the
same service; each is the best of its kind for a pool, by exact rewards of tasks that are not asked.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from random import Random
from threading import Lock
from typing import Any

import numpy as np
from msgspec import Struct
from msgspec.structs import asdict

from app.conductor import cards
from app.core.rating.calibration import Trial
from app.lab.world2.baselines import Setting, list_fixed_policies
from app.lab.world2.constants import DOMAINS, constants
from app.lab.world2.execution import final_answer
from app.lab.world2.outcome import Rewards, expected_reward
from app.lab.world2.provider import service_tasks
from app.lab.world2.shapes import MOST_STEPS, Plan, workflow
from app.lab.world2.tasks import Task, draw_tasks
from app.lab.world2.words_lessons import parse_plan, prompt
from app.lab.world2.workers import Pool, draw_pool
from app.store.sql import open_store
from tests.harness.processes import KEY, Caller, environment, open_caller, running_process
from tests.vllm.server import OFFLINE, PYTHON, ROOT, VllmServer, serve

POOLS = 8
THREADS = 8
SECONDS = 300.0
CONDUCTED = "conducted"
COMPARED = ("mixture of agents", "planner-executor-checker")


class ServedTask(Struct, frozen=True):
    """One task through the service: the plan that was carried out, and what came of it."""

    order: tuple[int, ...]
    """The place in the pool of each ordinal."""
    valid: bool
    """True if the model's first proposal was accepted."""
    plan: Plan | None
    """None for a plan that is none of the world's catalogue."""
    right: bool
    tokens: int
    """Of the whole run, the conductor's included."""
    usd: float
    conducting: int
    """The conductor's tokens."""


def main() -> int:
    """Serve a conductor of words in a real vLLM, and ask held-out tasks through the service."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.words", description=main.__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--tasks", type=int, default=1_000)
    parser.add_argument("--compared", type=int, default=200, help="tasks that the tuned fixed plans answer")
    parser.add_argument("--keep", type=Path, help="a file of what was asked, which is not asked again")
    parser.add_argument("--url", help="a vLLM that serves the folder already, with /v1")
    parser.add_argument("--seed", type=int, default=0, help="of the pools")
    options = parser.parse_args()
    pools = bench_pools(options.seed)
    if options.url:
        _measure(options, pools, VllmServer(options.url))
        return 0
    with serve(_say, options.folder) as server:
        _measure(options, pools, server)
    return 0


def bench_pools(seed: int) -> list[Pool]:
    """Return pools of workers that training has never met."""
    random = Random(f"words|bench|{seed}")
    return [draw_pool(random, unseen_workers=True) for _ in range(POOLS)]


def _measure(options: argparse.Namespace, pools: Sequence[Pool], server: VllmServer) -> None:
    held_out = service_tasks("fresh")[: options.tasks]
    over = [pools[place % POOLS] for place in range(len(held_out))]
    fixed = tune_plans(pools)
    with tempfile.TemporaryDirectory(prefix="baton-words-") as name:
        folder = Path(name)
        (folder / "pool.toml").write_text(pool_file(pools, server))
        environ = environment(folder, BATON_POOL=str(folder / "pool.toml"), BATON_BOOTSTRAP_KEY=KEY)
        environ |= {"BATON_DATABASE_URL": f"sqlite:///{folder / 'baton.db'}", "BATON_LOG_LEVEL": "error"}
        asyncio.run(_store_trials(environ["BATON_DATABASE_URL"], pools))
        with running_process("serve", folder, environ) as process, open_caller(process.url, timeout=SECONDS) as caller:

            def answered(arm: str, count: int) -> list[ServedTask]:
                plans = fixed.get(arm) or [None] * POOLS

                def ask(place: int) -> ServedTask:
                    return _ask(caller, place % POOLS, over[place], held_out[place], plans[place % POOLS])

                return _together(ask, count, StoredTasks(options.keep, arm))

            outcomes = answered(CONDUCTED, len(held_out))
            compared = {arm: answered(arm, min(options.compared, len(held_out))) for arm in COMPARED}
    trainers = _of_the_trainer(options.folder, held_out, over, outcomes)
    print(json.dumps(report(held_out, over, outcomes, trainers, compared, fixed), indent=1))


class StoredTasks:
    """The tasks of one arm, kept in lines of a file that arms may share; without a file nothing is kept."""

    def __init__(self, path: Path | None, arm: str) -> None:
        self._path, self._arm = path, arm
        self._lock = Lock()
        self.known: dict[int, ServedTask] = {}
        lines = path.read_text().splitlines() if path and path.exists() else []
        for line in lines:
            row = json.loads(line)
            if row["arm"] == arm:
                plan = row["asked"]["plan"]
                row["asked"]["plan"] = Plan(plan[0], tuple(plan[1])) if plan else None
                row["asked"]["order"] = tuple(row["asked"]["order"])
                self.known[row["place"]] = ServedTask(**row["asked"])

    def note(self, place: int, answered_task: ServedTask) -> None:
        """Write one line."""
        if self._path:
            with self._lock, self._path.open("a") as file:
                file.write(json.dumps({"arm": self._arm, "place": place, "asked": asdict(answered_task)}) + "\n")


def report(
    held_out: Sequence[Task],
    over: Sequence[Pool],
    outcomes: Sequence[ServedTask],
    trainers: Sequence[Plan | None],
    compared: Mapping[str, Sequence[ServedTask]],
    fixed: Mapping[str, Sequence[Plan]],
) -> dict[str, Any]:
    """Return what was measured; intervals are of 95 %, by a bootstrap over tasks."""
    rewards_by_pool = {id(pool): Rewards(pool) for pool in over}
    plans = [answer.plan for answer in outcomes]
    exact = _chances(held_out, over, plans, rewards_by_pool)
    arms: dict[str, Any] = {}
    for arm, answered in compared.items():
        of_all = [fixed[arm][place % POOLS] for place in range(len(held_out))]
        ahead = exact - _chances(held_out, over, of_all, rewards_by_pool)
        arms[f"tuned {arm}"] = {"exact accuracy less its, over all tasks": _interval(ahead)} | _compare_tokens(
            outcomes, answered
        )
    served, trained = (
        _rewards(held_out, over, plans, rewards_by_pool),
        _rewards(held_out, over, trainers, rewards_by_pool),
    )
    return {
        "tasks": len(outcomes),
        "valid plans": sum(answer.valid for answer in outcomes),
        "plans of the catalogue": sum(answer.plan is not None for answer in outcomes),
        "plans as the trainer's": sum(answer.plan == theirs for answer, theirs in zip(outcomes, trainers, strict=True)),
        "shapes": len({answer.plan.shape for answer in outcomes if answer.plan}),
        "expected reward": _interval(served),
        "expected reward of the trainer's plans": _interval(trained),
        "difference": _interval(served - trained),
        "accuracy": _interval(np.array([float(answer.right) for answer in outcomes])),
        "exact accuracy": _interval(exact),
        "tokens": _interval(np.array([float(answer.tokens) for answer in outcomes])),
        "of them the conductor's": round(sum(answer.conducting for answer in outcomes) / len(outcomes), 1),
        "usd": round(sum(answer.usd for answer in outcomes) / len(outcomes), 6),
    } | arms


def _compare_tokens(all_found: Sequence[ServedTask], answered: Sequence[ServedTask]) -> dict[str, Any]:
    """Both over the same tasks, as they were answered."""
    outcomes = all_found[: len(answered)]
    ours = np.array([float(answer.tokens) for answer in outcomes])
    theirs = np.array([float(answer.tokens) for answer in answered])
    right = np.array(
        [float(answer.right) - float(other.right) for answer, other in zip(outcomes, answered, strict=True)]
    )
    count = max(1, len(answered))
    return {
        "tasks answered by both": len(answered),
        "accuracy": round(sum(answer.right for answer in answered) / count, 3),
        "accuracy of the conductor less its": _interval(right),
        "tokens": round(float(theirs.sum()) / count, 1),
        "tokens of the conductor in parts of its": round(float(ours.sum() / max(1.0, theirs.sum())), 3),
        "usd": round(sum(answer.usd for answer in answered) / count, 6),
    }


def _interval(values: np.ndarray[Any, Any]) -> list[float]:
    """The mean with the ends of its interval."""
    if not len(values):
        return []
    random = np.random.default_rng(0)
    means = [values[random.integers(0, len(values), len(values))].mean() for _ in range(2_000)]
    low, high = np.quantile(means, [0.025, 0.975])
    return [round(float(value), 4) for value in (values.mean(), low, high)]


def _rewards(
    held_out: Sequence[Task], over: Sequence[Pool], plans: Sequence[Plan | None], rewards_by_pool: Mapping[int, Rewards]
) -> np.ndarray[Any, Any]:
    """The exact expected rewards; a plan that is none of the catalogue counts as wrong."""
    all_rewards = []
    for task, pool, plan in zip(held_out, over, plans, strict=True):
        all_rewards.append(expected_reward(plan, task, rewards_by_pool[id(pool)]) if plan else 0.0)
    return np.array(all_rewards)


def _chances(
    held_out: Sequence[Task], over: Sequence[Pool], plans: Sequence[Plan | None], rewards_by_pool: Mapping[int, Rewards]
) -> np.ndarray[Any, Any]:
    """The exact chances of right answers."""
    all_chances = []
    for task, pool, plan in zip(held_out, over, plans, strict=True):
        all_chances.append(
            float(rewards_by_pool[id(pool)].right(plan.shape, task).mean(axis=0)[plan.workers]) if plan else 0.0
        )
    return np.array(all_chances)


def tune_plans(pools: Sequence[Pool]) -> dict[str, list[Plan]]:
    """Return, for each kind of fixed plan, the best one over each pool, for tasks of training."""
    kinds = [policy for policy in list_fixed_policies() if policy.name in COMPARED]
    plans_by_policy: dict[str, list[Plan]] = {policy.name: [] for policy in kinds}
    for pool in pools:
        setting = Setting(
            pool, draw_tasks("train", "words|mixture", 60), draw_tasks("train", "words|mixture|validation", 30)
        )
        for policy in kinds:
            plans_by_policy[policy.name].append(setting.plans[int(policy.choose(setting, setting.validation)[0])])
    return plans_by_policy


def _together(ask: Callable[[int], ServedTask], count: int, stored: StoredTasks) -> list[ServedTask]:
    """Ask what is not known, several at a time."""

    def ask_task(place: int) -> ServedTask:
        if place in stored.known:
            return stored.known[place]
        outcome = ask(place)
        stored.note(place, outcome)
        return outcome

    with ThreadPoolExecutor(THREADS) as threads:
        return list(threads.map(ask_task, range(count)))


def _ask(caller: Caller, place: int, chosen: Pool, task: Task, plan: Plan | None) -> ServedTask:
    """Ask the service, and read from its journal what it did. With a plan, nobody conducts."""
    names = [f"{worker.name}-{place}" for worker in chosen]
    more: dict[str, Any] = {}
    if plan is not None:
        steps = workflow(plan, tuple(names)).steps
        written = [{"worker": step.worker, "subtask": step.subtask, "access": step.access.as_list()} for step in steps]
        more = {"extra_body": {"baton": {"plan": {"steps": written}}}}
    answer, reply = caller.ask_whole(f"words-{place}", task.text, **more)
    run = caller.run(reply["baton"]["run"])
    first = run["proposals"][0]
    if first["state"] != "accepted":
        _say(f"rejected: {json.dumps(first)[:1_000]}")
    order = tuple(names.index(name) for name in first["order"]) if plan is None else ()
    conducting = sum(_tokens(attempt["usage"]) for proposal in run["proposals"] for attempt in proposal["attempts"])
    return ServedTask(
        order,
        first["state"] == "accepted" and not run["degraded"],
        plan or _read_played_plan(caller, run, names),
        final_answer(answer) == task.answer,
        run["spent"]["tokens"],
        run["cost_usd"],
        conducting,
    )


def _tokens(usage: dict[str, Any]) -> int:
    return int(usage["input"]) + int(usage["output"])


def _read_played_plan(caller: Caller, run: dict[str, Any], names: Sequence[str]) -> Plan | None:
    """The plan of a run as the world has it."""
    steps = []
    for step in run["steps"]:
        subtask = caller.read(f"/v1/runs/{run['id']}/steps/{step['n']}")["subtask"]
        steps.append({"worker": names.index(step["planned_worker"]), "subtask": subtask, "access": step["access"]})
    return parse_plan(json.dumps({"steps": steps}), range(len(names)))


def _of_the_trainer(
    folder: Path, held_out: Sequence[Task], over: Sequence[Pool], outcomes: Sequence[ServedTask]
) -> list[Plan | None]:
    """The plans that the trainer's own decoding writes for the prompts that the service has sent."""
    prompts = []
    for task, pool, outcome in zip(held_out, over, outcomes, strict=True):
        prompts.append([prompt(pool, outcome.order), cards.question(task.text)])
    ran = subprocess.run(
        [str(PYTHON), "-m", "app.lab.world2.words", "--plan", str(folder)],
        input=json.dumps(prompts),
        env=os.environ | OFFLINE | {"PYTHONPATH": str(ROOT)},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=1_800,
        check=False,
    )
    if ran.returncode:
        raise RuntimeError(ran.stderr[-2_000:])
    return [parse_plan(text, outcome.order) for text, outcome in zip(json.loads(ran.stdout), outcomes, strict=True)]


# The service: one tier for each pool, and cards as a calibration leaves them.


def pool_file(pools: Sequence[Pool], server: VllmServer) -> str:
    """Return the pool file: all workers under the names of their pools, since their prices differ."""
    parts = [PROVIDERS.format(url=server.base_url, model=server.model)]
    for place, pool in enumerate(pools):
        names = []
        for worker in pool:
            names.append(f"{worker.name}-{place}")
            parts.append(
                WORKER.format(
                    place=place,
                    name=names[-1],
                    model=worker.name,
                    input=worker.price * constants().input_share,
                    output=worker.price,
                    context=worker.card.context,
                    speed=worker.card.speed,
                    retention="" if worker.card.retains else 'retention = "none"\n',
                )
            )
        parts.append(TIER.format(place=place, names=json.dumps(names), first=names[0], steps=MOST_STEPS))
    return "".join(parts)


async def _store_trials(url: str, pools: Sequence[Pool]) -> None:
    """Store the trials that the cards of the world stand for."""
    async with open_store(url) as store:
        for place, pool in enumerate(pools):
            for worker in pool:
                for domain, right in zip(DOMAINS, worker.card.right, strict=True):
                    for number in range(worker.card.questions):
                        score = float(number < right)
                        name, task = f"{worker.name}-{place}", f"{domain} {number}"
                        await store.note_trial(
                            Trial(name, worker.name, "world-2", task, domain, domain, 0, "", "", 1.0, score, 0, 1.0)
                        )


PROVIDERS = """[providers.vllm]
format = "openai"
base_url = "{url}"
options = {{ positional = true, logprobs = true }}
[workers.conductor]
provider = "vllm"
model = "{model}"
price = {{ input = 0, output = 0 }}
pooled = false
"""
WORKER = """
[workers.{name}]
provider = "world-{place}"
model = "{model}"
price = {{ input = {input:.6f}, output = {output:.6f}, cached = 0 }}
context = {context}
speed = {speed:g}
{retention}"""
TIER = """
[providers.world-{place}]
format = "rehearsal"
options = {{ world = "2", delay = "0", seed = "{place}" }}
[tiers.words-{place}]
pool = {names}
conductor = {{ kind = "model", worker = "conductor", prompt = "cards", probe = 60 }}
fallback = "{first}"
limits = {{ steps = {steps}, attempts = 2, seconds = 240, output_tokens = 1000, tokens = 400000, usd = 5.0 }}
"""


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


if __name__ == "__main__":
    raise SystemExit(main())
