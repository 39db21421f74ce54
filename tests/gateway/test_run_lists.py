"""Lists of runs: pages forwards and back, counts, details, and a page that is followed."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest
from msgspec.structs import replace

from app.console.api import Api, Session
from app.core.run.events import Kind
from app.gateway.http.api_keys import mint
from app.gateway.runs import run_lists
from app.process.wiring import Runtime
from app.store.protocol import Projection
from tests.conformance.entries import admission_entry
from tests.harness.in_process import app_over, client_of, pool_text, running_service
from tests.harness.raw_facts import Raw
from tests.harness.waiting import PATIENCE_SECONDS
from tests.stubs import ProviderStub


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[Runtime]:
    """A gateway without an engine, so that runs stay as a test has written them."""
    pool = pool_text(ProviderStub())
    async with running_service(tmp_path, pool, drives=False, audits=False) as running:
        yield running


async def begin(runtime: Runtime, *names: str, tenant: str = "acme", **more: Any) -> None:
    for name in names:
        entry = admission_entry(name, at=float(name.rpartition("_")[2]), tenant=tenant, **more)
        await runtime.gateway.store.append(entry)


async def end(runtime: Runtime, name: str, state: Kind = Kind.FAILED) -> None:
    row = Projection(state=state.value.removeprefix("run."), error="timeout")
    body = {"step": None, "error": "timeout"}
    entry = replace(admission_entry(name), new=None, epoch=1, row=row, events=(Raw(state, body),))
    await runtime.gateway.store.append(entry)


async def list_runs(client: httpx.AsyncClient, **query: Any) -> dict[str, Any]:
    reply = await client.get("/v1/runs", params=query)
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


def ids(page: dict[str, Any]) -> list[str]:
    return [run["id"] for run in page["data"]]


async def test_pages_lead_forwards_and_back_with_counts(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    await begin(runtime, *[f"run_{n}" for n in range(10, 17)])
    await begin(runtime, "run_99", tenant="other")
    async with client_of(runtime) as client:
        first = await list_runs(client, limit=3, include="count")
        assert (ids(first), first["previous"]) == (["run_16", "run_15", "run_14"], None)
        assert first["count"] == {"total": 7, "in_front": 0, "most": 10_000}
        second = await list_runs(client, limit=3, include="count", after=first["next"])
        last = await list_runs(client, limit=3, include="count", after=second["next"])
        assert (ids(last), last["next"], last["count"]["in_front"]) == (["run_10"], None, 6)
        back = await list_runs(client, limit=3, include="count", before=last["previous"])
        assert (ids(back), back["count"]) == (ids(second), second["count"])
        top = await list_runs(client, limit=3, include="count", before=back["previous"])
        assert (ids(top), top["previous"], top["next"]) == (ids(first), None, first["next"])
        assert ids(await list_runs(client, limit=2, order="asc", before="run_14")) == ["run_12", "run_13"]
        monkeypatch.setattr(run_lists, "MOST_COUNTED", 4)
        bounded = await list_runs(client, limit=3, include="count", after=second["next"])
        assert bounded["count"] == {"total": None, "in_front": None, "most": 4}
        both = await client.get("/v1/runs", params={"after": "run_14", "before": "run_14"})
        assert (both.status_code, both.json()["error"]["param"]) == (400, "before")
        for wrong, param in (({"queue": "untaken"}, "queue"), ({"rated_until": 5}, "rated_until")):
            refused = await client.get("/v1/runs", params=wrong)
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, param)
        assert (await list_runs(client, rated="good"))["data"] == []
        assert {run["key_name"] for run in (await list_runs(client, include="key_name"))["data"]} == {None}
        assert "count" not in await list_runs(client)


async def test_a_page_that_is_followed_sends_what_enters_changes_and_leaves(runtime: Runtime) -> None:
    await begin(runtime, "run_10", "run_11")
    await begin(runtime, "run_12", tenant="other")
    async with client_of(runtime) as client:
        query = {"limit": "2", "state": "admitted"}
        session = Session((("authorization", client.headers["authorization"]),))
        with app_over(runtime.gateway) as app:
            async with Api(app).events(session, "/v1/runs/live", query=query) as events:
                page = await anext(events)
                assert (page.name, ids(orjson.loads(page.data))) == ("page", ["run_11", "run_10"])
                await begin(runtime, "run_13", tenant="other")
                await begin(runtime, "run_14")
                got = [await anext(events), await anext(events)]
                assert [(event.name, orjson.loads(event.data)["id"]) for event in got] == [
                    ("run.left", "run_10"),
                    ("run", "run_14"),
                ]
                await end(runtime, "run_11")
                got = [await anext(events), await anext(events)]
                assert [orjson.loads(event.data)["id"] for event in got] == ["run_11", "run_10"]


async def test_who_follows_the_queue_sees_what_comes_to_wait_later(runtime: Runtime) -> None:
    key, row = mint(runtime.gateway.pepper, tenant="acme", name="operator", scopes=["admin"], now=0.0)
    assert await runtime.gateway.store.add_key(replace(row, all_tenants=True))
    session = Session((("authorization", f"Bearer {key}"),))
    async with client_of(runtime) as client:
        with app_over(runtime.gateway) as app:
            async with Api(app).events(session, "/v1/runs/live", query={"queue": "untaken"}) as events:
                assert ids(orjson.loads((await anext(events)).data)) == []
                body = {"model": "baton-mini", "input": "Hi", "background": True}
                queued = await client.post("/v1/responses", json=body)
                async with asyncio.timeout(PATIENCE_SECONDS):
                    event = await anext(event async for event in events if event.name)
                assert (event.name, orjson.loads(event.data)["id"]) == ("run", queued.headers["x-baton-run"])


async def test_a_stream_of_a_list_needs_the_scope(runtime: Runtime) -> None:
    async with client_of(runtime) as client:
        assert (await client.get("/v1/runs/live?tenant=other")).json()["error"]["param"] == "tenant"
        assert (await client.head("/v1/runs/live")).headers["content-type"].startswith("text/event-stream")
        assert (await client.get("/v1/runs/live", headers={"authorization": "Bearer no"})).status_code == 401


async def test_streams_of_the_pages_on_both_sides_of_a_run_are_two(runtime: Runtime) -> None:
    await begin(runtime, "run_10", "run_11", "run_12")
    async with client_of(runtime) as client:
        session = Session((("authorization", client.headers["authorization"]),))
        with app_over(runtime.gateway) as app:
            path, api = "/v1/runs/live", Api(app)
            async with (
                api.events(session, path, query={"after": "run_11"}) as behind,
                api.events(session, path, query={"before": "run_11"}) as in_front,
            ):
                assert ids(orjson.loads((await anext(behind)).data)) == ["run_10"]
                assert ids(orjson.loads((await anext(in_front)).data)) == ["run_12"]
