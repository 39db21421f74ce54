"""The adapter of each wire format, by the name of the format in the pool file."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType

from app.core.pool.catalog import ProviderSpec
from app.providers.anthropic import AnthropicProvider
from app.providers.embeddings import EmbeddingsProvider
from app.providers.endpoints import Endpoints
from app.providers.gemini import GeminiProvider
from app.providers.openai import OpenAIProvider
from app.providers.rehearsal.provider import RehearsalProvider
from app.providers.responses import ResponsesProvider

NO_KEYS: Mapping[str, str] = MappingProxyType({})
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


def adapter(
    spec: ProviderSpec,
    key: str | None = None,
    proxy_credentials: str | None = None,
    keys: Mapping[str, str] = NO_KEYS,
) -> Adapter | Endpoints:
    """Return the adapter of a provider; without its key it renders requests all the same. Raises `ConfigInvalid`.

    `keys` are those of endpoints that have keys of their own, by the endpoint's name.
    """
    make = ADAPTERS[spec.format]
    if not spec.endpoints:
        return make(spec, key, proxy_credentials)
    made = []
    for endpoint in spec.endpoints:
        one = replace(spec, base_url=endpoint.base_url, endpoints=())
        made.append((endpoint, make(one, keys.get(endpoint.name, key), proxy_credentials)))
    return Endpoints(made)
