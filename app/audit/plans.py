"""Rules about proposals: one at a time, in the right mode, within pool and limits, with access lists that name only
earlier steps. The rules about nested workflows are in `nesting.py`."""

import re
from collections.abc import Iterator, Sequence

from app.audit.account import Account, Fact, Proposal, Step
from app.audit.choices import decided
from app.audit.nesting import itself, nested, own_inputs, room
from app.audit.report import Violation
from app.core.plan.workflow import topology
from app.core.run.kinds import Kind

FIRST, REPAIR, FALLBACK = "first", "repair", "fallback"
UNCONDUCTED = frozenset({"caller", FALLBACK})
"""The conductors whose runs have one round."""
DENIALS = frozenset({"not", "no", "never", "without", "don't"})
DRIVER_LOST = ["the driver was lost while the plan was made"]
"""The reasons for which a proposal is made again in the same mode."""


def plans(run: Account) -> Iterator[Violation]:
    """Apply all rules of this module."""
    yield from _one_at_a_time(run)
    yield from _modes(run, run.tries(), nested=False)
    for step in run.openers:
        yield from _modes(run, run.tries(step.n), nested=True)
    base = 0
    for proposal in run.proposals:
        yield from _numbers(run, proposal, base)
        yield from _steps(run, proposal)
        yield from decided(run, proposal)
        yield from _verdict(run, proposal)
        base += len(proposal.steps)
    rounds = max((proposal.round for proposal in run.tries()), default=0)
    if rounds > run.limits["rounds"]:
        yield run.says("rounds-over-limit", 0, f"{rounds} rounds, at most {run.limits['rounds']}")


def _one_at_a_time(run: Account) -> Iterator[Violation]:
    """A proposal is opened, gets its steps and one verdict. The next one follows a rejection, a round, or is for a
    step."""
    opened = -1
    decided = True
    own: Proposal | None = None
    for fact in run.of(Kind.PLAN_OPENED, Kind.PLAN_STEP, Kind.PLAN_ACCEPTED, Kind.PLAN_REJECTED):
        if fact.kind is Kind.PLAN_OPENED:
            opened += 1
            proposal, before = run.proposals[opened], own
            inner = proposal.parent is not None
            own = own if inner else proposal
            further = not inner and proposal.round != (before.round if before is not None else 1)
            if not decided or (not inner and before is not None and before.accepted is not None and not further):
                yield run.says("plan-out-of-order", fact.seq, "a plan is opened while there is another one")
            elif further and not _over(proposal, before):
                yield run.says("round-out-of-order", fact.seq, f"round {proposal.round} is opened")
            decided = False
        elif decided or fact.body["proposal"] != opened:
            yield run.says("plan-out-of-order", fact.seq, f"{fact.kind.value} while no such plan is open")
        elif fact.kind is not Kind.PLAN_STEP:
            decided = True


def _over(proposal: Proposal, before: Proposal | None) -> bool:
    """Return True if the previous round has answered and all its steps are settled."""
    if before is None or before.answer is None or proposal.round != before.round + 1:
        return False
    return all(step.settled_by(proposal.opened.seq) for step in before.steps)


def _modes(run: Account, proposals: Sequence[Proposal], *, nested: bool) -> Iterator[Violation]:
    """A first proposal is followed by at most one repair, then by the fallback. A further round and a run without a
    conductor have neither; the proposal of an engine that was lost is made again."""
    allowed, known = {FIRST, FALLBACK}, 1
    for proposal in proposals:
        mode = proposal.opened.body["mode"]
        if proposal.round != known and not nested:
            allowed, known = {FIRST}, proposal.round
        if known > 1:
            allowed -= {FALLBACK} if run.admitted["conductor"] not in UNCONDUCTED else {FIRST, REPAIR, FALLBACK}
        if mode not in allowed:
            yield run.says("plan-mode", proposal.opened.seq, f"proposal {proposal.number} in mode {mode[:20]}")
        if proposal.opened.body["conductor"] != (FALLBACK if mode == FALLBACK else run.admitted["conductor"]):
            yield run.says("plan-mode", proposal.opened.seq, f"proposal {proposal.number} by another conductor")
        rejected = proposal.rejected
        if rejected is not None and rejected.body["reasons"] == DRIVER_LOST:
            allowed = {mode, FALLBACK}
        elif rejected is not None and mode == FIRST and not rejected.body["outage"]:
            allowed = {REPAIR, FALLBACK}
        else:
            allowed = set() if mode == FALLBACK else {FALLBACK}


def _numbers(run: Account, proposal: Proposal, base: int) -> Iterator[Violation]:
    body, seq = proposal.opened.body, proposal.opened.seq
    if body["proposal"] != proposal.number:
        yield run.says("plan-out-of-order", seq, f"proposal {body['proposal']} is the {proposal.number}th")
    if body["base"] != base:
        yield run.says("step-number", seq, f"its steps count from {body['base']}, {base} were planned before")
    for place, step in enumerate(proposal.steps):
        if step.n != base + place:
            yield run.says("step-number", step.plan.seq, f"step {step.n} stands at place {base + place}")
    order, pool = body["order"], [*run.admitted["pool"], *itself(run, proposal)]
    if len(set(order)) < len(order) or not set(order) <= set(pool):
        yield run.says("order-wrong", seq, "the workers shown are not workers of the pool, each once")


def _steps(run: Account, proposal: Proposal) -> Iterator[Violation]:
    most, pool = room(run, proposal), [*run.admitted["pool"], *itself(run, proposal)]
    if len(proposal.steps) > most:
        seq = proposal.steps[most].plan.seq
        yield run.says("steps-over-limit", seq, f"{len(proposal.steps)} steps, at most {most}")
    yield from nested(run, proposal)
    previous = run.before(proposal)
    earlier = {previous.n} if previous is not None else set()
    for step in proposal.steps:
        seq = step.plan.seq
        if step.plan.body["worker"] not in pool:
            yield run.says("worker-outside-pool", seq, f"step {step.n} is planned for a worker outside the pool")
        if step.plan.body.get("complete") and not _may_stand_in(run, proposal, step):
            yield run.says("stand-in-wrong", seq, f"step {step.n} is not asked for the whole answer")
        if not set(own_inputs(run, step)) <= earlier:
            fault = f"step {step.n} lists a step that is neither an earlier one of its plan nor the previous answer"
            yield run.says("access-forward", seq, fault)
        earlier.add(step.n)
    for step in proposal.steps[:-1]:
        if step.plan.body["answers"]:
            yield run.says("answering-step", step.plan.seq, f"step {step.n} answers, and others follow")


def _may_stand_in(run: Account, proposal: Proposal, step: Step) -> bool:
    """Return True if a step's output may stand in for the answer: it does not answer itself, sees the conversation,
    and a sentence of its subtask asks for the final answer without a denial. An erased subtask is believed."""
    body = step.plan.body
    if proposal.parent is not None or body["answers"] or "user" not in body["access"]:
        return False
    text = run.record.contents.get(body["subtask"]) if body["subtask"] else b""
    if not text:
        return True
    for sentence in re.split(r"[.;:!?]", text.decode(errors="replace").lower()):
        before, asked, _ = sentence.partition("final answer")
        if asked and not DENIALS & set(re.findall(r"[a-z']+", before)):
            return True
    return False


def _verdict(run: Account, proposal: Proposal) -> Iterator[Violation]:
    verdict = proposal.accepted
    if proposal.dropped is not None:
        verdict = proposal.verdicts[0]
    if proposal.opened.body["mode"] == FALLBACK:
        yield from _fallback(run, proposal)
    if proposal.rejected is not None and proposal.rejected.body["call"]:
        yield from _call(run, proposal, proposal.rejected)
    if verdict is None:
        return
    empty = proposal.round > 1 and proposal.parent is None and not proposal.steps
    if not empty and (not proposal.steps or not proposal.steps[-1].plan.body["answers"]):
        yield run.says("answering-step", verdict.seq, "the last step of the plan does not answer")
    shape = _shape(run, proposal)
    if verdict.body["steps"] != len(proposal.steps) or verdict.body["topology"] != shape:
        yield run.says("plan-count", verdict.seq, f"the journal has {len(proposal.steps)} steps, {shape or 'no shape'}")
    yield from _call(run, proposal, verdict)


def _fallback(run: Account, proposal: Proposal) -> Iterator[Violation]:
    parent = run.steps.get(proposal.parent) if proposal.parent is not None else None
    whole = parent.plan.body["access"] if parent is not None else ["user"]
    for step in proposal.steps:
        body = step.plan.body
        if step is not proposal.steps[0] or body["subtask"] or body["access"] != whole:
            yield run.says("plan-shape", step.plan.seq, f"step {step.n} of a fallback")


def _shape(run: Account, proposal: Proposal) -> str:
    """Return the topology that the access lists form among a plan's own steps; empty if they form none."""
    before = run.before(proposal)
    places: dict[int, int] = {}
    inputs: list[list[int]] = []
    for place, step in enumerate(proposal.steps):
        own = [n for n in own_inputs(run, step) if before is None or n != before.n]
        if any(n not in places for n in own):
            return ""
        inputs.append([places[n] for n in own])
        places[step.n] = place
    return topology(inputs) if inputs else ""


def _call(run: Account, proposal: Proposal, verdict: Fact) -> Iterator[Violation]:
    """A verdict names a planning call of its own proposal, which succeeded if the plan was accepted, or no call."""
    name, accepted = verdict.body["call"], verdict.kind is Kind.PLAN_ACCEPTED
    if not name:
        asked = [call for call in run.calls.values() if call.step is None and call.proposal == proposal.number]
        if any(call.went == "ok" and call.intent.seq < verdict.seq for call in asked):
            yield run.says("plan-call", verdict.seq, "a planning call succeeded, and the plan is not said to be its")
        return
    call = run.calls.get(name)
    if call is None or call.step is not None or call.proposal != proposal.number:
        yield run.says("plan-call", verdict.seq, f"the verdict names no planning call of proposal {proposal.number}")
    elif accepted and (call.went != "ok" or call.outcomes[0].seq > verdict.seq):
        yield run.says("plan-call", verdict.seq, f"{call.id} had not succeeded when its plan was accepted")
