"""The health of workers as this process knows it: one breaker for each (provider, model), fed by the end of each call.

The policy is `pool/breaker.py`; here are the clock, the counters and the log lines. Nothing of it is stored: a process
that starts takes every worker for healthy, and learns. Calls that other processes made count too: their outcomes are in
the journals of the runs that this process drives.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Final

from app.core.pool import breaker
from app.core.pool.breaker import NO_TIME, Breaker, Offer, Place, State, Verdict
from app.core.pool.catalog import Catalog, ProviderSpec, Worker
from app.core.records import record
from app.core.run.events import CallFinished
from app.telemetry import Telemetry

LEVELS: Mapping[State, int] = {"closed": 0, "half_open": 1, "open": 2}
REMEMBERED = 4_096
"""Calls whose outcome has been counted, and may be received once more: from a journal, or by another driver of the
run."""
QUICK_SHARE = 0.25
"""The share of the time that a worker may be silent for, within which the replies of a quick worker are complete."""
SLOW_SECONDS = 3_600.0
"""Seconds for which a worker does not count as quick after a reply that took longer."""
FIRST_SECONDS, USUAL_TOKENS = 0.6, 300
"""Seconds until a worker begins to answer, and the tokens of its answer, where no calls of it are known."""
TIMED, LATEST = 5, 16
"""Calls of a worker from which on its duration is known, and those that are remembered."""
NEW: Final = Breaker()
Key = tuple[str, str]
Endpoint = tuple[str, str]
"""A provider and the name of one of its endpoints."""


@record(frozen=True, slots=True)
class WorkerChoice:
    """The worker to call (None: nobody), why those before it are passed over, and why it is called although ejected."""

    worker: Worker | None
    passed_over: tuple[tuple[str, str], ...] = ()
    despite: str = ""
    extra: bool = False
    """True if it is not the step's first call."""

    @property
    def called(self) -> Worker:
        """Return the worker, where there is one."""
        assert self.worker is not None
        return self.worker

    @property
    def hopeless(self) -> bool:
        """Return True if nobody is called because nobody could answer in time."""
        return bool(self.passed_over) and all(reason == NO_TIME for _, reason in self.passed_over)


class Health:
    """The breakers of one process; made in `wiring.py`."""

    def __init__(self, telemetry: Telemetry, *, tick: Callable[[], float], chance: Callable[[], float]) -> None:
        """`tick` gives monotonic seconds, `chance` a number in [0, 1)."""
        self._telemetry = telemetry
        self._tick = tick
        self._chance = chance
        self._breakers: dict[Key, Breaker] = {}
        self._specs: Mapping[str, ProviderSpec] = {}
        self._workers: Mapping[str, Worker] = {}
        self._endpoints: Collection[Endpoint] = ()
        self._counted: dict[str, None] = {}
        self._signs: dict[Key, float] = {}
        """The time of the last sign of life of each worker, in ticks."""
        self._slow: dict[Key, float] = {}
        """The time of the last reply of each worker that took long, in ticks; long ago if none did."""
        self._took: dict[Key, deque[float]] = {}
        """The seconds of the latest calls of each worker that this process made."""

    def follow(self, catalog: Catalog) -> None:
        """Another pool is in force: what is known of workers whose provider has changed, or that are gone, is
        forgotten."""
        for name in self._workers:
            self._telemetry.unwatch("baton_breaker_state", name)
        same = {name for name, spec in catalog.providers.items() if self._specs.get(name) == spec}
        kept = {_key(worker) for worker in catalog.workers.values() if worker.provider in same}
        self._breakers = {key: known for key, known in self._breakers.items() if key in kept}
        self._slow = {key: known for key, known in self._slow.items() if key in kept}
        self._took = {key: known for key, known in self._took.items() if key in kept}
        self._specs, self._workers = catalog.providers, catalog.workers
        for worker in catalog.workers.values():
            self._telemetry.watch("baton_breaker_state", self._level(_key(worker)), worker.name)

    def follow_endpoints(self, endpoints: Mapping[Endpoint, Callable[[], State]]) -> None:
        """Show the breakers of the endpoints of all providers that have several, each of which gives its state."""
        for endpoint in self._endpoints:
            self._telemetry.unwatch("baton_endpoint_state", *endpoint)
        for endpoint, state in endpoints.items():
            self._telemetry.watch("baton_endpoint_state", partial(_level_of, state), *endpoint)
        self._endpoints = tuple(endpoints)

    def endpoint_ejected(self, provider: str, endpoint: str, reason: str) -> None:
        """An endpoint has just been ejected; the provider's others are called instead."""
        self._telemetry.count("baton_endpoint_ejections_total", provider, endpoint, reason)
        words = "An endpoint of a provider failed and is ejected; the other ones are called instead."
        self._telemetry.log(logging.WARNING, words, provider=provider, endpoint=endpoint, reason=reason)

    def forget(self, providers: Collection[str]) -> None:
        """Take the workers of these providers for healthy, as after a start: their keys have changed."""
        for worker in self._workers.values():
            if worker.provider in providers:
                self._breakers.pop(_key(worker), None)

    def state(self, worker: Worker) -> str:
        """Return the state of its breaker: `closed`, `half_open`, or `open` while it is ejected."""
        return self._of(_key(worker)).state(self._tick())

    def _level(self, key: Key) -> Callable[[], float]:
        return partial(_level_of, lambda: self._of(key).state(self._tick()))

    # -- apart from calls

    def sign(self, worker: Worker) -> None:
        """The worker has just said something."""
        self._signs[_key(worker)] = self._tick()

    def silence(self, worker: Worker) -> float:
        """Return the seconds since its last sign of life."""
        return self._tick() - self._signs.get(_key(worker), float("-inf"))

    def took(self, worker: Worker, seconds: float, patience: float, *, whole: bool = True) -> None:
        """The worker has replied, or unless the reply is `whole` was given up, after so many seconds; `patience` are
        those that it may be silent for. That it was given up sooner than it usually replies says nothing of its
        pace."""
        if whole or seconds > self.usual_seconds(worker):
            self._took.setdefault(_key(worker), deque(maxlen=LATEST)).append(seconds)
        if seconds > QUICK_SHARE * patience:
            self._slow[_key(worker)] = self._tick()
        else:
            self._slow.setdefault(_key(worker), float("-inf"))

    def is_quick(self, worker: Worker) -> bool:
        """Return True if it has replied, and no reply of it has taken long for an hour."""
        last = self._slow.get(_key(worker))
        return last is not None and self._tick() - last > SLOW_SECONDS

    def suspects(self, worker: Worker) -> bool:
        """Return True if the latest call of it failed."""
        known = self._of(_key(worker))
        return bool(known.failures or known.reason)

    def is_out(self, worker: Worker) -> bool:
        """Return True if probes have found that it does not generate."""
        return self._of(_key(worker)).reason == breaker.UNREACHABLE

    def probed(self, worker: Worker, *, alive: bool) -> None:
        """A probe has found it alive or not; see `breaker.after_probe`."""
        if alive:
            self.sign(worker)
        now, before = self._tick(), self._of(_key(worker))
        self._keep(worker, before, breaker.after_probe(before, alive=alive, now=now), now)

    # -- before a call

    def ejected(self, workers: Sequence[Worker]) -> dict[str, str]:
        """Return the workers among these that are ejected now, with the reason, the worst first."""
        now = self._tick()
        out = [(breaker.severity(known), worker.name, known.reason) for worker, known in self._known(workers, now)]
        return {name: reason for _, name, reason in sorted(out, reverse=True)}

    def _known(self, workers: Sequence[Worker], now: float) -> list[tuple[Worker, Breaker]]:
        pairs = [(worker, self._of(_key(worker))) for worker in workers]
        return [(worker, known) for worker, known in pairs if known.state(now) == "open"]

    def choose(self, offers: Sequence[tuple[Worker, Place]], seconds_left: float) -> WorkerChoice:
        """Choose which of the offers to call, in the order of preference, with `seconds_left` seconds to go.

        The chosen worker is about to be called: either `settle` follows, or `cancel_call`.
        """
        now = self._tick()
        picked = breaker.pick(self._offers(offers), now=now, seconds_left=seconds_left)
        for name, objection in picked.passed_over:
            if objection == "retry_budget":
                self._telemetry.count("baton_retry_budget_exhausted_total", name)
        for worker, place in offers:
            if worker.name == picked.worker:
                self._begin(worker, place, now)
                return WorkerChoice(worker, picked.passed_over, picked.despite, extra=place != "first")
        return WorkerChoice(None, picked.passed_over)

    def worth_waiting(self, offers: Sequence[tuple[Worker, Place]], seconds_left: float) -> bool:
        """Return True if one of the offers may be healthy again soon."""
        return breaker.worth_waiting(self._offers(offers), now=self._tick(), seconds_left=seconds_left)

    def hopeless(self, worker: Worker) -> float:
        """Return the seconds within which the worker would not answer."""
        return self._of(_key(worker)).least_seconds(worker.deadlines.quickest)

    def usual_seconds(self, worker: Worker) -> float:
        """Return the seconds that nine in ten of its latest calls took at the most, those included that were given up
        after longer than that; where too few are known, the estimate by the speed on its card; if neither is known,
        the least that the pool file states, or 0."""
        took = sorted(self._took.get(_key(worker), ()))
        if len(took) >= TIMED:
            return took[len(took) * 9 // 10]
        if worker.card.speed is None:
            return worker.deadlines.quickest
        return FIRST_SECONDS + worker.writing_seconds(USUAL_TOKENS)

    def affords(self, worker: Worker, place: Place) -> bool:
        """Return True if the worker's retry budget has room."""
        return self._of(_key(worker)).within_retry_budget(place, self._tick())

    def refusal(self, worker: Worker, seconds_left: float) -> str:
        """Return the reason why a call that has an alternative should not be made.

        Empty: it is about to be made, as after `choose`.
        """
        now, known = self._tick(), self._of(_key(worker))
        has_no_time = seconds_left < known.least_seconds(worker.deadlines.quickest)
        objection = NO_TIME if has_no_time else known.objection(now)
        if not objection:
            self._begin(worker, "first", now)
        return objection

    def cancel_call(self, worker: Worker, *, extra: bool = False) -> None:
        """Note that the call which was about to be made is not made."""
        self._breakers[_key(worker)] = breaker.call_not_made(self._of(_key(worker)), extra=extra)

    def _begin(self, worker: Worker, place: Place, now: float) -> None:
        self._breakers[_key(worker)] = breaker.before_call(self._of(_key(worker)), place, now)
        if place != "first":
            self._telemetry.count("baton_retries_total", worker.name, place)

    def _offers(self, offers: Sequence[tuple[Worker, Place]]) -> Iterator[Offer]:
        return (
            Offer(worker.name, place, self._of(_key(worker)), worker.deadlines.quickest) for worker, place in offers
        )

    def _of(self, key: Key) -> Breaker:
        return self._breakers.get(key, NEW)

    # -- after a call

    def settle(
        self, call: str, worker: Worker, verdict: Verdict, began: float, asked: float | None, *, extra: bool = False
    ) -> None:
        """A call of our own has ended; `began` is a tick, `asked` what Retry-After said, in seconds, and `extra` as in
        `WorkerChoice`."""
        self._remember(call)
        self._note_call(worker, verdict, began, asked, extra=extra)

    def note_journaled(self, name: str, finished: CallFinished, age: float = 0.0) -> None:
        """The outcome of a call to this worker was journaled, `age` seconds ago. One of another process counts like our
        own; one that has been counted already is ignored."""
        worker = self._workers.get(name)
        if worker is None or finished.call in self._counted:
            return
        self._remember(finished.call)
        verdict: Verdict = "good" if finished.outcome == "ok" else finished.blamed
        self._note_call(worker, verdict, self._tick() - age - finished.seconds, finished.retry_after, age=age)

    def _remember(self, call: str) -> None:
        if len(self._counted) >= REMEMBERED:
            del self._counted[next(iter(self._counted))]
        self._counted[call] = None

    def _note_call(
        self,
        worker: Worker,
        verdict: Verdict,
        began: float,
        asked: float | None,
        *,
        extra: bool = False,
        age: float = 0.0,
    ) -> None:
        now, before = self._tick(), self._of(_key(worker))
        if verdict == "good":
            self.sign(worker)
        after = breaker.after_call(
            before, verdict, began=began, now=now, chance=self._chance(), asked=asked, extra=extra, age=age
        )
        self._keep(worker, before, after, now)

    def _keep(self, worker: Worker, before: Breaker, after: Breaker, now: float) -> None:
        self._breakers[_key(worker)] = after
        if after.reason and after.since != before.since:
            self._report(worker, after, now)
        elif before.reason and not after.reason:
            self._telemetry.log(logging.INFO, "A worker answers again and is called as before.", worker=worker.name)

    def _report(self, worker: Worker, after: Breaker, now: float) -> None:
        self._telemetry.count("baton_ejections_total", worker.name, after.reason)
        level, words = logging.WARNING, "A worker keeps failing and is ejected; others are called instead."
        if after.reason == "misconfigured":
            level = logging.ERROR
            words = (
                "A worker is misconfigured: its provider refuses our key or does not know the model; correct the pool "
                "file or the key."
            )
        elif after.reason == breaker.UNREACHABLE:
            level, words = logging.ERROR, "A conductor does not generate; the fallback worker answers until it does."
        seconds = round(after.until - now, 3)
        self._telemetry.log(level, words, worker=worker.name, reason=after.reason, seconds=seconds)


def _level_of(state: Callable[[], State]) -> float:
    return LEVELS[state()]


def _key(worker: Worker) -> Key:
    return worker.provider, worker.model
