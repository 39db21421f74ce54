"""Runs over HTTP: the audit trail (lists: `run_lists.py`; `GET /v1/runs/{id}`, `/{id}/events`, `/{id}/proof`,
`/{id}/steps/{n}`), the views (`GET /v1/runs/{id}/graph`, `/{id}/timeline`, `/{id}/state`, `/compare`),
`GET /{id}/stream`, `POST /{id}/cancel`, `POST /{id}/feedback`, `POST /{id}/replay`, `GET /{id}/compare/{other}` and
`DELETE /{id}`.

Metadata needs `runs:read`; content (messages and outputs) needs `audit:read` as well, but for the answer where the key
that asked for it comes back. A caller sees the runs of its own tenant, a key of all tenants every run; any other run
is absent (404). Everything is read from the journal, and lists from the rows that the journal's writes keep. A page
goes on after the last row that was seen, so that new runs shift nothing.
"""

from collections.abc import Awaitable, Callable, Collection, Sequence
from datetime import UTC, datetime
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends, Path, Query
from msgspec import Struct
from pydantic import WithJsonSchema
from starlette.requests import Request
from starlette.responses import Response

from app.core.rating.alignment import SideBySide
from app.core.rating.comparison import Comparison
from app.core.run import graph, timeline
from app.core.run.events import Event, Kind
from app.core.run.fold import fold
from app.core.run.identifiers import run_of_reply
from app.core.run.instant import Instant, snapshot
from app.core.run.state import RunState
from app.core.transparency.notes import NoteInvalid
from app.core.transparency.tiles import TileMissing
from app.engine.runs.admission import Order
from app.errors import Forbidden, NotFound, RecordDamaged, RunPruned
from app.gateway.chat import route
from app.gateway.http.bodies import json_body
from app.gateway.http.callers import Caller, Keys
from app.gateway.http.context import GatewayContext
from app.gateway.http.idempotency import Idempotency, TurnToFollow, last_event
from app.gateway.http.json_reply import json_reply, list_page
from app.gateway.http.sse import EventStream
from app.gateway.openapi import explanation_replies, operations, run_replies, view_replies
from app.gateway.runs import (
    audit,
    cancel,
    exchanges,
    explanation,
    feedback,
    journal_stream,
    log_route,
    reads,
    replay,
    run_lists,
    views,
)
from app.gateway.runs.identity import key_name
from app.gateway.runs.open_streams import OpenStream, OpenStreams
from app.gateway.wire import query
from app.store.protocol import Journal, RunRow, TenantStore

SCHEMAS: Final[operations.Schemas] = {
    **run_lists.SCHEMAS,
    "CancelRequest": lambda: {"type": "object", "description": "Nothing: an empty object, or no body at all."},
    "FeedbackRequest": lambda: operations.request_schema(feedback.FeedbackRequest, "FeedbackRequest"),
    "ReplayRequest": lambda: operations.request_schema(replay.ReplayRequest, "ReplayRequest"),
}
RunId = Annotated[
    str, Path(alias="run", description="The run's id, or the id of a reply of it.", examples=["run_01jd9k2v7c"])
]
OtherRun = Annotated[str, Path(description="The id of the other run.", examples=["run_01jd9k2v7d"])]
StepNumber = Annotated[
    str, Path(alias="n", description="The step's number, from 0."), WithJsonSchema({"type": "integer", "minimum": 0})
]
"""Read as text: what is no number is a step that there is not (404), not a fault of the request (400)."""


class VisibleRun(Struct, frozen=True):
    """A run that the caller may see: its row, and the store by which the caller reads and changes it."""

    row: RunRow
    store: TenantStore
    may_read: bool
    """True if the key may read the run's content: it began the run, or has `audit:read`."""
    caller: Caller


def routes(context: GatewayContext, keys: Keys, idempotency: Idempotency) -> APIRouter:
    """Return every route under /v1/runs."""
    router = APIRouter(prefix="/v1/runs", tags=["runs"])
    streams = OpenStreams(context, keys)
    run_lists.add_routes(router, context, keys, streams)
    _add_align_route(router, context, keys)  # before the routes of one run, which would take its path for a run's id
    _add_read_routes(router, context, keys)
    _add_follow_route(router, context, keys, streams)
    _add_view_routes(router, context, keys)
    _add_all_views_route(router, context, keys)
    _add_content_routes(router, context, keys)
    _add_stream_route(router, context, keys, idempotency)
    _add_end_routes(router, context, keys, idempotency)
    _add_rate_route(router, context, keys, idempotency)
    _add_replay_route(router, context, keys, idempotency)
    _add_compare_route(router, context, keys)
    return router


def _add_read_routes(router: APIRouter, context: GatewayContext, keys: Keys) -> None:
    """The audit trail of one run."""
    audited = Annotated[VisibleRun, Depends(_visible(context, keys.needs("runs:read")))]
    declared = operations.replies(*operations.READING)

    @router.get(
        "/{run}",
        operation_id="get_run",
        summary="Explain a run.",
        response_model=run_replies.WholeRun,
        responses=declared,
    )
    async def get_run(run: audited) -> Response:
        """The run's plan, calls, money and ratings, without any content. The ids of tool calls that wait for results
        are shown to the key that began the run, and to keys with `audit:read`; to others they are null."""
        journal = await run.store.journal(run.row.id)
        return json_reply(await _record_of(run, journal, fold(journal.events)))

    @router.get(
        "/{run}/events",
        operation_id="list_run_events",
        summary="Read a run's journal.",
        response_model=run_replies.EventList,
        responses=declared,
    )
    async def list_run_events(run: audited, filters: Annotated[query.EventFilters, Query()]) -> Response:
        """The events from which everything else about a run is derived, in order. The ids of tool calls that wait are
        shown as in the run itself."""
        journal = await run.store.journal(run.row.id, after=filters.after)
        events = journal.events[: filters.limit]
        waiting = await _hidden_ids(run, events)
        data = [_event(event, waiting) for event in events]
        has_more = len(journal.events) > filters.limit
        next_page = None
        if has_more:
            next_page = str(data[-1]["seq"])
        return json_reply(list_page(data, has_more=has_more, key="seq") | {"next": next_page})

    @router.get(
        "/{run}/proof",
        operation_id="prove_run",
        summary="Read what the transparency log has of a run, with its proofs.",
        response_model=run_replies.RunProof,
        responses=declared,
    )
    async def prove_run(run: audited) -> Response:
        """The entries about the run, each with the hashes that lead from it to the root of the signed checkpoint."""
        try:
            proof = await context.store.log.proof(run.row.id)
        except (NoteInvalid, TileMissing):
            found = "The checkpoint or hashes of the transparency log are damaged, so that nothing of it can be proven."
            raise RecordDamaged(f"{found} Report it to the operator: `baton audit verify` says which are.") from None
        return json_reply(log_route.proof_of_run(run.row.id, run.row.seq, proof))


def _add_align_route(router: APIRouter, context: GatewayContext, keys: Keys) -> None:
    visible = _visible(context, keys.needs("runs:read"))

    @router.get(
        "/compare",
        operation_id="align_runs",
        summary="Align two runs step by step.",
        response_model=view_replies.SideBySide,
        responses=operations.replies(*operations.READING),
    )
    async def align_runs(
        options: Annotated[query.ComparedRuns, Query()], caller: Annotated[Caller, keys.needs("runs:read")]
    ) -> Response:
        """The steps of two runs side by side: those with the same subtask, then those of the same worker, then those at
        the same place. Subtasks and outputs are compared for those who may read the content of both runs."""
        first, second = await visible(options.a, caller), await visible(options.b, caller)
        return await _compare(context, first, second, views.align)


def _add_follow_route(router: APIRouter, context: GatewayContext, keys: Keys, streams: OpenStreams) -> None:
    visible = Annotated[VisibleRun, Depends(_visible(context, keys.needs("runs:read")))]
    watch = journal_stream.JournalWatch(context)

    @router.get(
        "/{run}/events/stream",
        operation_id="follow_run_events",
        summary="Follow a run's journal as it is written.",
        status_code=200,
        response_class=OpenStream,
        responses=operations.replies(*operations.READING, 429, events="RunEvent"),
        openapi_extra={"parameters": [operations.LAST_EVENT_ID]},
    )
    async def follow_run_events(
        run: visible, options: Annotated[query.JournalStreamOptions, Query()], request: Request
    ) -> Response:
        """The events of `GET /v1/runs/{id}/events`, each under its number as the event id, until the run has ended, or
        for the seconds that are asked for. `Last-Event-ID` counts before `starting_after`. A stream ends within five
        seconds of its key's revocation."""
        after = last_event(request, options.starting_after)

        def to_json(state: RunState, events: Sequence[Event]) -> list[dict[str, Any]]:
            hidden: Collection[str] = ()
            if not run.may_read:
                hidden = state.unanswered_tool_calls.keys()
            return [_event(event, hidden) for event in events]

        journal = await run.store.journal(run.row.id)
        frames = journal_stream.frames(context, watch, run.store, journal.events, after or 0, to_json)
        return streams.begin(request, run.caller, frames, options.seconds)


def _add_view_routes(router: APIRouter, context: GatewayContext, keys: Keys) -> None:
    """A run as people look at it, at present or at any instant before."""
    visible = Annotated[VisibleRun, Depends(_visible(context, keys.needs("runs:read")))]
    declared = operations.replies(*operations.READING)

    async def at_instant(run: VisibleRun, options: query.InstantOptions) -> Instant:
        return views.at_instant(await run.store.journal(run.row.id), options, context.now())

    @router.get(
        "/{run}/graph",
        operation_id="get_run_graph",
        summary="Read the graph of a run: who was shown what, and what was withheld from whom.",
        response_model=view_replies.Graph,
        responses=declared,
    )
    async def get_run_graph(run: visible, options: Annotated[query.GraphOptions, Query()]) -> Response:
        """The plans and steps of all rounds with their calls, the edges between them, and a place for each on a page. A
        node keeps its place when another one is added. The first words of subtasks are content: they are shown to the
        key that began the run, and to keys with `audit:read`."""
        run_graph = graph.graph(await at_instant(run, options))
        content = run.may_read and options.words
        if content:
            await reads.note_foreign(context, run.caller, run.row, "graph")
        return json_reply(await views.with_words(run.store, run_graph, content=content))

    @router.get(
        "/{run}/timeline",
        operation_id="get_run_timeline",
        summary="Read the timeline of a run: where its time and its money went.",
        response_model=view_replies.Timeline,
        responses=declared,
    )
    async def get_run_timeline(run: visible, options: Annotated[query.InstantOptions, Query()]) -> Response:
        """Spans on one axis, nested in each other: waits, plans, steps, attempts and their phases, with the money and
        the tokens of each. There is no content in it."""
        return json_reply(timeline.timeline(await at_instant(run, options)).to_json())

    @router.get(
        "/{run}/state",
        operation_id="get_run_state",
        summary="Read the state of a run at an instant.",
        response_model=view_replies.StateAtInstant,
        responses=declared,
    )
    async def get_run_state(run: visible, options: Annotated[query.InstantOptions, Query()]) -> Response:
        """The exact state after an event, or some seconds after the admission: the fold of the journal up to then.
        There is no content in it."""
        return json_reply(snapshot(await at_instant(run, options)))


def _add_all_views_route(router: APIRouter, context: GatewayContext, keys: Keys) -> None:
    visible = Annotated[VisibleRun, Depends(_visible(context, keys.needs("runs:read")))]

    @router.get(
        "/{run}/views",
        operation_id="get_run_views",
        summary="Read a run with all of its views at an instant.",
        response_model=view_replies.Views,
        responses=operations.replies(*operations.READING),
    )
    async def get_run_views(run: visible, options: Annotated[query.ViewsOptions, Query()]) -> Response:
        """The run as it is now, and its state, graph and timeline at the instant, all of one reading of the journal.

        The present of a run that goes on is its latest event here, so that the reply changes only when something
        happens. With `step` it has that step in full as it was then, for keys with `audit:read`, and the explanation
        of the run as it is now; if there was no such step, both are null.
        """
        journal = await run.store.journal(run.row.id)
        at = views.at_instant(journal, options, now=journal.events[-1].at)
        state = at.state
        if not at.is_latest:
            state = fold(journal.events)
        run_record = await _record_of(run, journal, state)
        content = run.may_read and options.words
        if content:
            await reads.note_foreign(context, run.caller, run.row, "graph")
        step_parts = {"step": None, "explanation": None}
        if options.step is not None and options.step in at.state.steps:
            read_run = explanation.ReadRun(run.row, journal, state, run_record)
            step_parts = await _read_step_parts(context, run, at, read_run, options.step)
        administration = context.store.administration_of(run.caller.tenant)
        return json_reply(
            {
                "object": "run.views",
                "run": run_record,
                "key_name": await key_name(administration, run.row.key),
                "state": snapshot(at),
                "graph": await views.with_words(run.store, graph.graph(at), content=content),
                "timeline": timeline.timeline(at).to_json(),
                **step_parts,
            }
        )


def _add_content_routes(router: APIRouter, context: GatewayContext, keys: Keys) -> None:
    """The routes that read content: the explanation, for those who may read it, and a step in full."""
    disclosed = Annotated[VisibleRun, Depends(_visible(context, keys.needs("runs:read", "audit:read")))]
    visible = Annotated[VisibleRun, Depends(_visible(context, keys.needs("runs:read")))]

    @router.get(
        "/{run}/explain",
        operation_id="explain_run",
        summary="Explain a run in words and as data.",
        response_model=explanation_replies.Explanation,
        responses=operations.replies(*operations.READING),
    )
    async def explain_run(run: visible) -> Response:
        """Explain why the run was planned so, why these workers did its steps, what it cost against the cheapest
        alternative, what speaks for the answer, and what nobody knows. The reasons of conductors are content: they are
        shown to the key that began the run, and to keys with `audit:read`."""
        if run.may_read:
            await reads.note_foreign(context, run.caller, run.row, "reasons")
        return json_reply(await explanation.explain(run.store, context.store, run.row, content=run.may_read))

    @router.get(
        "/{run}/steps/{n}",
        operation_id="get_run_step",
        summary="Read the messages that a step's worker got and wrote.",
        response_model=run_replies.StepInFull,
        responses=operations.replies(*operations.READING),
    )
    async def get_run_step(run: disclosed, n: StepNumber) -> Response:
        """One step with its content, which needs the scope `audit:read`."""
        journal = await run.store.journal(run.row.id)
        state = fold(journal.events)
        if not n.isdecimal() or len(n) > 6 or int(n) not in state.steps:
            raise NotFound("The run has no step of that number.")
        step = await audit.step_in_full(run.store, state, journal.events, int(n))
        await reads.note(context, run.caller, run.row, f"step:{int(n)}")
        return json_reply(step)


def _add_stream_route(router: APIRouter, context: GatewayContext, keys: Keys, idempotency: Idempotency) -> None:
    reader = Annotated[Caller, keys.needs("runs:read")]
    visible = Annotated[VisibleRun, Depends(_visible(context, keys.needs("runs:read")))]

    async def readable(run: visible) -> RunRow:
        """Return the run, if this key may read its answer: the key that began it, or one with `audit:read`."""
        if not run.may_read:
            raise Forbidden()
        await reads.note_foreign(context, run.caller, run.row, "answer")
        return run.row

    @router.get(
        "/{run}/stream",
        operation_id="stream_run",
        summary="Stream a run's answer, from its start or from behind an event.",
        status_code=200,
        response_class=EventStream,
        responses=operations.replies(*operations.FOLLOWING, events="ChatCompletionEvent", terminal=route.TERMINAL),
        openapi_extra={"parameters": [operations.LAST_EVENT_ID]},
    )
    async def stream_run(
        row: Annotated[RunRow, Depends(readable)],
        options: Annotated[query.StreamOptions, Query()],
        caller: reader,
        request: Request,
    ) -> Response:
        """The chunks of a chat completion. `Last-Event-ID` counts before `starting_after`."""
        if request.method == "HEAD":  # which would wait for the run's end, and for no body
            return Response(media_type="text/event-stream")
        after = last_event(request, options.starting_after)
        turn = await idempotency.follow(request, caller, TurnToFollow(row.id, after))
        return route.stream(context, turn)


def _add_end_routes(router: APIRouter, context: GatewayContext, keys: Keys, idempotency: Idempotency) -> None:
    """The routes that end a run, or what is stored of it."""
    writer = Annotated[Caller, keys.needs("runs:write")]
    visible = Annotated[VisibleRun, Depends(_visible(context, keys.needs("runs:write")))]

    @router.post(
        "/{run}/cancel",
        operation_id="cancel_run",
        summary="Cancel a run.",
        response_model=run_replies.Run,
        responses=operations.replies(*operations.WRITING),
        openapi_extra=operations.body("CancelRequest", required=False),
    )
    async def cancel_run(
        caller: writer,
        body: Annotated[dict[str, object], json_body(context.bounds, optional=True)],
        run: visible,
        request: Request,
    ) -> Response:
        """Cancel it and wait a little for its end: `state` says what became of it. A run that has ended stays so."""
        return await idempotency.reply(request, caller, body, lambda: _cancel(context, run))

    @router.delete(
        "/{run}",
        operation_id="erase_run",
        summary="Erase a run's content.",
        response_model=run_replies.ErasedRun,
        responses=operations.replies(*operations.READING, 409),
    )
    async def erase_run(run: visible) -> Response:
        """Texts, comments and the salt of their hashes are erased; the journal keeps what is no content.

        It is cancelled first if it goes on. A run of any format can be erased; one that was erased stays so. One that a
        legal hold covers is not erased (409 `legal_hold`).
        """
        await cancel.stop_with_copies(run.store, context.queue, run.row, context.now())
        if not await run.store.erase(run.row.id, by=run.caller.actor):  # it was pruned just now
            raise NotFound()
        return json_reply({"id": run.row.id, "object": "run", "erased": True})


def _add_rate_route(router: APIRouter, context: GatewayContext, keys: Keys, idempotency: Idempotency) -> None:
    visible = Annotated[VisibleRun, Depends(_visible(context, keys.needs("runs:write")))]

    @router.post(
        "/{run}/feedback",
        operation_id="rate_run",
        summary="Rate a run's answer.",
        response_model=run_replies.RunRating,
        responses=operations.replies(*operations.WRITING),
        openapi_extra=operations.body("FeedbackRequest", example={"score": 0.9, "label": "correct"}),
    )
    async def rate_run(
        caller: Annotated[Caller, keys.needs("runs:write")],
        body: Annotated[dict[str, object], json_body(context.bounds)],
        run: visible,
        request: Request,
    ) -> Response:
        """Store a rating of a run that has ended. With an `Idempotency-Key` the same request stores one rating."""
        name, row = idempotency.name("fb", request, caller, body), run.row
        return await idempotency.reply(request, caller, body, lambda: feedback.take(context, row, caller, body, name))


def _add_replay_route(router: APIRouter, context: GatewayContext, keys: Keys, idempotency: Idempotency) -> None:
    writer = Annotated[Caller, keys.needs("runs:write", "runs:read")]
    visible = Annotated[VisibleRun, Depends(_visible(context, keys.needs("runs:write", "runs:read")))]

    @router.post(
        "/{run}/replay",
        operation_id="replay_run",
        summary="Carry out a run's task once more.",
        dependencies=[idempotency.capacity],
        response_model=run_replies.Run,
        responses=operations.replies(*operations.RUNNING),
        openapi_extra=operations.body("ReplayRequest", example={"from_step": 1, "worker": "luna"}, required=False),
    )
    async def replay_run(
        caller: writer,
        body: Annotated[dict[str, object], json_body(context.bounds, optional=True)],
        run: visible,
        request: Request,
    ) -> Response:
        """A run of its own, under the same plan or with changes. The key must have begun the run, or have `audit:read`.

        The reply has the new run as it is when `wait` is over. `GET /v1/runs/{id}/compare/{other}` compares both.
        """
        replay_request = replay.read_request(body)
        if not run.may_read:
            raise Forbidden()
        await reads.note_foreign(context, caller, run.row, "replay")

        async def order() -> Order:
            return await replay.order(context, run.store, run.row, caller, replay_request)

        turn = await idempotency.begin(request, caller, body, order)
        try:
            row = await run.store.run(turn.run.run)
            row = await cancel.wait_until_ended(run.store, row, replay_request.wait)
        finally:
            context.runs.leave(turn.run)
            turn.permit.release()
        return json_reply(audit.summary(row))


def _add_compare_route(router: APIRouter, context: GatewayContext, keys: Keys) -> None:
    visible = _visible(context, keys.needs("runs:read"))

    @router.get(
        "/{run}/compare/{other}",
        operation_id="compare_runs",
        summary="Compare two runs.",
        response_model=run_replies.RunComparison,
        responses=operations.replies(*operations.READING),
    )
    async def compare_runs(
        run: Annotated[VisibleRun, Depends(visible)],
        other: OtherRun,
        caller: Annotated[Caller, keys.needs("runs:read")],
    ) -> Response:
        """Cost, time, tokens, scores, steps, and who saw what in one run and not in the other.

        Whether answers and outputs are equal is told to those who may read the content of both runs.
        """
        return await _compare(context, run, await visible(other, caller), replay.compare_with_replay)


def _visible(context: GatewayContext, needed: Any) -> Callable[..., Awaitable[VisibleRun]]:
    """Return the dependency: the run in the path, if a caller with the `needed` scopes may see it.

    A run of another tenant is as absent as one that never was.
    """

    async def visible(run: RunId, caller: Annotated[Caller, needed]) -> VisibleRun:
        if not query.RUN_ID.fullmatch(run):
            raise NotFound()
        name, store = run_of_reply(run), context.store.of_tenant(caller.tenant)
        try:
            row = await store.run(name)
        except NotFound:
            raise await _absent(store, caller, name) from None
        if not caller.sees(row.tenant):
            raise NotFound()
        return VisibleRun(row, store, caller.may_read_content(row.key), caller)

    return visible


async def _absent(store: TenantStore, caller: Caller, run: str) -> NotFound:
    """Return the error for a run without a row: it was pruned, or this caller may not know that it ever was."""
    try:
        pruned = await store.pruned_run(run)
    except NotFound:
        return NotFound()
    if not caller.sees(pruned.tenant):
        return NotFound()
    day = datetime.fromtimestamp(pruned.pruned_at, UTC).date()
    return RunPruned(
        f"The run {run} ended as {pruned.state} and was deleted on {day} because its time was over; only a hash of its "
        f"journal of {pruned.events} events is left. Ask the operator for the archived journal."
    )


async def _record_of(run: VisibleRun, journal: Journal, state: RunState) -> dict[str, Any]:
    """Return the run as its caller may see it; `state` is the fold of its journal."""
    run_record = audit.render_run(run.row, journal, await run.store.feedback(run.row.id), state)
    if run.may_read:
        return run_record
    return exchanges.without_ids(run_record, state.unanswered_tool_calls)


async def _read_step_parts(
    context: GatewayContext, run: VisibleRun, at: Instant, read_run: explanation.ReadRun, n: int
) -> dict[str, Any]:
    """Return a step in full as it was at an instant, null without the scope for it, with the explanation of the run as
    it is now."""
    step = None
    if run.caller.may("audit:read"):
        step = await audit.step_in_full(run.store, at.state, at.events, n)
        await reads.note(context, run.caller, run.row, f"step:{n}")
    if run.may_read:
        await reads.note_foreign(context, run.caller, run.row, "reasons")
    explained = await explanation.explain_read(run.store, context.store, read_run, content=run.may_read)
    return {"step": step, "explanation": explained}


async def _compare(
    context: GatewayContext,
    first: VisibleRun,
    second: VisibleRun,
    compare: Callable[..., Awaitable[Comparison | SideBySide]],
) -> Response:
    """Return the reply of a comparison of two runs: `compare` gets the store, the journals, the ratings, and whether
    the caller reads the content of both, which is logged."""
    reads_both = first.may_read and second.may_read
    if reads_both:
        for run in (first, second):
            await reads.note_foreign(context, run.caller, run.row, "comparison")
    journals = await first.store.journal(first.row.id), await second.store.journal(second.row.id)
    ratings = await first.store.feedback(first.row.id), await second.store.feedback(second.row.id)
    return json_reply((await compare(first.store, journals, ratings, reads=reads_both)).to_json())


async def _hidden_ids(run: VisibleRun, events: Sequence[Event]) -> Collection[str]:
    """Return the ids of tool calls that these events name, and that this key is not shown because they wait for
    results."""
    if run.may_read or all(event.kind is not Kind.STEP_AWAITING for event in events):
        return ()
    return fold((await run.store.journal(run.row.id)).events).unanswered_tool_calls.keys()


def _event(event: Event, hidden: Collection[str]) -> dict[str, Any]:
    body = event.body
    if hidden and event.kind is Kind.STEP_AWAITING:
        body = exchanges.event_without_ids(body, hidden)
    return {"object": "run.event", "seq": event.seq, "kind": event.kind.value, "at": event.at, "body": body}


async def _cancel(context: GatewayContext, run: VisibleRun) -> Response:
    """Ask for a run's end, wait for it a little, and show the run as lists do: `state` says what became of it."""
    return json_reply(audit.summary(await cancel.stop(run.store, context.queue, run.row, context.now())))
