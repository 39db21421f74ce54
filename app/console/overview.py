"""The overview: what runs, what it costs and what is wrong now. Every number leads to the runs behind it."""

from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final
from urllib.parse import urlencode

import orjson
from starlette.requests import Request
from starlette.routing import Route

from app.console.api import ApiError, Event, Session
from app.console.forms import parse_number
from app.console.live import Live, Regions
from app.console.pages import Pages, address_fields, form
from app.core.console_path import PATH
from app.core.pool.budgets import ALL_TENANTS, EVERYBODY, TEAM_FIELD

PERIODS: Final = ("hour", "day", "week", "month")
REGIONS: Final = ("now", "sums", "buckets", "tables")
"""The parts of the page that change; each has a template, and the id `overview-` with its name."""
Json = Mapping[str, Any]


def routes(pages: Pages) -> list[Route]:
    """Return the overview, which is the start page, and the check of the transparency log."""

    async def show_overview(request: Request, session: Session) -> Any:
        return await _overview(pages, request, session)

    async def verify(request: Request, session: Session) -> Any:
        fields = await form(request)
        try:
            verification = await pages.api.get(
                session, "/v1/log/verify", size=fields.get("size"), root=fields.get("root")
            )
        except ApiError as error:
            if error.status in (401, 403):
                raise
            verification = {"valid": False, "faults": [error.message]}
        return await _overview(pages, request, session, verification)

    return [pages.route("", show_overview), pages.route("/verify", verify, "POST")]


async def _overview(pages: Pages, request: Request, session: Session, verification: Json | None = None) -> Any:
    filters = address_fields(request, ("period", "until", "tenant"))
    if "live" in request.query_params:
        return _live(pages, session, filters, request.query_params["live"])
    me = await pages.api.get(session, "/v1/me")
    fault, status = "", 200
    try:
        overview = await pages.api.get(session, "/v1/overview", **filters)
    except ApiError as error:
        if error.status != 400:
            raise
        fault, status, filters = error.message, 400, {}
        overview = await pages.api.get(session, "/v1/overview")
    live = ""
    if "until" not in filters:
        live = f"{PATH}?{urlencode({**filters, 'live': overview['until']})}"
    return pages.show(
        request,
        "overview.html",
        status,
        address=f"{PATH}?{urlencode(filters)}",
        fault=fault,
        verification=verification,
        filters=filters,
        periods=[(name, _address(filters, name), name == overview["period"]) for name in PERIODS],
        sees_tenants=me["all_tenants"],
        live=live,
        **_values(pages, overview, filters),
    )


def _live(pages: Pages, session: Session, filters: Mapping[str, str], page_until: str) -> Live:
    """Return the overview as it changes. One that is older than the page's, whose `until` is `page_until`, is not sent:
    others who follow the same figures may have had it made before."""
    try:
        since = parse_number(page_until)
    except ValueError:
        since = 0

    async def render(event: Event) -> Regions:
        overview = orjson.loads(event.data)
        if overview["until"] <= since:
            return {}
        values = _values(pages, overview, filters)
        return {f"overview-{name}": pages.region(f"overview_{name}.html", **values) for name in REGIONS}

    return Live(pages.api.events(session, "/v1/overview/live", query=filters), render, is_finite=False)


def _values(pages: Pages, overview: Json, filters: Json) -> dict[str, Any]:
    """Return the values for the templates of the parts."""
    return {
        "overview": overview,
        "verify": f"{PATH}/verify?{urlencode(filters)}",
        "has_playground": pages.has_page(f"{PATH}/playground"),
        "runs": _links(overview, filters, overview["runs_since"]),
        "calls": _links(overview, filters, overview["calls_since"]),
        "rated": lambda worker: _address_of_good_runs(overview, filters, worker),
        "spent": _address_of_spending,
        "by_state": {group["state"]: group for group in overview["open"]},
        "out": [breaker for breaker in overview["breakers"] or () if breaker["state"] != "closed"],
    }


def _address(filters: Json, period: str) -> str:
    """Return the address of the overview for another period."""
    return f"{PATH}?{urlencode({**filters, 'period': period})}"


def _links(overview: Json, filters: Json, since: float) -> Callable[..., str]:
    """Return the function by which templates link a number to the list of the runs that it counts.

    The function takes further filters of that list. By default it has the runs of the period since this time;
    with `since=""` also those before."""

    def link(**own_filters: object) -> str:
        return _list({"since": since, "until": overview["until"], "tenant": filters.get("tenant"), **own_filters})

    return link


def _address_of_spending(budget: Json) -> str:
    """Return the address of the list of runs that have spent from a budget in its present window, the most expensive
    first. The window is that of now, also in an overview whose period ended before."""
    scope, name = budget["scope"], budget["name"]
    filters = {"since": budget["since"]}
    if budget["tenant"] != ALL_TENANTS:
        filters["tenant"] = budget["tenant"]
    filters["sort"] = "cost"
    if name != EVERYBODY and scope in ("key", "user"):
        filters[scope] = name
    if name != EVERYBODY and scope == "team":
        filters["metadata"] = f"{TEAM_FIELD}={name}"
    if scope == "shadow":
        filters["origin_kind"] = "shadow"
    return _list(filters)


def _address_of_good_runs(overview: Json, filters: Json, worker: str) -> str:
    """Return the address of the list of a worker's runs that were rated good in the period, old ones too."""
    times = {"rated_since": overview["since"], "rated_until": overview["until"]}
    return _list({"worker": worker, "rated": "good", **times, "tenant": filters.get("tenant")})


def _moment(seconds: float) -> str:
    """Return a time of the API as a person reads it in a field: in UTC."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _list(filters: Json) -> str:
    """Return the address of the list of runs with these filters, without the empty ones."""
    parameters = {name: value for name, value in filters.items() if value not in (None, "")}
    for name in ("since", "until", "rated_since", "rated_until"):
        if name in parameters:
            parameters[name] = _moment(parameters[name])
    return f"{PATH}/runs?{urlencode(parameters)}"
