"""Ratings of runs, trials of workers, and what selectors have learned from both."""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Protocol

from app.core.rating.calibration import Trial
from app.core.rating.evidence import PolicyState, RatedRun
from app.core.rating.feedback import Feedback
from app.core.run.events import Event, Kind


class Learning(Protocol):
    """All verbs raise `StoreUnavailable`."""

    async def rate(self, rating: Feedback) -> Feedback:
        """Store a rating of a run. Of two ratings with one id the first is kept, and returned.

        Raises `NotFound`, and `Conflict` for a run that was rated too often.
        """
        ...

    async def feedback(self, run: str) -> tuple[Feedback, ...]:
        """Return all ratings of a run, the oldest first."""
        ...

    async def feedback_after(self, last: tuple[float, str], limit: int) -> tuple[Feedback, ...]:
        """Return at most `limit` ratings of any run in the order of (at, id), behind the last one that was seen.

        Clocks differ: a reader should look again some seconds back, and ignore a rating that it has seen before.
        """
        ...

    async def find_rated_runs(
        self, ratings: Sequence[Feedback], kinds: Sequence[Kind], find_ref: Callable[[Sequence[Event]], str]
    ) -> tuple[RatedRun, ...]:
        """Return the runs of these ratings, each with its events of these kinds and the content whose ref `find_ref`
        finds in them."""
        ...

    async def note_trial(self, trial: Trial) -> None:
        """Store how well a worker did at a built-in task. It replaces an earlier trial of the same name."""
        ...

    async def trials(self, news: float | None = None) -> tuple[Trial, ...]:
        """Return all trials, the oldest first; with `news`, none at all unless one is later than that time."""
        ...

    async def find_learned_state(self, policy: str, after: int) -> PolicyState | None:
        """Return the latest posterior of a policy, if its number is higher than `after`; else None."""
        ...

    async def learn(
        self, policy: str, learned: PolicyState, at: float, parts: Mapping[str, bytes] = MappingProxyType({})
    ) -> bool:
        """Replace what was learned, and with it the bodies of the policies in `parts`, which get the same number.
        False, and nothing is written, if somebody else has replaced it."""
        ...
