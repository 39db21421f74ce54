"""The playground: ask as a program would, watch the plan and its steps, answer calls of tools, rate the answer, and
take the request along as code.

One form holds everything that the page knows of the request, so that each button sends all of it and nothing is kept on
the server. A run is begun through the route of chat completions and goes on when the browser leaves; the page then
follows it like anybody else.
"""

import hashlib
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson
from msgspec import Struct
from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.console import request_form, samples
from app.console.api import ApiError, ApiRequest, Session, path_segment
from app.console.following import FollowedRun
from app.console.forms import new_token
from app.console.live import Live
from app.console.pages import Pages, address_of, form_lists, redirect_to
from app.console.request_form import RATING_SOURCE, FormFault, Outcome
from app.console.session import is_https
from app.core.console_path import PATH

PLAN_SECONDS: Final = 300.0
"""The longest that a page waits for a conductor's plan."""
KEPT_CHARS: Final = 200_000
"""The longest request that a page carries along beside the fields that it was made of."""
VISIBLE_FIELDS: Final = ("question", "tier", "history")
"""The fields that are always visible."""
RATINGS: Final = {"up": "good", "down": "bad"}


class ShownRun(Struct, frozen=True):
    """The run that the page follows, and the request that began it; empty where there is none."""

    id: str = ""
    request: Any = None
    """The body that was sent. It is None if the run was begun elsewhere, and comes back in a hidden field, so that it
    may be anything."""
    results: Sequence[str] = ()
    """The results of tools that a person has written and the API has not taken."""
    comment: str = ""
    """The comment of a rating that the API has not taken."""


def routes(pages: Pages) -> list[Route]:
    """Return the form, what its buttons do, and the page of a run that was begun elsewhere."""
    playground = Playground(pages)
    return [
        pages.route("/playground", playground.show),
        pages.route("/playground", playground.act, "POST"),
        pages.route("/playground/{run}", playground.show_run),
    ]


class Playground:
    """The pages of the playground."""

    def __init__(self, pages: Pages) -> None:
        self._pages = pages
        self._api = pages.api

    async def show(self, request: Request, session: Session) -> Response:
        """Return the empty form; the address may bring fields of it."""
        values = {name: value for name, value in request.query_params.items() if name in request_form.EMPTY_FIELDS}
        return await self._page(request, session, request_form.read(values), ShownRun(), Outcome())

    async def show_run(self, request: Request, session: Session) -> Any:
        """Return the page of a run, or its live stream."""
        run = request.path_params["run"]
        followed_run = FollowedRun(self._pages, session, run)
        if "live" in request.query_params:
            return Live(followed_run.stream(), followed_run.regions)
        run_record = await self._api.get(session, f"/v1/runs/{path_segment(run)}")
        fields = request_form.read({"tier": str(run_record["model"])})
        return await self._page(request, session, fields, ShownRun(run), Outcome())

    async def act(self, request: Request, session: Session) -> Any:
        """Do what the pressed button says."""
        lists = await form_lists(request)
        form = {name: texts[-1] for name, texts in lists.items()}
        fields = request_form.read(form)
        action = form.get("action", "ask")
        shown_run = ShownRun(form.get("run", ""), _parse_hidden_field(form.get("sent", "")))
        if action in RATINGS and shown_run.id:
            comment = form.get("comment", "")
            outcome = await self._rate(session, shown_run.id, action, comment)
            if outcome.refusal is not None:
                shown_run = replace(shown_run, comment=comment)
            return await self._page(request, session, fields, shown_run, outcome)
        if action == "results":
            results = lists.get("result", [])
            history = _with_results(fields["history"], form.get("turn", ""), results)
            run_if_refused = replace(shown_run, results=results)
        else:
            history = fields["history"] = ""
            run_if_refused = ShownRun()
        try:
            body = request_form.to_body({**fields, "history": history})
            key = idempotency_key(form.get("once", ""), action, body)
            if action == "preview":
                plan = await self._make_plan(session, body, key)
                return redirect_to(f"/plans/{path_segment(plan)}")
            run = await self._api.begin_run(session, "/v1/chat/completions", body, key)
        except FormFault as fault:
            return await self._page(request, session, fields, run_if_refused, Outcome(fault.faults))
        except ApiError as error:
            if error.status == 401:
                raise
            outcome = Outcome(refusal=request_form.refusal(error))
            if error.is_undecided:
                outcome = replace(outcome, once=form.get("once", ""))
            return await self._page(request, session, fields, run_if_refused, outcome)
        fields["history"] = history
        return await self._page(request, session, fields, ShownRun(run, body), Outcome())

    async def _make_plan(self, session: Session, body: Mapping[str, Any], key: str) -> str:
        """Let the conductor make a plan for a request, and return the plan's id."""
        planning = ApiRequest("POST", "/v1/plans", body=body, headers={"idempotency_key": key})
        plan = await self._api.request(session, planning, within=PLAN_SECONDS)
        return str(plan["id"])

    async def _rate(self, session: Session, run: str, thumbs: str, comment: str) -> Outcome:
        """Store a rating of a run."""
        rating = {"thumbs": thumbs, "source": RATING_SOURCE}
        if comment.strip():
            rating["comment"] = comment
        try:
            await self._api.post(session, f"/v1/runs/{path_segment(run)}/feedback", rating)
        except ApiError as error:
            if error.status == 401:
                raise
            return Outcome(refusal=request_form.refusal(error))
        return Outcome(notice=f"Your rating of {run} is stored: {RATINGS[thumbs]}.")

    async def _page(
        self, request: Request, session: Session, fields: dict[str, str], shown_run: ShownRun, outcome: Outcome
    ) -> Response:
        """Return the form with these fields, and below it the run."""
        models = await self._api.get(session, "/v1/models")
        tiers = [model for model in models["data"] if not model["baton"]["alias"]]
        if not fields["tier"] and tiers:
            fields["tier"] = tiers[-1]["id"]
        faults = dict(outcome.faults)
        if outcome.refusal is not None and outcome.refusal.field:
            faults[outcome.refusal.field] = outcome.refusal.message
        live, view, address = "", None, address_of(request)
        if shown_run.id:
            address = f"{PATH}/playground/{path_segment(shown_run.id)}"
            followed_run = FollowedRun(self._pages, session, shown_run.id)
            await followed_run.read()
            view = {**await followed_run.view(), "results": shown_run.results, "comment": shown_run.comment}
            if not followed_run.is_over:
                live = f"{address}?live"
        return self._pages.show(
            request,
            "playground.html",
            outcome.status,
            address=address,
            fields=fields,
            tiers=tiers,
            efforts=_effort_levels(tiers),
            faults=faults,
            refusal=outcome.refusal,
            notice=outcome.notice,
            open_options=_has_hidden_value(fields),
            run=shown_run.id,
            live=live,
            view=view,
            once=outcome.once or new_token(),
            sent=_hidden_field(shown_run.request),
            samples=_samples(request, shown_run.request),
        )


def _has_hidden_value(fields: Mapping[str, str]) -> bool:
    """Return True if a field among the options, which are folded away at first, was changed."""
    options = [name for name in request_form.EMPTY_FIELDS if name not in VISIBLE_FIELDS]
    return any(fields[name] != request_form.EMPTY_FIELDS[name] for name in options)


def origin_of(request: Request) -> str:
    """Return the address of the service as the browser has it, without a path."""
    host = request.headers.get("host", "localhost")
    if is_https(request):
        return f"https://{host}"
    return f"http://{host}"


def _effort_levels(tiers: list[Any]) -> list[str]:
    """Return the levels of effort that some tier has, each once."""
    efforts: dict[str, None] = {}
    for tier in tiers:
        efforts |= dict.fromkeys(tier["baton"]["efforts"])
    return list(efforts)


def idempotency_key(token: str, action: str, body: Mapping[str, Any]) -> str:
    """Return the `Idempotency-Key` of a request: the same form sent twice is one request, another body is another
    one."""
    text = orjson.dumps([token, action, body], option=orjson.OPT_SORT_KEYS)
    return f"console-{hashlib.sha256(text).hexdigest()[:40]}"


def _samples(request: Request, body: Any) -> list[samples.Sample]:
    """Return the request as code; nothing where the hidden field was changed into something that is no request."""
    try:
        if not body:
            return []
        return samples.samples(origin_of(request), body)
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return []


def _hidden_field(body: Any) -> str:
    """Return the request for a hidden field, by which a later page shows its code again; "" for a very large one."""
    if not body:
        return ""
    text = orjson.dumps(body).decode()
    if len(text) > KEPT_CHARS:
        return ""
    return text


def _with_results(history: str, turn: str, results: list[str]) -> str:
    """Return the messages since the question, with the assistant's calls and the results that a person has written."""
    assistant = _parse_hidden_field(turn)
    messages = [*_as_list(_parse_hidden_field(history)), assistant]
    calls: list[Any] = []
    if isinstance(assistant, dict):
        calls = _as_list(assistant.get("tool_calls"))
    for call, result in zip(calls, results, strict=False):
        call_id = None
        if isinstance(call, dict):
            call_id = call.get("id")
        messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
    return orjson.dumps(messages).decode()


def _as_list(value: Any) -> list[Any]:
    """Return a list of a hidden field, which its sender may have changed into anything."""
    if not isinstance(value, list):
        return []
    return value


def _parse_hidden_field(text: str) -> Any:
    """Return the JSON of a hidden field; None if it is not valid."""
    if not text:
        return None
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return None
