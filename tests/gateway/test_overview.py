"""`GET /v1/overview`: whose figures it shows, what it says of what it hides, and what it leaves out."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from app.console.api import Api, Session
from app.core.pool.budgets import Budget
from app.engine.sealer import Sealer
from app.gateway.http.api_keys import mint
from app.gateway.openapi.overview_replies import Overview
from app.gateway.runs import overview, overview_route, stored_overview
from app.process.wiring import Runtime
from app.store.sqlkit.tables import LOG_TILES
from tests.harness.in_process import app_over, ask, client_of, finish, order, pool_text, running_service, script_answers
from tests.harness.waiting import PATIENCE_SECONDS, until
from tests.stubs import ProviderStub


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[Runtime]:
    async with ProviderStub() as stub, running_service(tmp_path, pool_text(stub)) as running:
        script_answers(stub)
        yield running


async def got(client: httpx.AsyncClient, **query: Any) -> Overview:
    reply = await client.get("/v1/overview", params=query)
    assert reply.status_code == 200, reply.text
    return Overview.model_validate(reply.json())


async def wide_key(runtime: Runtime) -> dict[str, str]:
    """The header of a key of all tenants with every scope."""
    key, row = mint(runtime.gateway.pepper, tenant="ops", name="ops", scopes=["admin"], now=0.0)
    assert await runtime.gateway.store.add_key(replace(row, all_tenants=True))
    return {"authorization": f"Bearer {key}"}


@pytest.mark.long
async def test_the_figures_are_of_the_runs_that_the_key_may_see(runtime: Runtime) -> None:
    await finish(await runtime.runs.start(order(runtime, "baton-ultra")))  # another tenant's
    await runtime.gateway.store.set_budget(Budget("acme", "tenant", "", "day", 5_000_000))
    async with client_of(runtime) as client:
        run = (await ask(client)).json()["baton"]["run"]
        await client.post(f"/v1/runs/{run}/feedback", json={"thumbs": "up"})
        ours = await got(client)
        everything = (await client.get("/v1/overview?period=hour", headers=await wide_key(runtime))).json()
        old = await got(client, until="2000000", period="month")
        foreign = await client.get("/v1/overview?tenant=other")
        listed = (await client.get("/v1/runs", params={"since": ours.buckets[-1].since})).json()["data"]
    assert (ours.total.runs, ours.total.success_rate, ours.seconds.count) == (1, 1.0, 1)
    assert ours.total.cost_usd == listed[0]["spent"]["usd"] > 0
    assert [bucket.runs for bucket in ours.buckets] == [0] * 23 + [1]
    assert [(tier.tier, tier.seconds.p50) for tier in ours.tiers] == [("baton-mini", ours.seconds.p50)]
    assert sum(worker.share for worker in ours.workers) == pytest.approx(1.0)
    assert [worker.pass_rate for worker in ours.workers if worker.rated_runs] == [1.0]
    assert set(ours.hidden) == {"budgets", "queue", "breakers", "conductors", "service"}
    assert ours.hidden["queue"] == overview_route.SHARED
    assert (old.total.runs, old.total.success_rate, old.seconds.p50) == (0, None, None)
    assert (foreign.status_code, foreign.json()["error"]["param"]) == (400, "tenant")
    wide = Overview.model_validate(everything)
    assert (wide.total.runs, wide.hidden, wide.queue and wide.queue.waiting) == (2, {}, 0)
    assert wide.budgets is not None
    assert (wide.budgets[0].tenant, wide.budgets[0].left_usd) == ("acme", pytest.approx(5.0 - ours.total.cost_usd))
    assert {breaker.state for breaker in wide.breakers or ()} == {"closed"}


async def test_what_is_left_out_is_said(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    async with client_of(runtime) as client:
        await ask(client)
        second = (await ask(client)).json()["baton"]["run"]
        monkeypatch.setattr(stored_overview, "MOST_RUNS", 1)
        figures = await got(client)
        row = (await client.get(f"/v1/runs/{second}")).json()
    assert (figures.total.runs, figures.runs_since) == (1, row["created_at"])


async def test_many_overviews_of_a_tenant_leave_room_for_another_one(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview_route, "MOST_WAITING", 4)
    release, make_figures = asyncio.Event(), stored_overview.figures

    async def slow(lists: Any, arguments: Any, *more: Any) -> Any:
        if arguments.tenant == "acme":
            await release.wait()
        return await make_figures(lists, arguments, *more)

    monkeypatch.setattr(stored_overview, "figures", slow)
    async with (
        client_of(runtime) as client,
        client_of(runtime, "another", tenant="other") as another,
        asyncio.TaskGroup() as group,
    ):
        flood = [group.create_task(client.get("/v1/overview?period=month")) for _ in range(6)]
        assert (await got(another)).total.runs == 0, "it waits for the month of another tenant"
        refused, _ = await asyncio.wait(flood, return_when=asyncio.FIRST_COMPLETED)
        release.set()
        await asyncio.wait(flood)
    assert refused.pop().result().json()["error"]["code"] == "overloaded"
    assert sorted(call.result().status_code for call in flood) == [200] * 4 + [503] * 2


async def test_streams_of_the_same_overview_share_its_making(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(overview_route, "REFRESH_SECONDS", 0.0)
    count, figures = [0], stored_overview.figures

    async def count_and_make(*more: Any) -> Any:
        count[0] += 1
        return await figures(*more)

    monkeypatch.setattr(stored_overview, "figures", count_and_make)
    async with client_of(runtime) as client, AsyncExitStack() as stack:
        session = Session((("authorization", client.headers["authorization"]),))
        api = Api(stack.enter_context(app_over(runtime.gateway)))
        streams = [await stack.enter_async_context(api.events(session, "/v1/overview/live")) for _ in range(8)]
        assert {json.loads((await anext(stream)).data)["total"]["runs"] for stream in streams} == {0}
        assert count == [1]
        await ask(client)
        for stream in streams:
            while json.loads((await anext(stream)).data or "{}").get("total", {}).get("ended") != 1:
                pass
        assert count[0] < 8


async def test_a_new_stream_of_an_overview_does_not_wait_for_the_next_making(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview_route, "REFRESH_SECONDS", 1_000.0)
    week, shared = {"period": "week"}, list[Any]()

    class Noted(overview_route._SharedOverview):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            shared.append(self)

    monkeypatch.setattr(overview_route, "_SharedOverview", Noted)
    async with client_of(runtime) as client, AsyncExitStack() as stack:
        session = Session((("authorization", client.headers["authorization"]),))
        api = Api(stack.enter_context(app_over(runtime.gateway)))
        first = await stack.enter_async_context(api.events(session, "/v1/overview/live", query=week))
        assert json.loads((await anext(first)).data)["total"]["runs"] == 0
        await ask(client)
        await until(lambda: shared[0]._making.locked())  # the first stream waits until it may be made again
        second = await stack.enter_async_context(api.events(session, "/v1/overview/live", query=week))
        async with asyncio.timeout(PATIENCE_SECONDS):
            assert json.loads((await anext(second)).data)["total"]["runs"] == 0


def test_percentiles_are_nearest_ranks() -> None:
    values = [float(n) for n in range(1, 101)]
    assert overview.percentiles(values) == {"count": 100, "p50": 50.0, "p95": 95.0, "p99": 99.0}
    assert overview.percentiles([3.0]) == {"count": 1, "p50": 3.0, "p95": 3.0, "p99": 3.0}


async def test_the_newest_checkpoint_is_checked_against_an_earlier_one(runtime: Runtime) -> None:
    async with client_of(runtime) as client:
        assert (await client.get("/v1/log/verify")).status_code == 404
        await ask(client)
        await Sealer(runtime.context, ()).look(asyncio.Event())
        first = (await client.get("/v1/log/verify")).json()
        assert (first["valid"], first["consistent"], len(first["signed_by"])) == (True, None, 1)
        await ask(client)
        await Sealer(runtime.context, ()).look(asyncio.Event())
        earlier = {"size": first["size"], "root": first["root"]}
        second = (await client.get("/v1/log/verify", params=earlier)).json()
        assert (second["valid"], second["consistent"]) == (True, True)
        assert second["size"] > first["size"]
        for wrong in ({"root": "0" * 64}, {"size": 10**6}):
            reply = (await client.get("/v1/log/verify", params=earlier | wrong)).json()
            assert (reply["valid"], reply["consistent"]) == (False, False), wrong
            assert reply["faults"] == ["The earlier log is not the beginning of this one."]
        for given, missing in (("size", "root"), ("root", "size")):
            refused = await client.get("/v1/log/verify", params={given: earlier[given]})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, missing)
        tile = (await client.get(f"/v1/log/tile/0/000.p/{second['size']}")).content
        await runtime.gateway.store._write(
            lambda conn: conn.execute(LOG_TILES.update().values(body=tile[32:] + tile[:32]))
        )
        assert (await client.get("/v1/log/verify")).json()["valid"] is False
