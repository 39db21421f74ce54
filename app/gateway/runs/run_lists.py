"""Lists of runs over HTTP: `GET /v1/runs`, and `GET /v1/runs/live`, which follows a page of one.

A page that is followed is read again when a run has changed, and what differs is sent. Streams with the same filters
share the reading.
"""

import asyncio
from collections.abc import AsyncGenerator
from typing import Annotated, Any, Final
from weakref import WeakValueDictionary

import orjson
from fastapi import APIRouter, Query
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from app.core.run.kinds import OriginKind
from app.errors import InvalidRequest, NotFound, StoreUnavailable
from app.gateway.http.callers import Caller, Keys
from app.gateway.http.context import GatewayContext
from app.gateway.http.json_reply import json_reply, list_page
from app.gateway.openapi import operations, run_replies
from app.gateway.runs import audit
from app.gateway.runs.identity import check_tenant, key_names
from app.gateway.runs.open_streams import AWAY_SECONDS, SCOPE, OpenStream, OpenStreams
from app.gateway.wire import query
from app.store.protocol import Place, RatingFilter, RunQuery, RunRow, TenantStore

SCHEMAS: Final[operations.Schemas] = {"RunListEvent": lambda: operations.event_schema(run_replies.RunListEvent)}
MOST_COUNTED: Final = 10_000
"""The highest count of a list's runs: to count them the database reads each of them."""
PING: Final = b": ping\n"
Summary = dict[str, Any]


def add_routes(router: APIRouter, context: GatewayContext, keys: Keys, streams: OpenStreams) -> None:
    """Add the routes of lists; `streams` are those that are open. These routes stand before those of one run, which
    would take `live` for a run's id."""
    reader = Annotated[Caller, keys.needs(SCOPE)]
    pages = _Pages(context)

    @router.get(
        "",
        operation_id="list_runs",
        summary="List runs, by default the newest first.",
        response_model=run_replies.RunList,
        responses=operations.replies(*operations.READING),
    )
    async def list_runs(filters: Annotated[query.RunFilters, Query()], caller: reader) -> Response:
        """The runs of the key's tenant; of a key made with `--all-tenants`, those of every tenant."""
        run_query = await _run_query(context, filters, caller)
        return json_reply(await _page(context, caller.tenant, filters, run_query))

    @router.get(
        "/live",
        operation_id="follow_runs",
        summary="Follow a page of a list of runs.",
        status_code=200,
        response_class=OpenStream,
        responses=operations.replies(*operations.READING, 429, events="RunListEvent"),
    )
    async def follow_runs(filters: Annotated[query.LiveFilters, Query()], caller: reader, request: Request) -> Response:
        """First the page, as `GET /v1/runs` has it with the same parameters; then each run that is new on it or has
        changed, and the id of each that has left it, within about a second. Who connects again is sent the page anew,
        so that nothing is missed. Comments keep the connection alive."""
        run_query = await _run_query(context, filters, caller)
        frames = await pages.frames(caller.tenant, filters, run_query)
        return streams.begin(request, caller, frames, filters.seconds)


# -- a page


async def _page(
    context: GatewayContext, tenant: str | None, filters: query.RunFilters, run_query: RunQuery
) -> dict[str, Any]:
    """Return a page of the list, as JSON has it."""
    rows, has_more, has_previous = await _read_rows(context.store.of_tenant(tenant), filters, run_query)
    reply = list_page(await _summaries(context, tenant, filters, rows), has_more=has_more)
    reply |= {"next": None, "previous": None}
    first = None
    if rows:
        first = _cursor(filters, rows[0])
    if has_more:
        reply["next"] = query.as_cursor(_cursor(filters, rows[-1]))
    if has_previous:
        reply["previous"] = query.as_cursor(_cursor(filters, rows[0]))
    if "count" in filters.include:
        reply["count"] = await _count(context, tenant, run_query, first)
    return reply


async def _read_rows(
    store: TenantStore, filters: query.RunFilters, run_query: RunQuery
) -> tuple[tuple[RunRow, ...], bool, bool]:
    """Return the rows of a page, and whether there are more behind it and in front of it."""
    if filters.before is None:
        read_rows = await store.runs(run_query)
        rows = read_rows[: filters.limit]
        return rows, len(read_rows) > filters.limit, filters.after is not None and bool(rows)
    # The rows in front of `before` come in the opposite order, and the run of `before` is behind them.
    read_rows = await store.runs(_reverse_order(run_query))
    rows = read_rows[: filters.limit][::-1]
    return rows, bool(rows), len(read_rows) > filters.limit


def _reverse_order(run_query: RunQuery) -> RunQuery:
    """Return the query for the rows in front of a place instead of those behind it, the nearest first."""
    return replace(run_query, ascending=not run_query.ascending)


async def _summaries(
    context: GatewayContext, tenant: str | None, filters: query.RunFilters, rows: tuple[RunRow, ...]
) -> list[Summary]:
    """Return the rows as JSON has them, with the details that the request includes."""
    summaries = [audit.summary(row) for row in rows]
    detail_names = {"workers", "preview"}.intersection(filters.include)
    if detail_names:
        details = await context.store.of_tenant(tenant).lists.details([row.id for row in rows])
        for run in summaries:
            detail = details.get(run["id"])
            if "workers" in detail_names:
                run["workers"] = []
            if "workers" in detail_names and detail is not None:
                run["workers"] = list(detail.workers)
            if "preview" in detail_names:
                run["preview"] = detail is not None and detail.is_preview
    if "key_name" in filters.include:
        names = await key_names(context.store.administration_of(tenant), [row.key for row in rows])
        for run in summaries:
            run["key_name"] = names[run["key"]]
    return summaries


async def _count(
    context: GatewayContext, tenant: str | None, run_query: RunQuery, first: query.Cursor | None
) -> dict[str, Any]:
    """Return the number of runs that the filters select, and of those among them that are in front of the page."""
    lists = context.store.of_tenant(tenant).lists
    total = await lists.count(replace(run_query, before=None), MOST_COUNTED + 1)
    in_front = 0
    if first is not None and run_query.before is not None:
        in_front = await lists.count(_reverse_order(replace(run_query, before=first[:2])), MOST_COUNTED + 1)
    counts: dict[str, int | None] = {"total": None, "in_front": None, "most": MOST_COUNTED}
    if total <= MOST_COUNTED:
        counts["total"] = total
    if in_front <= MOST_COUNTED:
        counts["in_front"] = in_front
    return counts


def _cursor(filters: query.RunFilters, row: RunRow) -> query.Cursor:
    """Return the place of a run in the list."""
    if filters.sort == "cost":
        return query.Cursor(row.spent.usd, row.id, filters.sort)
    return query.Cursor(row.created_at, row.id, filters.sort)


async def _find_place(
    context: GatewayContext, filters: query.RunFilters, caller: Caller, name: str, place: query.Cursor | str
) -> Place:
    """Return the place that the parameter `name` names, where the page begins or ends.

    Raises `InvalidRequest` for a run that the caller may not see, or that is in no list of this order, and for a place
    in a list of another order.
    """
    if isinstance(place, query.Cursor):
        if place.sort != filters.sort:
            message = f"'{name}' is a place in a list of another 'sort'."
            raise InvalidRequest(message, param=name, code="invalid_value")
        return place.first, place.run
    try:
        row = await context.store.of_tenant(caller.tenant).run(place)
    except NotFound:
        row = None
    if row is None or not caller.sees(row.tenant):
        raise InvalidRequest(f"There is no run of the id in '{name}'.", param=name, code="invalid_value")
    if filters.sort == "cost" and row.ended_at is None:
        raise InvalidRequest(
            f"The run in '{name}' has not ended, so it is in no list by cost.", param=name, code="invalid_value"
        )
    return _cursor(filters, row)[:2]


async def _find_requested_place(context: GatewayContext, filters: query.RunFilters, caller: Caller) -> Place | None:
    """Return the place that `after` or `before` names; None where the page is the first one. Raises
    `InvalidRequest`."""
    if filters.after is not None and filters.before is not None:
        raise InvalidRequest("Send 'after' or 'before', not both.", param="before", code="invalid_value")
    if filters.after is not None:
        return await _find_place(context, filters, caller, "after", filters.after)
    if filters.before is not None:
        return await _find_place(context, filters, caller, "before", filters.before)
    return None


async def _run_query(context: GatewayContext, filters: query.RunFilters, caller: Caller) -> RunQuery:
    """Return the store's query for one row more than a page has, which shows whether another page follows. Its place is
    that of `after` or of `before`."""
    check_tenant(caller, filters.tenant)
    if filters.queue is not None and caller.tenant is not None:
        raise InvalidRequest("Only a key of all tenants sees the queue, which all of them share.", param="queue")
    place = await _find_requested_place(context, filters, caller)
    untaken_at = None
    if filters.queue is not None:
        untaken_at = context.now()
    origin_kind: OriginKind | None = ""
    if filters.origin_kind != "none":
        origin_kind = filters.origin_kind
    return RunQuery(
        tenant=caller.tenant or filters.tenant,
        state=filters.state,
        tier=filters.tier,
        key=filters.key,
        since=filters.since,
        until=filters.until,
        min_usd=filters.min_cost_usd,
        max_usd=filters.max_cost_usd,
        topology=filters.topology,
        model=filters.model,
        user=filters.user,
        sort=filters.sort,
        ascending=filters.order == "asc",
        degraded=filters.degraded,
        preview=filters.preview,
        outcome=filters.outcome,
        error=filters.error,
        rated=_parse_rating_filter(filters),
        untaken_at=untaken_at,
        origin_kind=origin_kind,
        origin_run=filters.origin_run,
        tags=query.tags_of(filters),
        before=place,
        request_id=filters.request_id,
        trace_id=filters.trace_id,
        limit=filters.limit + 1,
    )


def _parse_rating_filter(filters: query.RunFilters) -> RatingFilter | None:
    """Return the condition on the ratings; None if the request names none. Raises `InvalidRequest` for a time alone."""
    if filters.rated is not None:
        return RatingFilter(filters.rated == "good", filters.rated_since, filters.rated_until)
    for name in ("rated_since", "rated_until"):
        if getattr(filters, name) is not None:
            raise InvalidRequest(f"'{name}' needs 'rated'.", param=name, code="invalid_value")
    return None


# -- a page that is followed


class _Pages:
    """The pages that are followed in this process."""

    def __init__(self, context: GatewayContext) -> None:
        self._context = context
        self._shared: WeakValueDictionary[object, _SharedPage] = WeakValueDictionary()

    async def frames(
        self, tenant: str | None, filters: query.LiveFilters, run_query: RunQuery
    ) -> AsyncGenerator[bytes]:
        """Yield the frames of the stream of a page, whose first reading is done. Raises `StoreUnavailable`."""
        same_query = replace(run_query, untaken_at=None)
        key = (tenant, same_query, filters.queue, filters.before is not None, tuple(sorted(filters.include)))
        page = self._shared.get(key)
        if page is None:
            page = self._shared[key] = _SharedPage(self._context, tenant, filters, run_query)
        number = self._context.runs.changes.number
        return _follow_page(self._context, page, number, await page.at(number))


class _SharedPage:
    """A page that some streams follow. It is read once for each change, however many they are."""

    def __init__(
        self, context: GatewayContext, tenant: str | None, filters: query.RunFilters, run_query: RunQuery
    ) -> None:
        self._parts = (context, tenant, filters, run_query)
        self._reading = asyncio.Lock()
        self._number = -1
        self._page: dict[str, Any] = {}

    async def at(self, number: int) -> dict[str, Any]:
        """Return the page as it is after this change, or a later one. Raises `StoreUnavailable`."""
        async with self._reading:
            if self._number < number:
                context, tenant, filters, run_query = self._parts
                if run_query.untaken_at is not None:
                    run_query = replace(run_query, untaken_at=context.now())
                self._page = await _page(context, tenant, filters, run_query)
                self._number = number
            return self._page


async def _follow_page(
    context: GatewayContext, page: _SharedPage, number: int, first: dict[str, Any]
) -> AsyncGenerator[bytes]:
    """Yield the frames of a page: at first the whole page, as it is after change `number`, then each difference."""
    yield _event("page", first)
    last = _index_by_id(first)
    while True:
        latest = await context.runs.changes.after(number, context.ping)
        if latest == number:
            yield PING
            continue
        try:
            present = _index_by_id(await page.at(latest))
        except StoreUnavailable:  # the number stays, so that the page is read again
            await asyncio.sleep(AWAY_SECONDS)
            yield PING
            continue
        number = latest
        yield _difference(last, present)
        last = present


def _index_by_id(page: dict[str, Any]) -> dict[str, Summary]:
    return {run["id"]: run for run in page["data"]}


def _difference(before: dict[str, Summary], now: dict[str, Summary]) -> bytes:
    """Return the events that lead from one page to another; those of older runs first where a list begins with the
    newest."""
    events: list[bytes] = []
    for run in before:
        if run not in now:
            events.append(_event("run.left", {"object": "run.left", "id": run}))
    for run, summary in reversed(now.items()):
        if before.get(run) != summary:
            events.append(_event("run", summary))
    return b"".join(events)


def _event(name: str, value: object) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (name.encode(), orjson.dumps(value))
