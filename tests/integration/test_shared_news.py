"""A gateway without a dispatcher of its own learns from the journals of its runs whom the dispatchers have given up."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.core.pool.breaker import IN_A_ROW
from app.process.config import configure
from app.process.wiring import House, house
from app.store.sqlkit.migrate import migrate
from tests.harness.in_process import events, finish, order, pool_text
from tests.harness.waiting import until
from tests.stubs import Fail, ProviderStub

pytestmark = pytest.mark.integration


@pytest.fixture
async def stub() -> AsyncIterator[ProviderStub]:
    """The providers."""
    async with ProviderStub() as running:
        yield running


@pytest.fixture
async def pair(
    stub: ProviderStub, tmp_path: Path, postgres_url: str, redis_url: str
) -> AsyncIterator[tuple[House, House]]:
    """A gateway's drivers and a dispatcher, each with a house of its own."""
    await asyncio.to_thread(migrate, postgres_url)
    (tmp_path / "pool.toml").write_text(pool_text(stub))
    loaded = configure(
        {
            "BATON_POOL": str(tmp_path / "pool.toml"),
            "BATON_DATABASE_URL": postgres_url,
            "BATON_REDIS_URL": redis_url,
            "BATON_PEPPER": "p" * 32,
        }
    )
    async with house(loaded) as gateway, house(loaded) as dispatcher, asyncio.TaskGroup() as group:
        drivers_end, steps_end = asyncio.Event(), asyncio.Event()
        await asyncio.gather(gateway.clock.look(), dispatcher.clock.look())
        group.create_task(gateway.drivers.run(drivers_end))
        group.create_task(dispatcher.dispatcher.run(steps_end))
        await until(lambda: gateway.drivers._group is not None)
        try:
            yield gateway, dispatcher
        finally:
            drivers_end.set()
            steps_end.set()


async def test_a_gateway_plans_without_whom_its_dispatchers_have_given_up(
    stub: ProviderStub, pair: tuple[House, House]
) -> None:
    gateway, dispatcher = pair
    stub.always("alpha", Fail(status=503))
    outcomes = [await finish(await gateway.runs.start(order(gateway, "baton-mini"))) for _ in range(IN_A_ROW)]
    assert {outcome.ended.answer for outcome in outcomes} == {"Hello there."}
    for one in (gateway, dispatcher):
        assert one.means.telemetry.registry.get_sample_value("baton_breaker_state", {"worker": "alpha"}) == 2
    last = await finish(await gateway.runs.start(order(gateway, "baton-mini")))
    admitted = (await events(gateway, last.ended.state.run))[0].body
    assert admitted["excluded"] == {"alpha": "ejected: failing"}
