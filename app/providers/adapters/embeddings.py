"""OpenAI's embeddings, and the many servers that speak it (vLLM, Text Embeddings Inference, Ollama, ...).

Source: `POST /embeddings` of the openai-openapi 2.3.0 description. A request is one text, the last message's; the reply
is one vector, which is given on as the JSON of its sketch (`rating/features.py`): so many numbers as the journal can
keep of each run. All else that a request may ask for has no place here, and nothing is streamed.

Options: `dimensions`, how many numbers a vector has (a reply with another number is malformed: it would be features of
another kind); `shortens` (`true` for models that can be asked to give so many, as OpenAI's third generation).
"""

import math
from collections.abc import AsyncIterator, Mapping
from typing import Any

import orjson

from app.core.message.chat import End, Piece, TextDelta
from app.core.pool.catalog import Deadlines, ProviderSpec
from app.core.rating.features import sketch_embedding
from app.errors import WorkerTruncated
from app.providers import options
from app.providers.authentication import key_headers
from app.providers.document import label, object_or_empty, parse, rows, usage
from app.providers.faults import error_in_reply, malformed_reply
from app.providers.http import Endpoint, ProviderRequest, exchange
from app.providers.protocol import Request

DIGITS = 5


class EmbeddingsProvider:
    """One endpoint for embeddings."""

    def __init__(self, spec: ProviderSpec, key: str | None, proxy_credentials: str | None = None) -> None:
        """Open nothing yet; raises ConfigInvalid."""
        options.check(spec)
        secrets = key_headers(spec, key, "authorization", "Bearer ")
        self._endpoint = Endpoint(spec, spec.base_url, {}, secrets, proxy_credentials)
        self._spec = spec
        self._dimensions = int(spec.options["dimensions"])
        self.unsupported: frozenset[str] = frozenset()

    def render(self, request: Request) -> bytes:
        """See `protocol.py`."""
        body: dict[str, Any] = {
            "model": request.worker.model,
            "input": request.messages[-1].text,
            "encoding_format": "float",
        }
        if self._spec.options.get("shortens") == "true":
            body["dimensions"] = self._dimensions
        return orjson.dumps(body)

    async def stream(self, request: Request, body: bytes, deadlines: Deadlines) -> AsyncIterator[list[Piece]]:
        """See `protocol.py`."""
        sender = f"{request.worker.name} at {self._spec.name}"
        provider_request = ProviderRequest(
            "/embeddings", body, deadlines, sender, streams=False, headers=request.headers
        )
        async for pieces in exchange(self._endpoint, provider_request, Vector(self._dimensions, sender)):
            yield pieces

    async def close(self) -> None:
        """Close all connections."""
        await self._endpoint.close()


class Vector:
    """One reply."""

    def __init__(self, dimensions: int, sender: str) -> None:
        self._dimensions = dimensions
        self._sender = sender
        self._end: End | None = None

    @property
    def done(self) -> bool:
        """See `http.ReplyReader`."""
        return self._end is not None

    @property
    def complete(self) -> bool:
        """See `http.ReplyReader`."""
        return self.done

    def event(self, data: bytes, pieces: list[Piece]) -> None:
        """Raise WorkerMalformed: nothing is streamed in this format."""
        raise malformed_reply(self._sender, "a stream in place of a vector")

    def read_whole(self, body: bytes, pieces: list[Piece]) -> None:
        """Parse the reply."""
        document = parse(body, self._sender)
        if document.get("error") is not None:
            raise error_in_reply(self._sender, document)
        vectors = rows(document.get("data"), self._sender)
        if len(vectors) != 1:
            raise malformed_reply(self._sender, f"{len(vectors)} vectors for one text")
        pieces.append(TextDelta(orjson.dumps(self._sketch(vectors[0].get("embedding"))).decode()))
        counts = object_or_empty(document.get("usage"), self._sender)
        self._end = End("stop", usage(counts.get("prompt_tokens"), 0), label(document.get("model")))

    def _sketch(self, vector: object) -> list[float]:
        if not isinstance(vector, list) or len(vector) != self._dimensions:
            raise malformed_reply(self._sender, "a vector of another size")
        if not all(type(number) in (int, float) and math.isfinite(number) for number in vector):
            raise malformed_reply(self._sender, "a vector whose entries are not numbers")
        try:
            return [round(number, DIGITS) for number in sketch_embedding(vector)]
        except (ValueError, OverflowError):
            raise malformed_reply(self._sender, "a vector without length") from None

    def end(self) -> End:
        """See `http.ReplyReader`."""
        if self._end is None:
            raise WorkerTruncated()
        return self._end

    def keepsake(self) -> Mapping[str, Any]:
        """Return nothing: this format has no tool calls."""
        return {}
