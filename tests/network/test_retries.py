"""The retry policies: what is tried again, what is raised, and when a policy gives up."""

import asyncio
from collections.abc import Callable
from functools import partial

import httpx
import pytest

from app.errors import NotFound, StoreUnavailable, WorkerUnavailable
from app.network import retries
from app.network.retries import retry
from app.providers.vllm import Management


class Flaky:
    """A call that fails with each of `errors` in turn and then returns "done"."""

    def __init__(self, *errors: Exception) -> None:
        self._errors = list(errors)
        self.calls = 0

    async def __call__(self) -> str:
        self.calls += 1
        if self._errors:
            raise self._errors.pop(0)
        return "done"


class Pauses:
    """A sleep that takes no time and remembers what it was asked for."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    async def __call__(self, seconds: float) -> None:
        self.asked.append(seconds)


async def test_a_call_that_succeeds_never_asks_for_the_policy() -> None:
    def policy() -> retries.AsyncRetrying:
        raise AssertionError("the policy costs CPU")

    assert await retry(Flaky(), policy) == "done"


async def test_the_database_is_waited_for_with_growing_pauses() -> None:
    call, pauses = Flaky(*[StoreUnavailable() for _ in range(7)]), Pauses()
    assert await retry(call, partial(retries.database, left=lambda: 60.0, sleep=pauses)) == "done"
    assert call.calls == 8
    assert pauses.asked == [0.05, 0.1, 0.2, 0.4, 0.8, 1.0, 1.0]


async def test_the_last_error_is_raised_when_no_time_is_left() -> None:
    left = iter([1.0, 1.0, 0.0])
    call = Flaky(*[StoreUnavailable(f"try {number}") for number in (1, 2, 3, 4)])
    with pytest.raises(StoreUnavailable, match="try 3"):
        await retry(call, partial(retries.database, left=lambda: next(left), sleep=Pauses()))
    assert call.calls == 3


async def test_other_errors_are_raised_at_once() -> None:
    call = Flaky(NotFound())
    with pytest.raises(NotFound):
        await retry(call, partial(retries.database, left=lambda: 60.0, sleep=Pauses()))
    assert call.calls == 1


async def test_a_cancellation_ends_the_retries() -> None:
    task = asyncio.create_task(retry(Flaky(StoreUnavailable()), partial(retries.database, left=lambda: 60.0)))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


async def test_probes_end_with_success_or_when_they_are_stopped() -> None:
    results, pauses = iter([False, False, True]), Pauses()

    async def probe() -> bool:
        return next(results)

    assert await retries.database_probe(stopped=lambda: False, sleep=pauses)(probe)
    assert pauses.asked == [0.1, 0.2]

    async def never() -> bool:
        return False

    assert await retries.database_probe(stopped=lambda: True, sleep=pauses)(never) is None


@pytest.mark.parametrize("stops_after", [1, 3])
async def test_a_subscription_is_made_again_until_it_is_stopped(
    stops_after: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "REDIS_PAUSE", 0.0)
    call = Flaky(*[OSError() for _ in range(9)])
    stopped: Callable[[], bool] = lambda: call.calls >= stops_after  # noqa: E731
    assert await retries.redis_subscription(faults=(OSError,), stopped=stopped)(call) is None
    assert call.calls == stops_after


def test_a_vllm_server_that_is_being_started_is_connected_to_again(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = [httpx.ConnectError("refused"), httpx.ConnectTimeout("late"), httpx.Response(200, json={"data": []})]

    def request(*_given: object, **_named: object) -> httpx.Response:
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        answer.request = httpx.Request("GET", "http://vllm.invalid/v1/models")
        return answer

    monkeypatch.setattr(httpx.Client, "request", request)
    monkeypatch.setattr(retries, "MANAGEMENT_FIRST", 0.0)
    server = Management("http://vllm.invalid/v1", None)
    assert server.models() == []
    answers.append(httpx.ReadError("it may have been carried out"))
    with pytest.raises(WorkerUnavailable):
        server.load("adapter", "/adapters/one")
    assert answers == []
    server.close()
