"""Calibration: what each worker was worth at built-in tasks, before anybody has rated anything.

A trial is one task given to one worker, once, on its own. What it came to is a fact about that worker's model under one
version of the tasks: it is shown on the worker's card (`measured`), and is what a policy begins with that learns.
A call that failed is no trial.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct
from msgspec.structs import replace

from app.core.pool.catalog import CalibrationResult, Catalog, Worker
from app.core.pool.snapshot import seal_catalog
from app.core.rating.intervals import NORMAL_QUANTILE

SOURCE = "calibration"
"""The source of such ratings among the ratings of runs."""


class Trial(Struct, frozen=True):
    """One task given to one worker. `worker`, `model`, `version` and `task` name it; a later one takes its place."""

    worker: str
    model: str
    """The provider's name of the model: with another one, the worker is somebody else."""
    version: str
    """The version of the tasks, and of what counts as right."""
    task: str
    domain: str
    family: str
    level: int
    """From 0, the easiest."""
    question: str
    run: str
    at: float
    score: float
    """From 0 (wrong) to 1 (right)."""
    usd: int
    """Micro-dollars."""
    seconds: float

    @property
    def key(self) -> tuple[str, str, str, str]:
        """Return the key that identifies it."""
        return (self.worker, self.model, self.version, self.task)


class Rate(Struct, frozen=True):
    """A pass rate with its 95 % interval (Wilson's, which holds for few trials and at both ends)."""

    passed: float
    tried: int

    @property
    def value(self) -> float:
        """Return the share that was right."""
        if not self.tried:
            return 0.0
        return self.passed / self.tried

    @property
    def ends(self) -> tuple[float, float]:
        """Return the ends of the interval, which are 0 and 1 before the first trial."""
        if not self.tried:
            return (0.0, 1.0)
        square = NORMAL_QUANTILE * NORMAL_QUANTILE / self.tried
        centre = (self.value + square / 2) / (1 + square)
        deviation = math.sqrt(self.value * (1 - self.value) / self.tried + square / self.tried / 4)
        half = NORMAL_QUANTILE / (1 + square) * deviation
        return (max(0.0, centre - half), min(1.0, centre + half))


def rates(trials: Iterable[Trial], by: Callable[[Trial], str]) -> dict[str, Rate]:
    """Return the pass rates of trials in the groups that `by` names, in the order in which they first come."""
    found: dict[str, Rate] = {}
    for trial in trials:
        known = found.get(by(trial), Rate(0.0, 0))
        found[by(trial)] = Rate(known.passed + trial.score, known.tried + 1)
    return found


def of_worker(trials: Sequence[Trial], worker: Worker) -> list[Trial]:
    """Return the trials that speak of a worker as it is now: of its model, and of the latest version of the tasks
    only."""
    own = [trial for trial in trials if (trial.worker, trial.model) == (worker.name, worker.model)]
    latest = max(own, key=lambda trial: trial.at).version if own else ""
    return [trial for trial in own if trial.version == latest]


def add_measurements(catalog: Catalog, trials: Sequence[Trial]) -> Catalog:
    """Return the catalog with what was measured on its cards, and nothing else of that kind."""
    workers = {name: _with_rates(worker, of_worker(trials, worker)) for name, worker in catalog.workers.items()}
    if workers != catalog.workers:
        return seal_catalog(replace(catalog, workers=workers))
    return catalog


def _with_rates(worker: Worker, trials: Sequence[Trial]) -> Worker:
    found: Mapping[str, Rate] = rates(sorted(trials, key=lambda trial: trial.domain), lambda trial: trial.domain)
    shown = tuple(CalibrationResult(domain, round(rate.passed, 3), rate.tried) for domain, rate in found.items())
    return replace(worker, card=replace(worker.card, measured=shown))


def are_indistinguishable(trials: Mapping[str, Sequence[Trial]]) -> bool:
    """Return True if trials of two workers or more tell none of them apart: in no domain, and not in all of them
    together, do the intervals of two pass rates lie apart."""
    tried = [own for own in trials.values() if own]
    if len(tried) < 2:
        return False
    groups: list[list[Rate]] = [[rates(own, lambda trial: "")[""] for own in tried]]
    for domain in {trial.domain for own in tried for trial in own}:
        found = [rates(own, lambda trial: trial.domain).get(domain) for own in tried]
        groups.append([rate for rate in found if rate is not None])
    return not any(_lie_apart(group) for group in groups)


def _lie_apart(found: Sequence[Rate]) -> bool:
    ends = [rate.ends for rate in found]
    return max(low for low, _ in ends) > min(high for _, high in ends)
