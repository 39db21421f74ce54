"""The base of the stub's wire formats: rules, frames, document and errors."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from msgspec import Struct

from .record import ReceivedRequest
from .script import Reply


class Frame(Struct, frozen=True):
    """One server-sent event. `kind`: preamble, content, finishing, or the terminal event."""

    kind: Literal["open", "delta", "close", "end"]
    data: str
    event: str | None = None


@dataclass(eq=False)
class ProviderRefusal(Exception):
    """The provider refuses the request. The code and the parameter are those of formats that have them."""

    status: int
    message: str
    code: str | None = None
    param: str | None = None
    details: list[dict[str, Any]] = field(default_factory=list)


class Wire(Protocol):
    """One provider's format. All methods are pure."""

    @property
    def name(self) -> str:
        """The name of the format."""

    @property
    def newline(self) -> str:
        """The characters that end a line of an event."""

    @property
    def stream_headers(self) -> dict[str, str]:
        """The headers of a streamed answer."""

    def accept(self, received: ReceivedRequest) -> None:
        """Check the request and fill in `model` and `streaming`. Raises `ProviderRefusal` as the real API refuses."""

    def frames(self, received: ReceivedRequest, reply: Reply) -> Iterator[Frame]:
        """Return the event stream of that reply, without its faults."""

    def document(self, received: ReceivedRequest, reply: Reply) -> dict[str, Any]:
        """Return the non-streaming answer."""

    def error(self, refused: ProviderRefusal) -> dict[str, Any]:
        """Return the body of an error."""

    def error_event(self, refused: ProviderRefusal) -> Frame:
        """Return an error inside a stream, which it ends."""

    def headers(self, status: int) -> dict[str, str]:
        """Return the provider's own headers (request id, rate limits)."""


def encode(frame: Frame, newline: str) -> bytes:
    """Return one event as bytes."""
    event = f"event: {frame.event}{newline}" if frame.event else ""
    return f"{event}data: {frame.data}{newline}{newline}".encode()
