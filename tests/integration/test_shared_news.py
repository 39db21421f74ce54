"""Engines leave a worker that fails out of their plans, and the journal says so; gateways choose by policy alone."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.core.pool import breaker
from app.core.pool.breaker import FAILURES_IN_A_ROW
from app.core.run.events import Kind
from app.process.config import configure
from app.process.wiring import Runtime, open_runtime
from tests.harness.in_process import client_of, events, finish, order, pool_text, running_service
from tests.harness.waiting import PATIENCE_SECONDS, until
from tests.stubs import Fail, ProviderStub

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("patient_redis")]


@pytest.fixture
async def stub() -> AsyncIterator[ProviderStub]:
    """The providers."""
    async with ProviderStub() as running:
        yield running


@pytest.fixture
async def pair(
    stub: ProviderStub, tmp_path: Path, migrated_postgres_url: str, redis_url: str
) -> AsyncIterator[tuple[Runtime, Runtime]]:
    """A gateway that drives nothing, and an engine, each with a house of its own."""
    (tmp_path / "pool.toml").write_text(pool_text(stub))
    configuration = configure(
        {
            "BATON_POOL": str(tmp_path / "pool.toml"),
            "BATON_DATABASE_URL": migrated_postgres_url,
            "BATON_REDIS_URL": redis_url,
            "BATON_PEPPER": "p" * 32,
        }
    )
    async with (
        open_runtime(configuration) as gateway,
        open_runtime(configuration) as engine,
        asyncio.TaskGroup() as group,
    ):
        ending = asyncio.Event()
        gateway.runs.engine = None
        await asyncio.gather(gateway.clock.read(), engine.clock.read())
        group.create_task(gateway.runs.run(ending))
        group.create_task(engine.drivers.run(ending))
        group.create_task(engine.dispatcher.run(ending))
        await until(lambda: gateway.runs.is_open and engine.drivers.has_room)
        try:
            yield gateway, engine
        finally:
            ending.set()


def level(runtime: Runtime, worker: str) -> float | None:
    """The breaker's state as `/metrics` has it: 2 for ejected, 1 when that is over."""
    return runtime.context.telemetry.registry.get_sample_value("baton_breaker_state", {"worker": worker})


async def test_an_engine_plans_without_a_worker_that_it_has_given_up(
    stub: ProviderStub, pair: tuple[Runtime, Runtime], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SHORTEST_EJECTION_SECONDS", "FIRST_CEILING_SECONDS"):
        monkeypatch.setattr(breaker, name, PATIENCE_SECONDS)  # on a slow machine it would be over before the test is
    gateway, engine = pair
    stub.always("alpha", Fail(status=503))
    outcomes = [await finish(await gateway.runs.start(order(gateway, "baton-mini"))) for _ in range(FAILURES_IN_A_ROW)]
    assert {outcome.ended.answer for outcome in outcomes} == {"Hello there."}
    assert level(engine, "alpha") == 2
    last = await finish(await gateway.runs.start(order(gateway, "baton-mini")))
    journal = await events(gateway, last.ended.state.run)
    assert journal[0].body["pool"] == ["alpha", "beta", "gamma"], "a gateway judges nobody's health"
    assert journal[0].body["excluded"] == {}
    opened = next(event.body for event in journal if event.kind is Kind.PLAN_OPENED)
    assert opened["ejected"] == {"alpha": "failing"}


async def test_a_gateway_is_ready_whatever_becomes_of_workers_and_shows_none_of_its_own_as_ejected(
    stub: ProviderStub, pair: tuple[Runtime, Runtime]
) -> None:
    gateway, engine = pair
    stub.always("*", Fail(status=401))
    await finish(await gateway.runs.start(order(gateway, "baton-mini")))
    async with client_of(gateway) as client:
        ready, metrics = await client.get("/readyz"), await client.get("/metrics")
    assert (ready.status_code, ready.json()["checks"]["conductor"]) == (200, "ok")
    for worker in ("alpha", "beta", "gamma"):
        assert f'baton_breaker_state{{worker="{worker}"}} 0.0' in metrics.text
    for pool in ("database", "redis_commands", "redis_reads"):
        assert f'baton_pool_connections_in_use{{pool="{pool}"}}' in metrics.text
        assert level(engine, worker)


async def test_an_engine_learns_of_failures_from_calls_that_another_one_makes_for_its_runs(
    stub: ProviderStub, tmp_path: Path, redis_url: str
) -> None:
    stub.always("alpha", Fail(status=401))
    settings = {"BATON_REDIS_URL": redis_url}
    async with (
        running_service(tmp_path, pool_text(stub), settings, dispatches=False) as driving,
        running_service(tmp_path, pool_text(stub), settings) as executing,
    ):
        await until(lambda: executing.drivers.has_room and driving.context.queue.healthy)
        outcome = await finish(await driving.runs.start(order(driving, "baton-mini")))
        assert outcome.ended.answer == "Hello there."
        for engine in (driving, executing):
            assert level(engine, "alpha")
            assert not level(engine, "beta")
    assert len(stub.requests_for("alpha")) == 1
