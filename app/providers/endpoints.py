"""Several weighted endpoints of one provider: the least loaded one that is healthy takes the next call.

An endpoint's load is its calls in flight over its weight; of two with the same load the one that has had fewer calls
for its weight is chosen. Each endpoint has a circuit breaker of its own (`core/pool/breaker.py`), which ejects it with
its first failure, because another one can take its calls; after the ejection one call probes it. If all are ejected,
the least bad one is called. All of this is known to one process only, and nothing is retried here: a call that failed
at one endpoint while another is healthy is marked (`WorkerError.elsewhere`), so that the engine calls the worker again
at once and does not blame it.

A request's bytes do not depend on the endpoint: they are rendered as for the first one.
"""

import random
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from functools import partial
from typing import cast
from weakref import WeakSet

from app.core.message.chat import Piece
from app.core.pool import breaker
from app.core.pool.breaker import PROBING, Breaker, State, Verdict
from app.core.pool.catalog import PATIENCE_SECONDS, Deadlines, EndpointSpec
from app.errors import WorkerError, WorkerTimeout
from app.providers.faults import VERDICTS
from app.providers.protocol import ClosableProvider, Request

TOLERATED = 1
"""Failures in a row that eject an endpoint."""


class Endpoints:
    """The endpoints of one provider."""

    def __init__(
        self,
        adapters: Sequence[tuple[EndpointSpec, ClosableProvider]],
        *,
        tick: Callable[[], float] = time.monotonic,
        chance: Callable[[], float] = random.random,
    ) -> None:
        """`adapters` are the endpoints with their adapters, at least one; `tick` gives monotonic seconds."""
        self._members = [Member(spec, adapter) for spec, adapter in adapters]
        self.tick = tick
        self._chance = chance
        self.on_ejection: Callable[[str, str], None] | None = None
        """Receives the name of each endpoint that is ejected, and the reason."""

    @property
    def unsupported(self) -> frozenset[str]:
        """See `protocol.Provider`."""
        return self._members[0].adapter.unsupported

    def render(self, request: Request) -> bytes:
        """See `protocol.Provider`."""
        return self._members[0].adapter.render(request)

    def stream(self, request: Request, body: bytes, deadlines: Deadlines) -> AsyncIterator[list[Piece]]:
        """Send to the endpoint that is chosen now; see `protocol.Provider`."""
        return self.choose().stream(request, body, deadlines)

    def states(self) -> Mapping[str, Callable[[], State]]:
        """Return for the name of each endpoint what gives the present state of its breaker."""
        return {member.spec.name: partial(self._state, member) for member in self._members}

    def _state(self, member: "Member") -> State:
        return member.breaker.state(self.tick())

    async def close(self) -> None:
        """Close all connections."""
        for member in self._members:
            await member.adapter.close()

    def choose(self) -> "ChosenProvider":
        """Return the provider with the endpoint for the next call, which counts as in flight from now on."""
        now = self.tick()
        healthy = [member for member in self._members if not member.objection(now)]
        if healthy:
            best = min(healthy, key=Member.load)
        else:
            best = min(self._members, key=lambda member: breaker.severity(member.breaker))
        best.breaker = breaker.before_call(best.breaker, "first", now)
        best.served += 1
        return ChosenProvider(self, best)

    def settle(self, member: "Member", error: WorkerError | None, began: float, *, had_time: bool = True) -> None:
        """Note the outcome of a call that began at `began`, and mark the error if another endpoint is healthy. A call
        that its run gave too little time (`had_time`) says nothing of the endpoint."""
        now = self.tick()
        verdict: Verdict = "good"
        if error is not None:
            verdict = VERDICTS.get(type(error), "silent") if had_time else "silent"
        retry_after = None
        if error is not None:
            retry_after = error.retry_after
        before = member.breaker
        end = breaker.CallEnd(verdict, began, retry_after)
        member.breaker = breaker.after_call(before, end, now=now, chance=self._chance(), tolerated=TOLERATED)
        if self.on_ejection and member.breaker.reason and member.breaker.since != before.since:
            self.on_ejection(member.spec.name, member.breaker.reason)
        if error is not None and verdict != "silent":
            for other in self._members:
                if other is not member and not other.objection(now):
                    error.elsewhere = True
        if error is not None and error.retry_after is not None and not error.elsewhere:
            ejected = [other.breaker for other in self._members if other.breaker.state(now) == "open"]
            error.retry_after = min([error.retry_after, *[its_breaker.until - now for its_breaker in ejected]])


class Member:
    """One endpoint of a provider."""

    def __init__(self, spec: EndpointSpec, adapter: ClosableProvider) -> None:
        self.spec = spec
        self.adapter = adapter
        self.breaker = Breaker()
        self.served = 0
        """Calls that it was chosen for."""
        self.chosen: WeakSet[ChosenProvider] = WeakSet()
        """The calls in flight; one that is dropped before it was made disappears by itself."""

    def objection(self, now: float) -> str:
        """Return the reason why a call should prefer another endpoint, or an empty string. A probe that was dropped
        before it was made keeps no other call away."""
        objection = self.breaker.objection(now)
        if objection == PROBING and not self.chosen:
            return ""
        return objection

    def load(self) -> tuple[float, float]:
        """Return the calls in flight, and then those that it has had, for each unit of its weight."""
        return len(self.chosen) / self.spec.weight, self.served / self.spec.weight


class ChosenProvider:
    """A provider whose calls go to one of its endpoints."""

    def __init__(self, endpoints: Endpoints, member: Member) -> None:
        self._endpoints = endpoints
        self._member = member
        self.endpoint = member.spec.name
        """The endpoint's name, for the journal."""
        self.unsupported = endpoints.unsupported
        member.chosen.add(self)

    def render(self, request: Request) -> bytes:
        """See `protocol.Provider`."""
        return self._endpoints.render(request)

    async def stream(self, request: Request, body: bytes, deadlines: Deadlines) -> AsyncIterator[list[Piece]]:
        """See `protocol.Provider`."""
        member, endpoints = self._member, self._endpoints
        member.chosen.add(self)
        began = heard = endpoints.tick()
        try:
            stream = cast(AsyncGenerator[list[Piece], None], member.adapter.stream(request, body, deadlines))
            async with aclosing(stream):
                async for pieces in stream:
                    heard = endpoints.tick()
                    yield pieces
            endpoints.settle(member, None, began)
        except WorkerError as error:
            had_time = True
            if isinstance(error, WorkerTimeout):
                seconds, silence = endpoints.tick() - began, endpoints.tick() - heard
                had_time = request.worker.deadlines.fair(deadlines, seconds, silence, PATIENCE_SECONDS)
            endpoints.settle(member, error, began, had_time=had_time)
            raise
        except BaseException:
            member.breaker = breaker.call_not_made(member.breaker)
            raise
        finally:
            member.chosen.discard(self)
