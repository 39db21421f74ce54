"""One use of the caller's tools in a run."""

from app.core.records import record


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
