"""Whether a request may start now: rate, concurrency and the size of this process, before anything costs money.

Counters are this process's own. A token bucket holds one minute's worth of a key's requests and refills evenly. What
was let in holds a `Permit`, which its owner gives back in a `finally`.
"""

import math
from dataclasses import dataclass

from app.errors import Overloaded, OverQuota
from app.gateway.gate import Gate
from app.store.protocol import KeyRow

REMEMBERED = 10_000
BUSY_RETRY = 1.0
"""Seconds to wait when too many requests run: about what a short run takes."""


@dataclass(slots=True)
class _Counter:
    """One key's present use."""

    tokens: float
    at: float
    running: int = 0


class Permit:
    """The right to run. `release` may be called more than once."""

    def __init__(self, admission: "Admission", counter: _Counter) -> None:
        self._admission: Admission | None = admission
        self._counter = counter

    def release(self) -> None:
        """Give the place back."""
        if self._admission is not None:
            self._admission.leave(self._counter)
            self._admission = None


class Admission:
    """The counters of one gateway."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._counters: dict[str, _Counter] = {}
        self.running = 0

    def enter(self, key: KeyRow, headers: list[tuple[bytes, bytes]]) -> Permit:
        """Let a request in, or raise `OverQuota` or `Overloaded`. Rate headers are added to `headers` in each case."""
        rates = self._gate.rates
        rpm = rates.rpm if key.rpm is None else key.rpm
        most = rates.concurrency if key.concurrency is None else key.concurrency
        counter = self._counter(key.id, rpm)
        if self.running >= rates.running:
            raise Overloaded(retry_after=BUSY_RETRY)
        if most is not None and counter.running >= most:
            raise OverQuota("Too many requests of this key are running; wait for one to end.", retry_after=BUSY_RETRY)
        if rpm is not None:
            self._take_token(counter, rpm, headers)
        counter.running += 1
        self.running += 1
        return Permit(self, counter)

    def leave(self, counter: _Counter) -> None:
        """What `Permit.release` does."""
        counter.running -= 1
        self.running -= 1

    def _counter(self, key: str, rpm: int | None) -> _Counter:
        now = self._gate.tick()
        counter = self._counters.get(key)
        if counter is None:
            self._forget()
            counter = self._counters[key] = _Counter(float(rpm or 0), now)
        if rpm is not None:
            counter.tokens = min(float(rpm), counter.tokens + (now - counter.at) * rpm / 60)
            counter.at = now
        return counter

    def _forget(self) -> None:
        """Make room by dropping the oldest counter that nobody uses."""
        if len(self._counters) >= REMEMBERED:
            idle = next((key for key, counter in self._counters.items() if not counter.running), None)
            if idle is not None:
                del self._counters[idle]

    def _take_token(self, counter: _Counter, rpm: int, headers: list[tuple[bytes, bytes]]) -> None:
        allowed = counter.tokens >= 1
        counter.tokens -= allowed
        wait = (1 - counter.tokens) * 60 / rpm if rpm else 60.0
        headers += [
            (b"x-ratelimit-limit-requests", str(rpm).encode()),
            (b"x-ratelimit-remaining-requests", str(int(counter.tokens)).encode()),
            (b"x-ratelimit-reset-requests", f"{(rpm - counter.tokens) * 60 / rpm if rpm else 60.0:.3f}s".encode()),
        ]
        if not allowed:
            raise OverQuota(retry_after=max(1, math.ceil(wait)))
