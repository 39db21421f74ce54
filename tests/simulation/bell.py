"""A queue that keeps no promise it did not make: tickets are lost, doubled, late and forged, messages too, and at times
nobody answers. One `Server` for the world, one `Bell` for each process.
"""

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass

from msgspec.structs import replace

from app.errors import QueueUnavailable
from app.stepqueue.protocol import AGAIN, WHOLE_RUN, Live, Ticket
from tests.simulation.loop import VirtualLoop
from tests.simulation.seam import Seam

GIVE_UP = 2.0


@dataclass(slots=True)
class Hearer:
    """Somebody who hears an address; `deaf_until` the messages to it are lost."""

    seam: Seam
    sink: Callable[[Live], None]
    deaf_until: float = 0.0
    latest: float = 0.0


class Server:
    """A stand-in for Redis, which may lose everything at any time."""

    def __init__(self, loop: VirtualLoop, lease: float) -> None:
        self.down_until = 0.0
        self.hearers: dict[str, list[Hearer]] = {}
        self._loop = loop
        self._time = loop.time
        self._lease = lease
        self._waiting: deque[Ticket] = deque()
        self._taken: dict[str, tuple[Ticket, float]] = {}
        self._receipts = 0
        self._takers: list[asyncio.Future[None]] = []

    def receive(self, ticket: Ticket, late: float) -> None:
        """Somebody has sent a ticket; whether that one lives when it arrives does not matter any more."""
        if late:
            self._loop.call_later(late, self.add, ticket, context=self._loop.outside.context)
        else:
            self.add(ticket)

    def add(self, ticket: Ticket) -> None:
        """A ticket has arrived."""
        self._waiting.append(replace(ticket, receipt=""))
        for taker in self._takers:
            if not taker.done():
                taker.set_result(None)
        self._takers.clear()

    def give(self, slots: int, runs: bool, *, twice: bool = False) -> list[Ticket]:
        """Deliver; a delivery that is neither kept nor forgotten is repeated after a lease."""
        now = self._time()
        for receipt, (ticket, until) in list(self._taken.items()):
            if until <= now:
                del self._taken[receipt]
                self._waiting.append(replace(ticket, version=AGAIN))
        tickets = []
        passed_over = []
        while self._waiting and len(tickets) < slots:
            ticket = self._waiting.popleft()
            if ticket.step == WHOLE_RUN and not runs:
                passed_over.append(ticket)
                continue
            if twice:
                self._waiting.append(ticket)
                twice = False
            self._receipts += 1
            tickets.append(replace(ticket, receipt=str(self._receipts)))
            self._taken[tickets[-1].receipt] = (ticket, now + self._lease)
        self._waiting.extendleft(reversed(passed_over))
        return tickets

    def wait(self) -> asyncio.Future[None]:
        """Done when a ticket arrives."""
        taker = asyncio.get_running_loop().create_future()
        self._takers.append(taker)
        return taker

    def keep(self, receipt: str) -> None:
        """Somebody still works on it."""
        if receipt in self._taken:
            self._taken[receipt] = (self._taken[receipt][0], self._time() + self._lease)

    def forget(self, receipt: str) -> None:
        """It is done."""
        self._taken.pop(receipt, None)

    def flush(self) -> None:
        """FLUSHALL."""
        self._waiting.clear()
        self._taken.clear()


class Bell:
    """The queue as one process has it."""

    def __init__(self, server: Server, seam: Seam) -> None:
        self._server = server
        self._seam = seam
        self._noticed = False

    @property
    def healthy(self) -> bool:
        """False from the first call that failed until the server is back."""
        return not self._noticed or self._server.down_until <= self._seam.time()

    @property
    def crowded(self) -> bool:
        """False: as over Redis, what waits is known to those who take it."""
        return False

    async def enqueue(self, tickets: Sequence[Ticket]) -> None:
        await self._arrive("queue.ring")
        seam = self._seam
        if seam.hit("queue.ring.fails"):
            raise QueueUnavailable
        for ticket in tickets:
            times = 3 if seam.hit("queue.ring.thrice") else 1
            times = 0 if seam.hit("queue.ring.lost") else times
            for _ in range(times):
                late = 4.0 * seam.chance() if seam.hit("queue.ring.late") else 0.0
                self._server.receive(ticket, late)
        await seam.strike("queue.rung")
        if seam.hit("queue.ring.fails_but_rings"):
            raise QueueUnavailable

    async def take(self, slots: int, wait: float, *, runs: bool = True) -> list[Ticket]:
        await self._arrive("queue.take")
        seam, server = self._seam, self._server
        if seam.hit("queue.take.fails"):
            raise QueueUnavailable
        tickets = server.give(slots, runs, twice=seam.hit("queue.take.given_twice"))
        if not tickets:
            with_wait = server.wait()
            try:
                async with asyncio.timeout(wait):
                    await with_wait
            except TimeoutError:
                pass
            seam.check()
            self._check_up()
            tickets = server.give(slots, runs)
        if tickets and seam.hit("queue.take.reply_lost"):
            raise QueueUnavailable
        if tickets:
            await seam.strike("queue.taken")
        return tickets

    async def keep(self, tickets: Sequence[Ticket]) -> None:
        await self._arrive("queue.keep")
        if self._seam.hit("queue.keep.fails"):
            raise QueueUnavailable
        for ticket in tickets:
            self._server.keep(ticket.receipt)

    async def done(self, tickets: Sequence[Ticket]) -> None:
        await self._arrive("queue.done")
        if self._seam.hit("queue.done.fails"):
            raise QueueUnavailable
        for ticket in tickets:
            self._server.forget(ticket.receipt)

    async def publish(self, address: str, messages: Sequence[Live]) -> None:
        await self._arrive("queue.tell")
        if self._seam.hit("queue.tell.fails"):
            raise QueueUnavailable
        for message in messages:
            for hearer in self._server.hearers.get(address, []):
                self._send(hearer, message)

    @asynccontextmanager
    async def subscribe(self, address: str, sink: Callable[[Live], None]) -> AsyncIterator[None]:
        await self._seam.lag(0.001)
        hearer = Hearer(self._seam, sink)
        hearers = self._server.hearers.setdefault(address, [])
        hearers.append(hearer)
        try:
            yield
        finally:
            hearers.remove(hearer)

    async def ready(self) -> None:
        await self._arrive("queue.ready")

    async def close(self) -> None:
        return

    def _send(self, hearer: Hearer, message: Live) -> None:
        seam = self._seam
        if seam.hit("queue.tell.lost") or hearer.deaf_until > seam.time():
            return
        for _ in range(2 if seam.hit("queue.tell.twice") else 1):
            self._deliver(hearer, message, 3.0 * seam.chance() if seam.hit("queue.tell.late") else 0.0)

    def _deliver(self, hearer: Hearer, message: Live, late: float) -> None:
        """In order, unless one is late; on the machine of the hearer, where it piles up while that one is frozen."""
        now = self._seam.time()
        due = hearer.latest = max(hearer.latest, now + 0.001 * self._seam.chance())
        loop = asyncio.get_running_loop()
        loop.call_later(due + late - now, self._hand, hearer, message, context=hearer.seam.machine.context)

    def _hand(self, hearer: Hearer, message: Live) -> None:
        if any(hearer in hearers for hearers in self._server.hearers.values()):
            hearer.sink(message)

    async def _arrive(self, point: str) -> None:
        await self._seam.strike(point)
        await self._seam.lag(0.0005)
        if self._server.down_until > self._seam.time() and self.healthy:
            await asyncio.sleep(GIVE_UP * self._seam.chance())  # only the first one waits for a server that is gone
        self._check_up()

    def _check_up(self) -> None:
        self._noticed = self._server.down_until > self._seam.time()
        if self._noticed:
            raise QueueUnavailable
