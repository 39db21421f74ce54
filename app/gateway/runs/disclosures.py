"""`GET /v1/disclosures`: the ledger of disclosures, which says who was sent what, and by whose decision.

It holds no content. A caller sees the rows of its own tenant, a key of all tenants those of every tenant. A page is
JSON, JSON lines or CSV, by `format` or by the `Accept` header; in the last two the next page is named by a `Link`.
"""

import csv
import io
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final
from urllib.parse import urlencode

import orjson
from fastapi import APIRouter, Query
from starlette.requests import Request
from starlette.responses import Response

from app.core.run.recipients import Recipient
from app.errors import InvalidRequest
from app.gateway.http.callers import Caller, Keys
from app.gateway.http.context import GatewayContext
from app.gateway.http.json_reply import json_reply, list_page
from app.gateway.openapi import disclosure_replies, operations
from app.gateway.runs.identity import key_names
from app.gateway.runs.reports import csv_cell
from app.gateway.wire import query
from app.store.protocol import Disclosure, DisclosureQuery, TenantStore

CSV: Final = "text/csv"
LINES: Final = "application/x-ndjson"
FORMATS: Final[Mapping[str, str]] = {CSV: "csv", LINES: "jsonl", "application/jsonl": "jsonl"}
"""The formats by the media types of an `Accept` header."""
COLUMNS: Final = (
    *("run", "call", "step", "at", "recipient", "recipient_kind", "provider", "model", "region", "tenant", "key"),
    *("user", "labels", "saw_user", "saw_steps", "saw_tool_results", "bytes", "input_tokens", "output_tokens"),
    *("outcome", "planned_by", "attempt", "passed_over", "withheld"),
)
"""The columns of CSV."""
MOST_CALLS: Final = 10_000
"""The most calls of a run among which one is looked for."""


def routes(context: GatewayContext, keys: Keys) -> APIRouter:
    """Return the route of the ledger."""
    router = APIRouter(prefix="/v1/disclosures", tags=["runs"])
    auditor = Annotated[Caller, keys.needs("audit:read")]

    @router.get(
        "",
        operation_id="list_disclosures",
        summary="List who was sent what, by default the newest first.",
        response_model=disclosure_replies.DisclosureList,
        responses=operations.replies(*operations.READING),
    )
    async def list_disclosures(
        filters: Annotated[query.DisclosureFilters, Query()], caller: auditor, request: Request
    ) -> Response:
        """One row for each recipient of a call: workers, conductors, embedders and shadows. Several values of one
        parameter mean any of them."""
        if any(not caller.sees(tenant) for tenant in filters.tenant):
            raise InvalidRequest("Only a key of all tenants sees another tenant's disclosures.", param="tenant")
        store = context.store.of_tenant(caller.tenant)
        place = filters.after
        if isinstance(place, query.CallId):
            place = await _place_of_call(store, place)
        rows = await store.disclosures(_query(filters, place))
        page_rows = rows[: filters.limit]
        next_page = None
        if len(rows) > filters.limit:
            next_page = query.as_place(page_rows[-1].at, page_rows[-1].call)
        form = filters.format or _negotiate_format(request)
        names: Mapping[str, str | None] = {}
        if form == "json":
            names = await key_names(context.store.administration_of(caller.tenant), [row.key for row in page_rows])
        return _page_reply(page_rows, names, next_page, form, request)

    return router


async def _place_of_call(store: TenantStore, call_id: query.CallId) -> tuple[float, str]:
    """Return the place of a row in the list. Raises `InvalidRequest` if there is no such row, or the caller may not see
    it."""
    for row in await store.disclosures(DisclosureQuery(runs=(call_id.run,), limit=MOST_CALLS)):
        if row.call == call_id.call:
            return row.at, row.call
    raise InvalidRequest("There is no row of the id in 'after'.", param="after", code="invalid_value")


def _query(filters: query.DisclosureFilters, before: tuple[float, str] | None) -> DisclosureQuery:
    """Return the store's query for one row more than a page has, which shows whether another page follows."""
    return DisclosureQuery(
        recipients=tuple(filters.recipient),
        kinds=tuple(filters.recipient_kind),
        providers=tuple(filters.provider),
        saw=query.saw_of(filters.saw),
        since=filters.since,
        until=filters.until,
        tenants=tuple(filters.tenant),
        users=tuple(filters.user),
        runs=tuple(filters.run),
        keys=tuple(filters.key),
        before=before,
        ascending=filters.order == "asc",
        limit=filters.limit + 1,
    )


def _negotiate_format(request: Request) -> str:
    """Return the format that the `Accept` header asks for."""
    for part in request.headers.get("accept", "").split(","):
        media_type = part.partition(";")[0].strip().lower()
        if media_type in FORMATS:
            return FORMATS[media_type]
    return "json"


def _page_reply(
    rows: Sequence[Disclosure], names: Mapping[str, str | None], next_page: str | None, form: str, request: Request
) -> Response:
    """Return a page of the list; `names` are those of the keys, which the list has in JSON only."""
    if form == "json":
        data = [render_disclosure(row) | {"key_name": names[row.key]} for row in rows]
        return json_reply(list_page(data, has_more=next_page is not None) | {"next": next_page})
    headers = {}
    if next_page is not None:
        parameters = [(name, value) for name, value in request.query_params.multi_items() if name != "after"]
        parameters.append(("after", next_page))
        headers["link"] = f'<{request.url.path}?{urlencode(parameters)}>; rel="next"'
    if form == "csv":
        return Response(as_csv(rows), media_type=f"{CSV}; charset=utf-8", headers=headers)
    return Response(b"".join(as_lines(rows)), media_type=LINES, headers=headers)


def recipient(recipient: Recipient) -> dict[str, Any]:
    """Return as JSON what a recipient is shown, and why: for the ledger, and for a plan that announces it."""
    return {
        "step": recipient.step,
        "recipient": recipient.recipient,
        "recipient_kind": recipient.kind,
        "provider": recipient.provider or None,
        "model": recipient.model or None,
        "region": recipient.region or None,
        "labels": list(recipient.labels),
        "saw": {"user": recipient.saw_user, "steps": list(recipient.saw_steps), "tool_results": recipient.saw_results},
        "why": {
            "planned_by": recipient.planned_by,
            "withheld": [{"what": what, "reason": reason} for what, reason in recipient.withheld],
        },
    }


def render_disclosure(row: Disclosure) -> dict[str, Any]:
    """Return a row as JSON."""
    disclosed = recipient(row)
    passed_over = [{"worker": worker, "reason": reason} for worker, reason in row.passed_over]
    return {
        "id": f"{row.run}.{row.call}",
        "object": "disclosure",
        "run": row.run,
        "call": row.call,
        "at": row.at,
        "tenant": row.tenant,
        "key": row.key,
        "user": row.user,
        **disclosed,
        "bytes": row.bytes,
        "input_tokens": row.input_tokens,
        "output_tokens": row.output_tokens,
        "outcome": row.outcome,
        "why": {**disclosed["why"], "attempt": row.attempt, "passed_over": passed_over},
    }


def as_lines(rows: Iterable[Disclosure]) -> list[bytes]:
    """Return rows as JSON lines."""
    return [orjson.dumps(render_disclosure(row), option=orjson.OPT_APPEND_NEWLINE) for row in rows]


def as_csv(rows: Iterable[Disclosure]) -> str:
    """Return rows as CSV (RFC 4180). A text that a spreadsheet would take for a formula begins with an apostrophe."""
    output = io.StringIO()
    writer = csv.writer(output)
    writer.writerow(COLUMNS)
    for row in rows:
        flat = _flat(row)
        writer.writerow([csv_cell(flat[name]) for name in COLUMNS])
    return output.getvalue()


def _flat(row: Disclosure) -> dict[str, Any]:
    value = render_disclosure(row)
    why, saw = value.pop("why"), value.pop("saw")
    return {
        **value,
        "labels": " ".join(row.labels),
        "saw_user": str(saw["user"]).lower(),
        "saw_steps": " ".join(map(str, saw["steps"])),
        "saw_tool_results": str(saw["tool_results"]).lower(),
        "planned_by": why["planned_by"],
        "attempt": why["attempt"],
        "passed_over": " ".join(f"{worker}:{reason}" for worker, reason in row.passed_over),
        "withheld": " ".join(f"{what}:{reason}" for what, reason in row.withheld),
    }
