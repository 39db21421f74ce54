"""`GET /v1/reports`: what the runs of a tenant cost and what came of it (`deploy/docs/reports.md`).

A report reads many runs, so it is bounded in runs and in time, and a process makes one at a time.
"""

import asyncio
from typing import Annotated, Any, Final

from fastapi import APIRouter, Query
from starlette.responses import Response

from app.core.rating.economics import METADATA, ReportOptions, TooManyGroups
from app.errors import ConfigInvalid, Forbidden, InvalidRequest
from app.gateway.http.callers import Caller, Keys
from app.gateway.http.context import GatewayContext
from app.gateway.http.json_reply import json_reply
from app.gateway.openapi import operations, report_replies
from app.gateway.runs import reports
from app.gateway.runs.identity import check_tenant
from app.gateway.wire import query
from app.store.protocol import RunQuery

MOST_RUNS: Final = 20_000
"""The most runs of one report."""
PARQUET: Final = "application/vnd.apache.parquet"
TOO_LARGE: Final = (
    f"The report would be about more than {MOST_RUNS:,} runs; choose a shorter period or a filter, or use "
    "`baton report`."
)


def routes(context: GatewayContext, keys: Keys) -> APIRouter:
    """Return the route of reports."""
    router = APIRouter(prefix="/v1/reports", tags=["runs"])
    reader = Annotated[Caller, keys.needs("runs:read")]
    one_at_a_time = asyncio.Semaphore(1)

    @router.get(
        "",
        operation_id="get_report",
        summary="Report what runs cost and what came of it.",
        response_model=report_replies.Report,
        responses=operations.replies(*operations.READING, files=("text/csv", PARQUET)),
    )
    async def get_report(filters: Annotated[query.ReportFilters, Query()], caller: reader) -> Response:
        """Over the runs of the key's tenant that have ended; of a key of all tenants, over those of every tenant.

        To group by `user` or by `metadata.FIELD`, which callers wrote, the key needs the scope `audit:read` too.
        """
        _check(filters, caller)
        async with reports.in_time(one_at_a_time, "choose a shorter period or a filter"):
            figures = await _figures(context, filters, caller)
        return await _report_reply(figures, filters)

    return router


def _check(filters: query.ReportFilters, caller: Caller) -> None:
    """Raise `InvalidRequest` for another tenant, and `Forbidden` for groups that need another scope."""
    check_tenant(caller, filters.tenant)
    if any(name == "user" or name.startswith(METADATA) for name in filters.by) and not caller.may("audit:read"):
        raise Forbidden()


async def _figures(context: GatewayContext, filters: query.ReportFilters, caller: Caller) -> dict[str, Any]:
    since, until = query.period_of(filters.since, filters.until, context.now(), reports.PERIOD_SECONDS)
    run_query = RunQuery(
        tenant=caller.tenant or filters.tenant,
        tier=filters.tier,
        key=filters.key,
        since=since,
        until=until,
        topology=filters.topology,
        model=filters.model,
        user=filters.user,
        tags=query.tags_of(filters),
    )
    try:
        zone = reports.zone_of(filters.time_zone)
    except ValueError as error:
        raise InvalidRequest(f"Invalid value for 'time_zone': {error}.", param="time_zone") from None
    options = ReportOptions(tuple(dict.fromkeys(filters.by)), filters.success, filters.threshold)
    try:
        figures = await reports.make(
            context.store.of_tenant(caller.tenant), context.store, run_query, options, zone, most=MOST_RUNS
        )
    except reports.TooManyRuns:
        raise InvalidRequest(TOO_LARGE, param="since", code="report_too_large") from None
    except TooManyGroups as error:
        message = f"The grouping {reports.too_many_groups(error)}."
        raise InvalidRequest(message, param="by", code="report_too_large") from None
    return {"object": "report", "since": since, "until": until, "time_zone": filters.time_zone, **figures}


async def _report_reply(figures: dict[str, Any], filters: query.ReportFilters) -> Response:
    """Return the figures in the form that was asked for."""
    if filters.format == "json":
        return json_reply(figures)
    rows = reports.table(figures, filters.part)
    name = {"content-disposition": f'attachment; filename="report-{filters.part}.{filters.format}"'}
    if filters.format == "csv":
        return Response(reports.as_csv(rows, filters.part), media_type="text/csv; charset=utf-8", headers=name)
    try:
        body = await asyncio.to_thread(reports.as_parquet, rows, filters.part)
    except ConfigInvalid:
        raise InvalidRequest(
            "This service does not write Parquet; ask for `csv`, or for the operator to install baton[parquet].",
            param="format",
        ) from None
    return Response(body, media_type=PARQUET, headers=name)
