"""Plans over HTTP: `POST /v1/plans` makes one and executes nothing of it, `GET` shows it with what it would cost and
disclose, `PATCH` makes a revision of it, and `POST /v1/plans/{id}/run` executes a revision as it stands.

A plan's texts are its author's: another key of the tenant needs `audit:read` to see, change or execute it.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Depends, Path, Query
from msgspec import Struct
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from app.core.message.chat import Task
from app.core.run.fold import fold
from app.engine.calls.step_request import task_of
from app.engine.runs.admission import Order
from app.errors import Conflict, Forbidden, InvalidRequest, NotFound
from app.gateway.anthropic import route as messages
from app.gateway.chat import route as chat
from app.gateway.http.bodies import json_body
from app.gateway.http.callers import Caller, Keys
from app.gateway.http.context import GatewayContext
from app.gateway.http.idempotency import Idempotency, OpenTurn
from app.gateway.http.json_reply import json_reply, list_page
from app.gateway.http.sse import collect
from app.gateway.openapi import chat_replies, message_replies, operations, plan_replies, replies, response_replies
from app.gateway.plans import orders, reply, requests, revisions
from app.gateway.plans.revisions import Plan, Revision
from app.gateway.responses import route as responses
from app.gateway.runs import cancel, reads
from app.gateway.runs.forecasts import Histories
from app.gateway.runs.identity import key_names
from app.gateway.wire import query
from app.store.protocol import FIRST_REVISION, PLAN_TAG, TAKEN, DisclosureQuery, RunQuery, RunRow, TenantStore

REQUESTS: Final = ("ChatRequest", "MessagesRequest", "ResponsesRequest")
PlanAnswerEvent = (
    chat_replies.ChatCompletionChunk | replies.Error | message_replies.MessageEvent | response_replies.ResponseEvent
)
SCHEMAS: Final[operations.Schemas] = {
    "PlanRequest": lambda: {"anyOf": [{"$ref": operations.REFERENCE + name} for name in REQUESTS]},
    "PlanAnswerEvent": lambda: operations.event_schema(PlanAnswerEvent),
    "PlanRevisionRequest": lambda: operations.request_schema(requests.PlanRevisionRequest, "PlanRevisionRequest"),
    "PlanRunRequest": lambda: operations.request_schema(requests.PlanRunRequest, "PlanRunRequest"),
}
PlanId = Annotated[str, Path(alias="plan", description="The plan's id.", examples=["plan_run_01jd9k2v7c"])]
FindPlan = Callable[[TenantStore, str], Awaitable[tuple[Plan, RunRow]]]
Form = Literal["steps", "lists"]
EDIT: Final = {"revision": 1, "edits": [{"op": "change", "step": 0, "subtask": "Solve it in two ways."}]}


class FormOptions(query.Parameters):
    """The form in which a plan is shown."""

    format: Form = "steps"
    """`steps`: Baton's own form; `lists`: the published three lists (`model_id`, `subtasks`, `access_list`)."""


class CreateOptions(FormOptions):
    """The format of the request to plan for, and the form in which its plan is shown."""

    api: Literal["chat", "messages", "responses"] = "chat"
    """The format of the body, in which the plan's answer comes as well: that of `/v1/chat/completions`, of
    `/v1/responses`, or Anthropic's of `/v1/messages`."""


class ReadOptions(FormOptions):
    """The revision that is shown, and its form."""

    revision: Annotated[query.Whole, Field(ge=1, le=query.LARGEST)] | None = None
    """The number of the revision; by default the latest."""


class PlanFilters(query.Parameters):
    """The filters of a list of plans."""

    since: query.Moment | None = None
    """Plans that were made at this time or later: seconds since 1970, or RFC 3339."""
    until: query.Moment | None = None
    """Plans that were made before this time: seconds since 1970, or RFC 3339."""
    limit: Annotated[query.Whole, Field(ge=1, le=query.PAGE)] = 20
    """The most plans of a page."""
    after: query.TimeCursor = None
    """`next` of the page before."""


class VisiblePlan(Struct, frozen=True):
    """A plan that the caller may see: its revisions, the row of the first, and the store by which it is read."""

    plan: Plan
    row: RunRow
    store: TenantStore
    caller: Caller

    async def task(self) -> Task:
        """Return the task that the plan is for. Raises `NotFound` if it was erased."""
        return await task_of(self.store, self.plan.run, self.plan.first.state.admitted.task)


def routes(context: GatewayContext, keys: Keys, idempotency: Idempotency) -> APIRouter:
    """Return every route under /v1/plans."""
    router = APIRouter(prefix="/v1/plans", tags=["plans"])
    histories = Histories(context)
    _add_create_route(router, context, keys, idempotency, histories)
    _add_read_routes(router, context, keys, histories)
    _add_revise_route(router, context, keys, idempotency, histories)
    _add_delete_route(router, context, keys)
    _add_run_route(router, context, keys, idempotency)
    return router


def _add_create_route(
    router: APIRouter, context: GatewayContext, keys: Keys, idempotency: Idempotency, histories: Histories
) -> None:
    @router.post(
        "",
        operation_id="create_plan",
        summary="Plan for a request, and execute nothing.",
        dependencies=[idempotency.capacity],
        response_model=plan_replies.Plan,
        responses=operations.replies(*operations.RUNNING),
        openapi_extra=operations.body("PlanRequest", example=chat.EXAMPLE),
    )
    async def create_plan(
        request: Request,
        caller: Annotated[Caller, keys.needs("runs:write")],
        body: Annotated[dict[str, object], json_body(context.bounds)],
        options: Annotated[CreateOptions, Query()],
    ) -> Response:
        """The body is that of a chat completion, of a response or of a message (`api`). Only the conductor is asked, as
        it would be for that request."""

        async def order() -> Order:
            if options.api == "responses":
                return orders.to_preview(await responses.to_order(context, caller, body))
            if options.api == "messages":
                return orders.to_preview(messages.to_order(context, caller, body))
            return orders.to_preview(chat.to_order(context, caller, body))

        turn = await idempotency.begin(request, caller, body, order)
        await collect(context, turn, request.receive)
        store = context.store.of_tenant(caller.tenant)
        revision = await _read_revision(store, turn, caller)
        task = await task_of(store, turn.run.run, revision.state.admitted.task)
        plan = Plan((revision,))
        content = await _read_content(store, histories, plan, revision, task)
        return await _plan_reply(context, caller, plan, revision, content, options.format)


def _add_read_routes(router: APIRouter, context: GatewayContext, keys: Keys, histories: Histories) -> None:
    visible = Annotated[VisiblePlan, Depends(_visible(context, keys.needs("runs:read")))]

    @router.get(
        "",
        operation_id="list_plans",
        summary="List plans, the newest first.",
        response_model=plan_replies.PlanList,
        responses=operations.replies(*operations.READING),
    )
    async def list_plans(
        filters: Annotated[PlanFilters, Query()], caller: Annotated[Caller, keys.needs("runs:read")]
    ) -> Response:
        """The plans of the key's tenant that were not deleted, without their texts."""
        before = None
        if filters.after is not None:
            before = filters.after[:2]
        run_query = RunQuery(
            tenant=caller.tenant,
            since=filters.since,
            until=filters.until,
            tags=((PLAN_TAG, FIRST_REVISION),),
            before=before,
            limit=filters.limit + 1,
        )
        rows = await context.store.of_tenant(caller.tenant).runs(run_query)
        page = rows[: filters.limit]
        names = await key_names(context.store.administration_of(caller.tenant), [row.key for row in page])
        return json_reply(_list_page(page, names, has_more=len(rows) > filters.limit))

    @router.get(
        "/{plan}",
        operation_id="get_plan",
        summary="Show a plan: its steps, its estimate and its disclosures.",
        response_model=plan_replies.Plan,
        responses=operations.replies(*operations.READING),
    )
    async def get_plan(target: visible, options: Annotated[ReadOptions, Query()]) -> Response:
        """The latest revision, or the one that is asked for; the estimate is made anew."""
        revision = target.plan.revision(options.revision)
        task = await target.task()
        content = await _read_content(target.store, histories, target.plan, revision, task)
        return await _plan_reply(context, target.caller, target.plan, revision, content, options.format)


def _list_page(rows: Sequence[RunRow], names: Mapping[str, str | None], *, has_more: bool) -> dict[str, Any]:
    """Return a page of the list of plans; `names` are those of the keys. Deleted plans are left out."""
    data: list[dict[str, Any]] = []
    for row in rows:
        if not row.erased:
            data.append(reply.summary(row) | {"author_name": names[row.key]})
    next_page = None
    if has_more:
        next_page = query.as_cursor(query.Cursor(rows[-1].created_at, rows[-1].id))
    return list_page(data, has_more=has_more) | {"next": next_page}


def _add_revise_route(
    router: APIRouter, context: GatewayContext, keys: Keys, idempotency: Idempotency, histories: Histories
) -> None:
    visible = Annotated[VisiblePlan, Depends(_visible(context, keys.needs("runs:write")))]

    @router.patch(
        "/{plan}",
        operation_id="revise_plan",
        summary="Edit a plan, or replace it: a new revision.",
        response_model=plan_replies.Plan,
        responses=operations.replies(*operations.RUNNING),
        openapi_extra={"requestBody": operations.body("PlanRevisionRequest", example=EDIT)["requestBody"]},
    )
    async def revise_plan(
        request: Request,
        caller: Annotated[Caller, keys.needs("runs:write")],
        body: Annotated[dict[str, object], json_body(context.bounds)],
        target: visible,
        options: Annotated[FormOptions, Query()],
    ) -> Response:
        """It is checked as a caller's own plan is. `revision` is the one that the author has seen: 409 if there is a
        later one."""
        revision_request = requests.read_revision(body)
        plan = target.plan
        base = plan.revision(revision_request.revision)
        number = orders.next_number(plan, base)
        steps = await revisions.steps_of(target.store, base)
        value = requests.apply_revision(revision_request, revisions.as_value(steps), plan.first.state.admitted.pool)
        task = await target.task()
        repeated_order = orders.repeat_order(context.catalog(), caller, plan, base, target.row.tenant, task)
        revision_order = orders.to_revision(repeated_order, plan, value, number)
        once = orders.record_of_revision(plan, number, target.row.tenant, body)

        async def order() -> Order:
            return revision_order

        try:
            turn = await idempotency.begin(request, caller, body, order, once=once)
        except InvalidRequest as error:
            raise orders.edit_error(error) from None
        except Conflict as conflict:
            if conflict.public_code in (TAKEN, "idempotency_key_reuse"):
                raise orders.overtaken_error() from None
            raise
        await collect(context, turn, request.receive)
        new_revision = await _read_revision(target.store, turn, caller)
        other_revisions = [revision for revision in plan.revisions if revision.number != number]
        revised_plan = Plan((*other_revisions, new_revision))
        content = await _read_content(target.store, histories, revised_plan, new_revision, revision_order.task)
        return await _plan_reply(context, caller, revised_plan, new_revision, content, options.format)


def _add_delete_route(router: APIRouter, context: GatewayContext, keys: Keys) -> None:
    visible = Annotated[VisiblePlan, Depends(_visible(context, keys.needs("runs:write")))]

    @router.delete(
        "/{plan}",
        operation_id="delete_plan",
        summary="Delete a plan with all of its revisions.",
        response_model=plan_replies.DeletedPlan,
        responses=operations.replies(*operations.READING, 409),
    )
    async def delete_plan(target: visible) -> Response:
        """Its texts are erased, as `DELETE /v1/runs/{run}` erases a run's; runs that have executed it stay. A legal
        hold forbids it (409)."""
        await cancel.stop_with_copies(target.store, context.queue, target.row, context.now())
        await target.store.erase(target.row.id, by=target.caller.actor)  # and so all further revisions
        return json_reply({"id": target.plan.id, "object": "plan", "deleted": True})


def _add_run_route(router: APIRouter, context: GatewayContext, keys: Keys, idempotency: Idempotency) -> None:
    visible = Annotated[VisiblePlan, Depends(_visible(context, keys.needs("runs:write"), revisions.find_with_deleted))]

    @router.post(
        "/{plan}/run",
        operation_id="run_plan",
        summary="Execute a revision of a plan as it stands.",
        dependencies=[idempotency.capacity],
        response_model=chat_replies.ChatCompletion | message_replies.AnthropicMessage | response_replies.ResponseObject,
        responses=operations.replies(*operations.RUNNING, events="PlanAnswerEvent", terminal=chat.TERMINAL),
        openapi_extra=operations.body("PlanRunRequest", example={"revision": 1, "stream": False}, required=False),
    )
    async def run_plan(
        request: Request,
        caller: Annotated[Caller, keys.needs("runs:write")],
        body: Annotated[dict[str, object], json_body(context.bounds, optional=True)],
        target: visible,
    ) -> Response:
        """The answer comes in the format of the plan's request, whole or, with `stream: true`, as server-sent events. A
        plan that cannot be executed as it was shown is refused with 409 `plan_outdated`."""

        async def order() -> Order:
            revisions.require_not_deleted(target.row)
            revision = target.plan.revision(_number(body))
            steps = await revisions.steps_of(target.store, revision)
            task = await target.task()
            run_request = requests.read_run(body)
            repeated_order = orders.repeat_order(
                context.catalog(), caller, target.plan, revision, target.row.tenant, task
            )
            return orders.to_execution(repeated_order, revision, steps, run_request)

        wire_format = target.plan.first.state.admitted.wire.get("reply", {}).get("format")
        try:
            turn = await idempotency.begin(request, caller, body, order, needs_whole_text=wire_format == "responses")
        except InvalidRequest as error:
            raise orders.changed_conditions_error(error) from None
        streams = turn.run.state.turn.streams
        if wire_format == "messages":
            stops = await _read_stops(context, target.store, turn)
            return await messages.reply_to_turn(context, request, turn, stops, streams=streams)
        if wire_format == "responses":
            return await responses.reply_to_turn(context, request, turn, streams=streams, background=False)
        return await chat.reply_to_turn(context, request, turn, streams=streams)


async def _read_stops(context: GatewayContext, store: TenantStore, turn: OpenTurn) -> Sequence[str]:
    """Return the stop sequences of a run's request. If they cannot be read, the caller of the run is gone."""
    try:
        task = await task_of(store, turn.run.run, turn.run.state.admitted.task)
    except BaseException:
        context.runs.leave(turn.run)
        turn.permit.release()
        raise
    return task.sampling.stop


def _visible(
    context: GatewayContext, needed: Any, find: FindPlan = revisions.find
) -> Callable[..., Awaitable[VisiblePlan]]:
    """Return the dependency: the plan in the path, if a caller with the `needed` scopes may see its texts.

    A plan of another tenant is as absent as one that never was.
    """

    async def visible(plan: PlanId, caller: Annotated[Caller, needed]) -> VisiblePlan:
        store = context.store.of_tenant(caller.tenant)
        whole, row = await find(store, plan)
        if not caller.sees(row.tenant):
            raise NotFound()
        if not caller.may_read_content(row.key):
            raise Forbidden()
        await reads.note_foreign(context, caller, row, "plan")
        return VisiblePlan(whole, row, store, caller)

    return visible


async def _read_revision(store: TenantStore, turn: OpenTurn, caller: Caller) -> Revision:
    """Return the revision that a run has made."""
    return revisions.revision_of_state(fold((await store.journal(turn.run.run)).events), caller.key.id)


async def _read_content(
    store: TenantStore, histories: Histories, plan: Plan, revision: Revision, task: Task
) -> reply.RevisionContent:
    """Read what a revision is shown from besides its own state."""
    steps = await revisions.steps_of(store, revision)
    history = await histories.of(plan.first.state.admitted.tenant)
    disclosed = await store.disclosures(DisclosureQuery(runs=(plan.run,), ascending=True))
    return reply.RevisionContent(steps, task, history, disclosed)


async def _plan_reply(
    context: GatewayContext, caller: Caller, plan: Plan, revision: Revision, content: reply.RevisionContent, form: Form
) -> Response:
    """Return the reply that shows one revision of a plan, with the names of the authors' keys."""
    data = reply.render_plan(context.catalog(), plan, revision, content, lists=form == "lists")
    authors = [entry["author"] for entry in data["revisions"]]
    names = await key_names(context.store.administration_of(caller.tenant), authors)
    for entry in data["revisions"]:
        entry["author_name"] = names[entry["author"]]
    return json_reply(data)


def _number(body: Mapping[str, object]) -> int | None:
    """Return the revision in a body that is yet to be checked; None where it names none."""
    number = body.get("revision")
    if isinstance(number, int) and not isinstance(number, bool):
        return number
    return None
