"""Approvals: the plans that wait, what each would disclose to whom and cost, and the decisions on them.

A decision names the digest of the plan that was shown. If the run asks for something else by then, nothing is decided,
and the page shows what it asks for now.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any, Final

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.console.api import ApiError, Event, Session, path_segment
from app.console.forms import Field, new_token, read_fields
from app.console.live import Live, Regions
from app.console.pages import Pages, form_lists, last_value, redirect_to
from app.core.roles import permits

PAGE_PLANS: Final = 20
"""Plans of a page; the journal of each is read."""
MAX_WATCHED_RUNS: Final = 100
"""The most waiting runs that a page which is open looks at for changes."""
REGION: Final = "waiting"
MAX_USD: Final = Field("max_usd", "The run may cost at most (dollars)", "number")
REPLACEMENTS: Final = Field("replacements", "Workers that may take over", "checks")


def routes(pages: Pages, prefix: str) -> list[Route]:
    """Return the list of approvals and the page of one; `prefix` is that of the API's routes on this listener."""
    approvals = Approvals(pages, prefix)
    return [
        pages.route("/approvals", approvals.show_list),
        pages.route("/approvals/{run}", approvals.show),
        pages.route("/approvals/{run}", approvals.decide, "POST"),
    ]


class Approvals:
    """The pages of approvals."""

    def __init__(self, pages: Pages, prefix: str) -> None:
        self._pages = pages
        self._api = pages.api
        self._prefix = prefix

    async def show_list(self, request: Request, session: Session) -> Any:
        """Return the plans that wait, as a page or as they change, or those that were decided."""
        after = request.query_params.get("after")
        if request.query_params.get("status") == "decided":
            page = await self._api.get(session, self._prefix, status="decided", limit=PAGE_PLANS, after=after)
            return self._pages.show(request, "approvals.html", status="decided", page=page, is_live=False)
        if "live" in request.query_params:
            waiting = {"state": "awaiting_approval", "limit": MAX_WATCHED_RUNS}
            source = self._api.events(session, "/v1/runs/live", query=waiting)
            return Live(source, partial(self._regions, session), is_finite=False)
        page = await self._read_waiting(session, after)
        return self._pages.show(request, "approvals.html", status="waiting", page=page, is_live=not after)

    async def show(self, request: Request, session: Session) -> Response:
        """Return one plan, with the form of a decision for those who may decide."""
        return await self._page(request, session)

    async def decide(self, request: Request, session: Session) -> Response:
        """Carry out a decision."""
        lists = await form_lists(request)
        path = f"{self._prefix}/{path_segment(request.path_params['run'])}"
        decision = last_value(lists, "decision")
        body, faults = read_fields((MAX_USD, REPLACEMENTS), lists)
        if decision == "refuse":  # for which neither of these counts
            body, faults = {}, {}
        status = 400
        if not faults:
            body |= {"decision": decision, "digest": last_value(lists, "digest")}
            body["reason"] = last_value(lists, "reason").strip()
            headers = {}
            key = last_value(lists, "once")
            if key:
                headers["idempotency_key"] = key
            try:
                await self._api.post(session, path, body, **headers)
                return redirect_to(f"/approvals/{path_segment(request.path_params['run'])}")
            except ApiError as error:
                if error.status == 401 or error.code == "run_not_found":
                    raise
                status, faults = error.status, {"": _refusal_text(error)}
        return await self._page(request, session, status=status, faults=faults, lists=lists)

    async def _read_waiting(self, session: Session, after: str | None = None) -> dict[str, Any]:
        """Return a page of the plans that wait, without their instructions: their content is read on the page of
        one."""
        page: dict[str, Any] = await self._api.get(session, self._prefix, words="false", limit=PAGE_PLANS, after=after)
        return page

    async def _regions(self, session: Session, _event: Event) -> Regions:
        page = await self._read_waiting(session)
        return {REGION: self._pages.region("approvals_waiting.html", page=page)}

    async def _page(
        self,
        request: Request,
        session: Session,
        *,
        status: int = 200,
        faults: Mapping[str, str] | None = None,
        lists: Mapping[str, Sequence[str]] | None = None,
    ) -> Response:
        """Return the page of a plan. `lists` are the fields of a decision that has to be corrected; who is shown
        another plan by then has to choose anew."""
        lists = lists or {}
        approval = await self._api.get(session, f"{self._prefix}/{path_segment(request.path_params['run'])}")
        me = await self._api.get(session, "/v1/me")
        workers = {step["worker"] for step in approval["plan"]["steps"]}
        decision = ""
        if last_value(lists, "digest") == approval["digest"]:
            decision = last_value(lists, "decision")
        return self._pages.show(
            request,
            "approval.html",
            status,
            approval=approval,
            may_decide=permits(me["scopes"], "approvals:decide", all_tenants=me["all_tenants"]),
            is_own=approval["four_eyes"] and approval["key"] == me["id"],
            others=[name for name in approval["workers"] if name not in workers],
            faults=faults or {},
            entries=lists,
            decision=decision,
            once=new_token(),
        )


def _refusal_text(error: ApiError) -> str:
    if error.code == "approval_digest_mismatch":
        return f"{error.message} Nothing was decided. What the run asks for now is shown below."
    return error.message
