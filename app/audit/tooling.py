"""Rules about the caller's tools inside a workflow: the steps that may call them, and the steps that get results."""

from collections.abc import Iterator

from app.audit.account import Account, Exchange, Step
from app.audit.report import Violation


def tooling(run: Account) -> Iterator[Violation]:
    """Apply all rules of this module."""
    given: set[str] = set()
    for step in run.steps.values():
        for exchange in step.exchanges:
            yield from _called(run, step, exchange, given)
            yield from _answered(run, step, exchange)
            given.update(exchange.ids)
    for turn in run.turns:
        if turn.awaiting is not None:
            yield from _awaited(run, turn.awaiting.seq, set(turn.awaiting.body["steps"]))


def _called(run: Account, step: Step, exchange: Exchange, given: set[str]) -> Iterator[Violation]:
    """The step's plan allows the calls, a successful call of its own made them, and their ids are new."""
    fact, body = exchange.awaiting, step.plan.body
    if not body["answers"] and not body.get("tools", False):
        yield run.says("tool-calls-wrong", fact.seq, f"the plan does not let step {step.n} call tools")
    call = run.calls.get(fact.body["call"])
    if call is None or call.step != step.n or call.went != "ok" or call.outcomes[0].seq > fact.seq:
        yield run.says("tool-calls-wrong", fact.seq, f"no successful call of step {step.n} asked for them")
    if len(set(exchange.ids)) < len(exchange.ids) or given & set(exchange.ids):
        yield run.says("tool-calls-wrong", fact.seq, f"step {step.n} gives out an id twice")


def _answered(run: Account, step: Step, exchange: Exchange) -> Iterator[Violation]:
    """All calls are answered together, in their order, at the beginning of a turn."""
    fact = exchange.results
    if fact is None:
        return
    turn = run.turn_at(fact.seq)
    if fact.body["ids"] != exchange.ids:
        yield run.says("tool-results-wrong", fact.seq, f"step {step.n} did not wait for these results")
    if turn.number == 0 or turn.began.seq < exchange.awaiting.seq:
        yield run.says("tool-results-wrong", fact.seq, f"step {step.n} has results and no turn began with them")


def _awaited(run: Account, seq: int, named: set[int]) -> Iterator[Violation]:
    """The end of a turn names the steps that wait."""
    waiting = {step.n for step in run.steps.values() if _waits(step, seq)}
    if waiting != named:
        yield run.says("turn-out-of-order", seq, f"{len(waiting)} steps wait for tools, {len(named)} are named")


def _waits(step: Step, seq: int) -> bool:
    """Return True if a step waits for tool results at this event."""
    if step.settled_by(seq):
        return False
    return any(
        exchange.awaiting.seq < seq and (exchange.results is None or exchange.results.seq > seq)
        for exchange in step.exchanges
    )
