"""`python -m tests.bench.capped_plans`: accuracy under caps of money, of `baton-ultra` beside fixed plans.

Fresh tasks of the built-in kind are given to the rehearsal pool under each cap of `CAPS`: once to `baton-ultra`, whose
conductor is told the money that is left, and once to each fixed plan of `plans()`. A run that is refused or ends
without an answer counts as wrong. The best fixed plan of a cap is chosen on half of the tasks and judged on the other
half, both ways round, because the best of so many on the very tasks would be the luckiest. The table has the paired
difference with its 95 % interval over tasks; the command fails if it is below zero beyond chance.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
import tempfile
from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from random import Random
from typing import Any

import httpx
from msgspec import Struct

from app.lab.paired_statistics import interval
from app.lab.world2.provider import service_tasks, text_with_document
from app.lab.world2.shapes import Plan, catalogue, workflow
from app.lab.world2.tasks import Task
from tests.bench.caps import QUIET
from tests.harness.in_process import client_of, running_service

CAPS = (0.0003, 0.0006, 0.0012, 0.0025, 0.005, 0.01, 0.03)
"""Dollars of one run."""
NAMES = tuple(f"rehearsal-{name}" for name in ("sage", "scribe", "abacus", "almanac", "lawyer"))
FIRST = 700
"""The place of the first task: those before it are the built-in ones and those of the other tables."""
AT_ONCE, RESAMPLES = 4, 2_000
ULTRA = "baton-ultra"


class CappedPlanRun(Struct, frozen=True):
    """One run: whether its answer was right, whether there was one, and dollars."""

    right: bool
    answered: bool
    usd: float


def pool() -> str:
    """Return the rehearsal pool, whose workers do not pause."""
    before, after = files("app.process.config").joinpath("rehearsal.toml").read_text().split("options = { ", maxsplit=1)
    return f'{before}options = {{ delay = "0", {after}'


def plans() -> Mapping[str, Plan]:
    """Return each worker alone, and of each kind of fixed plan the one that does best over this pool without a cap."""
    best = (
        *[Plan("solve", (place,)) for place in range(len(NAMES))],
        Plan("reason", (4,)),
        Plan("solve+solve+solve combine", (4, 4, 4, 4)),
        Plan("solve+solve+solve combine", (4, 2, 1, 4)),
        Plan("plan reason check", (4, 4, 4)),
        Plan("solve check", (4, 0)),
        Plan("digest solve", (0, 0)),
        Plan("digest solve", (0, 4)),
        Plan("digest solve+solve combine", (3, 4, 4, 4)),
    )
    plans_by_name = {}
    for plan in best:
        names = ", ".join(NAMES[place].removeprefix("rehearsal-") for place in plan.workers)
        plans_by_name[f"{plan.shape}: {names}"] = plan
    return plans_by_name


def steps(plan: Plan) -> dict[str, Any]:
    """Return the plan as a caller sends it."""
    assert plan.shape in catalogue()
    all_steps = []
    for step in workflow(plan, NAMES).steps:
        all_steps.append({"worker": step.worker, "subtask": step.subtask, "access": step.access.as_list()})
    return {"steps": all_steps}


async def play_run(client: httpx.AsyncClient, task: Task, cap: float, plan: Plan | None) -> CappedPlanRun:
    """One run of `baton-ultra`, by its conductor or by a plan of the caller's."""
    extra: dict[str, Any] = {"budget": {"usd": cap}} | ({"plan": steps(plan)} if plan is not None else {})
    body = {"model": ULTRA, "messages": [{"role": "user", "content": text_with_document(task)}], "baton": extra}
    reply = await client.post("/v1/chat/completions", json=body)
    if reply.status_code != 200:
        return CappedPlanRun(right=False, answered=False, usd=0.0)
    value = reply.json()
    right = value["choices"][0]["message"]["content"].endswith(f"The answer is {task.answer}")
    return CappedPlanRun(right, answered=True, usd=float(value["baton"]["cost_usd"]))


async def play(tasks: Sequence[Task], caps: Sequence[float]) -> dict[tuple[float, str], list[CappedPlanRun]]:
    """All runs, by cap and plan, in the order of the tasks."""
    gate = asyncio.Semaphore(AT_ONCE)
    arms: dict[str, Plan | None] = {ULTRA: None, **plans()}
    plays: dict[tuple[float, str], list[CappedPlanRun]] = {}
    with tempfile.TemporaryDirectory() as folder:
        async with running_service(Path(folder), pool(), QUIET) as runtime, client_of(runtime) as client:

            async def capped_at(task: Task, cap: float, plan: Plan | None) -> CappedPlanRun:
                async with gate:
                    return await play_run(client, task, cap, plan)

            for cap in caps:
                for name, plan in arms.items():
                    plays[cap, name] = await asyncio.gather(*[capped_at(task, cap, plan) for task in tasks])
    return plays


def table(plays: Mapping[tuple[float, str], Sequence[CappedPlanRun]]) -> tuple[list[str], bool]:
    """Return the lines of a Markdown table, and True if the difference is nowhere below zero beyond chance."""
    lines = [
        "| cap | baton-ultra | without an answer | $ a run | best fixed plan | right | $ a run | difference |",
        "|---|---|---|---|---|---|---|---|",
    ]
    holds = True
    for cap in sorted({cap for cap, _ in plays}):
        ours = plays[cap, ULTRA]
        fixed = {name: runs for (capped_at, name), runs in plays.items() if capped_at == cap and name != ULTRA}
        chosen = [_best(fixed, 1), _best(fixed, 0)]
        theirs = [fixed[chosen[place % 2]][place] for place in range(len(ours))]
        pairs = [float(mine.right) - float(other.right) for mine, other in zip(ours, theirs, strict=True)]
        random = Random(1)
        means = [sum(random.choices(pairs, k=len(pairs))) / len(pairs) for _ in range(RESAMPLES)]
        spread = interval([sum(pairs) / len(pairs), *means])
        holds = holds and spread.high >= 0
        lines.append(
            f"| ${cap:g} | {_right(ours)} | {sum(not run.answered for run in ours)} | {_usd(ours)} | "
            f"{'; '.join(dict.fromkeys(chosen))} | {_right(theirs)} | {_usd(theirs)} | "
            f"{spread.value:+.2f} [{spread.low:+.2f}, {spread.high:+.2f}] |"
        )
    return lines, holds


def _best(fixed: Mapping[str, Sequence[CappedPlanRun]], half: int) -> str:
    """Return the fixed plan with the most right answers on the tasks at even places (0), or at odd ones (1)."""
    return max(fixed, key=lambda name: sum(run.right for run in fixed[name][half::2]))


def _right(runs: Sequence[CappedPlanRun]) -> str:
    return f"{sum(run.right for run in runs) / len(runs):.2f}"


def _usd(runs: Sequence[CappedPlanRun]) -> str:
    return f"{sum(run.usd for run in runs) / len(runs):.5f}"


def main() -> int:
    """See the module docstring."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.capped_plans")
    parser.add_argument("--tasks", type=int, default=100)
    parser.add_argument("--caps", type=float, nargs="*", default=list(CAPS))
    parser.add_argument("--json", type=Path, help="write the numbers of right answers to this file")
    options = parser.parse_args()
    tasks = service_tasks("fresh")[FIRST : FIRST + options.tasks]
    plays = asyncio.run(play(tasks, options.caps))
    lines, holds = table(plays)
    print(f"{len(tasks)} tasks under each cap", "", *lines, sep="\n")
    if options.json is not None:
        rows = []
        for (cap, name), runs in plays.items():
            rows.append([cap, name, sum(run.right for run in runs), len(runs)])
        options.json.write_text(json.dumps(rows) + "\n")
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
