"""The playground: ask as a program would, watch the plan and its steps, answer calls of tools, rate the answer, and
take the request along as code.

One form holds everything that the page knows of the request, so that each button sends all of it and nothing is kept on
the server. A run is begun through the route of chat completions and goes on when the browser leaves; the page then
follows it like anybody else.
"""

import hashlib
import secrets
from collections.abc import Mapping
from typing import Any, Final

import orjson
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from app.console import request_form, samples
from app.console.api import ApiError, Session, path_segment
from app.console.following import FollowedRun
from app.console.live import Live
from app.console.pages import Pages, form_lists, redirect_to
from app.console.request_form import FormFault, Refusal
from app.console.session import PATH, is_https

PLAN_SECONDS: Final = 300.0
"""The longest that a page waits for a conductor's plan."""
TOKEN_BYTES: Final = 12
KEPT_CHARS: Final = 200_000
"""The longest request that a page carries along beside the fields that it was made of."""
VISIBLE_FIELDS: Final = ("question", "tier", "history")
"""The fields that are always visible."""
RATINGS: Final = {"up": "good", "down": "bad"}


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
        given = {name: value for name, value in request.query_params.items() if name in request_form.EMPTY}
        return await self._page(request, session, request_form.read(given))

    async def show_run(self, request: Request, session: Session) -> Any:
        """Return the page of a run, or its live stream."""
        run = request.path_params["run"]
        followed = FollowedRun(self._pages, session, run)
        if "live" in request.query_params:
            return Live(followed.stream(), followed.regions)
        found = await self._api.get(session, f"/v1/runs/{path_segment(run)}")
        fields = request_form.read({"tier": str(found["model"])})
        return await self._page(request, session, fields, run=run)

    async def act(self, request: Request, session: Session) -> Any:
        """Do what the pressed button says."""
        lists = await form_lists(request)
        given = {name: values[-1] for name, values in lists.items()}
        fields = request_form.read(given)
        action, run = given.get("action", "ask"), given.get("run", "")
        sent = _parse_hidden_field(given.get("sent", ""))
        if action in RATINGS and run:
            return await self._rate(request, session, fields, sent, given)
        if action == "results":
            fields["history"] = _with_results(fields["history"], given.get("turn", ""), lists.get("result", []))
        else:
            fields["history"] = ""
        try:
            body = request_form.to_body(fields)
            once = idempotency_key(given.get("once", ""), action, body)
            if action == "preview":
                headers = {"idempotency_key": once}
                made = await self._api.request(
                    session, "POST", "/v1/plans", body=body, headers=headers, within=PLAN_SECONDS
                )
                return redirect_to(f"/plans/{path_segment(made['id'])}")
            run = await self._api.begin_run(session, "/v1/chat/completions", body, once)
        except FormFault as fault:
            return await self._page(request, session, fields, status=400, faults=fault.faults)
        except ApiError as error:
            if error.status == 401:
                raise
            refusal = request_form.refusal(error)
            return await self._page(request, session, fields, status=error.status, refusal=refusal)
        return await self._page(request, session, fields, run=run, sent=body)

    async def _rate(
        self, request: Request, session: Session, fields: dict[str, str], sent: Any, given: Mapping[str, str]
    ) -> Response:
        """Store a rating, and show the page as it was with a word about it."""
        run, action = given["run"], given["action"]
        rating = {"thumbs": action} | ({"comment": given["comment"]} if given.get("comment", "").strip() else {})
        try:
            await self._api.post(session, f"/v1/runs/{path_segment(run)}/feedback", rating)
        except ApiError as error:
            if error.status == 401:
                raise
            refusal = request_form.refusal(error)
            return await self._page(request, session, fields, status=error.status, run=run, sent=sent, refusal=refusal)
        said = f"Your rating of {run} is stored: {RATINGS[action]}."
        return await self._page(request, session, fields, run=run, sent=sent, notice=said)

    async def _page(
        self,
        request: Request,
        session: Session,
        fields: dict[str, str],
        *,
        status: int = 200,
        run: str = "",
        sent: Mapping[str, Any] | None = None,
        faults: Mapping[str, str] | None = None,
        refusal: Refusal | None = None,
        notice: str = "",
    ) -> Response:
        tiers = [model for model in (await self._api.get(session, "/v1/models"))["data"] if not model["baton"]["alias"]]
        if not fields["tier"] and tiers:
            fields["tier"] = tiers[-1]["id"]
        all_faults = dict(faults or {})
        if refusal is not None and refusal.field:
            all_faults[refusal.field] = refusal.message
        live, view = "", None
        if run:
            followed = FollowedRun(self._pages, session, run)
            await followed.read()
            view = await followed.view()
            if not followed.is_over:
                live = f"{PATH}/playground/{path_segment(run)}?live"
        return self._pages.show(
            request,
            "playground.html",
            status,
            fields=fields,
            tiers=tiers,
            efforts=_effort_levels(tiers),
            faults=all_faults,
            refusal=refusal,
            notice=notice,
            open_options=_has_hidden_value(fields),
            run=run,
            live=live,
            view=view,
            once=secrets.token_urlsafe(TOKEN_BYTES),
            sent=_hidden_field(sent),
            samples=_samples(request, sent),
        )


def _has_hidden_value(fields: Mapping[str, str]) -> bool:
    """Return True if a field among the options, which are folded away at first, was changed."""
    options = [name for name in request_form.EMPTY if name not in VISIBLE_FIELDS]
    return any(fields[name] != request_form.EMPTY[name] for name in options)


def origin_of(request: Request) -> str:
    """Return the address of the service as the browser has it, without a path."""
    return f"{'https' if is_https(request) else 'http'}://{request.headers.get('host', 'localhost')}"


def _effort_levels(tiers: list[Any]) -> list[str]:
    """Return the levels of effort that some tier has, each once."""
    return list(dict.fromkeys(effort for tier in tiers for effort in tier["baton"]["efforts"]))


def idempotency_key(token: str, action: str, body: Mapping[str, Any]) -> str:
    """Return the `Idempotency-Key` of a request: the same form sent twice is one request, another body is another
    one."""
    sent = orjson.dumps([token, action, body], option=orjson.OPT_SORT_KEYS)
    return f"console-{hashlib.sha256(sent).hexdigest()[:40]}"


def _samples(request: Request, sent: Any) -> list[samples.Sample]:
    """Return the request as code; nothing where the hidden field was changed into something that is no request."""
    try:
        if not sent:
            return []
        return samples.samples(origin_of(request), sent)
    except (AttributeError, LookupError, TypeError, ValueError, RecursionError):
        return []


def _hidden_field(sent: Mapping[str, Any] | None) -> str:
    """Return the request for a hidden field, by which a later page shows its code again; "" for a very large one."""
    text = orjson.dumps(sent).decode() if sent else ""
    return text if len(text) <= KEPT_CHARS else ""


def _with_results(history: str, turn: str, results: list[str]) -> str:
    """Return the messages since the question, with the assistant's calls and the results that a person has written."""
    asked = _parse_hidden_field(turn)
    calls = _as_list(asked.get("tool_calls")) if isinstance(asked, dict) else []
    ids = [call.get("id") if isinstance(call, dict) else None for call in calls]
    answered = zip(ids, results, strict=False)
    said = [{"role": "tool", "tool_call_id": id_, "content": text} for id_, text in answered]
    return orjson.dumps([*_as_list(_parse_hidden_field(history)), asked, *said]).decode()


def _as_list(value: Any) -> list[Any]:
    """Return a list of a hidden field, which its sender may have changed into anything."""
    return value if isinstance(value, list) else []


def _parse_hidden_field(text: str) -> Any:
    """Return the JSON of a hidden field; None if it is not valid."""
    try:
        return orjson.loads(text) if text else None
    except orjson.JSONDecodeError:
        return None
