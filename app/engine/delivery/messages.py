"""The messages that callers receive of a run: more of its answer, events of its steps, and the end of the turn."""

from collections.abc import Mapping

from app.core.message.chat import ToolCall, ToolDelta
from app.core.message.logprobs import Decoded
from app.core.records import record
from app.core.run.bill import Bill
from app.core.run.events import Kind
from app.core.run.state import RunState
from app.engine.delivery.mailbox import Mailbox
from app.errors import BatonError


@record(frozen=True, slots=True)
class Said:
    """More of the answer, with the log-probabilities of its tokens where the caller asked for them; `at` is the event
    number behind it (`run/position.py`)."""

    text: str
    logprobs: tuple[Decoded, ...] = ()
    at: int = 0
    calls: tuple[ToolDelta, ...] = ()
    """More of tool calls, after the text."""
    refusal: bool = False
    """True if the model says this instead of an answer."""


@record(frozen=True, slots=True)
class Noted:
    """An event of the run, sent only when the caller asked for steps: `kind` and public fields."""

    kind: str
    body: dict[str, object]


@record(frozen=True, slots=True)
class Ended:
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


Told = Said | Noted | Ended


@record(frozen=True, slots=True)
class Driven:
    """A run as one caller receives it, whichever engine drives it. Take batches from `line` until `Ended` comes.

    `state` is the run's state when the caller began to follow it; `replayed` says that it was not begun by this
    request.
    """

    run: str
    line: Mailbox[Told]
    state: RunState
    replayed: bool = False


NOTED: Mapping[Kind, tuple[str, ...]] = {
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
