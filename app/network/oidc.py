"""Logins of people at an OpenID provider: the authorization code flow with PKCE, by Authlib, and ID tokens by joserfc.

A login sends the person to the provider (`login_url`), who comes back with a code; `claims` exchanges it for an ID
token and returns its claims, once signature, issuer, audience, lifetime and nonce are right. The provider's addresses
and keys are read from its discovery document and remembered for `KNOWN_SECONDS`; keys are read again for a signature
that is by none of those that are known. Imported by name where an issuer is configured.
"""

import asyncio
import base64
import logging
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager, suppress
from typing import Any, Final
from urllib.parse import quote

import httpx
from authlib.oauth2.rfc6749.parameters import prepare_grant_uri, prepare_token_request
from authlib.oauth2.rfc7636 import create_s256_code_challenge
from joserfc import jwt
from joserfc.errors import BadSignatureError, InvalidKeyIdError, JoseError
from joserfc.jwk import Key, KeySet

from app.errors import Forbidden, ServiceUnavailable
from app.network.http_client import async_client

logger = logging.getLogger(__name__)

ALGORITHMS: Final = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Signatures by a key pair. A token without a signature, or with one by a shared secret, is refused."""
LOGIN_SECONDS = 20.0
"""Longest time for all requests of one login."""
KNOWN_SECONDS = 3_600.0
LEEWAY_SECONDS = 60
"""Seconds by which the clocks of provider and gateway may differ."""


class OpenIdProvider:
    """One provider, as the client that is registered there under `client_id`."""

    def __init__(
        self, issuer: str, client_id: str, client_secret: str | None, redirect_url: str, *, now: Callable[[], float]
    ) -> None:
        """`redirect_url` is the address to which the provider sends a person back. `now` gives seconds since 1970."""
        self._issuer = issuer
        self._client_id = client_id
        self._client_secret = client_secret
        self._redirect_url = redirect_url
        self._now = now
        self._metadata: tuple[float, Mapping[str, Any]] | None = None
        self._keys: KeySet | None = None

    async def login_url(self, scopes: str, *, state: str, nonce: str, verifier: str) -> str:
        """Return the address at the provider where a person logs in. Raises `ServiceUnavailable` if the provider cannot
        be reached."""
        async with self._client() as client:
            metadata = await self._discover(client)
        url: str = prepare_grant_uri(
            str(metadata["authorization_endpoint"]),
            self._client_id,
            "code",
            redirect_uri=self._redirect_url,
            scope=scopes,
            state=state,
            nonce=nonce,
            code_challenge=create_s256_code_challenge(verifier),
            code_challenge_method="S256",
        )
        return url

    async def claims(self, code: str, *, nonce: str, verifier: str) -> Mapping[str, Any]:
        """Return the claims of the person who came back with a code. Raises `Forbidden` if the provider does not
        confirm the login, or `ServiceUnavailable` if it cannot be reached."""
        async with self._client() as client:
            return await self._verify(client, await self._exchange_code(client, code, verifier), nonce)

    async def _exchange_code(self, client: httpx.AsyncClient, code: str, verifier: str) -> str:
        """Return the ID token that the provider gives for a code."""
        metadata = await self._discover(client)
        fields = {"redirect_uri": self._redirect_url, "code": code, "code_verifier": verifier}
        headers = {"content-type": "application/x-www-form-urlencoded"}
        methods = metadata.get("token_endpoint_auth_methods_supported") or ["client_secret_basic"]
        if self._client_secret is None:
            fields["client_id"] = self._client_id
        elif "client_secret_basic" in methods:
            headers["authorization"] = _basic(self._client_id, self._client_secret)
        else:
            fields |= {"client_id": self._client_id, "client_secret": self._client_secret}
        body: str = prepare_token_request("authorization_code", **fields)
        reply = await client.post(str(metadata["token_endpoint"]), content=body, headers=headers)
        if reply.is_client_error:
            logger.warning("The identity provider refused the code of a login: HTTP %d.", reply.status_code)
            raise _refusal()
        return str(_object(reply).get("id_token", ""))

    async def _verify(self, client: httpx.AsyncClient, token: str, nonce: str) -> Mapping[str, Any]:
        """Return the claims of an ID token that this provider has signed for this client and login."""
        registry = jwt.JWTClaimsRegistry(
            now=int(self._now()),
            leeway=LEEWAY_SECONDS,
            iss={"essential": True, "value": self._issuer},
            aud={"essential": True, "value": self._client_id},
            exp={"essential": True},
            sub={"essential": True},
            nonce={"essential": True, "value": nonce},
        )
        try:
            id_token = await self._decode(client, token)
            registry.validate(id_token.claims)
        except (JoseError, ValueError):
            raise _refusal() from None
        party = id_token.claims.get("azp")
        if "azp" not in id_token.claims and id_token.claims["aud"] in (self._client_id, [self._client_id]):
            party = self._client_id  # the token is for this client alone
        if party != self._client_id:
            raise _refusal()
        return dict(id_token.claims)

    async def _decode(self, client: httpx.AsyncClient, token: str) -> jwt.Token:
        """Return the token, if its signature is by a key of the provider's, whose keys are read again once if it is by
        none of those that are known. A new key may have the name of the one before, or none."""
        if self._keys is not None:
            try:
                return jwt.decode(token, self._keys, algorithms=list(ALGORITHMS))
            except (InvalidKeyIdError, BadSignatureError):
                pass
        metadata = await self._discover(client)
        keys: Any = _object(await client.get(str(metadata["jwks_uri"])))
        if not isinstance(keys.get("keys"), list):
            raise ServiceUnavailable("The identity provider sent no list of keys.")
        self._keys = _usable_keys(keys["keys"])
        return jwt.decode(token, self._keys, algorithms=list(ALGORITHMS))

    async def _discover(self, client: httpx.AsyncClient) -> Mapping[str, Any]:
        """Return the provider's discovery document, which must be the issuer's own."""
        if self._metadata is not None and self._metadata[0] > self._now():
            return self._metadata[1]
        document = _object(await client.get(f"{self._issuer.rstrip('/')}/.well-known/openid-configuration"))
        needed = ("authorization_endpoint", "token_endpoint", "jwks_uri")
        if document.get("issuer") != self._issuer or not all(document.get(name) for name in needed):
            raise ServiceUnavailable("The identity provider does not describe the issuer in BATON_OIDC_ISSUER.")
        self._metadata = (self._now() + KNOWN_SECONDS, document)
        self._keys = None  # so that a key which the provider has given up is forgotten, too
        return document

    @asynccontextmanager
    async def _client(self) -> AsyncIterator[httpx.AsyncClient]:
        """Open a client for one login. Raises `ServiceUnavailable` if the provider cannot be reached, or takes too
        long."""
        headers = {"accept": "application/json", "accept-encoding": "identity"}
        try:
            async with asyncio.timeout(LOGIN_SECONDS), async_client(headers=headers) as client:
                yield client
        except (httpx.HTTPError, httpx.InvalidURL, OSError, TimeoutError):
            raise ServiceUnavailable("The identity provider cannot be reached; try again shortly.") from None


def _object(reply: httpx.Response) -> dict[str, Any]:
    """Return the JSON object of a reply."""
    reply.raise_for_status()
    try:
        value = reply.json()
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise ServiceUnavailable("The identity provider sent no JSON object.")
    return value


def _usable_keys(entries: list[Any]) -> KeySet:
    """Return the keys of a provider's list that can be used here. Others, such as those on a curve that is not known,
    are left out, as RFC 7517 (section 5) wants it: the provider may sign with one of the rest."""
    keys: list[Key] = []
    for entry in entries:
        with suppress(JoseError, LookupError, TypeError, ValueError):
            keys += KeySet.import_key_set({"keys": [entry]}).keys
    return KeySet(keys)


def _basic(client_id: str, secret: str) -> str:
    """Return the header by which a client with a secret proves who it is (RFC 6749, 2.3.1)."""
    pair = f"{quote(client_id, safe='')}:{quote(secret, safe='')}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"


def _refusal() -> Forbidden:
    return Forbidden("The identity provider did not confirm the login; log in again.", code="login_refused")
