"""The queue inside one process: for the embedded default, where gateway and dispatcher share an event loop.

It has every guarantee of the protocol and no other: its tickets are lost with the process, and the sweeper queues them
again. Not for use from several threads. All bookkeeping happens between two awaits, so nothing needs a lock.
"""

import asyncio
import itertools
import logging
import time
from collections import Counter, OrderedDict, deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Self

from msgspec.structs import replace

from app.core.run.identifiers import NO_TRACE
from app.errors import QueueUnavailable
from app.stepqueue.protocol import AGAIN, WHOLE_RUN, Live, Ticket

log = logging.getLogger(__name__)

LEASE_SECONDS = 4.0
BOUND = 10_000
"""Tickets of one tier, waiting and taken together: some ten MiB, and far more than a process can work on in a lease."""


@dataclass(slots=True)
class _Taken:
    """A ticket that has been taken, and when it is queued again unless its lease is renewed."""

    ticket: Ticket
    lane: tuple[bool, str]
    until: float


class _Lane:
    """The tickets of one tier that wait: those of a tenant in their order, and one of each tenant in turn."""

    def __init__(self) -> None:
        self._tenants: OrderedDict[str, deque[Ticket]] = OrderedDict()

    def __bool__(self) -> bool:
        return bool(self._tenants)

    def add(self, ticket: Ticket) -> None:
        self._tenants.setdefault(ticket.tenant, deque()).append(ticket)

    def put_back(self, ticket: Ticket) -> None:
        """Put a ticket at the head of its tenant's, whose turn is next."""
        self._tenants.setdefault(ticket.tenant, deque()).appendleft(ticket)
        self._tenants.move_to_end(ticket.tenant, last=False)

    def take(self) -> Ticket:
        """Return the oldest ticket of the tenant whose turn it is; the tenant's next turn comes after all others'."""
        tenant, waiting = next(iter(self._tenants.items()))
        ticket = waiting.popleft()
        self._tenants.move_to_end(tenant)
        if not waiting:
            del self._tenants[tenant]
        return ticket


class MemoryQueue:
    """Tickets of steps, and then those of runs, in one bounded lane per tier; the order of `tiers` is their priority.

    A ticket of a tier that is not listed waits in the last lane: the pool file can be reloaded meanwhile.
    """

    def __init__(self, tiers: Sequence[str], *, lease: float = LEASE_SECONDS, bound: int = BOUND) -> None:
        """`lease` is in seconds; `bound` holds for each lane. `tiers` must not be empty."""
        names = [(whole, tier) for whole in (False, True) for tier in tiers]
        self._lanes = {name: _Lane() for name in names}
        self._last = tuple(tiers)[-1]
        self._lease = lease
        self._bound = bound
        self._load: Counter[tuple[bool, str]] = Counter()
        # In order of `until`, because every lease has the same length and `keep` moves its ticket to the end.
        self._taken: dict[str, _Taken] = {}
        self._receipts = itertools.count(1)
        self._changed = asyncio.Event()
        self._sinks: dict[str, tuple[Callable[[Live], None], ...]] = {}
        self._closed = False

    @property
    def healthy(self) -> bool:
        """Return True until the queue is closed."""
        return not self._closed

    @property
    def crowded(self) -> bool:
        """See the seam."""
        return any(whole and lane for (whole, _), lane in self._lanes.items())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def enqueue(self, tickets: Sequence[Ticket]) -> None:
        """Queue all of them, or none: raises `QueueUnavailable` where a lane has no room."""
        self._check_open()
        wanted = Counter(map(self._lane, tickets))
        if any(self._load[lane] + count > self._bound for lane, count in wanted.items()):
            raise QueueUnavailable("The step queue is full; nothing is lost, the sweeper will queue them again.")
        self._load.update(wanted)
        for ticket in tickets:
            self._lanes[self._lane(ticket)].add(ticket)
        self._changed.set()

    async def take(self, slots: int, wait: float, *, runs: bool = True) -> list[Ticket]:
        """See the seam. A new ticket wakes it in the next turn of the event loop."""
        deadline = time.monotonic() + wait
        while True:
            self._check_open()
            now = time.monotonic()
            self._return_expired(now)
            tickets = self._take_now(slots, now, runs)
            if tickets or now >= deadline:
                return tickets
            await self._pause(min(deadline, self._next_return(now)))

    async def keep(self, tickets: Sequence[Ticket]) -> None:
        """Start the lease of these deliveries anew; a delivery that has ended is ignored."""
        self._check_open()
        until = time.monotonic() + self._lease
        for ticket in tickets:
            taken = self._taken.pop(ticket.receipt, None)
            if taken is not None:
                taken.until = until
                self._taken[ticket.receipt] = taken

    async def done(self, tickets: Sequence[Ticket]) -> None:
        """Forget these deliveries; a delivery that has ended is ignored, so a late owner does no harm."""
        self._check_open()
        for ticket in tickets:
            taken = self._taken.pop(ticket.receipt, None)
            if taken is not None:
                self._load[taken.lane] -= 1

    async def publish(self, address: str, messages: Sequence[Live]) -> None:
        """Call the sinks of the address before returning; a sink that raises disturbs nobody."""
        self._check_open()
        for sink in self._sinks.get(address, ()):
            for message in messages:
                try:
                    sink(message)
                except Exception as fault:
                    # Only the kind of fault: its text may hold what a worker said.
                    log.warning(
                        "A subscriber of the step queue failed with %s; the message is lost to it.",
                        type(fault).__name__,
                    )

    @asynccontextmanager
    async def subscribe(self, address: str, sink: Callable[[Live], None]) -> AsyncIterator[None]:
        """See the seam. One address may have several subscribers."""
        self._check_open()
        self._sinks[address] = (*self._sinks.get(address, ()), sink)
        try:
            yield
        finally:
            self._forget(address, sink)

    async def ready(self) -> None:
        """Ready until closed."""
        self._check_open()

    async def close(self) -> None:
        """Wake all waiting calls and refuse everything from now on, with `QueueUnavailable`. May be called twice."""
        self._closed = True
        self._changed.set()

    def _check_open(self) -> None:
        if self._closed:
            raise QueueUnavailable("The step queue is closed.")

    def _lane(self, ticket: Ticket) -> tuple[bool, str]:
        whole = ticket.step == WHOLE_RUN
        if (whole, ticket.tier) in self._lanes:
            return (whole, ticket.tier)
        return (whole, self._last)

    def _take_now(self, slots: int, now: float, runs: bool) -> list[Ticket]:
        tickets: list[Ticket] = []
        for name, lane in self._lanes.items():
            is_of_runs, _ = name
            while (runs or not is_of_runs) and lane and len(tickets) < slots:
                ticket = replace(lane.take(), receipt=str(next(self._receipts)))
                self._taken[ticket.receipt] = _Taken(ticket, name, now + self._lease)
                tickets.append(ticket)
        return tickets

    def _return_expired(self, now: float) -> None:
        """Put deliveries whose lease has run out at the head of their lanes: they have waited longest."""
        expired = list(itertools.takewhile(lambda item: item[1].until <= now, self._taken.items()))
        for receipt, taken in reversed(expired):
            del self._taken[receipt]
            self._lanes[taken.lane].put_back(replace(taken.ticket, version=AGAIN, trace=NO_TRACE))

    def _next_return(self, now: float) -> float:
        """Return the earliest time at which a ticket may come back. A ticket that is taken from now on comes back
        after a lease at the earliest."""
        first = next(iter(self._taken.values()), None)
        return first.until if first else now + self._lease

    async def _pause(self, until: float) -> None:
        # Cleared here and not in `enqueue`: every waiter has looked into the lanes since the event was last set.
        self._changed.clear()
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                await self._changed.wait()
        except TimeoutError:
            return

    def _forget(self, address: str, sink: Callable[[Live], None]) -> None:
        others = list(self._sinks[address])
        others.remove(sink)
        if others:
            self._sinks[address] = tuple(others)
        else:
            del self._sinks[address]
