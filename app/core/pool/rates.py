"""Rate limits: what an API key, a tenant or a user has used in the last minute, and which of its runs are open.

A window is exact: at no time have more than `rpm` requests, or more than `tpm` tokens, been counted within the last
`WINDOW_SECONDS`, and no more than `concurrency` runs are open. What is counted leaves the window when it is a minute
old; requests that come within `SLOT_SECONDS` of each other leave it together, with the latest of them.

Tokens are reserved when a run is admitted and settled once it is over, with what its row in the journal says it has
used. Less than was reserved is taken off at once. More counts from then on, and for as many minutes as it is times the
limit, so that the limit holds on average even where a run is larger than it.

A run is a claim on the window until the journal says that it is over, or until `CLAIM_SECONDS` have passed without its
admission. So a gateway that dies holds no place, and nobody has to give one back.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

import orjson
from msgspec import Struct

WINDOW_SECONDS = 60.0
"""The seconds for which what was counted stays in a window."""
SLOT_SECONDS = 1.0
"""Requests within this many seconds are kept as one figure, so that a window has 61 of them at most."""
CLAIM_SECONDS = 30.0
"""Time within which a run that was let in is in the journal: longer than a gateway waits for any commit."""
DAY_SECONDS = 86_400.0
"""The longest time limit of a run."""
BUSY_SECONDS = 1.0
"""Seconds to wait when too many runs are open: about what a short run takes."""

Unit = Literal["requests", "tokens"]
Reason = Literal["requests", "tokens", "concurrency"]


class RateLimits(Struct, frozen=True):
    """The limits of one key, tenant or user; None: no limit."""

    rpm: int | None = None
    tpm: int | None = None
    concurrency: int | None = None

    def __bool__(self) -> bool:
        return not (self.rpm is None and self.tpm is None and self.concurrency is None)


class RateRequest(Struct, frozen=True):
    """One request, under every limit that holds for it: it counts in all of these windows, or in none."""

    limits: tuple[tuple[str, RateLimits], ...]
    """The names of the windows, with their limits."""
    run: str = ""
    """The id that its run gets; empty if it begins none."""
    resumes: str = ""
    """The run that its tool results may belong to; empty if it has none."""
    tokens: int = 0
    """The tokens that are reserved for its run."""


class RunUse(Struct, frozen=True):
    """A run's row, as far as rates are concerned."""

    seq: int
    """The number of its last event."""
    tokens: int
    """Spent and held, over all of its turns."""
    waits: bool
    """True if it waits for its caller, who has the reply of the turn."""
    ended_at: float | None = None


class Figures(Struct, frozen=True):
    """One unit of a window, as response headers show it."""

    unit: Unit
    limit: int
    remaining: int
    reset: float
    """Seconds until the window is empty, if nothing more is counted."""


class Refusal(Struct, frozen=True):
    """The window and the limit that a request has reached, and the seconds after which it is worth trying again: when
    the request fits, if open runs use nothing of what is reserved for them."""

    window: str
    reason: Reason
    seconds: float


class RateReply(Struct, frozen=True):
    """The outcome of a request: the figures of its windows after it, and why it was refused, if it was."""

    figures: tuple[Figures, ...]
    refusal: Refusal | None = None


@dataclass(slots=True)
class Slot:
    """An amount that was counted within `SLOT_SECONDS` of `opened`."""

    opened: float
    expires: float
    amount: int


@dataclass(slots=True)
class Claim:
    """A run that may be open."""

    run: str
    resumes: str
    seq: int
    """The last event of the resumed run when this turn of it was asked for."""
    before: int
    """The tokens of the resumed run then."""
    tokens: int
    """The reservation, counted in the slot that was opened at `slot`."""
    slot: float
    until: float
    """The time until which the claim stands although the journal does not have the run."""


@dataclass(slots=True)
class Window:
    """The use of one key, tenant or user."""

    requests: list[Slot] = field(default_factory=list)
    tokens: list[Slot] = field(default_factory=list)
    claims: dict[str, Claim] = field(default_factory=dict)

    @classmethod
    def from_bytes(cls, body: bytes) -> "Window":
        """Return the inverse of `to_bytes`."""
        requests, tokens, claims = orjson.loads(body)
        claims_by_run = {claim[0]: Claim(*claim) for claim in claims}
        return cls([Slot(*request) for request in requests], [Slot(*token) for token in tokens], claims_by_run)

    def to_bytes(self) -> bytes:
        """Return the window as JSON, which other processes read."""
        claims = [_fields(claim) for claim in self.claims.values()]
        return orjson.dumps([_figures(self.requests), _figures(self.tokens), claims])

    @property
    def runs(self) -> set[str]:
        """Return the runs that have to be looked up before a request is counted."""
        runs: set[str] = set()
        for claim in self.claims.values():
            runs |= {claim.run, claim.resumes}
        return runs - {""}

    def settle(self, runs: Mapping[str, RunUse], limits: RateLimits, now: float) -> None:
        """Forget what is more than a minute old, and the runs that are over; count what these have used."""
        self.requests = _current(self.requests, now)
        for claim in list(self.claims.values()):
            over = _over(claim, runs, now)
            if over is None:
                continue
            used, at = over
            del self.claims[claim.run]
            self._take_off(claim, min(used, claim.tokens))
            if used > claim.tokens and limits.tpm is not None:
                _count(self.tokens, at, used - claim.tokens, limits.tpm)
        self.tokens = _current(self.tokens, now)
        for claim in self.claims.values():
            claim.slot = min(claim.slot, now)  # its slot is opened now as well: see `_current`

    def refusal(self, name: str, limits: RateLimits, request: RateRequest, now: float) -> Refusal | None:
        """Return the limit beyond which this request would be, if any."""
        if request.run and limits.concurrency is not None and len(self.claims) >= limits.concurrency:
            return Refusal(name, "concurrency", BUSY_SECONDS)
        if limits.rpm is not None and (wait := _wait(self.requests, 1, limits.rpm, now)):
            return Refusal(name, "requests", wait)
        if request.run and limits.tpm is not None:
            # A run that is larger than the limit is let in alone.
            tokens = min(max(request.tokens, 1), max(limits.tpm, 1))
            if _wait(self.tokens, tokens, limits.tpm, now):
                wait = _wait(self._slots_without_claims(), tokens, limits.tpm, now)
                return Refusal(name, "tokens", max(wait, BUSY_SECONDS))
        return None

    def _slots_without_claims(self) -> list[Slot]:
        """Return the slots of tokens without the reservations of open runs, most of which are soon given back."""
        reserved: dict[float, int] = {}
        for claim in self.claims.values():
            reserved[claim.slot] = reserved.get(claim.slot, 0) + claim.tokens
        slots: list[Slot] = []
        for slot in self.tokens:
            slots.append(Slot(slot.opened, slot.expires, slot.amount - reserved.get(slot.opened, 0)))
        return slots

    def count(self, limits: RateLimits, request: RateRequest, runs: Mapping[str, RunUse], now: float) -> None:
        """Count a request that was not refused."""
        if limits.rpm is not None:
            _count(self.requests, now, 1, limits.rpm)
        if not request.run or (limits.tpm is None and limits.concurrency is None):
            return
        tokens, slot = 0, now
        if limits.tpm is not None:
            tokens = min(request.tokens, limits.tpm)
            slot = _count(self.tokens, now, tokens, limits.tpm)
        former = runs.get(request.resumes, RunUse(seq=0, tokens=0, waits=False))
        until = now + CLAIM_SECONDS
        self.claims[request.run] = Claim(request.run, request.resumes, former.seq, former.tokens, tokens, slot, until)

    @property
    def until(self) -> float:
        """Return the time from which nothing in the window counts any more; runs may be open for a day."""
        times = [slot.expires for slot in (*self.requests, *self.tokens)]
        times += [claim.until + DAY_SECONDS for claim in self.claims.values()]
        return max(times, default=0.0)

    def give_back(self, run: str) -> None:
        """Forget a run that was not begun after all; the request still counts."""
        claim = self.claims.pop(run, None)
        if claim is not None:
            self._take_off(claim, 0)

    def figures(self, limits: RateLimits, now: float) -> tuple[Figures, ...]:
        """Return the figures of the limits that the window has."""
        figures: list[Figures] = []
        parts: tuple[tuple[Unit, int | None, list[Slot]], ...] = (
            ("requests", limits.rpm, self.requests),
            ("tokens", limits.tpm, self.tokens),
        )
        for unit, most, slots in parts:
            if most is not None:
                remaining = max(0, most - _total(slots))
                reset = max([slot.expires for slot in slots if slot.amount], default=now) - now
                figures.append(Figures(unit, most, remaining, reset))
        return tuple(figures)

    def _take_off(self, claim: Claim, used: int) -> None:
        """Reduce a reservation to what was used of it, while it still counts."""
        for slot in self.tokens:
            if slot.opened == claim.slot:
                slot.amount -= claim.tokens - used


def decide(
    windows: Mapping[str, Window], requests: Sequence[RateRequest], runs: Mapping[str, RunUse], now: float
) -> tuple[RateReply, ...]:
    """Count these requests in the windows, in their order, as far as the limits allow.

    `windows` has all that the requests name, and `runs` what the journal has of `Window.runs` and of resumed runs.
    """
    settled: set[str] = set()
    replies = []
    for request in requests:
        for name, limits in request.limits:
            if name not in settled:
                windows[name].settle(runs, limits, now)
                settled.add(name)
        replies.append(_count_request(windows, request, runs, now))
    return tuple(replies)


def _count_request(
    windows: Mapping[str, Window], request: RateRequest, runs: Mapping[str, RunUse], now: float
) -> RateReply:
    """Count one request in all of its windows, or in none if a limit of one of them is reached."""
    refusal = None
    for name, limits in request.limits:
        refusal = windows[name].refusal(name, limits, request, now)
        if refusal is not None:
            break
    figures: list[Figures] = []
    for name, limits in request.limits:
        if refusal is None:
            windows[name].count(limits, request, runs, now)
        figures += windows[name].figures(limits, now)
    return RateReply(_tightest(figures), refusal)


def _tightest(figures: Iterable[Figures]) -> tuple[Figures, ...]:
    """Return, for each unit, the figures of the window that has least left."""
    tightest: dict[Unit, Figures] = {}
    for figure in figures:
        if figure.unit not in tightest or figure.remaining < tightest[figure.unit].remaining:
            tightest[figure.unit] = figure
    return tuple(tightest.values())


def _over(claim: Claim, runs: Mapping[str, RunUse], now: float) -> tuple[int, float] | None:
    """Return the tokens of a run, or of one turn of it, that is over, and when it was; None while it may be open."""
    run, seq, before = runs.get(claim.run), 0, 0
    if run is None and claim.resumes:
        run, seq, before = runs.get(claim.resumes), claim.seq, claim.before
    if run is None:
        return (0, now) if claim.until <= now else None
    if run.seq <= seq and claim.until > now:  # nothing has come of the request yet: it may also begin a new run
        return None
    if run.ended_at is not None:
        return run.tokens - before, min(run.ended_at, now)
    if not run.waits:
        return None
    return (run.tokens - before, now)


def _current(slots: list[Slot], now: float) -> list[Slot]:
    """Return the slots that still count. Those that a clock opened which was ahead become one that is opened now, so
    that they do not count for longer than they would."""
    current = [slot for slot in slots if slot.expires > now and slot.amount > 0]
    ahead = [slot for slot in current if slot.opened >= now]
    if not ahead:
        return current
    expires = max([slot.expires - (slot.opened - now) for slot in ahead])
    return [*(slot for slot in current if slot.opened < now), Slot(now, expires, _total(ahead))]


def _count(slots: list[Slot], now: float, amount: int, limit: int) -> float:
    """Count an amount, for a minute, or for as many as it is times the limit. Returns when its slot was opened."""
    expires = now + WINDOW_SECONDS * max(1.0, amount / max(limit, 1))
    if slots and 0.0 <= now - slots[-1].opened < SLOT_SECONDS:
        slots[-1].amount += amount
        slots[-1].expires = max(slots[-1].expires, expires)
    else:
        slots.append(Slot(now, expires, amount))
    return slots[-1].opened


def _wait(slots: Sequence[Slot], amount: int, limit: int, now: float) -> float:
    """Return the seconds until an amount fits into the window; 0 if it does. Never, for a limit of 0, is a minute."""
    over = _total(slots) + amount - limit
    if over <= 0:
        return 0.0
    for oldest in sorted(slots, key=lambda slot: slot.expires):
        over -= oldest.amount
        if over <= 0:
            return oldest.expires - now
    return WINDOW_SECONDS


def _total(slots: Iterable[Slot]) -> int:
    return sum(slot.amount for slot in slots)


def _figures(slots: Iterable[Slot]) -> list[tuple[float, float, int]]:
    return [(slot.opened, slot.expires, slot.amount) for slot in slots]


def _fields(claim: Claim) -> list[str | int | float]:
    journal_fields: list[str | int | float] = [claim.run, claim.resumes, claim.seq, claim.before]
    return [*journal_fields, claim.tokens, claim.slot, claim.until]
