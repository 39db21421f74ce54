"""Many seeds over all cores, and what came of them together."""

import multiprocessing
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait

import msgspec
from msgspec import Struct

from app.core.run.kinds import ENDED, OUTCOMES
from tests.simulation.faults import SITES
from tests.simulation.play import play
from tests.simulation.report import Report

AT_ONCE = 25
"""Seeds that one core is given at a time."""
MOST_SHOWN = 20
"""Failing seeds that are shown with their first violation; the others by their numbers, ten times as many of them."""
WIDTH = 220
ENOUGH = 500
"""So many seeds must show everything that `missing_coverage` asks for."""
REQUIRED_ACTIONS = (
    *("turn begun elsewhere", "turn begun where it ended", "wait abandoned", "step nested"),
    *("run handed back", "notice told", "notice told again", "content erased"),
    *("pool file read again", "plan approved", "plan refused", "approval not given in time"),
    *("approval asked by a harmed engine", "decision declined"),
)
OF_READS = ("store.read.down", "store.read.lost", "store.read.slow", "crash at store.read", "freeze at store.read")


class Totals(Struct):
    """The sums of the outcomes of many seeds."""

    seeds: int = 0
    calls: int = 0
    seconds: float = 0.0
    failed: dict[int, list[str]] = msgspec.field(default_factory=dict)
    hits: Counter[str] = msgspec.field(default_factory=Counter)
    places: set[tuple[str, str]] = msgspec.field(default_factory=set)
    states: Counter[str] = msgspec.field(default_factory=Counter)
    outcomes: Counter[str] = msgspec.field(default_factory=Counter)
    actions: Counter[str] = msgspec.field(default_factory=Counter)

    def add(self, report: Report) -> None:
        """Count one more."""
        self.seeds += 1
        self.calls += report.calls
        self.seconds += report.seconds
        self.hits += report.hits
        self.places |= report.places
        self.states += report.states
        self.outcomes += report.outcomes
        self.actions += report.actions
        if report.violations:
            self.failed[report.seed] = report.violations

    def take(self, other: "Totals") -> None:
        """Count what others have counted."""
        self.seeds += other.seeds
        self.calls += other.calls
        self.seconds += other.seconds
        self.hits += other.hits
        self.places |= other.places
        self.states += other.states
        self.outcomes += other.outcomes
        self.actions += other.actions
        self.failed |= other.failed

    def missing_coverage(self) -> Iterator[str]:
        """Return what has not happened, or too seldom or at too few awaits, for these worlds to test the promises."""
        yield from (f"{site} never happened" for site in SITES if not self.hits[site])
        for site in OF_READS:
            if len({place for struck, place in self.places if struck == site}) < 5:
                yield f"{site} at fewer than 5 awaits"
        awaits = {place for _, place in self.places}
        if len(awaits) < 40 or len(self.places) < 250:
            yield f"faults at {len(awaits)} awaits and {len(self.places)} places only"
        yield from (f"{end} ended fewer than 10 runs" for end in sorted(ENDED) if self.states[end] < 10)
        yield from (f"{action}, fewer than 5 times" for action in REQUIRED_ACTIONS if self.actions[action] < 5)
        yield from (f"{name} came of fewer than 20 attempts" for name in sorted(OUTCOMES) if self.outcomes[name] < 20)

    def lines(self) -> Iterator[str]:
        """Return the lines of the report."""
        hours = self.seconds / 3600
        yield f"{self.seeds:,} seeds, {self.states.total():,} runs, {self.calls:,} calls, {hours:,.1f} virtual hours"
        yield f"runs      {_counts(self.states)}"
        yield f"outcomes  {_counts(self.outcomes)}"
        yield f"actions   {_counts(self.actions)}"
        yield f"faults    {self.hits.total():,} of {len(self.hits)} kinds at {len(self.places)} places"
        for start in range(0, len(SITES), 4):
            yield "          " + "  ".join(f"{site} {self.hits[site]:,}" for site in SITES[start : start + 4])
        for seed, violations in sorted(self.failed.items())[:MOST_SHOWN]:
            yield f"seed {seed}: {violations[0]}"[:WIDTH]
        if more := sorted(self.failed)[MOST_SHOWN : 11 * MOST_SHOWN]:
            yield f"and seeds {', '.join(map(str, more))}"
        yield f"{len(self.failed)} failed" + (
            ": python -m tests.simulation SEED tells the story" if self.failed else ""
        )


def _counts(counter: Counter[str]) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in sorted(counter.items()))


def many(first: int, count: int, minutes: float) -> Totals:
    """So many seeds from `first` on, or as many as the minutes allow."""
    total, end = Totals(), time.monotonic() + 60 * minutes
    cores = os.cpu_count() or 1
    starts = iter(range(first, first + count, AT_ONCE))
    going: set[Future[list[Report]]] = set()
    with ProcessPoolExecutor(cores, multiprocessing.get_context("spawn")) as pool:
        while True:
            while len(going) < 2 * cores and time.monotonic() < end and (start := next(starts, None)) is not None:
                going.add(pool.submit(_some, range(start, min(start + AT_ONCE, first + count))))
            if not going:
                return total
            finished, going = wait(going, return_when=FIRST_COMPLETED)
            for future in finished:
                for report in future.result():
                    total.add(report)


def _some(seeds: Sequence[int]) -> list[Report]:
    return [play(seed) for seed in seeds]
