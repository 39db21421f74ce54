"""What the driver of a run is to do next: what `progress.decide` says."""

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
    """This step can see nothing that it was meant to see, or its round is over without it."""

    step: int
    reason: str = "inputs_lost"


@record(frozen=True, slots=True)
class Conclude:
    """What is nested in this step has come to its end: with an answer, which is then the step's, or for this reason
    without one."""

    step: int
    answer: Answer | None = None
    error: str = ""


@record(frozen=True, slots=True)
class Finish:
    """End the run. `step` answers for a success; `fell_back` says that it is not the last step, whose output was
    empty, and `stopped` why the last round has no answer, so that it is one of an earlier round."""

    kind: Kind
    step: int | None = None
    fell_back: bool = False
    error: str = ""
    stopped: str = ""


@record(frozen=True, slots=True)
class Await:
    """Give the tool calls of these steps to the caller, and let go of the run until it comes back."""

    steps: tuple[int, ...]


Command = Propose | Queue | Skip | Conclude | Await | Finish
