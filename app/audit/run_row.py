"""Rules about the data next to the journal: the columns of the run's row, and the outbox."""

from collections.abc import Iterator
from typing import Any

from app.audit.audited_run import AuditedRun, Step
from app.audit.lifecycle import possible_degraded_values, state_of
from app.audit.report import Violation
from app.core.run.kinds import Kind


def check_run_row(run: AuditedRun) -> Iterator[Violation]:
    """Apply all rules of this module."""
    columns = run.record.row
    yield from check_columns(run)
    if run.end is not None and not columns["degraded"] and False not in possible_degraded_values(run):
        yield run.violation("row-projection", run.end.seq, "degraded is not what the events make it")
    yield from _check_outbox(run)


def check_columns(run: AuditedRun) -> Iterator[Violation]:
    """The columns of the row that follow from the events are as these make them."""
    for column, expected in _expected_columns(run).items():
        if run.record.row.get(column) != expected:
            yield run.violation("row-projection", 0, f"{column} is not what the events make it")
    # The column of a run that goes on may be set a little later than the event, so only True is compared.
    if run.record.row["degraded"] and True not in possible_degraded_values(run):
        yield run.violation("row-projection", 0, "degraded is not what the events make it")


def _expected_columns(run: AuditedRun) -> dict[str, Any]:
    """Return the columns that the row must have."""
    admitted, end = run.admission, run.end
    topology = None
    for proposal in run.proposals_for():
        verdict = proposal.verdicts[0] if proposal.verdicts else None
        if verdict is not None and verdict.kind is Kind.PLAN_ACCEPTED and proposal.steps:  # also one that was dropped
            topology = verdict.body["topology"]
    columns: dict[str, Any] = {
        "tier": admitted["tier"],
        "model": admitted["model"],
        "origin_kind": admitted.get("origin_kind") or None,
        "origin_run": admitted.get("origin_run") or None,
        "created_at": run.events[0].at,
        "deadline": run.turns[-1].deadline,
        "seq": run.events[-1].seq,
        "state": state_of(run),
        "steps": len(run.planned_steps),
        "topology": topology,
        "ended_at": end.at if end is not None else None,
        "error": end.body.get("error") if end is not None else None,
    }
    if admitted.get("tenant"):  # older releases did not write it there
        columns["tenant"] = admitted["tenant"]
    return columns


def _check_outbox(run: AuditedRun) -> Iterator[Violation]:
    """A step that is to be executed has a ticket, unless the run is to end. Other steps have none, unless a call is in
    flight."""
    tickets = {ticket["step"]: ticket for ticket in run.record.tickets}
    for n, ticket in tickets.items():
        step = run.steps.get(n)
        if step is None or not _was_queued(step):
            yield run.violation("ticket-left", 0, f"there is a ticket for step {n}, which was never queued")
        elif run.end is not None and ticket["claim"] == 0:
            yield run.violation("ticket-left", 0, f"the run has ended and step {n} has a ticket that was never taken")
        elif _needs_no_execution(step):
            yield run.violation("ticket-left", 0, f"step {n} was finished by an engine and still has its ticket")
    if run.end is not None or any(run.events_of(Kind.CANCEL_ASKED)):
        return  # once the end is asked for, engines give tickets up before the end itself is written
    for step in run.steps.values():
        if _was_queued(step) and step.settlement is None and not _needs_no_execution(step) and step.n not in tickets:
            yield run.violation("ticket-missing", 0, f"step {step.n} is to be executed and has no ticket")


def _was_queued(step: Step) -> bool:
    return any(event.kind is Kind.STEP_QUEUED for event in step.events)


def _needs_no_execution(step: Step) -> bool:
    """Return True if the step needs no execution: it is done or failed, or waits for the caller's tools."""
    if any(event.kind in (Kind.STEP_DONE, Kind.STEP_FAILED) for event in step.events):
        return True
    return bool(step.tool_uses) and step.tool_uses[-1].results is None
