"""A conversation as Anthropic and Gemini take it: instructions apart, then alternating turns, the user's first.

Both refuse empty text and know two roles. Nothing is added to a conversation that already fits. A message's `name` has
no place in either format and is left out.
"""

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from urllib.parse import unquote_to_bytes

from app.core.chat import Image, Message, Part, Text

OPENING = Text("Continue.")
"""Stands in for the user where a conversation begins with the assistant, or holds nothing but instructions."""


@dataclass(frozen=True, slots=True)
class Turns:
    """`instructions` are the texts of system and developer messages, in order; turns are (from the user?, parts)."""

    instructions: tuple[str, ...]
    turns: tuple[tuple[bool, tuple[Part, ...]], ...]


def turns(messages: Sequence[Message]) -> Turns:
    """Split and merge; the order of what remains is kept."""
    instructions: list[str] = []
    merged: list[tuple[bool, tuple[Part, ...]]] = []
    for message in messages:
        parts = tuple(part for part in message.parts if not isinstance(part, Text) or part.text)
        if message.role in ("system", "developer"):
            instructions.extend(part.text for part in parts if isinstance(part, Text))
            continue
        mine = message.role != "assistant"
        if merged and merged[-1][0] == mine:
            merged[-1] = (mine, merged[-1][1] + parts)
        elif parts:
            merged.append((mine, parts))
    if not merged or not merged[0][0]:
        merged.insert(0, (True, (OPENING,)))
    return Turns(tuple(instructions), tuple(merged))


def inline(image: Image) -> tuple[str, str] | None:
    """(media type, base64) of a `data:` URL; None for a reference."""
    if not image.url.startswith("data:"):
        return None
    head, _, data = image.url[5:].partition(",")
    media, *flags = head.split(";")
    if "base64" not in flags:
        data = base64.b64encode(unquote_to_bytes(data)).decode()
    return media or "text/plain", data
