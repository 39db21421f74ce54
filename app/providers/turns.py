"""A conversation in the shape that Anthropic and Gemini need: instructions apart, then alternating turns.

The user's turn is the first. Both refuse empty text and know two roles; results of tools come from the user, in the
order of their calls. Nothing is added to a conversation that already fits. A message's `name` has no place in either
format and is left out.
"""

import base64
from collections.abc import Mapping, Sequence
from typing import Any
from urllib.parse import unquote_to_bytes

from msgspec import Struct

from app.core.message.chat import Document, Image, Message, Part, Text, ToolCall

OPENING = Text("Continue.")
"""The user's turn where a conversation begins with the assistant, or holds nothing but instructions; and where it ends
with the assistant, whom a model does not continue."""


class ProviderData(Struct, frozen=True):
    """Data that the provider wants back with the assistant's message that follows."""

    data: Mapping[str, Any]


class PlacedCall(Struct, frozen=True):
    """A tool call, the `place`-th of its message."""

    call: ToolCall
    place: int
    keepsake: Mapping[str, Any]


class Result(Struct, frozen=True):
    """The result of a tool call."""

    called: PlacedCall
    parts: tuple[Part, ...]
    failed: bool


TurnPart = Part | ProviderData | PlacedCall | Result


class Turns(Struct, frozen=True):
    """`instructions` are the texts of system and developer messages, in order. Each turn says whether it is the user's,
    and has its parts."""

    instructions: tuple[str, ...]
    turns: tuple[tuple[bool, tuple[TurnPart, ...]], ...]


def turns(messages: Sequence[Message]) -> Turns:
    """Split the instructions off and merge neighbouring messages of one role; the order is preserved."""
    instructions: list[str] = []
    merged: list[tuple[bool, tuple[TurnPart, ...]]] = []
    calls_by_id: dict[str, PlacedCall] = {}
    for message in messages:
        if message.role in ("system", "developer"):
            instructions += [part.text for part in _non_empty(message) if isinstance(part, Text)]
            continue
        parts = _parts(message, calls_by_id)
        is_user = message.role != "assistant"
        if merged and merged[-1][0] == is_user:
            merged[-1] = (is_user, merged[-1][1] + parts)
        elif parts:
            merged.append((is_user, parts))
    if not merged or not merged[0][0]:
        merged.insert(0, (True, (OPENING,)))
    return Turns(tuple(instructions), tuple(merged))


def _non_empty(message: Message) -> tuple[Part, ...]:
    """Return the parts of a message without empty texts."""
    return tuple(part for part in message.parts if not isinstance(part, Text) or part.text)


def _parts(message: Message, calls_by_id: dict[str, PlacedCall]) -> tuple[TurnPart, ...]:
    """Return the parts of a message. `calls_by_id` are the calls so far; a result that belongs to none is plain
    text."""
    if message.call_id in calls_by_id:
        return (Result(calls_by_id[message.call_id], _non_empty(message), message.failed),)
    keepsake = message.keepsake or {}
    parts: list[TurnPart] = []
    if keepsake:
        parts.append(ProviderData(keepsake))
    parts += _non_empty(message)
    for place, call in enumerate(message.calls):
        called = PlacedCall(call, place, keepsake)
        calls_by_id[call.id] = called
        parts.append(called)
    return tuple(parts)


def inline(part: Image | Document) -> tuple[str, str] | None:
    """Return (media type, base64) of a `data:` URL; None for a reference."""
    if not part.url.startswith("data:"):
        return None
    head, _, data = part.url[5:].partition(",")
    media, *flags = head.split(";")
    if "base64" not in flags:
        data = base64.b64encode(unquote_to_bytes(data)).decode()
    return media or "text/plain", data
