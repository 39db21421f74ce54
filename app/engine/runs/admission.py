"""The admission of a run: the workers that may take part, the conductor that plans, and the entry that pins both."""

import hmac
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

import orjson
from msgspec import Struct
from msgspec.structs import replace

from app.conductor.protocol import FixedPlanConductor, Policy
from app.conductor.recorded import RecordedConductor
from app.core.contents import content_ref
from app.core.message.chat import Task, TaskParts, task_bytes, task_parts
from app.core.plan.arms import is_arm, steps_needed, tier_of
from app.core.plan.proposals import by_name, read_plan
from app.core.plan.workflow import CONDUCTOR as ITSELF
from app.core.plan.workflow import Step
from app.core.pool.budgets import TEAM_FIELD, USER_FIELD, Scope
from app.core.pool.catalog import Amount, Catalog, Limits, Tier, Worker
from app.core.pool.policy import (
    TOO_LONG,
    Eligible,
    Overrides,
    exclude_by_request,
    exclude_ejected,
    exclude_unpriced,
    find_eligible,
    permits,
    terms_of,
    translate_overrides,
    unknown_names,
)
from app.core.pool.rules import CALLER as CALLERS_WORDS
from app.core.pool.rules import CONDUCTOR, Reading
from app.core.pool.serving import TIER, serve_tier, within
from app.core.run import notices
from app.core.run.events import RunAdmitted
from app.core.run.identifiers import NO_TRACE, Trace
from app.core.run.kinds import OnDisconnect, OriginKind
from app.core.run.recording import Recording
from app.core.run.state import CALLER, FALLBACK, REPLAY
from app.core.run.visibility import label_refusals_of_plan
from app.engine.context import EngineContext
from app.errors import InvalidRequest, NotFound, PlanRejected, RunTooLong
from app.store.protocol import (
    BRIEF,
    FIRST_REVISION,
    METADATA_TAG,
    PLAN_TAG,
    REQUEST_TAG,
    SHOWN_ONCE,
    TAG_BYTES,
    TRACE_TAG,
    USER_TAG,
    Entry,
    IdempotencyRecord,
    NewRun,
    SharedContent,
    metadata_tag,
)

UNTAKEN_SECONDS = 0.5
"""Time for which a run that nobody drives is left to those who take its ticket; then engines find it by polling."""


class Owner(Struct, frozen=True):
    """The tenant and the API key to which a run belongs."""

    tenant: str
    key: str


class Order(Struct, frozen=True):
    """The order of a gateway: a run, or the next turn of the one whose tool calls the conversation's end answers.

    `limits` are the effort level's, already narrowed by the request's and the key's budget.

    `plan` is the caller's own plan as a JSON value, untrusted; it is checked against the pool before admission.
    """

    task: Task
    tier: Tier
    model: str
    effort: str
    limits: Limits
    tenant: str
    key: str
    labels: frozenset[str] = frozenset()
    """The labels of the whole conversation: of the request, of the key, and of each message."""
    on_messages: frozenset[str] = frozenset()
    """The labels that do not stand on the whole request, but only on some of its messages."""
    overrides: Overrides = Overrides()
    plan: object | None = None
    streams: bool = False
    followed: bool = True
    """True if a caller waits for the reply; a response in the background is retrieved later."""
    stream_steps: bool = False
    preview: bool = False
    """Only plan: the run ends with its plan, and nothing of it is executed."""
    ignored: tuple[str, ...] = ()
    """Parameters that the request has and no worker honours, for the journal."""
    explore: bool = True
    """True if a selector may draw the plan at random."""
    shadow: bool = True
    """False if the run is to have no shadow."""
    on_disconnect: OnDisconnect | None = None
    """None: `finish` if there is a claim, by which the caller can come back, else `cancel`."""
    wire: Mapping[str, Any] = {}
    """The wire format and the request's options for the reply: with them, the journal is enough to write it again."""
    trace: Trace = NO_TRACE
    """The span of the request."""
    once: IdempotencyRecord | None = None
    """The request's claim to be carried out once; made together with the admission."""
    request_id: str = ""
    """The id of the HTTP request, under which the run is found again; empty where there is none."""
    key_name: str = ""
    """The name of the API key, for logs."""
    budgets: tuple[str, ...] = ()
    """The accounts of budgets in which a new run's holds are reserved."""
    capped: bool = False
    """True if the request or its API key says what the run may cost."""
    approval: bool = False
    """True if the request asks that somebody approves its plans."""
    run: str = ""
    """The id that a new run gets, under which it was counted already; empty for any."""
    origin_kind: OriginKind = ""
    origin_run: str = ""
    """The id of the run from which a new run follows; empty where `origin_kind` is."""
    recording: Recording | None = None
    """The plans, outputs and tool results that a replay takes over from that run."""

    @property
    def needs_prices(self) -> bool:
        """Return True if only workers whose price is known may be called, because their cost could not be held
        otherwise."""
        return self.capped or bool(self.budgets)

    @property
    def has_plan(self) -> bool:
        """Return True if the request brings the plan, its own or that of the run that it replays."""
        return self.plan is not None or (self.recording is not None and bool(self.recording.plans))

    @property
    def owner(self) -> Owner:
        """Return the owner of the run that is begun, or is to go on."""
        return Owner(self.tenant, self.key)

    @property
    def user(self) -> str:
        """Return the end user whom the request names, by `user`, else by `safety_identifier`, else in its metadata;
        empty if it names none. Budgets and rates count by it."""
        named = self.task.user or self.task.echoed.get("safety_identifier")
        return named or self.task.metadata.get(USER_FIELD, "")


async def with_budgets(context: EngineContext, order: Order) -> Order:
    """An order with the accounts of the budgets that concern it: those of its key, user, team and tenant."""
    names: dict[Scope, str] = {
        "key": order.key,
        "user": order.user,
        "team": order.task.metadata.get(TEAM_FIELD, ""),
    }
    accounts = await context.store.budget_accounts(order.tenant, names)
    if accounts:
        return replace(order, budgets=accounts)
    return order


def tags(order: Order) -> tuple[tuple[str, str], ...]:
    """The filters of a new run: its labels and those of what it takes over, its end user and metadata, the id of its
    request, and that of its trace."""
    labels = [("label", label) for label in sorted(order.labels | _recorded_labels(order))]
    return (*labels, *_plan_tags(order), *_caller_tags(order.task), *request_tags(order))


def _recorded_labels(order: Order) -> frozenset[str]:
    """The labels of what a replay takes over."""
    return order.recording.labels if order.recording is not None else frozenset()


def _plan_tags(order: Order) -> list[tuple[str, str]]:
    """The filter that finds what was only planned."""
    if order.wire.get("format") == "plan":
        return [(PLAN_TAG, order.origin_run or FIRST_REVISION)]
    return [(PLAN_TAG, SHOWN_ONCE)] if order.preview else []


def _caller_tags(task: Task) -> tuple[tuple[str, str], ...]:
    """The filters with words of the caller's, which are erased with the content. Values that are too long get none."""
    users = {task.user, task.echoed.get("safety_identifier")} - {None, ""}
    filters = [(USER_TAG, str(user)) for user in users]
    filters += [(METADATA_TAG, metadata_tag(*item)) for item in task.metadata.items()]
    return tuple([(name, value) for name, value in filters if len(value.encode()) <= TAG_BYTES])


def request_tags(order: Order) -> tuple[tuple[str, str], ...]:
    """The filters by the ids of the HTTP request and of its trace, as far as there are any."""
    filters = ((REQUEST_TAG, order.request_id), (TRACE_TAG, order.trace.id))
    return tuple([(name, value) for name, value in filters if value])


def with_tier_in_force(catalog: Catalog, order: Order) -> Order:
    """Return the order under its tier as the catalog has it: the pool file may have been read again since the request
    came. Raises `NotFound` if the tier is gone."""
    if catalog.tiers.get(order.tier.name) is order.tier:
        return order
    tier = tier_of(catalog, order.tier.name, order.model, order.tier.served_by)
    if tier is None:
        raise NotFound("The model was just removed from the pool file.", param="model", code="model_not_found")
    if tier == order.tier:
        return order
    effort = order.effort if order.effort in tier.efforts else tier.effort
    return replace(order, tier=tier, effort=effort, limits=within(order.limits, tier.efforts[effort]))


def untaken_seconds(context: EngineContext) -> float:
    """Seconds for which a run that nobody drives is left to those who take its ticket: 0 while tickets cannot be
    queued."""
    if not context.queue.healthy:
        return 0.0
    return UNTAKEN_SECONDS


def eligible_workers(context: EngineContext, catalog: Catalog, order: Order) -> Eligible:
    """Return the workers that may take part, and why the others may not. `InvalidRequest` if nobody may."""
    unknown = unknown_names(order.tier, order.overrides)
    if unknown:
        pool = ", ".join(order.tier.pool)
        raise InvalidRequest(
            f"baton.pool names a worker that is not in the pool; the pool is: {pool}", param="baton.pool"
        )
    choice = find_eligible(catalog, order.tier, order.task, _reading_of_all(catalog, order), order.overrides)
    if order.needs_prices:
        choice = exclude_unpriced(choice)
    if not choice.workers:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in sorted(choice.excluded.items()))
        if TOO_LONG in choice.excluded.values():
            raise InvalidRequest(
                "The prompt is too long: it exceeds the maximum context length of every worker that could take it. "
                f"Shorten or compact the conversation, or choose another tier. {reasons[:2000]}",
                code=RunTooLong.code,
            )
        raise InvalidRequest(
            f"No worker of this tier may take the request. {reasons[:2000]}",
            param=choice.blamed,
            code="no_eligible_worker",
        )
    if order.has_plan:  # a caller that names workers gets them, or the next best when a step is executed
        return choice
    return exclude_ejected(choice, context.health.ejected_workers(choice.workers))


class Admission(Struct, frozen=True):
    """An order with all that is decided when it is admitted."""

    order: Order
    eligible: Eligible
    """The workers that may take part, and why the others may not."""
    policy: Policy
    """The policy that plans."""
    conductor: str
    """The kind of the policy, as `run.admitted` names the conductor."""


async def decide(context: EngineContext, catalog: Catalog, order: Order) -> Admission:
    """Decide under which definition of its tier a new run is carried out, by whom, and who plans.

    It is that of the subject which serves the tier now (`app/core/pool/serving.py`), if there is one. The tier's own
    counts where the pool file no longer has the subject, and for a request that the subject cannot take: because of
    its labels, its choice of workers or what it needs. Raises what `decide_as_ordered` raises.
    """
    if _says_what_plans(catalog, order):
        return decide_as_ordered(context, catalog, order)
    order = replace(order, run=order.run or context.name("run"))
    subject = await context.version(f"{TIER}{order.tier.name}", order.run)
    as_served = _as_served_by(catalog, order, subject) if subject else None
    if as_served is not None:
        with suppress(InvalidRequest):
            admission = decide_as_ordered(context, catalog, as_served)
            if admission.conductor != FALLBACK:
                eligible = exclude_by_request(admission.eligible, order.tier.pool, order.overrides)
                return replace(admission, eligible=eligible)
    return decide_as_ordered(context, catalog, order)


def decide_as_ordered(context: EngineContext, catalog: Catalog, order: Order) -> Admission:
    """Decide by whom a run is carried out under the definition of its tier that the order has, and who plans. Raises
    `InvalidRequest` if nobody may take part, or for a plan of the caller's that cannot be executed."""
    workers = eligible_workers(context, catalog, order)
    policy, conductor = policy_of(context, catalog, order, workers)
    return Admission(order, workers, policy, conductor)


def _says_what_plans(catalog: Catalog, order: Order) -> bool:
    """Return True if the request itself says what is to plan: a plan, an arm of the tier, or a run that it repeats."""
    return bool(order.origin_kind) or order.has_plan or is_arm(catalog, order.model)


def _as_served_by(catalog: Catalog, order: Order, subject: str) -> Order | None:
    """Return the order as the subject carries it out; None if the pool file does not have the subject, or the request
    chooses workers that the subject has not."""
    tier = serve_tier(catalog, order.tier, subject)
    overrides = translate_overrides(order.tier, tier, order.overrides) if tier is not None else None
    if tier is None or overrides is None:
        return None
    return replace(order, tier=tier, overrides=overrides, limits=within(order.limits, tier.efforts[order.effort]))


def _reading_of_all(catalog: Catalog, order: Order) -> Reading:
    """Return what every worker of the run reads in any step: where a model plans its subtask, in the caller's own plan
    nothing. All fixed plans show the conversation."""
    if order.has_plan:
        return Reading()
    spec = order.tier.conductor
    model = catalog.workers[spec.worker] if spec.kind == "model" and spec.worker is not None else None
    if model is None or not _may_conduct(model, order):
        return _conversation(order)
    return Reading(order.labels - model.declassifies, frozenset({CONDUCTOR}))


def _conversation(order: Order) -> Reading:
    return Reading(order.labels, frozenset({CALLERS_WORDS}))


def policy_of(context: EngineContext, catalog: Catalog, order: Order, choice: Eligible) -> tuple[Policy, str]:
    """Return the policy that plans the run, with its kind. `InvalidRequest` for a plan of the caller's that cannot be
    executed."""
    if order.recording is not None and order.recording.plans:
        return _recorded_policy(catalog, order, order.recording, choice)
    if order.plan is None:
        return _tier_policy(context, catalog, order, choice)
    try:
        names = [worker.name for worker in choice.workers]
        steps = read_plan(order.plan, by_name(names), order.limits.steps)
        if refused := label_refusals_of_plan(catalog, order.labels, steps):
            raise PlanRejected(refused)
        return FixedPlanConductor(steps), CALLER
    except PlanRejected as rejected:
        message = "; ".join(rejected.reasons)[:3000]
        raise InvalidRequest(f"The plan is not valid: {message}", param="baton.plan", code="invalid_plan") from None


def _recorded_policy(catalog: Catalog, order: Order, recording: Recording, choice: Eligible) -> tuple[Policy, str]:
    """Return the plans of the run that is replayed, if they may be carried out now; else `InvalidRequest` with every
    reason.

    Later rounds are checked when they are opened, since what they read depends on the answers before.
    """
    first = recording.plans["1"]
    eligible_names = {worker.name for worker in choice.workers}
    reasons = [
        f"the worker {name} is not available: {choice.excluded.get(name, 'it is not in the pool of this tier')}"
        for name in sorted(recording.workers - eligible_names - {ITSELF})
    ]
    longest = max(len(plan.steps) for plan in recording.plans.values())
    if longest > order.limits.steps:
        reasons.append(f"a plan has {longest} steps; at most {order.limits.steps} are allowed here")
    if recording.nests and not order.limits.depth:
        reasons.append("a workflow is nested in a step, which this tier does not allow")
    labels_of_outputs = {position: output.labels for position, output in first.kept_outputs.items()}
    reasons += label_refusals_of_plan(catalog, order.labels, first.steps, labels_of_outputs, instant=first.instant)
    if reasons:
        raise InvalidRequest(
            f"The plan of {recording.run} cannot be carried out now: {'; '.join(reasons)[:3000]}",
            param="run",
            code="not_replayable",
        )
    return RecordedConductor(recording), REPLAY


def _tier_policy(context: EngineContext, catalog: Catalog, order: Order, choice: Eligible) -> tuple[Policy, str]:
    """Return the tier's conductor, if it may read the task: it sees all of it, so the task's labels bind it too
    (D6)."""
    spec = order.tier.conductor
    if spec.whole and (needed := steps_needed(spec)) > order.limits.steps:
        raise InvalidRequest(
            f"This model needs {needed} steps, and the run may have {order.limits.steps}; ask for a smaller one, or "
            "for a higher effort.",
            param="model",
            code="too_few_steps",
        )
    model = spec.worker if spec.kind == "model" else None  # a selector leaves out a model that may not
    if model is None or _may_conduct(catalog.workers[model], order):
        return context.conductor(order.tier), spec.kind
    names = [worker.name for worker in choice.workers]
    worker = order.tier.fallback if order.tier.fallback in names else names[0]
    return FixedPlanConductor((Step(worker, answers=True),)), FALLBACK


def _may_conduct(worker: Worker, order: Order) -> bool:
    return permits(worker, _conversation(order)) and (worker.priced or not order.needs_prices)


def entry(context: EngineContext, catalog: Catalog, admission: Admission, *, gateway: str) -> tuple[Entry, bytes]:
    """The first entry of a new run, and the run's salt. The deadline counts from now.

    Nobody drives the run yet; `gateway` is the address of the process that follows it.
    """
    order, salt, now = admission.order, context.salt(), context.now()
    body, parts = _task_contents(order.task)
    task = content_ref(salt, body)
    contents = [(task, body)]
    plan = ""
    plan_body = _plan_content(order)
    if plan_body is not None:
        plan = content_ref(salt, plan_body)
        contents.append((plan, plan_body))
    admitted = _admission_event(catalog, admission, now, task=task, plan=plan, gateway=gateway)
    new = NewRun(
        tenant=order.tenant,
        key=order.key,
        tier=order.tier.name,
        model=order.model,
        salt=salt,
        driver="",
        lease_until=now + untaken_seconds(context),
        deadline=admitted.deadline,
        cap=Amount(order.limits.usd, order.limits.tokens),
        code=context.code,
        budgets=order.budgets,
        origin_kind=order.origin_kind,
        origin_run=order.origin_run,
    )
    return Entry(
        run=order.run or context.name("run"),
        at=now,
        events=(admitted,),
        new=new,
        epoch=1,
        contents=tuple(contents),
        tags=tags(order),
        shared=split_content(context, order, task, parts) if parts is not None else None,
        once=order.once,
        notify=context.notifies and notices.needs_notice(order.wire),
    ), salt


def _plan_content(order: Order) -> bytes | None:
    """The plan that the request brings, or the recording of the run that it replays; None if there is neither."""
    if order.recording is not None:
        return orjson.dumps(order.recording.to_json())
    if order.plan is not None:
        return orjson.dumps(order.plan)
    return None


def _task_contents(task: Task) -> tuple[bytes, TaskParts | None]:
    """The bytes of a task, and their parts if it is to be shared with other turns of the conversation.

    A first turn is stored as a whole unless it is large, so that an engine reads it together with the run's journal.
    """
    if all(message.role != "assistant" for message in task.messages):
        body = task_bytes(task)
        if len(body) <= BRIEF:
            return body, None
    parts = task_parts(task)
    return parts.whole, parts


def split_content(context: EngineContext, order: Order, ref: str, parts: TaskParts) -> SharedContent:
    """The parts of a content, to be shared with others of the same tenant, API key and end user."""
    whose = orjson.dumps([order.tenant, order.key, order.task.user])
    owner = hmac.digest(context.sharing_key(), whose, "sha256").hex()
    return SharedContent(ref, owner, parts.head, parts.body, parts.tail)


def _limits(admission: Admission) -> Limits:
    """The limits of a run under the policy that plans it.

    Where nobody conducts there is one round. Only a model whose prompt offers it takes steps itself, and none where
    there are tools of the caller's: calls of those belong to the steps of one workflow.
    """
    order, limits = admission.order, admission.order.limits
    may_nest = admission.conductor == "model" and order.tier.conductor.prompt == "general"
    if admission.conductor in (CALLER, FALLBACK):
        limits = replace(limits, rounds=1)
    elif admission.conductor == REPLAY and order.recording is not None:
        limits = replace(limits, rounds=order.recording.rounds)
        may_nest = order.recording.nests
    if limits.depth and (not may_nest or order.task.toolbox.tools):
        limits = replace(limits, depth=0)
    return limits


def _admission_event(
    catalog: Catalog, admission: Admission, now: float, *, task: str, plan: str, gateway: str
) -> RunAdmitted:
    """`run.admitted`; `task` is the ref of what was asked, and `plan` that of the caller's own plan."""
    order, limits = admission.order, _limits(admission)
    return RunAdmitted(
        task=task,
        tier=order.tier.name,
        model=order.model,
        effort=order.effort,
        limits=limits,
        deadline=now + limits.seconds,
        pool=tuple(worker.name for worker in admission.eligible.workers),
        excluded=admission.eligible.excluded,
        labels=frozenset(order.labels),
        conductor=admission.conductor,
        catalog=catalog.digest,
        rehearsal=catalog.rehearsal,
        streams=order.streams,
        preview=order.preview,
        ignored=tuple(order.ignored),
        on_disconnect=order.on_disconnect or ("finish" if order.once is not None else "cancel"),
        wire=order.wire,
        explore=order.explore,
        gateway=gateway,
        plan=plan,
        recorded_labels=_recorded_labels(order),
        request_id=order.request_id,
        tenant=order.tenant,
        key_name=order.key_name,
        traceparent=order.trace.parent,
        tracestate=order.trace.state,
        budgets=order.budgets,
        capped=order.capped,
        origin_kind=order.origin_kind,
        origin_run=order.origin_run,
        shadow=order.shadow,
        served_by=order.tier.served_by,
        approval=terms_of(catalog, order.tier, order.labels, requested=order.approval),
    )
