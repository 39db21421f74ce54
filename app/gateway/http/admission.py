"""Admission of requests by rates, concurrency and the size of this process, before anything costs money.

Counters are this process's own. A key has a bucket of requests and one of tokens, each of which holds one minute's
worth and refills evenly. What was let in holds a `Permit`, which its owner gives back in a `finally`. Of a request's
tokens only the input can be guessed beforehand; what its run has used in truth is settled at its end, and may leave a
debt.
"""

import math
from dataclasses import dataclass, field

from app.core.message.chat import Task
from app.core.pool.budget import input_bound
from app.errors import Overloaded, OverQuota
from app.gateway.http.context import GatewayContext
from app.store.protocol import KeyRow

COUNTERS = 10_000
BUSY_RETRY = 1.0
"""Seconds to wait when too many requests run: about what a short run takes."""
BYTES_A_TOKEN = 4
"""Of a text, as a rule."""
Headers = list[tuple[bytes, bytes]]


@dataclass(slots=True)
class _Bucket:
    """A token bucket: the units that a key may still use; `most` a minute, None without a limit."""

    unit: str
    most: int | None = None
    level: float = 0.0

    def refill(self, most: int | None, seconds: float) -> None:
        if self.most is None and most is not None:
            self.level = float(most)
        self.most = most
        if most is not None:
            self.level = min(float(most), self.level + seconds * most / 60)

    def wait(self, amount: float) -> float:
        """Seconds until `amount` may be taken; more than the bucket holds may be when it is full."""
        if self.most is None:
            return 0.0
        missing = min(amount, self.most) - self.level
        if missing <= 0 and self.most:
            return 0.0
        return missing * 60 / self.most if self.most else 60.0

    def headers(self) -> Headers:
        if self.most is None:
            return []
        reset = (self.most - self.level) * 60 / self.most if self.most else 60.0
        figures = {"limit": str(self.most), "remaining": str(max(0, int(self.level))), "reset": f"{reset:.3f}s"}
        return [(f"x-ratelimit-{name}-{self.unit}".encode(), value.encode()) for name, value in figures.items()]


@dataclass(slots=True)
class _Counter:
    """One key's present use."""

    at: float
    requests: _Bucket = field(default_factory=lambda: _Bucket("requests"))
    tokens: _Bucket = field(default_factory=lambda: _Bucket("tokens"))
    running: int = 0


class Permit:
    """The right to run. `release` may be called more than once."""

    def __init__(self, admission: "Admission", counter: _Counter, runs: int, expected: int) -> None:
        self._admission: Admission | None = admission
        self._counter = counter
        self._runs = runs
        self._expected = expected

    def used(self, tokens: int) -> None:
        """Replace the expected tokens by those that the run has used; a request that only follows a run uses none."""
        if self._runs:
            self._counter.tokens.level -= tokens - self._expected
            self._expected = tokens

    def release(self) -> None:
        """Give the place back."""
        if self._admission is not None:
            self._admission.leave(self._counter, self._runs)
            self._admission = None


class Admission:
    """The counters of one gateway."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._counters: dict[str, _Counter] = {}
        self.running = 0

    def enter(self, key: KeyRow, headers: Headers, task: Task | None = None) -> Permit:
        """Let a request in, or raise `OverQuota` or `Overloaded`. Rate headers are added to `headers` in each case.

        A request without a `task` begins no run but follows one: it counts as a request of its key, not as a run.
        """
        counter = self._counter(key)
        runs, tokens = int(task is not None), 0
        if task is not None and counter.tokens.most is not None:
            tokens = input_bound(task.messages) // BYTES_A_TOKEN
        try:
            self._check(key, counter, runs, tokens)
        finally:
            headers += counter.requests.headers() + counter.tokens.headers()
        counter.running += runs
        self.running += 1
        return Permit(self, counter, runs, tokens)

    async def capacity(self) -> None:
        """Raise `Overloaded` if this process has no place for another run.

        A dependency of routes that begin runs, which comes first: a request that is refused here was not read, and
        costs the requests that are being served as little as possible."""
        if self.running >= self._context.rates.running:
            raise Overloaded(retry_after=BUSY_RETRY)

    def leave(self, counter: _Counter, runs: int) -> None:
        """Free the place of a permit."""
        counter.running -= runs
        self.running -= 1

    def _counter(self, key: KeyRow) -> _Counter:
        now, rates = self._context.tick(), self._context.rates
        counter = self._counters.get(key.id)
        if counter is None:
            self._forget()
            counter = self._counters[key.id] = _Counter(now)
        counter.requests.refill(rates.rpm if key.rpm is None else key.rpm, now - counter.at)
        counter.tokens.refill(rates.tpm if key.tpm is None else key.tpm, now - counter.at)
        counter.at = now
        return counter

    def _check(self, key: KeyRow, counter: _Counter, runs: int, tokens: int) -> None:
        rates = self._context.rates
        most = rates.concurrency if key.concurrency is None else key.concurrency
        if self.running >= rates.running:
            raise Overloaded(retry_after=BUSY_RETRY)
        if runs and most is not None and counter.running >= most:
            raise OverQuota("Too many requests of this key are running; wait for one to end.", retry_after=BUSY_RETRY)
        if wait := counter.requests.wait(1):
            raise OverQuota(retry_after=max(1, math.ceil(wait)))
        if runs and (wait := counter.tokens.wait(max(tokens, 1))):
            message = "Too many tokens for this key; wait as long as Retry-After says."
            raise OverQuota(message, retry_after=max(1, math.ceil(wait)))
        counter.requests.level -= 1
        counter.tokens.level -= tokens

    def _forget(self) -> None:
        """Make room by dropping the oldest counter that nobody uses."""
        if len(self._counters) >= COUNTERS:
            idle = next((key for key, counter in self._counters.items() if not counter.running), None)
            if idle is not None:
                del self._counters[idle]
