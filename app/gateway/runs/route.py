"""Runs over HTTP: the audit trail (`GET /v1/runs`, `/{id}`, `/{id}/events`, `/{id}/steps/{n}`), `GET /{id}/stream`,
`POST /{id}/cancel` and `POST /{id}/feedback`.

Metadata needs `runs:read`; content (messages and outputs) needs `audit:read` as well, but for the answer where the key
that asked for it comes back. A caller sees the runs of its own tenant, an `admin` all of them; somebody else's run is
not there (404). Everything is read from the journal, and lists from the rows that the journal's writes keep. A page
goes on after the last row that was seen, so that new runs shift nothing.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import orjson
from fastapi import APIRouter, Depends
from starlette.requests import Request
from starlette.responses import Response

from app.core.run.events import RUN_STATES, Event
from app.core.run.progress import fold
from app.errors import Forbidden, NotFound
from app.gateway.chat import route
from app.gateway.http.auth import Caller, Keys
from app.gateway.http.context import GatewayContext
from app.gateway.http.idempotency import OnceOnly, claim, last_event
from app.gateway.http.ingress import read_json, read_json_if_any
from app.gateway.runs import audit, cancel, feedback
from app.gateway.wire import query
from app.store.protocol import RunQuery, RunRow

EVENTS_PAGE = 500


def routes(context: GatewayContext, keys: Keys, once: OnceOnly) -> APIRouter:
    """Every route under /v1/runs."""
    router = APIRouter(prefix="/v1/runs")
    reader = Annotated[Caller, Depends(keys.needs("runs:read"))]
    auditor = Annotated[Caller, Depends(keys.needs("runs:read", "audit:read"))]

    @router.get("")
    async def runs(request: Request, caller: reader) -> Response:
        return await _list(context, request.query_params, caller)

    @router.get("/{run}")
    async def run(run: str, caller: reader) -> Response:
        row = await _visible(context, run, caller)
        journal = await context.store.journal(row.id)
        return _json(audit.whole(row, journal, await context.store.feedback(row.id)))

    @router.get("/{run}/events")
    async def events(run: str, request: Request, caller: reader) -> Response:
        row = await _visible(context, run, caller)
        asked = query.read(request.query_params, {"after": query.whole, "limit": query.event_limit})
        limit = asked.get("limit", EVENTS_PAGE)
        journal = await context.store.journal(row.id, after=asked.get("after", 0))
        data = [_event(event) for event in journal.events[:limit]]
        has_more = len(journal.events) > limit
        return _json(_page(data, has_more, str(data[-1]["seq"]) if has_more else None))

    @router.get("/{run}/steps/{n}")
    async def step(run: str, n: str, caller: auditor) -> Response:
        row = await _visible(context, run, caller)
        journal = await context.store.journal(row.id)
        state = fold(journal.events)
        if not n.isdecimal() or len(n) > 6 or int(n) not in state.steps:
            raise NotFound("The run has no step of that number.")
        return _json(await audit.step_in_full(context.store, state, journal.events, int(n)))

    @router.get("/{run}/stream")
    async def stream(run: str, request: Request, caller: reader) -> Response:
        row = await _visible(context, run, caller)
        if row.key != caller.key.id and not caller.may("audit:read"):
            raise Forbidden()
        asked = query.read(request.query_params, {"starting_after": query.whole})
        if request.method == "HEAD":  # which would wait for the run's end, and for nothing
            return Response(media_type="text/event-stream")
        after = last_event(request)
        begun = await once.hear(request, caller, row.id, asked.get("starting_after") if after is None else after)
        return route.stream(context, begun)

    _acts(router, context, keys, once)
    return router


def _acts(router: APIRouter, context: GatewayContext, keys: Keys, once: OnceOnly) -> None:
    """The routes that do something to a run."""
    writer = Annotated[Caller, Depends(keys.needs("runs:write"))]

    @router.post("/{run}/cancel")
    async def stop(run: str, request: Request, caller: writer) -> Response:
        body = await read_json_if_any(request, context.bounds)
        row = await _visible(context, run, caller)
        return await once.reply(request, caller, body, lambda: _cancelled(context, row))

    @router.post("/{run}/feedback")
    async def rate(run: str, request: Request, caller: writer) -> Response:
        body = await read_json(request, context.bounds)
        row = await _visible(context, run, caller)
        made = claim(request, caller, body)
        return await once.reply(request, caller, body, lambda: feedback.take(context, row, caller, body, made))


def _json(value: Mapping[str, Any]) -> Response:
    return Response(orjson.dumps(value), media_type="application/json")


def _page(data: list[dict[str, Any]], has_more: bool, following: str | None) -> dict[str, Any]:
    return {"object": "list", "data": data, "has_more": has_more, "next": following}


def _event(event: Event) -> dict[str, Any]:
    return {"object": "run.event", "seq": event.seq, "kind": event.kind.value, "at": event.at, "body": event.body}


async def _cancelled(context: GatewayContext, row: RunRow) -> Response:
    """Ask for a run's end, wait for it a little, and show the run as lists do: `state` says what became of it."""
    return _json(audit.summary(await cancel.stop(context, row)))


async def _visible(context: GatewayContext, run: str, caller: Caller) -> RunRow:
    """A run's row if this caller may see it; a run of somebody else is as absent as one that never was."""
    if not query.RUN_ID.fullmatch(run):
        raise NotFound()
    row = await context.store.run(query.run_of(run))
    if caller.tenant not in (None, row.tenant):
        raise NotFound()
    return row


FILTERS: Mapping[str, query.Reader] = {
    "state": query.one_of(RUN_STATES),
    "tier": query.text,
    "key": query.text,
    "worker": query.text,
    "label": query.text,
    "since": query.moment,
    "until": query.moment,
    "min_cost_usd": query.micro_dollars,
    "degraded": query.truth,
    "limit": query.limit,
    "after": query.cursor,
}


async def _list(context: GatewayContext, params: Mapping[str, str], caller: Caller) -> Response:
    asked = query.read(params, FILTERS)
    limit: int = min(asked.get("limit", 20), 100)
    rows = await context.store.runs(
        RunQuery(
            tenant=caller.tenant,
            state=asked.get("state"),
            tier=asked.get("tier"),
            key=asked.get("key"),
            since=asked.get("since"),
            until=asked.get("until"),
            min_usd=asked.get("min_cost_usd"),
            degraded=asked.get("degraded"),
            tags=tuple((name, asked[name]) for name in ("worker", "label") if name in asked),
            before=asked.get("after"),
            limit=limit + 1,
        )
    )
    has_more = len(rows) > limit
    shown = rows[:limit]
    following = query.as_cursor(shown[-1].created_at, shown[-1].id) if has_more else None
    return _json(_page([audit.summary(row) for row in shown], has_more, following))
