"""`/admin/v1/budgets`: what may be spent for a key, a user, a team or a tenant in each hour, day or month."""

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query
from msgspec.structs import asdict

from app.core.pool.budgets import EVERYBODY, Budget, account, faults
from app.core.pool.catalog import MILLION
from app.errors import Forbidden, InvalidRequest, NotFound
from app.gateway.admin import replies
from app.gateway.admin.context import AdminContext, administration
from app.gateway.admin.requests import AccountFilters, BudgetFilters, BudgetRequest, read
from app.gateway.admin.responses import page
from app.gateway.http.bodies import json_body
from app.gateway.http.callers import Caller, Keys
from app.gateway.http.json_reply import json_reply
from app.gateway.openapi import operations
from app.store.protocol import KeyQuery, TenantAdministration

WINDOWS = 50
"""The most periods of a budget's accounts that are shown."""
BudgetId = Annotated[str, Path(alias="budget", description="The budget's id, such as `acme/key/0f3c/day`.")]


def routes(context: AdminContext, keys: Keys) -> APIRouter:
    """Return the routes of budgets."""
    router = APIRouter(prefix="/admin/v1/budgets", tags=["budgets"])
    _add_read_routes(router, context, keys)
    _add_write_routes(router, context, keys)
    return router


def _add_read_routes(router: APIRouter, context: AdminContext, keys: Keys) -> None:
    reader = Annotated[Caller, keys.needs("budgets:read")]

    @router.get(
        "",
        operation_id="list_budgets",
        summary="List budgets.",
        response_model=replies.BudgetList,
        responses=operations.replies(*operations.READING),
    )
    async def list_budgets(filters: Annotated[BudgetFilters, Query()], caller: reader) -> Any:
        """The budgets of the caller's tenant; for a caller of all tenants, those of every tenant."""
        if not caller.may_list(filters.tenant):
            return page([], "id", filters.limit)
        tenant = filters.tenant or caller.tenant
        budgets = await administration(context, caller).budgets(tenant, after=filters.after, limit=filters.limit + 1)
        return page([_to_json(budget) for budget in budgets], "id", filters.limit)

    @router.get(
        "/{budget:path}",
        operation_id="get_budget",
        summary="Show a budget and its use.",
        response_model=replies.BudgetInUse,
        responses=operations.replies(*operations.READING),
    )
    async def get_budget(budget_id: BudgetId, filters: Annotated[AccountFilters, Query()], caller: reader) -> Any:
        """The budget with the latest periods of its accounts, or of one account."""
        budget = await _visible_budget(context, caller, budget_id)
        account_id = None
        if filters.of is not None:
            account_id = account(budget, filters.of)
        windows = await administration(context, caller).budget_use(budget.id, WINDOWS, account_id)
        rows = [asdict(row) for row in windows]
        for row in rows:
            row |= {name: row[name] / MILLION for name in ("held", "spent", "overrun")}
        return json_reply(_to_json(budget) | {"windows": rows})


def _add_write_routes(router: APIRouter, context: AdminContext, keys: Keys) -> None:
    writer = Annotated[Caller, keys.needs("budgets:write")]

    @router.post(
        "",
        operation_id="set_budget",
        summary="Set a budget.",
        response_model=replies.BudgetEntry,
        responses=operations.replies(*operations.WRITING),
        openapi_extra=operations.body("BudgetRequest", example={"scope": "tenant", "period": "month", "usd": 500}),
    )
    async def set_budget(caller: writer, body: Annotated[dict[str, object], json_body(context.gateway.bounds)]) -> Any:
        """Gateways follow within seconds. The budget of a whole tenant is set by callers of all tenants only."""
        budget_request = read(BudgetRequest, body)
        tenant, store = budget_request.tenant or caller.key.tenant, administration(context, caller)
        if not caller.sees(tenant) or (budget_request.tenant and not await store.tenants(tenant)):
            raise NotFound("There is no such tenant.")
        budget = Budget(
            tenant,
            budget_request.scope,
            await _name(store, tenant, budget_request, context.gateway.now()),
            budget_request.period,
            round(budget_request.usd * MILLION),
            zone=budget_request.zone,
            soft=budget_request.soft,
            created_at=context.gateway.now(),
            slices=budget_request.slices,
        )
        reasons = faults(budget)
        if reasons:
            raise InvalidRequest(f"The budget is not valid: {'; '.join(reasons)}.", code="invalid_value")
        _check_rights(caller, budget)
        await store.set_budget(budget, by=caller.actor)
        return json_reply(_to_json(await _visible_budget(context, caller, budget.id)))

    @router.delete(
        "/{budget:path}",
        operation_id="remove_budget",
        summary="Remove a budget.",
        response_model=replies.Removed,
        responses=operations.replies(*operations.READING),
    )
    async def remove_budget(budget_id: BudgetId, caller: writer) -> Any:
        """Nothing is reserved in its accounts any more; what was spent stays in the log."""
        budget = await _visible_budget(context, caller, budget_id)
        _check_rights(caller, budget)
        removed = await administration(context, caller).remove_budget(budget.id, by=caller.actor)
        return json_reply({"id": budget.id, "removed": removed})


async def _name(store: TenantAdministration, tenant: str, budget_request: BudgetRequest, now: float) -> str:
    """Return the name of the budget. A key is found by its id, or by its name while it is in force; else
    `InvalidRequest`."""
    if budget_request.scope != "key" or budget_request.name in ("", EVERYBODY):
        return budget_request.name
    key = await store.key(budget_request.name)
    if key is not None and key.tenant == tenant:
        return key.id
    query = KeyQuery(tenant, name=budget_request.name, in_force=True, now=now, limit=1)
    for row in await store.keys(query):
        return row.id
    raise InvalidRequest("The tenant has no key of that id or name.", param="name", code="invalid_value")


def _check_rights(caller: Caller, budget: Budget) -> None:
    """Raise `Forbidden` for the budget of a whole tenant, which only a caller of all tenants may raise."""
    if budget.scope == "tenant" and not caller.key.all_tenants:
        raise Forbidden("The budget of a whole tenant is set by keys of all tenants only.")


async def _visible_budget(context: AdminContext, caller: Caller, budget_id: str) -> Budget:
    budget = await administration(context, caller).budget(budget_id)
    if budget is None or not caller.sees(budget.tenant):
        raise NotFound("There is no such budget.")
    return budget


def _to_json(budget: Budget) -> dict[str, Any]:
    return {"object": "budget", "id": budget.id, **asdict(budget), "usd": budget.usd / MILLION}
