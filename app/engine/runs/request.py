"""What is asked of a driver and brought to its notice, and what it tells in return."""

from collections.abc import Mapping
from dataclasses import field
from typing import Any

from app.core.message.chat import Task, ToolCall, ToolDelta
from app.core.message.logprobs import Decoded
from app.core.pool.catalog import Limits, Tier
from app.core.pool.policy import Overrides
from app.core.records import record
from app.core.run.bill import Bill
from app.core.run.events import Kind
from app.core.run.state import OnDisconnect, RunState
from app.engine.delivery.mailbox import Mailbox
from app.errors import BatonError
from app.store.protocol import Once


@record(frozen=True, slots=True)
class Owner:
    """Whose a run is."""

    tenant: str
    key: str


@record(frozen=True, slots=True)
class Order:
    """What a gateway asks for: a run, or the next turn of the one whose tool calls the conversation's end answers.

    `limits` are the effort level's, already narrowed by the request's and the key's budget.

    `plan` is the caller's own plan as a JSON value, untrusted; it is checked against the pool before admission.
    """

    task: Task
    tier: Tier
    model: str
    effort: str
    limits: Limits
    tenant: str
    key: str
    labels: frozenset[str] = frozenset()
    overrides: Overrides = Overrides()
    plan: object | None = None
    streams: bool = False
    stream_steps: bool = False
    preview: bool = False
    """Only plan: the run ends with its plan, and nothing of it is executed."""
    ignored: tuple[str, ...] = ()
    """Parameters that the request named and nobody honours, for the journal."""
    explore: bool = True
    """Whether a selector may leave the plan to chance."""
    on_disconnect: OnDisconnect | None = None
    """None: `finish` if there is a claim, by which the caller can come back, else `cancel`."""
    wire: Mapping[str, Any] = field(default_factory=dict)
    """The wire format and the request's options for the reply: with them, the journal is enough to write it again."""
    once: Once | None = None
    """The request's claim to be carried out once; made together with the admission."""

    @property
    def owner(self) -> Owner:
        """Whose run it is to be, or must be."""
        return Owner(self.tenant, self.key)

    @property
    def background(self) -> bool:
        """Whether it is for dispatchers to drive, where there are any: its caller need not hear it."""
        return bool(self.wire.get("background"))


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
    """Whether the model says this instead of an answer."""


@record(frozen=True, slots=True)
class Noted:
    """An event of the run, told only when the caller asked for steps: `kind` and public fields."""

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
    """Of the whole answer's tokens; None where none were told."""
    calls: tuple[ToolCall, ...] = ()
    """Under the ids that the caller sends the results back with."""
    refusal: bool = False
    """Whether `answer` is what the model said instead of one, where its format tells that."""


Told = Said | Noted | Ended


@record(frozen=True, slots=True)
class Driven:
    """A run as one caller hears it, whoever drives it. Take batches from `line` until `Ended` comes.

    `state` is what the run had come to when the hearing began; `replayed` says that it was not begun by this request.
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
"""What a caller who asked for steps is told of each event."""


@record(frozen=True, slots=True)
class Moved:
    """The run's journal has got as far as `seq`, whether or not anybody has told of it."""

    seq: int


@record(frozen=True, slots=True)
class CancelAsked:
    """Somebody wants the run to stop; `by` says who: `client`, `caller` or `operator`."""

    by: str
