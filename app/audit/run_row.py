"""Rules about the data next to the journal: the columns of the run's row, and the outbox."""

from collections.abc import Iterator
from typing import Any

from app.audit.account import Account, Step
from app.audit.lifecycle import degraded, state_of
from app.audit.report import Violation
from app.core.run.kinds import Kind


def run_row(run: Account) -> Iterator[Violation]:
    """Apply all rules of this module."""
    columns = run.record.row
    yield from projection(run)
    if run.end is not None and not columns["degraded"] and False not in degraded(run):
        yield run.says("row-projection", run.end.seq, "degraded is not what the events make it")
    yield from _outbox(run)


def projection(run: Account) -> Iterator[Violation]:
    """The columns of the row that follow from the events are as these make them."""
    for column, wanted in _columns(run).items():
        if run.record.row.get(column) != wanted:
            yield run.says("row-projection", 0, f"{column} is not what the events make it")
    if run.record.row["degraded"] and True not in degraded(run):  # of a run that goes on it may be set a little later
        yield run.says("row-projection", 0, "degraded is not what the events make it")


def _columns(run: Account) -> dict[str, Any]:
    """Return the columns that the row must have."""
    admitted, end = run.admitted, run.end
    shapes = [
        proposal.accepted.body["topology"]
        for proposal in run.tries()
        if proposal.accepted is not None and proposal.steps
    ]
    return {
        "tier": admitted["tier"],
        "model": admitted["model"],
        "origin_kind": admitted.get("origin_kind") or None,
        "origin_run": admitted.get("origin_run") or None,
        "created_at": run.facts[0].at,
        "deadline": run.turns[-1].until,
        "seq": run.facts[-1].seq,
        "state": state_of(run),
        "steps": len(run.planned),
        "topology": shapes[-1] if shapes else None,
        "ended_at": end.at if end is not None else None,
        "error": end.body.get("error") if end is not None else None,
    }


def _outbox(run: Account) -> Iterator[Violation]:
    """A step that is to be executed has a ticket. Other steps have none, unless a call is in flight."""
    tickets = {ticket["step"]: ticket for ticket in run.record.tickets}
    for n, ticket in tickets.items():
        step = run.steps.get(n)
        if step is None or not _queued(step):
            yield run.says("ticket-left", 0, f"there is a ticket for step {n}, which was never queued")
        elif run.end is not None and ticket["claim"] == 0:
            yield run.says("ticket-left", 0, f"the run has ended and step {n} has a ticket that was never taken")
        elif _finished(step):
            yield run.says("ticket-left", 0, f"step {n} was finished by its dispatcher and has its ticket still")
    if run.end is not None:
        return
    for step in run.steps.values():
        if _queued(step) and step.settled is None and not _finished(step) and step.n not in tickets:
            yield run.says("ticket-missing", 0, f"step {step.n} is to be executed and has no ticket")


def _queued(step: Step) -> bool:
    return any(fact.kind is Kind.STEP_QUEUED for fact in step.facts)


def _finished(step: Step) -> bool:
    """Return True if the step needs no execution: it is done or failed, or waits for the caller's tools."""
    if any(fact.kind in (Kind.STEP_DONE, Kind.STEP_FAILED) for fact in step.facts):
        return True
    return bool(step.exchanges) and step.exchanges[-1].results is None
