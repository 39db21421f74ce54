"""The workers of a step in the order in which they are called, and the error if none is left.

Above all where rate limits have to be waited for.
"""

from random import Random

import pytest

from app.core.pool.breaker import ENOUGH_SUCCESSES
from app.core.pool.catalog import SILENT_SHARE, Worker
from app.engine.calls.step_request import BACKOFF_SECONDS, Candidates
from app.engine.worker_health import Health
from app.errors import (
    Failure,
    WorkerError,
    WorkerMisconfigured,
    WorkerRateLimited,
    WorkerRefused,
    WorkerTimeout,
    WorkerUnavailable,
)
from app.telemetry import Telemetry

ADA, BOB = Worker("ada", "near", "ada-1"), Worker("bob", "far", "bob-1")


@pytest.fixture
def health() -> Health:
    return Health(Telemetry(), monotonic=lambda: 1_000.0, random=Random(1).random)


def fail_attempt(candidates: Candidates, worker: Worker, error: WorkerError, left: float) -> None:
    """An attempt of that worker has failed."""
    candidates.note_failure(worker, error, streamed=False, jitter=1.0, seconds_left=left)


def rate_limited_error(seconds: float | None) -> WorkerRateLimited:
    return WorkerRateLimited(retry_after=seconds)


def test_the_first_rate_limit_that_ends_is_waited_for(health: Health) -> None:
    candidates = Candidates(health, [ADA, BOB], 4, 0)
    fail_attempt(candidates, ADA, rate_limited_error(20.0), 100.0)
    fail_attempt(candidates, BOB, rate_limited_error(12.0), 99.0)
    assert candidates.take_pause(99.0) == pytest.approx(12.0 + BACKOFF_SECONDS)
    assert candidates.choose(86.0).worker == BOB
    fail_attempt(candidates, BOB, rate_limited_error(60.0), 86.0)
    assert candidates.take_pause(86.0) == pytest.approx(6.0 + BACKOFF_SECONDS)
    assert candidates.choose(79.0).worker == ADA


def test_calls_that_a_rate_limit_refused_use_up_no_attempt(health: Health) -> None:
    candidates = Candidates(health, [ADA, BOB], 1, 2)
    fail_attempt(candidates, ADA, rate_limited_error(20.0), 100.0)
    fail_attempt(candidates, BOB, rate_limited_error(12.0), 99.0)
    assert candidates.take_pause(99.0) == pytest.approx(12.0 + BACKOFF_SECONDS)
    assert candidates.choose(86.0).worker == BOB
    fail_attempt(candidates, BOB, rate_limited_error(1.0), 86.0)
    assert candidates.take_pause(86.0) == 0.0
    assert candidates.choose(86.0).worker is None, "two were free, and the third was the one attempt"


def test_a_rate_limit_that_outlasts_the_run_is_told_to_the_caller(health: Health) -> None:
    candidates = Candidates(health, [ADA, BOB], 4, 0)
    fail_attempt(candidates, ADA, rate_limited_error(20.0), 10.0)
    fail_attempt(candidates, BOB, rate_limited_error(12.0), 9.0)
    assert candidates.take_pause(8.0) == 0.0
    choice = candidates.choose(8.0)
    assert choice.worker is None
    error = candidates.error(choice)
    assert (error, candidates.retry_after(error, 8.0)) == ("worker_rate_limited", 11.0)


def test_a_worker_that_could_not_be_paid_is_considered_again_after_a_failure(health: Health) -> None:
    """By then the money that others held may be there again."""
    candidates = Candidates(health, [ADA, BOB], 4, 0)
    candidates.leave_out_unpaid(ADA)
    first = candidates.choose(100.0)
    assert (first.worker, first.passed_over) == (BOB, (("ada", "over_budget"),))
    fail_attempt(candidates, BOB, WorkerRefused(), 99.0)
    again = candidates.choose(99.0)
    assert (again.worker, again.passed_over) == (ADA, ())


def test_a_rate_limit_is_waited_for_although_another_worker_cannot_be_paid(health: Health) -> None:
    candidates = Candidates(health, [ADA, BOB], 4, 0)
    candidates.leave_out_unpaid(ADA)
    fail_attempt(candidates, BOB, rate_limited_error(40.0), 100.0)
    assert candidates.take_pause(100.0) == pytest.approx(40.0 + BACKOFF_SECONDS)
    assert candidates.choose(59.0).worker == BOB


def test_after_a_reload_only_workers_that_are_still_there_are_called_as_they_are_now(health: Health) -> None:
    cyd, new_bob = Worker("cyd", "near", "cyd-1"), Worker("bob", "far", "bob-2")
    candidates = Candidates(health, [ADA, BOB, cyd], 9, 0)
    candidates.leave_out_unpaid(ADA)
    fail_attempt(candidates, cyd, rate_limited_error(20.0), 100.0)
    candidates.use_only([new_bob])
    assert candidates.choose(99.0).worker is new_bob
    fail_attempt(candidates, new_bob, WorkerRefused(), 99.0)
    assert candidates.take_pause(99.0) == 0.0
    assert candidates.choose(99.0).worker is None


def test_an_answer_that_breaks_off_is_no_lack_of_money(health: Health) -> None:
    candidates = Candidates(health, [ADA, BOB], 4, 0)
    candidates.leave_out_unpaid(ADA)
    candidates.note_failure(BOB, WorkerUnavailable(), streamed=True, jitter=1.0, seconds_left=99.0)
    assert candidates.error(candidates.choose(99.0)) != "run_over_budget"


def test_no_rate_limit_is_waited_for_once_the_answer_has_begun_to_reach_the_caller(health: Health) -> None:
    candidates = Candidates(health, [ADA, BOB], 4, 2)
    fail_attempt(candidates, ADA, rate_limited_error(20.0), 100.0)
    candidates.note_failure(BOB, WorkerUnavailable(), streamed=True, jitter=1.0, seconds_left=99.0)
    assert candidates.take_pause(99.0) == 0.0
    assert candidates.choose(99.0).worker is None


def test_a_worker_gets_all_of_the_time_if_no_other_could_answer_in_the_rest_of_it(health: Health) -> None:
    assert Candidates(health, [ADA, BOB], 4, 0).can_replace(ADA, 9.0), "bob's pace is not known"
    for number in range(ENOUGH_SUCCESSES):
        health.note_own_call(f"call {number}", BOB, "good", 1_000.0 - 5.0, None)
    candidates = Candidates(health, [ADA, BOB], 4, 0)
    assert not candidates.can_replace(ADA, 9.0), "5 s are more than the share that ada leaves"
    assert candidates.can_replace(ADA, 5.1 / (1 - SILENT_SHARE))
    assert candidates.can_replace(BOB, 9.0)
    assert not Candidates(health, [ADA, BOB], 1, 0).can_replace(BOB, 9.0), "there is one attempt"


TOO_LONG = WorkerRefused(failure=Failure("context_length"))
NO_QUOTA = WorkerMisconfigured(failure=Failure("quota"))


@pytest.mark.parametrize(
    ("errors", "code"),
    [
        ((WorkerRefused(), WorkerRefused()), "worker_refused"),
        ((TOO_LONG, WorkerRefused()), "context_length_exceeded"),
        ((TOO_LONG, WorkerTimeout()), "worker_timeout"),
        ((WorkerTimeout(), TOO_LONG), "worker_timeout"),
        ((rate_limited_error(None), WorkerRefused()), "worker_rate_limited"),
        ((rate_limited_error(None), WorkerUnavailable()), "worker_unavailable"),
        ((WorkerMisconfigured(), WorkerRefused()), "worker_refused"),
        ((NO_QUOTA, rate_limited_error(None)), "worker_rate_limited"),
        ((NO_QUOTA, NO_QUOTA), "insufficient_quota"),
        ((NO_QUOTA, WorkerMisconfigured()), "worker_misconfigured"),
    ],
)
def test_the_error_that_a_caller_can_act_upon_counts(
    health: Health, errors: tuple[WorkerError, WorkerError], code: str
) -> None:
    candidates = Candidates(health, [ADA, BOB], 2, 0)
    for worker, error in zip((ADA, BOB), errors, strict=True):
        fail_attempt(candidates, worker, error, 100.0)
    assert candidates.error(candidates.choose(100.0)) == code
