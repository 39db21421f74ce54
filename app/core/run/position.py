"""Positions in the stream of an answer: event numbers that every process derives from the journal alone.

The text of an answer is not journaled while it streams, so events are not counted. An event's number is the part of the
answer that has been sent up to and including it, in characters (code points):

    0                       nothing yet: the opening event
    n                       the first n characters
    length + 1, + 2, + 3    all of it, and the finish, the usage, the end of the stream
    + (k - 1) * ATTEMPT     if it is the k-th attempt at an answer that speaks, over all rounds

So the numbers of one stream never fall, and of two callers with the same number neither has received more. The attempt
is part of it because two attempts may produce different texts: a caller that received text that is not the answer's
cannot resume.

Pieces of tool calls have no number of their own: words may follow them, so the journal does not say how much of both
was sent by then. A caller that resumes a stream drops the calls that it has and receives all of them again.
"""

from app.core.records import record
from app.core.run.events import RunSucceeded
from app.core.run.progress import parent_of
from app.core.run.state import Call, RunState, StepState
from app.errors import Conflict, InvalidRequest

ATTEMPT = 2**32
"""More characters than any answer has; 2**21 attempts still fit into the whole numbers that JavaScript has."""
FINISH, USAGE, DONE = 1, 2, 3
"""The events after the text."""


@record(frozen=True, slots=True)
class Position:
    """The first `chars` characters of what the answering step's attempt of that number says; attempts count from 1."""

    attempt: int = 1
    chars: int = 0

    @property
    def number(self) -> int:
        """Return the event number of the position."""
        return (self.attempt - 1) * ATTEMPT + self.chars


def read(number: int) -> Position:
    """Return the inverse of `Position.number`."""
    return Position(number // ATTEMPT + 1, number % ATTEMPT)


def attempt_of(state: RunState, call: str) -> int:
    """Return which attempt of its step a call is, from 1, counted on over the answering steps of earlier rounds; 0 if
    the state knows no such call."""
    known = state.calls.get(call)
    if known is None or known.step is None:
        return 0
    step = state.steps[known.step]
    while state.nested and (parent := parent_of(state, step)) is not None:
        step = parent
    made = [attempt.id for attempt in _attempts(state, step.n)]
    return made.index(call) + 1 if call in made else 0


def _attempts(state: RunState, n: int) -> list[Call]:
    """Return the calls that gave, or were to give, the answers of the rounds up to that of step `n`; its own come last.
    What is nested in a step gives its answer in one."""
    of = state.steps[n].proposal
    rounds = range(1, next(proposal.round for proposal in state.proposals if proposal.number == of))
    earlier = [workflow[-1].n for number in rounds if (workflow := state.workflow(number))]
    cut_short = state.end is not None and state.end.stopped and state.round == 1
    if cut_short and state.answering is not None:
        earlier.append(state.answering.n)  # what it had sent is not the answer, which another step gave before
    steps = [state.steps[m] for m in (*earlier, n)]
    return [call for step in steps for call in state.calls.values() if call.step == step.n or call.id == step.call]


def answered(state: RunState) -> StepState | None:
    """Return the step whose output is the answer of a run that has succeeded."""
    if not isinstance(state.end, RunSucceeded) or state.end.step is None:
        return None
    return state.steps.get(state.end.step)


def end_of(state: RunState) -> Position:
    """Behind the last character of a turn's reply; the start if it has no text."""
    step = answered(state)
    if state.state == "awaiting_tool" and state.answering is not None and state.answering.state == "awaiting_tool":
        last = state.answering.exchanges[-1]
        return Position(attempt_of(state, last.call), last.chars)
    if step is not None:
        return Position(max(attempt_of(state, step.call), 1), step.chars)
    return Position()


def check(state: RunState, at: Position) -> None:
    """Check that a stream can go on after `at`.

    Raises `InvalidRequest` if no event can have had that number, `Conflict` if the text that was sent then is not the
    answer's.
    """
    if not at.chars:
        return
    step = answered(state) or state.answering
    calls = _attempts(state, step.n) if step is not None else []
    if step is None or not at.attempt <= len(calls):
        raise unknown()
    call = calls[at.attempt - 1]
    other = call.id != step.call if step.call else call.step != step.n
    if call.failed or other:
        raise changed(state.run)
    if step.state == "done" and at.chars > step.chars + DONE:
        raise unknown()


def unknown() -> InvalidRequest:
    """Return an event number that was never given out."""
    return InvalidRequest(
        "No event of this run's stream has that number; send the number of the last event that you received, or none "
        "to hear the stream from its start.",
        param="starting_after",
        code="unknown_event",
    )


def changed(run: str) -> Conflict:
    """The answer comes from another attempt than the text that was sent."""
    return Conflict(
        f"What was streamed up to that event is not part of the answer: the attempt was lost and another one took its "
        f"place. Run {run} is not affected; ask again without an event number for its stream from the start.",
        param="starting_after",
        code="answer_changed",
    )
