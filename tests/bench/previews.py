"""`python -m tests.bench.previews`: what plans were estimated to cost and to take, against what they then did.

    python -m tests.bench.previews [--runs 300] [--history 100] [--seeds 11,12,13] [--delay 30]

For each seed a service begins with an empty journal and the simulated workers, whose pauses are `--delay` times as long
as usual, so that the noise of the machine counts for little. `--history` requests for chat completions come first, as
the journal's history. Then each of `--runs` requests is planned by `POST /v1/plans`, and its plan is executed at once
by `POST /v1/plans/{id}/run`. Tiers (one worker, a model that conducts, a selector) and questions are drawn by the seed,
the latter among those that the simulated workers can read.
The median of the estimate is compared with the run's cost and with the time from its admission to its end.

The exit status is 1 if on any seed less than 80 % of the costs are within 25 % of the estimate, or of the times within
30 %.
"""

from __future__ import annotations

import argparse
import asyncio
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import httpx
from msgspec import Struct

from app.core.pool.catalog import MILLION
from app.lab.calibration_tasks import FORM
from app.process.wiring import Runtime
from app.providers.rehearsal.question_families import solve
from app.providers.rehearsal.task_families import FAMILIES, LEVELS, write
from tests.bench.caps import QUIET, TIERS, pool_of
from tests.harness.in_process import client_of, running_service

AT_ONCE = 24
COST_SHARE, TIME_SHARE, WANTED = 0.25, 0.30, 0.8


class PreviewComparison(Struct, frozen=True):
    """One run: the medians and ranges of its estimate, and what it did. Dollars and seconds."""

    tier: str
    steps: int
    basis: str
    cost: float
    cost_range: tuple[float, float]
    seconds: float
    seconds_range: tuple[float, float]
    actual_cost: float
    actual_seconds: float

    @property
    def cost_error(self) -> float:
        """The share by which the cost differed from the estimate."""
        return self.actual_cost / self.cost - 1.0

    @property
    def time_error(self) -> float:
        """The share by which the time differed from the estimate."""
        return self.actual_seconds / self.seconds - 1.0


def request(random: Random) -> dict[str, Any]:
    """The body of a request."""
    question = ""
    while solve(question) is None:
        family, level = random.choice(FAMILIES), random.randrange(LEVELS)
        question = write(random, family, level, random.randrange(len(family.phrasings))).text
    messages = [{"role": "system", "content": FORM}, {"role": "user", "content": question}]
    return {"model": random.choice(TIERS), "messages": messages}


async def compare_preview(runtime: Runtime, client: httpx.AsyncClient, body: dict[str, Any]) -> PreviewComparison:
    """Plan for one request, execute the plan, and compare."""
    plan_reply = await client.post("/v1/plans", json=body)
    plan_reply.raise_for_status()
    plan = plan_reply.json()
    run_reply = await client.post(f"/v1/plans/{plan['id']}/run")
    run_reply.raise_for_status()
    row = await runtime.context.store.run(run_reply.headers["x-baton-run"])
    estimate = plan["estimate"]
    cost, seconds = estimate["cost_usd"], estimate["seconds"]
    assert row.ended_at is not None
    return PreviewComparison(
        tier=body["model"],
        steps=len(plan["plan"]["steps"]),
        basis=estimate["basis"],
        cost=cost["p50"],
        cost_range=(cost["p10"], cost["p90"]),
        seconds=seconds["p50"],
        seconds_range=(seconds["p10"], seconds["p90"]),
        actual_cost=row.spent.usd / MILLION,
        actual_seconds=row.ended_at - row.created_at,
    )


async def play(seed: int, *, runs: int, history: int, delay: int) -> list[PreviewComparison]:
    """All comparisons of one seed."""
    random, gate = Random(seed), asyncio.Semaphore(AT_ONCE)
    with tempfile.TemporaryDirectory() as folder:
        async with running_service(Path(folder), pool_of(delay), QUIET) as runtime, client_of(runtime) as client:

            async def ask(body: dict[str, Any]) -> None:
                async with gate:
                    (await client.post("/v1/chat/completions", json=body)).raise_for_status()

            async def one(body: dict[str, Any]) -> PreviewComparison:
                async with gate:
                    return await compare_preview(runtime, client, body)

            await asyncio.gather(*[ask(request(random)) for _ in range(history)])
            return await asyncio.gather(*[one(request(random)) for _ in range(runs)])


def share(errors: Sequence[float], most: float) -> float:
    """Return the share of the errors that are at most so large."""
    return sum(abs(error) <= most for error in errors) / len(errors)


def line_of_seed(seed: int, comparisons: Sequence[PreviewComparison]) -> tuple[str, bool]:
    """Return the line of one seed, and whether it holds."""
    cost, time = [pair.cost_error for pair in comparisons], [pair.time_error for pair in comparisons]
    within = share(cost, COST_SHARE), share(time, TIME_SHARE)
    inside = sum(pair.cost_range[0] <= pair.actual_cost <= pair.cost_range[1] for pair in comparisons) / len(
        comparisons
    )
    in_time = sum(pair.seconds_range[0] <= pair.actual_seconds <= pair.seconds_range[1] for pair in comparisons) / len(
        comparisons
    )
    line = (
        f"seed {seed}: cost within 25 %: {within[0]:.1%} (median error {statistics.median(cost):+.1%}, p10 to p90 "
        f"holds {inside:.0%}); time within 30 %: {within[1]:.1%} (median error {statistics.median(time):+.1%}, "
        f"{in_time:.0%}); {len(comparisons)} runs"
    )
    return line, min(within) >= WANTED


def worst(comparisons: Sequence[PreviewComparison]) -> list[str]:
    """Return the shares by tier and number of steps."""
    groups: dict[tuple[str, int], list[PreviewComparison]] = {}
    for pair in comparisons:
        groups.setdefault((pair.tier, pair.steps), []).append(pair)
    listed = []
    for (tier, steps), group in sorted(groups.items()):
        listed.append(
            f"    {tier}, {steps} steps: {share([pair.cost_error for pair in group], COST_SHARE):.0%} and "
            f"{share([pair.time_error for pair in group], TIME_SHARE):.0%} of {len(group)}; mean errors "
            f"{statistics.mean([pair.cost_error for pair in group]):+.1%} and "
            f"{statistics.mean([pair.time_error for pair in group]):+.1%}"
        )
    return listed


def main() -> int:
    """Play all seeds and print what came of them."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.previews", description="Estimates against actuals.")
    parser.add_argument("--runs", type=int, default=300)
    parser.add_argument("--history", type=int, default=100)
    parser.add_argument("--seeds", default="11,12,13")
    parser.add_argument("--delay", type=int, default=30)
    parser.add_argument("--groups", action="store_true", help="also show each tier and number of steps")
    options = parser.parse_args()
    holds = True
    for seed in map(int, options.seeds.split(",")):
        comparisons = asyncio.run(play(seed, runs=options.runs, history=options.history, delay=options.delay))
        line, line_holds = line_of_seed(seed, comparisons)
        print(line, flush=True)
        print("\n".join(worst(comparisons)) if options.groups else "", end="\n" if options.groups else "")
        holds = holds and line_holds
    return 0 if holds else 1


if __name__ == "__main__":
    sys.exit(main())
