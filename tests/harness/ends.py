"""The end of a run, for tests of runs that have ended."""

from app.core.run.events import RunEnd
from app.core.run.state import RunState


def end_of(state: RunState) -> RunEnd:
    """Return the terminal fact of a run that has ended."""
    assert state.end is not None, f"the run is {state.state}"
    return state.end
