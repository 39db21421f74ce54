"""`/admin/v1/holds`: legal holds, under which nobody erases or deletes what is stored of the runs that they cover."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from msgspec.structs import asdict
from starlette.requests import Request
from starlette.responses import Response

from app.errors import InvalidRequest, NotFound
from app.gateway.admin import replies
from app.gateway.admin.context import AdminContext, administration
from app.gateway.admin.requests import HoldFilters, HoldRequest, NoFields, read
from app.gateway.admin.responses import page, positions
from app.gateway.http.bodies import json_body
from app.gateway.http.callers import Caller, Keys
from app.gateway.http.idempotency import Idempotency
from app.gateway.http.json_reply import json_reply
from app.gateway.openapi import operations
from app.store.protocol import Hold, HoldQuery

HoldId = Annotated[str, Path(alias="hold", description="The hold's id.")]


def routes(context: AdminContext, keys: Keys, idempotency: Idempotency) -> APIRouter:
    """Return the routes of legal holds."""
    router = APIRouter(prefix="/admin/v1/holds", tags=["holds"])
    _add_read_routes(router, context, keys)
    _add_place_route(router, context, keys, idempotency)
    _add_release_route(router, context, keys)
    return router


def _add_read_routes(router: APIRouter, context: AdminContext, keys: Keys) -> None:
    reader = Annotated[Caller, keys.needs("holds:read")]

    @router.get(
        "",
        operation_id="list_holds",
        summary="List legal holds, newest first.",
        response_model=replies.HoldList,
        responses=operations.replies(*operations.READING),
    )
    async def list_holds(filters: Annotated[HoldFilters, Query()], caller: reader) -> Any:
        """List the holds on runs of the caller's tenant, the released ones included; for a caller of all tenants, every
        one."""
        if not caller.may_list(filters.tenant):
            return page([], "id", filters.limit)
        tenant = filters.tenant or caller.tenant
        query = HoldQuery(tenant, in_force=filters.in_force, after=filters.after, limit=filters.limit + 1)
        with positions():
            holds = await administration(context, caller).holds(query)
        return page([_to_json(hold) for hold in holds], "id", filters.limit)

    @router.get(
        "/{hold}",
        operation_id="get_hold",
        summary="Show a legal hold.",
        response_model=replies.Hold,
        responses=operations.replies(*operations.READING),
    )
    async def get_hold(hold: HoldId, caller: reader) -> Any:
        """Also a released one. For a caller of one tenant, a hold on its runs alone."""
        found = await administration(context, caller).holds(HoldQuery(caller.tenant, id=hold))
        if not found:
            raise NotFound("There is no such legal hold.")
        return json_reply(_to_json(found[0]))


def _add_place_route(router: APIRouter, context: AdminContext, keys: Keys, idempotency: Idempotency) -> None:
    writer = Annotated[Caller, keys.needs("holds:write")]

    @router.post(
        "",
        operation_id="place_hold",
        summary="Place a legal hold.",
        response_model=replies.Hold,
        responses=operations.replies(*operations.WRITING),
        openapi_extra=operations.body(
            "HoldRequest", example={"scope": "user", "name": "ann@example.com", "reason": "case 12/2026"}
        ),
    )
    async def place_hold(
        request: Request, caller: writer, body: Annotated[dict[str, object], json_body(context.gateway.bounds)]
    ) -> Any:
        """From the reply on, nothing of the runs that it covers is erased or deleted, until it is released. With an
        `Idempotency-Key` the same request places one hold; once that was released, it is a 409 `hold_released`."""
        hold_request = read(HoldRequest, body)
        if hold_request.tenant is not None and hold_request.scope != "user":
            raise InvalidRequest("Only a hold on a user has a tenant.", param="tenant", code="invalid_value")
        hold = Hold(
            id=idempotency.name("hold", request, caller, body),
            scope=hold_request.scope,
            name=hold_request.name,
            tenant=hold_request.tenant or "",
            reason=hold_request.reason,
            placed_at=context.gateway.now(),
            placed_by=caller.actor.id,
        )

        async def place() -> Response:
            return json_reply(_to_json(await context.gateway.store.place_hold(hold, by=caller.actor)))

        return await idempotency.reply(request, caller, body, place, keeps_reply=False)


def _add_release_route(router: APIRouter, context: AdminContext, keys: Keys) -> None:
    @router.post(
        "/{hold}/release",
        operation_id="release_hold",
        summary="Release a legal hold.",
        response_model=replies.Hold,
        responses=operations.replies(*operations.WRITING),
        openapi_extra=operations.body("NoFields", required=False),
    )
    async def release_hold(
        hold: HoldId,
        caller: Annotated[Caller, keys.needs("holds:write")],
        body: Annotated[dict[str, object], json_body(context.gateway.bounds, optional=True)],
    ) -> Any:
        """Release a hold: what no other hold covers may be erased again. It stays in the list, with the one who
        released it."""
        read(NoFields, body)
        released = await context.gateway.store.release_hold(hold, context.gateway.now(), by=caller.actor)
        return json_reply(_to_json(released))


def _to_json(hold: Hold) -> dict[str, Any]:
    return {"object": "hold", **asdict(hold), "in_force": hold.released_at is None}
