"""The records that the state of a run consists of: its calls, turns, steps and proposals. `state.py` folds them."""

from collections.abc import Mapping
from dataclasses import field
from typing import Any, Literal

from app.core.message.chat import Usage
from app.core.plan.workflow import CONDUCTOR, Access
from app.core.records import record
from app.core.run.kinds import Mode, OnDisconnect
from app.core.run.trace import NO_TRACE, Trace


@record(frozen=True, slots=True)
class Exchange:
    """One use of the caller's tools by a step: the worker's message with its calls, and the results."""

    call: str
    worker: str
    said: str
    """Ref of the message, with the ids that the worker knows its calls by."""
    ids: tuple[str, ...]
    """The ids that the caller knows them by, in the same order."""
    turn: int
    """The turn that ended with them."""
    chars: int = 0
    """Of the text beside the calls."""
    results: str = ""
    """Ref of what came back; empty while it is awaited."""
    labels: frozenset[str] = frozenset()
    """The labels that the caller put on what came back."""


@record(frozen=True, slots=True)
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
    turn: int = 0
    """The turn in which it was intended."""
    limited: bool = False
    """True if its provider refused it because of a rate limit."""
    empty: bool = False
    """True if it went well and has no text. It may have called tools."""
    out_of_time: bool = False
    """True if its text is cut off because the time of the run was over."""

    @property
    def failed(self) -> bool:
        """True if it has ended without an answer: what was streamed of it is no part of any answer."""
        return self.outcome not in (None, "ok")


@record(frozen=True, slots=True)
class Turn:
    """The caller's latest request to this run: the admission (number 0), or one that brought tool results."""

    number: int = 0
    deadline: float = 0.0
    streams: bool = False
    """True if deltas of the answer are sent as they come; then a step that has begun to answer is not tried again."""
    request: str = ""
    """Ref of its sampling and tools; empty: those of the task."""
    at: float = 0.0
    """When, in seconds since 1970."""
    on_disconnect: OnDisconnect = "cancel"
    wire: Mapping[str, Any] = field(default_factory=dict)
    """The wire format of the reply and the request's options for it."""
    until: float = 0.0
    """When the wait for tool results is over; 0 before there is any."""
    gateway: str = ""
    """The address of the gateway that the request came to, and that follows the turn; empty where nobody does."""
    request_id: str = ""
    """The id of the HTTP request; empty where it is not known."""
    trace: Trace = NO_TRACE
    """The span of the request."""


@record(frozen=True, slots=True)
class StepState:
    """A step of some proposal. `output` is the ref of its answer; `subtask` and `logprobs` are refs too, or empty."""

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
    retry_after: float | None = None
    """Seconds after which a step that failed because of rate limits could be tried again."""
    logprobs: str = ""
    refusal: bool = False
    """True if its output is the model's refusal."""
    stop_sequence: int | None = None
    """The place, among those of the request, of the stop sequence that ended its output, where that is known."""
    tools: bool = False
    """True if it may call the caller's tools; the answering step always may."""
    exchanges: tuple[Exchange, ...] = ()
    inherits: bool = False
    """True if its plan listed `user`, which inside a step is the parent's task."""
    complete: bool = False
    """True if it sees the conversation and is asked for the whole answer although another step answers: its output may
    stand in for an answer that the run has no money or time for."""
    budget: tuple[str, float] | None = None
    """The budget that had not enough left for its call, and the end of that budget's window."""
    subtask_lost: frozenset[str] = frozenset()
    output_lost: frozenset[str] = frozenset()
    """The labels that its subtask and its output lost, because those who wrote them declassify these labels."""
    origin_labels: frozenset[str] | None = None
    """The labels of an output that was taken over from an earlier run; None where a call gave it."""

    @property
    def opens(self) -> bool:
        """True if the conductor itself takes the step and opens a workflow for it."""
        return self.worker == CONDUCTOR

    @property
    def settled(self) -> bool:
        """True if the step is done, failed or skipped, so that nothing more happens to it."""
        return self.state in ("done", "failed", "skipped")


@record(frozen=True, slots=True)
class Proposal:
    """One answer of a conductor. Its steps are numbered from `base`."""

    number: int
    base: int
    mode: Mode
    conductor: str
    state: Literal["open", "accepted", "rejected"] = "open"
    outage: bool = False
    reasons: tuple[str, ...] = ()
    budget: tuple[str, float] | None = None
    """The budget over several runs that had not enough left for its call, and the end of that budget's window."""
    call: str = ""
    topology: str = ""
    """Empty until it is accepted, and for the empty plan that takes the answer before it for final."""
    round: int = 1
    """The number of the workflow that it is to become, or is nested in."""
    parent: int | None = None
    """The step that it is nested in."""
    room: int = 0
    """The largest number of its steps; 0 means the number in the limits."""
    instant: bool = False
    """True if no model wrote it."""
    waits: bool = False
    """True if no step of it begins before it is accepted."""
    needs: tuple[str, ...] = ()
    """The reasons why it needs an approval; known once it is accepted."""
    price: int | None = None
    """The worst case of its steps in micro-dollars, where that is known."""


@record(frozen=True, slots=True)
class Answer:
    """The answer of a round: the step whose output it is. `fell_back` is true if that is not the last step, whose
    output was empty."""

    step: StepState
    fell_back: bool
