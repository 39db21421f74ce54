"""The protocol of providers: a wire format plus an authenticated endpoint, in two verbs.

`render` is pure: it gives the exact bytes that would be sent, so that their hash can be journaled before the socket is
opened. `stream` sends those bytes once and yields what comes back. An adapter

* retries nothing: one call of `stream` is at most one request on the wire (D4);
* ends with exactly one `End`, always last, or raises a `WorkerError`; a stream without the format's terminal marker is
  `WorkerTruncated`, never success; an error event inside a 200 stream is the error that it names;
* yields batches: all pieces that one network read completed, so that a busy relay coalesces by itself;
* numbers a turn's tool calls from 0 as they begin, and yields a `Keepsake` before `End` for a turn with calls, if the
  provider wants data of it back; it sends that only with messages that carry it;
* reports `End.usage=None` when the provider said nothing, and never guesses;
* keeps every deadline in `Deadlines` and closes the connection when its consumer stops or is cancelled;
* attaches its key to its own origin only, follows no redirects, and never lets a key or a body into an error message.
"""

from collections.abc import AsyncIterator, Mapping
from typing import Protocol

from msgspec import Struct

from app.core.message.chat import NO_TOOLS, Form, Message, Piece, Sampling, Toolbox
from app.core.pool.catalog import Deadlines, Worker


class Request(Struct, frozen=True):
    """One call. `sampling.max_tokens` is always set. `form` asks for JSON of that form, where the server can."""

    worker: Worker
    messages: tuple[Message, ...]
    sampling: Sampling
    form: Form | None = None
    logprobs: int | None = None
    """The number of likeliest tokens to request with each token's log-probability; None requests neither."""
    toolbox: Toolbox = NO_TOOLS
    live: bool = True
    """True if the pieces are wanted as they come: by somebody who follows, or to see that the worker is not silent. If
    not, the adapter asks for one whole reply, which costs a fraction of a stream's CPU; it passes through the same code
    and gives the same pieces, in one batch."""
    headers: Mapping[str, str] = {}
    """Headers to send besides the adapter's own: those of the trace."""


class Provider(Protocol):
    """One authenticated endpoint."""

    @property
    def unsupported(self) -> frozenset[str]:
        """Names of `Sampling` fields that are left out of its requests, in addition to the worker's `drops`.

        Each call's intent lists what it lost."""
        ...

    def render(self, request: Request) -> bytes:
        """Return the exact request body; deterministic, so that an auditor can render it again and compare hashes."""
        ...

    def stream(self, request: Request, body: bytes, deadlines: Deadlines) -> AsyncIterator[list[Piece]]:
        """Send `body` and yield what comes back; see the module docstring for what is promised."""
        ...


class ClosableProvider(Provider, Protocol):
    """A provider with the connections that it holds open."""

    async def close(self) -> None:
        """Close them; calls that still run end with an error."""
        ...
