"""An engine leaves out a worker that calls have shown to fail, and the journal says so."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.core.pool.breaker import IN_A_ROW
from app.core.run.events import Kind
from app.process.config import configure
from app.process.wiring import Runtime, open_runtime
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
) -> AsyncIterator[tuple[Runtime, Runtime]]:
    """A gateway that drives nothing, and an engine, each with a house of its own."""
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
    async with open_runtime(loaded) as gateway, open_runtime(loaded) as engine, asyncio.TaskGroup() as group:
        ending = asyncio.Event()
        gateway.runs.engine = None
        await asyncio.gather(gateway.clock.look(), engine.clock.look())
        group.create_task(gateway.runs.run(ending))
        group.create_task(engine.drivers.run(ending))
        group.create_task(engine.dispatcher.run(ending))
        await until(lambda: gateway.runs.is_open and engine.drivers.has_room)
        try:
            yield gateway, engine
        finally:
            ending.set()


async def test_an_engine_plans_without_a_worker_that_it_has_given_up(
    stub: ProviderStub, pair: tuple[Runtime, Runtime]
) -> None:
    gateway, engine = pair
    stub.always("alpha", Fail(status=503))
    outcomes = [await finish(await gateway.runs.start(order(gateway, "baton-mini"))) for _ in range(IN_A_ROW)]
    assert {outcome.ended.answer for outcome in outcomes} == {"Hello there."}
    breaker = engine.context.telemetry.registry.get_sample_value("baton_breaker_state", {"worker": "alpha"})
    assert breaker == 2
    last = await finish(await gateway.runs.start(order(gateway, "baton-mini")))
    journal = await events(gateway, last.ended.state.run)
    opened = next(event.body for event in journal if event.kind is Kind.PLAN_OPENED)
    assert opened["ejected"] == {"alpha": "failing"}
