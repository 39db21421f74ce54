"""The figures of each set-up with their budgets, and the order in which their rounds are measured.

A set-up is one way to run Baton: embedded (one process over SQLite), postgres (one process), distributed (a gateway and
a dispatcher over Postgres with fsync and Redis), and saturated (distributed, with twice as many ready steps as slots).
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Literal

from msgspec import Struct

from . import scenarios
from .scenarios import Effort, ScenarioError
from .subject import Target, Tree
from .table import Row

SETUPS = ("embedded", "postgres", "distributed", "saturated")


class Subject(Struct, frozen=True):
    """One tree under measurement: its processes, and servers of its own for the seams that are measured by themselves.

    `redis` and `journal` are URLs; they are empty in set-ups that do not measure that seam.
    """

    tree: Tree
    target: Target
    redis: str = ""
    journal: str = ""


class Figure(Struct, frozen=True):
    """One row of the table. `measure` takes one round of it; what can be measured `once` has one round, not warmed."""

    what: str
    budget: float | None
    unit: str
    measure: Callable[[Subject, Effort], float]
    higher: bool = False
    once: bool = False

    def row(self, rounds: Sequence[float], note: str = "") -> Row:
        """Return the row of these rounds; without any, of the reason why there is none."""
        better: Literal["lower", "higher"] = "higher" if self.higher else "lower"
        median = statistics.median(rounds) if rounds else None
        return Row(self.what, self.budget, self.unit, median, note[:120], better, tuple(rounds))


def measure_subjects(figure: Figure, subjects: Sequence[Subject], effort: Effort) -> list[Row]:
    """Return a row for each subject. The rounds alternate between the subjects, so that all see the same minute."""
    print(f"... {figure.what}", flush=True)
    rounds: list[list[float]] = [[] for _ in subjects]
    try:
        if not figure.once:
            for subject in subjects:
                figure.measure(subject, effort.warm_up)
        for _ in range(1 if figure.once else effort.rounds):
            for subject, figures_of_subject in zip(subjects, rounds, strict=True):
                figures_of_subject.append(figure.measure(subject, effort))
    except ScenarioError as problem:
        return [figure.row((), str(problem)) for _ in subjects]
    return [figure.row(figures_of_round) for figures_of_round in rounds]


def of_setup(setup: str, direct: Target, reference: Target) -> Iterator[Figure]:
    """The figures of a set-up, in the order in which they are measured: memory first, before any load."""
    if setup == "bare":
        yield _idle_memory("RSS, idle")
        yield from _one_step(direct, 5)
        yield from _streams(direct)
        return
    yield _idle_memory("gateway RSS, idle")
    yield from _list_saturated_figures() if setup == "saturated" else _of_service(setup, direct, reference)


def _of_service(setup: str, direct: Target, reference: Target) -> Iterator[Figure]:
    distributed = setup == "distributed"
    if setup == "embedded":
        what = "bad bodies, longest stall of the others"
        yield Figure(what, 100, "ms", lambda subject, _: scenarios.stall(subject.target), once=True)
    yield from _seams(setup)
    yield from _one_step(direct, 8 if distributed else 5)
    yield from _commits(setup)
    yield from _tools(direct, 6 if distributed else 5)
    yield Figure(
        "one step, CPU against bare FastAPI + aiohttp",
        None,
        "x",
        lambda subject, effort: scenarios.cpu_ratio(subject.target, reference, effort),
    )
    if setup != "postgres":
        yield from _workflow(direct, 4 if distributed else 2.5, 4 if distributed else 3.5)
        yield from _streams(direct, 8)


def _idle_memory(what: str) -> Figure:
    return Figure(what, 120, "MiB", lambda subject, _: scenarios.idle_memory(subject.target), once=True)


def _seams(setup: str) -> Iterator[Figure]:
    """The queue and the journal without the service."""
    if setup == "distributed":
        hop = Figure("queue hop over Redis, p50", 1, "ms", lambda s, _: scenarios.queue_hop(s.redis, s.tree), once=True)
        yield hop
    if setup == "postgres":
        for place, (what, budget, unit) in enumerate(
            (("journal, Postgres with fsync", 5000, "events/s"), ("journal, worst wait beyond one write", 5, "ms"))
        ):
            yield Figure(what, budget, unit, partial(_journal, place), higher=place == 0, once=True)


def _journal(place: int, subject: Subject, effort: Effort) -> float:
    return scenarios.journal(subject.journal, effort, subject.tree)[place]


def _one_step(direct: Target, budget: float) -> Iterator[Figure]:
    yield Figure("one step, CPU per request, 16 conn.", 1.5, "ms", lambda s, e: scenarios.one_step_cpu(s.target, e))
    for connections, rank in ((1, "p50"), (1, "p99"), (16, "p50"), (16, "p99")):
        bound = budget if (connections, rank) == (1, "p50") else None
        measure = partial(_measure_added_latency, direct, connections, rank)
        yield Figure(f"one step over 50 ms, added {rank}, {connections} conn.", bound, "ms", measure)


def _measure_added_latency(direct: Target, connections: int, rank: str, subject: Subject, effort: Effort) -> float:
    return scenarios.measure_added_latency(subject.target, direct, connections, rank, effort)


def _commits(setup: str) -> Iterator[Figure]:
    figure = Figure(
        "one step, commits per run",
        2 if setup == "embedded" else None,
        "",
        lambda subject, _: scenarios.one_step_commits(subject.target),
    )
    yield figure
    if setup != "postgres":
        yield Figure("1-2-1, commits per run", None, "", lambda s, _: scenarios.workflow_commits(s.target))


def _tools(direct: Target, budget: float) -> Iterator[Figure]:
    for how, stream in (("whole", False), ("streamed", True)):
        measure = partial(_tool_turn, direct, stream)
        yield Figure(f"tool turn on mini over 20 ms, added p50, {how}", budget, "ms", measure)


def _tool_turn(direct: Target, stream: bool, subject: Subject, effort: Effort) -> float:
    return scenarios.tool_turn_added(subject.target, direct, effort, stream=stream)


def _workflow(direct: Target, per_step: float, cpu: float) -> Iterator[Figure]:
    yield Figure(
        "1-2-1, added per step p50",
        per_step,
        "ms",
        lambda subject, effort: scenarios.workflow_added_per_step(subject.target, direct, effort),
    )
    yield Figure("1-2-1, CPU per run, 64 runs", cpu, "ms", lambda s, e: scenarios.workflow_cpu(s.target, e))


def _streams(direct: Target, first_token: float = 5) -> Iterator[Figure]:
    yield Figure(
        "chunks relayed at 128 streams",
        12_000,
        "/s",
        lambda subject, effort: scenarios.stream_rate(subject.target, effort),
        higher=True,
    )
    yield Figure(
        "added TTFT p50, 16 streams",
        first_token,
        "ms",
        lambda subject, effort: scenarios.measure_added_first_token(subject.target, direct, effort),
    )
    yield Figure(
        "RSS per idle stream",
        40,
        "KiB",
        lambda subject, effort: scenarios.memory_per_idle_stream(subject.target, effort),
        once=True,
    )


def _list_saturated_figures() -> Iterator[Figure]:
    yield Figure("4-1, slots in use", None, "%", lambda s, e: scenarios.measure_saturated_use(s.target, e), higher=True)
    yield Figure("4-1, CPU per run", None, "ms", lambda s, e: scenarios.measure_saturated_cpu(s.target, e))
    for rank in ("p50", "p99"):
        yield Figure(f"4-1, whole run {rank}", None, "ms", partial(_measure_saturated_latency, rank))


def _measure_saturated_latency(rank: str, subject: Subject, effort: Effort) -> float:
    return scenarios.measure_saturated_latency(subject.target, rank, effort)
