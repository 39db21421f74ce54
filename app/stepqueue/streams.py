"""Tickets on Redis Streams: one stream per tier, one consumer group on each, strict priority between them.

While tickets wait in a stream, tenants take turns. An entry that is added then is a right to the next ticket: its own
ticket goes to the end of a list of its tenant's, and whoever reads the entry is given the first ticket of the tenant
whose turn it is (`NEXT`). An entry that is added while none waits has its own ticket. So order costs nothing while
there is room for all, and one more exchange for each read when there is not. If the lists are lost, an entry stands for
the ticket that is in it; a process of an older release takes that one, too.

Everything here raises redis-py's own errors and waits as long as its sockets do; `RedisQueue` bounds and translates.

Tickets come back by time and not by emptiness: every look goes for abandoned ones first when a tenth of a lease has
passed since the last time, whether or not new tickets keep coming. Only a process that has room looks, so none hoards.

Commands go over connections of their own, with one write and one read for each exchange and nothing else. redis-py's
own client spends 100 to 150 microseconds of CPU on a command, most of it on retries, metrics and time limits which the
callers here have already; its connection and hiredis' parser, taken by themselves, need a third of that.
"""

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from typing import Any, Final

import hiredis
import orjson
from msgspec import Struct
from msgspec.structs import replace
from redis.exceptions import OutOfMemoryError, RedisError, ResponseError

from app.core.run.identifiers import NO_TRACE, read_trace
from app.errors import QueueUnavailable
from app.stepqueue.protocol import AGAIN, WHOLE_RUN, Ticket
from app.telemetry import PoolUse

START: Final = b"0-0"
"""The cursor at which a sweep over the pending entries begins, and which Redis returns at its end."""
GROUP: Final = "dispatchers"
FIELD: Final = b"t"
"""The field of a stream's entry with the ticket."""
TRACE_FIELD: Final = b"trace"
"""The field with the ticket's trace, if it has one."""
TURN_FIELD: Final = b"turn"
"""The field of an entry whose ticket waits in the list of its tenant."""
TURNS_SECONDS: Final = 3600
"""Seconds after which the lists of tenants are forgotten, if nothing was queued meanwhile."""
MOST_STEP: Final = 2**31 - 1
"""The highest number of a step that a database can look up."""
ADD: Final = f"""
local lane, group, ticket, trace, tenant = KEYS[1], ARGV[1], ARGV[2], ARGV[3], ARGV[4]
local turns = lane .. ':tenants'
local waiting = redis.call('XLEN', lane)
if waiting == 0 then
  for _, name in ipairs(redis.call('LRANGE', turns, 0, -1)) do redis.call('DEL', lane .. ':of:' .. name) end
  redis.call('DEL', turns)
else
  local pending = redis.pcall('XPENDING', lane, group)
  if not pending.err then waiting = waiting - pending[1] end
end
local fields = {{'t', ticket}}
if trace ~= '' then fields[3], fields[4] = 'trace', trace end
if waiting > 0 then
  local own = lane .. ':of:' .. tenant
  if redis.call('RPUSH', own, ticket .. '\\n' .. trace) == 1 then redis.call('RPUSH', turns, tenant) end
  redis.call('EXPIRE', own, {TURNS_SECONDS})
  redis.call('EXPIRE', turns, {TURNS_SECONDS})
  fields[#fields + 1], fields[#fields + 2] = 'turn', '1'
end
return redis.call('XADD', lane, '*', unpack(fields))
"""
"""Adds an entry, and its ticket to its tenant's if others wait."""
NEXT: Final = """
local lane, most, found = KEYS[1], tonumber(ARGV[1]), {}
local turns = lane .. ':tenants'
while #found < most do
  local tenant = redis.call('LPOP', turns)
  if not tenant then break end
  local own = lane .. ':of:' .. tenant
  local ticket = redis.call('LPOP', own)
  if ticket then found[#found + 1] = {tenant, ticket} end
  if redis.call('LLEN', own) > 0 then redis.call('RPUSH', turns, tenant) end
end
return {redis.call('LLEN', turns), found}
"""
"""Takes tickets of tenants in turn. Returns how many tenants have more, and each ticket with its tenant."""
TURN: Final = "turn"
"""The last word of the receipt of an entry that is a right to a ticket."""
CONSUMER_SECONDS: Final = 3600
FAULTS: Final = (RedisError, OSError, TimeoutError, RuntimeError)
"""The exceptions that mean that the server or the network between has failed.

RuntimeError is what uvloop says of a transport that was closed under its writer ("the handler is closed"); redis-py
lets it pass, and unless it is caught here it ends the process that merely wanted to send something."""
Command = tuple[str | int | bytes, ...]
"""A command as it is sent."""
PACK: Final[Callable[[Command], bytes]] = hiredis.pack_command  # type: ignore[assignment]  # the stub means one word
MOST_CONNECTIONS: Final = 32
"""At most so many exchanges at a time; one beyond them waits its turn within its caller's time."""


class Connections:
    """A bounded number of connections, each used by one exchange at a time.

    Sets no time limit of its own but for connecting: the caller's ends an exchange, and its connection with it.
    """

    def __init__(self, pool: Any) -> None:
        """`pool` is redis-py's, untyped as its methods are, and makes connections; it retains none of these. Its
        connections must have no time limit for answers."""
        self._pool = pool
        self._slots = asyncio.Semaphore(MOST_CONNECTIONS)
        self._free: list[Any] = []
        self._exchanges = self._waits = 0

    async def send(self, *commands: Command) -> list[Any]:
        """Return the replies in order, in one round trip; that to a refused command is its `ResponseError`.

        Raises redis-py's errors where the connection fails. A connection that was used before and fails is replaced by
        a new one, once, so that a restart between two exchanges goes unnoticed; the commands may then have been carried
        out twice.
        """
        packed = b"".join(map(PACK, commands))
        self._waits += self._slots.locked()
        self._exchanges += 1
        try:
            async with self._slots:
                if self._free:
                    with suppress(*FAULTS):
                        return await self._exchange(self._free.pop(), packed, len(commands))
                    await self.forget()
                return await self._exchange(self._pool.make_connection(), packed, len(commands))
        finally:
            self._exchanges -= 1

    @property
    def use(self) -> PoolUse:
        """Return the use of the connections."""
        in_use = min(self._exchanges, MOST_CONNECTIONS)
        return PoolUse(in_use, MOST_CONNECTIONS, self._exchanges - in_use, self._waits)

    async def call(self, *commands: Command) -> list[Any]:
        """Return the replies as `send` does, but raise the first `ResponseError`, also one inside a transaction."""
        replies = await self.send(*commands)
        for reply in replies:
            parts = reply if isinstance(reply, list) else [reply]
            for part in parts:
                if isinstance(part, Exception):
                    raise part
        return replies

    async def forget(self) -> None:
        """Close the connections that nobody uses: the server that they lead to may be gone, or not be the right one."""
        while self._free:
            await self._free.pop().disconnect(nowait=True)

    async def _exchange(self, connection: Any, packed: bytes, count: int) -> list[Any]:
        try:
            if not connection.is_connected:
                await connection.connect()
            await connection.send_packed_command(packed, check_health=False)
            replies = [await _reply(connection) for _ in range(count)]
        except BaseException:  # what is still to come would be taken for the answer to what is asked next
            await connection.disconnect(nowait=True)
            raise
        self._free.append(connection)
        return replies


async def _reply(connection: Any) -> Any:
    try:
        return await connection.read_response()
    except ResponseError as refusal:
        return refusal


class TicketFormatError(ValueError):
    """Bytes that are no ticket. Stays inside the queue, which drops them."""


class Lanes(Struct, frozen=True):
    """The streams of each tier, highest first: those of steps go before those of runs."""

    steps: Mapping[str, str]
    runs: Mapping[str, str]

    def of(self, ticket: Ticket) -> str:
        """Return the stream of a ticket; one of a tier that is not listed goes with the last one."""
        by_tier = self.runs if ticket.step == WHOLE_RUN else self.steps
        return by_tier.get(ticket.tier) or list(by_tier.values())[-1]


class Streams:
    """The tickets' half of a `RedisQueue`."""

    def __init__(
        self, commands: Connections, reads: Connections, lanes: Lanes, consumer: str, lease: float, bound: int
    ):
        """Only `reads` ever blocks."""
        self._commands = commands
        self._reads = reads
        self._by_kind = lanes
        self._lanes = [*lanes.steps.values(), *lanes.runs.values()]
        self._consumer = consumer
        self._lease_ms = round(lease * 1000)
        self._sweep_every_seconds = lease / 10
        self._sweep_at = 0.0
        self._cursors: dict[str, bytes] = {}
        self._crowded = True
        """True if the last read may have left tickets in the streams."""
        self._bound = bound
        self._lengths: dict[str, int] = {}
        self._tenants_waiting: dict[str, int] = {}
        """The tenants with tickets that wait, by lane, after the last turns that were taken."""

    @property
    def runs_wait(self) -> bool:
        """Return True if tickets of runs were left to wait when turns were taken last."""
        return any(self._tenants_waiting.get(lane, 0) for lane in self._by_kind.runs.values())

    async def add(self, tickets: Sequence[Ticket]) -> None:
        """One round trip; another one for lanes that were full last time. Raises `QueueUnavailable` if one still is."""
        lanes = sorted({self._by_kind.of(ticket) for ticket in tickets})
        await self._check_room([lane for lane in lanes if self._lengths.get(lane, 0) >= self._bound])
        additions = [_addition(self._by_kind.of(ticket), ticket) for ticket in tickets]
        try:
            replies = await self._commands.call(*additions, *(("XLEN", lane) for lane in lanes))
        except ResponseError as refusal:
            if "OOM" in str(refusal) and not isinstance(refusal, OutOfMemoryError):  # how a script says it
                raise OutOfMemoryError(str(refusal)) from refusal
            raise
        self._lengths.update(zip(lanes, replies[len(tickets) :], strict=True))

    async def look(self, slots: int, block: float, runs: bool) -> list[Ticket]:
        """Abandoned tickets if their time has come, else new ones by priority, else what comes in `block` seconds.
        Without `runs` nothing but steps."""
        lanes = self._lanes if runs else list(self._by_kind.steps.values())
        try:
            tickets = await self._look(lanes, slots, block)
        except ResponseError as fault:
            if not _is_group_missing(fault):
                raise
            await self._make_groups()
            tickets = await self._look(lanes, slots, block)
        return await self._exchange_rights(tickets)

    async def claim(self, tickets: Sequence[Ticket]) -> None:
        """Set the idle time of deliveries to zero; those that are gone stay gone."""
        commands: list[Command] = [
            ("XCLAIM", lane, GROUP, self._consumer, 0, *ids, "JUSTID") for lane, ids in _by_stream(tickets).items()
        ]
        for reply in await self._commands.send(*commands):
            if isinstance(reply, Exception) and not _is_group_missing(reply):
                raise reply

    async def delete(self, tickets: Sequence[Ticket]) -> None:
        """Acknowledge and delete, together or not at all: one without the other would leave an entry for ever.

        A server out of memory takes no transactions; there, making room comes first.
        """
        try:
            await self._commands.call(*_transaction(_deletions(_by_stream(tickets))))
        except OutOfMemoryError:
            await self._commands.call(*_deletions(_by_stream(tickets)))

    async def forget_consumers(self, *, leaving: bool) -> None:
        """Remove consumers that are gone for good, and, when leaving, our own; never one with a ticket pending."""
        for lane in self._lanes:
            with suppress(ResponseError):  # no stream or no group yet
                (consumers,) = await self._commands.call(("XINFO", "CONSUMERS", lane, GROUP))
                for consumer in map(_fields, consumers):
                    name = consumer[b"name"].decode()
                    gone = consumer[b"idle"] > CONSUMER_SECONDS * 1000 or (leaving and name == self._consumer)
                    if gone and not consumer[b"pending"]:
                        await self._commands.call(("XGROUP", "DELCONSUMER", lane, GROUP, name))

    async def policy(self) -> str | None:
        """Return the server's eviction policy; None where it does not allow the question."""
        pong, config = await self._commands.send(("PING",), ("CONFIG", "GET", "maxmemory-policy"))
        if isinstance(pong, Exception):
            raise pong
        if not isinstance(config, list) or not config:
            return None
        policy: str = config[1].decode()
        return policy

    async def _check_room(self, lanes: Sequence[str]) -> None:
        for lane in lanes:
            (self._lengths[lane],) = await self._commands.call(("XLEN", lane))
            if self._lengths[lane] >= self._bound:
                raise QueueUnavailable("The step queue is full; nothing is lost, the sweeper will queue them again.")

    async def _make_groups(self) -> None:
        """Make the groups that are missing, as at the first use and after FLUSHALL."""
        for lane in self._lanes:
            with suppress(ResponseError):  # BUSYGROUP: another process was faster
                # From 0, not from $: tickets may have been queued before anybody made the group.
                await self._commands.call(("XGROUP", "CREATE", lane, GROUP, "0", "MKSTREAM"))

    async def _look(self, lanes: Sequence[str], slots: int, block: float) -> list[Ticket]:
        if time.monotonic() >= self._sweep_at:
            expired = await self._reclaim(lanes, slots)
            if expired:
                return expired
        if self._crowded or block <= 0:
            waiting = await self._by_priority(lanes, slots)
            self._crowded = len(waiting) == slots
            if waiting or block <= 0:
                return waiting
        tickets = await self._read(lanes, slots, block)
        self._crowded = len(tickets) >= slots
        await self._put_back(tickets[slots:])
        return tickets[:slots]

    async def _by_priority(self, lanes: Sequence[str], slots: int) -> list[Ticket]:
        """Return waiting tickets, lane by lane: of a lower one only as many as the higher ones leave room for. It costs
        a read for each lane, and so is not used while there is room for all."""
        tickets: list[Ticket] = []
        for lane in lanes:
            tickets += await self._read([lane], slots - len(tickets))
            if len(tickets) == slots:
                break
        return tickets

    async def _read(self, lanes: Sequence[str], slots: int, block: float | None = None) -> list[Ticket]:
        """New tickets: up to `slots` from *each* lane, for that is how COUNT works."""
        # Never BLOCK 0, which means for ever.
        blocking = () if block is None else ("BLOCK", max(1, round(block * 1000)))
        words = ("GROUP", GROUP, self._consumer, "COUNT", slots, *blocking, "STREAMS", *lanes, *(">" for _ in lanes))
        (streams,) = await self._reads.call(("XREADGROUP", *words))
        read = {name.decode(): entries for name, entries in streams or ()}
        for lane in lanes:  # other processes may have taken what waited when turns were taken here last
            if len(read.get(lane, ())) < slots:
                self._tenants_waiting.pop(lane, None)
        tickets: list[Ticket] = []
        for lane, entries in read.items():
            tickets += await self._tickets(lane, entries)
        return tickets

    async def _reclaim(self, lanes: Sequence[str], slots: int) -> list[Ticket]:
        """Return tickets whose lease has expired, at most `slots`; if there are more, the next call continues from
        there.

        A page may be empty without being the last one: only the cursor shows the end.
        """
        expired: list[Ticket] = []
        for lane in lanes:
            while len(expired) < slots:
                start = self._cursors.get(lane, START)
                words = (lane, GROUP, self._consumer, self._lease_ms, start, "COUNT", slots - len(expired))
                (page,) = await self._commands.call(("XAUTOCLAIM", *words))
                self._cursors[lane] = page[0]
                for ticket in await self._tickets(lane, page[1]):
                    expired.append(replace(ticket, version=AGAIN, trace=NO_TRACE))
                if page[0] == START:
                    break
            else:
                return expired
        self._sweep_at = time.monotonic() + self._sweep_every_seconds
        return expired

    async def _tickets(self, lane: str, entries: Sequence[Any]) -> list[Ticket]:
        """Read entries; those that are no tickets are deleted. Redis 6.2 claims deleted entries as nil."""
        tickets: list[Ticket] = []
        bad: list[str] = []
        for entry, fields in filter(None, entries):
            try:
                values = _fields(fields or ())
                receipt = f"{entry.decode()} {lane}"
                if TURN_FIELD in values:
                    receipt += f" {TURN}"
                ticket = unpack_ticket(values.get(FIELD, b""), receipt)
                tickets.append(with_trace(ticket, values.get(TRACE_FIELD, b"")))
            except TicketFormatError:
                bad.append(entry.decode())
        if bad:
            await self._commands.call(*_transaction(_deletions({lane: bad})))
        return tickets

    async def _put_back(self, surplus: Sequence[Ticket]) -> None:
        """Queue the tickets again that a read over several lanes returned above its count, for processes with room."""
        if not surplus:
            return
        additions: list[Command] = [
            ("XADD", self._by_kind.of(ticket), "*", *_pack_fields(ticket)) for ticket in surplus
        ]
        await self._commands.call(*_transaction([*additions, *_deletions(_by_stream(surplus))]))

    async def _exchange_rights(self, tickets: list[Ticket]) -> list[Ticket]:
        """Exchange the tickets of entries that are rights to a ticket for those whose turn it is. An entry for which
        there is none keeps its own."""
        entries: dict[str, list[int]] = {}
        for place, ticket in enumerate(tickets):
            _, lane, is_right = _receipt(ticket)
            if is_right and ticket.version != AGAIN:
                entries.setdefault(lane, []).append(place)
        for lane, places in entries.items():
            ((left, taken),) = await self._commands.call(("EVAL", NEXT, 1, lane, len(places)))
            self._tenants_waiting[lane] = left
            for place, (tenant, packed) in zip(places, taken, strict=False):
                with suppress(TicketFormatError, UnicodeDecodeError):  # others may have written to the lists, too
                    tickets[place] = _waiting(tenant, packed, tickets[place].receipt)
        return tickets


def _deletions(deliveries: Mapping[str, Sequence[str]]) -> list[Command]:
    """Return the commands that acknowledge and delete entries, given as ids by stream."""
    commands: list[Command] = []
    for lane, ids in deliveries.items():
        commands += [("XACK", lane, GROUP, *ids), ("XDEL", lane, *ids)]
    return commands


def _transaction(commands: Sequence[Command]) -> list[Command]:
    """Return the commands as a transaction: all of them are carried out, or none."""
    return [("MULTI",), *commands, ("EXEC",)]


def _fields(flat: Sequence[Any]) -> dict[bytes, Any]:
    """Names and values as Redis lists them, one after the other."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def _by_stream(tickets: Sequence[Ticket]) -> dict[str, list[str]]:
    """Entry ids by stream, from the receipts; tickets that no `take` has given out have none."""
    ids: dict[str, list[str]] = {}
    for ticket in tickets:
        entry, lane, _ = _receipt(ticket)
        if lane:
            ids.setdefault(lane, []).append(entry)
    return ids


def _receipt(ticket: Ticket) -> tuple[str, str, bool]:
    """Return the entry of a delivery, its stream, and whether it is a right to a ticket; empty for a ticket without
    one."""
    entry, _, rest = ticket.receipt.partition(" ")
    lane, _, turn = rest.partition(" ")
    return entry, lane, turn == TURN


def _is_group_missing(fault: Exception) -> bool:
    """UNBLOCKED is the reply to a reader whose stream is deleted while it waits."""
    return isinstance(fault, ResponseError) and str(fault).startswith(("NOGROUP", "UNBLOCKED"))


def _pack_fields(ticket: Ticket) -> tuple[str | bytes, ...]:
    """Return the fields of a stream's entry, with their names."""
    fields: tuple[str | bytes, ...] = (FIELD, pack_ticket(ticket))
    if ticket.trace:
        fields += (TRACE_FIELD, pack_trace(ticket))
    if _receipt(ticket)[2]:
        return (*fields, TURN_FIELD, b"1")
    return fields


def _addition(lane: str, ticket: Ticket) -> Command:
    """Return the command that adds a ticket behind those that wait."""
    trace = pack_trace(ticket) if ticket.trace else b""
    return ("EVAL", ADD, 1, lane, GROUP, pack_ticket(ticket), trace, ticket.tenant)


def _waiting(tenant: bytes, packed: bytes, receipt: str) -> Ticket:
    """Return a ticket out of its tenant's list, under the receipt of the entry that was the right to it."""
    data, _, trace = packed.partition(b"\n")
    return replace(with_trace(unpack_ticket(data, receipt), trace), tenant=tenant.decode())


def pack_ticket(ticket: Ticket) -> bytes:
    """Return the fields that every release knows."""
    return orjson.dumps([ticket.run, ticket.step, ticket.tier, ticket.driver, ticket.seq, ticket.version])


def pack_trace(ticket: Ticket) -> bytes:
    """Return the fields of the trace, which releases before 0.3.0 ignore."""
    return orjson.dumps([ticket.trace.parent, ticket.trace.state, ticket.at])


def with_trace(ticket: Ticket, data: bytes) -> Ticket:
    """Return the ticket with its trace; as it is where there is none, or none that can be read."""
    if not data:
        return ticket
    with suppress(orjson.JSONDecodeError):
        match orjson.loads(data):
            case [str(parent), str(state), int(at) | float(at)]:
                return replace(ticket, trace=read_trace(parent, state), at=float(at))
    return ticket


def unpack_ticket(data: bytes, receipt: str) -> Ticket:
    """Return the ticket with its receipt; raises `TicketFormatError`, also for what no database can look up."""
    try:
        fields = orjson.loads(data)
    except orjson.JSONDecodeError as fault:
        raise TicketFormatError("not JSON") from fault
    match fields:
        case [str(run), int(step), str(tier), str(driver), int(seq), int(version)] if (
            run.isprintable() and WHOLE_RUN <= step <= MOST_STEP
        ):
            return Ticket(run, step, tier, driver, seq, version, receipt)
        case _:
            raise TicketFormatError("not a ticket")
