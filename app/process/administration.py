"""The admin API of a running process. Imported by name where it has a port."""

from collections.abc import Callable, Mapping, Sequence
from pkgutil import resolve_name

from fastapi import FastAPI

from app.core.pool.catalog import Catalog
from app.gateway.admin.context import AdminContext
from app.gateway.admin.people import Grant, People, Provider
from app.gateway.administration import create_admin
from app.process.conductor_server import conductor_servers, find_common_models
from app.process.config import Settings, read_catalog_text, trusted_signers
from app.process.config.role_rules import role_rules
from app.process.config.secret_files import secret_text
from app.process.wiring import Runtime

PROVIDER = "app.network.oidc:OpenIdProvider"
"""Imported by name where people log in: Authlib and its cryptography take a tenth of a second to load."""
POSTED = "the pool file"
"""The name of a posted pool file in its faults."""


def admin_app(runtime: Runtime, environ: Mapping[str, str], *, has_engine: bool) -> FastAPI:
    """Return the admin API of this process; `has_engine` says that it calls workers."""
    return create_admin(admin_context(runtime, environ, has_engine=has_engine))


def admin_context(runtime: Runtime, environ: Mapping[str, str], *, has_engine: bool) -> AdminContext:
    """Return the dependencies of the admin API of this process."""

    def read_pool(text: str) -> Catalog:
        return read_catalog_text(text, POSTED, environ)

    def versions(conductor: str) -> Sequence[str]:
        with conductor_servers(runtime.pool.configuration, conductor) as servers:
            return find_common_models(servers)

    state = runtime.pool.health.state if has_engine else None
    settings = runtime.pool.configuration.settings
    return AdminContext(
        runtime.gateway, read_pool, versions, trusted_signers(settings), people=_people(runtime, settings), state=state
    )


def _people(runtime: Runtime, settings: Settings) -> People | None:
    """Return how people log in; None without an OpenID provider."""
    if settings.oidc_issuer is None or settings.oidc_client_id is None or settings.admin_url is None:
        return None
    provider_class: Callable[..., Provider] = resolve_name(PROVIDER)
    provider = provider_class(
        settings.oidc_issuer,
        settings.oidc_client_id,
        secret_text(settings.oidc_client_secret),
        f"{settings.admin_url}/admin/callback",
        now=runtime.gateway.now,
    )
    rules = role_rules(settings.oidc_roles)
    grants = [Grant(rule.claim, rule.value, rule.role, rule.tenant) for rule in rules]
    return People(
        provider,
        tuple(grants),
        scopes=settings.oidc_scopes,
        seconds=settings.oidc_session_minutes * 60,
        secure=settings.admin_url.startswith("https:"),
    )
