"""Rules about provider calls: an intent before, one outcome after, and a retry only after a recorded failure."""

from collections import Counter
from collections.abc import Iterator

from app.audit.audited_run import AuditedRun, Call, Step
from app.audit.report import Violation
from app.core.run.kinds import OUTCOMES

INTENT_DELAY_SECONDS = 10.0
"""Seconds that may pass between the decision to call, which checks the deadline, and the intent."""
RATE_LIMITED = "worker_rate_limited"
"""The error of a call that a rate limit refused."""
OUTCOME_DELAY_SECONDS = 60.0
"""Seconds that the outcome of a call that was in flight may take to be written after the run's end."""


def check_calls(run: AuditedRun) -> Iterator[Violation]:
    """Apply all rules of this module."""
    for call in run.calls.values():
        yield from _check_outcomes(run, call)
        yield from _check_bounds(run, call)
        step = run.step_of(call)
        if step is not None:
            yield from _check_access(run, call, step)
    for step in run.steps.values():
        yield from _check_attempts(run, step)


def count_pending(run: AuditedRun) -> int:
    """Return the number of calls of an ended run that may still get their outcome: their ticket is held, or the run has
    ended a short time ago."""
    return sum(_is_pending(run, call) for call in run.calls.values() if not call.outcomes)


def _is_pending(run: AuditedRun, call: Call) -> bool:
    if run.end is None or not run.allows_pending:
        return False
    has_ticket = any(ticket["step"] == call.step for ticket in run.record.tickets)
    return has_ticket or (call.step is None and run.now - run.end.at <= OUTCOME_DELAY_SECONDS)


def _check_outcomes(run: AuditedRun, call: Call) -> Iterator[Violation]:
    if run.end is not None and not call.outcomes and not _is_pending(run, call):
        yield run.violation(
            "outcome-missing", call.intent.seq, f"{call.id} has no outcome, and no process is left to write it"
        )
    for event in call.outcomes:
        if event.body["outcome"] not in OUTCOMES or event.body["n"] != call.step:
            yield run.violation("outcome-illegal", event.seq, f"the outcome of {call.id} is none, or of another step")


def _check_bounds(run: AuditedRun, call: Call) -> Iterator[Violation]:
    body, seq = call.intent.body, call.intent.seq
    late = call.intent.at - run.deadline_at(seq)
    if late > INTENT_DELAY_SECONDS:
        yield run.violation("call-after-deadline", seq, f"{late:.1f} s too late")
    if call.step is not None and body["worker"] not in run.admission["pool"]:
        yield run.violation("worker-outside-pool", seq, f"step {call.step} is given to a worker outside the pool")
    if call.step is None and body["attempt"] != call.proposal + 1:
        yield run.violation("attempt-number", seq, f"planning call {call.id} is of proposal {call.proposal}")
    if call.step is None and body["access"] != _planning_access(run, call):
        yield run.violation("access-not-planned", seq, f"planning call {call.id} is not one over the conversation")
    if call.step is not None and body["max_tokens"] > run.limits["output_tokens"]:
        yield run.violation(
            "output-over-limit", seq, f"{body['max_tokens']} tokens, at most {run.limits['output_tokens']}"
        )


def _planning_access(run: AuditedRun, call: Call) -> list[str | int]:
    """Return the access list of a planning call: the conversation, and in a further round the previous answer; or the
    access list of the step for which it plans."""
    proposal = run.proposal(call.proposal)
    if proposal is None:
        return ["user"]
    if proposal.parent in run.steps:
        access: list[str | int] = run.steps[proposal.parent].plan.body["access"]
        return access
    previous = run.previous_answer(proposal)
    if previous is None:
        return ["user"]
    return ["user", previous.n]


def _check_access(run: AuditedRun, call: Call, step: Step) -> Iterator[Violation]:
    body, seq = call.intent.body, call.intent.seq
    if body["access"] != step.plan.body["access"]:
        yield run.violation("access-not-planned", seq, f"{call.id} is given another access list than step {step.n}")
    for n in body["access"]:
        if n != "user" and (n not in run.steps or not run.steps[n].is_settled_before(seq)):
            yield run.violation("access-unsettled", seq, f"{call.id} may see step {n}, which is not settled yet")


def _check_attempts(run: AuditedRun, step: Step) -> Iterator[Violation]:
    """Attempts are numbered from 1, within the limit in each turn, and each follows the failure or the empty answer of
    the previous one. Calls that a rate limit refused come on top, as many as the limit."""
    limit = run.limits["attempts"]
    calls_by_turn: Counter[int] = Counter()
    refused_by_turn: Counter[int] = Counter()
    previous: Call | None = None
    calls = [call for call in run.calls.values() if call.step == step.n]
    for number, call in enumerate(calls, 1):
        seq = call.intent.seq
        turn = run.turn_at(seq).number
        attempt = calls_by_turn[turn] + 1 - min(refused_by_turn[turn], limit)
        calls_by_turn[turn] += 1
        if call.outcome is not None and call.outcome.body.get("error") == RATE_LIMITED:
            refused_by_turn[turn] += 1
        if call.intent.body["attempt"] != number:
            yield run.violation("attempt-number", seq, f"attempt {call.intent.body['attempt']} is the {number}th")
        if attempt > limit:
            yield run.violation("attempts-over-limit", seq, f"attempt {attempt} of step {step.n}, at most {limit}")
        if previous is not None and not _may_follow(step, previous, call):
            yield run.violation("retry-without-failure", seq, f"{call.id} while {previous.id} has not failed")
        previous = call


def _has_called_tools(step: Step, call: Call) -> bool:
    return any(tool_use.calls.body["call"] == call.id for tool_use in step.tool_uses)


def _may_follow(step: Step, before: Call, call: Call) -> bool:
    """Return True if the call before has failed, has called tools whose results have arrived, or has answered nothing,
    so that another worker is asked."""
    seq = call.intent.seq
    if before.outcome is None or before.outcome.seq > seq:
        return False
    if before.outcome_kind != "ok":
        return True
    if not before.outcome.body["output"] and not _has_called_tools(step, before):
        return bool(before.intent.body["worker"] != call.intent.body["worker"])
    for tool_use in step.tool_uses:
        is_of_call = tool_use.calls.body["call"] == before.id
        if is_of_call and tool_use.results is not None and tool_use.results.seq < seq:
            return True
    return False
