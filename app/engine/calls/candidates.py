"""The choice of the worker that a step calls next: the planned worker, once more after a passing fault, then the others
in order.

Workers that are ejected, or have no retry budget left, are passed over (`health.py`); the journal says why. After a
failure the same worker is waited for, with full-jitter backoff or as long as Retry-After says, but never beyond the
run's time: then the next one is called, or the step fails at once.
"""

from app.core.pool.breaker import BRIEFEST, NO_TIME, Place
from app.core.pool.catalog import Worker
from app.engine.worker_health import Choice, Health
from app.errors import BatonError, WorkerError, WorkerTimeout

BACKOFF, LONGEST_BACKOFF = 0.25, 8.0
"""Seconds: the first retry waits a random time below the one, each later one below twice as much, up to the other."""
LONELY_BACKOFF = 30.0
"""Seconds that are waited for the only worker there is, if it asks for them."""
NEWS, LOOK = 30.0, 0.2
"""Seconds to wait in all for what the first replacements find, and between two looks."""


class Candidates:
    """The workers that one step may still call."""

    def __init__(self, health: Health, workers: list[Worker], attempts: int) -> None:
        """`workers` in the order of preference; `attempts` are left to the step."""
        self._health = health
        self._workers = workers
        self._left = attempts
        self._tries: dict[str, int] = {}
        self._wait = 0.0
        self._news = NEWS
        self._last_error = ""

    @property
    def spare(self) -> bool:
        """True if another worker could take over from the current one."""
        return len(self._workers) > 1 and self._left > 1

    def pause(self, left: float) -> float:
        """Seconds to wait before asking again; 0: `choose` now. `left` are the run's seconds."""
        wait, self._wait = self._wait, 0.0
        again = bool(self._tries) and self._left > 0 and self._news > 0  # a first call never lacks the budget
        if not wait and again and self._health.worth_waiting(self._offers(), left):
            wait = min(LOOK, self._news)
            self._news -= wait
        return wait

    def choose(self, left: float) -> Choice:
        """Choose the worker to call now; none when all means are exhausted."""
        return self._health.choose(self._offers() if self._left > 0 else [], left)

    def error(self, choice: Choice) -> str:
        """The code of the error with which the step fails when that choice is none."""
        return NO_TIME if choice.hopeless else self._last_error or "run_failed"

    def failed(self, worker: Worker, error: BatonError | None, *, told: bool, chance: float, left: float) -> None:
        """Note a failed attempt; `told` says that the answer has begun to reach the caller, so that no other may
        follow."""
        self._left -= 1
        self._tries[worker.name] = self._tries.get(worker.name, 0) + 1
        self._last_error = (error.public_code if error else None) or "worker_failed"
        wait = self._patience(worker, error, chance, left)
        if told:
            self._workers = []
        elif wait is None:
            self._workers = [other for other in self._workers if other is not worker]
        elif self._health.affords(worker, "retry"):
            self._wait = wait

    def _patience(self, worker: Worker, error: BatonError | None, chance: float, left: float) -> float | None:
        """Seconds to wait for the worker that has just failed; None if it is not called again."""
        alone = len(self._workers) == 1
        if isinstance(error, WorkerError) and error.elsewhere:  # another endpoint of it takes the call at once
            return 0.0
        if error is None or not error.retryable or self._tries[worker.name] > 1:
            return None
        if isinstance(error, WorkerTimeout) and not alone:  # it has had its share of the run's time
            return None
        backoff = chance * min(BACKOFF * 2 ** (sum(self._tries.values()) - 1), LONGEST_BACKOFF)
        wait = max(error.retry_after or 0.0, backoff)
        longest = min(LONELY_BACKOFF if alone else LONGEST_BACKOFF, left - BRIEFEST)
        return wait if wait <= longest else None

    def _offers(self) -> list[tuple[Worker, Place]]:
        return [(worker, self._place(worker)) for worker in self._workers]

    def _place(self, worker: Worker) -> Place:
        if not self._tries:
            return "first"
        return "retry" if worker.name in self._tries else "replacement"
