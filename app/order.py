"""What a gateway asks of a driver, and what it is told in return."""

from collections.abc import Mapping
from dataclasses import dataclass

from app.core.bill import Bill
from app.core.chat import Task
from app.core.journal import Kind
from app.core.policy import Overrides
from app.core.pool import Limits, Tier
from app.core.state import RunState
from app.errors import BatonError
from app.mailbox import Mailbox


@dataclass(frozen=True, slots=True)
class Order:
    """What a gateway asks for. `limits` are the effort level's, already narrowed by the request's and the key's budget.

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


@dataclass(frozen=True, slots=True)
class Said:
    """More of the answer."""

    text: str


@dataclass(frozen=True, slots=True)
class Noted:
    """An event of the run, told only when the caller asked for steps: `kind` and public fields."""

    kind: str
    body: dict[str, object]


@dataclass(frozen=True, slots=True)
class Ended:
    """The run is over and its terminal event committed. `error` is None for a success."""

    state: RunState
    answer: str
    finish: str
    bill: Bill
    error: BatonError | None


Told = Said | Noted | Ended


@dataclass(frozen=True, slots=True)
class Driven:
    """A run that this process drives. Take batches from `line` until `Ended` comes."""

    run: str
    line: Mailbox[Told]


NOTED: Mapping[Kind, tuple[str, ...]] = {
    Kind.PLAN_STEP: ("n", "worker", "access", "answers"),
    Kind.PLAN_ACCEPTED: ("topology", "steps"),
    Kind.PLAN_REJECTED: ("reasons",),
    Kind.CALL_INTENDED: ("n", "attempt", "worker"),
    Kind.STEP_DONE: ("n", "chars", "finish"),
    Kind.STEP_FAILED: ("n", "error"),
    Kind.STEP_SKIPPED: ("n", "reason"),
}
"""What a caller who asked for steps is told of each event."""
