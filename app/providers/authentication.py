"""Authentication at clouds, where a key in the wire format's own header is not enough: `auth` in the pool file.

    api-key ... the key in the header `api-key`, as Azure OpenAI wants it
    azure ..... a token of Microsoft Entra ID, by azure-identity     (extra `azure`)
    aws ....... signature version 4 of each request, by botocore     (extra `bedrock`)
    google .... a token of Google Cloud, by google-auth              (extra `vertex`)

The libraries are imported when a pool file asks for them, and find their credentials by their own rules: variables of
the environment, files, or the identity of the machine. They block, so they run in a thread. Once a provider has refused
a request, credentials are looked for anew, because those that are replaced in a file are read once only.
"""

import asyncio
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol

from app.core.pool.catalog import ProviderSpec
from app.errors import ConfigInvalid

EXTRAS: Mapping[str, tuple[str, str]] = {
    "azure": ("azure.identity", "azure"),
    "aws": ("botocore", "bedrock"),
    "google": ("google.auth", "vertex"),
}
"""The module that each kind of authentication needs, and the extra that installs it."""
FRESH = 60.0
"""Seconds for which a token is used before its library is asked again; both libraries replace a token some minutes
before it expires."""
AZURE_SCOPE = "https://cognitiveservices.azure.com/.default"
GOOGLE_SCOPE = "https://www.googleapis.com/auth/cloud-platform"
AWS_SERVICE = "bedrock"


class Authentication(Protocol):
    """A way to authenticate requests whose headers depend on the time or on their bytes."""

    async def headers(self, url: str, body: bytes) -> Mapping[str, str]:
        """Return the headers that authenticate a POST of these bytes; raises what its library raises."""
        ...

    def forget(self) -> None:
        """Have the library find its credentials anew before the next request."""
        ...


def key_headers(spec: ProviderSpec, key: str | None, name: str, scheme: str = "") -> dict[str, str]:
    """Return the header that carries the key: `name` of the wire format, unless the provider wants `api-key`."""
    if not key:
        return {}
    if spec.auth == "api-key":
        return {"api-key": key}
    return {name: scheme + key}


def missing_extra(auth: str) -> str:
    """Return what is missing for this kind of authentication, as words that follow its name; empty if nothing is."""
    if auth not in EXTRAS:
        return ""
    module, extra = EXTRAS[auth]
    try:
        is_installed = find_spec(module) is not None
    except ModuleNotFoundError:
        is_installed = False
    if is_installed:
        return ""
    return f"needs the extra {extra}; install it with pip install 'baton[{extra}]'"


def authentication(spec: ProviderSpec) -> Authentication | None:
    """Return what authenticates this provider's requests, or None if a header with its key does.

    Raises ConfigInvalid if its library is not installed.
    """
    if spec.auth not in EXTRAS:
        return None
    if missing := missing_extra(spec.auth):
        raise ConfigInvalid([f"provider {spec.name}: auth = {spec.auth!r} {missing}"])
    if spec.auth == "aws":
        return Signature(spec.region)
    return Token(_azure_token if spec.auth == "azure" else _google_token)


class Token:
    """A bearer token, which its library caches and replaces before it ends."""

    def __init__(self, source: Callable[[], Callable[[], str]], tick: Callable[[], float] = time.monotonic) -> None:
        """`source` returns a function that returns a valid token; `tick` gives monotonic seconds."""
        self._source = source
        self._fetch: Callable[[], str] | None = None
        self._tick = tick
        self._token, self._until = "", float("-inf")
        self._lock = asyncio.Lock()

    async def headers(self, url: str, body: bytes) -> Mapping[str, str]:
        """See `Authentication`."""
        if self._tick() >= self._until:
            async with self._lock:
                if self._tick() >= self._until:
                    self._token = await asyncio.to_thread(self._fetch_token)
                    self._until = self._tick() + FRESH
        return {"authorization": f"Bearer {self._token}"}

    def forget(self) -> None:
        """See `Authentication`."""
        self._fetch, self._until = None, float("-inf")

    def _fetch_token(self) -> str:
        self._fetch = self._fetch or self._source()
        return self._fetch()


def _azure_token() -> Callable[[], str]:
    credential = import_module("azure.identity").DefaultAzureCredential()

    def fetch() -> str:
        token: str = credential.get_token(AZURE_SCOPE).token
        return token

    return fetch


def _google_token() -> Callable[[], str]:
    credentials, _ = import_module("google.auth").default(scopes=[GOOGLE_SCOPE])
    transport = import_module("google.auth.transport.requests").Request()

    def fetch() -> str:
        if not credentials.valid:
            credentials.refresh(transport)
        token: str = credentials.token
        return token

    return fetch


class Signature:
    """AWS's signature version 4 for Bedrock in one region."""

    def __init__(self, region: str) -> None:
        self._region = region
        self._credentials: Any = None

    async def headers(self, url: str, body: bytes) -> Mapping[str, str]:
        """See `Authentication`."""
        return await asyncio.to_thread(self._sign, url, body)

    def forget(self) -> None:
        """See `Authentication`."""
        self._credentials = None

    def _sign(self, url: str, body: bytes) -> Mapping[str, str]:
        auth = import_module("botocore.auth")
        if self._credentials is None:
            self._credentials = import_module("botocore.session").Session().get_credentials()
        if self._credentials is None:
            raise LookupError("no AWS credentials")
        request = import_module("botocore.awsrequest").AWSRequest(method="POST", url=url, data=body)
        auth.SigV4Auth(self._credentials.get_frozen_credentials(), AWS_SERVICE, self._region).add_auth(request)
        return {name.lower(): value for name, value in request.headers.items()}
