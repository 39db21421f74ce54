"""The names and addresses of providers in spans."""

from typing import Any

import pytest

from app.core.pool.catalog import EndpointSpec, ProviderSpec
from app.network.tracing import address, provider_name

OPENAI = "https://api.openai.com/v1"


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ({"base_url": OPENAI}, "openai"),
        ({"base_url": "https://api.anthropic.com", "format": "anthropic"}, "anthropic"),
        ({"base_url": "https://api.mistral.ai/v1"}, "mistral_ai"),
        ({"base_url": "https://r.openai.azure.com/openai/v1", "auth": "azure"}, "azure.ai.openai"),
        ({"base_url": "https://bedrock-runtime.eu-west-1.amazonaws.com", "auth": "aws"}, "aws.bedrock"),
        ({"base_url": "https://aiplatform.googleapis.com", "auth": "google"}, "gcp.vertex_ai"),
        ({"base_url": "http://vllm:8000/v1"}, "house"),
        ({"base_url": "", "format": "rehearsal"}, "house"),
    ],
)
def test_a_provider_has_the_name_of_the_conventions_or_that_of_the_pool_file(spec: dict[str, Any], name: str) -> None:
    assert provider_name(ProviderSpec(**{"name": "house", "format": "openai"} | spec)) == name


def test_the_address_is_that_of_the_endpoint_that_is_called() -> None:
    endpoints = (EndpointSpec("east", "http://10.0.0.1:8000/v1"), EndpointSpec("west", OPENAI))
    several = ProviderSpec("house", "openai", endpoints=endpoints)
    assert address(several, "east") == {"server.address": "10.0.0.1", "server.port": 8000}
    assert address(several, "west") == {"server.address": "api.openai.com", "server.port": 443}
    assert address(ProviderSpec("house", "rehearsal"), "") == {}
