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
from dataclasses import replace
from typing import Literal

from app.core.records import copy_with, record

NO_TIME = "no_time"
"""The error of a step that was not begun because no worker could have answered in what was left of the run."""

Verdict = Literal["good", "failing", "rate_limited", "misconfigured", "silent"]
"""The outcome of a call for its worker's breaker; `silent` is ignored."""
OUT = "out"
"""The reason of an ejection after probes that found nobody alive."""
State = Literal["closed", "half_open", "open"]
Place = Literal["first", "retry", "replacement"]
"""A step's first call; once more with the same worker; with another one in its stead."""

IN_A_ROW = 5
VOLUME, RATIO = 10, 0.5
"""At least so many calls, and this share of them failed."""
WINDOW, SLICES = 30.0, 6
"""Seconds that ratio and retry budget look back, and the slices in which that time passes."""
SHORTEST, CEILING, LONGEST = 1.0, 5.0, 120.0
"""Seconds of an ejection: at least; the first ceiling; the last one."""
WRONG_CEILING, WRONG_LONGEST = 30.0, 300.0
"""The ceilings where an operator has to look."""
LIMITED_LONGEST = 300.0
"""A rate limit that asks for more seconds is probed then."""
RECOVERED_SECONDS = 300.0
"""Seconds without an ejection after which the next one is a first one again."""
REPORT_SECONDS = 10.0
"""Seconds for which a report that no worker is alive holds; it is repeated before they are over."""
PROBE = 30.0
"""Seconds for which a probe excludes other calls; after them another probe may begin."""
MINIMUM, SHARE = 3, 0.2
"""Attempts beyond the first: this share of the first ones within the window, or so few that it does not matter."""
KNOWN, REMEMBERED = 5, 16
BRIEFEST = 0.05
"""Seconds within which no worker answers."""
NEVER = float("-inf")
_SLICE = WINDOW / SLICES


@record(frozen=True, slots=True)
class Slice:
    """Counts of outcomes within one slice of time."""

    number: int
    firsts: int = 0
    extras: int = 0
    """Retries and replacements."""
    good: int = 0
    bad: int = 0


@record(frozen=True, slots=True)
class Breaker:
    """The state of one worker's circuit breaker."""

    reason: str = ""
    """The verdict for which it is ejected; empty while it is closed."""
    since: float = NEVER
    """When it was last ejected or taken back."""
    until: float = NEVER
    probed: float = NEVER
    """The time until which a probe excludes other calls."""
    ejections: int = 0
    """One after the other."""
    failures: int = 0
    """In a row."""
    unanswered: int = 0
    """Attempts beyond a step's first that came here since its last success."""
    scouts: int = 0
    """Attempts beyond a step's first that have not ended yet."""
    slices: tuple[Slice, ...] = ()
    seconds: tuple[float, ...] = ()
    """Durations of its latest successes."""

    def state(self, now: float) -> State:
        """Closed, open, or half-open."""
        if not self.reason:
            return "closed"
        return "open" if now < self.until else "half_open"

    def objection(self, now: float) -> str:
        """Return the reason why a call should prefer another worker: that of the ejection, `probing`, or an empty
        string."""
        state = self.state(now)
        if state == "open":
            return self.reason
        if state == "half_open" and now < self.probed:
            return "probing"
        return ""

    def affords(self, place: Place, now: float) -> bool:
        """Return whether the retry budget admits such a call.

        Retries and replacements together stay below `SHARE` of the first calls. A replacement may also be a scout: up
        to `MINIMUM` are let through until one of them succeeds, and each success lets as many follow.
        """
        if place == "first" or (place == "replacement" and self.unanswered < MINIMUM):
            return True
        live = _live(self.slices, now)
        return sum(part.extras for part in live) + 1 <= max(MINIMUM, SHARE * sum(part.firsts for part in live))

    def scouted(self, now: float) -> bool:
        """Return whether scout calls are pending and none has failed, so that it is worth waiting for their outcome."""
        return self.state(now) == "closed" and self.failures == 0 < self.scouts

    def hopeless(self, stated: float = 0.0) -> float:
        """Return the seconds within which it would not answer: even the quickest of its latest successes took longer.
        Where too few are known, they are those that the pool file has `stated`."""
        if len(self.seconds) >= KNOWN:
            return max(BRIEFEST, min(self.seconds))
        return max(BRIEFEST, stated)


def begun(breaker: Breaker, place: Place, now: float) -> Breaker:
    """A call is about to be made; in a half-open breaker it is the probe."""
    extra = place != "first"
    slices = _counted(breaker.slices, now, firsts=1 - extra, extras=int(extra))
    if not breaker.reason and not extra:
        return copy_with(breaker, slices=slices)
    probed = now + PROBE if breaker.state(now) == "half_open" else breaker.probed
    return replace(
        breaker, probed=probed, slices=slices, unanswered=breaker.unanswered + extra, scouts=breaker.scouts + extra
    )


def forgone(breaker: Breaker, *, extra: bool = False) -> Breaker:
    """The call that was about to be made is not made: the next one may be the probe. `extra`: it was not to be its
    step's first."""
    return replace(_back(breaker) if extra else breaker, probed=NEVER)


def after_call(
    breaker: Breaker,
    verdict: Verdict,
    *,
    began: float,
    now: float,
    chance: float,
    asked: float | None = None,
    extra: bool = False,
    age: float = 0.0,
    tolerated: int = IN_A_ROW,
) -> Breaker:
    """A call that began at `began` has ended, `age` seconds ago. `asked` is the provider's Retry-After in seconds;
    `extra` says that the call was not its step's first; `tolerated` failures in a row eject."""
    if extra:
        breaker = _back(breaker)
    if breaker.reason and began >= breaker.until:
        breaker = forgone(breaker)
    if verdict == "rate_limited" and asked:
        left = min(asked, LIMITED_LONGEST) - age
        if left > 0:
            return _limited(breaker, now, left)
        return breaker
    if verdict == "silent" or began < breaker.since:
        return breaker
    if verdict == "good":
        return _succeeded(breaker, now - age - began, now)
    if breaker.state(now) == "open":
        return breaker
    failed = replace(
        breaker,
        failures=breaker.failures + 1,
        slices=_counted(breaker.slices, now, bad=1),
    )
    out = verdict == "misconfigured" or failed.failures >= tolerated or _outlier(failed, now)
    if out:
        return _ejected(failed, verdict, now, chance)
    return failed


def probed(breaker: Breaker, *, alive: bool, now: float) -> Breaker:
    """A probe that is no call has found the worker alive or not. It says nothing of how long an answer takes, and does
    not excuse what real calls have complained of."""
    if alive and breaker.reason != OUT:
        return breaker
    if alive:
        slices = tuple(replace(part, good=0, bad=0) for part in breaker.slices)
        return Breaker(since=now, ejections=breaker.ejections, slices=slices, seconds=breaker.seconds)
    if breaker.reason == OUT:
        return replace(breaker, until=now + REPORT_SECONDS)
    return _eject(breaker, OUT, now, now + REPORT_SECONDS, breaker.ejections + 1)


def _back(breaker: Breaker) -> Breaker:
    return replace(breaker, scouts=max(breaker.scouts - 1, 0))


def _succeeded(breaker: Breaker, took: float, now: float) -> Breaker:
    seconds = (*breaker.seconds, took)[-REMEMBERED:]
    if breaker.reason:  # what was counted before the ejection must not lead to the next one
        slices = tuple(replace(part, good=0, bad=0) for part in breaker.slices)
        return Breaker(since=now, ejections=breaker.ejections, slices=slices, seconds=seconds)
    slices = _counted(breaker.slices, now, good=1)
    return copy_with(breaker, failures=0, unanswered=0, slices=slices, seconds=seconds)


def _outlier(breaker: Breaker, now: float) -> bool:
    if breaker.reason or breaker.failures >= IN_A_ROW:
        return True
    live = _live(breaker.slices, now)
    bad = sum(part.bad for part in live)
    whole = bad + sum(part.good for part in live)
    return whole >= VOLUME and bad >= RATIO * whole


def _limited(breaker: Breaker, now: float, asked: float) -> Breaker:
    """Eject for as long as the provider asked to wait, or longer if a later time was set already."""
    until = now + asked
    if breaker.state(now) == "open":
        return replace(breaker, until=max(breaker.until, until))
    return _eject(breaker, "rate_limited", now, until, breaker.ejections)


def _ejected(breaker: Breaker, verdict: Verdict, now: float, chance: float) -> Breaker:
    wrong = verdict == "misconfigured"
    first, last = (WRONG_CEILING, WRONG_LONGEST) if wrong else (CEILING, LONGEST)
    recovered = not breaker.reason and now - breaker.since > RECOVERED_SECONDS
    ejections = 1 if recovered else breaker.ejections + 1
    ceiling = min(first * 2 ** min(ejections - 1, 16), last)
    return _eject(breaker, verdict, now, now + SHORTEST + chance * (ceiling - SHORTEST), ejections)


def _eject(breaker: Breaker, reason: str, now: float, until: float, ejections: int) -> Breaker:
    failures = max(breaker.failures, 1)
    return replace(breaker, reason=reason, since=now, until=until, probed=NEVER, ejections=ejections, failures=failures)


def _live(slices: tuple[Slice, ...], now: float) -> tuple[Slice, ...]:
    oldest = now // _SLICE - SLICES
    return tuple(part for part in slices if part.number > oldest)


def _counted(
    slices: tuple[Slice, ...], now: float, *, firsts: int = 0, extras: int = 0, good: int = 0, bad: int = 0
) -> tuple[Slice, ...]:
    number = int(now // _SLICE)
    if slices and slices[-1].number == number:
        before, last = slices[:-1], slices[-1]
    else:
        before, last = _live(slices, now), Slice(number)
    return (*before, Slice(number, last.firsts + firsts, last.extras + extras, last.good + good, last.bad + bad))


@record(frozen=True, slots=True)
class Offer:
    """A worker that may be called next, by name, in the order of preference."""

    worker: str
    place: Place
    breaker: Breaker
    stated: float = 0.0
    """Seconds within which it answers nothing, as the pool file states (`catalog.Deadlines.quickest`)."""


@record(frozen=True, slots=True)
class Pick:
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
        objection = _spent(offer, now, seconds_left)
        if not objection:
            if not (objection := offer.breaker.objection(now)):
                return Pick(offer.worker, tuple(passed))
            ejected.append(offer)
        passed.append((offer.worker, objection))
    if not ejected:
        return Pick(None, tuple(passed))
    best = min(ejected, key=lambda offer: badness(offer.breaker))
    others = tuple(outcome for outcome in passed if outcome[0] != best.worker)
    return Pick(best.worker, others, best.breaker.objection(now))


def worth_waiting(offers: Iterable[Offer], *, now: float, seconds_left: float) -> bool:
    """Return whether no worker can be called without an objection, while a pending scout call may soon succeed."""
    scouted = False
    for offer in offers:
        objection = _spent(offer, now, seconds_left)
        if not objection and not offer.breaker.objection(now):
            return False
        scouted = scouted or (objection == "retry_budget" and offer.breaker.scouted(now))
    return scouted


def badness(breaker: Breaker) -> tuple[bool, float]:
    """Return a key that puts the least bad of the ejected first: what an operator must mend comes last."""
    return breaker.reason == "misconfigured", breaker.until


def _spent(offer: Offer, now: float, seconds_left: float) -> str:
    if seconds_left < offer.breaker.hopeless(offer.stated):
        return NO_TIME
    if offer.breaker.affords(offer.place, now):
        return ""
    return "retry_budget"
