"""The queue between processes: tickets on Redis Streams, live messages over publish and subscribe.

Needs Redis 6.2 (XAUTOCLAIM) and the policy `noeviction`. Redis may be emptied, restarted, frozen or replaced at any
time: then the first calls raise `QueueUnavailable` within `GIVE_UP_SECONDS` and later ones at once
(`CircuitBreaker`), and the same object works again within half a second of Redis doing so.
Nothing is trimmed by length, because trimming throws away tickets that nobody has seen yet; `done` deletes, and
`enqueue` refuses above a bound.

These are the names that Baton uses in Redis:

name                          what             lives
{prefix}:2:steps:{tier}       stream           for ever: an empty one is small, and deleting it would delete its
{prefix}:2:runs:{tier}                         group; its entries live until `done` deletes them
{name of a stream}:tenants    list             the tenants with tickets in the next lists, in the order of their turns
{name of a stream}:of:{tenant} list            a tenant's tickets that wait; both live while more wait than are taken,
                                               or until nothing was queued for `TURNS_SECONDS`
  dispatchers                 consumer group   with its stream; made again, from the first entry, when missing
    {host}-{pid}-{chance}     consumer, one    until the process closes, or until it has been silent for
                              per process      `CONSUMER_SECONDS` with nothing pending, since a killed process
                                               cannot remove itself
{prefix}:2:live:{address}      channel          not stored at all
{prefix}:2:pulse              string           some seconds: what probes write, to see whether the server takes writes
"""

import asyncio
import logging
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, ParamSpec, Self, TypeVar

from msgspec import Struct
from redis.asyncio import BlockingConnectionPool, ConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import AuthenticationError, NoPermissionError, OutOfMemoryError, ReadOnlyError, ResponseError
from redis.exceptions import ConnectionError as RedisConnectionError

from app.errors import ConfigInvalid, QueueUnavailable
from app.network import retries
from app.stepqueue.live import Publisher, Subscriber
from app.stepqueue.protocol import Live, SealKeys, Ticket
from app.stepqueue.streams import FAULTS, Connections, Lanes, Streams

log = logging.getLogger(__name__)

P = ParamSpec("P")
T = TypeVar("T")

PROTOCOL: Final = 2
"""The version of what processes send each other over Redis. Those of another number share only the database, so that
a rolling update needs no understanding between them; 0.1.0 had none."""
LEASE_SECONDS: Final = 4.0
SOCKET_SECONDS: Final = 1.0
GIVE_UP_SECONDS: Final = 1.4
"""Longer than one socket timeout, shorter than a timeout and its retry: no call may hang on a frozen server."""
SLICE_SECONDS: Final = 0.4
"""Seconds for which one read blocks. The next one goes for abandoned tickets first, and notices that a server has
frozen."""
BOUND: Final = 100_000
"""Tickets of one tier, waiting and taken together, above which `enqueue` refuses: some 20 MiB of Redis."""
MAY_EVICT: Final = "queue_may_evict"
REFUSED: Final = "Redis refuses the user or the password of BATON_REDIS_URL."
WATCH_SECONDS: Final = 1.0
PROBE_SECONDS: Final = 1.0
"""Seconds for one probe; a server that takes longer counts as unavailable."""
PULSE_SECONDS: Final = 10


class RedisQueue:
    """Use as `async with RedisQueue(url, tiers) as queue`. The order of `tiers` is their priority, highest first.

    Entering it succeeds without a Redis (see `ready`), but not with one that may evict tickets. A ticket of a tier that
    is not listed goes with the last one, since the pool file can be reloaded while tickets are under way. `done` and
    `keep` act on a ticket even if another process has been given it meanwhile: fences are the database's.
    """

    def __init__(
        self,
        url: str,
        tiers: Sequence[str],
        lease: float = LEASE_SECONDS,
        prefix: str = "baton",
        *,
        bound: int = BOUND,
        seals: SealKeys | None = None,
    ) -> None:
        """`lease` is in seconds; `bound` holds for each tier. `tiers` must not be empty. No I/O happens here.

        `seals` are the keys of live messages: without them, messages of any client of Redis are accepted. Raises
        `ConfigInvalid` for a parameter of the URL that there is not.
        """
        try:
            pool: Any = ConnectionPool.from_url(url)
            pool.make_connection()
        except (TypeError, ValueError):
            raise ConfigInvalid(
                ["BATON_REDIS_URL: has a parameter that the client of Redis does not take; correct it"]
            ) from None
        self._seals = seals or SealKeys()
        self._keys = KeyNames(prefix)
        # Blocking reads hold their connections; other commands must never wait for one of them.
        self._commands = Connections(ConnectionPool.from_url(url, **_options(retries=0, answers=None)))
        self._reads = Connections(ConnectionPool.from_url(url, **_options(retries=0, answers=None)))
        self._subscriptions = ConnectionPool.from_url(url, **_options(retries=0))
        lanes = Lanes(
            steps={tier: self._keys.steps(tier) for tier in tiers}, runs={tier: self._keys.runs(tier) for tier in tiers}
        )
        consumer = f"{socket.gethostname()}-{os.getpid()}-{secrets.token_hex(4)}"
        self._streams = Streams(self._commands, self._reads, lanes, consumer, lease, bound)
        self._publisher = Publisher(self._seals)
        self._probing = _client(url)
        self._breaker = CircuitBreaker(self._probing, self._keys.pulse, self._log_eviction_fault)
        self._subscribers: set[Subscriber] = set()
        self._tasks = asyncio.TaskGroup()
        self._readers: set[asyncio.Task[None]] = set()
        self._calls = 0
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        self.forged = 0
        """Payloads of live messages that were dropped because nobody who has the key wrote them."""

    @property
    def pools(self) -> Mapping[str, Connections]:
        """Return the bounded pools of connections, by the names under which metrics show them."""
        return {"redis_commands": self._commands, "redis_reads": self._reads}

    @property
    def healthy(self) -> bool:
        """See the seam."""
        breaker = self._breaker
        if self._closed or breaker.open or breaker.write_fault is not None:
            return False
        return all(subscriber.subscribed for subscriber in self._subscribers)

    @property
    def crowded(self) -> bool:
        """See the seam."""
        return self._streams.runs_wait

    async def __aenter__(self) -> Self:
        await self._tasks.__aenter__()
        fault = None
        with suppress(QueueUnavailable):
            fault = await self._eviction_fault()
            await self._call_redis(self._streams.forget_consumers, leaving=False)
        if fault is not None:
            await self.__aexit__()
            raise QueueUnavailable(fault, code=MAY_EVICT)
        self._readers |= {
            self._tasks.create_task(self._breaker.watch()),
            self._tasks.create_task(self._publish_batches()),
        }
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()
        # Without the body's exception, which the group would wrap in one of its own.
        await self._tasks.__aexit__(None, None, None)

    async def enqueue(self, tickets: Sequence[Ticket]) -> None:
        """One round trip. Raises `QueueUnavailable` when a tier is full or Redis fails; some may be queued even so."""
        if tickets:
            await self._call_redis(self._streams.add, tickets)

    async def take(self, slots: int, wait: float, *, runs: bool = True) -> list[Ticket]:
        """See the seam. What was on its way to a caller that is cancelled is delivered again after a lease."""
        deadline = time.monotonic() + wait
        while True:
            seconds_left = deadline - time.monotonic()
            block = min(seconds_left, SLICE_SECONDS)
            if slots > 0:
                tickets = await self._call_redis(self._streams.look, slots, block, runs)
            else:
                tickets = await self._call_redis(asyncio.sleep, max(0.0, block), list[Ticket]())
            if tickets or seconds_left <= 0:
                return tickets

    async def keep(self, tickets: Sequence[Ticket]) -> None:
        """One round trip. What is no longer queued is left alone."""
        if tickets:
            await self._call_redis(self._streams.claim, tickets)

    async def done(self, tickets: Sequence[Ticket]) -> None:
        """One round trip. What is no longer queued is left alone."""
        if tickets:
            await self._call_redis(self._streams.delete, tickets)

    async def publish(self, address: str, messages: Sequence[Live]) -> None:
        """Leaves with the next publish, which calls that meet share; not waited for, so a failure of it loses them."""
        if self._closed or self._breaker.open:
            raise QueueUnavailable
        if messages:
            self._publisher.add(self._keys.live(address), messages)

    async def _publish_batches(self) -> None:
        while not self._closed:
            commands = await self._publisher.next_commands()
            with suppress(QueueUnavailable):
                await self._call_redis(self._commands.call, *commands)

    @asynccontextmanager
    async def subscribe(self, address: str, sink: Callable[[Live], None]) -> AsyncIterator[None]:
        """See the seam. A connection that breaks is replaced, but messages are lost meanwhile; so they are while Redis
        is away on entering.

        Each subscriber has a connection of its own.
        """
        subscriber = Subscriber(
            self._subscriptions, self._keys.live(address), sink, self._seals, on_forged=self._count_forged
        )
        try:
            await self._call_redis(subscriber.open)
        except QueueUnavailable:
            if self._closed:
                raise
        reader = self._tasks.create_task(subscriber.listen())
        self._readers.add(reader)
        self._subscribers.add(subscriber)
        try:
            yield
        finally:
            self._subscribers.discard(subscriber)
            subscriber.stop()
            self._readers.discard(reader)
            reader.cancel()
            await asyncio.wait([reader])
            await subscriber.close()

    async def ready(self) -> None:
        """See the seam. Also refuses a server that may evict tickets, as far as it lets us ask."""
        if not self._closed:
            await self._breaker.probe()
        if self._breaker.refused:
            raise QueueUnavailable(REFUSED, code="queue_refuses_login")
        fault = await self._eviction_fault()
        if fault is not None:
            raise QueueUnavailable(fault, code=MAY_EVICT)
        refusal = self._breaker.write_fault
        if isinstance(refusal, OutOfMemoryError):
            raise QueueUnavailable("Redis is out of memory and takes no tickets.", code="queue_full")
        if refusal is not None:
            raise QueueUnavailable(f"Redis takes no tickets: {refusal}", code="queue_refuses_writes")

    async def close(self) -> None:
        """End the subscriptions, refuse new calls, let those in flight end, and disconnect. May be called twice."""
        if self._closed:
            return
        with suppress(QueueUnavailable):
            await self._call_redis(self._streams.forget_consumers, leaving=True)
        with suppress(TimeoutError):
            async with asyncio.timeout(GIVE_UP_SECONDS):
                await self._publisher.idle.wait()
        self._closed = True
        self._breaker.close()
        for subscriber in self._subscribers:
            subscriber.stop()
        readers = tuple(self._readers)
        for reader in readers:
            reader.cancel()
        if readers:  # one that is connecting would leave its connection behind those that are closed below
            await asyncio.wait(readers, timeout=GIVE_UP_SECONDS)
        with suppress(TimeoutError):
            async with asyncio.timeout(GIVE_UP_SECONDS):
                await self._idle.wait()
        for shut in (self._commands.forget, self._reads.forget, self._probing.aclose, self._subscriptions.disconnect):
            with suppress(*FAULTS):
                await shut()

    async def _call_redis(self, call: Callable[P, Awaitable[T]], *args: P.args, **named: P.kwargs) -> T:
        """All talk with Redis goes through here, so that it ends in time and fails in one way."""
        if self._closed:
            raise QueueUnavailable("The step queue is closed.")
        self._calls += 1
        self._idle.clear()
        try:
            return await self._breaker.guard(GIVE_UP_SECONDS, call, *args, **named)
        except QueueUnavailable as refusal:
            if isinstance(refusal.__cause__, ReadOnlyError):
                # A failover made this server a replica; the name in the URL leads elsewhere by now.
                await self._commands.forget()
                await self._reads.forget()
                await self._probing.connection_pool.disconnect(inuse_connections=False)
            raise
        finally:
            self._calls -= 1
            if not self._calls:
                self._idle.set()

    def _count_forged(self) -> None:
        self.forged += 1

    async def _log_eviction_fault(self) -> None:
        """Log a fault of the eviction policy: the server that has come back may be another one."""
        with suppress(QueueUnavailable):
            fault = await self._eviction_fault()
            if fault is not None:
                log.error(fault)

    async def _eviction_fault(self) -> str | None:
        """Return the fault of the server's eviction policy. Servers that do not allow the question are trusted."""
        policy = await self._call_redis(self._streams.policy)
        if policy in {None, "noeviction"}:
            return None
        return f"Redis may evict tickets (maxmemory-policy {policy}); set `maxmemory-policy noeviction`."


async def clear(url: str, prefix: str = "baton") -> int:
    """Delete all that is queued under a prefix; the number of keys. Tickets that are due are queued again from the
    database. Raises `QueueUnavailable`."""
    client = _client(url)
    try:
        names = [name async for name in client.scan_iter(match=f"{prefix}:*", count=1_000)]
        if not names:
            return 0
        return int(await client.unlink(*names))
    except FAULTS as fault:
        raise QueueUnavailable from fault
    finally:
        await client.aclose()


class KeyNames(Struct, frozen=True):
    """The names under one prefix, so that several installations can share a server."""

    prefix: str

    def steps(self, tier: str) -> str:
        """Return the stream of a tier's steps."""
        return f"{self.prefix}:{PROTOCOL}:steps:{tier}"

    def runs(self, tier: str) -> str:
        """Return the stream of a tier's runs that nobody drives."""
        return f"{self.prefix}:{PROTOCOL}:runs:{tier}"

    @property
    def pulse(self) -> str:
        """Return the key that probes write."""
        return f"{self.prefix}:{PROTOCOL}:pulse"

    def live(self, address: str) -> str:
        """Return the channel of an address."""
        return f"{self.prefix}:{PROTOCOL}:live:{address}"


class CircuitBreaker:
    """The circuit breaker of Redis: probes detect an unavailable server, so that calls fail at once and not each by its
    time limit.

        closed   calls go through
        closed, with a `write_fault`
                 the server refuses writes: it takes no new tickets, and calls go through as far as it lets them
        open     the server does not answer: nothing is tried, and calls that wait for an answer are ended at once

    A probe goes out every second, and every quarter of a second after a first failure, be it of a probe or of a call;
    its outcome is the state. So the breaker closes by itself, and also a process that makes no calls knows the state.
    """

    def __init__(self, client: Any, pulse: str, recovered: Callable[[], Awaitable[None]]) -> None:
        """`client` is redis-py's, with a connection that no other call can take; `pulse` the key that a probe writes.

        `recovered` is awaited when the server answers again after it did not.
        """
        self._client = client
        self._pulse = pulse
        self._recovered = recovered
        self._has_failed = asyncio.Event()
        self._calls: set[asyncio.Timeout] = set()
        self._closed = False
        self.open = False
        self.fault: BaseException | None = None
        """The fault that has opened it."""
        self.refused = False
        """True while it is open because the server refuses our login."""
        self.write_fault: ResponseError | None = None
        """The error with which the server refuses writes, because it is out of memory, cannot save to its disk or lacks
        replicas; None while it takes them."""

    def close(self) -> None:
        """Let `watch` return."""
        self._closed = True
        self._has_failed.set()

    async def guard(self, seconds: float, call: Callable[P, Awaitable[T]], *args: P.args, **named: P.kwargs) -> T:
        """Make one call, which is refused at once if the breaker is open and ended after `seconds`.

        Raises `QueueUnavailable` only.
        """
        if self.open:
            raise QueueUnavailable from self.fault
        try:
            async with asyncio.timeout(seconds) as limit:
                self._calls.add(limit)
                try:
                    return await call(*args, **named)
                finally:
                    self._calls.discard(limit)
        except FAULTS as fault:
            self._note_fault(fault)
            raise QueueUnavailable from fault

    async def watch(self) -> None:
        """Probe until closed. A cancellation alone is not relied upon: the client may lose it to a time-out."""
        while not self._closed:
            with suppress(TimeoutError):
                async with asyncio.timeout(WATCH_SECONDS):
                    await self._has_failed.wait()
            if self.open:
                await asyncio.sleep(retries.REDIS_PAUSE)
            await retries.redis_probe(stopped=lambda: self._closed)(self._probe_once)

    async def _probe_once(self) -> bool:
        """Return whether calls go through again."""
        self._has_failed.clear()
        await self.probe()
        return not self.open

    async def probe(self) -> None:
        """Ask the server whether it takes writes, and know the state from then on."""
        try:
            async with asyncio.timeout(PROBE_SECONDS):
                await self._client.execute_command("SET", self._pulse, "", "EX", PULSE_SECONDS)
        except FAULTS as fault:
            self._note_fault(fault)
            if isinstance(fault, ReadOnlyError):  # the name in the URL leads elsewhere by now
                await self._client.connection_pool.disconnect(inuse_connections=False)
            if _means_unavailable(fault):
                return
            if isinstance(fault, ResponseError) and not isinstance(fault, NoPermissionError):
                self._note_refused_write(fault)
        else:
            self.write_fault = None
        if self.open:
            self.open = self.refused = False
            log.warning("Redis answers again.")
            await self._recovered()

    def _note_fault(self, fault: BaseException) -> None:
        if _means_unavailable(fault):
            self._open(fault)
        elif isinstance(fault, OutOfMemoryError):
            self._note_refused_write(fault)

    def _note_refused_write(self, fault: ResponseError) -> None:
        if self.write_fault is None:
            words = "is out of memory" if isinstance(fault, OutOfMemoryError) else f"refuses writes ({fault})"
            log.error("Redis %s; new tickets wait in the database for engines that look there.", words)
        self.write_fault = fault

    def _open(self, fault: BaseException) -> None:
        self.fault, self.refused = fault, isinstance(fault, AuthenticationError)
        if not self.open:
            words = REFUSED
            if not self.refused:
                words = f"Redis does not answer ({type(fault).__name__})."
            log.warning("%s This process goes on without it.", words)
        self.open = True
        self._has_failed.set()
        now = asyncio.get_running_loop().time()
        for call in self._calls:
            if not call.expired():
                call.reschedule(now)


def _means_unavailable(fault: BaseException) -> bool:
    """Return True unless the server itself has sent the error and is no replica: then it answers, and takes writes."""
    return not isinstance(fault, ResponseError) or isinstance(fault, ReadOnlyError)


def _options(*, retries: int, answers: float | None = SOCKET_SECONDS) -> dict[str, Any]:
    """A retry is only for a connection that turns out to be dead: a restart between two calls should go unnoticed.
    `answers` is how many seconds one may take; None leaves the limit to the caller."""
    return {
        "protocol": 2,
        "socket_timeout": answers,
        "socket_connect_timeout": SOCKET_SECONDS,
        "retry": Retry(NoBackoff(), retries, supported_errors=(RedisConnectionError,)),
        "driver_info": None,
    }


def _client(url: str) -> Any:
    """Return a client with a pool of its own. `Any`, since redis-py leaves its raw commands untyped."""
    options = _options(retries=1)
    return Redis.from_pool(BlockingConnectionPool.from_url(url, max_connections=2, timeout=SOCKET_SECONDS, **options))
