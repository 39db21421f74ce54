"""Live messages over Redis: as bytes, published by one task for all streams of a process, and received by subscribers.

A message is an array with a tag in front instead of an object: deltas are the bulk of the traffic, and their field
names would outweigh their text. What comes in is not trusted: Redis may hold what another version, or somebody else,
has written.

A publish costs some 150 microseconds of processor time whatever it carries, a delta in it only a few. So many steps
that stream at once share one: their messages during one publish are the next. Nobody waits for it either: to wait for
one's turn, under a time limit, cost as much again for each delta. Messages of a quiet process are published at once;
many steady streams share a publish every few milliseconds.
"""

import asyncio
import hashlib
import hmac
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, assert_never

import orjson
from redis.exceptions import ConnectionError as RedisConnectionError

from app.core.message.chat import ToolDelta
from app.core.run.events import Event, Kind
from app.errors import QueueUnavailable
from app.network import retries
from app.stepqueue.protocol import CommittedEvents, Delta, EngineChange, ListenRequest, Live, SealKeys, Stop
from app.stepqueue.streams import FAULTS, Command

log = logging.getLogger(__name__)

BATCH: Final = 256
"""Messages in one payload: enough to make the rest of a publish cheap, too few to hold up a subscriber's event loop."""

SEAL: Final = 16
"""Bytes of the code in front of a sealed payload."""

KINDS: Final = frozenset(kind.value for kind in Kind)
MOST_WAITING: Final = 20_000
"""Messages that may wait for the next publish: as many as two thousand streams send in ten seconds."""
PACE: Final = 0.005
"""Seconds between two publishes of a process that streams steadily."""
BURST: Final = 20
"""Publishes of a process that has been silent for a while which may come sooner."""
PROBE_SECONDS: Final = 1.0
"""After this much silence we ask whether the server is there; after as much again we connect anew."""


class MessageFormatError(ValueError):
    """Bytes that are no batch of messages. Stays inside the queue, which drops them."""


class ForgedPayload(MessageFormatError):
    """A payload that nobody who has the key wrote to this channel."""


class Publisher:
    """Messages that wait to be published, in the order of the calls. One task sends the `next_commands`, again and
    again."""

    def __init__(self, seals: SealKeys) -> None:
        """The first of `seals` seals the messages."""
        self._seals = seals
        self._next: dict[str, list[Live]] = {}
        self._waiting = 0
        self._added = asyncio.Event()
        self._free = 0.0
        """When the next publish could leave, had all before it been spaced evenly."""
        self.idle = asyncio.Event()
        """Set while there is nothing to be published, nor on its way."""
        self.idle.set()

    def add(self, channel: str, messages: Sequence[Live]) -> None:
        """Have messages published soon. Raises `QueueUnavailable` if too many wait already."""
        self._waiting += len(messages)
        if self._waiting > MOST_WAITING:
            self._waiting -= len(messages)
            raise QueueUnavailable("More is published than the step queue can send.")
        self._next.setdefault(channel, []).extend(messages)
        self._added.set()
        self.idle.clear()

    async def next_commands(self) -> list[Command]:
        """Wait until there are messages that may be published, and return the commands that publish all of them."""
        if not self._next:
            self.idle.set()
        await self._added.wait()
        self._free = max(self._free, time.monotonic() - BURST * PACE) + PACE
        if (early := self._free - time.monotonic()) > 0:
            await asyncio.sleep(early)
        self._added.clear()
        taken, self._next, self._waiting = self._next, {}, 0
        commands: list[Command] = []
        key = self._seals.keys[0] if self._seals.keys else b""
        for channel, messages in taken.items():
            for payload in pack_live(messages):
                commands.append(("PUBLISH", channel, seal_payload(payload, channel, key)))
        return commands


class Subscriber:
    """One subscriber of one address: a connection that is replaced when it fails, and the loop that reads it.

    `open`, then `listen` in a task, then `close`. Neither bad payloads nor a sink that raises end the listening.
    """

    def __init__(
        self, pool: Any, channel: str, sink: Callable[[Live], None], seals: SealKeys, on_forged: Callable[[], None]
    ) -> None:
        """`pool` is redis-py's, untyped as its methods are. Messages that none of `seals` has sealed are dropped;
        `on_forged` is called for each payload of these."""
        self._pool = pool
        self._channel = channel
        self._sink = sink
        self._seals = seals
        self._on_forged = on_forged
        self._connection: Any = None
        self._stopping = False
        self.subscribed = False
        """True if it is subscribed, as of the last reply or error."""

    async def open(self) -> None:
        """Subscribe; returns when the server has confirmed it. Raises redis-py's errors."""
        self._connection = await self._pool.get_connection()
        try:
            await self._connection.send_command("SUBSCRIBE", self._channel, check_health=False)
            await self._connection.read_response()
            self.subscribed = True
        except BaseException:
            await self.close()
            raise

    async def listen(self) -> None:
        """Call the sink for every message until stopped. A cancellation alone may get lost in the client."""
        await retries.redis_subscription(faults=FAULTS, stopped=lambda: self._stopping)(self._listen_once)

    async def _listen_once(self) -> None:
        """Subscribe and read until stopped; raises what interrupts it, after the connection is closed."""
        try:
            if self._connection is None:
                await self.open()
            await self._read()
        except FAULTS as fault:
            log.debug("The subscription was interrupted by %s.", type(fault).__name__)
            await self.close()
            raise

    def stop(self) -> None:
        """Let `listen` return, within two time-outs."""
        self._stopping = True

    async def close(self) -> None:
        """Let go of the connection. It is never given to anybody else: it may still be subscribed."""
        connection, self._connection, self.subscribed = self._connection, None, False
        if connection is not None:
            await connection.disconnect(nowait=True)
            await self._pool.release(connection)

    async def _read(self) -> None:
        """Read until the connection fails. A half-open one is silent for ever, hence the probe."""
        probing = False
        while not self._stopping:
            reply = await self._connection.read_response(timeout=PROBE_SECONDS)
            if reply is not None:
                probing = False
                if reply[0] == b"message":
                    self._deliver(reply[2])
            elif probing:
                raise RedisConnectionError("the server is silent")
            else:
                await self._connection.send_command("PING", check_health=False)
                probing = True

    def _deliver(self, payload: bytes) -> None:
        try:
            for message in unpack_live(open_payload(payload, self._channel, self._seals.keys)):
                self._hand_over(message)
        except ForgedPayload:
            self._on_forged()
        except MessageFormatError:
            return

    def _hand_over(self, message: Live) -> None:
        try:
            self._sink(message)
        except Exception as fault:
            # Only the kind of fault: its text may hold what a worker said.
            log.warning(
                "A subscriber of the step queue failed with %s; the message is lost to it.", type(fault).__name__
            )


def seal_payload(payload: bytes, channel: str, key: bytes) -> bytes:
    """Return the payload with a code that only who has the key (at most 64 bytes) can make; as it is without a key."""
    if key:
        return _code(payload, channel, key) + payload
    return payload


def open_payload(data: bytes, channel: str, keys: Sequence[bytes]) -> bytes:
    """Return the payload; raises `ForgedPayload`. A replayed payload is accepted again, so subscribers must tolerate
    repetition."""
    if not keys:
        return data
    payload = data[SEAL:]
    if not any(hmac.compare_digest(data[:SEAL], _code(payload, channel, key)) for key in keys):
        raise ForgedPayload("not sealed with a key of ours")
    return payload


def _code(payload: bytes, channel: str, key: bytes) -> bytes:
    return hashlib.blake2b(channel.encode() + b"\0" + payload, digest_size=SEAL, key=key).digest()


def pack_live(messages: Sequence[Live]) -> list[bytes]:
    """Return payloads of at most `BATCH` messages in their order, without those that cannot be encoded.

    Text with lone surrogates cannot be UTF-8. Whoever misses such a message finds its content in the journal.
    """
    payloads: list[bytes] = []
    for start in range(0, len(messages), BATCH):
        part = [_row(message) for message in messages[start : start + BATCH]]
        try:
            payloads.append(orjson.dumps(part, default=_plain))
        except orjson.JSONEncodeError:
            good = [row for row in part if _is_encodable(row)]
            payloads.append(orjson.dumps(good, default=_plain))
    return payloads


def unpack_live(data: bytes) -> Iterator[Live]:
    """Yield the messages of one payload, in order. Raises `MessageFormatError` at the first bad one; those before it
    are good."""
    rows = _parse(data)
    if not isinstance(rows, list):
        raise MessageFormatError("not a batch of messages")
    return map(_message, rows)


def _row(message: Live) -> list[Any]:
    match message:
        case Delta():
            row = ["d", message.run, message.step, message.call, message.offset, message.text]
            if not message.calls:
                if message.logprobs:
                    return [*row, message.logprobs]
                return row
            calls = [[call.index, call.id, call.name, call.arguments] for call in message.calls]
            return [*row, message.logprobs, message.since, calls]
        case CommittedEvents():
            events = [[event.seq, event.kind, event.at, event.body] for event in message.events]
            return ["c", message.run, events, message.contents, message.engine, message.epoch]
        case Stop():
            return ["s", message.run, message.step]
        case ListenRequest():
            row = ["l", message.run, message.address]
            if message.call:
                return [*row, message.call, message.chars, message.calls]
            return row
        case EngineChange():
            return ["a", message.run, message.address]
        case _:
            assert_never(message)


def _message(row: Any) -> Live:
    match row:
        case ["d", str(run), int(step), str(call), int(offset), str(text)]:
            return Delta(run, step, call, offset, text)
        case ["d", str(run), int(step), str(call), int(offset), str(text), list(logprobs)]:
            return Delta(run, step, call, offset, text, tuple(logprobs))
        case ["d", str(run), int(step), str(call), int(offset), str(text), list(logprobs), int(since), list(calls)]:
            return Delta(run, step, call, offset, text, tuple(logprobs), since, tuple(map(_tool_delta, calls)))
        case ["c", str(run), list(events), list(contents), str(engine), int(epoch)]:
            return CommittedEvents(run, _events(run, events), tuple(map(_text, contents)), engine, epoch)
        case ["s", str(run), (int() | None) as step]:
            return Stop(run, step)
        case ["l", str(run), str(address)]:
            return ListenRequest(run, address)
        case ["l", str(run), str(address), str(call), int(chars), int(calls)]:
            return ListenRequest(run, address, call, chars, calls)
        case ["a", str(run), str(address)]:
            return EngineChange(run, address)
        case _:
            raise MessageFormatError("not a live message")


def _tool_delta(row: Any) -> ToolDelta:
    match row:
        case [int(index), str(id_), str(name), str(arguments)]:
            return ToolDelta(index, id_, name, arguments)
        case _:
            raise MessageFormatError("not a tool call")


def _text(row: Any) -> tuple[str, str]:
    match row:
        case [str(ref), str(text)]:
            return ref, text
        case _:
            raise MessageFormatError("not a text with its ref")


def _events(run: str, rows: Sequence[Any]) -> tuple[Event, ...]:
    events = []
    for row in rows:
        match row:
            case [int(seq), str(kind), (int() | float()) as at, dict(body)] if kind in KINDS:
                events.append(Event(run, seq, Kind(kind), float(at), body))
            case _:
                raise MessageFormatError("not an event")
    return tuple(events)


def _parse(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as fault:
        raise MessageFormatError("not JSON") from fault


def _plain(value: object) -> object:
    """Encode a value of a type that orjson does not support: an event's body may be any mapping, with sets and tuples
    inside."""
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, frozenset | set):
        return sorted(value)
    raise TypeError(f"{type(value).__name__} does not go over the wire")


def _is_encodable(row: list[Any]) -> bool:
    try:
        orjson.dumps(row, default=_plain)
    except orjson.JSONEncodeError:
        return False
    return True
