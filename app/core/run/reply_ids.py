"""Ids of replies in every wire format. Each contains its run's id, so that a run is found by each of them."""

import re
from collections.abc import Mapping
from typing import Any, Final

PREFIXES: Final[Mapping[str, tuple[str, str]]] = {
    "chat": ("chatcmpl-", "-"),
    "completions": ("cmpl-", "-"),
    "responses": ("resp_", "_"),
    "compaction": ("resp_", "_"),
    "messages": ("msg_", "_"),
    "plan": ("plan_", "_"),
}
"""By wire format: the beginning of an id, and what stands between the run and the number of a later turn."""
REPLY_ID: Final = re.compile(r"(?:chatcmpl-|cmpl-|msg_|resp_|plan_)?(run_[0-9a-z]+)(?:[-_]\d+)?")


def formatted(wire_format: str, run: str, turn: int) -> str:
    """Return the id of a turn's reply in one of `PREFIXES`. Of the replies of one run, each has its own."""
    prefix, mark = PREFIXES[wire_format]
    if turn:
        return f"{prefix}{run}{mark}{turn}"
    return f"{prefix}{run}"


def reply_id(wire: Mapping[str, Any], run: str, turn: int) -> str | None:
    """Return the id of a turn's reply in the format of its request (`wire`); None where that has no format."""
    wire_format = wire.get("format", "")
    if wire_format not in PREFIXES:
        return None
    return formatted(wire_format, run, turn)


def run_of_reply(name: str) -> str:
    """Return the run's id in a reply's id; anything else as it is."""
    reply = REPLY_ID.fullmatch(name)
    return reply[1] if reply else name
