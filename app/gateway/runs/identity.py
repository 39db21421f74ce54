"""`GET /v1/me`, and `/admin/v1/me` on the listener of administration: who asks, and what they may do."""

from collections.abc import Iterable
from typing import Annotated

from fastapi import APIRouter
from starlette.responses import Response

from app.core.roles import role_of
from app.errors import InvalidRequest
from app.gateway.http.callers import Caller, Keys
from app.gateway.http.json_reply import json_reply
from app.gateway.openapi import operations, replies
from app.store.protocol import KeyQuery
from app.store.protocol import Keys as KeyStore


async def key_names(store: KeyStore, ids: Iterable[str]) -> dict[str, str | None]:
    """Return the names of keys by their ids; None for a key that is not in the database."""
    key_ids = frozenset(ids)
    if not key_ids:
        return {}
    names = {row.id: row.name for row in await store.keys(KeyQuery(ids=key_ids))}
    return {id_: names.get(id_) for id_ in key_ids}


async def key_name(store: KeyStore, id_: str) -> str | None:
    """Return the name of a key; None if it is not in the database."""
    return (await key_names(store, [id_]))[id_]


def check_tenant(caller: Caller, tenant: str | None) -> None:
    """Raise `InvalidRequest` for the parameter `tenant` of a request that asks for the runs of another tenant than the
    caller may see."""
    if tenant is not None and not caller.sees(tenant):
        raise InvalidRequest("Only a key of all tenants sees another tenant's runs.", param="tenant")


def routes(keys: Keys, prefix: str) -> APIRouter:
    """Return the route under a prefix; any valid key may ask."""
    router = APIRouter(prefix=prefix, tags=["identity"])

    @router.get(
        "/me",
        operation_id="get_identity",
        summary="Show who asks.",
        response_model=replies.Identity,
        responses=operations.replies(401, 500, 503),
    )
    async def get_identity(caller: Annotated[Caller, keys.needs()]) -> Response:
        """The key or the person, with tenant and scopes."""
        key = caller.key
        body = {
            "object": "identity",
            "id": key.id,
            "via": caller.via,
            "tenant": key.tenant,
            "all_tenants": key.all_tenants,
            "role": role_of(key.scopes) or None,
            "scopes": sorted(key.scopes),
            "expires_at": key.expires_at,
            "csrf_token": caller.csrf_token,
        }
        return json_reply(body)

    return router
