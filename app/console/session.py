"""Signing in to the console, and which requests may change something.

A person signs in by a key of the API, which is kept in a cookie of the browser and nowhere else: encrypted under a key
that is derived from the pepper, HttpOnly, SameSite=Lax, Secure behind HTTPS, and forgotten after `SESSION_SECONDS`.
Each request to the API brings that key, so that a revocation ends the session. On the admin listener, a person who has
logged in at the OpenID provider is known by the cookie of that login.

A request that changes something must come from a page of the console: browsers say so by `Sec-Fetch-Site`, and older
ones by `Origin`.
"""

import base64
import hashlib
import os
from collections.abc import Callable, Sequence
from typing import Any, Final

import orjson
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from starlette.requests import Request
from starlette.responses import Response

from app.console.api import Session
from app.core.console_path import PATH

COOKIE: Final = "baton_console"
OIDC_COOKIE: Final = "baton_session"
"""The cookie of a login at the OpenID provider, which the admin API sets and reads."""
SESSION_SECONDS: Final = 12 * 3600
NONCE_BYTES: Final = 12


class Sessions:
    """Keeps keys in cookies. `peppers` gives the secret in force, then those that are still accepted."""

    def __init__(self, peppers: Callable[[], Sequence[bytes]], now: Callable[[], float], *, has_people: bool) -> None:
        self._peppers = peppers
        self._now = now
        self.has_people = has_people
        """True if people can log in at an OpenID provider on this listener."""

    def session_of(self, request: Request) -> Session | None:
        """Return the signed-in person; None if nobody is signed in.

        The API decides whether the credentials are still good."""
        fields = self._read_cookie(request.cookies.get(COOKIE, ""))
        if fields is not None:
            return Session((("authorization", f"Bearer {fields['key']}"),), seconds=fields["until"] - self._now())
        login = request.cookies.get(OIDC_COOKIE)
        if self.has_people and login is not None:
            return Session((("cookie", f"{OIDC_COOKIE}={login}"),), via="oidc")
        return None

    def begin(self, request: Request, reply: Response, key: str) -> None:
        """Keep a key that the API has accepted."""
        body = orjson.dumps({"key": key, "until": self._now() + SESSION_SECONDS})
        nonce = os.urandom(NONCE_BYTES)
        ciphertext = nonce + AESGCM(_cookie_key(self._peppers()[0])).encrypt(nonce, body, COOKIE.encode())
        reply.set_cookie(
            COOKIE,
            base64.urlsafe_b64encode(ciphertext).decode(),
            max_age=SESSION_SECONDS,
            path=PATH,
            secure=is_https(request),
            httponly=True,
            samesite="lax",
        )

    def end(self, request: Request, reply: Response) -> None:
        """Forget whoever is signed in at this browser."""
        reply.delete_cookie(COOKIE, path=PATH, secure=is_https(request), httponly=True, samesite="lax")
        if self.has_people:
            reply.delete_cookie(OIDC_COOKIE, path="/", secure=is_https(request), httponly=True, samesite="lax")

    def _read_cookie(self, cookie: str) -> dict[str, Any] | None:
        """Return the fields of a cookie; None if it is not one of ours, or is over."""
        try:
            ciphertext = base64.urlsafe_b64decode(cookie)
        except ValueError:
            return None
        if len(ciphertext) <= NONCE_BYTES:
            return None
        for pepper in self._peppers():
            try:
                body = AESGCM(_cookie_key(pepper)).decrypt(
                    ciphertext[:NONCE_BYTES], ciphertext[NONCE_BYTES:], COOKIE.encode()
                )
            except InvalidTag:
                continue
            fields: dict[str, Any] = orjson.loads(body)
            if fields["until"] > self._now():
                return fields
            return None
        return None


def _cookie_key(pepper: bytes) -> bytes:
    return hashlib.blake2b(pepper, digest_size=32, person=b"baton console").digest()


def is_https(request: Request) -> bool:
    """Return True if the browser reaches the console by HTTPS, here or at a proxy.

    Each proxy of several appends the protocol by which it was reached itself, so the browser's is the first. Whoever
    forges the header changes only the cookies of their own browser.
    """
    browser_protocol = request.headers.get("x-forwarded-proto", "").partition(",")[0].strip().lower()
    return "https" in (request.url.scheme, browser_protocol)


def is_from_console(request: Request) -> bool:
    """Return True if the request was made by a page of this origin, so that no other site can act in a person's
    name."""
    site = request.headers.get("sec-fetch-site")
    if site is not None:
        return site == "same-origin"
    origin = request.headers.get("origin")
    return origin is not None and origin.partition("://")[2] == request.headers.get("host")
