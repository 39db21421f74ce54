"""What a run has come to: the records that `progress.py` folds a journal into.

They hold refs, ids and figures, never text. A state is a value: whoever has one may keep it, and it stays true of the
prefix of the journal that it was folded from.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from app.core.chat import Usage
from app.core.journal import TERMINAL
from app.core.pool import Limits
from app.core.workflow import Access

Mode = Literal["first", "repair", "fallback"]
FALLBACK = "fallback"
"""The mode of a proposal that nobody conducted, and its conductor's name where no conductor may read the task."""
RUN_ENDED = "run_ended"
"""Why steps that were not settled are skipped at the end of their run."""
DRIVER_LOST = "the driver was lost while the plan was made"
"""The reason of a proposal that is made again because nobody is left to finish it."""


@dataclass(frozen=True, slots=True)
class Call:
    """One attempt, or one planning call (`step` is None). `outcome` is None while it is only intended."""

    id: str
    step: int | None
    worker: str
    sees_user: bool
    usd_held: int
    tokens_held: int
    outcome: str | None = None
    usage: Usage = Usage()
    usd: int = 0
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class StepState:
    """A step of some proposal. `output` is the ref of its answer; `subtask` the ref of its text, or empty."""

    n: int
    proposal: int
    worker: str
    subtask: str
    access: Access
    answers: bool
    state: str = "waiting"
    output: str = ""
    chars: int = 0
    finish: str = ""
    call: str = ""
    error: str = ""

    @property
    def settled(self) -> bool:
        """Whether nothing more will happen to it."""
        return self.state in ("done", "failed", "skipped")


@dataclass(frozen=True, slots=True)
class Proposal:
    """One answer of a conductor. Its steps are numbered from `base`."""

    number: int
    base: int
    mode: Mode
    conductor: str
    state: Literal["open", "accepted", "rejected"] = "open"
    outage: bool = False
    reasons: tuple[str, ...] = ()
    call: str = ""
    topology: str = ""


@dataclass(frozen=True, slots=True)
class Admitted:
    """The parts of `run.admitted` that decisions need; the whole body stays in the journal."""

    task: str
    tier: str
    limits: Limits
    deadline: float
    pool: tuple[str, ...]
    conductor: str
    streams: bool
    """Whether deltas of the answer are told as they come; then a step that has begun to answer is not tried again."""
    preview: bool = False
    """Whether the run ends with its plan, and nothing of it is executed."""


@dataclass(frozen=True, slots=True)
class RunState:
    """What a run has come to."""

    run: str
    admitted: Admitted
    seq: int = 0
    state: str = "admitted"
    proposals: tuple[Proposal, ...] = ()
    steps: Mapping[int, StepState] = field(default_factory=dict)
    calls: Mapping[str, Call] = field(default_factory=dict)
    cancel_asked: bool = False
    end: Mapping[str, Any] = field(default_factory=dict)
    """The body of the terminal event."""

    @property
    def ended(self) -> bool:
        """Whether the run has reached its terminal state."""
        return self.state in TERMINAL.values()

    @property
    def proposal(self) -> Proposal | None:
        """The latest proposal."""
        return self.proposals[-1] if self.proposals else None

    @property
    def current(self) -> tuple[StepState, ...]:
        """The steps of the latest proposal, in order."""
        last = len(self.proposals) - 1
        return tuple(step for step in self.steps.values() if step.proposal == last)

    @property
    def accepted(self) -> bool:
        """Whether there is a workflow to execute."""
        return self.proposal is not None and self.proposal.state == "accepted"

    @property
    def answering(self) -> StepState | None:
        """The step whose output is the answer; known once a proposal is accepted."""
        return self.current[-1] if self.accepted else None

    @property
    def open_calls(self) -> tuple[Call, ...]:
        """Calls that are intended and have no outcome."""
        return tuple(call for call in self.calls.values() if call.outcome is None)

    @property
    def degraded(self) -> bool:
        """Whether a fallback decided, or a step that others counted on was lost; not: never run, because the run was
        a preview or ended early."""
        last = self.proposal
        if last is not None and FALLBACK in (last.mode, last.conductor):
            return True
        return any(step.state in ("failed", "skipped") and step.error != RUN_ENDED for step in self.current)

    @property
    def usd(self) -> int:
        """Micro-dollars of all finished calls."""
        return sum(call.usd for call in self.calls.values())
