"""The list of runs: every filter of the API, pages forwards and back with counts, and a live tail."""

from collections.abc import Mapping, Sequence
from typing import Any, Final, get_args
from urllib.parse import urlencode

from msgspec import Struct
from starlette.requests import Request
from starlette.routing import Route

from app.console.api import ApiError, Event, Session
from app.console.live import Live, Regions
from app.console.pages import Pages, address_fields
from app.core.console_path import PATH
from app.core.plan.workflow import Topology
from app.core.run.kinds import RUN_STATES


class Field(Struct, frozen=True):
    """A field of the form; `choices` are the values of a list with their words, without any it takes a text, or with
    `is_day` a day of the calendar."""

    name: str
    label: str
    choices: tuple[tuple[str, str], ...] = ()
    hint: str = ""
    is_day: bool = False


def named_choices(values: Sequence[str]) -> tuple[tuple[str, str], ...]:
    """Return the choices of a filter: any value, or one of these."""
    return (("", "any"), *[(value, value.replace("_", " ")) for value in values])


USUAL_FIELDS: Final = (
    Field("state", "State", named_choices(RUN_STATES)),
    Field("tier", "Tier"),
    Field("worker", "Worker"),
    Field("since", "Began at or after", hint="2026-11-24T08:00Z"),
    Field("until", "Began before", hint="2026-11-25"),
    Field("sort", "Sort by", (("time", "time"), ("cost", "cost, of ended runs"))),
    Field("order", "Order", (("desc", "descending"), ("asc", "ascending"))),
    Field("limit", "Runs a page", (("20", "20"), ("50", "50"), ("100", "100"))),
)
FURTHER_FIELDS: Final = (
    Field("key", "Key (id)"),
    Field("label", "Label"),
    Field("topology", "Topology", named_choices(get_args(Topology))),
    Field("model", "Model asked for"),
    Field("user", "End user"),
    Field("metadata", "Metadata", hint="team=search"),
    Field("min_cost_usd", "Cost at least, $"),
    Field("max_cost_usd", "Cost at most, $"),
    Field(
        "origin_kind",
        "Follows from another run",
        (
            ("", "any"),
            ("none", "no: asked for by itself"),
            ("plan", "of a plan"),
            ("replay", "replay"),
            ("shadow", "shadow"),
        ),
    ),
    Field("origin_run", "Follows from the run"),
    Field("degraded", "Degraded", (("", "any"), ("true", "yes"), ("false", "no"))),
    Field("preview", "Previews", (("", "any"), ("true", "only plans that were not executed"), ("false", "none"))),
    Field(
        "outcome", "With a call that ended", named_choices(("ok", "error", "truncated", "cancelled", "unknown", "open"))
    ),
    Field("error", "Error (its code)"),
    Field("rated", "Rated", (("", "any"), ("good", "good: 0.5 or more"), ("bad", "less"))),
    Field("rated_since", "Rated at or after", hint="2026-11-24T08:00Z"),
    Field("rated_until", "Rated before", hint="2026-11-25"),
    Field("queue", "In the queue", (("", "any"), ("untaken", "nobody has taken it yet"))),
    Field("request_id", "Request id"),
    Field("trace_id", "Trace id"),
    Field("tenant", "Tenant"),
)
FILTERS: Final = tuple(field.name for field in (*USUAL_FIELDS, *FURTHER_FIELDS))
ORDER_FIELDS: Final = frozenset({"sort", "order", "limit"})
"""Fields that arrange the list and select nothing."""
DETAILS: Final = ("count", "workers", "preview", "key_name")
OF_ALL_TENANTS: Final = frozenset({"tenant", "queue"})
"""Fields for keys of all tenants."""
LIST: Final = f"{PATH}/runs"


def routes(pages: Pages) -> list[Route]:
    """Return the list of runs with its filters."""

    async def show_runs(request: Request, session: Session) -> Any:
        filters = _request_query(request)
        me = await pages.api.get(session, "/v1/me")
        if "live" in request.query_params:
            return _live(pages, session, filters, sees_tenants=me["all_tenants"])
        fault, status, page = "", 200, None
        try:
            page = await _read_list(pages, session, filters)
        except ApiError as error:
            if error.status != 400:
                raise
            fault, status = error.message, 400
        here = f"{LIST}?{urlencode(filters)}"
        return pages.show(
            request,
            "runs.html",
            status,
            usual=USUAL_FIELDS,
            further=[field for field in FURTHER_FIELDS if field.name not in OF_ALL_TENANTS or me["all_tenants"]],
            filters=filters,
            is_filtered_further=any(filters.get(field.name) for field in FURTHER_FIELDS),
            fault=fault,
            is_followed=request.query_params.get("follow") != "no",
            here_followed=here,
            live=f"{here}&live",
            region=page and _table_values(pages, page, filters, sees_tenants=me["all_tenants"]),
        )

    return [pages.route("/runs", show_runs)]


def _request_query(request: Request) -> dict[str, str]:
    """Return the filters and the place in the list that the address names."""
    return address_fields(request, (*FILTERS, "after", "before"))


async def _read_list(pages: Pages, session: Session, filters: Mapping[str, str]) -> Any:
    return await pages.api.get(session, "/v1/runs", **filters, include=list(DETAILS))


def _live(pages: Pages, session: Session, filters: Mapping[str, str], *, sees_tenants: bool) -> Live:
    """Return the list as it changes. What is shown already is not sent again."""
    last_html = ""

    async def render(_event: Event) -> Regions:
        nonlocal last_html
        page = await _read_list(pages, session, filters)
        html = pages.region("runs_table.html", **_table_values(pages, page, filters, sees_tenants=sees_tenants))
        if html == last_html:
            return {}
        last_html = html
        return {"runs": html}

    return Live(pages.api.events(session, "/v1/runs/live", query=filters), render, is_finite=False)


def _table_values(
    pages: Pages, page: Mapping[str, Any], filters: Mapping[str, str], *, sees_tenants: bool
) -> dict[str, Any]:
    """Return the values of the table's template."""
    parameters = {name: value for name, value in filters.items() if name not in ("after", "before")}
    links = {"first": "", "previous": "", "next": ""}
    if page["previous"]:
        links["first"] = f"{LIST}?{urlencode(parameters)}"
        links["previous"] = f"{LIST}?{urlencode({**parameters, 'before': page['previous']})}"
    if page["next"]:
        links["next"] = f"{LIST}?{urlencode({**parameters, 'after': page['next']})}"
    return {
        "runs": [run | {"marks": _marks(run), "seconds": _seconds(run)} for run in page["data"]],
        "range": _range(page),
        "links": links,
        "is_filtered": any(name not in ORDER_FIELDS for name in parameters),
        "sees_tenants": sees_tenants,
        "has_playground": pages.has_page(f"{PATH}/playground"),
    }


def _marks(run: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the peculiarities of a run, each with a class of the style sheet and its word."""
    marks = []
    if run["preview"]:
        marks.append(("preview", "preview"))
    if run["origin"] is not None:
        kind = words = run["origin"]["kind"]
        if kind == "plan":
            words = "of a plan"
        marks.append((kind, words))
    if run["degraded"]:
        marks.append(("degraded", "degraded"))
    return marks


def _seconds(run: Mapping[str, Any]) -> float | None:
    """Return how long a run took; None if it has not ended."""
    if run["ended_at"] is None:
        return None
    seconds: float = run["ended_at"] - run["created_at"]
    return seconds


def _range(page: Mapping[str, Any]) -> str:
    """Return the words that say which runs of how many the page has."""
    count, size = page["count"], len(page["data"])
    total = f"more than {count['most']:,}"
    if count["total"] is not None:
        total = f"{count['total']:,}"
    if not size and not count["total"]:
        return ""
    if not size:
        return f"No runs here, of {total}"
    if count["in_front"] is None:
        return f"{size:,} runs behind more than {count['most']:,} others, of {total}"
    return f"Runs {count['in_front'] + 1:,} to {count['in_front'] + size:,} of {total}"
