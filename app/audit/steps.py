"""Rules about the execution of steps: queued when their inputs are done, done at most once, settled at the end."""

from collections.abc import Iterator, Mapping
from itertools import chain

from app.audit.audited_run import AuditedRun, Event, Step
from app.audit.report import Violation
from app.core.run.kinds import Kind


def check_steps(run: AuditedRun) -> Iterator[Violation]:
    """Apply all rules of this module."""
    for step in run.steps.values():
        yield from _check_state_changes(run, step)
        yield from _check_single_settlement(run, step)
        yield from _check_completion(run, step)
        yield from _check_queueing(run, step)
        if run.end is not None and step.settlement is None and not run.was_ended_unread:
            yield run.violation("step-left-open", run.end.seq, f"step {step.n} is not settled")
    yield from _check_fan_out(run)


OPEN_STATES = frozenset({"waiting", "queued", "running", "awaiting_tool"})
CALLABLE_STATES = frozenset({"queued", "running"})


def _check_state_changes(run: AuditedRun, step: Step) -> Iterator[Violation]:
    """A step goes waiting -> queued -> running <-> awaiting_tool; events about a settled step are ignored."""
    state = "waiting"
    for event in step.events:
        if event.kind is Kind.CALL_INTENDED and state in ("done", "failed"):
            yield run.violation("call-after-done", event.seq, f"a call is intended for step {step.n}, which is {state}")
        yield from _check_event_of_step(run, step, event)
        if state not in OPEN_STATES:
            continue
        next_state, allowed_states = STATE_CHANGES[event.kind]
        is_reused_output = event.kind is Kind.STEP_DONE and event.body.get("origin_run")
        if is_reused_output:
            allowed_states = frozenset({"waiting"})
        if state not in allowed_states:
            yield run.violation("step-arrow", event.seq, f"step {step.n} goes from {state} to {next_state}")
        state = next_state


def _check_event_of_step(run: AuditedRun, step: Step, event: Event) -> Iterator[Violation]:
    """A step of a worker is executed; for a step of the conductor a plan is opened instead."""
    if step.is_for_conductor and event.kind in EXECUTION_KINDS:
        owner = "the conductor's"
    elif not step.is_for_conductor and event.kind is Kind.PLAN_OPENED:
        owner = "a worker's"
    else:
        return
    yield run.violation("step-arrow", event.seq, f"step {step.n} is {owner}, and {event.kind.value} is not for it")


STATE_CHANGES: Mapping[Kind, tuple[str, frozenset[str]]] = {
    Kind.PLAN_OPENED: ("running", frozenset({"waiting", "running"})),
    Kind.STEP_QUEUED: ("queued", frozenset({"waiting"})),
    Kind.CALL_INTENDED: ("running", CALLABLE_STATES),
    Kind.STEP_AWAITING: ("awaiting_tool", frozenset({"running"})),
    Kind.STEP_RESULTS: ("running", frozenset({"awaiting_tool"})),
    Kind.STEP_DONE: ("done", frozenset({"running"})),
    # A replay that reuses an earlier output goes from waiting to done: see `replays.py`.
    Kind.STEP_FAILED: ("failed", OPEN_STATES),
    Kind.STEP_SKIPPED: ("skipped", OPEN_STATES),
}
"""The state to which each event leads, and the states from which it may lead there."""
EXECUTION_KINDS = frozenset({Kind.STEP_QUEUED, Kind.CALL_INTENDED})
"""Events of steps that a worker executes; for the others a plan is opened."""


def _check_single_settlement(run: AuditedRun, step: Step) -> Iterator[Violation]:
    """The execution of a step settles it once, and so does the run's owner; neither may know of the other."""
    by_execution = [event for event in step.events if event.kind in (Kind.STEP_DONE, Kind.STEP_FAILED)]
    by_owner = [event for event in step.events if event.kind is Kind.STEP_SKIPPED]
    for event in by_execution[1:]:
        rule = "step-arrow"
        if event.kind is by_execution[0].kind is Kind.STEP_DONE:
            rule = "done-twice"
        first = by_execution[0].seq
        yield run.violation(rule, event.seq, f"step {step.n} was already settled by its engine at {first}")
    for event in by_owner[1:]:
        yield run.violation("step-arrow", event.seq, f"step {step.n} is skipped at {by_owner[0].seq} already")


def _check_completion(run: AuditedRun, step: Step) -> Iterator[Violation]:
    """A step is done by a successful call of its own, with the output of that call."""
    for event in step.events:
        if event.kind is not Kind.STEP_DONE or event.body.get("origin_run"):
            continue
        if step.is_for_conductor:
            yield from _check_nested_completion(run, step, event)
            continue
        call = run.calls.get(event.body["call"])
        if call is None or call.step != step.n or call.outcome_kind != "ok" or call.outcomes[0].seq > event.seq:
            yield run.violation(
                "done-without-call", event.seq, f"step {step.n} is done by no successful call of its own"
            )
            continue
        outcome = call.outcomes[0].body
        for name in ("output", "finish"):
            if event.body[name] != outcome[name]:
                yield run.violation("done-without-call", event.seq, f"step {step.n}: {name} is not that of {call.id}")


def _check_nested_completion(run: AuditedRun, step: Step, event: Event) -> Iterator[Violation]:
    """A step of the conductor is done by the workflow that was opened for it, once all of that is settled."""
    completion = None
    proposals = run.proposals_for(step.n)
    if proposals:
        latest = proposals[-1]
        answering_step = latest.answering_step
        if answering_step is not None and all(nested.is_settled_before(event.seq) for nested in latest.steps):
            completion = answering_step.completion
    if completion is None:
        yield run.violation("done-without-call", event.seq, f"what is nested in step {step.n} has not answered")
    elif any(event.body[name] != completion.body[name] for name in ("output", "chars", "finish", "call")):
        answered = f"step {completion.body['n']}"
        yield run.violation("done-without-call", event.seq, f"step {step.n} does not say what {answered} said")


def _check_queueing(run: AuditedRun, step: Step) -> Iterator[Violation]:
    for event in step.events:
        if event.kind is not Kind.STEP_QUEUED:
            continue
        if run.admission["preview"]:
            yield run.violation("preview-executed", event.seq, f"step {step.n} of a preview is queued")
        late = [n for n in step.inputs if n in run.steps and not run.steps[n].is_settled_before(event.seq)]
        if late:
            yield run.violation(
                "queued-too-early", event.seq, f"step {step.n} is queued before step {late[0]} is settled"
            )
        proposal = run.proposals[step.plan.body["proposal"]]
        accepted = proposal.acceptance
        if (accepted is None or accepted.seq > event.seq) and (
            step.plan.body["answers"] or proposal.opening.body.get("waits")
        ):
            yield run.violation(
                "queued-too-early", event.seq, f"step {step.n} waits for its plan, which is not accepted yet"
            )


def _check_fan_out(run: AuditedRun) -> Iterator[Violation]:
    """The steps that are queued and not settled stay within the limit, counted by the order of the journal."""
    most = run.limits["fan_out"]
    for number in sorted({proposal.round for proposal in run.proposals}):
        under_way = 0
        events: list[Event] = []
        for proposal in run.proposals:
            if proposal.round == number:
                events += chain.from_iterable(map(_queueing_and_settlement, proposal.steps))
        for event in sorted(events, key=lambda event: event.seq):
            under_way += 1 if event.kind is Kind.STEP_QUEUED else -1
            if event.kind is Kind.STEP_QUEUED and under_way > most:
                yield run.violation("fan-out-over-limit", event.seq, f"{under_way} steps are under way, at most {most}")


def _queueing_and_settlement(step: Step) -> Iterator[Event]:
    """Yield the event that first queued a step, and the one that settled it after that."""
    queued = [event for event in step.events if event.kind is Kind.STEP_QUEUED]
    if not queued:
        return
    yield queued[0]
    if step.settlement is not None and step.settlement.seq > queued[0].seq:
        yield step.settlement
