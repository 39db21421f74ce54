"""Results of tool calls that a caller returns: the run that they belong to, and whether it may continue with them.

A conversation that ends with results (and perhaps words of the user after them) for calls of ours continues the run
that the ids lead to. Everywhere else results are history, and so are ids of somebody else's form. A run that has ended
cannot be continued: the conversation is then the history of a new run. Anything in between is refused, not guessed.
"""

from collections.abc import Mapping, Sequence
from typing import Literal

from app.core.message.chat import Message, run_of
from app.core.records import record
from app.core.run.state import Exchange, RunState
from app.errors import InvalidRequest

Standing = Literal["go_on", "repeat", "history"]
"""`repeat`: the results are those that the present turn began with, or the same ids with others."""


@record(frozen=True, slots=True)
class Returned:
    """Results for calls of one run, by the ids that were issued, in the caller's order; and what the user says after
    them."""

    run: str
    results: Mapping[str, Message]
    tail: tuple[Message, ...] = ()


def returned(messages: Sequence[Message]) -> Returned | None:
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
    return Returned(run, {message.call_id: message for message in reversed(results)}, tuple(reversed(tail)))


def standing(state: RunState, came: Returned) -> Standing:
    """Classify results for a run. Raises `InvalidRequest` if the run cannot go on with them."""
    if state.ended:
        return "history"
    given = {id_: exchange for step in state.steps.values() for exchange in step.exchanges for id_ in exchange.ids}
    if not came.results.keys() <= given.keys():
        raise unknown()
    awaited = state.awaited.keys() if state.state == "awaiting_tool" else frozenset()
    if came.results.keys() == awaited:
        if not came.tail or _all_hear(state):
            return "go_on"
        return "history"
    if missing := [id_ for id_ in awaited if id_ not in came.results] if came.results.keys() <= awaited else []:
        raise InvalidRequest(
            "Send the results of all tool calls of the reply together. Missing are those of: " + ", ".join(missing),
            param="messages",
            code="tool_results_missing",
        )
    if came.results.keys() == latest(state).keys():
        return "repeat"
    raise answered()


def latest(state: RunState) -> Mapping[str, Exchange]:
    """Return the exchanges whose results the present turn began with, by the id of each call."""
    exchanges = [exchange for step in state.steps.values() for exchange in step.exchanges if exchange.results]
    return {id_: one for one in exchanges if one.turn == state.turn.number - 1 for id_ in one.ids}


def portions(state: RunState, came: Returned) -> Mapping[int, tuple[Message, ...]]:
    """Return the messages for each step: the results of its calls in their order, then the user's words if it may see
    the user."""
    shares: dict[int, tuple[Message, ...]] = {}
    for step in state.steps.values():
        for exchange in step.exchanges:
            if exchange.ids and exchange.ids[0] in came.results:
                own = tuple(came.results[id_] for id_ in exchange.ids)
                shares[step.n] = (*own, *(came.tail if step.access.user else ()))
    return shares


def unknown() -> InvalidRequest:
    """Return the error for an id that has the form of an issued one and was never sent to this caller."""
    return InvalidRequest(
        "A tool result answers a tool call that is not known here; send ids back exactly as they were given.",
        param="messages",
        code="unknown_tool_call",
    )


def answered() -> InvalidRequest:
    """Return the error for results that were received before."""
    return InvalidRequest(
        "These tool calls were answered already, and the run has gone on; send the results of its latest reply.",
        param="messages",
        code="tool_call_answered",
    )


def _all_hear(state: RunState) -> bool:
    """Return true if every step that is not settled waits for results and may see what the user says now."""
    open_steps = [step for step in state.current if not step.settled]
    return all(step.state == "awaiting_tool" and step.access.user for step in open_steps)
