"""Proxy, certificate authorities and client certificate of a provider, against real TLS servers and a real proxy."""

import errno
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from socket import gaierror

import aiohttp
import pytest
from aiohttp.client_reqrep import ConnectionKey

from app.core.pool.catalog import ProviderSpec, Route
from app.errors import ConfigInvalid, WorkerUnavailable
from app.network import http_client, tls
from app.providers.adapters.openai import OpenAIProvider
from app.providers.excerpt import excerpt
from app.providers.vllm import Management
from tests.conformance.wire_formats import PATIENT, request, text_of_pieces
from tests.harness.authority import Authority
from tests.harness.forward_proxy import ForwardProxy
from tests.harness.in_process import finish, order, running_service
from tests.stubs import KEYS, ProviderStub

DEAD = "http://127.0.0.1:1"
POOL = """
[providers.far]
format = "openai"
base_url = "{base_url}"
key = "FAR_KEY"
proxy = "{proxy}"
proxy_credentials = "FAR_PROXY"
ca = "{ca}"
client_certificate = "{certificate}"
client_key = "{key}"

[workers.alpha]
provider = "far"
model = "model-a"

[tiers.baton-mini]
pool = ["alpha"]
"""


@asynccontextmanager
async def provider(stub: ProviderStub, route: Route, credentials: str | None = None) -> AsyncIterator[OpenAIProvider]:
    """The adapter of a stub that is reached over this route."""
    spec = ProviderSpec("far", "openai", stub.openai_url, route=route)
    opened = OpenAIProvider(spec, KEYS["openai"], credentials)
    try:
        yield opened
    finally:
        await opened.close()


async def answer(opened: OpenAIProvider) -> str:
    reply = request()
    stream = opened.stream(reply, opened.render(reply), PATIENT)
    return text_of_pieces([piece async for pieces in stream for piece in pieces])


async def test_a_provider_with_a_certificate_authority_of_its_own(authority: Authority) -> None:
    async with ProviderStub(tls=authority.server()) as stub:
        async with provider(stub, Route(ca=authority.ca)) as opened:
            assert await answer(opened) == "Hello there."
        async with provider(stub, Route()) as opened:
            with pytest.raises(WorkerUnavailable, match="certificate verify failed") as refused:
                await answer(opened)
        assert refused.value.failure.excerpt == "TLS: certificate verify failed"


def test_a_certificate_authority_replaces_those_of_the_machine(authority: Authority) -> None:
    assert tls.tls_context(Route(ca=authority.ca)).cert_store_stats()["x509_ca"] == 1
    assert tls.tls_context(Route()) is tls.tls_context(Route(proxy=DEAD))


@pytest.mark.parametrize("one_file", [False, True])
async def test_a_server_that_demands_a_client_certificate(authority: Authority, one_file: bool) -> None:
    certificate, key = authority.client(one_file=one_file)
    async with ProviderStub(tls=authority.server(demands_certificate=True)) as stub:
        route = Route(ca=authority.ca, client_certificate=certificate, client_key=key)
        async with provider(stub, route) as opened:
            assert await answer(opened) == "Hello there."
        async with provider(stub, Route(ca=authority.ca)) as opened:
            with pytest.raises(WorkerUnavailable):
                await answer(opened)
        assert len(stub.requests) == 1


async def test_a_tunnel_through_the_proxy_is_used_again_and_shows_no_key(authority: Authority) -> None:
    async with (
        ProviderStub(tls=authority.server()) as stub,
        ForwardProxy() as proxy,
        provider(stub, Route(proxy=proxy.url, ca=authority.ca)) as opened,
    ):
        assert [await answer(opened) for _ in range(3)] == ["Hello there."] * 3
    assert proxy.requests == [f"CONNECT {stub.openai_url.split('/')[2]}"]
    assert KEYS["openai"].encode() not in proxy.seen


async def test_a_proxy_forwards_what_is_not_encrypted(stub: ProviderStub) -> None:
    async with ForwardProxy() as proxy, provider(stub, Route(proxy=proxy.url)) as opened:
        assert await answer(opened) == "Hello there."
    assert proxy.requests == [f"POST {stub.openai_url}/chat/completions"]


@pytest.mark.parametrize("encrypted", [True, False])
async def test_a_proxy_that_demands_credentials(authority: Authority, encrypted: bool) -> None:
    tls_of_the_stub = authority.server() if encrypted else None
    async with ProviderStub(tls=tls_of_the_stub) as stub, ForwardProxy("baton:s3cret") as proxy:
        route = Route(proxy=proxy.url, ca=authority.ca if encrypted else "")
        async with provider(stub, route, "baton:s3cret") as opened:
            assert await answer(opened) == "Hello there."
        for wrong in ("baton:guess", None):
            async with provider(stub, route, wrong) as opened:
                with pytest.raises(Exception, match="w at far") as caught:
                    await answer(opened)
                assert "guess" not in str(caught.value)
        assert (len(stub.requests), proxy.refused) == (1, 2)


async def test_a_proxy_that_is_away(stub: ProviderStub) -> None:
    async with provider(stub, Route(proxy=DEAD)) as opened:
        with pytest.raises(WorkerUnavailable, match="Connection refused"):
            await answer(opened)
    assert stub.requests == []


KEY = ConnectionKey("far", 443, True, True, None, None, None)


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (aiohttp.ClientConnectorError(KEY, OSError(errno.ECONNREFUSED, "Connect call failed")), "Connection refused"),
        (aiohttp.ClientConnectorDNSError(KEY, gaierror(-2, "Name or service not known")), "Name or service not known"),
        (aiohttp.ServerDisconnectedError(), "Server Disconnected Error"),
    ],
)
def test_why_a_provider_cannot_be_reached_is_told_in_words_that_are_journaled(error: Exception, words: str) -> None:
    """No redaction takes them for a secret."""
    assert excerpt(str(http_client._httpx_error(error)), b"", []) == words


async def test_proxies_of_the_environment_are_not_used(stub: ProviderStub, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "https_proxy", "HTTPS_PROXY", "all_proxy", "ALL_PROXY"):
        monkeypatch.setenv(name, DEAD)
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    async with provider(stub, Route()) as opened:
        assert await answer(opened) == "Hello there."


@pytest.mark.long
async def test_the_pool_file_leads_a_run_through_the_proxy(authority: Authority, tmp_path: Path) -> None:
    certificate, key = authority.client()
    environ = {"FAR_KEY": KEYS["openai"], "FAR_PROXY": "baton:s3cret"}
    async with (
        ProviderStub(tls=authority.server(demands_certificate=True)) as stub,
        ForwardProxy("baton:s3cret") as proxy,
    ):
        text = POOL.format(base_url=stub.openai_url, proxy=proxy.url, ca=authority.ca, certificate=certificate, key=key)
        async with running_service(tmp_path, text, environ) as runtime:
            ended = await finish(await runtime.runs.start(order(runtime, "baton-mini")))
            assert ended.ended.state.state == "succeeded"
        assert (len(stub.requests), len(proxy.requests), proxy.refused) == (1, 1, 0)


@pytest.mark.long
def test_files_that_have_gone_since_the_check_are_a_fault_of_the_configuration(authority: Authority) -> None:
    gone = str(authority.folder / "gone.pem")
    with pytest.raises(ConfigInvalid, match="ca cannot be read"):
        tls.tls_context(Route(ca=gone))
    with pytest.raises(ConfigInvalid, match="ca cannot be read"):
        Management("https://127.0.0.1:1/v1", None, route=Route(ca=gone))
