"""Runs of which nobody knows whether they exist: the database went away between a COMMIT and its answer.

Their callers are told so, with the run's id, and have gone. Those who sent an Idempotency-Key come again and find the
run, if there is one; a run that was to stop when its caller leaves is cancelled as soon as the database is back. Should
this process end before that, such a run is finished by whoever takes it over.
"""

from collections.abc import Iterator
from contextlib import contextmanager, suppress

from app.core.run.events import RunCancelAsked
from app.core.run.state import Turn
from app.engine.context import Means
from app.errors import NotFound, RunEnded, RunUndecided, StoreUnavailable
from app.store.protocol import UNDECIDED, Entry

BOUND = 1_024
"""Runs that are remembered; of any beyond them, those that exist are finished instead of cancelled."""


class Undecided:
    """Those of one process."""

    def __init__(self, means: Means) -> None:
        self._means = means
        self._unheard: dict[str, None] = {}

    @contextmanager
    def told(self, run: str, turn: Turn | None = None) -> Iterator[None]:
        """Around the commit that admits a run (or begins a later turn of it, without `turn`): raises `RunUndecided` if
        that went unanswered."""
        try:
            yield
        except StoreUnavailable as error:
            if error.public_code != UNDECIDED:
                raise
            if turn is not None and turn.on_disconnect == "cancel" and len(self._unheard) < BOUND:
                self._unheard[run] = None
            raise RunUndecided(run) from error

    async def call_off(self) -> None:
        """Cancel those that exist and that nobody waits for; raises `StoreUnavailable` while that cannot be done."""
        for run in list(self._unheard):
            cancelled = (RunCancelAsked("client"),)
            with suppress(NotFound, RunEnded):
                await self._means.store.append(Entry(run, self._means.now(), cancelled))
            del self._unheard[run]
