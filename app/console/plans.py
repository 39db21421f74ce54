"""Plans: the list, and one plan with its estimate, its disclosures and its revisions, which can be edited and run.

Every button of the form that changes something makes a revision, through `PATCH /v1/plans/{id}`; what is run is the
revision that the page has shown, by its digest.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.console import plan_form, request_form, samples
from app.console.api import ApiError, ApiRequest, Session, path_segment
from app.console.forms import new_token
from app.console.pages import Pages, form_lists, last_value, redirect_to
from app.console.plan_form import Button
from app.console.playground import idempotency_key, origin_of
from app.console.request_form import FormFault, Outcome
from app.console.step_pane import cut
from app.core.console_path import PATH

SAVED_PARAM: Final = "saved"
"""The parameter of the address of a revision that was made by pressing the button to run."""


def routes(pages: Pages) -> list[Route]:
    """Return the list of plans, one plan, and what its form does."""
    plans = Plans(pages)
    return [
        pages.route("/plans", plans.show_list),
        pages.route("/plans/{plan}", plans.show),
        pages.route("/plans/{plan}", plans.act, "POST"),
    ]


class Plans:
    """The pages of plans."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._api = pages.api

    async def show_list(self, request: Request, session: Session) -> Response:
        """Return the plans, the newest first."""
        page = await self._api.get(session, "/v1/plans", after=request.query_params.get("after"))
        following = None
        if page["has_more"]:
            following = page.get("next")
        return self._pages.show(request, "plans.html", plans=page["data"], following=following)

    async def show(self, request: Request, session: Session) -> Response:
        """Return one revision of a plan, by default the latest."""
        plan = await self._plan(request, session, request.query_params.get("revision"))
        notice = ""
        if SAVED_PARAM in request.query_params:
            notice = f"Your changes are revision {plan['revision']}, which has not run yet: look at it, then run it."
        return await self._page(request, session, plan, Outcome(notice=notice), {})

    async def act(self, request: Request, session: Session) -> Response:
        """Make the revision that the form says, or run the one that it shows."""
        lists = await form_lists(request)
        button = plan_form.read_button(last_value(lists, "action"))
        plan = await self._plan(request, session, last_value(lists, "revision"))
        form_steps = plan_form.read(lists)
        edits: list[dict[str, Any]] = []
        try:
            edits = plan_form.edits(plan["plan"]["steps"], form_steps, button, lists)
            if not edits:
                return await self._without_edits(request, session, plan, lists, button)
            body = {"revision": plan["revision"], "edits": edits}
            path = f"/v1/plans/{path_segment(plan['id'])}"
            later = await self._api.request(session, ApiRequest("PATCH", path, body=body))
        except FormFault as fault:
            return await self._page(request, session, plan, Outcome(fault.faults), lists)
        except ApiError as error:
            if error.status == 401:
                raise
            added_at = -1
            if button.action == "add" and edits:
                added_at = int(edits[-1]["step"])
            faults = {}
            field = plan_form.field_of_refusal(error.param, button, len(form_steps), added_at)
            if field:
                faults[field] = error.message
            outcome = Outcome(faults, request_form.refusal(error))
            if error.is_undecided:
                outcome = replace(outcome, once=last_value(lists, "once"))
            return await self._page(request, session, plan, outcome, lists)
        address = f"/plans/{path_segment(later['id'])}?revision={later['revision']}"
        if button.action == "run":
            address += f"&{SAVED_PARAM}=1"
        return redirect_to(address)

    async def _without_edits(
        self, request: Request, session: Session, plan: Mapping[str, Any], lists: plan_form.Lists, button: Button
    ) -> Response:
        """Run the revision, or say that the form has changed nothing of it."""
        if button.action != "run":
            notice = "Nothing was changed, so no revision was made."
            return await self._page(request, session, plan, Outcome(notice=notice), {})
        body = {"revision": plan["revision"], "digest": plan["digest"], "stream": True, "stream_steps": True}
        key = idempotency_key(last_value(lists, "once"), "run", body)
        run = await self._api.begin_run(session, f"/v1/plans/{path_segment(plan['id'])}/run", body, key)
        return redirect_to(f"/playground/{path_segment(run)}")

    async def _plan(self, request: Request, session: Session, revision: str | None) -> Any:
        path = f"/v1/plans/{path_segment(request.path_params['plan'])}"
        return await self._api.get(session, path, revision=revision)

    async def _page(
        self,
        request: Request,
        session: Session,
        plan: Mapping[str, Any],
        outcome: Outcome,
        lists: plan_form.Lists,
    ) -> Response:
        """Return the page of a revision. `lists` are the fields of a form that has to be corrected and is shown again;
        they are empty on a new page."""
        steps = shown_steps = plan["plan"]["steps"]
        form_steps = plan_form.read(lists)
        if len(form_steps) == len(steps):
            shown_steps = form_steps
        numbers = [revision["revision"] for revision in plan["revisions"]]
        against = _against(request, numbers, plan["revision"])
        differences: Sequence[plan_form.StepDifference] = ()
        if against is not None:
            earlier = await self._plan(request, session, str(against))
            differences = plan_form.differences(earlier["plan"]["steps"], steps)
        run = {"revision": plan["revision"], "digest": plan["digest"]}
        url = f"{origin_of(request)}/v1/plans/{path_segment(plan['id'])}/run"
        return self._pages.show(
            request,
            "plan.html",
            outcome.status,
            plan=plan,
            question=cut(plan["question"]),
            path=f"{PATH}/plans/{path_segment(plan['id'])}",
            steps=shown_steps,
            new=plan_form.new_step(lists),
            latest=numbers[-1],
            against=against,
            differences=differences,
            faults=outcome.faults,
            refusal=outcome.refusal,
            notice=outcome.notice,
            once=outcome.once or new_token(),
            command=samples.curl(url, run),
        )


def _against(request: Request, numbers: Sequence[int], current: int) -> int | None:
    """Return the revision with which the shown one is compared: the one that the address names, else the one before
    it."""
    text = request.query_params.get("against", "")
    before = None
    for number in numbers:
        if str(number) == text:
            return number
        if number < current:
            before = number
    return before
