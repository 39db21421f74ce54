"""Tickets and live messages as bytes, for queues that leave the process.

Arrays with a tag in front instead of objects: deltas are the bulk of the traffic, and their field names would outweigh
their text. What comes in is not believed: Redis may hold what another version, or somebody else, has written.
"""

import hashlib
import hmac
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final, assert_never

import orjson

from app.core.message.chat import ToolDelta
from app.core.run.events import Event, Kind
from app.stepqueue.protocol import Adopted, Committed, Delta, Listen, Live, Stop, Ticket

BATCH: Final = 256
"""Messages in one payload: enough to make the rest of a publish cheap, too few to hold up a hearer's event loop."""

SEAL: Final = 16
"""Bytes of the code in front of a sealed payload."""

KINDS: Final = frozenset(kind.value for kind in Kind)


class Undecodable(ValueError):
    """Bytes that are no ticket or no batch of messages. Stays inside the queue, which drops and counts them."""


class Forged(Undecodable):
    """A payload that nobody who has the key wrote to this channel."""


def sealed(payload: bytes, channel: str, key: bytes) -> bytes:
    """The payload with a code that only who has the key (at most 64 bytes) can make; as it is without a key."""
    return _code(payload, channel, key) + payload if key else payload


def unsealed(data: bytes, channel: str, key: bytes) -> bytes:
    """The payload; raises `Forged`. A replayed payload is accepted again, so subscribers must tolerate repetition."""
    if not key:
        return data
    payload = data[SEAL:]
    if not hmac.compare_digest(data[:SEAL], _code(payload, channel, key)):
        raise Forged("not sealed with our key")
    return payload


def _code(payload: bytes, channel: str, key: bytes) -> bytes:
    return hashlib.blake2b(channel.encode() + b"\0" + payload, digest_size=SEAL, key=key).digest()


def pack_ticket(ticket: Ticket) -> bytes:
    """All fields but the receipt, which the queue gives at delivery."""
    return orjson.dumps([ticket.run, ticket.step, ticket.tier, ticket.driver, ticket.seq, ticket.version])


def unpack_ticket(data: bytes, receipt: str) -> Ticket:
    """The ticket with its receipt; raises `Undecodable`."""
    match _parsed(data):
        case [str(run), int(step), str(tier), str(driver), int(seq), int(version)]:
            return Ticket(run, step, tier, driver, seq, version, receipt)
        case _:
            raise Undecodable("not a ticket")


def pack_live(messages: Sequence[Live]) -> tuple[list[bytes], int]:
    """Payloads of at most `BATCH` messages in their order, and how many could not be encoded and were left out.

    Text with lone surrogates cannot be UTF-8. Whoever misses such a message finds its content in the journal.
    """
    payloads: list[bytes] = []
    refused = 0
    for start in range(0, len(messages), BATCH):
        part = [_row(message) for message in messages[start : start + BATCH]]
        try:
            payloads.append(orjson.dumps(part, default=_plain))
        except orjson.JSONEncodeError:
            good = [row for row in part if _is_encodable(row)]
            refused += len(part) - len(good)
            payloads.append(orjson.dumps(good, default=_plain))
    return payloads, refused


def unpack_live(data: bytes) -> Iterator[Live]:
    """The messages of one payload, in order. Raises `Undecodable` at the first bad one; those before it are good."""
    rows = _parsed(data)
    if not isinstance(rows, list):
        raise Undecodable("not a batch of messages")
    return map(_message, rows)


def _row(message: Live) -> list[Any]:
    match message:
        case Delta():
            row = ["d", message.run, message.step, message.call, message.offset, message.text]
            if not message.calls:
                return [*row, message.logprobs] if message.logprobs else row
            calls = [[call.index, call.id, call.name, call.arguments] for call in message.calls]
            return [*row, message.logprobs, message.since, calls]
        case Committed():
            events = [[event.seq, event.kind, event.at, event.body] for event in message.events]
            return ["c", message.run, events, message.contents, message.engine, message.epoch]
        case Stop():
            return ["s", message.run, message.step]
        case Listen():
            return ["l", message.run, message.address]
        case Adopted():
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
            facts = tuple(_event(run, event) for event in events)
            return Committed(run, facts, tuple(map(_text, contents)), engine, epoch)
        case ["s", str(run), (int() | None) as step]:
            return Stop(run, step)
        case ["l", str(run), str(address)]:
            return Listen(run, address)
        case ["a", str(run), str(address)]:
            return Adopted(run, address)
        case _:
            raise Undecodable("not a live message")


def _tool_delta(row: Any) -> ToolDelta:
    match row:
        case [int(index), str(id_), str(name), str(arguments)]:
            return ToolDelta(index, id_, name, arguments)
        case _:
            raise Undecodable("not a tool call")


def _text(row: Any) -> tuple[str, str]:
    match row:
        case [str(ref), str(text)]:
            return ref, text
        case _:
            raise Undecodable("not a text with its ref")


def _event(run: str, row: Any) -> Event:
    match row:
        case [int(seq), str(kind), (int() | float()) as at, dict(body)] if kind in KINDS:
            return Event(run, seq, Kind(kind), float(at), body)
        case _:
            raise Undecodable("not an event")


def _parsed(data: bytes) -> Any:
    try:
        return orjson.loads(data)
    except orjson.JSONDecodeError as fault:
        raise Undecodable("not JSON") from fault


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
