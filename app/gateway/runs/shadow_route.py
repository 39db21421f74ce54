"""`GET /v1/shadows/report`: a tier's live runs compared with their shadows (`deploy/docs/shadows.md`)."""

import asyncio
from collections.abc import Mapping
from typing import Annotated

from fastapi import APIRouter, Query
from starlette.responses import Response

from app.core.pool.catalog import Catalog, Tier
from app.core.rating.shadows import notes_from_json, policy_of
from app.engine.conductors import trials
from app.errors import NotFound
from app.gateway.http.callers import Caller, Keys
from app.gateway.http.context import GatewayContext
from app.gateway.http.json_reply import json_reply
from app.gateway.openapi import operations, report_replies
from app.gateway.runs import reports
from app.gateway.wire import query


def routes(context: GatewayContext, keys: Keys) -> APIRouter:
    """Return the route of reports on shadows."""
    router = APIRouter(prefix="/v1/shadows", tags=["runs"])
    reader = Annotated[Caller, keys.needs("audit:read")]
    one_at_a_time = asyncio.Semaphore(1)

    @router.get(
        "/report",
        operation_id="get_shadow_report",
        summary="Report how a tier's runs compare with their shadows.",
        response_model=report_replies.ShadowReport,
        responses=operations.replies(*operations.READING, 404),
    )
    async def get_shadow_report(filters: Annotated[query.ShadowFilters, Query()], caller: reader) -> Response:
        """Over the runs of the key's tenant; of a key of all tenants, over those of every tenant."""
        catalog = context.catalog()
        tier = _tier(catalog, filters.tier)
        since, until = query.period_of(filters.since, filters.until, context.now(), reports.PERIOD_SECONDS)
        sample_notes: Mapping[str, int] | None = None
        if caller.tenant is None:
            notes = await context.store.find_learned_state(policy_of(tier.name), 0)
            sample_notes = {}
            if notes is not None:
                sample_notes = notes_from_json(notes.body).since(since)
        async with reports.in_time(one_at_a_time, "choose a shorter period"):
            runs = context.store.of_tenant(caller.tenant)
            definitions = trials.PresentDefinitions(context.store, catalog)
            figures = await trials.report(runs, definitions, tier, since, until, sample_notes)
        return json_reply(figures)

    return router


def _tier(catalog: Catalog, name: str | None) -> Tier:
    if name is None:
        tiers = list(catalog.tiers.values())
        return next((tier for tier in tiers if tier.shadow is not None), tiers[0])
    tier = catalog.tier(name)
    if tier is None:
        raise NotFound("There is no such tier; GET /v1/models lists them.", param="tier", code="model_not_found")
    return tier
