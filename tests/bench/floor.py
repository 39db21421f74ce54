"""What the fixed stack takes for the budgets over two processes without any of Baton's code, beside what Baton takes.

`python -m tests.bench.floor` prints for each budget:

* *waits*: the commits, messages and reads that follow one another in such a run, each measured with its driver alone,
  every 20 ms as between the calls of a workflow, since a processor that was idle takes a while to wake up;
* *stack*: the figure of two processes that do the same operations of the same sizes with the same libraries and nothing
  else (`stack.py`). Where that is above the aim, no code of Baton can meet it with this stack on this machine;
* *CPU of the stack*: what the two take of processor time with one caller, on the path of the run or beside it;
* *Baton*: the figure of `python -m tests.bench --setup distributed`, taken in alternating rounds with the stack's. What
  it has beyond the stack's is Baton's own, and what the aim has beyond the stack's is what Baton may take.

Use a quiet machine: a disk that others wait for takes several times as long. Processor times bear neighbours better.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable
from contextlib import ExitStack
from dataclasses import dataclass

import asyncpg
import redis.asyncio as redis

from tests.harness import servers

from .figures import Subject, measured, of_setup
from .processes import upstream
from .scenarios import LEVELS, Effort, tool_turn_cpu, workflow_cpu
from .stack import stack
from .subject import Target, Tree, baton
from .table import Row, table

TRIES = 150
PAUSE_SECONDS = 0.02
"""As long as the workers of the bench take."""
ROW = b"x" * 1_600
"""As much as a step's end writes."""
PATIENCE_SECONDS = 5.0


@dataclass(frozen=True, slots=True)
class Workload:
    """One budget: a figure of the bench, and what a run of it waits for, one after the other."""

    figure: str
    """The figure's name in `figures.py`."""
    waits: tuple[int, int, int] = (0, 0, 0)
    """Commits, messages and reads."""
    shares: int = 1
    """The number by which the figure divides the time of a run."""
    cpu: Callable[[Target, Effort], float] | None = None
    """Measures the processor time for one caller."""


WORKLOADS = (
    # The admission, the plan with the first intent, the end of the first step with the intents of the next two, their
    # two ends, the last of which has the intent of the last step, and the end of that.
    Workload(
        "1-2-1, added per step p50",
        (6, 2, 1),
        LEVELS,
        lambda target, effort: workflow_cpu(target, effort, runs=1) / LEVELS,
    ),
    # Its beginning, the intent and the outcome; before each of the first two a row is read that the other process has
    # written, and the engine reads the task and the results.
    Workload("tool turn on mini over 20 ms, added p50, whole", (3, 2, 4), 1, tool_turn_cpu),
    # The admission, and the plan with the intent.
    Workload("added TTFT p50, 16 streams", (2, 2, 1)),
    Workload("1-2-1, CPU per run, 64 runs"),
    Workload("one step, CPU per request, 16 conn."),
    Workload("gateway RSS, idle"),
)
TITLES = ("what", "aim", "waits", "CPU of the stack", "stack", "Baton", "left for Baton", "Baton's own")


async def median_ms(act: Callable[[], Awaitable[object]]) -> float:
    """Return the median of `TRIES` times, each after a pause."""
    times = []
    for _ in range(TRIES):
        await asyncio.sleep(PAUSE_SECONDS)
        began = time.perf_counter()
        await act()
        times.append(time.perf_counter() - began)
    return statistics.median(times) * 1000


async def of_postgres(url: str) -> tuple[float, float]:
    """The milliseconds of a commit that waits for the disk, and of a read by key."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute("CREATE TABLE floor (id bigserial PRIMARY KEY, body bytea)")
        write = await connection.prepare("INSERT INTO floor (body) VALUES ($1)")
        read = await connection.prepare("SELECT body FROM floor WHERE id = $1")
        return await median_ms(lambda: write.fetch(ROW)), await median_ms(lambda: read.fetch(1))
    finally:
        await connection.close()


async def of_redis(url: str) -> float:
    """The milliseconds from a message's publication to its receipt."""
    sender, receiver = redis.from_url(url), redis.from_url(url)
    async with sender, receiver, receiver.pubsub() as subscribed:
        await subscribed.subscribe("floor")
        await subscribed.get_message(timeout=PATIENCE_SECONDS)

        async def hop() -> None:
            await sender.publish("floor", ROW)
            assert await subscribed.get_message(timeout=PATIENCE_SECONDS) is not None

        return await median_ms(hop)


def waits_ms() -> tuple[float, float, float]:
    """Return the milliseconds of a commit, a message and a read, and print them."""
    with ExitStack() as opened:
        commit, read = asyncio.run(of_postgres(opened.enter_context(servers.postgres(fsync=True)).url))
        message = asyncio.run(of_redis(opened.enter_context(servers.redis()).url))
    print(f"commit with fsync {commit:.2f} ms, read by key {read:.2f} ms, message over Redis {message:.2f} ms")
    return commit, message, read


def line(workload: Workload, rows: list[Row], cpu: float | None, each: tuple[float, float, float]) -> tuple[str, ...]:
    """Return a line of the table; `each` has the milliseconds of a commit, a message and a read."""
    waits = sum(count * one for count, one in zip(workload.waits, each, strict=True)) / workload.shares
    of_stack, of_baton = rows
    cells = [of_stack.what, _shown(of_stack.budget), _shown(waits or None), _shown(cpu), of_stack.shown]
    if of_stack.measured is None or of_baton.measured is None or of_stack.budget is None:
        return (*cells, of_baton.shown, of_stack.note, of_baton.note)
    left = of_stack.budget - of_stack.measured
    own = of_baton.measured - of_stack.measured
    return (*cells, of_baton.shown, _shown(left), _shown(own))


def _shown(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:.2f}"


def main() -> None:
    """Measure the waits, the stack and Baton, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.floor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="per round")
    parser.add_argument("--rounds", type=int, default=3)
    chosen = parser.parse_args()
    effort = Effort(chosen.seconds, chosen.rounds)
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    each = waits_ms()
    with ExitStack() as opened:
        workers = opened.enter_context(upstream())
        bare = opened.enter_context(stack(workers.url))
        database = opened.enter_context(servers.postgres(fsync=True)).url
        queue = opened.enter_context(servers.redis()).url
        roles = ("gateway", "dispatcher")
        whole = opened.enter_context(baton(workers.url, name="Baton", roles=roles, database=database, redis=queue))
        direct = Target("direct", workers.url, (workers,))
        figures = {figure.what: figure for figure in of_setup("distributed", direct, direct)}
        subjects = [Subject(Tree(), bare), Subject(Tree(), whole)]
        lines = []
        for workload in sorted(WORKLOADS, key=lambda workload: not figures[workload.figure].once):  # memory first
            rows = measured(figures[workload.figure], subjects, effort)
            cpu = workload.cpu(bare, effort) if workload.cpu else None
            lines.append(line(workload, rows, cpu, each))
    print(f"load {os.getloadavg()[0]:.1f}")
    print(table(TITLES, lines))


if __name__ == "__main__":
    main()
