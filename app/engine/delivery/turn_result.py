"""The end of a run's turn, as its caller gets it: made from the journal alone, so that it can be made again.

The state is that of the terminal event. What is journaled after it (the outcome of a call that was still in flight)
belongs to the audit and not to the reply, which is the same bytes whenever it is written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import ceil

import orjson

from app import errors
from app.core.message.chat import message_from_json
from app.core.pool.budgets import scope_of
from app.core.run import caller_view
from app.core.run.caller_view import bill
from app.core.run.events import TERMINAL, Event, RunAwaitingTool, RunResumed
from app.core.run.state import NO_RESULTS, RunState, StepState, fold
from app.engine.delivery.messages import TurnEnd
from app.errors import BatonError, NotFound
from app.store.protocol import ContentReads
from app.telemetry import Telemetry

RATE_LIMITED = errors.WorkerRateLimited.code
"""The error of a run of which every worker's provider limits the rate of requests."""
ERRORS_OF_FAILED_RUNS: Mapping[str | None, type[errors.RunEnded]] = {
    errors.WorkerRefused.code: errors.RunRefused,
    errors.RunTooLong.code: errors.RunTooLong,
    errors.RunOutOfQuota.code: errors.RunOutOfQuota,
}
"""The errors of failed runs by the code of their end; a run that ended with any other code has a `RunFailed`."""


def until_end(events: Sequence[Event], turn: int | None = None) -> RunState:
    """Return the fold of a journal up to its terminal event, or of all of it if it has none yet; up to the reply of one
    turn, if it has been given."""
    for place, event in enumerate(events):
        if event.kind in TERMINAL or _is_reply(event, turn):
            return fold(tuple(events[: place + 1]))
    return fold(tuple(events))


def _is_reply(event: Event, turn: int | None) -> bool:
    return isinstance(event.fact, RunAwaitingTool) and event.fact.turn == turn


def of_turn(events: Sequence[Event], turn: int) -> Sequence[Event]:
    """Return the events from a turn's beginning on."""
    begins = [
        place for place, event in enumerate(events) if isinstance(event.fact, RunResumed) and event.fact.turn == turn
    ]
    return events[begins[0] :] if begins else events


async def read(store: ContentReads, state: RunState) -> TurnEnd:
    """Return a turn's end from the state; `NotFound` if its answer was erased."""
    wanted = refs(state)
    return turn_end(state, await store.contents(state.run, wanted) if wanted else {})


def refs(state: RunState) -> list[str]:
    """Return the refs of a reply's contents: text, tokens with their log-probabilities, messages with tool calls."""
    step = caller_view.answered(state)
    if step is not None:
        return of_step(step)
    return [step.exchanges[-1].said for step in _callers(state)]


def of_step(step: StepState) -> list[str]:
    """Return the refs of a step's answer."""
    return [ref for ref in (step.output, step.logprobs) if ref]


def turn_end(state: RunState, contents: Mapping[str, bytes]) -> TurnEnd:
    """Return the end of a turn whose reply is at hand, by the refs of its parts."""
    if not contents.keys() >= set(refs(state)):
        raise NotFound("The content of this run was erased; its journal remains.", code="content_erased")
    step, finish = caller_view.answered(state), (state.end.finish if state.end is not None else None) or "stop"
    if state.state == "awaiting_tool":
        return _calling(state, contents)
    if step is None:
        return TurnEnd(state, "", finish, bill(state), ending_error(state))
    answer = contents[step.output].decode() if step.output else ""
    logprobs = None
    if step.logprobs:
        logprobs = tuple(orjson.loads(contents[step.logprobs]))
    return TurnEnd(
        state,
        answer,
        finish,
        bill(state),
        None,
        logprobs,
        refusal=step.refusal,
        stop_sequence=step.stop_sequence,
    )


def _calling(state: RunState, contents: Mapping[str, bytes]) -> TurnEnd:
    """Return all tool calls of a turn in one reply, and the words of the answering step, if it is among those that
    call."""
    words, calls = "", []
    for step in _callers(state):
        exchange = step.exchanges[-1]
        said = message_from_json(orjson.loads(contents[exchange.said]))
        words = said.text if step.answers else words
        calls += [replace(call, id=id_) for call, id_ in zip(said.calls, exchange.ids, strict=True)]
    return TurnEnd(state, words, "tool_calls", bill(state), None, calls=tuple(calls))


def _callers(state: RunState) -> list[StepState]:
    """Return the steps that wait for results; the answering one first, because its calls are sent as they stream."""
    waiting = [step for step in state.steps.values() if step.state == "awaiting_tool"]
    if state.state != "awaiting_tool":
        return []
    return sorted(waiting, key=lambda step: (not step.answers, step.n))


def outcome(state: str, error: str | None) -> str:
    """Return the label under which a run's end is counted: its state, or `abandoned` if its caller never sent tool
    results."""
    return "abandoned" if error == NO_RESULTS else state


def count(telemetry: Telemetry, state: RunState, seconds: float) -> None:
    """Note the end of a run; `seconds` is how long it was driven here."""
    tier = state.admitted.tier
    telemetry.count("baton_runs_total", tier, outcome(state.state, state.end.error if state.end is not None else ""))
    telemetry.observe("baton_run_seconds", seconds, tier)
    if state.end is not None and state.end.budget:
        telemetry.count("baton_budget_refusals_total", scope_of(state.end.budget))
    if state.degraded:
        telemetry.count("baton_degraded_total", tier)
    for proposal in state.proposals[1:]:
        if proposal.round > 1 and proposal.state == "accepted":
            telemetry.count("baton_rounds_total", tier, "opened" if proposal.topology else "accepted")
    if state.end is not None and state.end.stopped and state.round > 1:
        telemetry.count("baton_rounds_total", tier, "stopped")


def without(state: RunState, error: BatonError) -> TurnEnd:
    """Return the end of a stream whose run this process cannot follow any longer; the run itself goes on elsewhere."""
    return TurnEnd(state, "", "stop", bill(state), error)


def ending_error(state: RunState) -> BatonError | None:
    """Return the error of a run that did not succeed; None if it did."""
    endings: dict[str, type[errors.RunEnded]] = {
        "cancelled": errors.RunCancelled,
        "expired": errors.RunExpired,
        "over_budget": errors.RunOverBudget,
        "failed": errors.RunFailed,
    }
    end, ending = state.end, endings.get(state.state)
    if end is None or ending is None:
        return None
    if end.error == RATE_LIMITED and state.state == "failed":
        wait = ""
        if end.retry_after is not None:
            wait = f"Try again in {max(1, ceil(end.retry_after))} seconds."
        error = errors.RunRateLimited(retry_after=end.retry_after, run=state.run)
        error.message = f"{error.message} {wait}".strip()
        return error
    if end.budget_until is not None and state.state == "over_budget":
        return errors.BudgetExhausted(end.budget, end.budget_until, run=state.run)
    named = None
    if state.state == "failed":
        named = ERRORS_OF_FAILED_RUNS.get(end.error)
    return (named or ending)(code=end.error or None, run=state.run)
