"""A run as its caller sees it: the usage that is shown, positions in the stream of an answer, and results of tool
calls.

*Usage* is split into what the caller sees and what the orchestration added (DESIGN §6).

*Positions* are event numbers that every process derives from the journal alone. The text of an answer is not journaled
while it streams, so events are not counted. An event's number is the part of the answer that has been sent up to and
including it, in characters (code points):

    0                       nothing yet: the opening event
    n                       the first n characters
    length + 1, + 2, + 3    all of it, and the finish, the usage, the end of the stream
    + (k - 1) * ATTEMPT     if it is the k-th attempt at an answer that speaks, over all rounds

So the numbers of one stream never fall, and of two callers with the same number neither has received more. The attempt
is part of it because two attempts may produce different texts: a caller that received text that is not the answer's
cannot resume. Pieces of tool calls have no number of their own: words may follow them, so the journal does not say how
much of both was sent by then. A caller that resumes a stream drops the calls that it has and receives all of them
again.

*Results of tool calls* that a caller returns: a conversation that ends with results (and perhaps words of the user
after them) for calls of ours continues the run that the ids lead to. Everywhere else results are history, and so are
ids of somebody else's form. A run that has ended cannot be continued: the conversation is then the history of a new
run. Anything in between is refused, not guessed.
"""

from collections.abc import Mapping, Sequence
from itertools import takewhile
from typing import Any, Literal

from msgspec import Struct

from app.core.message.chat import Message, Usage, run_of, sum_usages
from app.core.pool.catalog import MILLION, Amount
from app.core.run.events import RunSucceeded
from app.core.run.progress import parent_of
from app.core.run.state import Call, Exchange, RunState, StepState
from app.errors import Conflict, InvalidRequest


class Bill(Struct, frozen=True):
    """The present turn's usage as its caller sees it, and the whole run's.

    `visible` follows OpenAI's identity; `visible + orchestration = turn`, exactly, in all counts but `Usage.written`,
    which neither of the two has. The turns of a run add up to `total`, and `turn` is `total` where no tools were
    called. Money is in micro-dollars.
    """

    visible: Usage
    orchestration: Usage
    turn: Usage
    turn_usd: int
    total: Usage
    usd: int


def bill(state: RunState) -> Bill:
    """Split the journal's sum over the calls of the latest turn (DESIGN §6).

    Visible input is that of the first successful worker call that saw the caller's conversation (the first successful
    call of any kind if none did); visible output is that of the call whose text is the answer, or of the calls whose
    tool calls are.
    """
    total = sum_usages(call.usage for call in state.calls.values())
    calls = [call for call in state.calls.values() if call.turn == state.turn.number]
    turn = total
    if state.turn.number:
        turn = sum_usages(call.usage for call in calls)
    first = _first_usage(calls)
    answer = _answer_usage(state)
    visible = Usage(first.input, first.cached, answer.output, answer.reasoning, turn.estimated)
    orchestration = Usage(
        turn.input - first.input,
        turn.cached - first.cached,
        turn.output - answer.output,
        turn.reasoning - answer.reasoning,
        turn.estimated,
    )
    return Bill(visible, orchestration, turn, sum(call.usd for call in calls), total, state.usd)


def _first_usage(calls: Sequence[Call]) -> Usage:
    """Return the usage of the first successful call of a worker that saw the conversation; where none did, that of the
    first successful call."""
    successful = [call for call in calls if call.outcome == "ok"]
    for call in successful:
        if call.step is not None and call.sees_user:
            return call.usage
    if successful:
        return successful[0].usage
    return Usage()


def unspent_amount(state: RunState) -> Amount:
    """Return the amount that calls of a run may still hold: its limits without what open calls hold and others cost."""
    usd, tokens = state.admitted.limits.usd, state.admitted.limits.tokens
    for call in state.calls.values():
        if call.outcome is None:
            usd -= call.usd_held
            tokens -= call.tokens_held
        else:
            usd -= call.usd
            tokens -= call.usage.total
    return Amount(max(usd, 0), max(tokens, 0))


def spendable_by_steps(state: RunState) -> Amount:
    """Return the amount that calls of steps may still hold: what is unspent, within what was approved, or within what
    needs no approval."""
    unspent, terms = unspent_amount(state), state.admitted.approval
    if terms is None or terms.above_usd is None or state.approvals:
        return within_approval(state, unspent)
    return _within_cap(state, unspent, terms.above_usd)


def within_approval(state: RunState, amount: Amount) -> Amount:
    """Return an amount, cut to what is left of the price that was approved last, if any was: that caps all calls."""
    if not state.approvals:
        return amount
    return _within_cap(state, amount, list(state.approvals.values())[-1].max_usd)


def _within_cap(state: RunState, amount: Amount, cap: int) -> Amount:
    """Return an amount, cut to what is left if the run may cost `cap` micro-dollars in all."""
    used_usd = state.admitted.limits.usd - unspent_amount(state).usd
    return Amount(min(amount.usd, max(cap - used_usd, 0)), amount.tokens)


def _answer_usage(state: RunState) -> Usage:
    """Return the usage of the calls whose output the caller gets. The answer of an earlier turn was paid for there."""
    speakers = []
    if state.state == "awaiting_tool":
        waiting = [step for step in state.steps.values() if step.state == "awaiting_tool"]
        speakers = [step.exchanges[-1].call for step in waiting]
    elif state.end is not None and state.end.step is not None:
        speakers = [state.steps[state.end.step].call]
    calls = [state.calls[name] for name in speakers if name]  # an output that was taken over has no call
    return sum_usages(call.usage for call in calls if call.turn == state.turn.number)


# -- positions in the stream of an answer


ATTEMPT = 2**26
"""More characters than any answer has; 32 attempts in a turn still fit into 31 bits, the most that OpenAI's .NET client
reads of the number of a response's event."""
FINISH, USAGE, DONE = 1, 2, 3
"""The events after the text."""


class Position(Struct, frozen=True):
    """The first `chars` characters of what the answering step's attempt of that number says; attempts count from 1."""

    attempt: int = 1
    chars: int = 0

    @property
    def number(self) -> int:
        """Return the event number of the position."""
        return (self.attempt - 1) * ATTEMPT + self.chars


def read_position(number: int) -> Position:
    """Return the inverse of `Position.number`."""
    return Position(number // ATTEMPT + 1, number % ATTEMPT)


def attempt_of(state: RunState, call: str) -> int:
    """Return which attempt of its step a call is, from 1, counted on over the answering steps of earlier rounds; 0 if
    the state knows no such call."""
    call_state = state.calls.get(call)
    if call_state is None or call_state.step is None:
        return 0
    step = state.steps[call_state.step]
    while state.nested and (parent := parent_of(state, step)) is not None:
        step = parent
    attempts = [attempt.id for attempt in _answering_calls(state, step.n)]
    if call not in attempts:
        return 0
    return attempts.index(call) + 1


def _answering_calls(state: RunState, n: int) -> list[Call]:
    """Return the calls that gave, or were to give, the answers of the rounds up to that of step `n`; its own come last.
    What is nested in a step gives its answer in one."""
    steps: list[StepState] = []
    for number in range(1, state.find_proposal(state.steps[n].proposal).round):
        workflow = state.steps_of_round(number)
        if workflow:
            steps.append(workflow[-1])
    step, last = state.steps[n], state.answering_step
    gives_answer = state.end is not None and state.end.step == n
    if gives_answer and last is not None and last.n != n and last.proposal == step.proposal:
        steps.append(last)  # what it had sent is not the answer, which another step gave before
    steps.append(step)
    calls: list[Call] = []
    for step in steps:
        calls += [call for call in state.calls.values() if call.step == step.n or call.id == step.call]
    return calls


def count_earlier_attempts(state: RunState) -> int:
    """Return how many attempts the positions of this turn count that earlier turns made, up to calls of tools."""
    step = answering_step_of(state) or state.answering_step
    if step is None:
        return 0
    calls = _answering_calls(state, step.n)
    return sum(1 for _ in takewhile(lambda call: call.turn < state.turn.number, calls[:-1]))


def answering_step_of(state: RunState) -> StepState | None:
    """Return the step whose output is the answer of a run that has succeeded."""
    if not isinstance(state.end, RunSucceeded) or state.end.step is None:
        return None
    return state.steps.get(state.end.step)


def end_position(state: RunState) -> Position:
    """Return the position behind the last character of a turn's reply; the start if it has no text."""
    caller = state.answering_step
    if state.state == "awaiting_tool" and caller is not None and caller.state == "awaiting_tool":
        last = caller.exchanges[-1]
        return Position(attempt_of(state, last.call), last.chars)
    step = answering_step_of(state)
    if step is not None:
        return Position(max(attempt_of(state, step.call), 1), step.chars)
    return Position()


def check_position(state: RunState, at: Position) -> None:
    """Check that a stream can go on after `at`.

    Raises `InvalidRequest` if no event can have had that number, `Conflict` if the text that was sent then is not the
    answer's.
    """
    if not at.chars:
        return
    step = answering_step_of(state) or state.answering_step
    if step is None:
        raise unknown_event_error()
    calls = _answering_calls(state, step.n)
    if at.attempt > len(calls) and _was_made_in_stopped_round(state, at.attempt):
        raise answer_changed_error(state.run)
    if at.attempt > len(calls):
        raise unknown_event_error()
    call = calls[at.attempt - 1]
    if step.call:
        gives_answer = call.id == step.call
    else:
        gives_answer = call.step == step.n
    if call.failed or not gives_answer:
        raise answer_changed_error(state.run)
    if step.state == "done" and at.chars > step.chars + DONE:
        raise unknown_event_error()


def _was_made_in_stopped_round(state: RunState, attempt: int) -> bool:
    """Return True if the attempt of this number is one of a last round that has no answer, so that another round's
    counts."""
    last = state.answering_step
    if state.end is None or not state.end.stopped or last is None:
        return False
    return attempt <= len(_answering_calls(state, last.n))


def unknown_event_error() -> InvalidRequest:
    """Return the error for an event number that was never given out."""
    return InvalidRequest(
        "No event of this run's stream has that number; send the number of the last event that you received, or none "
        "to hear the stream from its start.",
        param="starting_after",
        code="unknown_event",
    )


def answer_changed_error(run: str) -> Conflict:
    """Return the error for an answer that comes from another attempt than the text that was sent."""
    return Conflict(
        f"What was streamed up to that event is not part of the answer: the attempt was lost and another one took its "
        f"place. Run {run} is not affected; ask again without an event number for its stream from the start.",
        param="starting_after",
        code="answer_changed",
    )


# -- results of tool calls


ResultsKind = Literal["go_on", "repeat", "history"]
"""`repeat`: the results are those that the present turn began with, or the same ids with others."""


class ReturnedResults(Struct, frozen=True):
    """Results for calls of one run, by the ids that were issued, in the caller's order; and what the user says after
    them."""

    run: str
    results: Mapping[str, Message]
    tail: tuple[Message, ...] = ()


def find_returned_results(messages: Sequence[Message]) -> ReturnedResults | None:
    """Return the results at the end of a conversation, if they answer calls that were issued here.

    Raises `InvalidRequest` for ids of several runs, or of ours among others: such a message was never given out.
    """
    tail: list[Message] = []
    results: list[Message] = []
    for message in reversed(messages):
        if message.role == "tool":
            results.append(message)
        elif message.role == "user" and not results:
            tail.append(message)
        else:
            break
    runs = {run_of(message.call_id) for message in results}
    if not runs or runs == {None}:
        return None
    run = runs.pop()
    if runs or run is None:
        raise InvalidRequest(
            "These tool results answer calls of different replies; send back the results of one reply at a time.",
            param="messages",
            code="tool_results_mixed",
        )
    return ReturnedResults(run, {message.call_id: message for message in reversed(results)}, tuple(reversed(tail)))


def classify_results(state: RunState, tool_results: ReturnedResults) -> ResultsKind:
    """Classify results for a run. Raises `InvalidRequest` if the run cannot go on with them."""
    if state.ended:
        return "history"
    issued: set[str] = set()
    for step in state.steps.values():
        for exchange in step.exchanges:
            issued.update(exchange.ids)
    if not tool_results.results.keys() <= issued:
        raise unknown_call_error()
    awaited: Mapping[str, int] = {}
    if state.state == "awaiting_tool":
        awaited = state.unanswered_tool_calls
    if tool_results.results.keys() == awaited.keys():
        if not tool_results.tail or _all_open_steps_see_user(state):
            return "go_on"
        return "history"
    if tool_results.results.keys() < awaited.keys():
        missing = [id_ for id_ in awaited if id_ not in tool_results.results]
        raise InvalidRequest(
            "Send the results of all tool calls of the reply together. Missing are those of: " + ", ".join(missing),
            param="messages",
            code="tool_results_missing",
        )
    if tool_results.results.keys() == latest_exchanges(state).keys():
        return "repeat"
    raise already_answered_error(state.run)


def latest_exchanges(state: RunState) -> Mapping[str, Exchange]:
    """Return the exchanges whose results the present turn began with, by the id of each call."""
    exchanges: dict[str, Exchange] = {}
    for step in state.steps.values():
        for exchange in step.exchanges:
            if exchange.results and exchange.turn == state.turn.number - 1:
                exchanges.update(dict.fromkeys(exchange.ids, exchange))
    return exchanges


def messages_by_step(state: RunState, tool_results: ReturnedResults) -> Mapping[int, tuple[Message, ...]]:
    """Return the messages for each step: the results of its calls in their order, then the user's words if it may see
    the user."""
    shares: dict[int, tuple[Message, ...]] = {}
    for step in state.steps.values():
        for exchange in step.exchanges:
            if exchange.ids and exchange.ids[0] in tool_results.results:
                messages = tuple([tool_results.results[id_] for id_ in exchange.ids])
                if step.access.user:
                    messages += tool_results.tail
                shares[step.n] = messages
    return shares


def unknown_call_error() -> InvalidRequest:
    """Return the error for an id that has the form of an issued one and was never sent to this caller."""
    return InvalidRequest(
        "A tool result answers a tool call that is not known here; send ids back exactly as they were given.",
        param="messages",
        code="unknown_tool_call",
    )


def already_answered_error(run: str) -> InvalidRequest:
    """Return the error for results that were received before."""
    return InvalidRequest(
        f"These tool calls were answered already, and the run {run} has gone on; send the results of its latest reply, "
        "or cancel the run to begin another one with this conversation.",
        param="messages",
        code="tool_call_answered",
    )


def _all_open_steps_see_user(state: RunState) -> bool:
    """Return whether every step that is not settled waits for results and may see what the user says now."""
    open_steps = [step for step in state.current_steps if not step.settled]
    return all(step.state == "awaiting_tool" and step.access.user for step in open_steps)


# -- figures of replies


def dollars(micro: int) -> float:
    """Return micro-dollars as dollars."""
    return micro / MILLION


def usage_of(bill: Bill) -> dict[str, Any]:
    """Return OpenAI's `usage`: total = prompt + completion, and visible + orchestration = the journal's sum."""
    visible, orchestration = bill.visible, bill.orchestration
    return {
        "prompt_tokens": visible.input,
        "completion_tokens": visible.output,
        "total_tokens": visible.input + visible.output,
        "prompt_tokens_details": {
            "cached_tokens": visible.cached,
            "orchestration_input_tokens": orchestration.input,
            "orchestration_input_cached_tokens": orchestration.cached,
        },
        "completion_tokens_details": {
            "reasoning_tokens": visible.reasoning,
            "orchestration_output_tokens": orchestration.output,
        },
    }


def usage_figures(usage: Usage) -> dict[str, int | bool]:
    """Return a `Usage` as it stands in `baton`."""
    return {
        "input": usage.input,
        "cached": usage.cached,
        "output": usage.output,
        "reasoning": usage.reasoning,
        "estimated": usage.estimated,
    }
