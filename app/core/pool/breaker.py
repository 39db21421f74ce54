"""Circuit breakers of workers: outlier ejection, half-open probing, and the retry budget.

    closed ------- 5 failures in a row, or half of 10 and more within 30 s --------------------> open
                   at once: a rate limit that says how long, or a wrong key or model
    open --------- its ejection is over --> half-open, which lets one call through at a time, the probe
    half-open ---- the probe succeeds ----> closed;    the probe fails ----> open again, for longer

An ejection lasts a random time (full jitter) below a ceiling that doubles with each one; after a rate limit it lasts as
long as Retry-After says. Outcomes that say nothing about the worker are never counted: a request that it refused, a
call that we cancelled, a deadline that was the run's own. Outcomes of calls that began before the last change of state
are ignored.

If every eligible worker is ejected, the one with the mildest ejection is called nevertheless (`pick`).

A breaker is a value. Times are seconds of one monotonic clock, `chance` is a number in [0, 1).
"""

from collections.abc import Iterable
from typing import Literal

from msgspec import Struct
from msgspec.structs import replace

NO_TIME = "no_time"
"""The error of a step that was not begun, or not tried again, because no worker could have answered in what was left of
the run."""

Verdict = Literal["good", "failing", "rate_limited", "misconfigured", "silent"]
"""The outcome of a call for its worker's breaker; `silent` is ignored."""
UNREACHABLE = "out"
"""The reason of an ejection after a probe that found the worker not alive."""
PROBING = "probing"
"""The objection to a worker while a call probes it."""
State = Literal["closed", "half_open", "open"]
Place = Literal["first", "retry", "replacement"]
"""A step's first call; once more with the same worker; with another one in its stead."""

FAILURES_IN_A_ROW = 5
"""The failures, one after the other, that eject a worker."""
OUTLIER_CALLS, OUTLIER_SHARE = 10, 0.5
"""The least number of calls within the window, and the share of them that failed, at which a worker is ejected."""
WINDOW_SECONDS, WINDOW_SLICES = 30.0, 6
"""The seconds that the share of failures and the retry budget look back, and the slices in which that time passes."""
SHORTEST_EJECTION_SECONDS, FIRST_CEILING_SECONDS, LAST_CEILING_SECONDS = 1.0, 5.0, 120.0
"""The seconds of an ejection: the least, and the ceiling of the first one and of the last one."""
FIRST_MISCONFIGURED_SECONDS, LAST_MISCONFIGURED_SECONDS = 30.0, 300.0
"""The ceilings for a wrong key or model, where an operator has to look."""
LONGEST_RATE_LIMIT_SECONDS = 300.0
"""A worker whose rate limit asks for more seconds than these is probed after them."""
RECOVERED_SECONDS = 300.0
"""Seconds without an ejection after which the next one is a first one again."""
REPORT_SECONDS = 10.0
"""Seconds for which a report that no worker is alive holds; it is repeated before they are over."""
PROBE_SECONDS = 30.0
"""Seconds for which a probe excludes other calls; after them another probe may begin."""
FREE_RETRIES, RETRY_SHARE = 3, 0.2
"""The retries and replacements that are always allowed, and else their largest share of the first calls within the
window."""
ENOUGH_SUCCESSES, REMEMBERED_SUCCESSES = 5, 16
"""The successes from which on their durations count, and the number of the latest ones whose durations are kept."""
SHORTEST_ANSWER_SECONDS = 0.05
"""The seconds within which no worker answers."""
NEVER = float("-inf")
_SLICE_SECONDS = WINDOW_SECONDS / WINDOW_SLICES


class Slice(Struct, frozen=True):
    """Counts of outcomes within one slice of time."""

    number: int
    firsts: int = 0
    extras: int = 0
    """Retries and replacements."""
    good: int = 0
    bad: int = 0


class Breaker(Struct, frozen=True):
    """The state of one worker's circuit breaker."""

    reason: str = ""
    """The verdict for which it is ejected; empty while it is closed."""
    since: float = NEVER
    """When it was last ejected or taken back."""
    until: float = NEVER
    probe_until: float = NEVER
    """The time until which a probe excludes other calls."""
    ejections: int = 0
    """The number of ejections, one after the other."""
    failures: int = 0
    """The number of failures in a row."""
    unanswered: int = 0
    """Attempts beyond a step's first that came here since its last success."""
    scouts: int = 0
    """Attempts beyond a step's first that have not ended yet."""
    slices: tuple[Slice, ...] = ()
    seconds: tuple[float, ...] = ()
    """Durations of its latest successes."""

    def state(self, now: float) -> State:
        """Return whether it is closed, open, or half-open."""
        if not self.reason:
            return "closed"
        if now < self.until:
            return "open"
        return "half_open"

    def objection(self, now: float) -> str:
        """Return the reason why a call should prefer another worker: that of the ejection, `PROBING`, or an empty
        string."""
        state = self.state(now)
        if state == "open":
            return self.reason
        if state == "half_open" and now < self.probe_until:
            return PROBING
        return ""

    def within_retry_budget(self, place: Place, now: float) -> bool:
        """Return whether the retry budget admits such a call.

        Retries and replacements together stay below `RETRY_SHARE` of the first calls. A replacement may also be a
        scout: up to `FREE_RETRIES` are let through until one of them succeeds, and each success lets as many follow.
        """
        if place == "first" or (place == "replacement" and self.unanswered < FREE_RETRIES):
            return True
        live = _live(self.slices, now)
        extras = sum(part.extras for part in live)
        firsts = sum(part.firsts for part in live)
        return extras + 1 <= max(FREE_RETRIES, RETRY_SHARE * firsts)

    def awaits_scouts(self, now: float) -> bool:
        """Return whether scout calls are pending and none has failed, so that it is worth waiting for their outcome."""
        return self.state(now) == "closed" and self.failures == 0 < self.scouts

    def least_seconds(self, stated: float = 0.0) -> float:
        """Return the least seconds that an answer takes: those of the quickest of its latest successes, or, where too
        few of these are known, those that the pool file has `stated`."""
        if len(self.seconds) >= ENOUGH_SUCCESSES:
            return max(SHORTEST_ANSWER_SECONDS, min(self.seconds))
        return max(SHORTEST_ANSWER_SECONDS, stated)


def before_call(breaker: Breaker, place: Place, now: float) -> Breaker:
    """Return the breaker for a call that is about to be made. In a half-open breaker it is the probe."""
    extra = place != "first"
    slices = _add_counts(breaker.slices, now, firsts=1 - extra, extras=int(extra))
    if not breaker.reason and not extra:
        return replace(breaker, slices=slices)
    probe_until = breaker.probe_until
    if breaker.state(now) == "half_open":
        probe_until = now + PROBE_SECONDS
    return replace(
        breaker,
        probe_until=probe_until,
        slices=slices,
        unanswered=breaker.unanswered + extra,
        scouts=breaker.scouts + extra,
    )


def call_not_made(breaker: Breaker, *, extra: bool = False) -> Breaker:
    """Return the breaker after a call that was about to be made is not made, so that the next one may be the probe.
    `extra` says that it was not to be its step's first: then another attempt may come in its place."""
    if extra:
        breaker = replace(_without_scout(breaker), unanswered=max(breaker.unanswered - 1, 0))
    return replace(breaker, probe_until=NEVER)


class CallEnd(Struct, frozen=True):
    """The end of a call, as far as a breaker is concerned with it."""

    verdict: Verdict
    began: float
    """When the call began, on the clock of the breaker."""
    retry_after: float | None = None
    """The provider's Retry-After, in seconds."""
    extra: bool = False
    """True if the call was not its step's first."""
    age: float = 0.0
    """The seconds that have passed since the end."""


def after_call(
    breaker: Breaker, end: CallEnd, *, now: float, chance: float, tolerated: int = FAILURES_IN_A_ROW
) -> Breaker:
    """Return the breaker after a call. `tolerated` failures in a row eject."""
    verdict, began = end.verdict, end.began
    if end.extra:
        breaker = _without_scout(breaker)
    if breaker.reason and began >= breaker.until:
        breaker = call_not_made(breaker)
    if verdict == "rate_limited" and end.retry_after:
        remaining_seconds = min(end.retry_after, LONGEST_RATE_LIMIT_SECONDS) - end.age
        if remaining_seconds > 0:
            return _record_rate_limit(breaker, now, remaining_seconds)
        return breaker
    if verdict == "silent" or began < breaker.since:
        return breaker
    if verdict == "good":
        return _record_success(breaker, now - end.age - began, now)
    if breaker.state(now) == "open":
        return breaker
    failed = replace(breaker, failures=breaker.failures + 1, slices=_add_counts(breaker.slices, now, bad=1))
    if verdict == "misconfigured" or failed.failures >= tolerated or _is_outlier(failed, now):
        return _eject_with_backoff(failed, verdict, now, chance)
    return failed


def after_probe(breaker: Breaker, *, alive: bool, now: float) -> Breaker:
    """Return the breaker after a probe that is no call has found the worker alive or not. A probe tells nothing of how
    long an answer takes, and an ejection for failed calls outlasts it."""
    if alive and breaker.reason != UNREACHABLE:
        return breaker
    if alive:
        slices = tuple(replace(part, good=0, bad=0) for part in breaker.slices)
        return Breaker(since=now, ejections=breaker.ejections, slices=slices, seconds=breaker.seconds)
    if breaker.reason == UNREACHABLE:
        return replace(breaker, until=now + REPORT_SECONDS)
    return _eject(breaker, UNREACHABLE, now, now + REPORT_SECONDS, breaker.ejections + 1)


def _without_scout(breaker: Breaker) -> Breaker:
    return replace(breaker, scouts=max(breaker.scouts - 1, 0))


def _record_success(breaker: Breaker, took: float, now: float) -> Breaker:
    seconds = (*breaker.seconds, took)[-REMEMBERED_SUCCESSES:]
    if breaker.reason:  # what was counted before the ejection must not lead to the next one
        slices = tuple(replace(part, good=0, bad=0) for part in breaker.slices)
        return Breaker(since=now, ejections=breaker.ejections, slices=slices, seconds=seconds)
    slices = _add_counts(breaker.slices, now, good=1)
    return replace(breaker, failures=0, unanswered=0, slices=slices, seconds=seconds)


def _is_outlier(breaker: Breaker, now: float) -> bool:
    if breaker.reason or breaker.failures >= FAILURES_IN_A_ROW:
        return True
    live = _live(breaker.slices, now)
    bad = sum(part.bad for part in live)
    whole = bad + sum(part.good for part in live)
    return whole >= OUTLIER_CALLS and bad >= OUTLIER_SHARE * whole


def _record_rate_limit(breaker: Breaker, now: float, seconds: float) -> Breaker:
    """Eject for as long as the provider asked to wait, or longer if a later time was set already."""
    until = now + seconds
    if breaker.state(now) == "open":
        return replace(breaker, until=max(breaker.until, until))
    return _eject(breaker, "rate_limited", now, until, breaker.ejections)


def _eject_with_backoff(breaker: Breaker, verdict: Verdict, now: float, chance: float) -> Breaker:
    first, last = FIRST_CEILING_SECONDS, LAST_CEILING_SECONDS
    if verdict == "misconfigured":
        first, last = FIRST_MISCONFIGURED_SECONDS, LAST_MISCONFIGURED_SECONDS
    recovered = not breaker.reason and now - breaker.since > RECOVERED_SECONDS
    ejections = 1 if recovered else breaker.ejections + 1
    ceiling = min(first * 2 ** min(ejections - 1, 16), last)
    until = now + SHORTEST_EJECTION_SECONDS + chance * (ceiling - SHORTEST_EJECTION_SECONDS)
    return _eject(breaker, verdict, now, until, ejections)


def _eject(breaker: Breaker, reason: str, now: float, until: float, ejections: int) -> Breaker:
    failures = max(breaker.failures, 1)
    return replace(
        breaker, reason=reason, since=now, until=until, probe_until=NEVER, ejections=ejections, failures=failures
    )


def _live(slices: tuple[Slice, ...], now: float) -> tuple[Slice, ...]:
    oldest = now // _SLICE_SECONDS - WINDOW_SLICES
    return tuple(part for part in slices if part.number > oldest)


def _add_counts(
    slices: tuple[Slice, ...], now: float, *, firsts: int = 0, extras: int = 0, good: int = 0, bad: int = 0
) -> tuple[Slice, ...]:
    number = int(now // _SLICE_SECONDS)
    if slices and slices[-1].number == number:
        before, last = slices[:-1], slices[-1]
    else:
        before, last = _live(slices, now), Slice(number)
    return (*before, Slice(number, last.firsts + firsts, last.extras + extras, last.good + good, last.bad + bad))


class Offer(Struct, frozen=True):
    """A worker that may be called next, by name, in the order of preference."""

    worker: str
    place: Place
    breaker: Breaker
    stated: float = 0.0
    """Seconds within which it answers nothing, as the pool file states (`catalog.Deadlines.quickest`)."""


class Pick(Struct, frozen=True):
    """The worker to call, or None; the reasons why those before it were passed over; and the objection to itself."""

    worker: str | None
    passed_over: tuple[tuple[str, str], ...] = ()
    despite: str = ""


def pick(offers: Iterable[Offer], *, now: float, seconds_left: float) -> Pick:
    """Return the first offer without an objection; if all that is wrong is that they are ejected, the least bad one.

    `seconds_left` are the seconds of the run. Objections: `no_time`, `retry_budget`, and those of a breaker.
    """
    passed: list[tuple[str, str]] = []
    ejected: list[Offer] = []
    for offer in offers:
        objection = _hard_objection(offer, now, seconds_left)
        if not objection:
            objection = offer.breaker.objection(now)
            if not objection:
                return Pick(offer.worker, tuple(passed))
            ejected.append(offer)
        passed.append((offer.worker, objection))
    if not ejected:
        return Pick(None, tuple(passed))
    best = min(ejected, key=lambda offer: severity(offer.breaker))
    others = tuple(outcome for outcome in passed if outcome[0] != best.worker)
    return Pick(best.worker, others, best.breaker.objection(now))


def worth_waiting(offers: Iterable[Offer], *, now: float, seconds_left: float) -> bool:
    """Return whether no worker can be called without an objection, while a pending scout call may soon succeed."""
    scouts_pending = False
    for offer in offers:
        objection = _hard_objection(offer, now, seconds_left)
        if not objection and not offer.breaker.objection(now):
            return False
        if objection == "retry_budget" and offer.breaker.awaits_scouts(now):
            scouts_pending = True
    return scouts_pending


def severity(breaker: Breaker) -> tuple[bool, float]:
    """Return a key that puts the least bad of the ejected first: what an operator must mend comes last."""
    return breaker.reason == "misconfigured", breaker.until


def _hard_objection(offer: Offer, now: float, seconds_left: float) -> str:
    """Return the reason why a call cannot be made even if nobody else is left; empty if there is none."""
    if seconds_left < offer.breaker.least_seconds(offer.stated):
        return NO_TIME
    if offer.breaker.within_retry_budget(offer.place, now):
        return ""
    return "retry_budget"
