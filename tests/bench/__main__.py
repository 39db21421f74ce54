"""`python -m tests.bench`: the table of DESIGN.md, section 10, for this machine, with a verdict for each budget.

Three set-ups are measured one after another, never two at once: embedded (SQLite, no Redis), Postgres (one process),
and distributed (gateway + dispatcher over Postgres with fsync and Redis). `--bare` measures the pass-through
reference with the same tools instead, which needs no Baton.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import cache, partial
from typing import Literal

from tests.harness import servers

from . import scenarios
from .processes import DidNotStart, bare, upstream
from .scenarios import Effort, Failed
from .subject import Target, baton
from .table import Row, rendered

SETUPS = ("embedded", "postgres", "distributed")
Figure = Callable[[], float]


def _row(what: str, budget: float | None, unit: str, figure: Figure, *, higher: bool = False) -> Row:
    """Measure; a figure that cannot be had leaves a row that says why."""
    print(f"... {what}", flush=True)
    better: Literal["lower", "higher"] = "higher" if higher else "lower"
    try:
        return Row(what, budget, unit, figure(), better=better)
    except Failed as problem:
        return Row(what, budget, unit, None, str(problem)[:120], better)


def _one_step(target: Target, direct: Target, effort: Effort, budget: float) -> Iterator[Row]:
    yield _row("one step, CPU per request, 16 conn.", 1.3, "ms", lambda: scenarios.one_step_cpu(target, effort))
    for connections, rank in ((1, "p50"), (1, "p99"), (16, "p50"), (16, "p99")):
        figure = partial(scenarios.added_latency, target, direct, connections, rank, effort)
        bound = budget if (connections, rank) == (1, "p50") else None
        yield _row(f"one step over 50 ms, added {rank}, {connections} conn.", bound, "ms", figure)


def _workflow(target: Target, direct: Target, effort: Effort, budget: float) -> Iterator[Row]:
    yield _row(
        "1-2-1, added per step p50", budget, "ms", lambda: scenarios.workflow_added_per_step(target, direct, effort)
    )
    yield _row("1-2-1, CPU per run, 64 runs", 4, "ms", lambda: scenarios.workflow_cpu(target, effort))


def _tools(target: Target, direct: Target, effort: Effort) -> Iterator[Row]:
    for how, stream in (("whole", False), ("streamed", True)):
        figure = partial(scenarios.tool_turn_added, target, direct, effort, stream=stream)
        yield _row(f"tool turn on mini over 20 ms, added p50, {how}", 5, "ms", figure)


def _streams(target: Target, direct: Target, effort: Effort) -> Iterator[Row]:
    yield _row(
        "chunks relayed at 128 streams", 12_000, "/s", lambda: scenarios.stream_rate(target, effort), higher=True
    )
    yield _row("added TTFT p50, 16 streams", 5, "ms", lambda: scenarios.added_first_token(target, direct, effort))
    yield _row("RSS per idle stream", 40, "KiB", lambda: scenarios.memory_per_idle_stream(target, effort))


def _bare_rows(target: Target, direct: Target, effort: Effort) -> Iterator[Row]:
    yield _row("RSS, idle", 120, "MiB", lambda: scenarios.idle_memory(target))
    yield from _one_step(target, direct, effort, budget=5)
    yield from _streams(target, direct, effort)


def _rows(setup: str, target: Target, direct: Target, reference: Target, effort: Effort) -> Iterator[Row]:
    yield _row("gateway RSS, idle", 120, "MiB", lambda: scenarios.idle_memory(target))
    if setup == "embedded":
        yield _row("bad bodies, longest stall of the others", 100, "ms", lambda: scenarios.stall(target))
    yield from _one_step(target, direct, effort, budget=8 if setup == "distributed" else 5)
    yield from _tools(target, direct, effort)
    ratio = partial(scenarios.cpu_ratio, target, reference, effort)
    yield _row("one step, CPU against bare FastAPI + aiohttp", None, "x", ratio)
    if setup != "postgres":
        yield from _workflow(target, direct, effort, budget=5 if setup == "distributed" else 2.5)
        yield from _streams(target, direct, effort)


def _journal(effort: Effort) -> Iterator[Row]:
    """On a Postgres of its own, before Baton has one."""
    with servers.postgres(fsync=True) as server:
        measured = cache(lambda: scenarios.journal(server.url, effort))
        yield _row("journal, Postgres with fsync", 5000, "events/s", lambda: measured()[0], higher=True)
        yield _row("journal, worst wait beyond one write", 5, "ms", lambda: measured()[1])


@contextmanager
def _subject(setup: str, upstream_url: str, queue: str | None) -> Iterator[Target]:
    with ExitStack() as stack:
        database = None if setup == "embedded" else stack.enter_context(servers.postgres(fsync=True)).url
        roles = ("gateway", "dispatcher") if setup == "distributed" else ("serve",)
        yield stack.enter_context(baton(upstream_url, name=setup, roles=roles, database=database, redis=queue))


def _measure(setup: str, effort: Effort) -> list[Row]:
    """One set-up, beside the upstream and the bare reference so that differences and ratios are of the same minute."""
    with ExitStack() as stack:
        workers = stack.enter_context(upstream())
        running = stack.enter_context(bare(workers.url))
        direct, reference = Target("direct", workers.url, (workers,)), Target("bare", running.url, (running,))
        if setup == "bare":
            return list(_bare_rows(reference, direct, effort))
        rows: list[Row] = []
        queue = stack.enter_context(servers.redis()).url if setup == "distributed" else None
        if queue is not None:
            rows.append(_row("queue hop over Redis, p50", 1, "ms", partial(scenarios.queue_hop, queue)))
        if setup == "postgres":
            rows += _journal(effort)
        target = stack.enter_context(_subject(setup, workers.url, queue))
        return rows + list(_rows(setup, target, direct, reference, effort))


def _chosen() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__)
    parser.add_argument("--setup", choices=SETUPS, action="append", help="only this one (may be repeated)")
    parser.add_argument("--bare", action="store_true", help="measure the reference instead of Baton")
    parser.add_argument("--seconds", type=float, default=5.0, help="per round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", action="store_true", help="rows as JSON, too")
    return parser.parse_args()


def main() -> None:
    """The command line; exits with 1 when a budget is missed."""
    chosen = _chosen()
    effort = Effort(chosen.seconds, chosen.rounds)
    print(
        f"{platform.machine()}, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}, Python {sys.version} at "
        f"{sys.base_prefix}"
    )
    missed = False
    for setup in ("bare",) if chosen.bare else chosen.setup or SETUPS:
        try:
            rows = _measure(setup, effort)
        except DidNotStart as problem:
            print(f"\n## {setup}: did not start\n{problem}")
            missed = True
            continue
        print(f"\n## {setup}\n\n{rendered(rows)}")
        if chosen.json:
            print(json.dumps([asdict(row) for row in rows]))
        missed = missed or any(row.verdict == "MISSED" for row in rows)
    raise SystemExit(missed)


if __name__ == "__main__":
    main()
