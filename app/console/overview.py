"""The overview: what runs, what it costs and what is wrong now. Every number leads to the runs behind it."""

from collections.abc import Callable, Mapping
from typing import Any, Final
from urllib.parse import urlencode

from starlette.requests import Request
from starlette.routing import Route

from app.console.api import ApiError, Session
from app.console.pages import Pages, form
from app.console.session import PATH

PERIODS: Final = ("hour", "day", "week", "month")
DEFAULT: Final = "day"
Json = Mapping[str, Any]


def routes(pages: Pages) -> list[Route]:
    """The overview, which is the start page, and the check of the transparency log."""

    async def show_overview(request: Request, session: Session) -> Any:
        return await _overview(pages, request, session)

    async def verify(request: Request, session: Session) -> Any:
        given = await form(request)
        try:
            found = await pages.api.get(session, "/v1/log/verify", size=given.get("size"), root=given.get("root"))
        except ApiError as error:
            if error.status in (401, 403):
                raise
            found = {"valid": False, "faults": [error.message]}
        return await _overview(pages, request, session, verified=found)

    return [pages.route("", show_overview), pages.route("/verify", verify, "POST")]


async def _overview(pages: Pages, request: Request, session: Session, verified: Json | None = None) -> Any:
    asked = {name: request.query_params[name] for name in ("period", "until", "tenant") if name in request.query_params}
    asked = {name: value.strip() for name, value in asked.items() if value.strip()}
    me = await pages.api.get(session, "/v1/me")
    fault, status = "", 200
    try:
        found = await pages.api.get(session, "/v1/overview", **asked)
    except ApiError as error:
        if error.status != 400:
            raise
        fault, status, asked = error.message, 400, {}
        found = await pages.api.get(session, "/v1/overview")
    return pages.show(
        request,
        "overview.html",
        status,
        found=found,
        fault=fault,
        verified=verified,
        asked=asked,
        periods=[(name, _address(asked, name), name == found["period"]) for name in PERIODS],
        sees_tenants=me["all_tenants"],
        runs=_links(found, asked),
        by_state={one["state"]: one for one in found["open"]},
        out=[one for one in found["breakers"] or () if one["state"] != "closed"],
    )


def _address(asked: Json, period: str) -> str:
    """The address of the overview of another period."""
    return f"{PATH}?{urlencode({**asked, 'period': period})}"


def _links(found: Json, asked: Json) -> Callable[..., str]:
    """The function that makes the address of the list of the runs behind a number; without a filter of its own, those
    of the period. `since=""` leaves the period away."""

    def link(**filters: object) -> str:
        whole = {"since": found["runs_since"], "until": found["until"], "tenant": asked.get("tenant"), **filters}
        chosen = {name: value for name, value in whole.items() if value not in (None, "")}
        return f"{PATH}/runs?{urlencode(chosen)}"

    return link
