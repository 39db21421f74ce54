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
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict

from tests import servers

from . import scenarios
from .processes import DidNotStart, bare, upstream
from .scenarios import Effort, Failed
from .subject import Target, baton
from .table import Row, rendered

SETUPS = ("embedded", "postgres", "distributed")
Figure = Callable[[], float]


def _row(what: str, budget: float, unit: str, figure: Figure, *, note: str = "", higher: bool = False) -> Row:
    """Measure; a figure that cannot be had leaves a row that says why."""
    print(f"... {what}", flush=True)
    try:
        measured: float | None = figure()
    except Failed as problem:
        measured, note = None, str(problem)[:120]
    return Row(what, budget, unit, measured, note, "higher" if higher else "lower")


def _embedded(target: Target, direct: Target, effort: Effort) -> Iterator[Row]:
    yield _row("gateway RSS, idle", 120, "MiB", lambda: scenarios.idle_memory(target))
    yield from _one_step(target, direct, effort, budget=5)
    yield from _workflow(target, direct, effort, budget=2.5)
    yield _row("chunks/s at 128 streams", 12_000, "/s", lambda: scenarios.stream_rate(target, effort), higher=True)
    yield _row("added TTFT p50 at 16 streams", 5, "ms", lambda: scenarios.added_first_token(target, direct, effort))
    yield _row("RSS per idle stream", 40, "KiB", lambda: scenarios.memory_per_idle_stream(target, effort))


def _one_step(target: Target, direct: Target, effort: Effort, budget: float) -> Iterator[Row]:
    yield _row("one step, CPU per request, 16 conn.", 1.3, "ms", lambda: scenarios.one_step_cpu(target, effort))
    for connections in (1, 16):
        for rank in ("p50", "p99"):
            binding = connections == 1 and rank == "p50"
            yield _row(
                f"one step over 50 ms, added {rank}, {connections} conn.",
                budget,
                "ms",
                lambda c=connections, r=rank: scenarios.added_latency(target, direct, c, r, effort),  # type: ignore[misc]
                note="" if binding else "for information: the budget is p50 at 1 conn.",
            )


def _workflow(target: Target, direct: Target, effort: Effort, budget: float) -> Iterator[Row]:
    yield _row(
        "1-2-1, added per step p50", budget, "ms", lambda: scenarios.workflow_added_per_step(target, direct, effort)
    )
    yield _row("1-2-1, CPU per run, 64 runs", 4, "ms", lambda: scenarios.workflow_cpu(target, effort))


def _rows(setup: str, target: Target, direct: Target, effort: Effort) -> list[Row]:
    if setup == "embedded":
        return list(_embedded(target, direct, effort))
    if setup == "postgres":
        return [_row("one step, CPU per request, 16 conn.", 1.3, "ms", lambda: scenarios.one_step_cpu(target, effort))]
    return [*_one_step(target, direct, effort, budget=8), *_workflow(target, direct, effort, budget=5)]


@contextmanager
def _subject(setup: str, upstream_url: str) -> Iterator[Target]:
    with ExitStack() as stack:
        if setup == "embedded":
            yield stack.enter_context(baton(upstream_url, name=setup))
            return
        database = stack.enter_context(servers.postgres(fsync=True)).url
        if setup == "postgres":
            yield stack.enter_context(baton(upstream_url, name=setup, database=database))
            return
        queue = stack.enter_context(servers.redis()).url
        roles = ("gateway", "dispatcher")
        yield stack.enter_context(baton(upstream_url, name=setup, roles=roles, database=database, redis=queue))


def _measure(setup: str, effort: Effort) -> list[Row]:
    """One set-up, beside the bare reference so that the ratio is of the same minute."""
    with upstream() as workers:
        direct = Target("direct", workers.url, (workers,))
        with bare(workers.url) as running:
            reference = Target("bare", running.url, (running,))
            if setup == "bare":
                return _rows("embedded", reference, direct, effort)
            floor = scenarios.one_step_cpu(reference, effort)
        with _subject(setup, workers.url) as target:
            rows = _rows(setup, target, direct, effort)
    return [*rows, Row("bare FastAPI + aiohttp, CPU per request", 0.37, "ms", floor, "reference, measured just before")]


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
        f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}, load "
        f"{os.getloadavg()[0]:.1f}"
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
        missed = missed or any(row.verdict == "MISSED" and not row.note for row in rows)
    raise SystemExit(missed)


if __name__ == "__main__":
    main()
