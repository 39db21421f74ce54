"""Replays: the task of an earlier run, carried out again by a run of its own (`deploy/docs/replays.md`).

`read_run` collects what a replay needs of the earlier run, `recording` what it takes over, and `as_replay` makes an
order that begins the new run, which is admitted like any other: the labels, rules, prices and limits of today apply.
`results` are the recorded results for the tool calls of a replay that waits for them.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson
from msgspec import Struct
from msgspec.structs import replace

from app.core.contents import content_ref
from app.core.message.chat import Task, message_from_json, message_to_json, task_from_json
from app.core.plan.proposals import by_name, read_plan
from app.core.plan.workflow import CONDUCTOR, Step
from app.core.pool.catalog import LIMITS, REQUESTED, Catalog, Limits, Tier
from app.core.pool.conductor_versions import VersionsInForce, versions_in_force
from app.core.pool.policy import DENIED
from app.core.run.events import RunResumed, facts
from app.core.run.fold import fold
from app.core.run.recording import (
    KeptOutput,
    RecordedPlan,
    RecordedTools,
    Recording,
    build_recorded_plan,
    list_executed_plans,
    places,
    plan_key,
    record_tool_use,
    results_for_calls,
    steps_before,
    steps_without_plan,
)
from app.core.run.state import RunState
from app.core.run.visibility import LabelFlow
from app.engine.calls.step_request import NOTHING, bodies_of, texts_of
from app.engine.commit.run_writer import RunSnapshot
from app.engine.context import EngineContext
from app.engine.runs.admission import Order
from app.engine.runs.tool_results import Resumption, WaitingRun
from app.errors import Conflict, InvalidRequest, NotFound, PlanRejected
from app.store.protocol import ConductorVersions, ContentReads, Journal


class EarlierRun(Struct, frozen=True):
    """The run that is replayed."""

    state: RunState
    journal: Journal
    task: Task
    texts: Mapping[str, str]
    """Its subtasks and outputs by ref."""
    messages: Mapping[str, Any]
    """The messages with tool calls and their results by ref, in plain JSON values."""
    requests: tuple[Mapping[str, Any], ...] = ()
    """The requests of its turns after the first, likewise."""


class Changes(Struct, frozen=True):
    """The changes of a replay against the run that it repeats. Without any of them it has the same plan."""

    plan: object | None = None
    """Another plan, with workers by name; untrusted."""
    worker: str | None = None
    """The one worker that answers, or from `from_step` on the one that every step is given to."""
    from_step: int | None = None
    """The number of the step from which on the plan is carried out; the outputs of earlier steps are taken over."""
    conducts: bool = False
    """True if the tier's conductor plans anew."""
    version: str = ""
    """The version of that conductor which plans, whichever is in force; empty for the one that is."""


async def check_version(store: ConductorVersions, tier: Tier, version: str) -> None:
    """Raise `InvalidRequest` unless the version of a replay is loaded for the tier's conductor.

    Its name is sent to the conductor's provider as that of the model. Whoever could choose it freely could have any
    model of that provider plan, at the price that the pool file states for another one.
    """
    loaded: Sequence[str] = ()
    if tier.conductor.worker is not None:
        in_force = versions_in_force(await store.changes())
        loaded = in_force.get(tier.conductor.worker, VersionsInForce()).loaded
    if version not in loaded:
        raise InvalidRequest(
            f"No such version is loaded for the conductor of {tier.name}; these are: {', '.join(loaded) or 'none'}.",
            param="version",
            code="not_replayable",
        )


async def read_run(store: ContentReads, journal: Journal) -> EarlierRun:
    """Collect what a replay needs. Raises `Conflict` if the run's content was erased, or it has not ended."""
    state = fold(journal.events)
    if not state.ended:
        raise Conflict("The run goes on; replay it when it has ended.", code="run_not_ended")
    exchanges = [use for step in state.steps.values() for use in step.exchanges if use.results]
    try:
        if not journal.salt:
            raise NotFound
        text_refs = {ref for step in state.steps.values() for ref in (step.subtask, step.output)}
        texts = await texts_of(store, state.run, text_refs - {""})
        turns = [fact.request or state.admitted.task for fact in facts(journal.events, RunResumed)]
        refs = {state.admitted.task, *turns}
        for use in exchanges:
            refs |= {use.message, use.results}
        bodies = await store.contents(state.run, sorted(refs))
        if len(bodies) < len(refs):
            raise NotFound
    except NotFound:
        raise Conflict(
            "The content of the run was erased, so it cannot be repeated; its journal remains.", code="content_erased"
        ) from None
    values = {ref: orjson.loads(body) for ref, body in bodies.items()}
    task = task_from_json(values[state.admitted.task])
    requests = tuple([values[ref] for ref in turns])
    return EarlierRun(state, journal, task, {"": "", **texts}, values, requests)


# -- what is taken over


def recording(
    earlier: EarlierRun,
    changes: Changes,
    pool: Sequence[str],
    most_steps: int,
    catalog: Catalog,
    labels: frozenset[str],
) -> Recording:
    """All that a replay takes over; `labels` are those of the new run, whose plan names workers of this pool.

    Raises `InvalidRequest` for changes that do not fit the run or each other.
    """
    tools = tuple(_tools(earlier))
    if changes.conducts:
        _refuse(changes.from_step is not None, "from_step", "A conductor plans from the start; leave out from_step.")
        _refuse(changes.plan is not None, "plan", "Give a plan, or a model that plans, not both.")
        return Recording(earlier.state.run, {}, tools, earlier.requests)
    plans = dict(_plans(earlier, _keep_outputs(earlier, changes, catalog, labels)))
    if changes.plan is not None:
        plans = {"1": _read_given_plan(earlier, changes, pool, most_steps, plans.get("1"))}
    elif changes.worker is not None and changes.from_step is None:
        plans = {"1": RecordedPlan((Step(changes.worker, answers=True),), instant=True)}
    elif changes.worker is not None:
        plans = {key: _with_worker(plan, changes.worker) for key, plan in plans.items()}
    _refuse("1" not in plans, "run", "The run has no plan that could be repeated; choose a model that plans.")
    unplanned = ", ".join(steps_without_plan(plans))
    _refuse(bool(unplanned), "run", f"The run ended before {unplanned} had a plan; choose a model that plans.")
    return Recording(earlier.state.run, plans, tools, earlier.requests)


def _refuse(wrong: bool, param: str, message: str) -> None:
    if wrong:
        raise InvalidRequest(message, param=param, code="not_replayable")


def _plans(earlier: EarlierRun, kept: Mapping[int, KeptOutput]) -> Sequence[tuple[str, RecordedPlan]]:
    state, positions = earlier.state, places(earlier.state)
    plans = []
    for proposal in list_executed_plans(state):
        if proposal.parent in kept:  # the output of the step around it is taken over whole
            continue
        plan = build_recorded_plan(proposal, earlier.journal.events, earlier.texts, kept)
        plans.append((plan_key(proposal, positions), plan))
    return plans


def _keep_outputs(
    earlier: EarlierRun, changes: Changes, catalog: Catalog, labels: frozenset[str]
) -> Mapping[int, KeptOutput]:
    """The outputs of the steps before `from_step`, by number. Each carries at least the labels that it carried then; a
    label that its worker took away counts as taken away only if the worker still may."""
    n, state = changes.from_step, earlier.state
    if n is None:
        return {}
    own = {plan.number: plan.parent for plan in list_executed_plans(state)}
    step = state.steps.get(n)
    planned = step is not None and step.proposal in own
    _refuse(not planned, "from_step", f"The run has no step {n} that was carried out.")
    nested = step is not None and own.get(step.proposal) is not None
    _refuse(nested, "from_step", f"Step {n} is nested in another one; begin from the step around it.")
    then, now = LabelFlow(state).outputs, LabelFlow(state, catalog, lowered_now=True).outputs
    added = labels - state.admitted.labels
    kept: dict[int, KeptOutput] = {}
    for position in steps_before(state, n):
        missing = f"Step {position.n} has no output that could be kept; begin from it or from an earlier one."
        _refuse(position.state != "done", "from_step", missing)
        carried = then[position.n] | now[position.n] | added
        text = earlier.texts[position.output]
        kept[position.n] = KeptOutput(
            position.n, position.output, text, position.finish, refusal=position.refusal, labels=carried
        )
    return kept


def _read_given_plan(
    earlier: EarlierRun, changes: Changes, pool: Sequence[str], most_steps: int, recorded: RecordedPlan | None
) -> RecordedPlan:
    """The plan of the request. Where outputs are kept, the steps that gave them must be those of the run."""
    try:
        steps = read_plan(changes.plan, by_name(pool), most_steps)
    except PlanRejected as rejected:
        reasons = "; ".join(rejected.reasons)[:3000]
        raise InvalidRequest(f"The plan is not valid: {reasons}", param="plan", code="invalid_plan") from None
    if changes.from_step is None or recorded is None:
        return RecordedPlan(steps, instant=True)
    _refuse(len(earlier.state.proposals) > 1 and earlier.state.round_count > 1, "plan", "The run has several rounds.")
    for position in recorded.kept_outputs:
        same = position < len(steps) and _reads(steps[position]) == _reads(recorded.steps[position])
        _refuse(not same, "plan", f"Step {position} of the plan is not that of the run, whose output is to be kept.")
    keeps_all = len(steps) <= len(recorded.kept_outputs)
    _refuse(keeps_all, "plan", "The plan has no step after those whose outputs are kept.")
    return RecordedPlan(steps, instant=recorded.instant, kept_outputs=recorded.kept_outputs)


def _reads(step: Step) -> tuple[object, ...]:
    """The subtask of a step and what it sees, which make its output one of this plan."""
    return step.subtask, step.access


def _with_worker(plan: RecordedPlan, worker: str) -> RecordedPlan:
    """Return the plan with this worker in every step that is carried out, apart from those that are workflows."""
    steps = []
    for position, step in enumerate(plan.steps):
        if position not in plan.kept_outputs and step.worker != CONDUCTOR:
            step = replace(step, worker=worker)
        steps.append(step)
    return replace(plan, steps=tuple(steps))


def _tools(earlier: EarlierRun) -> Sequence[RecordedTools]:
    positions, recorded = places(earlier.state), []
    for step in earlier.state.steps.values():
        for use in step.exchanges:
            if use.results:
                said = message_from_json(earlier.messages[use.message])
                results = [message_from_json(message) for message in earlier.messages[use.results]]
                recorded.append(record_tool_use(said, results, positions[step.n], use.labels))
    return recorded


# -- the new run


def as_replay(order: Order, earlier: EarlierRun, changes: Changes, catalog: Catalog) -> Order:
    """The order of a replay, made of an order for the task of the earlier run.

    That one has the limits of its tier, already narrowed by the request's and the key's budget. The plan of the earlier
    run also keeps within the limits that this run had. Workers that its request denied stay denied.
    """
    admitted, tier = earlier.state.admitted, order.tier
    labels = order.labels | admitted.labels
    denied = {name for name, reason in admitted.excluded.items() if reason == DENIED}
    taken_over = recording(earlier, changes, tier.pool, order.limits.steps, catalog, labels)
    limits = _narrowest(order.limits, admitted.limits) if taken_over.plans else order.limits
    wire = {"format": "chat"}
    if changes.version:
        wire["conductor"] = changes.version
    return replace(
        order,
        limits=limits,
        capped=order.capped or admitted.capped,
        labels=labels,
        overrides=replace(order.overrides, deny=order.overrides.deny | denied.intersection(tier.pool)),
        followed=False,
        on_disconnect="finish",
        ignored=admitted.ignored,
        approval=admitted.approval is not None and REQUESTED in admitted.approval.reasons,
        wire=wire,
        origin_kind="replay",
        origin_run=earlier.state.run,
        recording=taken_over if taken_over.plans or taken_over.tools else None,
    )


def _narrowest(limits: Limits, earlier: Limits) -> Limits:
    """Return the limits, none of them above that of the earlier run if its own plan has to keep it."""
    return replace(limits, **{name: min(getattr(limits, name), getattr(earlier, name)) for name in LIMITS})


# -- tools


async def recording_of(store: ContentReads, state: RunState, contents: Mapping[str, bytes] = NOTHING) -> Recording:
    """Return the recording of a replay, from its content. `NotFound` if that was erased."""
    body = (await bodies_of(store, state.run, [state.admitted.plan], contents))[state.admitted.plan]
    return Recording.from_json(orjson.loads(body))


async def results(context: EngineContext, run: RunSnapshot) -> tuple[Order, Resumption] | None:
    """The turn of a replay that waits for tool results, if the run that it repeats has results for equal calls of every
    step that waits; else None: then the run waits for its caller, like any other."""
    state, tenant = run.state, run.state.admitted.tenant
    tier = context.tier_of(state.admitted)
    if tier is None or not run.salt:
        return None
    of_earlier, positions = await recording_of(context.store, state), places(state)
    shares: dict[int, tuple[str, bytes]] = {}
    labels: dict[int, frozenset[str]] = {}
    waiting = [step for step in state.steps.values() if step.state == "awaiting_tool"]
    bodies = await context.store.contents(state.run, [step.exchanges[-1].message for step in waiting])
    for step in waiting:
        use = step.exchanges[-1]
        if use.message not in bodies:
            return None
        said = message_from_json(orjson.loads(bodies[use.message]))
        recorded = results_for_calls(of_earlier, positions[step.n], len(step.exchanges) - 1, said, use.ids)
        if recorded is None:
            return None
        body = orjson.dumps([message_to_json(message) for message in recorded.results])
        shares[step.n] = content_ref(run.salt, body), body
        labels[step.n] = recorded.labels
    order = Order(
        task=await _next_request(context, state, of_earlier),
        tier=tier,
        model=state.admitted.model,
        effort=state.admitted.effort,
        limits=state.admitted.limits,
        tenant=tenant,
        key="",
        followed=False,
        on_disconnect="finish",
        wire=state.turn.wire,
        origin_kind="replay",
        origin_run=state.admitted.origin_run,
    )
    return order, Resumption(WaitingRun(order.owner, run), "go_on", shares, labels)


async def _next_request(context: EngineContext, state: RunState, of_earlier: Recording) -> Task:
    """The request of the next turn, how to decode and the tools: that of the earlier run, or where this run has more
    turns, that of its latest turn."""
    if state.turn.number < len(of_earlier.requests):
        return task_from_json(of_earlier.requests[state.turn.number])
    ref = state.turn.request or state.admitted.task
    body = (await context.store.contents(state.run, [ref])).get(ref)
    if body is None:
        raise NotFound
    return task_from_json(orjson.loads(body))
