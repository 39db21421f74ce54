"""Approvals: the plans that wait, what each would disclose to whom and cost, and the decisions on them.

A decision names the digest of the plan that was shown. If the run asks for something else by then, nothing is decided,
and the page shows what it asks for now.
"""

import secrets
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.console.api import ApiError, Event, Session, path_segment
from app.console.forms import REFUSALS, TOKEN_BYTES, Field, read_fields
from app.console.live import Live, Regions
from app.console.pages import Pages, form_lists, last_value, redirect_to

PAGE: Final = 20
"""Plans of a page; the journal of each is read."""
MAX_WATCHED_RUNS: Final = 100
"""The most waiting runs that a page which is open looks at for changes."""
REGION: Final = "waiting"
MAX_USD: Final = Field("max_usd", "The run may cost at most (dollars)", "number")
REPLACEMENTS: Final = Field("replacements", "Workers that may take over", "checks")


def routes(pages: Pages, prefix: str) -> list[Route]:
    """Return the list of approvals and the page of one; `prefix` is that of the API's routes on this listener."""

    async def show_list(request: Request, session: Session) -> Any:
        if request.query_params.get("status") == "decided":
            return await _decided_page(pages, prefix, request, session)
        if "live" in request.query_params:
            waiting = {"state": "awaiting_approval", "limit": MAX_WATCHED_RUNS}
            source = pages.api.events(session, "/v1/runs/live", query=waiting)
            return Live(source, partial(_regions, pages, prefix, session), is_finite=False)
        after = request.query_params.get("after")
        found = await _read_waiting(pages, prefix, session, after)
        return pages.show(request, "approvals.html", status="waiting", found=found, is_live=not after)

    async def show_one(request: Request, session: Session) -> Response:
        return await _approval_page(pages, prefix, request, session)

    async def decide(request: Request, session: Session) -> Response:
        return await _decide(pages, prefix, request, session)

    return [
        pages.route("/approvals", show_list),
        pages.route("/approvals/{run}", show_one),
        pages.route("/approvals/{run}", decide, "POST"),
    ]


async def _decided_page(pages: Pages, prefix: str, request: Request, session: Session) -> Response:
    after = request.query_params.get("after")
    found = await pages.api.get(session, prefix, status="decided", limit=PAGE, after=after)
    return pages.show(request, "approvals.html", status="decided", found=found, is_live=False)


async def _read_waiting(pages: Pages, prefix: str, session: Session, after: str | None = None) -> dict[str, Any]:
    """Return a page of the plans that wait, without their instructions: their content is read on the page of one."""
    found: dict[str, Any] = await pages.api.get(session, prefix, words="false", limit=PAGE, after=after)
    return found


async def _regions(pages: Pages, prefix: str, session: Session, _event: Event) -> Regions:
    found = await _read_waiting(pages, prefix, session)
    return {REGION: pages.region("approvals_waiting.html", found=found)}


async def _approval_page(
    pages: Pages,
    prefix: str,
    request: Request,
    session: Session,
    *,
    status: int = 200,
    faults: Mapping[str, str] | None = None,
    given: Mapping[str, Sequence[str]] | None = None,
) -> Response:
    """Return the page of one plan, with the form of a decision for those who may decide."""
    approval = await pages.api.get(session, f"{prefix}/{path_segment(request.path_params['run'])}")
    me = await pages.api.get(session, "/v1/me")
    used = {step["worker"] for step in approval["plan"]["steps"]}
    return pages.show(
        request,
        "approval.html",
        status,
        approval=approval,
        may_decide=not {"approvals:decide", "admin"}.isdisjoint(me["scopes"]),
        is_own=approval["four_eyes"] and approval["key"] == me["id"],
        others=[name for name in approval["workers"] if name not in used],
        faults=faults or {},
        given=given or {},
        once=secrets.token_urlsafe(TOKEN_BYTES),
    )


async def _decide(pages: Pages, prefix: str, request: Request, session: Session) -> Response:
    given = await form_lists(request)
    run = request.path_params["run"]
    body, faults = read_fields((MAX_USD, REPLACEMENTS), given)
    status = 400
    if not faults:
        decision = last_value(given, "decision")
        if decision == "refuse":
            body = {}
        body |= {"decision": decision, "digest": last_value(given, "digest")}
        body["reason"] = last_value(given, "reason").strip()
        headers = {}
        key = last_value(given, "once")
        if key:
            headers["idempotency_key"] = key
        try:
            await pages.api.post(session, f"{prefix}/{path_segment(run)}", body, **headers)
            return redirect_to(f"/approvals/{path_segment(run)}")
        except ApiError as error:
            if error.status not in REFUSALS or error.code == "run_not_found":
                raise
            status, faults = error.status, {"": _refusal_text(error)}
    return await _approval_page(pages, prefix, request, session, status=status, faults=faults, given=given)


def _refusal_text(error: ApiError) -> str:
    if error.code == "approval_digest_mismatch":
        return f"{error.message} Nothing was decided. What the run asks for now is shown below."
    return error.message
