"""The page of one run: its graph, timeline, state and one step, at the present or at any instant before; two runs side
by side; and the explanation of a run with its proofs and disclosures.

One address has the cursor that all parts share: `?step=` names the step in the pane (`3`, or `plan:0`), `?t=` the
instant in seconds since the admission, and `?by=money` colours the timeline by money. Every part is rendered on the
server from the state at one event of the journal, by the same templates for a fresh page and for a patch of a live one,
so that a page that has missed patches is right after the next one.
"""

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final
from urllib.parse import urlencode

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import HTMLResponse, Response
from starlette.routing import Route

from app.console import drawing, step_pane
from app.console.api import ApiError, Event, Session, path_segment, timeout_error
from app.console.forms import new_token
from app.console.live import Live, Regions, changed_regions
from app.console.pages import HEADERS, Pages, form, redirect_to
from app.console.request_form import RATING_SOURCE
from app.core.console_path import PATH
from app.core.roles import permits
from app.core.run.kinds import ENDED

MAX_STEP_CHARS: Final = 12
MAX_SECONDS: Final = 1e9
"""From these lengths on a step or an instant of the address is not read."""
PART_HEADERS: Final = {**HEADERS, "content-security-policy": "default-src 'none'; frame-ancestors 'none'"}
"""Headers of a part of the page: opened by itself it runs nothing, and no other site shows it in a frame."""
REGIONS: Final[Mapping[str, str]] = {
    "run-summary": "run_summary.html",
    "run-cursor": "run_cursor.html",
    "run-graph": "run_graph.html",
    "run-timeline": "run_timeline.html",
    "run-pane": "run_pane.html",
    "run-rate": "run_rate.html",
}
"""The parts of the page by their element ids, each with its template."""


class Cursor(Struct, frozen=True):
    """The cursor in the address of the page: the step in the pane, the instant, and the measure of the timeline."""

    run: str
    step: str = ""
    t: float | None = None
    by: drawing.By = "time"

    def address(self, **changes: Any) -> str:
        """Return the address of the page with another cursor, at the part of the page that it changes."""
        fields: dict[str, Any] = {"step": self.step, "t": self.t, "by": self.by} | changes
        parameters = {name: value for name, value in fields.items() if value not in (None, "", "time")}
        address = f"{PATH}/runs/{path_segment(self.run)}"
        if parameters:
            address += f"?{urlencode(parameters)}"
        if changes.get("step") is not None:
            return f"{address}#run-pane"
        if "by" in changes:
            return f"{address}#run-timeline"
        return address

    @property
    def number(self) -> int | None:
        """Return the number of the step in the pane; None if there is none, or a plan."""
        if not self.step.isdecimal():
            return None
        return int(self.step)

    @property
    def node_id(self) -> str:
        """Return the id of the node in the pane; empty if no step or plan is selected."""
        if self.step.isdecimal():
            return f"step:{self.step}"
        return self.step


def routes(pages: Pages) -> list[Route]:
    """Return the pages of one run, and of two."""
    reader = _Reader(pages)

    async def show_run(request: Request, session: Session) -> Response:
        return await _run_page(pages, reader, request, session)

    async def show_views(request: Request, session: Session) -> Response:
        values = await reader.read(session, _cursor(request))
        return HTMLResponse(pages.region("run_views.html", **values), headers=PART_HEADERS)

    async def follow(request: Request, session: Session) -> Any:
        return _live(pages, reader, session, _cursor(request), request)

    async def rate(request: Request, session: Session) -> Response:
        return await _rate(pages, reader, request, session)

    async def stop(request: Request, session: Session) -> Response:
        run = request.path_params["run"]
        await pages.api.post(session, f"/v1/runs/{path_segment(run)}/cancel", {})
        return redirect_to(f"/runs/{path_segment(run)}")

    async def replay(request: Request, session: Session) -> Response:
        run, fields = request.path_params["run"], await form(request)
        path, key = f"/v1/runs/{path_segment(run)}/replay", fields.get("once", "")
        new_run = await pages.api.post(session, path, {}, idempotency_key=key)
        return redirect_to(f"/runs/{path_segment(new_run['id'])}")

    async def explain(request: Request, session: Session) -> Response:
        return await _explanation(pages, request, session)

    async def compare(request: Request, session: Session) -> Response:
        return await _comparison(pages, request, session)

    return [
        pages.route("/compare", compare),
        pages.route("/runs/{run}", show_run),
        pages.route("/runs/{run}/views", show_views, is_part=True),
        pages.route("/runs/{run}/live", follow),
        pages.route("/runs/{run}/explain", explain),
        pages.route("/runs/{run}/feedback", rate, "POST"),
        pages.route("/runs/{run}/cancel", stop, "POST"),
        pages.route("/runs/{run}/replay", replay, "POST"),
    ]


async def _run_page(
    pages: Pages,
    reader: "_Reader",
    request: Request,
    session: Session,
    status: int = 200,
    refused_rating: Mapping[str, str] | None = None,
) -> Response:
    """Return the page of the run. `refused_rating` has the `comment` of a rating that the API has not taken, and the
    `message` why."""
    cursor = _cursor(request)
    values = await reader.read(session, cursor) | {"refused_rating": refused_rating}
    live = not values["has_ended"] and cursor.t is None
    addresses = _addresses(cursor, values)
    return pages.show(request, "run.html", status, live=live, once=new_token(), addresses=addresses, **values)


async def _rate(pages: Pages, reader: "_Reader", request: Request, session: Session) -> Response:
    """Store a rating of the run."""
    run, fields = request.path_params["run"], await form(request)
    body = {"thumbs": fields.get("thumbs", ""), "source": RATING_SOURCE}
    comment = fields.get("comment", "").strip()
    if comment:
        body["comment"] = comment
    try:
        await pages.api.post(session, f"/v1/runs/{path_segment(run)}/feedback", body)
    except ApiError as error:
        if error.status == 401:
            raise
        refused_rating = {"message": error.message, "comment": comment}
        return await _run_page(pages, reader, request, session, error.status, refused_rating)
    return redirect_to(f"/runs/{path_segment(run)}")


def _cursor(request: Request) -> Cursor:
    """Return the cursor in the address. What cannot be read counts as if it were not there."""
    parameters = request.query_params
    step = parameters.get("step", "")
    is_step = step.isascii() and step.isdecimal()
    is_plan = step.startswith("plan:") and step[5:].isdecimal()
    if len(step) >= MAX_STEP_CHARS or not (is_step or is_plan):
        step = ""
    by: drawing.By = "time"
    if parameters.get("by") == "money":
        by = "money"
    return Cursor(request.path_params["run"], step, _instant(parameters.get("t", "")), by)


def _instant(text: str) -> float | None:
    """Return the seconds that a text says, at least 0; None where it says none, or too many to be an instant."""
    try:
        seconds = max(float(text), 0.0)
    except ValueError:
        return None
    if seconds < MAX_SECONDS:
        return seconds
    return None  # also what is not a number


def _addresses(cursor: Cursor, values: Mapping[str, Any]) -> dict[str, str]:
    """Return the addresses to which the page leads beside its own."""
    run = values["run"]
    other = ""
    if run["origin"]:
        other = run["origin"]["run"]
    follow = {"after": values["state"]["seq"], "step": cursor.step, "by": cursor.by}
    return {
        "compare": f"{PATH}/compare?{urlencode({'a': run['id'], 'b': other})}",
        "following": f"{PATH}/runs?{urlencode({'origin_run': run['id']})}",
        "live": f"{PATH}/runs/{path_segment(run['id'])}/live?{urlencode(follow)}",
    }


class _Reader:
    """Reads from the API what the page shows at an instant."""

    def __init__(self, pages: Pages) -> None:
        self._api = pages.api

    async def read(
        self, session: Session, cursor: Cursor, seq: int | None = None, cache: "_Cache | None" = None
    ) -> dict[str, Any]:
        """Return the values of all templates: at the cursor's instant, or behind event `seq`; else behind the latest
        event. `cache` is what a live page has read before."""
        cache = cache or _Cache()
        views = await self._views(session, cursor, seq, cache)
        if cache.may_write is None:
            me = await self._api.get(session, "/v1/me")
            cache.may_write = permits(me["scopes"], "runs:write", all_tenants=me["all_tenants"])
        whole, state, timeline = views["run"], views["state"], views["timeline"]
        is_latest = state["seq"] == state["last_seq"]
        full = timeline
        if not is_latest:
            path = f"/v1/runs/{path_segment(cursor.run)}/timeline"
            full = await self._api.get(session, path, at=state["last_seq"])
        length = timeline["length_seconds"]
        now = state["seconds"]
        if cursor.t is not None and seq is None:
            now = cursor.t

        def link(step: str | int | None) -> str:
            return cursor.address(step=step)

        times = drawing.instants(full)
        before, after = drawing.neighbours(times, now)
        return {
            "cursor": cursor,
            "run": whole,
            "key_name": views["key_name"],
            "state": state,
            "graph": drawing.draw_graph(views["graph"], cursor.node_id, link),
            "timeline": drawing.draw_timeline(timeline, length, cursor.by, cursor.node_id, link),
            "pane": step_pane.pane(views, cursor.step),
            "has_ended": whole["state"] in ENDED,
            "may_write": cache.may_write,
            "refused_rating": None,
            "is_latest": is_latest,
            "now": now,
            "length": length,
            "instants": times,
            "before": before,
            "after": after,
        }

    async def _views(self, session: Session, cursor: Cursor, seq: int | None, cache: "_Cache") -> Any:
        """Return the run and its views, with the first words of subtasks and the content of the chosen step. Reading
        these is logged for others' runs, so a live page reads them again only where they have changed."""
        step = cursor.number
        is_first = not cache.words
        query: dict[str, object] = {"t": cursor.t}
        if seq is not None:
            query = {"at": seq}
        views = await self._get_views(session, cursor, query, words=is_first, content=is_first)
        if views["run"]["erased"]:
            cache.forget()
        lacks_words = cache.lacks_words(views)
        lacks_content = step is not None and cache.lacks_content(views, step)
        if not is_first and (lacks_words or lacks_content):
            views = await self._get_views(session, cursor, query, words=lacks_words, content=lacks_content)
        cache.complete(views, step)
        return views

    async def _get_views(
        self, session: Session, cursor: Cursor, query: Mapping[str, object], *, words: bool, content: bool
    ) -> Any:
        """Return the views as the API gives them. `words` asks for the first words of subtasks, and `content` for the
        content of the step in the pane."""
        parameters = {**query, "words": str(words).lower()}
        if content:
            parameters["step"] = cursor.number
        return await self._api.get(session, f"/v1/runs/{path_segment(cursor.run)}/views", **parameters)


class _Cache:
    """Parts of a run that one live page has fetched from the API, kept so that no update fetches them again."""

    def __init__(self) -> None:
        self.may_write: bool | None = None
        """True if the person may rate, stop and replay runs; None before it was read."""
        self.words: dict[str, Any] = {}
        """The first words of subtasks by node."""
        self._content: dict[str, Any] | None = None
        self._version: list[Any] = []
        """The content of the chosen step, and what the step was then."""
        self._is_erased = False

    def forget(self) -> None:
        """Read everything once more, because the run's content was erased meanwhile: it is not sent again."""
        if not self._is_erased:
            self._is_erased = True
            self.words.clear()
            self._content = None

    def lacks_words(self, views: Mapping[str, Any]) -> bool:
        """Return True if the views have a step whose first words were not read yet."""
        return any(node["id"] not in self.words for node in step_pane.steps(views))

    def lacks_content(self, views: Mapping[str, Any], step: int) -> bool:
        """Return True if the views have this step, and its content has changed since it was read."""
        version = step_pane.version(views, step)
        return version is not None and (self._content is None or version != self._version)

    def complete(self, views: dict[str, Any], step: int | None) -> None:
        """Keep what was read, and put what was read before into the views."""
        for node in step_pane.steps(views):
            if node["id"] not in self.words:
                self.words[node["id"]] = node["subtask"]
            node["subtask"] = self.words[node["id"]]
        if step is not None and views["explanation"] is not None:
            self._content, self._version = step_pane.content(views, step), step_pane.version(views, step) or []
        views["content"] = self._content


def _live(pages: Pages, reader: _Reader, session: Session, cursor: Cursor, request: Request) -> Live:
    """Return the stream of patches of a run that goes on. The ids are the journal's numbers."""
    cache = _Cache()
    last_regions: dict[str, str] = {}
    position = request.headers.get("last-event-id") or request.query_params.get("after", "")
    after = None
    if position.isascii() and position.isdecimal() and len(position) <= 15:
        after = position

    async def render(event: Event) -> Regions:
        values = await reader.read(session, cursor, int(event.id), cache)
        regions = {name: pages.region(template, **values) for name, template in REGIONS.items()}
        changes = changed_regions(last_regions, regions)
        last_regions.update(changes)
        return changes

    return Live(_journal(pages, session, cursor.run, after), render)


@asynccontextmanager
async def _journal(pages: Pages, session: Session, run: str, after: str | None) -> AsyncIterator[AsyncIterator[Event]]:
    """Yield the events of the run's journal until it has ended. Raises `ApiError` where the API ends its stream before
    that, after some time or because the service stops: the browser then asks again, behind the last event."""
    path = f"/v1/runs/{path_segment(run)}"

    async def follow_events() -> AsyncIterator[Event]:
        async with pages.api.events(session, f"{path}/events/stream", last_event_id=after) as events:
            async for event in events:
                yield event
        if (await pages.api.get(session, path))["state"] not in ENDED:
            raise timeout_error("The stream has ended before the run.")

    yield follow_events()


# -- the explanation, proofs and disclosures


async def _explanation(pages: Pages, request: Request, session: Session) -> Response:
    run = request.path_params["run"]
    path = f"/v1/runs/{path_segment(run)}"
    explanation = await pages.api.get(session, f"{path}/explain")
    return pages.show(
        request,
        "run_explain.html",
        run=run,
        explanation=explanation,
        proof=await _read_or_refusal(pages, session, f"{path}/proof"),
        disclosures=await _read_or_refusal(pages, session, "/v1/disclosures", run=run, limit=200),
    )


async def _read_or_refusal(pages: Pages, session: Session, path: str, **query: Any) -> dict[str, Any]:
    """Return the reply of the API, or the words of its refusal, which are shown in place of it."""
    try:
        return {"reply": await pages.api.get(session, path, **query), "refusal": None}
    except ApiError as error:
        return {"reply": None, "refusal": error.message}


# -- two runs


async def _comparison(pages: Pages, request: Request, session: Session) -> Response:
    parameters = request.query_params
    first, second = parameters.get("a", "").strip(), parameters.get("b", "").strip()
    comparison, fault, status = None, "", 200
    if first and second:
        try:
            comparison = await pages.api.get(session, "/v1/runs/compare", a=first, b=second)
        except ApiError as error:
            if error.status not in (400, 404):
                raise
            fault, status = error.message, error.status
    if comparison is not None:
        for pair in comparison["steps"]:
            for side in ("first", "second"):
                step = pair[side]
                if step is not None:
                    step["href"] = Cursor(comparison[side]["run"]).address(step=step["n"])
    return pages.show(request, "compare.html", status, a=first, b=second, comparison=comparison, fault=fault)
