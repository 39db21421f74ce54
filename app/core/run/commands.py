"""The commands of `progress.decide`: each is one thing that the driver of a run is to do next."""

from app.core.records import record
from app.core.run.kinds import Kind, Mode
from app.core.run.state import Answer


@record(frozen=True, slots=True)
class Propose:
    """Ask a conductor (or the fallback) for proposal `number`, whose steps count from `base`; for the step `parent`, if
    it is to be nested, of at most `room` steps."""

    number: int
    base: int
    mode: Mode
    round: int = 1
    parent: int | None = None
    room: int = 0


@record(frozen=True, slots=True)
class Queue:
    """Queue these steps: their inputs are settled."""

    steps: tuple[int, ...]


@record(frozen=True, slots=True)
class Skip:
    """Skip this step: all of its inputs are lost, or its round has ended without it."""

    step: int
    reason: str = "inputs_lost"


@record(frozen=True, slots=True)
class Conclude:
    """Settle a step whose nested workflow has ended: with its answer, or as failed for the reason `error`."""

    step: int
    answer: Answer | None = None
    error: str = ""


@record(frozen=True, slots=True)
class Finish:
    """End the run. For a success `step` is the step that answers. `fell_back` is true if that is not the last step,
    whose output was empty. `stopped` says why the last round has no answer, so that the answer is one of an earlier
    round."""

    kind: Kind
    step: int | None = None
    fell_back: bool = False
    error: str = ""
    stopped: str = ""


@record(frozen=True, slots=True)
class Await:
    """End the turn with the tool calls of these steps, and release the run until the caller sends their results."""

    steps: tuple[int, ...]


@record(frozen=True, slots=True)
class AwaitApproval:
    """Release the run until somebody has approved or refused this proposal."""

    proposal: int


@record(frozen=True, slots=True)
class DropPlan:
    """Drop this proposal, for which nobody has decided in time, for a fallback that needs no approval."""

    proposal: int


Command = Propose | Queue | Skip | Conclude | Await | AwaitApproval | DropPlan | Finish
