"""People log in to the admin API at a real OpenID provider, in a process of its own."""

import base64
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

import httpx
import pytest
from fastapi import FastAPI
from joserfc import jwt
from joserfc.jwk import ECKey, KeySet, OctKey
from msgspec.structs import replace

from app.errors import Forbidden, ServiceUnavailable
from app.gateway.admin.people import SESSION, Access, Grant, People
from app.gateway.administration import create_admin
from app.network import oidc
from app.network.oidc import KNOWN_SECONDS, OpenIdProvider
from tests.harness.administration import AdminStandIn, administration
from tests.harness.console import SAME_ORIGIN, console_client, page_text
from tests.harness.openid_provider import openid_provider
from tests.harness.waiting import PATIENCE_SECONDS

HOME = "http://baton"
BACK = f"{HOME}/admin/callback"
GRANTS = (Grant("groups", "owners", "owner", "acme"), Grant("email", "ben@example.com", "owner", None))


@pytest.fixture(scope="module")
def issuer() -> Iterator[str]:
    with openid_provider() as url:
        yield url


@pytest.fixture
async def admin(tmp_path: Path) -> AsyncIterator[AdminStandIn]:
    async with administration(tmp_path) as opened:
        opened.stand_in.seconds = time.time()  # the provider's clock is real
        yield opened


@pytest.fixture
def people(issuer: str, admin: AdminStandIn) -> People:
    """The provider with Baton as a registered client, and two rules."""
    client = httpx.post(f"{issuer}/oauth2/clients", json={"redirect_uris": [BACK]}, timeout=PATIENCE_SECONDS).json()
    now = admin.gateway.now
    provider = OpenIdProvider(issuer, client["client_id"], client["client_secret"], BACK, now=now)
    return People(provider, GRANTS, scopes="openid email", secure=False)


def app_with(admin: AdminStandIn, people: People) -> FastAPI:
    return create_admin(replace(admin.context, people=people))


async def log_in_at_provider(
    browser: httpx.AsyncClient, person: str, login: str = "/admin/login", **form: str
) -> dict[str, str]:
    """Log in as a person at the provider; return what it sends back to Baton."""
    reply = await browser.get(login)
    assert reply.status_code == 303
    async with httpx.AsyncClient(timeout=PATIENCE_SECONDS, trust_env=False) as outside:
        answer = await outside.post(reply.headers["location"], data={"sub": person} | form)
    assert answer.headers["location"].startswith(BACK), answer.text
    return {name: values[0] for name, values in parse_qs(urlsplit(answer.headers["location"]).query).items()}


async def log_in(browser: httpx.AsyncClient, person: str) -> httpx.Response:
    return await browser.get("/admin/callback", params=await log_in_at_provider(browser, person))


def code_of(reply: httpx.Response) -> tuple[int, str]:
    return reply.status_code, reply.json()["error"]["code"]


@pytest.mark.long
async def test_a_person_logs_in_changes_something_and_logs_out(admin: AdminStandIn, people: People) -> None:
    async with admin.client(app=app_with(admin, people)) as browser:
        assert (await browser.get("/admin/v1/me")).status_code == 401
        reply = await log_in(browser, "ann")
        assert (reply.status_code, reply.headers["location"]) == (303, "/console")
        cookie = next(header for header in reply.headers.get_list("set-cookie") if header.startswith(SESSION))
        assert {"HttpOnly", "SameSite=lax", "Max-Age=900"} <= set(cookie.split("; "))
        me = (await browser.get("/admin/v1/me")).json()
        assert (me["id"], me["via"], me["tenant"], me["role"], me["all_tenants"]) == (
            "ann",
            "oidc",
            "acme",
            "owner",
            False,
        )
        assert code_of(await browser.post("/admin/v1/keys", json={"name": "ci"})) == (403, "csrf_token")
        csrf = {"x-csrf-token": me["csrf_token"]}
        second_reply = await browser.post("/admin/v1/keys", json={"name": "ci"}, headers=csrf)
        assert second_reply.status_code == 200, second_reply.text
        (change,) = (await browser.get(f"/admin/v1/changes?target={second_reply.json()['id']}")).json()["data"]
        assert (change["actor"], change["via"]) == ("ann", "oidc")
        assert (await browser.post("/admin/logout", headers=csrf)).status_code == 200
        assert (await browser.get("/admin/v1/me")).status_code == 401


@pytest.mark.long
async def test_the_console_knows_whoever_has_logged_in_until_they_sign_out(admin: AdminStandIn, people: People) -> None:
    app = app_with(admin, people)
    async with console_client(app, admin.gateway.now, is_admin=True, has_people=True) as browser:
        refused_page = await browser.get("/console/admin/keys")
        assert refused_page.headers["location"] == "/console/sign-in?next=/console/admin/keys"
        form = await browser.get(refused_page.headers["location"])
        assert 'href="/admin/login?next=/console/admin/keys"' in form.text
        login = await log_in_at_provider(browser, "ann", login="/admin/login?next=/console/admin/keys")
        reply = await browser.get("/admin/callback", params=login)
        assert (reply.status_code, reply.headers["location"]) == (303, "/console/admin/keys")
        assert "You are ann, logged in at the OpenID provider, as owner of acme" in page_text(
            (await browser.get("/console/admin")).text
        )
        page = await browser.get("/console/admin/keys/new")
        once = page.text.partition('name="once" value="')[2].partition('"')[0]
        fields = {"once": once, "name": "ci", "roles": "caller"}
        assert (await browser.post("/console/admin/keys/new", data=fields)).status_code == 403
        second_reply = await browser.post("/console/admin/keys/new", data=fields, headers=SAME_ORIGIN)
        assert (second_reply.status_code, "The key ci was made" in page_text(second_reply.text)) == (200, True)
        assert "ann (oidc) Key made" in page_text((await browser.get("/console/admin/changes")).text)
        assert "groups owners owner acme" in page_text((await browser.get("/console/admin/people")).text)
        reply = await browser.post("/console/sign-out", headers=SAME_ORIGIN)
        assert SESSION not in browser.cookies
        assert (await browser.get("/console/admin")).status_code == 303
        assert (await browser.get("/admin/v1/me")).status_code == 401


@pytest.mark.long
async def test_a_login_leads_to_the_console_only(admin: AdminStandIn, people: People) -> None:
    access = Access(admin.gateway, people)
    async with admin.client(app=app_with(admin, people)) as browser:
        for following in ("//evil.example", "https://evil.example/console", "/console/\\evil", "/docs"):
            await browser.get("/admin/login", params={"next": following})
            login_state = access.unseal(browser.cookies["baton_login"], "login")
            assert login_state is not None
            assert login_state["next"] == "/console"


@pytest.mark.long
async def test_a_session_ends_with_its_time_its_rule_and_its_signature(admin: AdminStandIn, people: People) -> None:
    async with admin.client(app=app_with(admin, people)) as browser:
        await log_in(browser, "ann")
        first_session = browser.cookies[SESSION]
    session = {"cookie": f"{SESSION}={first_session}"}
    demoted = replace(people, grants=(replace(GRANTS[0], role="auditor"),))
    nobody = replace(people, grants=())
    statuses = []
    for rules in (people, demoted, nobody):
        async with admin.client(app=app_with(admin, rules)) as browser:
            reply = await browser.get("/admin/v1/me", headers=session)
            statuses.append((reply.status_code, reply.json().get("role")))
    assert statuses == [(200, "owner"), (200, "auditor"), (401, None)]
    async with admin.client(app=app_with(admin, people)) as browser:
        for forged in (first_session[:-2] + "AA", first_session[2:], "", "é"):
            forgery = {"cookie": f"{SESSION}={forged}".encode()}
            assert (await browser.get("/admin/v1/me", headers=forgery)).status_code == 401, forged
        admin.stand_in.seconds += 899
        assert (await browser.get("/admin/v1/me", headers=session)).status_code == 200
        admin.stand_in.seconds += 1
        assert (await browser.get("/admin/v1/me", headers=session)).status_code == 401
    async with admin.client(app=admin.gateway_app()) as browser:  # callers' routes take keys alone
        assert (await browser.get("/v1/models", headers=session)).status_code == 401


@pytest.mark.long
async def test_a_login_is_bound_to_its_browser_and_its_code(admin: AdminStandIn, people: People) -> None:
    app = app_with(admin, people)
    async with admin.client(app=app) as browser, admin.client(app=app) as thief:
        stolen = await log_in_at_provider(browser, "ann")
        assert code_of(await thief.get("/admin/callback", params=stolen)) == (400, "login_not_begun")
        own = await log_in_at_provider(thief, "ben")
        mixed = {"code": stolen["code"], "state": own["state"]}  # another login's verifier
        assert code_of(await thief.get("/admin/callback", params=mixed)) == (403, "login_refused")
        assert (
            await browser.get("/admin/callback", params=await log_in_at_provider(browser, "ann"))
        ).status_code == 303
        denied = await log_in_at_provider(browser, "ann", action="deny")
        assert (await browser.get("/admin/callback", params=denied)).status_code in (400, 403)


@pytest.mark.long
async def test_no_other_site_and_no_disabled_tenant_gets_in(admin: AdminStandIn, people: People) -> None:
    allowing = replace(admin.context.gateway, origins=frozenset({"https://else.example.com"}))
    app = create_admin(replace(admin.context, gateway=allowing, people=people))
    async with admin.client(app=app) as browser:
        await log_in(browser, "ann")
        elsewhere = {"origin": "https://else.example.com"}
        reply = await browser.get("/admin/v1/me", headers=elsewhere)
        assert (reply.status_code, "access-control-allow-origin" in reply.headers) == (200, False)
        await admin.store.add_tenant("acme", 1.0)
        await admin.store.switch_tenant("acme", 2.0, enabled=False)
        assert (await browser.get("/admin/v1/me")).status_code == 401


@pytest.mark.long
async def test_who_has_no_rule_gets_nowhere(admin: AdminStandIn, people: People) -> None:
    """The provider has not verified ben's address."""
    async with admin.client(app=app_with(admin, people)) as browser:
        assert code_of(await log_in(browser, "ben")) == (403, "no_role")
        assert (await browser.get("/admin/v1/me")).status_code == 401


@pytest.mark.long
async def test_a_browser_is_shown_a_refused_login_as_a_page(admin: AdminStandIn, people: People) -> None:
    app = app_with(admin, people)
    async with console_client(app, admin.gateway.now, is_admin=True, has_people=True) as browser:
        html = {"accept": "text/html,*/*"}
        login = await log_in_at_provider(browser, "ben")
        page = await browser.get("/admin/callback", params=login, headers=html)
        assert (page.status_code, page.headers["content-type"]) == (403, "text/html; charset=utf-8")
        assert "No rule in BATON_OIDC_ROLES gives you a role." in page_text(page.text)
        assert 'href="/admin/login?next=/console"' in page.text
        assert "style-src 'self'" in page.headers["content-security-policy"]
        led = await browser.get("/admin/callback", params=await log_in_at_provider(browser, "ann"), headers=html)
        assert (led.status_code, led.headers["location"]) == (303, "/console")


@pytest.mark.long
async def test_a_provider_that_is_away_is_a_503(admin: AdminStandIn, people: People) -> None:
    away = OpenIdProvider("http://127.0.0.1:9", "id", None, BACK, now=admin.gateway.now)
    async with admin.client(app=app_with(admin, replace(people, provider=away))) as browser:
        assert code_of(await browser.get("/admin/login")) == (503, "unavailable")


KEY = ECKey.generate_key("P-256", {"kid": "one"})
RIGHT: dict[str, Any] = {"iss": "https://id", "aud": "baton", "sub": "ann", "nonce": "n", "exp": 2_000, "iat": 1_000}


DISCOVERED = {
    "issuer": "https://id",
    "authorization_endpoint": "a",
    "token_endpoint": "https://id/token",
    "jwks_uri": "https://id/keys",
}


def provider_at(seconds: float = 1_100.0) -> OpenIdProvider:
    return OpenIdProvider("https://id", "baton", "secret", BACK, now=lambda: seconds)


def sign_token(key: ECKey, kid: str | None = "one", **changes: Any) -> str:
    claims = {name: value for name, value in (RIGHT | changes).items() if value is not None}
    return jwt.encode({"alg": "ES256"} | ({"kid": kid} if kid else {}), claims, key)


def serving(**replies: Any) -> httpx.AsyncClient:
    """A client for which the provider answers with these objects, by the last part of the path."""
    documents = {"openid-configuration": DISCOVERED} | replies

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=documents[request.url.path.rpartition("/")[2]])

    return httpx.AsyncClient(transport=httpx.MockTransport(answer))


@pytest.mark.parametrize(
    "changes",
    [{}, {"aud": ["baton"]}, {"aud": ["baton", "else"], "azp": "baton"}, {"exp": 1_050}, {"iat": 1_150}],
    ids=str,
)
async def test_a_token_for_this_login_is_believed(changes: dict[str, Any]) -> None:
    """The clocks of the provider and of the gateway may differ by a minute."""
    async with serving(keys=KeySet([KEY]).as_dict()) as client:
        assert (await provider_at()._verify(client, sign_token(KEY, **changes), "n"))["sub"] == "ann"


@pytest.mark.parametrize(
    "changes",
    [
        {"iss": "https://else"},
        {"aud": "else"},
        {"aud": ["baton", "else"]},
        {"aud": ["baton", "else"], "azp": "else"},
        {"azp": "else"},
        {"nonce": "m"},
        {"nonce": None},
        {"exp": 900},
        {"exp": None},
        {"iat": 1_300},
        {"nbf": 1_300},
        {"sub": None},
    ],
    ids=str,
)
async def test_no_other_token_is_believed(changes: dict[str, Any]) -> None:
    async with serving(keys=KeySet([KEY]).as_dict()) as client:
        with pytest.raises(Forbidden):
            await provider_at()._verify(client, sign_token(KEY, **changes), "n")


async def test_no_token_without_the_providers_signature_is_believed() -> None:
    stranger = ECKey.generate_key("P-256", {"kid": "one"})
    plain, body = base64.urlsafe_b64encode(b'{"alg":"none"}').decode(), sign_token(KEY).split(".")[1]
    shared = jwt.encode({"alg": "HS256", "kid": "one"}, RIGHT, OctKey.import_key("the secret of the client"))
    async with serving(keys=KeySet([KEY]).as_dict()) as client:
        for token in (sign_token(stranger), f"{plain.rstrip('=')}.{body}.", shared, "", "a.b.c"):
            with pytest.raises(Forbidden):
                await provider_at()._verify(client, token, "n")


@pytest.mark.parametrize(
    "other",
    [{"kty": "EC", "crv": "P-999", "x": "AA", "y": "AA", "kid": "two"}, {"kty": "AKP"}, {"kid": "two"}, "two", None],
    ids=str,
)
async def test_a_key_that_cannot_be_used_does_not_stand_in_the_way_of_the_others(other: object) -> None:
    async with serving(keys={"keys": [other, KEY.as_dict(private=False)]}) as client:
        assert (await provider_at()._verify(client, sign_token(KEY), "n"))["sub"] == "ann"
    async with serving(keys={"keys": [other]}) as client:
        with pytest.raises(Forbidden):
            await provider_at()._verify(client, sign_token(KEY), "n")


async def test_a_discovery_document_whose_methods_are_null_means_the_usual_one() -> None:
    document = DISCOVERED | {"token_endpoint_auth_methods_supported": None}
    async with serving(**{"openid-configuration": document, "token": {"id_token": "t"}}) as client:
        assert await provider_at()._exchange_code(client, "code", "verifier") == "t"


async def test_an_address_of_a_provider_that_is_none_is_its_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    client = serving(**{"openid-configuration": DISCOVERED | {"token_endpoint": "https://id:port/token"}})
    monkeypatch.setattr(oidc, "async_client", lambda headers: client)
    with pytest.raises(ServiceUnavailable, match="cannot be reached"):
        await provider_at().claims("code", nonce="n", verifier="v")


@pytest.mark.parametrize("kid", ["one", "two", None])
async def test_a_new_key_of_the_provider_is_believed_at_once(kid: str | None) -> None:
    """The new key may have a name of its own, that of the key before, or none."""
    fresh = ECKey.generate_key("P-256", {"kid": kid} if kid else {})
    provider = provider_at()
    async with serving(keys=KeySet([KEY]).as_dict()) as client:
        await provider._verify(client, sign_token(KEY), "n")
    async with serving(keys={"keys": [fresh.as_dict(private=False)]}) as client:
        assert (await provider._verify(client, sign_token(fresh, kid), "n"))["sub"] == "ann"
    async with serving(keys={}) as client:
        with pytest.raises(ServiceUnavailable):
            await provider._verify(client, sign_token(KEY, "three"), "n")


@pytest.mark.parametrize(
    ("methods", "basic"), [(None, True), (["client_secret_basic"], True), (["client_secret_post"], False)]
)
async def test_the_secret_is_sent_as_the_provider_wants_it(methods: list[str] | None, basic: bool) -> None:
    discovery = DISCOVERED | ({"token_endpoint_auth_methods_supported": methods} if methods is not None else {})
    requests: list[httpx.Request] = []

    def answer(request: httpx.Request) -> httpx.Response:
        requests.append(request)
        return httpx.Response(200, json=discovery if request.method == "GET" else {"id_token": "x"})

    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        assert await provider_at()._exchange_code(client, "code", "verifier") == "x"
    body = requests[-1].content.decode()
    assert ("authorization" in requests[-1].headers, "client_secret=secret" in body) == (basic, not basic)
    assert "code_verifier=verifier" in body


@pytest.mark.long
async def test_a_key_that_the_provider_has_given_up_is_not_believed_for_long() -> None:
    times, offered = [1_000.0], [KeySet([KEY])]
    provider = OpenIdProvider("https://id", "baton", "secret", BACK, now=lambda: times[0])

    def answer(request: httpx.Request) -> httpx.Response:
        return httpx.Response(200, json=offered[0].as_dict() if request.url.path == "/keys" else DISCOVERED)

    async def believed() -> bool:
        claims = RIGHT | {"exp": times[0] + 60, "iat": times[0]}
        async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
            await provider._discover(client)  # as the exchange of the code does
            await provider._verify(client, jwt.encode({"alg": "ES256", "kid": "one"}, claims, KEY), "n")
        return True

    assert await believed()
    offered[0] = KeySet([ECKey.generate_key("P-256", {"kid": "two"})])
    assert await believed()
    times[0] += KNOWN_SECONDS
    with pytest.raises(Forbidden):
        await believed()
