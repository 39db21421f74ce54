"""The health of workers as this process knows it: one breaker for each (provider, model), fed by the end of each call.

The policy is `pool/breaker.py`; here are the clock, the counters and the log lines. Nothing is stored: a process that
starts takes every worker for healthy, and learns. Calls that other processes made count too, because their outcomes are
in the journals of the runs that this process drives.
"""

import logging
from collections import deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import partial
from typing import Final, TypeVar

from msgspec import Struct

from app.core.pool import breaker
from app.core.pool.breaker import NO_TIME, Breaker, CallEnd, Offer, Place, State, Verdict
from app.core.pool.catalog import Catalog, ProviderSpec, Worker
from app.core.run.events import CallFinished
from app.telemetry import Telemetry

LEVELS: Mapping[State, int] = {"closed": 0, "half_open": 1, "open": 2}
MOST_COUNTED_CALLS = 4_096
"""Calls whose outcome has been counted, and may be received once more: from a journal, or by another driver of the
run."""
QUICK_SHARE = 0.25
"""The share of the time that a worker may be silent for, within which the replies of a quick worker are complete."""
SLOW_SECONDS = 3_600.0
"""Seconds for which a worker does not count as quick after a reply that took longer."""
FIRST_TOKEN_SECONDS, USUAL_ANSWER_TOKENS = 0.6, 300
"""Seconds until a worker begins to answer, and the tokens of its answer, where no calls of it are known."""
LEAST_TIMED_CALLS, MOST_TIMED_CALLS = 5, 16
"""Calls of a worker from which on its duration is known, and those that are remembered."""
NEW_BREAKER: Final = Breaker()
V = TypeVar("V")
Key = tuple[str, str]
"""A provider and one of its models: what a breaker stands for."""
Endpoint = tuple[str, str]
"""A provider and the name of one of its endpoints."""


class WorkerChoice(Struct, frozen=True):
    """The worker to call (None: nobody), why those before it are passed over, and why it is called although ejected."""

    worker: Worker | None
    passed_over: tuple[tuple[str, str], ...] = ()
    despite: str = ""
    extra: bool = False
    """True if it is not the step's first call."""

    @property
    def chosen(self) -> Worker:
        """Return the worker of a choice that has one."""
        assert self.worker is not None
        return self.worker

    @property
    def lacks_time(self) -> bool:
        """Return True if nobody is called because nobody could answer in time."""
        return bool(self.passed_over) and all(reason == NO_TIME for _, reason in self.passed_over)


class Health:
    """The breakers of one process; made in `wiring.py`."""

    def __init__(self, telemetry: Telemetry, *, monotonic: Callable[[], float], random: Callable[[], float]) -> None:
        """`monotonic` gives seconds of a clock that never goes back, `random` a number in [0, 1)."""
        self._telemetry = telemetry
        self._monotonic = monotonic
        self._random = random
        self._breakers: dict[Key, Breaker] = {}
        self._specs: Mapping[str, ProviderSpec] = {}
        self._workers: Mapping[str, Worker] = {}
        self._endpoints: Collection[Endpoint] = ()
        self._counted_calls: dict[str, None] = {}
        self._last_signs: dict[Key, float] = {}
        """The time of the last sign of life of each worker, by `monotonic`."""
        self._found_alive: dict[Key, Breaker] = {}
        """The breaker of each worker as it was when a probe found it alive."""
        self._slow_replies: dict[Key, float] = {}
        """The time of the last reply of each worker that took long, by `monotonic`; long ago if none did."""
        self._reply_seconds: dict[Key, deque[float]] = {}
        """The durations of the latest calls of each worker that this process made, in seconds."""

    def use_catalog(self, catalog: Catalog) -> None:
        """Put another pool in force, and forget what is known of workers whose provider has changed, or that are
        gone."""
        for name in self._workers:
            self._telemetry.unwatch("baton_breaker_state", name)
        unchanged = {name for name, spec in catalog.providers.items() if self._specs.get(name) == spec}
        kept = {_key(worker) for worker in catalog.workers.values() if worker.provider in unchanged}
        self._breakers = _only(kept, self._breakers)
        self._last_signs = _only(kept, self._last_signs)
        self._found_alive = _only(kept, self._found_alive)
        self._slow_replies = _only(kept, self._slow_replies)
        self._reply_seconds = _only(kept, self._reply_seconds)
        changed = self._specs.keys() - unchanged
        self._specs, self._workers = catalog.providers, catalog.workers
        self.forget_providers(changed)
        for worker in catalog.workers.values():
            self._telemetry.watch("baton_breaker_state", self._level(_key(worker)), worker.name)

    def watch_endpoints(self, endpoints: Mapping[Endpoint, Callable[[], State]]) -> None:
        """Show the breakers of the endpoints of all providers that have several, each of which gives its state."""
        for endpoint in self._endpoints:
            self._telemetry.unwatch("baton_endpoint_state", *endpoint)
        for endpoint, state in endpoints.items():
            self._telemetry.watch("baton_endpoint_state", partial(_level_of, state), *endpoint)
        self._endpoints = tuple(endpoints)

    def note_ejected_endpoint(self, provider: str, endpoint: str, reason: str) -> None:
        """Count and log that an endpoint has just been ejected; the provider's others are called instead."""
        self._telemetry.count("baton_endpoint_ejections_total", provider, endpoint, reason)
        words = "An endpoint of a provider failed and is ejected; the other ones are called instead."
        self._telemetry.log(logging.WARNING, words, provider=provider, endpoint=endpoint, reason=reason)

    def forget_providers(self, providers: Collection[str]) -> None:
        """Take the workers of these providers for healthy, as after a start: their settings or keys have changed. Calls
        that began before say nothing of them."""
        for worker in self._workers.values():
            if worker.provider in providers:
                self._breakers[_key(worker)] = Breaker(since=self._monotonic())

    def state(self, worker: Worker) -> str:
        """Return the state of its breaker: `closed`, `half_open`, or `open` while it is ejected."""
        return self._breaker_of(_key(worker)).state(self._monotonic())

    def _level(self, key: Key) -> Callable[[], float]:
        return partial(_level_of, lambda: self._breaker_of(key).state(self._monotonic()))

    # -- what is known of a worker

    def note_sign_of_life(self, worker: Worker) -> None:
        """Note that the worker has just sent something."""
        self._last_signs[_key(worker)] = self._monotonic()

    def seconds_silent(self, worker: Worker) -> float:
        """Return the seconds since its last sign of life."""
        return self._monotonic() - self._last_signs.get(_key(worker), float("-inf"))

    def note_reply_time(self, worker: Worker, seconds: float, patience: float, *, whole: bool = True) -> None:
        """Note that the worker has replied after so many seconds, or, unless the reply is `whole`, was given up.

        `patience` is how long it may be silent, in seconds. A call that was given up sooner than the worker usually
        replies says nothing of its speed.
        """
        if whole or seconds > self.usual_seconds(worker):
            self._reply_seconds.setdefault(_key(worker), deque(maxlen=MOST_TIMED_CALLS)).append(seconds)
        if seconds > QUICK_SHARE * patience:
            self._slow_replies[_key(worker)] = self._monotonic()
        else:
            self._slow_replies.setdefault(_key(worker), float("-inf"))

    def is_quick(self, worker: Worker) -> bool:
        """Return True if it has replied, and no reply of it has taken long for an hour."""
        last = self._slow_replies.get(_key(worker))
        return last is not None and self._monotonic() - last > SLOW_SECONDS

    def is_suspect(self, worker: Worker) -> bool:
        """Return True if the latest call of it failed, and no probe has found it alive since."""
        its_breaker = self._breaker_of(_key(worker))
        if its_breaker == self._found_alive.get(_key(worker)):
            return False
        return bool(its_breaker.failures or its_breaker.reason)

    def is_out(self, worker: Worker) -> bool:
        """Return True if probes have found that it does not generate."""
        return self._breaker_of(_key(worker)).reason == breaker.UNREACHABLE

    def note_probe(self, worker: Worker, *, alive: bool) -> None:
        """Note whether a probe has found the worker alive; see `breaker.after_probe`."""
        if alive:
            self.note_sign_of_life(worker)
        now, before = self._monotonic(), self._breaker_of(_key(worker))
        after = breaker.after_probe(before, alive=alive, now=now)
        if alive:
            self._found_alive[_key(worker)] = after
        self._keep(worker, before, after, now)

    # -- before a call

    def ejected_workers(self, workers: Sequence[Worker]) -> dict[str, str]:
        """Return the workers among these that are ejected now, with the reason, the worst first."""
        now = self._monotonic()
        ejected = []
        for worker in workers:
            its_breaker = self._breaker_of(_key(worker))
            if its_breaker.state(now) == "open":
                ejected.append((breaker.severity(its_breaker), worker.name, its_breaker.reason))
        return {name: reason for _, name, reason in sorted(ejected, reverse=True)}

    def choose(self, offers: Sequence[tuple[Worker, Place]], seconds_left: float) -> WorkerChoice:
        """Choose which of the offers to call, in the order of preference, with `seconds_left` seconds to go.

        The chosen worker is about to be called: either `note_own_call` follows, or `cancel_call`.
        """
        now = self._monotonic()
        picked = breaker.pick(self._offers(offers), now=now, seconds_left=seconds_left)
        for name, objection in picked.passed_over:
            if objection == "retry_budget":
                self._telemetry.count("baton_retry_budget_exhausted_total", name)
        for worker, place in offers:
            if worker.name == picked.worker:
                self._begin(worker, place, now)
                return WorkerChoice(worker, picked.passed_over, picked.despite, extra=place != "first")
        return WorkerChoice(None, picked.passed_over)

    def is_worth_waiting(self, offers: Sequence[tuple[Worker, Place]], seconds_left: float) -> bool:
        """Return True if one of the offers may be healthy again soon."""
        return breaker.worth_waiting(self._offers(offers), now=self._monotonic(), seconds_left=seconds_left)

    def least_answer_seconds(self, worker: Worker) -> float:
        """Return the seconds that an answer of the worker takes at the least."""
        return self._breaker_of(_key(worker)).least_seconds(worker.deadlines.quickest)

    def usual_seconds(self, worker: Worker) -> float:
        """Return the seconds that nine in ten of the worker's latest calls took at the most, including calls that were
        given up after longer than that. Where too few are known it is the estimate by the speed on its card, and
        without a speed the least that the pool file states, or 0."""
        seconds = sorted(self._reply_seconds.get(_key(worker), ()))
        if len(seconds) >= LEAST_TIMED_CALLS:
            return seconds[len(seconds) * 9 // 10]
        if worker.card.speed is None:
            return worker.deadlines.quickest
        return FIRST_TOKEN_SECONDS + worker.writing_seconds(USUAL_ANSWER_TOKENS)

    def has_retry_budget(self, worker: Worker, place: Place) -> bool:
        """Return True if the worker's retry budget has room."""
        return self._breaker_of(_key(worker)).within_retry_budget(place, self._monotonic())

    def objection(self, worker: Worker, seconds_left: float) -> str:
        """Return the reason why a call that has an alternative should not be made; empty if nothing speaks against
        it."""
        if seconds_left < self.least_answer_seconds(worker):
            return NO_TIME
        return self._breaker_of(_key(worker)).objection(self._monotonic())

    def refusal(self, worker: Worker, seconds_left: float) -> str:
        """Return the same as `objection`; if that is empty the call counts as about to be made, as after `choose`."""
        objection = self.objection(worker, seconds_left)
        if not objection:
            self._begin(worker, "first", self._monotonic())
        return objection

    def cancel_call(self, worker: Worker, *, extra: bool = False) -> None:
        """Note that the call which was about to be made is not made."""
        self._breakers[_key(worker)] = breaker.call_not_made(self._breaker_of(_key(worker)), extra=extra)

    def _begin(self, worker: Worker, place: Place, now: float) -> None:
        self._breakers[_key(worker)] = breaker.before_call(self._breaker_of(_key(worker)), place, now)
        if place != "first":
            self._telemetry.count("baton_retries_total", worker.name, place)

    def _offers(self, offers: Sequence[tuple[Worker, Place]]) -> Iterator[Offer]:
        return (
            Offer(worker.name, place, self._breaker_of(_key(worker)), worker.deadlines.quickest)
            for worker, place in offers
        )

    def _breaker_of(self, key: Key) -> Breaker:
        return self._breakers.get(key, NEW_BREAKER)

    # -- after a call

    def note_own_call(
        self,
        call: str,
        worker: Worker,
        verdict: Verdict,
        began: float,
        retry_after: float | None,
        *,
        extra: bool = False,
    ) -> None:
        """Note the end of a call that this process made. `began` is a time of `monotonic`, `retry_after` the seconds of
        the reply's Retry-After, and `extra` as in `WorkerChoice`."""
        self._remember(call)
        self._note_call(worker, CallEnd(verdict, began, retry_after, extra))

    def note_journaled(self, name: str, finished: CallFinished, age: float = 0.0) -> None:
        """Note the outcome of a call that was journaled `age` seconds ago. Calls of other processes count like those of
        this one; a call that has been counted already is ignored."""
        worker = self._workers.get(name)
        if worker is None or finished.call in self._counted_calls:
            return
        self._remember(finished.call)
        verdict = finished.blamed
        if finished.outcome == "ok":
            verdict = "good"
        began = self._monotonic() - age - finished.seconds
        self._note_call(worker, CallEnd(verdict, began, finished.retry_after, age=age))

    def _remember(self, call: str) -> None:
        if len(self._counted_calls) >= MOST_COUNTED_CALLS:
            del self._counted_calls[next(iter(self._counted_calls))]
        self._counted_calls[call] = None

    def _note_call(self, worker: Worker, end: CallEnd) -> None:
        now, before = self._monotonic(), self._breaker_of(_key(worker))
        if end.verdict == "good":
            self.note_sign_of_life(worker)
        after = breaker.after_call(before, end, now=now, chance=self._random())
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


def _only(keys: Collection[Key], values: Mapping[Key, V]) -> dict[Key, V]:
    """Return the values of these keys alone."""
    return {key: value for key, value in values.items() if key in keys}


def _level_of(state: Callable[[], State]) -> float:
    return LEVELS[state()]


def _key(worker: Worker) -> Key:
    return worker.provider, worker.model
