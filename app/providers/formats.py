"""The adapter of each wire format, by the name of the format in the pool file."""

from collections.abc import Callable, Mapping
from types import MappingProxyType

from msgspec.structs import replace

from app.core.pool.catalog import ProviderSpec
from app.core.pool.wire_formats import WireFormat
from app.providers.adapters.anthropic import AnthropicProvider
from app.providers.adapters.embeddings import EmbeddingsProvider
from app.providers.adapters.gemini import GeminiProvider
from app.providers.adapters.openai import OpenAIProvider
from app.providers.adapters.responses import ResponsesProvider
from app.providers.endpoints import Endpoints
from app.providers.protocol import ClosableProvider
from app.providers.rehearsal.provider import RehearsalProvider

NO_KEYS: Mapping[str, str] = MappingProxyType({})
ADAPTERS: Mapping[WireFormat, Callable[[ProviderSpec, str | None, str | None], ClosableProvider]] = {
    "openai": OpenAIProvider,
    "responses": ResponsesProvider,
    "anthropic": AnthropicProvider,
    "gemini": GeminiProvider,
    "rehearsal": RehearsalProvider,
    "embeddings": EmbeddingsProvider,
}
"""Each is made of a provider's entry in the pool file, its key, and the credentials of its proxy."""


def adapter(
    spec: ProviderSpec,
    key: str | None = None,
    proxy_credentials: str | None = None,
    keys: Mapping[str, str] = NO_KEYS,
) -> ClosableProvider:
    """Return the adapter of a provider; without its key it renders requests all the same. Raises `ConfigInvalid`.

    `keys` are those of endpoints that have keys of their own, by the endpoint's name.
    """
    make = ADAPTERS[spec.format]
    if not spec.endpoints:
        return make(spec, key, proxy_credentials)
    adapters = []
    for endpoint in spec.endpoints:
        single = replace(spec, base_url=endpoint.base_url, endpoints=())
        adapters.append((endpoint, make(single, keys.get(endpoint.name, key), proxy_credentials)))
    return Endpoints(adapters)
