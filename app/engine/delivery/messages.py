"""The messages that callers receive of a run, and the mailboxes in which they wait.

A message is more of the answer, an event of a step, or the end of the turn.
"""

import asyncio
from collections.abc import Mapping
from typing import Generic, TypeVar

from app.core.message.chat import Decoded, ToolCall, ToolDelta
from app.core.records import record
from app.core.run.caller_view import Bill
from app.core.run.events import Kind
from app.core.run.state import RunState
from app.errors import BatonError

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
        """Add an item beyond the bound: for the few that must arrive, such as an end."""
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


@record(frozen=True, slots=True)
class AnswerPart:
    """More of the answer, with the log-probabilities of its tokens where the caller asked for them; `at` is the event
    number behind it (`run/caller_view.py`)."""

    text: str
    logprobs: tuple[Decoded, ...] = ()
    at: int = 0
    calls: tuple[ToolDelta, ...] = ()
    """More of tool calls, after the text."""
    refusal: bool = False
    """True if the model says this instead of an answer."""


@record(frozen=True, slots=True)
class StepEvent:
    """An event of the run, sent only when the caller asked for steps: `kind` and public fields."""

    kind: str
    body: dict[str, object]


@record(frozen=True, slots=True)
class TurnEnd:
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


@record(frozen=True, slots=True)
class FollowedRun:
    """A run as one caller receives it, whichever engine drives it. Take batches from `line` until `TurnEnd` comes.

    `state` is the run's state when the caller began to follow it; `replayed` says that it was not begun by this
    request.
    """

    run: str
    line: Mailbox[CallerMessage]
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
