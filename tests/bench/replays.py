"""`python -m tests.bench.replays`: past runs replayed under their own plan, and who saw what in both.

    python -m tests.bench.replays [--runs 500] [--seed 1]

A service with the simulated workers, none of which fails, carries out `--runs` requests, drawn by the seed over tiers
of every shape: one worker, fixed chains and fans, a model that conducts (in one round, in several, and with workflows
inside steps), a selector, and plans of the caller's with random access lists; a tenth of them call a tool. Each run is
then replayed over HTTP without any change. The workers that were called, for which step, and what each was shown must
be the same in both, and no conductor may be asked. A worker that took over from a failing one would differ; there is
none here.

The exit status is 1 if any replay differs, or if it was refused or has not succeeded.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import tempfile
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from random import Random
from typing import Any

import httpx
from msgspec import Struct

from app.core.rating.comparison import Recipient, RunFigures, figures
from app.process.wiring import Runtime
from tests.bench.caps import QUIET, pool_of
from tests.bench.previews import request
from tests.harness.in_process import client_of, running_service

AT_ONCE = 16
SHAPES = """
[tiers.chain]
pool = "all"
conductor = { kind = "fixed", shape = "chain" }
limits = { steps = 5, seconds = 120 }

[tiers.fan]
pool = "all"
conductor = { kind = "fixed", shape = "fan_out", width = 3 }
limits = { steps = 5, seconds = 120 }

[tiers.rounds]
pool = "all"
conductor = { kind = "model", worker = "rehearsal-conductor" }
fallback = "rehearsal-sage"
limits = { steps = 5, rounds = 3, seconds = 120 }

[tiers.nested]
pool = "all"
conductor = { kind = "model", worker = "rehearsal-conductor" }
fallback = "rehearsal-sage"
limits = { steps = 5, rounds = 2, depth = 2, seconds = 120 }
"""
TIERS = ("baton-mini", "baton-ultra", "baton-select", "chain", "fan", "rounds", "nested")
PLANNED = "baton-ultra"
"""The tier of requests that bring a plan of their own, with access lists at random."""
WORKERS = ("rehearsal-sage", "rehearsal-scribe", "rehearsal-almanac")
TOOL = {
    "type": "function",
    "function": {
        "name": "calculate",
        "description": "Evaluates an arithmetic expression.",
        "parameters": {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]},
    },
}


class ReplayMeasurement(Struct, frozen=True):
    """A run and its replay."""

    tier: str
    topology: str
    turns: int
    first: RunFigures
    second: RunFigures | None
    refused: str

    @property
    def differs(self) -> bool:
        """True if somebody saw something in one of them only, or there is no replay that succeeded."""
        if self.second is None or self.second.state != "succeeded":
            return True
        return workers(self.first) != self.second.disclosures


def workers(run: RunFigures) -> frozenset[Recipient]:
    """Return the disclosures of a run without those to the models that planned."""
    return frozenset([disclosure for disclosure in run.disclosures if disclosure.role == "worker"])


async def play_to_answer(client: httpx.AsyncClient, body: dict[str, Any]) -> str:
    """Return a run that has ended; its caller returns the length of each expression as the result of the tool."""
    while True:
        reply = await client.post("/v1/chat/completions", json=body)
        reply.raise_for_status()
        message = reply.json()["choices"][0]["message"]
        calls = message.get("tool_calls") or ()
        if not calls:
            return str(reply.headers["x-baton-run"])
        results = [
            {"role": "tool", "tool_call_id": call["id"], "content": str(len(call["function"]["arguments"]))}
            for call in calls
        ]
        body = body | {"messages": [*body["messages"], message, *results]}


async def replay_run(runtime: Runtime, client: httpx.AsyncClient, run: str) -> ReplayMeasurement:
    """Replay one run, and read both."""
    store = runtime.context.store
    row, journal = await store.run(run), await store.journal(run)
    first = figures(journal.events)
    turns = sum(event.kind.value == "run.resumed" for event in journal.events)
    reply = await client.post(f"/v1/runs/{run}/replay", json={"wait": 60})
    second = None
    if reply.status_code == 200:
        second = figures((await store.journal(reply.json()["id"])).events)
    refused = "" if second is not None else reply.text
    return ReplayMeasurement(row.tier, row.topology or "", turns, first, second, refused)


async def play(count: int, seed: int) -> list[ReplayMeasurement]:
    """Carry out runs, then replay each."""
    random, gate = Random(seed), asyncio.Semaphore(AT_ONCE)
    with tempfile.TemporaryDirectory() as folder:
        pool = pool_of(0) + SHAPES
        async with running_service(Path(folder), pool, QUIET) as runtime, client_of(runtime) as client:

            async def one(body: dict[str, Any]) -> ReplayMeasurement:
                async with gate:
                    return await replay_run(runtime, client, await play_to_answer(client, body))

            return await asyncio.gather(*[one(draw_request(random)) for _ in range(count)])


def draw_request(random: Random) -> dict[str, Any]:
    """Return the body of a request."""
    body = request(random) | {"model": random.choice(TIERS)}
    if random.random() < 0.1:
        sum_of_two = f"What is {random.randrange(10, 10_000)} * {random.randrange(10, 10_000)}?"
        body |= {"tools": [TOOL], "messages": [{"role": "user", "content": sum_of_two}]}
    if random.random() < 0.2:
        body |= {"model": PLANNED, "baton": {"plan": {"steps": plan(random)}}}
    return body


def plan(random: Random) -> list[dict[str, Any]]:
    """Return the steps of a plan; each sees the conversation, and some of the earlier steps."""
    steps = []
    for place in range(random.randrange(1, 6)):
        earlier_steps = [earlier for earlier in range(place) if random.random() < 0.5]
        steps.append(
            {"worker": random.choice(WORKERS), "subtask": "Solve the task.", "access": ["user", *earlier_steps]}
        )
    return steps


def table(replays: Sequence[ReplayMeasurement]) -> list[str]:
    """Return the lines of a Markdown table."""
    lines = [
        "| tier | runs | with tool turns | shapes | disclosures of workers | different |",
        "|---|---|---|---|---|---|",
    ]
    for tier in (*TIERS, ""):
        some = [replayed for replayed in replays if tier in ("", replayed.tier)]
        shapes = Counter(replayed.topology for replayed in some)
        cells = [
            len(some),
            sum(replayed.turns > 0 for replayed in some),
            ", ".join(f"{name} {times}" for name, times in shapes.most_common()),
            sum(len(workers(replayed.first)) for replayed in some),
            sum(replayed.differs for replayed in some),
        ]
        lines.append(f"| {tier or 'all'} | {' | '.join(map(str, cells))} |")
    return lines


def main() -> int:
    """Print the table, and the first replays that differ."""
    parser = argparse.ArgumentParser(description="Replays of runs under their own plan.")
    parser.add_argument("--runs", type=int, default=500)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    replays = asyncio.run(play(options.runs, options.seed))
    print("\n".join(table(replays)))
    wrong = [replayed for replayed in replays if replayed.differs]
    for replayed in wrong[:5]:
        print(replayed.first.run, replayed.refused or replayed.second)
    return 1 if wrong or len(replays) < options.runs else 0


if __name__ == "__main__":
    sys.exit(main())
