"""The messages that callers receive of a run, and the mailboxes in which they wait.

A message is more of the answer, an event of a step, or the end of the turn.

The end of a turn is made from the journal alone, so that it can be made again. The state is that of the terminal event.
What is journaled after it (the outcome of a call that was still in flight) belongs to the audit and not to the reply,
which is the same bytes whenever it is written.
"""

import asyncio
from collections.abc import Mapping, Sequence
from math import ceil
from typing import Generic, TypeVar

import orjson
from msgspec import Struct
from msgspec.structs import replace

from app import errors
from app.core.message.chat import Decoded, ToolCall, ToolDelta, message_from_json
from app.core.pool.budgets import scope_of
from app.core.pool.catalog import MILLION
from app.core.run import caller_view
from app.core.run.caller_view import Bill, bill
from app.core.run.events import TERMINAL, Event, Kind, RunAwaitingTool, RunResumed
from app.core.run.fold import fold
from app.core.run.state import NO_RESULTS, RATE_LIMITED, RunState, StepState
from app.errors import BatonError, NotFound
from app.store.protocol import ContentReads
from app.telemetry import Telemetry

T = TypeVar("T")


class Mailbox(Generic[T]):
    """A bounded mailbox between coroutines of one process: many small messages in, whole batches out.

    It has one consumer and any number of producers, all in one event loop. A consumer that falls behind gets its
    messages in larger batches instead of one wake-up each, which is what lets one process relay thousands of deltas a
    second. `put` never waits: it answers False when the box is full, and every producer of Baton may drop the message
    then, because the journal has what it said. Each run has a mailbox, and each caller that follows it: an empty one is
    small.
    """

    __slots__ = ("_bound", "_items", "_waiting")

    def __init__(self, bound: int) -> None:
        self._items: list[T] = []
        self._bound = bound
        self._waiting: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._items)

    def put(self, item: T) -> bool:
        """Add an item; False, and nothing added, if the box is full."""
        if len(self._items) >= self._bound:
            return False
        self.push(item)
        return True

    def push(self, item: T) -> None:
        """Add an item beyond the bound: for the few that must arrive, such as an end and the events of steps."""
        self._items.append(item)
        if self._waiting is not None:
            _wake(self._waiting)

    async def take(self, wait: float) -> list[T]:
        """Everything that is there, as soon as there is something; [] after `wait` seconds.

        A future and a timer of its own: an `Event` under `asyncio.timeout` costs three times as much, and every delta
        goes through two mailboxes.
        """
        if not self._items:
            loop = asyncio.get_running_loop()
            self._waiting = loop.create_future()
            timer = loop.call_later(wait, _wake, self._waiting)
            try:
                await self._waiting
            finally:
                timer.cancel()
                self._waiting = None
        items, self._items = self._items, []
        return items


def _wake(waiting: asyncio.Future[None]) -> None:
    if not waiting.done():
        waiting.set_result(None)


class AnswerPart(Struct, frozen=True):
    """More of the answer, with the log-probabilities of its tokens where the caller asked for them; `at` is the event
    number behind it (`run/caller_view.py`)."""

    text: str
    logprobs: tuple[Decoded, ...] = ()
    at: int = 0
    calls: tuple[ToolDelta, ...] = ()
    """More of tool calls, after the text."""
    earlier_attempts: int = 0
    """The number of attempts that earlier turns of the run made; `at` counts them as well."""
    refusal: bool = False
    """True if the model says this instead of an answer."""


class StepEvent(Struct, frozen=True):
    """An event of the run, sent only when the caller asked for steps: `kind` and public fields."""

    kind: str
    body: dict[str, object]


class TurnEnd(Struct, frozen=True):
    """A turn is over: the run has ended, or waits for the results of `calls`; the event is committed. `error` is None
    for a success."""

    state: RunState
    answer: str
    finish: str
    bill: Bill
    error: BatonError | None
    logprobs: tuple[Decoded, ...] | None = None
    """Log-probabilities of the whole answer's tokens; None where there are none."""
    calls: tuple[ToolCall, ...] = ()
    """The tool calls, under the ids with which the caller sends the results back."""
    refusal: bool = False
    """True if `answer` is a refusal, given instead of an answer, where the format of the provider says so."""
    stop_sequence: int | None = None
    """The place, among those of the request, of the stop sequence that ended the answer, where the provider says so."""


CallerMessage = AnswerPart | StepEvent | TurnEnd


class FollowedRun(Struct, frozen=True):
    """A run as one caller receives it, whichever engine drives it. Take batches from `mailbox` until `TurnEnd` comes.

    `state` is the run's state when the caller began to follow it; `replayed` says that it was not begun by this
    request.
    """

    run: str
    mailbox: Mailbox[CallerMessage]
    state: RunState
    replayed: bool = False


PUBLIC_FIELDS: Mapping[Kind, tuple[str, ...]] = {
    Kind.PLAN_STEP: ("n", "worker", "access", "answers", "parent"),
    Kind.PLAN_ACCEPTED: ("topology", "steps"),
    Kind.PLAN_REJECTED: ("reasons",),
    Kind.CALL_INTENDED: ("n", "attempt", "worker", "passed_over"),
    Kind.STEP_AWAITING: ("n", "calls"),
    Kind.STEP_DONE: ("n", "chars", "finish"),
    Kind.STEP_FAILED: ("n", "error"),
    Kind.STEP_SKIPPED: ("n", "reason"),
}
"""The public fields of each event that a caller who asked for steps receives."""


ERRORS_OF_FAILED_RUNS: Mapping[str | None, type[errors.RunEnded]] = {
    errors.WorkerRefused.code: errors.RunRefused,
    errors.RunTooLong.code: errors.RunTooLong,
    errors.RunOutOfQuota.code: errors.RunOutOfQuota,
}
"""The errors of failed runs by the code of their end; a run that ended with any other code has a `RunFailed`."""


def fold_until_reply(events: Sequence[Event], turn: int | None = None) -> RunState:
    """Return the state of a run when the reply of this turn was given, or when the run ended; the fold of the whole
    journal if neither has happened yet."""
    for place, event in enumerate(events):
        if event.kind in TERMINAL or _is_reply(event, turn):
            return fold(tuple(events[: place + 1]))
    return fold(tuple(events))


def _is_reply(event: Event, turn: int | None) -> bool:
    return isinstance(event.fact, RunAwaitingTool) and event.fact.turn == turn


def events_of_turn(events: Sequence[Event], turn: int) -> Sequence[Event]:
    """Return the events from a turn's beginning on."""
    for place, event in enumerate(events):
        if isinstance(event.fact, RunResumed) and event.fact.turn == turn:
            return events[place:]
    return events


async def read_turn_end(store: ContentReads, state: RunState) -> TurnEnd:
    """Return a turn's end from the state; `NotFound` if its answer was erased."""
    refs = reply_refs(state)
    contents: Mapping[str, bytes] = {}
    if refs:
        contents = await store.contents(state.run, refs)
    return turn_end(state, contents)


def reply_refs(state: RunState) -> list[str]:
    """Return the refs of a reply's contents: text, tokens with their log-probabilities, messages with tool calls."""
    step = caller_view.answering_step_of(state)
    if step is not None:
        return answer_refs(step)
    return [step.exchanges[-1].message for step in _steps_awaiting_tools(state)]


def answer_refs(step: StepState) -> list[str]:
    """Return the refs of a step's answer."""
    return [ref for ref in (step.output, step.logprobs) if ref]


def turn_end(state: RunState, contents: Mapping[str, bytes]) -> TurnEnd:
    """Return the end of a turn whose reply is at hand, by the refs of its parts."""
    if not contents.keys() >= set(reply_refs(state)):
        raise NotFound("The content of this run was erased; its journal remains.", code="content_erased")
    if state.state == "awaiting_tool":
        return _end_with_tool_calls(state, contents)
    finish = "stop"
    if state.end is not None and state.end.finish:
        finish = state.end.finish
    step = caller_view.answering_step_of(state)
    if step is None:
        return TurnEnd(state, "", finish, bill(state), ending_error(state))
    answer = ""
    if step.output:
        answer = contents[step.output].decode()
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


def _end_with_tool_calls(state: RunState, contents: Mapping[str, bytes]) -> TurnEnd:
    """Return all tool calls of a turn in one reply, and the words of the answering step, if it is among those that
    call."""
    text = ""
    calls = []
    for step in _steps_awaiting_tools(state):
        exchange = step.exchanges[-1]
        said = message_from_json(orjson.loads(contents[exchange.message]))
        if step.answers:
            text = said.text
        for call, id_ in zip(said.calls, exchange.ids, strict=True):
            calls.append(replace(call, id=id_))
    return TurnEnd(state, text, "tool_calls", bill(state), None, calls=tuple(calls))


def _steps_awaiting_tools(state: RunState) -> list[StepState]:
    """Return the steps that wait for results; the answering one first, because its calls are sent as they stream."""
    if state.state != "awaiting_tool":
        return []
    waiting = [step for step in state.steps.values() if step.state == "awaiting_tool"]
    return sorted(waiting, key=lambda step: (not step.answers, step.n))


def outcome_label(state: str, error: str | None) -> str:
    """Return the label under which a run's end is counted: its state, or `abandoned` if its caller never sent tool
    results."""
    if error == NO_RESULTS:
        return "abandoned"
    return state


def count_run_end(telemetry: Telemetry, state: RunState, seconds: float | None = None) -> None:
    """Note the end of a run; `seconds` is how long it was driven here, None if it was not."""
    tier, end = state.admitted.tier, state.end
    error = ""
    if end is not None:
        error = end.error
    telemetry.count("baton_runs_total", tier, outcome_label(state.state, error))
    if seconds is not None:
        telemetry.observe("baton_run_seconds", seconds, tier)
    if end is not None and end.budget:
        telemetry.count("baton_budget_refusals_total", scope_of(end.budget))
    if state.degraded:
        telemetry.count("baton_degraded_total", tier)
    _count_further_rounds(telemetry, state)


def _count_further_rounds(telemetry: Telemetry, state: RunState) -> None:
    """Count what became of each round after the first: a workflow was opened, the answer before was accepted, or the
    round stopped without an answer of its own."""
    tier = state.admitted.tier
    for proposal in state.proposals[1:]:
        if proposal.round == 1 or proposal.state != "accepted":
            continue
        if proposal.topology:
            telemetry.count("baton_rounds_total", tier, "opened")
        else:
            telemetry.count("baton_rounds_total", tier, "accepted")
    if state.end is not None and state.end.stopped and state.round > 1:
        telemetry.count("baton_rounds_total", tier, "stopped")


def end_with_error(state: RunState, error: BatonError) -> TurnEnd:
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
        error = errors.RunRateLimited(retry_after=end.retry_after, run=state.run)
        if end.retry_after is not None:
            error.message += f" Try again in {max(1, ceil(end.retry_after))} seconds."
        return error
    if end.budget_until is not None and state.state == "over_budget":
        return errors.BudgetExhausted(end.budget, end.budget_until, run=state.run)
    if state.state == "over_budget":
        return errors.RunOverBudget(_words_of_spent_budget(state), run=state.run)
    if state.state == "expired":
        return errors.RunExpired(_words_of_time_limit(state), code=end.error or None, run=state.run)
    if state.state == "failed":
        ending = ERRORS_OF_FAILED_RUNS.get(end.error, ending)
    return ending(code=end.error or None, run=state.run)


def _words_of_spent_budget(state: RunState) -> str:
    """Say what is left of a run's tokens and money, which is too little for its next call, and what to do."""
    limits, left = state.admitted.limits, caller_view.spendable_by_steps(state)
    words = (
        f"The run reached its budget: its next call needs more than the {left.tokens} of {limits.tokens} tokens and "
        f"${left.usd / MILLION:.4f} of ${limits.usd / MILLION:.4f} that are left. Raise `baton.budget` or "
        "`reasoning_effort`, ask for less, or ask an operator to raise the tier's limits."
    )
    if state.turn.number:
        words += " A loop of tool calls is one run: the same conversation, sent again, goes on in a new one."
    return words


def _words_of_time_limit(state: RunState) -> str:
    """Say how long the run was allowed to take, and what to do. A request's `seconds` can only be less than the
    tier's."""
    return (
        f"The run reached its time limit of {state.admitted.limits.seconds:g} seconds; `GET /v1/runs/{{id}}` lists "
        "every attempt. Raise `reasoning_effort`, or `baton.budget.seconds` if the request has it, ask for less, or "
        "ask an operator to raise the tier's limits."
    )
