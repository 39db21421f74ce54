"""`/admin/v1/tenants`, `/changes` and `/spend`: tenants, who changed what, and what was spent."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from msgspec.structs import asdict

from app.core.pool.catalog import MILLION
from app.errors import Conflict, InvalidRequest, NotFound
from app.gateway.admin import replies
from app.gateway.admin.context import AdminContext, administration
from app.gateway.admin.requests import (
    MONTHS_SECONDS,
    ChangeFilters,
    NoFields,
    SpendFilters,
    TenantFilters,
    TenantRequest,
    read,
)
from app.gateway.admin.responses import page
from app.gateway.http.bodies import json_body
from app.gateway.http.callers import Caller, Keys
from app.gateway.http.json_reply import json_reply
from app.gateway.openapi import operations
from app.gateway.wire.query import period_of
from app.store.protocol import AdminEvent, AdminEventQuery, SpendQuery, TenantRow

DAY_SECONDS = 86_400.0
TenantPath = Annotated[str, Path(alias="tenant", description="The tenant's name.")]


def routes(context: AdminContext, keys: Keys) -> APIRouter:
    """Return the routes of tenants, changes and spending."""
    router = APIRouter(prefix="/admin/v1", tags=["tenants"])
    _add_list_routes(router, context, keys)
    _add_switch_routes(router, context, keys)
    _add_change_log_route(router, context, keys)
    _add_spending_route(router, context, keys)
    return router


def _add_list_routes(router: APIRouter, context: AdminContext, keys: Keys) -> None:
    @router.get(
        "/tenants",
        operation_id="list_tenants",
        summary="List tenants by name.",
        response_model=replies.TenantList,
        responses=operations.replies(*operations.READING),
    )
    async def list_tenants(
        filters: Annotated[TenantFilters, Query()], caller: Annotated[Caller, keys.needs("tenants:read")]
    ) -> Any:
        """For a caller of one tenant, that tenant; else every one that was created or has keys."""
        rows = await administration(context, caller).tenants(
            caller.tenant, after=filters.after, limit=filters.limit + 1
        )
        return page([_to_json(row) for row in rows], "name", filters.limit)

    @router.get(
        "/tenants/{tenant:path}",
        operation_id="get_tenant",
        summary="Show a tenant.",
        response_model=replies.Tenant,
        responses=operations.replies(*operations.READING, 404),
    )
    async def get_tenant(tenant: TenantPath, caller: Annotated[Caller, keys.needs("tenants:read")]) -> Any:
        """For a caller of one tenant, that tenant alone."""
        if not caller.sees(tenant):
            raise NotFound("There is no such tenant.")
        return json_reply(_to_json(await _find_tenant(context, tenant)))

    @router.post(
        "/tenants",
        operation_id="create_tenant",
        summary="Create a tenant.",
        response_model=replies.Tenant,
        responses=operations.replies(*operations.WRITING),
        openapi_extra=operations.body("TenantRequest", example={"name": "acme"}),
    )
    async def create_tenant(
        caller: Annotated[Caller, keys.needs("tenants:write")],
        body: Annotated[dict[str, object], json_body(context.gateway.bounds)],
    ) -> Any:
        """A tenant that was created already is shown as it is."""
        name = read(TenantRequest, body).name
        await context.gateway.store.add_tenant(name, context.gateway.now(), by=caller.actor)
        return json_reply(_to_json(await _find_tenant(context, name)))


def _add_switch_routes(router: APIRouter, context: AdminContext, keys: Keys) -> None:
    for verb, words in (("disable", "Accept no key of a tenant."), ("enable", "Accept a tenant's keys again.")):
        _add_switch_route(router, context, keys, verb, words)


def _add_switch_route(router: APIRouter, context: AdminContext, keys: Keys, verb: str, words: str) -> None:
    @router.post(
        f"/tenants/{{tenant:path}}/{verb}",
        operation_id=f"{verb}_tenant",
        summary=words,
        response_model=replies.Tenant,
        responses=operations.replies(*operations.WRITING),
        openapi_extra=operations.body("NoFields", required=False),
    )
    async def switch_tenant(
        tenant: TenantPath,
        caller: Annotated[Caller, keys.needs("tenants:write")],
        body: Annotated[dict[str, object], json_body(context.gateway.bounds, optional=True)],
    ) -> Any:
        """Gateways follow within five seconds. Runs that have begun go on."""
        read(NoFields, body)
        if verb == "disable" and tenant == caller.key.tenant:
            raise Conflict(
                "This would end the access of the one who asks; use a key of another tenant.", code="own_tenant"
            )
        now = context.gateway.now()
        if not await context.gateway.store.switch_tenant(tenant, now, enabled=verb == "enable", by=caller.actor):
            raise NotFound("There is no such tenant.")
        return json_reply(_to_json(await _find_tenant(context, tenant)))


def _add_change_log_route(router: APIRouter, context: AdminContext, keys: Keys) -> None:
    @router.get(
        "/changes",
        operation_id="list_changes",
        summary="List who changed what, newest first.",
        response_model=replies.ChangeList,
        responses=operations.replies(*operations.READING),
    )
    async def list_changes(
        filters: Annotated[ChangeFilters, Query()], caller: Annotated[Caller, keys.needs("changes:read")]
    ) -> Any:
        """Changes to keys, tenants, budgets, legal holds, conductors, tiers and retention; those of other tenants, and
        of what all tenants share, only for a caller of all tenants."""
        if not caller.may_list(filters.tenant):
            return page([], "seq", filters.limit)
        tenant = caller.tenant
        if filters.tenant is not None:
            tenant = filters.tenant
        query = AdminEventQuery(
            limit=filters.limit + 1,
            before=filters.after,
            tenant=tenant,
            target=filters.target,
            actor=filters.actor,
            action=filters.action,
            since=filters.since,
        )
        changes = await administration(context, caller).admin_events(query)
        return page([_change_to_json(change) for change in changes], "seq", filters.limit)


def _add_spending_route(router: APIRouter, context: AdminContext, keys: Keys) -> None:
    @router.get(
        "/spend",
        operation_id="get_spending",
        summary="Add up what was spent in a window.",
        response_model=replies.Spending,
        responses=operations.replies(*operations.READING),
    )
    async def get_spending(
        filters: Annotated[SpendFilters, Query()], caller: Annotated[Caller, keys.needs("spend:read")]
    ) -> Any:
        """Of the runs that were admitted in the window, from the journal, by tenant or by key, the highest first."""
        since, until = period_of(filters.since, filters.until, context.gateway.now(), DAY_SECONDS)
        if until - since > MONTHS_SECONDS:
            raise InvalidRequest("The window must not be longer than 92 days.", param="since", code="invalid_value")
        tenant = filters.tenant or caller.tenant
        if tenant is not None and not caller.sees(tenant):
            raise NotFound("There is no such tenant.")
        query = SpendQuery(since=since, until=until, tenant=tenant, by=filters.by, limit=filters.limit)
        rows: list[dict[str, Any]] = []
        for row in await administration(context, caller).spending(query):
            dollars = {"usd": row.usd / MILLION, "held_usd": row.held / MILLION}
            rows.append({"tenant": row.tenant, "key": row.key, "runs": row.runs, **dollars, "tokens": row.tokens})
        return json_reply({"object": "spending", "since": since, "until": until, "by": filters.by, "data": rows})


async def _find_tenant(context: AdminContext, name: str) -> TenantRow:
    for row in await context.gateway.store.tenants(name):
        return row
    raise NotFound("There is no such tenant.")


def _to_json(row: TenantRow) -> dict[str, Any]:
    return {"object": "tenant", **asdict(row)}


def _change_to_json(event: AdminEvent) -> dict[str, Any]:
    return {"object": "change", **asdict(event)}
