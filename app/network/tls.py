"""TLS of the service's own connections: which certificate authorities are trusted, and the certificate of a client."""

import ssl
from collections.abc import Iterator
from functools import cache
from pathlib import Path

from app.core.pool.catalog import Route
from app.errors import ConfigInvalid

Fault = tuple[str, str]
"""The name of a field of `Route`, and what is wrong with it, in words that follow the name."""


@cache
def default_context() -> ssl.SSLContext:
    """Return TLS with the certificate authorities that this machine trusts (or SSL_CERT_FILE names). Loading them takes
    some ten milliseconds, so that all clients share it; nobody changes it."""
    return ssl.create_default_context()


def tls_context(route: Route) -> ssl.SSLContext:
    """Return the TLS of a route; raises ConfigInvalid if its files cannot be used (any more)."""
    if not route.ca and not route.client_certificate:
        return default_context()
    try:
        context = ssl.create_default_context(cafile=route.ca or None)
        if route.client_certificate:
            context.load_cert_chain(route.client_certificate, route.client_key or None, password=_no_password)
    except (OSError, ValueError) as error:
        problems = [f"{field} {what}" for field, what in faults(route)]
        raise ConfigInvalid(problems or [f"TLS cannot be set up ({type(error).__name__})"]) from None
    return context


def contents(route: Route) -> tuple[bytes, ...]:
    """Return what the files of a route hold; raises ConfigInvalid if one of them cannot be read (any more)."""
    paths = [path for path in (route.ca, route.client_certificate, route.client_key) if path]
    try:
        return tuple([Path(path).read_bytes() for path in paths])
    except OSError:
        raise ConfigInvalid([f"{field} {what}" for field, what in faults(route)]) from None


def faults(route: Route) -> Iterator[Fault]:
    """Yield every fault of the files of a route, each with its remedy after a semicolon."""
    paths = {"ca": route.ca, "client_certificate": route.client_certificate, "client_key": route.client_key}
    readable = set[str]()
    for field, path in paths.items():
        problem = _file_problem(path) if path else None
        if problem is not None:
            yield field, problem
        elif path:
            readable.add(field)
    for field in sorted(readable - {"client_key"}):
        if not _has_certificates(paths[field]):
            yield field, "holds no certificate in PEM form; name a file that has -----BEGIN CERTIFICATE----- in it"
            readable.discard(field)
    if route.client_key and not route.client_certificate:
        yield "client_key", "belongs to no certificate; set client_certificate too, or remove it"
    elif "client_certificate" in readable and (not route.client_key or "client_key" in readable):
        yield from _key_faults(route)


def _file_problem(path: str) -> str | None:
    if not Path(path).is_absolute():
        return "is not an absolute path; write the whole path, from / on"
    try:
        Path(path).read_bytes()
    except OSError as error:
        return f"cannot be read ({type(error).__name__}); check the path and its permissions"
    return None


def _has_certificates(path: str) -> bool:
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT).load_verify_locations(cafile=path)
    except (OSError, ValueError):
        return False
    return True


def _key_faults(route: Route) -> Iterator[Fault]:
    """Yield the faults of the key, which is in a file of its own or follows its certificate in the same file."""
    field = "client_key" if route.client_key else "client_certificate"
    try:
        empty = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        empty.load_cert_chain(route.client_certificate, route.client_key or None, password=_no_password)
    except ssl.SSLError as error:
        if error.reason == "KEY_VALUES_MISMATCH":
            yield field, "is the key of another certificate; name the key that client_certificate was made with"
        else:
            yield field, "holds no private key in PEM form; name a file that has one, or set client_key"
    except ValueError:
        yield field, "holds an encrypted key; store it decrypted, readable by Baton alone"


def _no_password() -> str:
    raise ValueError("a process that starts by itself cannot ask for a password")
