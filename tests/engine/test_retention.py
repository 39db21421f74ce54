"""Engines erase the content of runs that have ended once its time is over."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from math import inf
from pathlib import Path

import httpx
import pytest
from sqlalchemy import text

from app.core.run.retention_classes import RetentionClass, RunClass
from app.engine import retention
from app.engine.retention import ContentRetention
from app.process.wiring import Runtime
from app.store.protocol import Hold
from app.store.sql import SqlStore
from tests.harness.callers import add_key, client_over_socket
from tests.harness.in_process import pool_text, running_service
from tests.harness.waiting import until
from tests.stubs import Hang, ProviderStub

MOMENT_SECONDS = 0.001
MONTH_SECONDS = 30 * 86_400.0


@asynccontextmanager
async def with_key(runtime: Runtime) -> AsyncIterator[httpx.AsyncClient]:
    async with client_over_socket(runtime, await add_key(runtime)) as client:
        yield client


async def ask(client: httpx.AsyncClient, **more: object) -> str:
    """Begin a run, and return its id."""
    reply = await client.post("/v1/responses", json={"model": "baton-mini", "input": "hello", **more})
    return str(reply.json()["id"]).removeprefix("resp_")


async def has_ended(runtime: Runtime, run: str) -> bool:
    return (await runtime.context.store.run(run)).ended_at is not None


async def is_erased(runtime: Runtime, run: str) -> bool:
    return (await runtime.context.store.run(run)).erased


@pytest.mark.long
async def test_content_is_erased_when_its_run_has_ended_and_its_time_is_over(
    stub: ProviderStub, tmp_path: Path
) -> None:
    async with running_service(tmp_path, pool_text(stub)) as runtime, with_key(runtime) as client:
        first, second = await ask(client), await ask(client)
        stub.always("*", Hang())
        going_on = await ask(client, background=True)
        erasing = ContentRetention(runtime.context, seconds=MOMENT_SECONDS)
        await erasing.look(asyncio.Event())
        assert [await is_erased(runtime, run) for run in (first, second, going_on)] == [True, True, False]
        assert runtime.context.telemetry.registry.get_sample_value("baton_contents_erased_total") == 2
        await client.post(f"/v1/runs/{going_on}/cancel")
        await until(lambda: has_ended(runtime, going_on))
        await erasing.look(asyncio.Event())
        assert await is_erased(runtime, going_on)


@pytest.mark.long
async def test_runs_under_a_legal_hold_are_passed_over_until_it_is_released(stub: ProviderStub, tmp_path: Path) -> None:
    async with running_service(tmp_path, pool_text(stub)) as runtime, with_key(runtime) as client:
        store = runtime.context.store
        run_under_hold, free = await ask(client), await ask(client)
        await store.place_hold(Hold("hold_1", "run", run_under_hold, "", "case 12", placed_at=1.0, placed_by=""))
        erasing = ContentRetention(runtime.context, seconds=MOMENT_SECONDS)
        for _ in range(2):
            await erasing.look(asyncio.Event())
            assert [await is_erased(runtime, run) for run in (run_under_hold, free)] == [False, True]
        reply = await client.delete(f"/v1/runs/{run_under_hold}")
        assert (reply.status_code, reply.json()["error"]["code"]) == (409, "legal_hold")
        assert "hold_1" in reply.json()["error"]["message"]
        assert (await client.delete(f"/v1/responses/resp_{run_under_hold}")).status_code == 409
        await store.release_hold("hold_1", 2.0)
        await erasing.look(asyncio.Event())
        assert await is_erased(runtime, run_under_hold)


async def test_content_whose_erasure_a_failover_has_lost_is_erased_again(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retention, "PAGE_RUNS", 1)
    async with running_service(tmp_path, pool_text(stub)) as runtime, with_key(runtime) as client:
        store = runtime.context.store
        first, second = await ask(client), await ask(client)
        erasing = ContentRetention(runtime.context, seconds=MOMENT_SECONDS)
        await erasing.look(asyncio.Event())
        lost = "UPDATE runs SET salt = 'x', erased_at = NULL, erased_by = NULL WHERE id = :id"
        await store._write(lambda conn: conn.execute(text(lost), {"id": first}))  # type: ignore[attr-defined]
        monkeypatch.setattr(SqlStore, "server_changes", 1)
        await erasing.look(asyncio.Event())
        assert [await is_erased(runtime, run) for run in (first, second)] == [True, True]


async def test_the_class_of_a_run_says_when_its_content_is_erased(stub: ProviderStub, tmp_path: Path) -> None:
    classes = [
        RetentionClass(RunClass(tier="baton-ultra"), content=inf),
        RetentionClass(RunClass(tier="baton-mini"), content=MOMENT_SECONDS),
    ]
    async with running_service(tmp_path, pool_text(stub)) as runtime, with_key(runtime) as client:
        run = await ask(client)
        await ContentRetention(runtime.context, seconds=None, classes=classes).look(asyncio.Event())
        assert await is_erased(runtime, run)


@pytest.mark.parametrize(("seconds", "another_engine"), [(None, False), (MONTH_SECONDS, False), (MOMENT_SECONDS, True)])
async def test_content_stays_while_its_time_is_not_over_and_where_another_engine_works(
    stub: ProviderStub, tmp_path: Path, seconds: float | None, another_engine: bool
) -> None:
    async with running_service(tmp_path, pool_text(stub)) as runtime:
        async with with_key(runtime) as client:
            run = await ask(client)
        if another_engine:
            await ContentRetention(runtime.context, seconds=MOMENT_SECONDS).look(asyncio.Event())
            async with with_key(runtime) as client:
                run = await ask(client)
        await ContentRetention(runtime.context, seconds=seconds).look(asyncio.Event())
        assert not await is_erased(runtime, run)


async def test_an_engine_looks_when_it_starts_and_stops_at_once(stub: ProviderStub, tmp_path: Path) -> None:
    async with running_service(tmp_path, pool_text(stub)) as runtime:
        async with with_key(runtime) as client:
            run = await ask(client)
        stopping = asyncio.Event()
        async with asyncio.TaskGroup() as group:
            group.create_task(ContentRetention(runtime.context, seconds=MOMENT_SECONDS).run(stopping))
            await until(lambda: is_erased(runtime, run))
            stopping.set()
