"""The next turn of a run, begun in whichever process receives the tool results of its caller.

the run waits for exactly these ...... run.resumed and step.tool_results, in one entry; the engine that takes the
                                       run queues the steps that waited (see `begin_turn` for those of 0.1.0)
the same once more, while it runs .... the caller follows that turn
the run has ended .................... the conversation is the history of a new run
anything else ........................ 400 (run/caller_view.py)
"""

from collections.abc import Mapping, Sequence

import orjson
from msgspec import Struct
from msgspec.structs import replace

from app.core.contents import content_ref
from app.core.message.chat import Document, Image, Message, labels_of, message_to_json, task_parts
from app.core.pool.catalog import Catalog
from app.core.pool.policy import exclusion
from app.core.pool.rules import TOOL, Reading
from app.core.run import caller_view, drafts, notices
from app.core.run.caller_view import ResultsKind, ReturnedResults
from app.core.run.events import Event, RunResumed, StepToolResults, facts
from app.core.run.fold import fold
from app.core.run.state import RunState, Turn
from app.core.run.visibility import reading_of
from app.engine.commit.run_writer import RunSnapshot
from app.engine.context import EngineContext, WaitingRuns
from app.engine.runs.admission import Order, Owner, request_tags, split_content, untaken_seconds
from app.errors import InvalidRequest, NotFound
from app.store.protocol import BRIEF, Entry, Lease, Outbox

NEEDED: Mapping[type, str] = {Image: "image", Document: "pdf"}
"""The modality that a worker needs for a part of a message."""
PLURALS: Mapping[str, str] = {"image": "images", "pdf": "PDFs"}


class WaitingRun(Struct, frozen=True):
    """A run as far as its next turn needs it. Its salt is empty where its content was erased."""

    owner: Owner
    snapshot: RunSnapshot
    engine: str = ""
    """The address of the engine that drove it, and may still hold its state; empty where that is not known."""


class Resumption(Struct, frozen=True):
    """The run that results belong to, and what they are to it."""

    waiting_run: WaitingRun
    kind: ResultsKind
    shares: Mapping[int, tuple[str, bytes]]
    """The results for each step, as content with its ref, by step."""
    labels: Mapping[int, frozenset[str]] = {}
    """The labels of the results for each step that have any."""

    @property
    def state(self) -> RunState:
        """Return the state of the run."""
        return self.waiting_run.snapshot.state


class NextTurn(Struct, frozen=True):
    """The beginning of a turn: its number, its first entry, and the steps that go on."""

    turn: int
    deadline: float
    entry: Entry
    steps: tuple[int, ...]


async def find_resumption(
    context: EngineContext, order: Order, results: ReturnedResults, waiting_runs: WaitingRuns[WaitingRun]
) -> Resumption | None:
    """Return the run that these results continue, or None where the conversation makes a new one.

    A run that waited here for just these results is not looked up: whether it still does, and nobody has asked for its
    end, is for the commit to say, which is fenced by the epoch that it waited under and by its last event.

    Raises `InvalidRequest` for results that belong to no run. A run of another owner counts as unknown.
    """
    waiting_run = waiting_runs.take(results.run)
    if waiting_run is None or waiting_run.snapshot.state.unanswered_tool_calls.keys() != results.results.keys():
        waiting_run = await _look_up(context, order.tenant, results.run, waiting_run)
    state, salt = waiting_run.snapshot.state, waiting_run.snapshot.salt
    tier = state.admitted.tier
    is_same_tier_or_key = tier == order.tier.name or waiting_run.owner.key == order.key
    if waiting_run.owner.tenant != order.tenant or not is_same_tier_or_key:
        raise caller_view.unknown_call_error()
    kind = caller_view.classify_results(state, results)
    if kind == "history" or not salt or tier not in context.catalog().tiers:
        return None
    portions = caller_view.messages_by_step(state, results)
    shares = {}
    for n, messages in portions.items():
        body = orjson.dumps([message_to_json(message) for message in messages])
        shares[n] = (content_ref(salt, body), body)
    if kind == "repeat":
        _check_same(state, shares)
    else:
        _check_authority(context, order, state, results, portions)
    labels = {}
    if order.labels:
        labels = {n: labels_of(messages) for n, messages in portions.items()}
    return Resumption(waiting_run, kind, shares, labels)


async def _look_up(context: EngineContext, tenant: str, run: str, kept: WaitingRun | None) -> WaitingRun:
    """Return a tenant's run as it is now, at least up to the last event that its row knows. `kept` is the run as it was
    when it began to wait, if this process has it. Raises `InvalidRequest` if there is no such run."""
    try:
        store = context.store.of_tenant(tenant)
        row = await store.run(run)
    except NotFound:
        raise caller_view.unknown_call_error() from None
    if kept is None:
        journal = await store.journal(run, upto=row.seq)
        salt, state = journal.salt, fold(journal.events)
    else:
        before = kept.snapshot
        journal = await store.journal(run, upto=row.seq, after=before.state.seq)
        salt, state = before.salt, fold(journal.events, before.state)
    epoch = row.epoch
    if row.driver:  # an engine that has taken it over is about to end it or to let go of it
        epoch = 0
    if row.erased:
        salt = b""
    return WaitingRun(Owner(row.tenant, row.key), RunSnapshot(state, salt, epoch))


def _check_same(state: RunState, shares: Mapping[int, tuple[str, bytes]]) -> None:
    """Refuse results that differ from those that were sent before."""
    for n, (ref, _) in shares.items():
        if all(exchange.results != ref for exchange in state.steps[n].exchanges):
            raise caller_view.already_answered_error(state.run)


def _check_labels(
    context: EngineContext,
    order: Order,
    state: RunState,
    results: ReturnedResults,
    portions: Mapping[int, tuple[Message, ...]],
) -> None:
    """The conversation has no other labels than it had. Results may have some, as long as a worker of the run may read
    them: what others make of them carries these labels too."""
    earlier = len(order.task.messages) - len(results.results) - len(results.tail)
    labels_before = labels_of(order.task.messages[:earlier])
    labels_of_request = order.labels - order.on_messages
    known_labels = state.admitted.labels | _labels_of_results(state)
    if not labels_of_request <= state.admitted.labels or not labels_before <= known_labels:
        raise InvalidRequest(
            "The run that these results belong to was begun without some of the labels of this request; send the "
            "conversation without the last tool calls to begin another one.",
            param="baton.labels",
            code="labels_changed",
        )
    workers = context.catalog().workers
    pool = [workers[name] for name in state.admitted.pool if name in workers]
    for n, messages in portions.items():
        read = reading_of(state, n, pool) | Reading(labels_of(messages), frozenset({TOOL}))
        reasons = {worker.name: exclusion(worker, read) for worker in pool}
        if all(reasons.values()):
            listed = "; ".join([f"{name}: {reason}" for name, reason in sorted(reasons.items())])
            raise InvalidRequest(
                f"No worker of this run may read these tool results. {listed[:2000]}",
                param="messages",
                code="no_eligible_worker",
            )


def _labels_of_results(state: RunState) -> set[str]:
    """Return the labels of all tool results that the run was sent before."""
    labels: set[str] = set()
    for step in state.steps.values():
        for exchange in step.exchanges:
            labels.update(exchange.labels)
    return labels


def _check_authority(
    context: EngineContext,
    order: Order,
    state: RunState,
    results: ReturnedResults,
    portions: Mapping[int, tuple[Message, ...]],
) -> None:
    """Workers were chosen for the run's labels, for what it showed them and for the log-probabilities that it wanted;
    none of this may grow without their having been chosen for it."""
    workers = context.catalog().workers
    if order.task.logprobs is not None:
        _check_logprobs(context.catalog(), state)
    if order.labels or any(worker.excluding_rules for worker in workers.values()):
        _check_labels(context, order, state, results, portions)
    for n, messages in portions.items():
        worker = workers.get(state.steps[n].worker)
        if worker is None:
            continue
        lacking = _needed_modalities(messages) - worker.card.modalities
        if lacking:
            raise InvalidRequest(
                f"The worker that called this tool cannot read {PLURALS[min(lacking)]}; send the result as text.",
                param="messages",
                code="no_eligible_worker",
            )


def _check_logprobs(catalog: Catalog, state: RunState) -> None:
    """Any worker of the run may come to give the answer, so each has to tell log-probabilities."""
    workers = [catalog.workers[name] for name in state.admitted.pool if name in catalog.workers]
    unable = [worker.name for worker in workers if not catalog.providers[worker.provider].gives_logprobs]
    if unable:
        raise InvalidRequest(
            "The run that these results belong to was begun without log-probabilities, and some of its workers tell "
            "none; send the conversation without the last tool calls to begin another one. They are: "
            f"{', '.join(unable)[:2000]}.",
            param="logprobs",
            code="no_eligible_worker",
        )


def _needed_modalities(messages: Sequence[Message]) -> set[str]:
    """Return the modalities that a worker needs to read these messages."""
    needed = set()
    for message in messages:
        for part in message.parts:
            if type(part) in NEEDED:
                needed.add(NEEDED[type(part)])
    return needed


def begin_turn(context: EngineContext, order: Order, resumption: Resumption, gateway: str) -> NextTurn:
    """Return the turn that the request begins, and that `gateway` follows. How to decode, and the tools, are as the
    request says. No engine drives the run yet."""
    state, now = resumption.state, context.now()
    parts = task_parts(replace(order.task, messages=(), user=None, metadata={}))
    request = (content_ref(resumption.waiting_run.snapshot.salt, parts.whole), parts.whole)
    once = ""
    if order.once is not None:
        once = order.once.id
    stored_once = None
    if len(parts.whole) > BRIEF:
        stored_once = split_content(context, order, request[0], parts)
    turn = _next_turn(order, state, request[0], gateway, now)
    entry = Entry(
        run=state.run,
        at=now,
        events=(drafts.run_resumed(turn, once), *_results(order, resumption)),
        epoch=resumption.waiting_run.snapshot.epoch,
        contents=(request, *resumption.shares.values()),
        outbox=_early_tickets(resumption, turn),
        tags=(*_label_tags(resumption), *request_tags(order)),
        shared=stored_once,
        once=order.once,
        notify=context.notifies and notices.needs_notice(order.wire),
        lease=Lease("", now + untaken_seconds(context), turn.deadline),
        tenant=order.tenant,
        seq=state.seq,
    )
    return NextTurn(turn.number, turn.deadline, entry, tuple(resumption.shares))


def _next_turn(order: Order, state: RunState, request: str, gateway: str, now: float) -> Turn:
    """Return the run's next turn. A run that a request with an idempotency key continues goes on without its caller,
    who can ask again, unless the request says otherwise."""
    if order.once is None:
        on_disconnect = order.on_disconnect or "cancel"
    else:
        on_disconnect = order.on_disconnect or "finish"
    return Turn(
        number=state.turn.number + 1,
        deadline=now + min(order.limits.seconds, state.admitted.limits.seconds),
        streams=order.streams,
        request=request,
        at=now,
        on_disconnect=on_disconnect,
        wire=order.wire,
        gateway=gateway,
        request_id=order.request_id,
        trace=order.trace,
    )


def _results(order: Order, resumption: Resumption) -> list[StepToolResults]:
    """Return the facts that each waiting step has the results of its calls."""
    results = []
    for n, (ref, _) in resumption.shares.items():
        ids, labels = resumption.state.steps[n].exchanges[-1].ids, resumption.labels.get(n, frozenset())
        results.append(StepToolResults(n, ref, ids, labels, order.origin_run))
    return results


def _early_tickets(resumption: Resumption, turn: Turn) -> tuple[Outbox, ...]:
    """Return the tickets of the steps that have results, where 0.1.0 has admitted the run; else none.

    A process of 0.1.0 may take such a run over. It queues no step that has tool results, because its gateways write the
    tickets of these steps with the results, and would wait for the tickets until the run expires. An engine of a later
    release that takes the run leaves them as they are.
    """
    admitted = resumption.state.admitted
    if not admitted.is_from_0_1_0:
        return ()
    return tuple([Outbox(n, admitted.tier, turn.gateway, turn.number, announced=False) for n in resumption.shares])


def _label_tags(resumption: Resumption) -> list[tuple[str, str]]:
    """Return the labels that the caller put on the results, as tags of the run: by these, the retention time of a label
    holds for the results, too."""
    labels: set[str] = set()
    for result_labels in resumption.labels.values():
        labels.update(result_labels)
    return [("label", label) for label in sorted(labels)]


def turn_of(events: tuple[Event, ...], once: str) -> int:
    """Return the number of the turn that a claim was made for: that of the admission, unless a later turn names it."""
    for fact in facts(events, RunResumed):
        if fact.once == once:
            return fact.turn
    return 0
