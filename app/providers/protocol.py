"""The provider seam: a wire format plus an authenticated endpoint, in two verbs.

`render` is pure: it gives the exact bytes that would be sent, so that their hash can be journaled before the socket is
opened. `stream` sends those bytes once and yields what comes back. An adapter

* retries nothing: one call of `stream` is at most one request on the wire (D4);
* ends with exactly one `End`, always last, or raises a `WorkerError`; a stream without the format's terminal marker is
  `WorkerTruncated`, never success; an error event inside a 200 stream is the error that it names;
* yields batches: all pieces that one network read completed, so that a busy relay coalesces by itself;
* reports `End.usage=None` when the provider said nothing, and never guesses;
* keeps every deadline in `Deadlines` and closes the connection when its consumer stops or is cancelled;
* attaches its key to its own origin only, follows no redirects, and never lets a key or a body into an error message.
"""

from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from app.core.chat import Message, Piece, Sampling
from app.core.pool import Worker


@dataclass(frozen=True, slots=True)
class Request:
    """One call. `sampling.max_tokens` is always set. `schema` asks for JSON that validates, where the server can."""

    worker: Worker
    messages: tuple[Message, ...]
    sampling: Sampling
    schema: Mapping[str, Any] | None = None
    logprobs: int = 0
    """How many alternatives to ask for beside each token's log-probability; 0 asks for none at all."""
    live: bool = True
    """Whether somebody wants the pieces as they come. If not, the adapter asks for one whole reply, which costs a
    fraction of the work of a stream; it passes through the same code and gives the same pieces, in one batch."""


@dataclass(frozen=True, slots=True)
class Deadlines:
    """Seconds, all derived from the run's deadline: to connect, to the first byte, between reads, and for all of it."""

    connect: float
    first: float
    gap: float
    total: float


class Provider(Protocol):
    """One authenticated endpoint."""

    @property
    def unsupported(self) -> frozenset[str]:
        """Names of `Sampling` fields that are left out of its requests; each call's intent names those it lost."""
        ...

    def render(self, request: Request) -> bytes:
        """The exact request body; deterministic, so that an auditor can render it again and compare hashes."""
        ...

    def stream(self, request: Request, body: bytes, deadlines: Deadlines) -> AsyncIterator[list[Piece]]:
        """Send `body` and yield what comes back; see the module docstring for what is promised."""
        ...
