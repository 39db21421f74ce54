"""Rules about proposals: one at a time, in the right mode, within pool and limits, with access lists that name only
earlier steps. The rules about nested workflows are in `nesting.py`."""

import re
from collections.abc import Iterator, Sequence

from app.audit.audited_run import FALLBACK, AuditedRun, Event, Proposal, Step
from app.audit.choices import check_decision
from app.audit.nesting import check_nesting, conductor_if_allowed, own_inputs, steps_allowed
from app.audit.report import Violation
from app.core.plan.workflow import topology
from app.core.run.kinds import Kind

FIRST, REPAIR = "first", "repair"
SINGLE_ROUND_CONDUCTORS = frozenset({"caller", FALLBACK})
"""The conductors whose runs have one round."""
DENIALS = frozenset({"not", "no", "never", "without", "don't"})
PLAN_WHILE_ANOTHER = "a plan is opened while there is another one"
DRIVER_LOST = ["the driver was lost while the plan was made"]
"""The reasons for which a proposal is made again in the same mode."""


def check_plans(run: AuditedRun) -> Iterator[Violation]:
    """Apply all rules of this module."""
    yield from _check_order(run)
    yield from _check_modes(run, run.proposals_for(), nested=False)
    for step in run.steps_with_workflow:
        yield from _check_modes(run, run.proposals_for(step.n), nested=True)
    base = 0
    for proposal in run.proposals:
        yield from _check_numbers(run, proposal, base)
        yield from _check_planned_steps(run, proposal)
        yield from check_decision(run, proposal)
        yield from _check_verdict(run, proposal)
        base += len(proposal.steps)
    rounds = max((proposal.round for proposal in run.proposals_for()), default=0)
    if rounds > run.limits["rounds"]:
        yield run.violation("rounds-over-limit", 0, f"{rounds} rounds, at most {run.limits['rounds']}")


def _check_order(run: AuditedRun) -> Iterator[Violation]:
    """A proposal is opened, gets its steps and one verdict. The next one follows a rejection, a round, or is for a
    step."""
    opened = -1
    has_verdict = True
    previous: Proposal | None = None
    """The latest proposal for the run itself, not for one of its steps."""
    for event in run.events_of(Kind.PLAN_OPENED, Kind.PLAN_STEP, Kind.PLAN_ACCEPTED, Kind.PLAN_REJECTED):
        if event.kind is Kind.PLAN_OPENED:
            opened += 1
            proposal = run.proposals[opened]
            if not has_verdict:
                yield run.violation("plan-out-of-order", event.seq, PLAN_WHILE_ANOTHER)
            elif proposal.parent is None:
                yield from _check_next_proposal(run, proposal, previous)
            if proposal.parent is None:
                previous = proposal
            has_verdict = False
        elif has_verdict or event.body["proposal"] != opened:
            yield run.violation("plan-out-of-order", event.seq, f"{event.kind.value} while no such plan is open")
        elif event.kind is not Kind.PLAN_STEP:
            has_verdict = True


def _check_next_proposal(run: AuditedRun, proposal: Proposal, previous: Proposal | None) -> Iterator[Violation]:
    """A proposal for the run follows a rejected one of the same round, or opens the next round."""
    seq = proposal.opening.seq
    previous_round = previous.round if previous is not None else 1
    if proposal.round == previous_round:
        if previous is not None and previous.acceptance is not None:
            yield run.violation("plan-out-of-order", seq, PLAN_WHILE_ANOTHER)
    elif not _may_open_next_round(proposal, previous):
        yield run.violation("round-out-of-order", seq, f"round {proposal.round} is opened")


def _may_open_next_round(proposal: Proposal, before: Proposal | None) -> bool:
    """Return True if the previous round has answered and all its steps are settled."""
    if before is None or before.answering_step is None or proposal.round != before.round + 1:
        return False
    return all(step.is_settled_before(proposal.opening.seq) for step in before.steps)


def _check_modes(run: AuditedRun, proposals: Sequence[Proposal], *, nested: bool) -> Iterator[Violation]:
    """A first proposal is followed by at most one repair, then by the fallback. A further round and a run without a
    conductor have neither; the proposal of an engine that was lost is made again."""
    allowed = {FIRST, FALLBACK}
    round_number = 1
    has_single_round = run.admission["conductor"] in SINGLE_ROUND_CONDUCTORS
    for proposal in proposals:
        mode, seq = proposal.opening.body["mode"], proposal.opening.seq
        if proposal.round != round_number and not nested:
            allowed, round_number = {FIRST}, proposal.round
        if round_number > 1:
            allowed -= {FALLBACK}
            if has_single_round:
                allowed = set()
        if mode not in allowed:
            yield run.violation("plan-mode", seq, f"proposal {proposal.number} in mode {mode[:20]}")
        conductor = FALLBACK if mode == FALLBACK else run.admission["conductor"]
        if proposal.opening.body["conductor"] != conductor:
            yield run.violation("plan-mode", seq, f"proposal {proposal.number} by another conductor")
        allowed = _modes_after(proposal)


def _modes_after(proposal: Proposal) -> set[str]:
    """Return the modes in which a proposal may be followed by another one."""
    mode, rejection = proposal.opening.body["mode"], proposal.rejection
    if rejection is not None and rejection.body["reasons"] == DRIVER_LOST:
        return {mode, FALLBACK}
    if rejection is not None and mode == FIRST and not rejection.body["outage"]:
        return {REPAIR, FALLBACK}
    if mode == FALLBACK:
        return set()
    return {FALLBACK}


def _check_numbers(run: AuditedRun, proposal: Proposal, base: int) -> Iterator[Violation]:
    body, seq = proposal.opening.body, proposal.opening.seq
    if body["proposal"] != proposal.number:
        yield run.violation("plan-out-of-order", seq, f"proposal {body['proposal']} is the {proposal.number}th")
    if body["base"] != base:
        yield run.violation("step-number", seq, f"its steps count from {body['base']}, {base} were planned before")
    for place, step in enumerate(proposal.steps):
        if step.n != base + place:
            yield run.violation("step-number", step.plan.seq, f"step {step.n} stands at place {base + place}")
    order, pool = body["order"], [*run.admission["pool"], *conductor_if_allowed(run, proposal)]
    if len(set(order)) < len(order) or not set(order) <= set(pool):
        yield run.violation("order-wrong", seq, "the workers shown are not workers of the pool, each once")


def _check_planned_steps(run: AuditedRun, proposal: Proposal) -> Iterator[Violation]:
    limit = steps_allowed(run, proposal)
    if len(proposal.steps) > limit:
        seq = proposal.steps[limit].plan.seq
        yield run.violation("steps-over-limit", seq, f"{len(proposal.steps)} steps, at most {limit}")
    yield from check_nesting(run, proposal)
    pool = [*run.admission["pool"], *conductor_if_allowed(run, proposal)]
    visible_steps: set[int] = set()
    previous = run.previous_answer(proposal)
    if previous is not None:
        visible_steps.add(previous.n)
    for step in proposal.steps:
        seq = step.plan.seq
        if step.plan.body["worker"] not in pool and not step.is_taken_over:
            yield run.violation("worker-outside-pool", seq, f"step {step.n} is planned for a worker outside the pool")
        if step.plan.body.get("complete") and not _may_stand_in(run, proposal, step):
            yield run.violation("stand-in-wrong", seq, f"step {step.n} is not asked for the whole answer")
        if not set(own_inputs(run, step)) <= visible_steps:
            fault = f"step {step.n} lists a step that is neither an earlier one of its plan nor the previous answer"
            yield run.violation("access-forward", seq, fault)
        visible_steps.add(step.n)
    for step in proposal.steps[:-1]:
        if step.plan.body["answers"]:
            yield run.violation("answering-step", step.plan.seq, f"step {step.n} answers, and others follow")


def _may_stand_in(run: AuditedRun, proposal: Proposal, step: Step) -> bool:
    """Return True if a step's output may stand in for the answer: it does not answer itself, sees the conversation,
    and a sentence of its subtask asks for the final answer without a denial. An erased subtask is believed."""
    body = step.plan.body
    if proposal.parent is not None or body["answers"] or "user" not in body["access"]:
        return False
    text = run.record.contents.get(body["subtask"]) if body["subtask"] else b""
    if not text:
        return True
    for sentence in re.split(r"[.;:!?]", text.decode(errors="replace").lower()):
        before, phrase, _ = sentence.partition("final answer")
        if phrase and not DENIALS & set(re.findall(r"[a-z']+", before)):
            return True
    return False


def _check_verdict(run: AuditedRun, proposal: Proposal) -> Iterator[Violation]:
    acceptance = proposal.acceptance
    if proposal.approval_expiry is not None:
        acceptance = proposal.verdicts[0]
    if proposal.opening.body["mode"] == FALLBACK:
        yield from _check_fallback(run, proposal)
    if proposal.rejection is not None and proposal.rejection.body["call"]:
        yield from _check_planning_call(run, proposal, proposal.rejection)
    if acceptance is None:
        return
    is_further_round = proposal.round > 1 and proposal.parent is None
    may_have_no_answer = is_further_round and not proposal.steps
    last_step_answers = any(step.plan.body["answers"] for step in proposal.steps[-1:])
    if not last_step_answers and not may_have_no_answer:
        yield run.violation("answering-step", acceptance.seq, "the last step of the plan does not answer")
    count, shape = len(proposal.steps), _topology_of(run, proposal)
    if (acceptance.body["steps"], acceptance.body["topology"]) != (count, shape):
        yield run.violation("plan-count", acceptance.seq, f"the journal has {count} steps, {shape or 'no shape'}")
    yield from _check_planning_call(run, proposal, acceptance)


def _check_fallback(run: AuditedRun, proposal: Proposal) -> Iterator[Violation]:
    """A fallback is one step without a subtask, which sees the conversation, or what the step sees for which it is."""
    view = ["user"]
    if proposal.parent in run.steps:
        view = run.steps[proposal.parent].plan.body["access"]
    for step in proposal.steps:
        body = step.plan.body
        if step is not proposal.steps[0] or body["subtask"] or body["access"] != view:
            yield run.violation("plan-shape", step.plan.seq, f"step {step.n} of a fallback")


def _topology_of(run: AuditedRun, proposal: Proposal) -> str:
    """Return the topology that the access lists form among a plan's own steps; empty if they form none."""
    before = run.previous_answer(proposal)
    places: dict[int, int] = {}
    inputs: list[list[int]] = []
    for place, step in enumerate(proposal.steps):
        own = [n for n in own_inputs(run, step) if before is None or n != before.n]
        if any(n not in places for n in own):
            return ""
        inputs.append([places[n] for n in own])
        places[step.n] = place
    return topology(inputs) if inputs else ""


def _check_planning_call(run: AuditedRun, proposal: Proposal, verdict: Event) -> Iterator[Violation]:
    """A verdict names a planning call of its own proposal, which succeeded if the plan was accepted, or no call."""
    name, accepted = verdict.body["call"], verdict.kind is Kind.PLAN_ACCEPTED
    if not name:
        planning_calls = [call for call in run.calls.values() if call.step is None and call.proposal == proposal.number]
        if any(call.outcome_kind == "ok" and call.intent.seq < verdict.seq for call in planning_calls):
            yield run.violation(
                "plan-call", verdict.seq, "a planning call succeeded, and the plan is not said to be its"
            )
        return
    call = run.calls.get(name)
    if call is None or call.step is not None or call.proposal != proposal.number:
        yield run.violation(
            "plan-call", verdict.seq, f"the verdict names no planning call of proposal {proposal.number}"
        )
    elif accepted and (call.outcome_kind != "ok" or call.outcomes[0].seq > verdict.seq):
        yield run.violation("plan-call", verdict.seq, f"{call.id} had not succeeded when its plan was accepted")
