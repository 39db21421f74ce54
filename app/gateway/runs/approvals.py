"""`/v1/approvals`: the plans that wait for an approval, and the decisions on them.

A plan is shown with what it would disclose and cost. Its instructions are content: only keys with `approvals:decide` or
`audit:read` are shown them. A decision names the digest of what was shown, so that nobody approves something else.
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Path, Query
from msgspec.structs import replace
from pydantic import Field, StringConstraints
from starlette.requests import Request
from starlette.responses import Response

from app.core.pool.catalog import MILLION, Catalog
from app.core.rating.forecast import History
from app.core.run.approvals import EXPIRED, find_decision
from app.core.run.caller_view import dollars
from app.core.run.events import Event, RunApproved, RunAwaitingApproval, RunRefused, facts_with_times
from app.core.run.fold import fold
from app.core.run.identifiers import run_of_reply
from app.core.run.state import Proposal, RunState, StepState
from app.core.run.withheld import find_decider, find_withheld
from app.engine.runs.approvals import Decision
from app.errors import EventMalformed, NotFound
from app.gateway.http.bodies import json_body
from app.gateway.http.callers import Caller, Keys
from app.gateway.http.context import GatewayContext
from app.gateway.http.idempotency import Idempotency
from app.gateway.http.json_reply import json_reply, list_page
from app.gateway.openapi import operations, run_replies
from app.gateway.runs import forecasts
from app.gateway.runs import reads as read_log
from app.gateway.runs.forecasts import Histories
from app.gateway.runs.identity import key_name
from app.gateway.wire import query
from app.gateway.wire.parameters import WireModel, WorkerName, drop_nulls, read_fields
from app.store.protocol import APPROVAL_TAG, ASKED, RunQuery, RunRow, TenantStore

SCHEMAS: Final[operations.Schemas] = {
    "ApprovalRequest": lambda: operations.request_schema(ApprovalRequest, "ApprovalRequest"),
}
EXAMPLE: Final = {"decision": "approve", "digest": "9f86d081884c7d65" * 4, "reason": "Within the project's budget."}
WAITING: Final = "awaiting_approval"
TimedDecision = tuple[float, RunApproved | RunRefused]
"""The decision on a plan, with its time."""
RunId = Annotated[str, Path(alias="approval", description="The id of the run that asks.", examples=["run_01jd9k2v7c"])]


class ApprovalRequest(WireModel):
    """A decision on the plan whose digest it names."""

    decision: Literal["approve", "refuse"]
    digest: Annotated[str, StringConstraints(pattern=r"^[0-9a-f]{64}$")]
    reason: Annotated[str, StringConstraints(max_length=2_000)] = ""
    replacements: Annotated[list[WorkerName], Field(max_length=256, fail_fast=True)] = []
    """Workers that may be called besides those of the plan; without any, only those of the plan are."""
    max_usd: Annotated[float, Field(ge=0, le=1_000_000, allow_inf_nan=False)] | None = None
    """The most that the run may cost in all; without it, what it has cost and the plan's worst case."""


def routes(
    context: GatewayContext, keys: Keys, idempotency: Idempotency | None, prefix: str = "/v1/approvals"
) -> APIRouter:
    """Return the routes of approvals; without `idempotency` for the listener of administration."""
    router = APIRouter(prefix=prefix, tags=["approvals"])
    histories = Histories(context)
    _add_read_routes(router, context, keys, histories)
    _add_decide_route(router, context, keys, histories, idempotency)
    return router


def _add_read_routes(router: APIRouter, context: GatewayContext, keys: Keys, histories: Histories) -> None:
    reader = Annotated[Caller, keys.needs("runs:read")]

    @router.get(
        "",
        operation_id="list_approvals",
        summary="List the plans that wait for an approval, or that were decided.",
        response_model=run_replies.ApprovalList,
        responses=operations.replies(*operations.READING),
    )
    async def list_approvals(filters: Annotated[query.ApprovalFilters, Query()], caller: reader) -> Response:
        """List the plans of the key's tenant that need an approval, with what each would disclose and cost. A page of
        those that were decided may have fewer than `limit`, even none, although `has_more` is true. A run whose journal
        is damaged is left out; `GET /v1/approvals/{id}` says what is wrong with it."""
        store = context.store.of_tenant(caller.tenant)
        rows = await store.runs(_run_query(filters, caller))
        has_more, rows = len(rows) > filters.limit, rows[: filters.limit]
        approvals = []
        for row in rows:
            if filters.status == "decided" and row.state == WAITING:
                continue
            try:
                approval = await _approval_for(context, store, row, caller, words=filters.words)
            except EventMalformed as error:  # nobody can decide on it, and others must not wait for that
                message = "A plan is left out of a list of approvals, because its run cannot be read."
                context.telemetry.log(logging.ERROR, message, run=row.id, error=str(error))
                continue
            if approval is not None:
                approvals.append(approval)
        next_page = None
        if has_more:
            next_page = query.as_cursor(query.Cursor(rows[-1].created_at, rows[-1].id))
        return json_reply(list_page(approvals, has_more=has_more, key="run") | {"next": next_page})

    @router.get(
        "/{approval}",
        operation_id="get_approval",
        summary="Show what a run asks an approval for, and what was decided.",
        response_model=run_replies.Approval,
        responses=operations.replies(*operations.READING),
    )
    async def get_approval(run: RunId, caller: reader) -> Response:
        """The latest plan of the run that needed an approval, with its likely cost and time while it waits."""
        return json_reply(await _read_approval(context, histories, run, caller))


def _add_decide_route(
    router: APIRouter, context: GatewayContext, keys: Keys, histories: Histories, idempotency: Idempotency | None
) -> None:
    decider = Annotated[Caller, keys.needs("approvals:decide")]

    @router.post(
        "/{approval}",
        operation_id="decide_approval",
        summary="Approve or refuse a plan.",
        response_model=run_replies.Approval,
        responses=operations.replies(*operations.WRITING),
        openapi_extra=operations.body("ApprovalRequest", example=EXAMPLE),
    )
    async def decide_approval(
        run: RunId, caller: decider, body: Annotated[dict[str, object], json_body(context.bounds)], request: Request
    ) -> Response:
        """Approve or refuse a plan. A decision may be sent again; another one, or one on another plan, is a 409 that
        says why."""
        row = await _visible_run(context, run, caller)
        approval_request = read_fields(ApprovalRequest, drop_nulls(body))

        async def decide() -> Response:
            await context.runs.decide(row.id, caller.tenant, _decision(approval_request, caller))
            return json_reply(await _read_approval(context, histories, row.id, caller))

        if idempotency is None:
            return await decide()
        return await idempotency.reply(request, caller, body, decide, keeps_reply=False)


def _run_query(filters: query.ApprovalFilters, caller: Caller) -> RunQuery:
    """Return the store's query for one run more than a page has."""
    before = None
    if filters.after is not None:
        before = filters.after[:2]
    run_query = RunQuery(tenant=caller.tenant, before=before, limit=filters.limit + 1)
    if filters.status == "waiting":
        return replace(run_query, state=WAITING)
    return replace(run_query, tags=((APPROVAL_TAG, ASKED),))


def _decision(approval_request: ApprovalRequest, caller: Caller) -> Decision:
    max_usd = None
    if approval_request.max_usd is not None:
        max_usd = round(approval_request.max_usd * MILLION)
    return Decision(
        verdict=approval_request.decision,
        digest=approval_request.digest,
        by=f"{caller.via}:{caller.key.id}",
        key=caller.key.id,
        reason=approval_request.reason,
        replacements=tuple(approval_request.replacements),
        max_usd=max_usd,
    )


async def _visible_run(context: GatewayContext, run: str, caller: Caller) -> RunRow:
    """Return the row of a run that the caller may see; `NotFound`."""
    if not query.RUN_ID.fullmatch(run):
        raise NotFound()
    row = await context.store.of_tenant(caller.tenant).run(run_of_reply(run))
    if not caller.sees(row.tenant):
        raise NotFound()
    return row


async def _read_approval(context: GatewayContext, histories: Histories, run: str, caller: Caller) -> dict[str, Any]:
    row = await _visible_run(context, run, caller)
    store = context.store.of_tenant(caller.tenant)
    approval = await _approval_for(context, store, row, caller)
    if approval is None:
        raise NotFound("No plan of this run has needed an approval.", code="approval_not_requested")
    if approval["status"] == "waiting":
        approval["estimate"] = await estimate(context.catalog(), store, row, await histories.of(row.tenant))
    return approval


async def estimate(catalog: Catalog, store: TenantStore, row: RunRow, history: History) -> dict[str, Any] | None:
    """Return the likely cost and time of the plan that waits; None where nothing can be said."""
    state = fold((await store.journal(row.id)).events)
    if state.approval_question is None:
        return None
    proposal = state.find_proposal(state.approval_question.proposal)
    return forecasts.estimate(await forecasts.of_proposal(catalog, store, state, proposal, history))


async def _approval_for(
    context: GatewayContext, store: TenantStore, row: RunRow, caller: Caller, *, words: bool = True
) -> dict[str, Any] | None:
    """Return the question of a run as this caller may see it. If it reads the instructions of another key's run, that
    is logged."""
    may_read = words and (caller.may("approvals:decide") or caller.may("audit:read"))
    approval = await approval_of(store, row, reads=may_read, own=words and row.key == caller.key.id)
    if approval is None:
        return None
    if may_read:
        await read_log.note_foreign(context, caller, row, "approval", mark(approval))
    return approval | {"key_name": await key_name(context.store.administration_of(caller.tenant), row.key)}


def mark(approval: Mapping[str, Any]) -> str:
    """Return what stands for the texts of a plan that is shown: a caller that asks repeatedly adds one entry to the log
    of readings for each plan, and one more when it was decided."""
    return f"{approval['digest']} {approval['status']}"


async def approval_of(store: TenantStore, row: RunRow, *, reads: bool, own: bool = False) -> dict[str, Any] | None:
    """Return the latest question of a run with its plan and its decision; None if it has not asked for an approval. It
    has the instructions for somebody who `reads` them, and the reason of the decision also for the run's `own` key."""
    journal = await store.journal(row.id)
    state = fold(journal.events)
    question, terms = state.approval_question, state.admitted.approval
    if question is None or terms is None:
        return None
    proposal = state.find_proposal(question.proposal)
    decision = find_decision(journal.events, question.digest)
    refs = _list_shown_refs(state.steps_of(proposal), decision, reads=reads, own=own)
    texts: Mapping[str, bytes] = {}
    if refs and journal.salt:
        texts = await store.contents(row.id, refs)
    worst_case_usd = None
    if question.price is not None:
        worst_case_usd = dollars(question.price)
    return {
        "object": "approval",
        "run": row.id,
        "tenant": row.tenant,
        "key": row.key,
        "tier": row.tier,
        "labels": sorted(state.admitted.labels),
        "state": row.state,
        "status": _status(state, proposal, decision),
        "digest": question.digest,
        "plan_digest": question.plan,
        "task": state.admitted.task,
        "catalog": question.catalog,
        "reasons": list(question.reasons),
        "asked_at": _asked_at(journal.events, question.digest),
        "expires_at": question.until,
        "on_expiry": terms.on_expiry,
        "four_eyes": terms.four_eyes,
        "worst_case_usd": worst_case_usd,
        "spent_usd": dollars(question.usd),
        "limit_usd": dollars(state.admitted.limits.usd),
        "estimate": None,
        "plan": _plan(state, proposal, find_decider(proposal, journal.events), texts),
        "discloses": dict(question.discloses),
        "workers": list(question.workers),
        "decision": _decision_to_json(decision, texts),
    }


def _asked_at(events: Sequence[Event], digest: str) -> float:
    """Return the time at which the question of this digest was asked."""
    return next(at for at, fact in facts_with_times(events, RunAwaitingApproval) if fact.digest == digest)


def _list_shown_refs(
    steps: Sequence[StepState], decision: TimedDecision | None, *, reads: bool, own: bool
) -> list[str]:
    """Return the refs of the texts that the caller is shown; see `approval_of`."""
    refs: list[str] = []
    if reads:
        refs += [step.subtask for step in steps if step.subtask]
    if (reads or own) and decision is not None and decision[1].reason:
        refs.append(decision[1].reason)
    return refs


def _status(state: RunState, proposal: Proposal, decision: TimedDecision | None) -> str:
    if decision is not None:
        if isinstance(decision[1], RunApproved):
            return "approved"
        return "refused"
    if state.state == WAITING:
        return "waiting"
    if state.state == "cancelled" and EXPIRED not in proposal.reasons:
        return "cancelled"
    return "expired"


def _plan(state: RunState, proposal: Proposal, by: str, texts: Mapping[str, bytes]) -> dict[str, Any]:
    """Return the plan; `by` is who decided what its steps see."""
    plan_steps = state.steps_of(proposal)
    steps: list[dict[str, Any]] = []
    for step in plan_steps:
        hidden = find_withheld(state, step, proposal, by, plan_steps)
        row = {"user": hidden.user, "steps": list(hidden.steps), "by": hidden.by or None}
        steps.append(_step(step, texts) | {"withheld": row})
    return {"round": proposal.round, "topology": proposal.topology, "steps": steps}


def _step(step: StepState, texts: Mapping[str, bytes]) -> dict[str, Any]:
    """Return a step; `instruction` is empty where the conversation itself is the instruction, and null where it is not
    shown or was erased."""
    instruction: str | None = ""
    if step.subtask:
        instruction = _text(texts, step.subtask)
    return {
        "n": step.n,
        "worker": step.worker,
        "access": step.access.as_list(),
        "answers": step.answers,
        "tools": step.tools,
        "instruction": instruction,
    }


def _decision_to_json(decision: TimedDecision | None, texts: Mapping[str, bytes]) -> dict[str, Any] | None:
    if decision is None:
        return None
    at, fact = decision
    fields: dict[str, Any] = {
        "decision": "refuse",
        "by": fact.by,
        "at": at,
        "reason": _text(texts, fact.reason),
        "workers": [],
        "max_usd": None,
        "binding": None,
    }
    if isinstance(fact, RunApproved):
        fields |= {"decision": "approve", "workers": list(fact.workers)}
        fields |= {"max_usd": dollars(fact.max_usd), "binding": fact.binding}
    return fields


def _text(texts: Mapping[str, bytes], ref: str) -> str | None:
    """Return a text by its ref; None where it is not shown or was erased."""
    text = texts.get(ref)
    if text is None:
        return None
    return text.decode()
