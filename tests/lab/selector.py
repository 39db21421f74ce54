"""The selector's proof: it learns from ratings over HTTP, from nothing, in the standard rehearsal world.

    python -m tests.lab.selector [--runs 4000] [--seeds 0 1 2] [--held-out 800] [--pure | --judge]

A service of its own (`baton serve`, SQLite, `tests/lab/selector.toml`) is asked fresh tasks over
`POST /v1/chat/completions`; every run is rated over `POST /v1/runs/{id}/feedback` with 0 for a wrong answer and else 1
less what the wait was worth. The answers come from simulated workers, their bill from the journal. In between, the
selector is asked held-out tasks with `explore = false`, and nobody rates them: what the chosen arm is worth is the
world's exact expectation, so that the figure has no noise but the choice of tasks. Printed is how much of the way from
the best single worker to the searched optimum (the best of all plans of at most four steps for each class of tasks) it
has come. `--judge` also prints what `baton offpolicy` makes of the journal: which policies those runs suffice to judge.
"""

import argparse
import asyncio
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import httpx

from app.core.rating.posterior import Posterior
from app.lab.baselines import search_arms
from app.lab.outcome import bill
from app.lab.workers import final_answer
from app.lab.world import standard_pool
from app.providers.rehearsal.task_families import Problem
from tests.harness.processes import KEY, Process, environment, run_command
from tests.lab import bandit

POOL = Path(__file__).with_name("selector.toml")
LOOKS = (0, 500, 1_000, 2_000, 4_000, 8_000)
CALLERS = 8
RETRY_DELAY = 1.0
"""Seconds before a request is sent again."""
BUSY, TRIES = (503, 504), 20
"""A run that a stopped or busy machine had no time for has no answer, and is nothing to rate: it is asked again."""
SETTLE_SECONDS = 3.0
"""Seconds in which what was rated is learned."""


class Caller:
    """Asks one service, and rates what it answers."""

    def __init__(self, client: httpx.AsyncClient) -> None:
        self._client = client

    async def ask(self, task: Problem, *, explores: bool = True) -> tuple[str, str]:
        """The run and its answer."""
        messages = [{"role": "user", "content": task.text}]
        body = {"model": "baton-mini", "messages": messages, "baton": {"explore": explores}}
        reply = await self._send("POST", "/v1/chat/completions", body)
        return reply.headers["x-baton-run"], reply.json()["choices"][0]["message"]["content"] or ""

    async def _send(self, method: str, path: str, body: Any = None) -> httpx.Response:
        for left in reversed(range(TRIES)):
            try:
                reply = await self._client.request(method, path, json=body)
                if reply.status_code not in BUSY or not left:
                    break
            except httpx.TransportError:
                if not left:
                    raise
            await asyncio.sleep(RETRY_DELAY)
        reply.raise_for_status()
        return reply

    async def rate(self, task: Problem) -> None:
        """Ask and rate."""
        run, answer = await self.ask(task)
        waited = bill(bandit.as_plan(await self.find_chosen_arm(run)), task.kind[1], standard_pool())[1]
        body = {"score": bandit.score(final_answer(answer) == task.answer, waited), "source": "caller"}
        await self._send("POST", f"/v1/runs/{run}/feedback", body)

    async def find_chosen_arm(self, run: str) -> Any:
        """The arm that a run was decided for."""
        reply = await self._send("GET", f"/v1/runs/{run}")
        return bandit.arms_by_name()[reply.json()["proposals"][0]["decision"]["action"]]

    async def worth_of_best(self, task: Problem) -> float:
        """Return the true worth of the arm that is believed to be best."""
        run, _ = await self.ask(task, explores=False)
        return bandit.reward(await self.find_chosen_arm(run), task.kind)


async def many(tasks: Sequence[Problem], work: Any) -> list[Any]:
    """The work for each task, by `CALLERS` at once, in any order."""
    waiting, results = iter(tasks), []

    async def caller() -> None:
        for task in waiting:
            results.append(await work(task))

    await asyncio.gather(*(caller() for _ in range(CALLERS)))
    return results


async def learn(url: str, runs: int, seed: int, held_out: int) -> float:
    """Rate so many runs, and tell at each look what was learned; returns the last share."""
    tasks, exam = bandit.problems(runs, seed), bandit.problems(held_out, 1_000_003)
    optimum = search_arms(bandit.setting()).optimum
    headers = {"authorization": f"Bearer {KEY}"}
    reached = 0.0
    async with httpx.AsyncClient(base_url=url, headers=headers, timeout=600, trust_env=False) as client:
        caller, began = Caller(client), time.monotonic()
        looks = sorted({*(look for look in LOOKS if look < runs), runs})
        for before, look in zip([0, *looks], looks, strict=False):
            await many(tasks[before:look], caller.rate)
            await asyncio.sleep(SETTLE_SECONDS if look else 0)
            worths = await many(exam, caller.worth_of_best)
            reached = bandit.share(sum(worths) / len(worths), exam, optimum)
            seconds = time.monotonic() - began
            reward = f"reward {sum(worths) / len(worths):.4f}, {reached:6.1%} of the gain"
            print(f"{look:6} rated runs: {reward} ({seconds:.0f} s)", flush=True)
    return reached


def pure(runs: int, seed: int, held_out: int) -> float:
    """Play without a service: each rating is learned at once."""
    tasks, exam = bandit.problems(runs, seed), bandit.problems(held_out, 1_000_003)
    optimum = search_arms(bandit.setting()).optimum
    posterior, random, reached = Posterior(), Random(seed), 0.0
    looks = sorted({*(look for look in LOOKS if look < runs), runs})
    for before, look in zip([0, *looks], looks, strict=False):
        posterior = bandit.play(posterior, tasks[before:look], random)
        reached = bandit.share(bandit.value(posterior, exam), exam, optimum)
        print(f"{look:6} rated runs: {reached:6.1%} of the gain", flush=True)
    return reached


def run_service_and_learn(runs: int, seed: int, held_out: int, *, judge: bool = False) -> float:
    """Start a service, let it learn, and stop it."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        environ = environment(folder, BATON_POOL=str(POOL), BATON_BOOTSTRAP_KEY=KEY)
        service = Process("serve", folder, environ)
        service.start()
        try:
            reached = asyncio.run(learn(service.url, runs, seed, held_out))
        finally:
            service.stop()
        if judge:
            process = run_command(folder, environ, "offpolicy", "--tier", "baton-mini")
            print(process.stdout + process.stderr, flush=True)
        return reached


def main() -> None:
    """Run it for each seed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=4_000)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0])
    parser.add_argument("--held-out", type=int, default=800)
    parser.add_argument("--pure", action="store_true", help="without a service, in seconds")
    parser.add_argument("--judge", action="store_true", help="print what `baton offpolicy` makes of the journal")
    options = parser.parse_args()
    shares = []
    for seed in options.seeds:
        print(f"seed {seed}", flush=True)
        if options.pure:
            shares.append(pure(options.runs, seed, options.held_out))
        else:
            shares.append(run_service_and_learn(options.runs, seed, options.held_out, judge=options.judge))
    each = ", ".join(f"{share:.1%}" for share in shares)
    print(f"after {options.runs} rated runs: {each}; mean {sum(shares) / len(shares):.1%}")


if __name__ == "__main__":
    main()
