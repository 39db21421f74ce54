"""People who log in at an OpenID provider: `/admin/login`, `/admin/callback`, `/admin/logout`, and their sessions.

A session is a cookie that is signed under a key derived from the pepper: HttpOnly, SameSite=Lax, Secure behind HTTPS,
and valid for a few minutes. It holds the person's subject and those of their claims that the settings name, no rights:
these are found in the settings anew for each request, so that a session ends with the rule that gave it rights. A
request that changes something must repeat the session's CSRF token in `x-csrf-token`.
"""

import base64
import hashlib
import hmac
import secrets
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Protocol

import orjson
from fastapi import APIRouter, Query, Security
from fastapi.security import APIKeyCookie, SecurityScopes
from msgspec import Struct
from msgspec.structs import asdict
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response

from app.core.console_path import PATH, restrict_to_console
from app.core.roles import ROLES
from app.errors import Forbidden, InvalidRequest, Unauthorized
from app.gateway.admin import replies
from app.gateway.http.callers import API_KEY, BEARER, Caller, Keys
from app.gateway.http.context import GatewayContext
from app.gateway.http.json_reply import json_reply
from app.gateway.openapi import operations
from app.store.protocol import KeyRow

SESSION, LOGIN = "baton_session", "baton_login"
"""The cookies of a session, and of a login that goes on."""
CSRF_HEADER = "x-csrf-token"
LOGIN_SECONDS = 600.0
"""Longest time from the beginning of a login to its end."""
SAFE = frozenset({"GET", "HEAD", "OPTIONS"})
START_CHARS = 2_000
"""The longest address to which a login leads back."""
Following = Annotated[
    str, Query(alias="next", max_length=START_CHARS, description="The page of the console to which the login leads.")
]
COOKIE = APIKeyCookie(
    name=SESSION, scheme_name="session", auto_error=False, description="The session of a person, from `/admin/login`."
)


class Grant(Struct, frozen=True):
    """A rule: who has this value in this claim has a role in a tenant; None: in all tenants."""

    claim: str
    value: str
    role: str
    tenant: str | None


class Provider(Protocol):
    """The OpenID provider (`network/oidc.py`)."""

    async def login_url(self, scopes: str, *, state: str, nonce: str, verifier: str) -> str:
        """Return the address where a person logs in."""
        ...

    async def claims(self, code: str, *, nonce: str, verifier: str) -> Mapping[str, Any]:
        """Return the claims of a person who came back with a code. Raises `Forbidden` or `ServiceUnavailable`."""
        ...


class People(Struct, frozen=True):
    """The provider at which people log in, and the grants that say what they may do. The first of `grants` that fits
    counts."""

    provider: Provider
    grants: tuple[Grant, ...]
    scopes: str = "openid"
    """The scopes that the provider is asked for."""
    seconds: float = 900.0
    """The length of a session."""
    secure: bool = True
    """True if browsers reach the admin API by HTTPS."""


class Access(Keys):
    """Finds the caller of the admin API: a key, as everywhere, or without one the person of the session."""

    def __init__(self, context: GatewayContext, people: People) -> None:
        super().__init__(context)
        self._people = people

    async def caller(
        self,
        request: Request,
        scopes: SecurityScopes,
        bearer: Annotated[object, Security(BEARER)],
        header: Annotated[object, Security(API_KEY)],
        session: Annotated[object, Security(COOKIE)] = None,
    ) -> Caller:
        """Return the caller, if they have every one of `scopes`; raises `Unauthorized` or `Forbidden`."""
        session_cookie = request.cookies.get(SESSION)
        if session_cookie is None or bearer is not None or header is not None:
            return await super().caller(request, scopes, bearer, header)
        person = self.person(session_cookie)
        await self._check_tenant(person)
        request.scope["baton.log"].key = person.key
        if request.method not in SAFE and not _is_same(request.headers.get(CSRF_HEADER, ""), person.csrf_token or ""):
            raise Forbidden("The header x-csrf-token must repeat the token of GET /admin/v1/me.", code="csrf_token")
        if not all(person.may(scope) for scope in scopes.scopes):
            raise Forbidden()
        return person

    async def _check_tenant(self, person: Caller) -> None:
        """Raise `Unauthorized` if the person's tenant is disabled."""
        if person.tenant is None:
            return
        for row in await self._context.store.administration_of(person.tenant).tenants(person.tenant):
            if row.disabled_at is not None:
                raise Unauthorized("The tenant is disabled; ask an owner of all tenants to enable it.")

    def person(self, cookie: str) -> Caller:
        """Return the person of a session, with the rights that the settings give them now. Raises `Unauthorized`."""
        session = self.unseal(cookie, "session")
        row = None
        if session is not None:
            claims = [(claim, value) for claim, value in session["claims"]]
            row = self.rights(session["sub"], claims, session["until"])
        if row is None:
            raise Unauthorized("The session is over; log in at /admin/login, or send a Baton key.")
        return Caller(row, via="oidc", csrf_token=_mac(self._key(), b"csrf", cookie.encode()).hex())

    def rights(self, subject: str, claims: Sequence[tuple[str, str]], until: float) -> KeyRow | None:
        """Return the rights of a person with these claims until a time, as those of a key; None if no rule fits."""
        for grant in self._people.grants:
            if (grant.claim, grant.value) in claims:
                return KeyRow(
                    id=subject,
                    tenant=grant.tenant or "default",
                    name=subject,
                    digest=b"",
                    scopes=ROLES[grant.role],
                    created_at=until - self._people.seconds,
                    expires_at=until,
                    all_tenants=grant.tenant is None,
                )
        return None

    def seal(self, purpose: str, fields: Mapping[str, Any], seconds: float) -> str:
        """Return a text of these fields, signed, and valid for a time."""
        body = orjson.dumps({**fields, "until": self._context.now() + seconds})
        mac = _mac(self._key(), purpose.encode(), body)
        return base64.urlsafe_b64encode(mac + body).decode().rstrip("=")

    def unseal(self, text: str, purpose: str) -> dict[str, Any] | None:
        """Return the fields of a signed text; None if it is not valid for this purpose, or not any more."""
        try:
            raw = base64.urlsafe_b64decode(text + "=" * (-len(text) % 4))
        except ValueError:
            return None
        mac, body = raw[:32], raw[32:]
        is_ours = False
        for pepper in self._context.peppers():  # every pepper is tried, so that the time tells nothing
            own_mac = _mac(_session_key(pepper), purpose.encode(), body)
            is_ours |= hmac.compare_digest(own_mac, mac)
        if not is_ours:
            return None
        fields: dict[str, Any] = orjson.loads(body)
        if fields["until"] <= self._context.now():
            return None
        return fields

    def secret_of(self, state: str, purpose: str) -> str:
        """Return the nonce or the PKCE verifier of a login, which follows from its state and the pepper."""
        return base64.urlsafe_b64encode(_mac(self._key(), purpose.encode(), state.encode())).decode().rstrip("=")

    def _key(self) -> bytes:
        return _session_key(self._context.pepper)


def _session_key(pepper: bytes) -> bytes:
    return hashlib.blake2b(pepper, person=b"baton people").digest()


def _mac(key: bytes, purpose: bytes, body: bytes) -> bytes:
    return hmac.digest(key, purpose + b"\0" + body, "sha256")


def _is_same(value: str, expected: str) -> bool:
    return hmac.compare_digest(value.encode(), expected.encode())


def routes(access: Access, people: People) -> APIRouter:
    """Return the routes by which people log in and out."""
    router = APIRouter(prefix="/admin", tags=["people"])
    _add_login_routes(router, access, people)
    _add_logout_route(router, access, people)
    return router


def rules(keys: Keys, people: People | None) -> APIRouter:
    """Return the route that lists the rules by which people have rights."""
    router = APIRouter(prefix="/admin/v1", tags=["people"])

    @router.get(
        "/people",
        operation_id="list_login_rules",
        summary="Show who can log in, and as what.",
        response_model=replies.Logins,
        responses=operations.replies(*operations.READING),
    )
    async def list_login_rules(caller: Annotated[Caller, keys.needs("keys:read")]) -> Response:
        """The rules of BATON_OIDC_ROLES, in their order; for a caller of one tenant those of that tenant."""
        body: dict[str, Any] = {"object": "logins", "enabled": False, "session_seconds": 0.0, "grants": []}
        if people is not None:
            body |= {"enabled": True, "session_seconds": people.seconds}
            for grant in people.grants:
                if caller.key.all_tenants or grant.tenant == caller.key.tenant:
                    body["grants"].append(asdict(grant))
        return json_reply(body)

    return router


def _add_login_routes(router: APIRouter, access: Access, people: People) -> None:
    @router.get(
        "/login",
        operation_id="log_in",
        summary="Log in at the OpenID provider.",
        response_class=Response,
        responses=operations.replies(500, 503),
    )
    async def log_in(path: Following = PATH) -> Response:
        """Leads to the provider, which sends the browser back to `/admin/callback`."""
        state = secrets.token_urlsafe(24)
        nonce, verifier = access.secret_of(state, "nonce"), access.secret_of(state, "verifier")
        url = await people.provider.login_url(people.scopes, state=state, nonce=nonce, verifier=verifier)
        reply = RedirectResponse(url, 303, {"cache-control": "no-store"})
        login = access.seal("login", {"state": state, "next": restrict_to_console(path)}, LOGIN_SECONDS)
        _set(reply, people, LOGIN, login, LOGIN_SECONDS)
        return reply

    @router.get(
        "/callback",
        operation_id="finish_login",
        summary="End a login.",
        response_class=Response,
        responses=operations.replies(400, 403, 500, 503),
    )
    async def finish_login(request: Request) -> Response:
        """Checks the login and sets the session's cookie."""
        login = access.unseal(request.cookies.get(LOGIN, ""), "login")
        state, code = request.query_params.get("state", ""), request.query_params.get("code", "")
        if login is None or not _is_same(state, login["state"]):
            raise InvalidRequest(
                "The login was not begun in this browser, or too long ago; log in again.", code="login_not_begun"
            )
        if not code:
            raise Forbidden("The identity provider did not confirm the login; log in again.", code="login_refused")
        nonce, verifier = access.secret_of(state, "nonce"), access.secret_of(state, "verifier")
        claims = await people.provider.claims(code, nonce=nonce, verifier=verifier)
        subject, identity_claims = str(claims["sub"]), _identity_claims(claims, people.grants)
        if access.rights(subject, identity_claims, 0.0) is None:
            raise Forbidden("No rule in BATON_OIDC_ROLES gives you a role.", code="no_role")
        reply = RedirectResponse(restrict_to_console(login.get("next", PATH)), 303, {"cache-control": "no-store"})
        session = access.seal("session", {"sub": subject, "claims": identity_claims}, people.seconds)
        _set(reply, people, SESSION, session, people.seconds)
        reply.delete_cookie(LOGIN, path="/admin")
        return reply


def _add_logout_route(router: APIRouter, access: Access, people: People) -> None:
    @router.post(
        "/logout",
        operation_id="log_out",
        summary="End the session of this browser.",
        response_class=Response,
        responses=operations.replies(401, 403, 500, 503),
    )
    async def log_out(caller: Annotated[Caller, access.needs()]) -> Response:
        """Removes the session's cookie."""
        reply = json_reply({"ended": True})
        reply.delete_cookie(SESSION, path="/", secure=people.secure, httponly=True, samesite="lax")
        return reply


def _identity_claims(claims: Mapping[str, Any], grants: Sequence[Grant]) -> list[tuple[str, str]]:
    """Return the claims that some rule names, each with one of the values of the person; a claim may be a list."""
    pairs: list[tuple[str, str]] = []
    for claim, value in dict.fromkeys((grant.claim, grant.value) for grant in grants):
        values = claims.get(claim)
        if not isinstance(values, list):
            values = [values]
        if value in values and _is_trusted(claim, claims):
            pairs.append((claim, value))
    return pairs


def _is_trusted(claim: str, claims: Mapping[str, Any]) -> bool:
    """An e-mail address that the provider has not verified is anybody's."""
    return claim != "email" or claims.get("email_verified") is True


def _set(reply: Response, people: People, name: str, value: str, seconds: float) -> None:
    path = "/admin"
    if name == SESSION:
        path = "/"
    reply.set_cookie(name, value, max_age=int(seconds), path=path, secure=people.secure, httponly=True, samesite="lax")
