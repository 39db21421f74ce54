"""Measure the cost of showing a run of the largest kind: `python -m tests.bench.run_views [STEPS OF A ROUND] [ROUNDS]`.

Prints the processor's time of the graph, the timeline and the state, with the fold of the journal, and that of the
console's pages over a stand-in of the store, in milliseconds: the median and the largest of several.
"""

import asyncio
import gc
import sys
import time
from collections.abc import Awaitable, Callable
from statistics import median
from typing import Any

import orjson

from app.core.message.chat import Usage
from app.core.plan.workflow import Access
from app.core.run.events import CallIntended, Event, Fact, Kind, PlanAccepted, PlanOpened, PlanStep, StepQueued
from app.core.run.graph import graph
from app.core.run.instant import instant, snapshot
from app.core.run.timeline import timeline
from app.store.protocol import Journal
from tests.core.play import admission, intent, outcome, step_done
from tests.harness.console import signed_in_client
from tests.harness.stand_ins import GatewayStandIn, row_of, store_contents

REPEATS = 9
USED = Usage(input=1_000, cached=0, output=200)


def facts(steps: int, rounds: int) -> list[Fact]:
    """Return the facts of a run in which each step needs two calls and reads the two steps before it."""
    all_facts: list[Fact] = [admission()]
    for number in range(rounds):
        base, plan = number * steps, f"plan-{number}"
        own = range(base, base + steps)
        access = Access(user=True)
        all_facts.append(PlanOpened(proposal=number, base=base, mode="first", conductor="model", round=number + 1))
        call = CallIntended(plan, None, "ada", access, usd_held=9, tokens_held=9, attempt=number + 1)
        all_facts += [call, outcome(plan, None, USED, usd=10)]
        for n in own:
            step_access = Access(user=True, steps=tuple(range(max(base, n - 2), n)))
            all_facts.append(PlanStep(number, n, "ada", subtask="sub", access=step_access, answers=n == own[-1]))
        all_facts.append(PlanAccepted(proposal=number, call=plan, steps=steps, topology="tree"))
        for n in own:
            failed = outcome(f"first-{n}", n, USED, usd=3, kind="error")
            all_facts += [StepQueued(n), intent(f"first-{n}", n), failed]
            all_facts += [
                intent(f"second-{n}", n),
                outcome(f"second-{n}", n, USED, usd=10),
                step_done(n, f"second-{n}"),
            ]
    return all_facts


def bodies(written: list[Fact]) -> list[tuple[Kind, dict[str, Any]]]:
    """Return the kinds and the JSON of facts."""
    return [(fact.kind, fact.to_json()) for fact in written]


def journal(stored: list[tuple[Kind, dict[str, Any]]]) -> tuple[Event, ...]:
    """Events as they are read from the store, whose facts are not made yet."""
    return tuple(Event("run", seq, kind, 1e9 + seq / 10, body) for seq, (kind, body) in enumerate(stored, 1))


def report(name: str, seconds: list[float], size: int) -> None:
    """Print one line."""
    print(f"{name:<28} {median(seconds) * 1e3:6.1f} ms, at most {max(seconds) * 1e3:6.1f} ms, {size // 1000:5} kB")


def views(stored: list[tuple[Kind, dict[str, Any]]]) -> None:
    """Measure the three views."""
    views_by_name: dict[str, Callable[[Any], Any]] = {
        "graph": lambda at: graph(at).to_json(),
        "timeline": lambda at: timeline(at).to_json(),
        "state": snapshot,
    }
    for name, view in views_by_name.items():
        seconds = []
        for _ in range(REPEATS):
            events = journal(stored)
            started = time.process_time()
            body = orjson.dumps(view(instant(events, 0.0)))
            seconds.append(time.process_time() - started)
        report(name, seconds, len(body))


async def pages(stored: list[tuple[Kind, dict[str, Any]]]) -> None:
    """Measure the console's pages of the run."""
    gateway = GatewayStandIn()
    store_contents(gateway.store)
    gateway.store.rows = [row_of("run", "acme", key="owner", state="running")]

    async def read(_run: str, upto: int | None = None, after: int = 0) -> Journal:
        return Journal(b"salt", journal(stored))

    gateway.store.journal = read  # type: ignore[method-assign]
    async with signed_in_client(gateway, gateway.add_key("owner", scopes=["runs:read", "audit:read"])) as client:
        for path in ("runs/run", "runs/run?step=50", "runs/run?t=30", "runs/run?by=money", "compare?a=run&b=run"):
            seconds, size = await _time_requests(lambda path=path: client.get(f"/console/{path}"))  # type: ignore[misc]
            report(path, seconds, size)


async def _time_requests(ask: Callable[[], Awaitable[Any]]) -> tuple[list[float], int]:
    seconds = []
    await ask()  # the first one compiles the templates
    gc.collect()
    gc.freeze()  # as the service does once it has started
    for _ in range(REPEATS):
        started = time.process_time()
        reply = await ask()
        seconds.append(time.process_time() - started)
    return seconds, len(reply.content)


if __name__ == "__main__":
    sizes = [int(number) for number in sys.argv[1:]] or [25, 4]
    played = bodies(facts(*sizes))
    print(f"{sizes[0] * sizes[1]} steps, {len(played)} events")
    views(played)
    asyncio.run(pages(played))
