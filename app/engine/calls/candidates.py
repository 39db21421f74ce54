"""The choice of the worker that a step calls next: the planned worker, once more after a passing fault, then the others
in order.

Workers that are ejected, or have no retry budget left, are passed over (`worker_health.py`); the journal says why.
After a failure the same worker is waited for, with full-jitter backoff or as long as Retry-After says, but never beyond
the run's time: then the next one is called, or the step fails at once. If only workers are left whose providers limit
the rate of requests, the one that can be called first is waited for. A call that a rate limit refused is no attempt: a
step may make as many of those as it has attempts, and its attempts besides. A worker whose answer the run's money does
not pay for, even if it is cut to the floor of the tier, is passed over for a cheaper one.
"""

from collections.abc import Sequence

from app.core.pool.breaker import BRIEFEST, NO_TIME, Place
from app.core.pool.catalog import SPARED, Worker
from app.core.records import changed
from app.engine.worker_health import Health, WorkerChoice
from app.errors import (
    BatonError,
    RunOutOfQuota,
    RunOverBudget,
    RunTooLong,
    WorkerError,
    WorkerMisconfigured,
    WorkerRateLimited,
    WorkerRefused,
    WorkerTimeout,
)

BACKOFF, LONGEST_BACKOFF = 0.25, 8.0
"""Seconds: the first retry waits a random time below the one, each later one below twice as much, up to the other."""
LONELY_BACKOFF = 30.0
"""Seconds that are waited for the only worker there is, if it asks for them."""
UNPAID = "over_budget"
"""The reason for which a worker is passed over whose answer the run cannot pay, however short it is cut."""
WAIT_FOR_OTHERS_SECONDS, LOOK_SECONDS = 30.0, 0.2
"""Seconds to wait in all for what the first replacements find, and between two looks."""


class Candidates:
    """The workers that one step may still call."""

    def __init__(self, health: Health, workers: list[Worker], attempts: int, free: int) -> None:
        """`workers` in the order of preference; `attempts` are left to the step, and `free` calls that do not count as
        attempts if a rate limit refuses them."""
        self._health = health
        self._workers = workers
        self._left = attempts
        self._free = free
        self._tries: dict[str, int] = {}
        self._wait = 0.0
        self._wait_for_others = WAIT_FOR_OTHERS_SECONDS
        self._errors: list[BatonError | None] = []
        """The error of each attempt that failed."""
        self._limited: dict[str, tuple[Worker, float]] = {}
        """Workers that are not called because of a rate limit, each with the seconds that the run will have left when
        it can be called again."""
        self._unpaid: dict[str, Worker] = {}
        """Workers that are not called because the run's money does not pay for their answer."""
        self._rate_limited: dict[str, float] = {}
        """Each worker whose latest answer was a rate limit, with the same seconds."""

    @property
    def spare(self) -> bool:
        """True if another worker could take over from the current one."""
        return len(self._workers) > 1 and self._left > 1

    def can_replace(self, worker: Worker, seconds_left: float) -> bool:
        """Return True if another worker could take over from this one after its share of the seconds that the run has
        left, and answer in the rest of them."""
        rest = seconds_left * (1 - SPARED)
        others = [other for other in self._workers if other.name != worker.name]
        return self.spare and any(self._health.hopeless(other) <= rest for other in others)

    def pause(self, seconds_left: float) -> float:
        """Return the seconds to wait before asking again; 0: `choose` now. `seconds_left` are the run's seconds."""
        wait, self._wait = self._wait, 0.0
        if not self._workers and self._left > 0:
            return self._until_callable(seconds_left)
        # A first call never lacks the retry budget.
        again = bool(self._tries) and self._left > 0 and self._wait_for_others > 0
        if not wait and again and self._health.worth_waiting(self._offers(), seconds_left):
            wait = min(LOOK_SECONDS, self._wait_for_others)
            self._wait_for_others -= wait
        return wait

    def choose(self, seconds_left: float) -> WorkerChoice:
        """Choose the worker to call now; none when all means are exhausted."""
        choice = self._health.choose(self._offers() if self._left > 0 else [], seconds_left)
        if not self._unpaid:
            return choice
        unpaid = tuple((name, UNPAID) for name in self._unpaid)
        return changed(choice, passed_over=(*unpaid, *choice.passed_over))

    def unaffordable(self, worker: Worker) -> None:
        """Leave out a worker for whose answer the run's money does not suffice: a cheaper one is asked in its stead."""
        self._unpaid[worker.name] = worker
        self._workers = [other for other in self._workers if other is not worker]

    def _until_callable(self, seconds_left: float) -> float:
        """Return the seconds until the first rate limit is over, if that leaves time for an answer; its worker is
        called then."""
        fitting = [limited for limited in self._limited.values() if limited[1] > self._health.hopeless(limited[0])]
        if not fitting:
            return 0.0
        worker, then = max(fitting, key=lambda limited: limited[1])
        del self._limited[worker.name]
        self._workers = [worker]
        return max(seconds_left - then, 0.0)

    def error(self, choice: WorkerChoice) -> str:
        """Return the code of the error with which the step fails when that choice is none."""
        if self._unpaid and self._left > 0:
            return RunOverBudget.code
        if choice.hopeless:
            return NO_TIME
        return _summary(self._errors)

    def retry_after(self, error: str, seconds_left: float) -> float | None:
        """Return the seconds until the first worker can be called again, if the step fails with that error because of
        rate limits; None if no provider said so. `seconds_left` are the run's seconds."""
        if error != WorkerRateLimited.code:
            return None
        return min((round(max(seconds_left - then, 0.0), 3) for then in self._rate_limited.values()), default=None)

    def failed(
        self, worker: Worker, error: BatonError | None, *, streamed: bool, chance: float, seconds_left: float
    ) -> None:
        """Note a failed attempt; `streamed` says that the answer has begun to reach the caller, so that no other may
        follow."""
        if isinstance(error, WorkerRateLimited) and self._free > 0:
            self._free -= 1
        else:
            self._left -= 1
        self._tries[worker.name] = self._tries.get(worker.name, 0) + 1
        self._errors.append(error)
        self._rate_limited.pop(worker.name, None)
        if isinstance(error, WorkerRateLimited) and error.retry_after is not None:
            self._rate_limited[worker.name] = seconds_left - error.retry_after
        wait = self._patience(worker, error, chance, seconds_left)
        if streamed:
            self._workers, self._unpaid = [], {}
        elif wait is None:
            self._workers = [other for other in self._workers if other is not worker]
            if worker.name in self._rate_limited:
                self._limited[worker.name] = worker, self._rate_limited[worker.name] - chance * BACKOFF
        elif self._health.affords(worker, "retry"):
            self._wait = wait
        self._consider_unpaid()

    def answered_nothing(self, worker: Worker) -> None:
        """Note an attempt whose answer is empty: another worker is asked in its stead."""
        self._left -= 1
        self._tries[worker.name] = self._tries.get(worker.name, 0) + 1
        self._workers = [other for other in self._workers if other is not worker]
        self._consider_unpaid()

    def _consider_unpaid(self) -> None:
        """Offer those again that the run's money did not pay for: what others held may be there by now. Not while there
        is nobody else but workers to wait for."""
        if self._workers or not self._limited:
            self._workers, self._unpaid = [*self._unpaid.values(), *self._workers], {}

    def _patience(self, worker: Worker, error: BatonError | None, chance: float, seconds_left: float) -> float | None:
        """Return the seconds to wait for the worker that has just failed; None if it is not called again."""
        alone = len(self._workers) == 1 and not self._limited
        if isinstance(error, WorkerError) and error.elsewhere:  # another endpoint of it takes the call at once
            return 0.0
        if error is None or not error.retryable or self._tries[worker.name] > 1:
            return None
        if isinstance(error, WorkerTimeout) and not alone:  # it has had its share of the run's time
            return None
        backoff = chance * min(BACKOFF * 2 ** (sum(self._tries.values()) - 1), LONGEST_BACKOFF)
        wait = max(error.retry_after or 0.0, backoff)
        longest = min(LONELY_BACKOFF if alone else LONGEST_BACKOFF, seconds_left - BRIEFEST)
        return wait if wait <= longest else None

    def _offers(self) -> list[tuple[Worker, Place]]:
        return [(worker, self._place(worker)) for worker in self._workers]

    def _place(self, worker: Worker) -> Place:
        if not self._tries:
            return "first"
        if worker.name in self._tries:
            return "retry"
        return "replacement"


def _summary(errors: Sequence[BatonError | None]) -> str:
    """Return the code of the error with which a step fails after these ones.

    A provider that failed counts before one that limits the rate of requests, because trying again may help; that one
    before a refusal, which others may not share; and a refusal before a worker that only an operator can put right.
    """
    if not errors:
        return "run_failed"
    refused = [error for error in errors if isinstance(error, WorkerRefused)]
    limited = [error for error in errors if isinstance(error, WorkerRateLimited)]
    misconfigured = [error for error in errors if isinstance(error, WorkerMisconfigured)]
    failed = [error for error in errors if error not in (*refused, *limited, *misconfigured)]
    if failed or limited:
        last = (failed or limited)[-1]
        return (last.public_code if last is not None else None) or "worker_failed"
    if any(error.failure.reason == "context_length" for error in refused):
        return RunTooLong.code
    if refused:
        return WorkerRefused.code
    spent = all(error.failure.reason == "quota" for error in misconfigured)
    if spent:
        return RunOutOfQuota.code
    return WorkerMisconfigured.code
