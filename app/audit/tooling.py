"""Rules about the caller's tools inside a workflow: the steps that may call them, and the steps that get results."""

from collections.abc import Iterator

from app.audit.audited_run import AuditedRun, Step, ToolUse
from app.audit.report import Violation


def check_tool_uses(run: AuditedRun) -> Iterator[Violation]:
    """Apply all rules of this module."""
    issued_ids: set[str] = set()
    for step in run.steps.values():
        for tool_use in step.tool_uses:
            yield from _check_tool_calls(run, step, tool_use, issued_ids)
            yield from _check_results(run, step, tool_use)
            issued_ids.update(tool_use.call_ids)
    for turn in run.turns:
        if turn.tool_calls is not None:
            yield from _check_end_of_turn(run, turn.tool_calls.seq, set(turn.tool_calls.body["steps"]))


def _check_tool_calls(run: AuditedRun, step: Step, tool_use: ToolUse, issued_ids: set[str]) -> Iterator[Violation]:
    """The step's plan allows the calls, a successful call of its own made them, and their ids are new."""
    event, body = tool_use.calls, step.plan.body
    if not body["answers"] and not body.get("tools", False):
        yield run.violation("tool-calls-wrong", event.seq, f"the plan does not let step {step.n} call tools")
    call = run.calls.get(event.body["call"])
    if call is None or call.step != step.n or call.outcome_kind != "ok" or call.outcomes[0].seq > event.seq:
        yield run.violation("tool-calls-wrong", event.seq, f"no successful call of step {step.n} asked for them")
    if len(set(tool_use.call_ids)) < len(tool_use.call_ids) or issued_ids & set(tool_use.call_ids):
        yield run.violation("tool-calls-wrong", event.seq, f"step {step.n} gives out an id twice")


def _check_results(run: AuditedRun, step: Step, tool_use: ToolUse) -> Iterator[Violation]:
    """All calls are answered together, in their order, at the beginning of a turn."""
    event = tool_use.results
    if event is None:
        return
    turn = run.turn_at(event.seq)
    if event.body["ids"] != tool_use.call_ids:
        yield run.violation("tool-results-wrong", event.seq, f"step {step.n} did not wait for these results")
    if turn.number == 0 or turn.start.seq < tool_use.calls.seq:
        yield run.violation("tool-results-wrong", event.seq, f"step {step.n} has results and no turn began with them")


def _check_end_of_turn(run: AuditedRun, seq: int, step_numbers: set[int]) -> Iterator[Violation]:
    """The end of a turn names the steps that wait."""
    waiting = {step.n for step in run.steps.values() if _is_waiting(step, seq)}
    if waiting != step_numbers:
        yield run.violation(
            "turn-out-of-order", seq, f"{len(waiting)} steps wait for tools, {len(step_numbers)} are named"
        )


def _is_waiting(step: Step, seq: int) -> bool:
    """Return True if a step waits for tool results at this event."""
    if step.is_settled_before(seq):
        return False
    for tool_use in step.tool_uses:
        has_results = tool_use.results is not None and tool_use.results.seq <= seq
        if tool_use.calls.seq < seq and not has_results:
            return True
    return False
