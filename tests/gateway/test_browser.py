"""A page in a browser is served: preflights without a key, headers that it may read, HEAD and OPTIONS."""

import httpx
import pytest

from app.errors import ConfigInvalid, StoreUnavailable
from app.process.config.settings import read
from tests.harness.stand_ins import GatewayStandIn, api_routes, chat_body

PAGE = "https://app.example.com"
PREFLIGHT = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type,x-stainless-os",
}
EXPOSED_ANYWAY = {"content-type", "content-length", "cache-control", "vary"}
"""Headers that every page may read, and one that is for caches."""


def open_gateway(*origins: str) -> GatewayStandIn:
    return GatewayStandIn(origins=frozenset(origins))


async def preflight(stand_in: GatewayStandIn, origin: str, path: str = "/v1/chat/completions") -> httpx.Response:
    async with stand_in.client() as client:
        return await client.options(path, headers=PREFLIGHT | {"origin": origin})


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/models", "/v1/runs/x", "/v1/whatever"])
async def test_a_preflight_needs_no_key_and_no_store(path: str) -> None:
    stand_in = open_gateway(PAGE)
    stand_in.store.fault = StoreUnavailable()
    reply = await preflight(stand_in, PAGE, path)
    assert reply.status_code == 204
    assert reply.headers["access-control-allow-origin"] == PAGE
    assert "POST" in reply.headers["access-control-allow-methods"]
    allowed = reply.headers["access-control-allow-headers"].lower().split(", ")
    assert "authorization" in allowed
    assert "*" in allowed
    assert int(reply.headers["access-control-max-age"]) > 0
    assert "x-request-id" in reply.headers
    assert stand_in.store.lookups == 0


async def test_a_page_may_use_every_method_that_a_route_takes() -> None:
    stand_in = open_gateway(PAGE)
    methods = {method for route in api_routes(list(stand_in.app.routes)) for method in route.methods or ()}
    allowed = (await preflight(stand_in, PAGE)).headers["access-control-allow-methods"].split(", ")
    assert methods <= set(allowed)


@pytest.mark.parametrize("origin", ["https://evil.example", PAGE + ".evil.example", "http://app.example.com", "null"])
async def test_another_origin_is_told_nothing(origin: str) -> None:
    stand_in = open_gateway(PAGE)
    reply = await preflight(stand_in, origin)
    assert not [name for name in reply.headers if name.startswith("access-control")]
    assert origin not in str(reply.headers)
    async with stand_in.client(stand_in.add_key()) as client:
        reply = await client.get("/v1/models", headers={"origin": origin})
    assert reply.status_code == 200
    assert not [name for name in reply.headers if name.startswith("access-control")]
    assert reply.headers["vary"] == "Origin"


@pytest.mark.parametrize(("status", "path"), [(200, "/v1/models"), (404, "/v1/nothing"), (405, "/v1/chat/completions")])
async def test_a_page_may_read_every_reply_and_its_headers(status: int, path: str) -> None:
    stand_in = open_gateway(PAGE, "https://other.example")
    async with stand_in.client(stand_in.add_key()) as client:
        reply = await client.get(path, headers={"origin": PAGE})
    assert reply.status_code == status
    assert reply.headers["access-control-allow-origin"] == PAGE
    exposed = set(reply.headers["access-control-expose-headers"].split(", "))
    assert {"x-request-id", "x-baton-run", "retry-after", "x-ratelimit-remaining-requests"} <= exposed


async def test_each_header_of_a_reply_is_for_the_page() -> None:
    stand_in = open_gateway(PAGE)
    async with stand_in.client(stand_in.add_key()) as client:
        for path, body in (("/v1/chat/completions", chat_body()), ("/v1/messages", chat_body(max_tokens=9))):
            reply = await client.post(path, json=body, headers={"origin": PAGE})
            assert reply.status_code == 200
            own = {name for name in reply.headers if not name.startswith("access-control")} - EXPOSED_ANYWAY
            assert own <= set(reply.headers["access-control-expose-headers"].split(", "))


async def test_errors_and_streams_too_are_for_the_page() -> None:
    stand_in = open_gateway("*")
    async with stand_in.client() as client:
        stranger = await client.post("/v1/chat/completions", json=chat_body(), headers={"origin": PAGE})
    assert stranger.status_code == 401
    assert stranger.headers["access-control-allow-origin"] == "*"
    async with stand_in.client(stand_in.add_key()) as client:
        stream = await client.post("/v1/chat/completions", json=chat_body(stream=True), headers={"origin": PAGE})
        stand_in.store.fault = RuntimeError()
        broken = await client.get("/v1/runs", headers={"origin": PAGE})
    assert (stream.status_code, broken.status_code) == (200, 500)
    for reply in (stranger, stream, broken):
        assert reply.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in reply.headers
        assert "x-request-id" in reply.headers
        assert reply.headers["openai-processing-ms"].isdigit()


async def test_without_origins_nothing_is_said(gateway: GatewayStandIn) -> None:
    reply = await preflight(gateway, PAGE)
    assert reply.status_code == 204
    assert reply.headers["allow"] == "OPTIONS, POST"
    assert not [name for name in reply.headers if name.startswith("access-control") or name == "vary"]


async def test_options_lists_the_methods_and_head_is_a_get_without_its_body(gateway: GatewayStandIn, key: str) -> None:
    async with gateway.serve() as url, httpx.AsyncClient(base_url=url, headers={"x-api-key": key}) as client:
        assert (await client.options("/v1/models")).headers["allow"] == "GET, HEAD, OPTIONS"
        assert (await client.options("/v1/nothing")).status_code == 404
        for path in ("/v1/models", "/v1/runs", "/v1/models/baton-mini", "/healthz"):
            got, head = await client.get(path), await client.head(path)
            assert (head.status_code, head.content) == (200, b"")
            assert head.headers["content-length"] == str(len(got.content))
        assert (await client.head("/v1/models", headers={"x-api-key": "no"})).status_code == 401


@pytest.mark.parametrize("origins", ["*", PAGE, f"{PAGE}, http://localhost:5173", "", " "])
def test_origins_that_can_be_set(origins: str) -> None:
    assert read({"BATON_CORS_ORIGINS": origins}).origins == {part.strip() for part in origins.split(",")} - {""}


def test_hosts_of_origins_may_have_capitals_which_browsers_do_not_send() -> None:
    assert read({"BATON_CORS_ORIGINS": "https://App.Example.com:8443"}).origins == {"https://app.example.com:8443"}


@pytest.mark.parametrize("origins", [f"{PAGE}/", f"{PAGE},*", "app.example.com", "null", f"{PAGE}/x", "ftp://a.b"])
def test_origins_that_would_never_match_are_told(origins: str) -> None:
    with pytest.raises(ConfigInvalid, match="BATON_CORS_ORIGINS"):
        read({"BATON_CORS_ORIGINS": origins})
