"""A run that has ended leaves nothing behind that only the garbage collector would find."""

import gc
from collections.abc import Iterator
from weakref import ref

import httpx
import pytest
from starlette.requests import Request

from app.engine.calls.attempt import Attempt
from app.engine.commit.run_writer import RunWriter
from app.engine.delivery.messages import TurnEnd
from app.engine.runs.driver import Driver
from app.process.wiring import Runtime
from tests.harness.in_process import finish, order, plan, plan_text
from tests.harness.stand_ins import chat_body
from tests.harness.waiting import until
from tests.stubs import Drop, Fail, Hang, ProviderStub, Reply, Truncate


@pytest.fixture
def uncollected() -> Iterator[None]:
    """No collector."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


async def is_freed(runtime: Runtime, **changes: object) -> bool:
    """Return True if the driver of such a run is freed soon after its end."""
    followed_run = await runtime.runs.start(order(runtime, "baton-ultra", **changes))
    driver: ref[Driver] = ref(runtime.drivers.driver_of(followed_run.run))  # type: ignore[arg-type]
    assert driver() is not None
    await finish(followed_run)
    del followed_run
    return await until(lambda: driver() is None, what="the driver is freed")


@pytest.mark.long
async def test_a_driver_is_freed_with_its_run(runtime: Runtime, uncollected: None) -> None:
    steps = plan(("alpha", "one", ["user"]), ("beta", "two", ["user", 0]))
    assert await is_freed(runtime, plan=steps)
    assert await is_freed(runtime, plan=steps, streams=True)


async def test_a_driver_that_asked_a_conductor_is_freed_with_its_run(
    stub: ProviderStub, runtime: Runtime, uncollected: None
) -> None:
    stub.script("planner", Reply(chunks=(plan_text((0, "Do it.", ["user"])),)))
    assert await is_freed(runtime)


async def test_a_driver_is_freed_after_failures(stub: ProviderStub, runtime: Runtime, uncollected: None) -> None:
    stub.always("*", Fail(status=400))
    assert await is_freed(runtime, plan=plan(("alpha", "one", ["user"])))


BEHAVIOURS = {
    "answers": Reply(),
    "refuses": Fail(status=400),
    "hangs up": Drop(),
    "breaks off": Reply(fault=Truncate(after=1)),
}


@pytest.mark.parametrize("tier", ["baton-mini", "baton-ultra"])
@pytest.mark.parametrize("behaviour", BEHAVIOURS)
async def test_what_was_sent_to_a_worker_is_freed_with_its_run(
    stub: ProviderStub, runtime: Runtime, uncollected: None, behaviour: str, tier: str
) -> None:
    """A request has the whole conversation in it, and the collector does not count the size of what it would free."""
    stub.always("*", BEHAVIOURS[behaviour])

    for streams in (False, True):
        await finish(await runtime.runs.start(order(runtime, tier, streams=streams)))
    assert stub.requests
    await until(lambda: not instances(httpx.Request, httpx.Response), what="the requests are freed")


@pytest.mark.parametrize("tier", ["baton-mini", "baton-ultra"])
async def test_a_run_that_is_cancelled_while_a_worker_is_silent_is_freed(
    stub: ProviderStub, runtime: Runtime, uncollected: None, tier: str
) -> None:
    """On the first tier a step is cancelled, on the second one a plan."""
    stub.always("*", Hang())
    followed_run = await runtime.runs.start(order(runtime, tier))
    await stub.wait_for(1)
    runtime.runs.cancellations.ask(followed_run.run, "client")
    await finish(followed_run)
    del followed_run
    await until(lambda: not instances(Attempt, RunWriter, httpx.Request), what="the run is freed")


async def test_a_request_whose_run_failed_is_freed(
    stub: ProviderStub, runtime: Runtime, client: httpx.AsyncClient, uncollected: None
) -> None:
    stub.always("*", Fail(status=400))
    reply = await client.post("/v1/chat/completions", json=chat_body())
    assert reply.status_code == 400
    await until(lambda: not instances(TurnEnd, Request), what="the request is freed")


def instances(*classes: type) -> list[object]:
    """Return the objects of these classes that are in memory."""
    return [found for found in gc.get_objects() if type(found) in classes]
