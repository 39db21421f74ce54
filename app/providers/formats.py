"""The adapter of each wire format, by the name of the format in the pool file."""

from collections.abc import Mapping

from app.core.pool.catalog import ProviderSpec
from app.providers.anthropic import AnthropicProvider
from app.providers.embeddings import EmbeddingsProvider
from app.providers.gemini import GeminiProvider
from app.providers.openai import OpenAIProvider
from app.providers.rehearsal.provider import RehearsalProvider
from app.providers.responses import ResponsesProvider

Adapter = (
    OpenAIProvider | ResponsesProvider | AnthropicProvider | GeminiProvider | RehearsalProvider | EmbeddingsProvider
)
ADAPTERS: Mapping[str, type[Adapter]] = {
    "openai": OpenAIProvider,
    "responses": ResponsesProvider,
    "anthropic": AnthropicProvider,
    "gemini": GeminiProvider,
    "rehearsal": RehearsalProvider,
    "embeddings": EmbeddingsProvider,
}


def adapter(spec: ProviderSpec, key: str | None = None, proxy_credentials: str | None = None) -> Adapter:
    """Return the adapter for an endpoint; without its key it renders requests all the same. Raises `ConfigInvalid`."""
    return ADAPTERS[spec.format](spec, key, proxy_credentials)
