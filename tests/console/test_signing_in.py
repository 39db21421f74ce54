"""Signing in to the console: by a key, kept in a cookie that no page and no other site can use."""

import asyncio

import pytest

from app.console.live import REFUSED
from tests.harness.console import SAME_ORIGIN, console_client, hidden_value, page_text, sign_in, signed_in_client
from tests.harness.stand_ins import GatewayStandIn
from tests.harness.waiting import PATIENCE_SECONDS


async def test_a_browser_is_led_from_the_root_to_the_page_it_wanted(gateway: GatewayStandIn) -> None:
    key = gateway.add_key()
    async with console_client(gateway.app) as client:
        for address in ("/", "/console/"):
            root = await client.get(address, headers={"accept": "text/html"})
            assert (root.status_code, root.headers["location"]) == (303, "/console")
        redirect = await client.get("/console/runs?status=failed")
        assert (redirect.status_code, redirect.headers["location"]) == (
            303,
            "/console/sign-in?next=/console/runs%3Fstatus%3Dfailed",
        )
        form = await client.get(redirect.headers["location"])
        assert 'value="/console/runs?status=failed"' in form.text
        reply = await client.post(
            "/console/sign-in", data={"key": key, "next": "/console/runs?status=failed"}, headers=SAME_ORIGIN
        )
        assert reply.headers["location"] == "/console/runs?status=failed"
        assert (await client.get("/console/runs")).status_code == 200


@pytest.mark.parametrize("accept", ["*/*", "application/json", "", "text/html;q=0, application/json"])
async def test_other_clients_get_what_the_api_says(gateway: GatewayStandIn, accept: str) -> None:
    async with console_client(gateway.app) as client:
        reply = await client.get("/", headers={"accept": accept})
        assert (reply.json()["object"], reply.headers["vary"]) == ("service", "Accept")
        assert (await client.get("/v1/models")).status_code == 401
        assert (await client.get("/consoles")).json()["error"]["code"] == "unknown_url"


async def test_a_wrong_key_is_refused_in_the_apis_words(gateway: GatewayStandIn) -> None:
    async with console_client(gateway.app) as client:
        reply = await client.post("/console/sign-in", data={"key": "bt_x_y<script>"}, headers=SAME_ORIGIN)
        assert reply.status_code == 401
        assert 'role="alert"' in reply.text
        assert "<script>" not in reply.text.replace("<script nonce", "")
        assert "set-cookie" not in reply.headers


@pytest.mark.parametrize("protocols", ["https", "https,http", "HTTPS, http"])
async def test_the_cookie_is_not_the_key_and_is_hidden_from_scripts(gateway: GatewayStandIn, protocols: str) -> None:
    """Several proxies before the console name their protocols, the browser's first."""
    key = gateway.add_key()
    async with console_client(gateway.app) as client:
        reply = await client.post(
            "/console/sign-in", data={"key": key}, headers=SAME_ORIGIN | {"x-forwarded-proto": protocols}
        )
    cookie = reply.headers["set-cookie"]
    assert "HttpOnly" in cookie
    assert "Secure" in cookie
    assert "SameSite=lax" in cookie
    assert "Path=/console" in cookie
    assert key.split("_")[2] not in cookie


async def test_a_session_ends_after_twelve_hours_and_with_its_key(gateway: GatewayStandIn) -> None:
    async with signed_in_client(gateway, gateway.add_key()) as client:
        assert (await client.get("/console/runs")).status_code == 200
        gateway.seconds += 12 * 3600 + 1
        assert (await client.get("/console/runs")).status_code == 303
        await sign_in(client, gateway.add_key("other"))
        assert (await client.get("/console/runs")).status_code == 200
        gateway.store.key_rows.pop("other")
        gateway.ticks += 60
        assert (await client.get("/console/runs")).status_code == 303
        assert "baton_console" not in client.cookies, "it would hide a login at the OpenID provider"


@pytest.mark.parametrize("page", ["/console/runs?live", "/console/approvals?live"])
async def test_a_live_page_ends_with_its_session(gateway: GatewayStandIn, page: str) -> None:
    async with signed_in_client(gateway, gateway.add_key()) as client:
        gateway.seconds += 12 * 3600 - 0.1
        assert (await client.get(page)).text.endswith(REFUSED)


@pytest.mark.parametrize("page", ["/console?live=0", "/console/runs?live", "/console/runs/run_1/live"])
async def test_a_live_page_without_a_session_is_told_not_to_ask_again(gateway: GatewayStandIn, page: str) -> None:
    """Its reader is told that it is not updated any more."""
    async with signed_in_client(gateway, gateway.add_key()) as client:
        assert '<p id="stale" hidden></p>' in (await client.get("/console/runs")).text
        gateway.seconds += 12 * 3600 + 1
        reply = await client.get(page)
        assert reply.headers["content-type"].startswith("text/event-stream")
        assert reply.text == REFUSED
        assert REFUSED.endswith("event: end\ndata: \n\n")


async def test_the_head_of_a_live_page_is_no_stream(gateway: GatewayStandIn) -> None:
    async with signed_in_client(gateway, gateway.add_key()) as client, asyncio.timeout(PATIENCE_SECONDS):
        assert (await client.head("/console/runs?live")).status_code == 200


async def test_the_address_of_a_button_leads_to_its_page(gateway: GatewayStandIn) -> None:
    async with console_client(gateway.app) as client:
        reply = await client.post("/console/runs/run_1/replay", headers=SAME_ORIGIN)
        assert reply.headers["location"].endswith("next=/console/runs/run_1/replay")
        for address, page in (("/runs/run_1/replay", "/runs/run_1"), ("/sign-out", ""), ("/verify", "")):
            reply = await client.get(f"/console{address}")
            assert (reply.status_code, reply.headers["location"]) == (303, f"/console{page}")


async def test_a_changed_cookie_is_nobodys(gateway: GatewayStandIn) -> None:
    async with signed_in_client(gateway, gateway.add_key()) as client:
        cookie = client.cookies["baton_console"]
        client.cookies.clear()
        client.cookies.set("baton_console", ("B" if cookie[0] == "A" else "A") + cookie[1:])
        assert (await client.get("/console/runs")).status_code == 303


async def test_signing_out_forgets_the_cookie(gateway: GatewayStandIn) -> None:
    async with signed_in_client(gateway, gateway.add_key()) as client:
        await client.post("/console/sign-out", headers=SAME_ORIGIN)
        assert "baton_console" not in client.cookies
        assert (await client.get("/console/runs")).status_code == 303


@pytest.mark.parametrize("headers", [{}, {"sec-fetch-site": "cross-site"}, {"origin": "https://evil.example"}])
async def test_no_other_site_can_change_anything(gateway: GatewayStandIn, headers: dict[str, str]) -> None:
    key = gateway.add_key()
    async with signed_in_client(gateway, key) as client:
        for path in ("/console/sign-out", "/console/theme", "/console/sign-in"):
            reply = await client.post(path, data={"key": key, "theme": "dark"}, headers=headers)
            assert reply.status_code == 403
            assert "Open the page anew" in reply.text
            assert "the scope" not in reply.text
            assert "set-cookie" not in reply.headers


@pytest.mark.parametrize(
    "following", ["//evil.example", "https://evil.example", "/console/\\evil", "/v1/models", "/consoles"]
)
async def test_signing_in_leads_to_the_console_only(gateway: GatewayStandIn, following: str) -> None:
    key = gateway.add_key()
    async with console_client(gateway.app) as client:
        reply = await client.post("/console/sign-in", data={"key": key, "next": following}, headers=SAME_ORIGIN)
    assert reply.headers["location"] == "/console"


async def test_a_theme_is_remembered_and_leads_back_to_the_page_with_its_filters(gateway: GatewayStandIn) -> None:
    address = "/console/runs?state=failed&since=2026-11-24"
    async with signed_in_client(gateway, gateway.add_key()) as client:
        fields = {"theme": "dark", "next": hidden_value((await client.get(address)).text, "next")}
        reply = await client.post("/console/theme", data=fields, headers=SAME_ORIGIN)
        assert reply.headers["location"] == address
        assert '<html lang="en" data-theme="dark">' in (await client.get("/console/runs")).text


async def test_a_refusal_of_the_api_is_a_page(gateway: GatewayStandIn) -> None:
    async with signed_in_client(gateway, gateway.add_key(scopes=["runs:write"])) as client:
        reply = await client.get("/console/runs")
    assert reply.status_code == 403
    assert "sign in with one that has the scope" in page_text(reply.text)


@pytest.mark.parametrize("path", ["sign-in", "theme"])
@pytest.mark.parametrize("body", ["key=" + "a" * 20_000, "a=&" * 2_001])
async def test_strangers_cannot_make_the_service_read_large_forms(
    gateway: GatewayStandIn, path: str, body: str
) -> None:
    async with console_client(gateway.app) as client:
        headers = SAME_ORIGIN | {"content-type": "application/x-www-form-urlencoded"}
        assert (await client.post(f"/console/{path}", content=body, headers=headers)).status_code == 413
