"""Forecasts of what a plan will cost and how long it will take, with their spread, from what steps of past runs took.

A `History` keeps, for each step of past runs, its worker, its place in the shape of its plan, its tokens and its time.
A forecast draws one of these for each step of the plan, some hundred times, and adds up the money over all steps and
the time along the longest path; the quantiles of these sums are the forecast. The history of the same worker at the
same place of the same shape is used where there is enough of it; else that of the worker in a similar step, in any
step, and that of other workers in similar steps; else what little there is of the worker, and that of other workers in
any step. What no run has shown follows from prices, cards and usual sizes, and the forecast says so.

Input tokens are not drawn but computed, because what a step reads is known: from the bytes of its messages, by the
number of tokens that the worker has counted in earlier requests. The draws are evenly spread and not random, so that
the same history gives the same forecast. Money is in micro-dollars, times are in seconds.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from math import sqrt
from typing import Literal

from msgspec import Struct

from app.core.message.chat import Usage, sum_usages, usage_from_json
from app.core.plan.pricing import BYTES_A_TOKEN
from app.core.plan.workflow import critical_path_seconds, step_depths, topology
from app.core.pool.catalog import Limits, Worker
from app.core.pool.policy import worst_case
from app.core.rating.economics import JournaledRun
from app.core.run.events import Json
from app.core.run.kinds import TERMINAL, Kind

Basis = Literal["shape", "role", "worker", "others", "prices"]
"""The evidence for the forecast of a step: steps of the same worker at the same place of the same shape, in the same
role (answering or not, reading others or not), in any role; steps of other workers, in that role where there are
enough; or prices and cards."""
ENOUGH = 5
"""Past steps that suffice for one of these."""
MOST_DRAWN_FROM = 25
"""The most past steps that are drawn from: those whose requests were nearest in size, because long answers go with long
questions."""
MOST_KEPT = 200
"""The most past steps that are kept under one key: the newest."""
DRAWS = 251
"""The number of draws from which the quantiles are taken."""
OUTPUT_TOKENS = 400
"""Output tokens of a usual step of which nothing is known."""
LEAST_FACTOR, MOST_FACTOR = 0.25, 2.5
"""The range of factors around them."""
FIRST_WORD_SECONDS, TOKENS_A_SECOND = 0.6, 60.0
"""Seconds until a usual worker begins to answer, and the output tokens a second of one whose card does not say."""
STEP_SECONDS = 0.02
"""Seconds that Baton adds to each step of a path, where no history says it."""
FITTED = 8
"""Past steps from which on a worker's tokens are fitted to the bytes of its requests."""
QUANTILES = (0.1, 0.5, 0.9)
"""The probabilities of the three quantiles in a `Spread`."""


class ExecutedStep(Struct, frozen=True):
    """A step as it was executed, all of its calls together. `bytes` are those of its request; 0 where it had several or
    none."""

    worker: str
    bytes: int
    usage: Usage
    chars: int
    seconds: float


class PlannedStep(Struct, frozen=True):
    """A step of a plan. `bytes` are those of its request without what earlier steps will have written; `inputs` are the
    earlier steps that it reads."""

    worker: Worker
    bytes: int
    inputs: tuple[int, ...]
    answers: bool
    most_tokens: int
    """The largest number of its output tokens."""


class Spread(Struct, frozen=True):
    """Three quantiles, and the largest value that the limits allow."""

    p10: float
    p50: float
    p90: float
    most: float


class StepForecast(Struct, frozen=True):
    """The forecast of one step: its money, its time, its tokens, and what they rest on."""

    worker: str
    basis: Basis
    samples: int
    usd: Spread
    seconds: Spread
    input: Spread
    output: Spread
    priced: bool = True
    """False if the pool file has no price for the worker: then the money is 0, and says nothing."""


class Forecast(Struct, frozen=True):
    """The forecast of a plan."""

    usd: Spread
    seconds: Spread
    steps: tuple[StepForecast, ...]
    runs: int
    """The number of past runs that were looked at."""

    @property
    def unpriced(self) -> tuple[str, ...]:
        """Return the workers whose price is not known, so that their steps are not in the money."""
        return tuple(dict.fromkeys([step.worker for step in self.steps if not step.priced]))

    @property
    def basis(self) -> Literal["history", "prices", "mixed"]:
        """`history` if past runs of the same workers bear all of it, `prices` if none bears any of it."""
        known = [step.basis not in ("others", "prices") for step in self.steps]
        if all(known):
            return "history"
        if any(step.basis != "prices" for step in self.steps):
            return "mixed"
        return "prices"


# -- what past runs took


@dataclass(slots=True)
class _Step:
    """One step while its run's events are read."""

    planned: Json
    usages: list[Usage] = field(default_factory=list)
    bytes: int = 0
    began: float | None = None
    ended: float | None = None
    chars: int = 0
    worker: str = ""


class _Run:
    """One run's events, as far as a history needs them."""

    def __init__(self, run: JournaledRun) -> None:
        self.steps: dict[int, _Step] = {}
        self.began = run.created_at
        self.ended = run.created_at
        self.instant = True
        self.waited = self.preview = False
        for event in run.events:
            self._take(event.kind, event.body, event.at)

    def _take(self, kind: Kind, body: Json, at: float) -> None:
        if kind is Kind.ADMITTED:
            self.preview = bool(body.get("preview"))
            self.instant = not body.get("approval")  # an hour may pass before somebody approves its plan
        elif kind is Kind.PLAN_OPENED:
            self.instant = self.instant and bool(body.get("instant"))
        elif kind is Kind.PLAN_STEP:
            self.steps[body["n"]] = _Step(body)
        elif kind is Kind.STEP_AWAITING:
            self.waited = True
        elif kind in TERMINAL:
            self.ended = at
        elif body.get("n") in self.steps:
            self._take_step(kind, body, at, self.steps[body["n"]])

    def _take_step(self, kind: Kind, body: Json, at: float, step: _Step) -> None:
        if kind is Kind.CALL_INTENDED:
            step.began = at if step.began is None else step.began
            step.bytes, step.worker = int(body.get("bytes", 0)), str(body["worker"])
        elif kind is Kind.CALL_FINISHED:
            step.usages.append(usage_from_json(body["usage"]))
        elif kind is Kind.STEP_DONE:
            step.ended, step.chars = at, int(body["chars"])

    @property
    def shape(self) -> list[tuple[int, ...]] | None:
        """Return the inputs of each step, counted from 0; None for a run that is no example: of several plans, with
        tools, or not executed as a whole."""
        plans = {step.planned["proposal"] for step in self.steps.values()}
        whole = all(step.ended is not None and step.began is not None for step in self.steps.values())
        is_first = sorted(self.steps) == [*range(len(self.steps))]
        if self.preview or self.waited or len(plans) != 1 or not whole or not is_first:
            return None
        return [_inputs(step.planned) for step in self._in_order()]

    def _in_order(self) -> list[_Step]:
        return [self.steps[n] for n in sorted(self.steps)]

    def past(self) -> list[ExecutedStep]:
        """Return the usage, text length and seconds of each step, in the order of their numbers."""
        found = []
        for step in self._in_order():
            usage = sum_usages(step.usages)
            seconds = max((step.ended or 0.0) - (step.began or 0.0), 0.0)
            size = step.bytes if len(step.usages) == 1 else 0
            found.append(ExecutedStep(step.worker, size, usage, step.chars, seconds))
        return found

    def overhead(self, shape: Sequence[Sequence[int]], steps: Sequence[ExecutedStep]) -> float:
        """Return the seconds that Baton added to each step of the longest path."""
        first = min([step.began or 0.0 for step in self.steps.values()])
        whole = self.ended - (self.began if self.instant else first)
        path = critical_path_seconds(shape, [step.seconds for step in steps])
        return max(whole - path, 0.0) / (1 + max(step_depths(shape)))


def _inputs(planned: Json) -> tuple[int, ...]:
    return tuple([n for n in planned["access"] if isinstance(n, int)])


class History:
    """The steps of past runs with what they took, found by what they have in common with a planned step."""

    def __init__(self, runs: Iterable[JournaledRun]) -> None:
        """`runs` come with the newest first."""
        self.runs = 0
        self._steps: defaultdict[tuple[object, ...], list[ExecutedStep]] = defaultdict(list)
        self._all: list[ExecutedStep] = []
        self._overheads: list[float] = []
        self._sizes: dict[str, Callable[[float], float]] = {}
        for run in runs:
            with suppress(AttributeError, LookupError, TypeError, ValueError):  # a damaged journal is no example
                self._add(_Run(run))

    def _add(self, run: _Run) -> None:
        shape = run.shape
        if not shape:
            return
        steps = run.past()
        overhead = run.overhead(shape, steps)
        self.runs += 1
        self._all += steps[: max(MOST_KEPT - len(self._all), 0)]
        for place, step in enumerate(steps):
            for _, key in keys(step.worker, shape, place):
                if len(self._steps[key]) < MOST_KEPT:
                    self._steps[key].append(step)
        if len(self._overheads) < MOST_KEPT:
            self._overheads.append(overhead)

    @cached_property
    def overheads(self) -> Sequence[float]:
        """Return the seconds that Baton added to a step of a path, sorted; a usual figure where nothing is known."""
        return sorted(self._overheads) or [STEP_SECONDS]

    def like(
        self, worker: str, shape: Sequence[Sequence[int]], place: int, size: float
    ) -> tuple[Basis, Sequence[ExecutedStep]]:
        """Return the past steps that are most like this one, whose request will have about so many bytes; and in what
        they are alike. They are in the order of their output."""
        basis, found = self._alike(worker, shape, place)
        nearest = sorted(found, key=lambda call: abs(call.bytes - size))[:MOST_DRAWN_FROM]
        return basis, sorted(nearest, key=lambda call: (call.usage.output, call.seconds))

    def _alike(self, worker: str, shape: Sequence[Sequence[int]], place: int) -> tuple[Basis, Sequence[ExecutedStep]]:
        """Return the closest past steps of which there are enough; else the few of the worker itself, and where it has
        none those of anybody: they tell how quick the providers of this pool are, which no card does."""
        for basis, key in keys(worker, shape, place):
            found = self._steps.get(key, ())
            if len(found) >= ENOUGH:
                return basis, found
        own = self._steps.get(("worker", worker), ())
        if own:
            return "worker", own
        if len(self._all) >= ENOUGH:
            return "others", self._all
        return "prices", ()

    def tokens(self, worker: str, size: float) -> float:
        """Return the input tokens of a request of so many bytes to this worker."""
        if worker not in self._sizes:
            own = self._steps.get(("worker", worker), ())
            self._sizes[worker] = _fit_input_tokens(own if len(own) >= FITTED else [*own, *self._all])
        return max(self._sizes[worker](size), 1.0)

    def residual(self, past: ExecutedStep) -> float:
        """Return the factor by which a past step had more input tokens than its bytes let expect; 1 where that is not
        known."""
        if not past.bytes or not past.usage.input:
            return 1.0
        return past.usage.input / self.tokens(past.worker, past.bytes)


def keys(worker: str, shape: Sequence[Sequence[int]], place: int) -> list[tuple[Basis, tuple[object, ...]]]:
    """Return the keys under which a step of a plan is found again, the closest first."""
    role = (place == len(shape) - 1, bool(shape[place]))
    return [
        ("shape", ("shape", worker, topology(shape), len(shape), place)),
        ("role", ("role", worker, *role)),
        ("worker", ("worker", worker)),
        ("others", ("others", *role)),
    ]


def _fit_input_tokens(steps: Sequence[ExecutedStep]) -> Callable[[float], float]:
    """Return a function from the bytes of a request to its input tokens, fitted to past steps by least squares."""
    sizes = [(float(step.bytes), float(step.usage.input)) for step in steps if step.bytes and step.usage.input]
    if not sizes:
        return lambda size: size / BYTES_A_TOKEN
    mean_x, mean_y = sum(x for x, _ in sizes) / len(sizes), sum(y for _, y in sizes) / len(sizes)
    spread = sum((x - mean_x) ** 2 for x, _ in sizes)
    slope = sum((x - mean_x) * (y - mean_y) for x, y in sizes) / spread if spread else 0.0
    if len(sizes) < FITTED or slope <= 0.0:
        return lambda size: size * mean_y / mean_x
    return lambda size: mean_y + slope * (size - mean_x)


# -- a plan


@dataclass(slots=True)
class _Drawn:
    """The cost, seconds and tokens of one step in each draw."""

    basis: Basis
    samples: int
    usd: list[float] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    input: list[float] = field(default_factory=list)
    output: list[float] = field(default_factory=list)
    chars: list[float] = field(default_factory=list)


def forecast(steps: Sequence[PlannedStep], limits: Limits, history: History) -> Forecast:
    """Return the forecast of a plan of at least one step."""
    shape = [step.inputs for step in steps]
    drawn: list[_Drawn] = []
    for place, step in enumerate(steps):
        read = sum(sum(drawn[n].chars) for n in step.inputs) / DRAWS
        basis, past = history.like(step.worker.name, shape, place, step.bytes + read)
        sample = _Drawn(basis, len(past))
        for draw in range(DRAWS):
            size = step.bytes + sum(drawn[n].chars[draw] for n in step.inputs)
            share = _evenly_spread(draw, place)
            if past:
                chosen = past[int(share * len(past))]
            else:
                chosen = _usual(step, share)
            tokens = history.tokens(step.worker.name, size) * history.residual(chosen)
            _add_draw(sample, step, chosen, tokens)
        drawn.append(sample)
    worst = [_worst(step, steps) for step in steps]
    costs = [_cost(drawn, draw) for draw in range(DRAWS)]
    step_forecasts = []
    for step, sample, most in zip(steps, drawn, worst, strict=True):
        step_forecasts.append(_step_forecast(step, sample, most, limits))
    return Forecast(
        usd=_spread(costs, _most_usd(worst, limits)),
        seconds=_spread(_times(shape, drawn, history.overheads), limits.seconds),
        steps=tuple(step_forecasts),
        runs=history.runs,
    )


def _cost(drawn: Sequence[_Drawn], draw: int) -> float:
    """Return the cost of all steps in one draw."""
    return sum(sample.usd[draw] for sample in drawn)


def _evenly_spread(draw: int, axis: int) -> float:
    """Return one of the evenly spread numbers from 0 to 1 of an axis, which is independent of the others: a Kronecker
    sequence, whose steps are the fractional parts of the roots of square-free numbers."""
    return (0.5 + draw * sqrt(_ROOTS[axis % len(_ROOTS)])) % 1.0


_ROOTS = (2, 3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71, 73, 79, 83, 89, 97, 101, 103)


def _usual(step: PlannedStep, share: float) -> ExecutedStep:
    """Return a step as one of which nothing is known is expected to be; `share`, from 0 to 1, says how long its answer
    is."""
    output = min(int(OUTPUT_TOKENS * (LEAST_FACTOR + share * (MOST_FACTOR - LEAST_FACTOR) * share)), step.most_tokens)
    seconds = FIRST_WORD_SECONDS + output / (step.worker.card.speed or TOKENS_A_SECOND)
    return ExecutedStep(step.worker.name, 0, Usage(output=output), int(output * BYTES_A_TOKEN), seconds)


def _add_draw(sample: _Drawn, step: PlannedStep, past: ExecutedStep, tokens: float) -> None:
    """Add a draw: a step that takes what this one took, but for the `tokens` of its input."""
    used = past.usage
    output = min(used.output, step.most_tokens)
    cached = 0.0
    if used.input:
        cached = tokens * used.cached / used.input
    usage = Usage(input=round(tokens), cached=round(cached), output=output, reasoning=min(used.reasoning, output))
    sample.usd.append(float(step.worker.price.cost(usage)))
    sample.seconds.append(past.seconds)
    sample.input.append(tokens)
    sample.output.append(float(output))
    sample.chars.append(float(past.chars))


def _times(shape: Sequence[Sequence[int]], drawn: Sequence[_Drawn], overheads: Sequence[float]) -> list[float]:
    levels = 1 + max(step_depths(shape))
    found = []
    for draw in range(DRAWS):
        overhead = overheads[int(_evenly_spread(draw, len(shape)) * len(overheads))]
        seconds = [sample.seconds[draw] for sample in drawn]
        found.append(critical_path_seconds(shape, seconds) + levels * overhead)
    return found


def _worst(step: PlannedStep, steps: Sequence[PlannedStep]) -> int:
    """Return the most that one call of a step can cost, in micro-dollars."""
    read = sum(BYTES_A_TOKEN * steps[n].most_tokens for n in step.inputs)
    return worst_case(step.worker, int(step.bytes + read), step.most_tokens).usd


def _most_usd(worst: Sequence[int], limits: Limits) -> int:
    """Return the most that the plan can cost, every attempt of every step included: never more than the run's limit."""
    return min(sum(worst) * limits.attempts, limits.usd)


def _step_forecast(step: PlannedStep, sample: _Drawn, worst: int, limits: Limits) -> StepForecast:
    return StepForecast(
        worker=step.worker.name,
        basis=sample.basis,
        samples=sample.samples,
        usd=_spread(sample.usd, min(worst * limits.attempts, limits.usd)),
        seconds=_spread(sample.seconds, limits.seconds),
        input=_spread(sample.input, limits.tokens),
        output=_spread(sample.output, step.most_tokens),
        priced=step.worker.priced,
    )


def _spread(values: Sequence[float], most: float) -> Spread:
    ordered = sorted(values)
    low, middle, high = [ordered[round(q * (len(ordered) - 1))] for q in QUANTILES]
    return Spread(min(low, most), min(middle, most), min(high, most), most)
