"""Identifiers of a run in other systems: its place in a distributed trace, and the ids of its replies.

A place in a trace is written as W3C Trace Context writes it, in two headers. Replies have ids in every wire format;
each contains its run's id, so that a run is found by each of them.
"""

import re
from collections.abc import Mapping
from typing import Any, Final

from msgspec import Struct

PARENT: Final = re.compile("[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
STATE: Final = re.compile("[ -~]{0,512}")


class Trace(Struct, frozen=True):
    """A span, as those who continue its trace refer to it. Both headers are empty where there is no trace."""

    parent: str = ""
    """The header `traceparent`: version, trace, span and flags."""
    state: str = ""
    """The header `tracestate`."""

    def __bool__(self) -> bool:
        return bool(self.parent)

    @property
    def id(self) -> str:
        """Return the trace's id, 32 hexadecimal digits; empty where there is no trace."""
        return self.parent[3:35]

    def headers(self) -> dict[str, str]:
        """Return the headers that continue the trace elsewhere; none where there is no trace."""
        headers = {"traceparent": self.parent, "tracestate": self.state}
        return {name: value for name, value in headers.items() if value}


NO_TRACE = Trace()


def read_trace(parent: str, state: str) -> Trace:
    """Return the trace of these headers from a source that is not trusted; none if they have not the form of the
    standard."""
    if not PARENT.fullmatch(parent):
        return NO_TRACE
    if not STATE.fullmatch(state):
        return Trace(parent)
    return Trace(parent, state)


def trace_of_turn(first: Trace, later: Trace) -> Trace:
    """Return the span below which a turn continues its run's trace, of the spans of the run's first request and of the
    turn's: that of the turn, unless it belongs to another trace."""
    if first and first.id != later.id:
        return first
    return later


# -- ids of replies

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


def format_reply_id(wire_format: str, run: str, turn: int) -> str:
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
    return format_reply_id(wire_format, run, turn)


def run_of_reply(name: str) -> str:
    """Return the run's id in a reply's id; anything else as it is."""
    reply = REPLY_ID.fullmatch(name)
    return reply[1] if reply else name
