"""A place in a distributed trace, as W3C Trace Context writes it in two headers."""

import re
from typing import Final

from app.core.records import record

PARENT: Final = re.compile("[0-9a-f]{2}-[0-9a-f]{32}-[0-9a-f]{16}-[0-9a-f]{2}")
STATE: Final = re.compile("[ -~]{0,512}")


@record(frozen=True, slots=True)
class Trace:
    """A span, as those who continue its trace refer to it. Both headers are empty where there is no trace."""

    parent: str = ""
    """The header `traceparent`: version, trace, span and flags."""
    state: str = ""
    """The header `tracestate`."""

    def __bool__(self) -> bool:
        return bool(self.parent)

    @property
    def id(self) -> str:
        """The trace's id, 32 hexadecimal digits; empty where there is no trace."""
        return self.parent[3:35]

    def headers(self) -> dict[str, str]:
        """Return the headers that continue the trace elsewhere; none where there is no trace."""
        found = {"traceparent": self.parent, "tracestate": self.state}
        return {name: value for name, value in found.items() if value}


NO_TRACE = Trace()


def read_trace(parent: str, state: str) -> Trace:
    """Return the trace of these headers from a source that is not trusted; none if they have not the form of the
    standard."""
    if not PARENT.fullmatch(parent):
        return NO_TRACE
    return Trace(parent, state if STATE.fullmatch(state) else "")


def continued(first: Trace, later: Trace) -> Trace:
    """Return the span below which a turn continues its run's trace, of the spans of the run's first request and of the
    turn's: that of the turn, unless it belongs to another trace."""
    if first and first.id != later.id:
        return first
    return later
