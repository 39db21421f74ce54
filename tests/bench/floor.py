"""Measure the budgets over two processes for the fixed stack without any of Baton's code, beside Baton.

`python -m tests.bench.floor` prints for each budget:

* *waits*: the commits, messages and reads that follow one another in such a run, each measured with its driver alone,
  every 20 ms as between the calls of a workflow, since a processor that was idle takes a while to wake up;
* *stack*: the figure of two processes that do the same operations of the same sizes with the same libraries and nothing
  else (`stack.py`). Where that is above the aim, no code of Baton can meet it with this stack on this machine;
* *CPU of the stack*: what the two take of processor time with one caller, on the path of the run or beside it;
* *Baton*: the figure of `python -m tests.bench --setup distributed`, taken in alternating rounds with the stack's. What
  it has beyond the stack's is Baton's own, and what the aim has beyond the stack's is what Baton may take.

Use a quiet machine: a disk that others wait for takes several times as long. Processor times bear neighbours better.
Where others use the machine, `--lowest --rounds 9 --seconds 2` takes the lowest of many short rounds for each figure,
in place of their median: the quietest seconds of both.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import statistics
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import ExitStack

import asyncpg
import redis.asyncio as redis
from msgspec import Struct

from tests.harness import servers

from .figures import Subject, measure_subjects, of_setup
from .processes import upstream
from .scenarios import LEVELS, Effort, tool_turn_cpu, workflow_cpu
from .stack import stack
from .subject import Target, Tree, baton
from .table import Row, table

TRIES = 50
ROUNDS = 5
PAUSE_SECONDS = 0.02
"""As long as the workers of the bench take."""
ROW = b"x" * 1_600
"""As much as a step's end writes."""
PATIENCE_SECONDS = 5.0


class Workload(Struct, frozen=True):
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
    Workload("gateway RSS, idle"),  # before any load
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
)
TITLES = ("what", "aim", "waits", "CPU of the stack", "stack", "Baton", "left for Baton", "Baton's own")


Choice = Callable[[Sequence[float]], float]
"""How one figure is made of those of several rounds."""


async def rounds_ms(act: Callable[[], Awaitable[object]]) -> list[float]:
    """Return the medians of some rounds of `TRIES` times, each after a pause."""
    medians = []
    for _ in range(ROUNDS):
        times = []
        for _ in range(TRIES):
            await asyncio.sleep(PAUSE_SECONDS)
            began = time.perf_counter()
            await act()
            times.append(time.perf_counter() - began)
        medians.append(statistics.median(times) * 1000)
    return medians


async def of_postgres(url: str) -> tuple[list[float], list[float]]:
    """The milliseconds of a commit that waits for the disk, and of a read by key."""
    connection = await asyncpg.connect(url)
    try:
        await connection.execute("CREATE TABLE floor (id bigserial PRIMARY KEY, body bytea)")
        write = await connection.prepare("INSERT INTO floor (body) VALUES ($1)")
        reading = await connection.prepare("SELECT body FROM floor WHERE id = $1")
        return await rounds_ms(lambda: write.fetch(ROW)), await rounds_ms(lambda: reading.fetch(1))
    finally:
        await connection.close()


async def of_redis(url: str) -> list[float]:
    """The milliseconds from a message's publication to its receipt."""
    sender, receiver = redis.from_url(url), redis.from_url(url)
    async with sender, receiver, receiver.pubsub() as subscribed:
        await subscribed.subscribe("floor")
        await subscribed.get_message(timeout=PATIENCE_SECONDS)

        async def hop() -> None:
            await sender.publish("floor", ROW)
            assert await subscribed.get_message(timeout=PATIENCE_SECONDS) is not None

        return await rounds_ms(hop)


def waits_ms(choose: Choice) -> tuple[float, float, float]:
    """Return the milliseconds of a commit, a message and a read, and print them."""
    with ExitStack() as opened:
        commits, reads = asyncio.run(of_postgres(opened.enter_context(servers.postgres(fsync=True)).url))
        messages = asyncio.run(of_redis(opened.enter_context(servers.redis()).url))
    commit, message, read_wait = choose(commits), choose(messages), choose(reads)
    print(f"commit with fsync {commit:.2f} ms, read by key {read_wait:.2f} ms, message over Redis {message:.2f} ms")
    return commit, message, read_wait


def line(
    workload: Workload, rows: Sequence[Row], cpu: float | None, unit_ms: tuple[float, float, float], choose: Choice
) -> tuple[str, ...]:
    """Return a line of the table: the rows of the stack and of Baton, and the milliseconds of a commit, a message and
    a read."""
    waits = sum(count * ms for count, ms in zip(workload.waits, unit_ms, strict=True)) / workload.shares
    aim = rows[0].budget
    assert aim is not None
    for row in rows:
        if not row.rounds:
            return (workload.figure, _format_figure(aim), "-", "-", "-", "-", "-", row.note)
    stack_takes, baton_takes = (choose(row.rounds) for row in rows)
    left, own = aim - stack_takes, baton_takes - stack_takes
    return (workload.figure, *map(_format_figure, (aim, waits or None, cpu, stack_takes, baton_takes, left, own)))


def _format_figure(figure: float | None) -> str:
    return "-" if figure is None else f"{figure:.2f}"


def main() -> None:
    """Measure the waits, the stack and Baton, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.floor", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seconds", type=float, default=5.0, help="per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default="", metavar="TEXT", help="only figures whose name contains this text")
    parser.add_argument("--lowest", action="store_true", help="the lowest of the rounds in place of their median")
    chosen = parser.parse_args()
    effort = Effort(chosen.seconds, chosen.rounds)
    choose: Choice = min if chosen.lowest else statistics.median
    print(f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}")
    unit_ms = waits_ms(choose)
    with ExitStack() as opened:
        workers = opened.enter_context(upstream())
        stack_alone = opened.enter_context(stack(workers.url))
        database = opened.enter_context(servers.postgres(fsync=True)).url
        queue = opened.enter_context(servers.redis()).url
        roles = ("gateway", "dispatcher")
        distributed = opened.enter_context(
            baton(workers.url, name="Baton", roles=roles, database=database, redis=queue)
        )
        direct = Target("direct", workers.url, (workers,))
        figures = {figure.what: figure for figure in of_setup("distributed", direct, direct)}
        subjects = [Subject(Tree(), stack_alone), Subject(Tree(), distributed)]
        lines = []
        for workload in [workload for workload in WORKLOADS if chosen.only in workload.figure]:
            rows = measure_subjects(figures[workload.figure], subjects, effort)
            cpu = None
            if workload.cpu is not None:
                cpu = choose([workload.cpu(stack_alone, effort) for _ in range(effort.rounds)])
            lines.append(line(workload, rows, cpu, unit_ms, choose))
    print(f"load {os.getloadavg()[0]:.1f}")
    print(table(TITLES, lines))


if __name__ == "__main__":
    main()
