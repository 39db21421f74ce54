"""The wire formats as one table, and what their conformance tests share."""

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

from msgspec.structs import replace

from app.core.message.chat import ChosenToken, End, Message, Piece, Sampling, Text, TextDelta
from app.core.pool.catalog import Deadlines, ProviderSpec, Worker
from app.providers.adapters.anthropic import AnthropicProvider, Reply
from app.providers.adapters.gemini import Candidate, GeminiProvider
from app.providers.adapters.openai import Completion, OpenAIProvider
from app.providers.adapters.responses import Response, ResponsesProvider
from app.providers.http import ReplyReader
from app.providers.protocol import Request
from tests.harness.waiting import PATIENCE_SECONDS
from tests.stubs import KEYS, ProviderStub

PATIENT = Deadlines(connect=PATIENCE_SECONDS, first=PATIENCE_SECONDS, gap=PATIENCE_SECONDS, total=PATIENCE_SECONDS)
"""Longer than a crowded machine stands still."""
HURRIED = Deadlines(connect=0.2, first=0.2, gap=0.2, total=10)
QUESTION = "the-question-canary"

Adapter = OpenAIProvider | ResponsesProvider | AnthropicProvider | GeminiProvider


@dataclass(frozen=True)
class Format:
    """One wire format: its adapter and its reader."""

    name: Any
    adapter: Callable[[ProviderSpec, str | None], Adapter]
    reading: Callable[[str], ReplyReader]
    path: str
    """Where it streams, below its base URL."""

    def spec(self, stub: ProviderStub, **changes: Any) -> ProviderSpec:
        """The stub as an endpoint of this format."""
        return replace(ProviderSpec("stub", self.name, getattr(stub, f"{self.name}_url")), **changes)

    @property
    def key(self) -> str:
        """Return the key that the stub accepts."""
        return KEYS[self.name]


FORMATS = {
    each.name: each
    for each in (
        Format("openai", OpenAIProvider, Completion, "/chat/completions"),
        Format("responses", ResponsesProvider, Response, "/responses"),
        Format("anthropic", AnthropicProvider, Reply, "/v1/messages"),
        Format("gemini", GeminiProvider, Candidate, "/models/model-a:streamGenerateContent?alt=sse"),
    )
}


@dataclass(frozen=True)
class Line:
    """One adapter connected to the stub."""

    format: Format
    stub: ProviderStub
    adapter: Adapter

    def stream(self, request: Request, deadlines: Deadlines = PATIENT) -> AsyncIterator[list[Piece]]:
        """The request as rendered, on the wire."""
        return self.adapter.stream(request, self.adapter.render(request), deadlines)

    async def pieces(self, request: Request, deadlines: Deadlines = PATIENT) -> list[Piece]:
        """All of the answer; raises what the stream raises."""
        return [piece async for batch in self.stream(request, deadlines) for piece in batch]


@asynccontextmanager
async def connected(form: Format, stub: ProviderStub, *, key: str | None = None, **changes: Any) -> AsyncIterator[Line]:
    """An adapter of that format on the stub, closed at the end."""
    adapter = form.adapter(form.spec(stub, **changes), key or form.key)
    try:
        yield Line(form, stub, adapter)
    finally:
        await adapter.close()


def request(*messages: Message, model: str = "model-a", **changes: Any) -> Request:
    """A short question to a worker named w."""
    conversation = messages or (Message("user", (Text(QUESTION),)),)
    return replace(Request(Worker("w", "stub", model), conversation, Sampling(max_tokens=64)), **changes)


def text_of_pieces(pieces: list[Piece]) -> str:
    """The answer's text."""
    return "".join(piece.text for piece in pieces if isinstance(piece, TextDelta))


def ending(pieces: list[Piece]) -> End:
    """The one End, which must be the last piece."""
    ends = [piece for piece in pieces if isinstance(piece, End)]
    assert len(ends) == 1
    assert pieces[-1] is ends[0]
    return ends[0]


def list_chosen_tokens(pieces: list[Piece]) -> list[ChosenToken]:
    """The decoded tokens."""
    return [piece for piece in pieces if isinstance(piece, ChosenToken)]
