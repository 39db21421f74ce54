"""`/admin/v1/keys`: list, make, show, rotate and revoke API keys.

Nobody can make a key, or learn the secret of one, that may do more than they may themselves.
"""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from msgspec.structs import replace
from starlette.requests import Request

from app.core.pool.catalog import MILLION
from app.core.roles import ROLES, role_of, scopes_of
from app.errors import ConfigInvalid, Conflict, Forbidden, InvalidRequest, NotFound
from app.gateway.admin import replies
from app.gateway.admin.context import AdminContext, administration
from app.gateway.admin.requests import KeyFilters, KeyRequest, NoFields, RotateRequest, read
from app.gateway.admin.responses import page, positions
from app.gateway.http.api_keys import is_in_force, key_to_json, mint, new_secret, pepper_mark
from app.gateway.http.bodies import json_body
from app.gateway.http.callers import Caller, Keys
from app.gateway.http.idempotency import idempotency_record, require_same_request
from app.gateway.http.json_reply import json_reply
from app.gateway.openapi import operations
from app.store.protocol import TAKEN, IdempotencyRecord, KeyQuery, KeyRow

PUBLIC_DIGITS = 16
"""Hexadecimal digits of a key's id."""
AGAIN_SECONDS = 60.0
"""Time for which a rotation is not repeated under the same Idempotency-Key."""
KeyId = Annotated[str, Path(alias="key", description="The key's id, which is between `bt_` and the next underscore.")]


def routes(context: AdminContext, keys: Keys) -> APIRouter:
    """Return the routes of keys."""
    router = APIRouter(prefix="/admin/v1/keys", tags=["keys"])
    _add_read_routes(router, context, keys)
    _add_create_route(router, context, keys)
    _add_rotate_route(router, context, keys)
    _add_revoke_route(router, context, keys)
    return router


def _add_read_routes(router: APIRouter, context: AdminContext, keys: Keys) -> None:
    reader = Annotated[Caller, keys.needs("keys:read")]

    @router.get(
        "",
        operation_id="list_keys",
        summary="List keys, newest first.",
        response_model=replies.KeyList,
        responses=operations.replies(*operations.READING),
    )
    async def list_keys(filters: Annotated[KeyFilters, Query()], caller: reader) -> Any:
        """The keys of the caller's tenant; for a caller of all tenants, those of every tenant."""
        now = context.gateway.now()
        if not caller.may_list(filters.tenant):
            return page([], "id", filters.limit)
        tenant = filters.tenant or caller.tenant
        after, limit = filters.after, filters.limit + 1
        query = KeyQuery(tenant, in_force=filters.in_force, now=now, after=after, limit=limit)
        with positions():
            rows = await administration(context, caller).keys(query)
        return page([key_reply(row, now) for row in rows], "id", filters.limit)

    @router.get(
        "/{key}",
        operation_id="get_key",
        summary="Show a key.",
        response_model=replies.Key,
        responses=operations.replies(*operations.READING),
    )
    async def get_key(key: KeyId, caller: reader) -> Any:
        """One key, never its secret."""
        return json_reply(key_reply(await _visible_key(context, caller, key), context.gateway.now()))


def _add_create_route(router: APIRouter, context: AdminContext, keys: Keys) -> None:
    writer = Annotated[Caller, keys.needs("keys:write")]
    request_body = Annotated[dict[str, object], json_body(context.gateway.bounds)]

    @router.post(
        "",
        operation_id="create_key",
        summary="Make a key.",
        response_model=replies.NewKey,
        responses=operations.replies(*operations.WRITING),
        openapi_extra=operations.body("KeyRequest", example={"name": "ci", "roles": ["caller"]}),
    )
    async def create_key(request: Request, caller: writer, body: request_body) -> Any:
        """The secret is in this reply and stored nowhere. With an `Idempotency-Key` the same request makes one key,
        whose secret is only in the first reply: rotate the key if that reply was lost."""
        key_request = read(KeyRequest, body)
        key, row = _mint_key(context, caller, key_request, idempotency_record(request, caller, body))
        _check_rights(caller, row)
        store, now = administration(context, caller), context.gateway.now()
        earlier = await store.key(row.id)
        if earlier is None:
            if await store.add_key(row, by=caller.actor):
                return json_reply(key_reply(row, now) | {"key": key})
            earlier = await store.key(row.id)
        if earlier is None or _requested_fields(earlier) != _requested_fields(row):
            raise Conflict()
        return json_reply(key_reply(earlier, now) | {"key": None})


def _add_rotate_route(router: APIRouter, context: AdminContext, keys: Keys) -> None:
    @router.post(
        "/{key}/rotate",
        operation_id="rotate_key",
        summary="Give a key a new secret.",
        response_model=replies.NewKey,
        responses=operations.replies(*operations.WRITING),
        openapi_extra=operations.body("RotateRequest", required=False),
    )
    async def rotate_key(
        request: Request,
        key: KeyId,
        caller: Annotated[Caller, keys.needs("keys:write")],
        body: Annotated[dict[str, object], json_body(context.gateway.bounds, optional=True)],
    ) -> Any:
        """Both secrets work until the overlap is over; gateways follow within five seconds. With an `Idempotency-Key`
        the same request within a minute makes one secret, which is only in the first reply."""
        overlap = read(RotateRequest, body).overlap_seconds
        store, now = administration(context, caller), context.gateway.now()
        row = await _visible_key(context, caller, key)
        _check_rights(caller, row)
        if not is_in_force(row, now):
            raise _not_in_force_error()
        once = idempotency_record(request, caller, body)
        if once is not None:
            once = replace(once, until=now + AGAIN_SECONDS)
        secret, digest = new_secret(row, context.gateway.pepper)
        mark = pepper_mark(context.gateway.pepper)
        try:
            if not await store.rotate_key(row.id, digest, now + overlap, mark, by=caller.actor, once=once, now=now):
                raise _not_in_force_error()
        except Conflict as conflict:
            if once is None or conflict.public_code != TAKEN:
                raise
            earlier = await context.gateway.store.of_tenant(caller.tenant).find_idempotency_record(once.id, now)
            require_same_request(once, earlier)
            return json_reply(key_reply(row, now) | {"key": None})
        return json_reply(key_reply(await store.key(row.id) or row, now) | {"key": secret})


def _not_in_force_error() -> Conflict:
    return Conflict("The key is not in force any more; make a new one.", code="key_not_in_force")


def _add_revoke_route(router: APIRouter, context: AdminContext, keys: Keys) -> None:
    writer = Annotated[Caller, keys.needs("keys:write")]

    @router.post(
        "/{key}/revoke",
        operation_id="revoke_key",
        summary="End a key.",
        response_model=replies.Key,
        responses=operations.replies(*operations.WRITING),
        openapi_extra=operations.body("NoFields", required=False),
    )
    async def revoke_key(
        key: KeyId,
        caller: writer,
        body: Annotated[dict[str, object], json_body(context.gateway.bounds, optional=True)],
    ) -> Any:
        """Gateways follow within five seconds. A key that was revoked keeps the time of its end."""
        read(NoFields, body)
        row = await _visible_key(context, caller, key)
        if not _has_rights(caller, row):
            raise Forbidden("The key has scopes or tenants that the one who asks has not.")
        store = administration(context, caller)
        await store.revoke_key(row.id, context.gateway.now(), by=caller.actor)
        return json_reply(key_reply(await store.key(row.id) or row, context.gateway.now()))


def key_reply(row: KeyRow, now: float) -> dict[str, Any]:
    """Return a key without its secret. Times are seconds since 1970, amounts are dollars."""
    return {"object": "key"} | key_to_json(row, now) | {"role": role_of(row.scopes) or None}


def _mint_key(
    context: AdminContext, caller: Caller, key_request: KeyRequest, record: IdempotencyRecord | None
) -> tuple[str, KeyRow]:
    """Return the key and its row. Raises `InvalidRequest` for an unknown scope or tier, and `NotFound` for a tenant of
    others.

    An Idempotency-Key determines the id, so that the same request finds the key that it has made.
    """
    tenant = key_request.tenant or caller.key.tenant
    if not caller.sees(tenant):
        raise NotFound("There is no such tenant.")
    unknown = sorted(set(key_request.tiers) - set(context.gateway.catalog().tiers))
    if unknown:
        raise InvalidRequest("There is no tier of a name in 'tiers'.", param="tiers", code="invalid_value")
    now = context.gateway.now()
    expires_at, public_id, max_usd = None, None, None
    if key_request.expires_in is not None:
        expires_at = now + key_request.expires_in
    if record is not None:
        public_id = record.id[:PUBLIC_DIGITS]
    if key_request.usd is not None:
        max_usd = round(key_request.usd * MILLION)
    try:
        key, row = mint(
            context.gateway.pepper,
            tenant=tenant,
            name=key_request.name,
            scopes=scopes_of(key_request.roles, key_request.scopes) or ROLES["caller"],
            now=now,
            public=public_id,
        )
    except ConfigInvalid:
        raise InvalidRequest("There is no scope of a name in 'scopes'.", param="scopes", code="invalid_value") from None
    row = replace(
        row,
        expires_at=expires_at,
        tiers=frozenset(key_request.tiers),
        labels=frozenset(key_request.labels),
        max_usd=max_usd,
        all_tenants=key_request.all_tenants,
        rpm=key_request.rpm,
        tpm=key_request.tpm,
        concurrency=key_request.concurrency,
    )
    return key, row


def _requested_fields(row: KeyRow) -> tuple[Any, ...]:
    """Return the fields that a request names, but the lifetime, whose end moves with the clock between two requests."""
    limits = (row.max_usd, row.rpm, row.tpm, row.concurrency)
    return (row.tenant, row.name, row.scopes, row.tiers, row.labels, row.all_tenants, *limits)


def _check_rights(caller: Caller, row: KeyRow) -> None:
    """Raise `Forbidden` if a key may do more than the caller, so that no right is gained by making or rotating keys.

    A key may outlive a person's session, but not the key that made it.
    """
    own = caller.key
    has_tiers = not own.tiers or (bool(row.tiers) and row.tiers <= own.tiers)
    ends_in_time = caller.via == "oidc" or own.expires_at is None
    if own.expires_at is not None and row.expires_at is not None:
        ends_in_time |= row.expires_at <= own.expires_at
    rights = (
        _has_rights(caller, row),
        own.labels <= row.labels,
        has_tiers,
        _is_within(row.max_usd, own.max_usd),
        _is_within(row.rpm, own.rpm),
        _is_within(row.tpm, own.tpm),
        _is_within(row.concurrency, own.concurrency),
        ends_in_time,
    )
    if not all(rights):
        raise Forbidden(
            "The key may do more than the one who asks: its scopes, tenants, labels, tiers, cost, rates or lifetime."
        )


def _has_rights(caller: Caller, row: KeyRow) -> bool:
    """Return True if the caller has all scopes of a key, in all of its tenants."""
    own = caller.key
    has_scopes = "admin" in own.scopes or row.scopes <= own.scopes
    has_tenants = own.all_tenants or not row.all_tenants
    return has_scopes and has_tenants


def _is_within(limit: int | None, own: int | None) -> bool:
    """Return True if a limit of a key is no higher than the caller's own. None means that there is no limit."""
    return own is None or (limit is not None and limit <= own)


async def _visible_key(context: AdminContext, caller: Caller, key: str) -> KeyRow:
    """Return the key, or `NotFound` if there is none of this id in a tenant of the caller's."""
    row = await administration(context, caller).key(key)
    if row is None or not caller.sees(row.tenant):
        raise NotFound("There is no such key.")
    return row
