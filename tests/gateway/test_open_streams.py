"""Streams that stay open: they end with their key, and a key and a process have only so many."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any, cast

import httpx
import pytest
from msgspec.structs import replace

from app.console.api import Api, ApiError, Session
from app.errors import StoreUnavailable
from app.gateway.runs import open_streams, overview_route
from app.process.wiring import Runtime
from app.store.protocol import Actor
from app.store.sql import SqlStore
from tests.harness.in_process import client_of, plan, script_answers
from tests.harness.prepared_apps import app_over
from tests.harness.waiting import PATIENCE_SECONDS, assert_stays, until
from tests.stubs import Hang, ProviderStub, Reply

PLAN = plan(("alpha", "Answer it", ["user"]))


@pytest.fixture
async def paths(stub: ProviderStub, client: httpx.AsyncClient) -> AsyncIterator[tuple[str, str]]:
    """The streams of the list, and of the journal of a run that goes on."""
    script_answers(stub)
    stub.always("alpha", Hang())
    order = {"model": "baton-mini", "input": "2 + 2?", "background": True, "baton": {"plan": PLAN}}
    run = (await client.post("/v1/responses", json=order)).json()["id"].removeprefix("resp_")
    await until(lambda: bool(stub.requests))
    yield "/v1/runs/live", f"/v1/runs/{run}/events/stream"
    await client.post(f"/v1/runs/{run}/cancel")


async def test_a_stream_ends_with_its_key_though_nothing_else_happens(
    runtime: Runtime, client: httpx.AsyncClient, paths: tuple[str, str]
) -> None:
    key, context = client.headers["authorization"], replace(runtime.gateway, key_ttl=0.0)
    session = Session((("authorization", key),))
    with app_over(context) as app:
        api = Api(app)
        async with api.events(session, paths[0]) as listed, api.events(session, paths[1]) as journal:
            assert (await anext(listed)).data
            assert (await anext(journal)).data
            await context.store.revoke_key(key.split("_")[1], context.now(), by=Actor("test", "command"))
            assert not [event async for event in listed if event.name == "page"]
            async for event in journal:
                assert event.data


@pytest.mark.long
async def test_a_key_and_a_process_have_a_bounded_number_of_streams(
    runtime: Runtime, client: httpx.AsyncClient, paths: tuple[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(open_streams, "MOST_OF_KEY", 2)
    monkeypatch.setattr(open_streams, "MOST", 3)
    async with client_of(runtime, "another") as another:
        first, second = (
            Session((("authorization", http_client.headers["authorization"]),)) for http_client in (client, another)
        )
        with app_over(runtime.gateway) as app:
            api = Api(app)
            async with api.events(first, paths[0]) as first_events, api.events(first, paths[1]) as second_events:
                assert (await anext(first_events)).data
                assert (await anext(second_events)).data
                for path in paths:
                    async with api.events(first, path) as three:
                        with pytest.raises(ApiError) as refused:
                            await anext(three)
                        assert (refused.value.status, refused.value.code) == (429, "rate_limit_exceeded")
                        assert refused.value.retry_after is not None
                async with (
                    api.events(second, paths[0]) as three,
                    api.events(second, paths[0]) as four,
                ):
                    assert (await anext(three)).data
                    with pytest.raises(ApiError) as refused:
                        await anext(four)
                    assert (refused.value.status, refused.value.code) == (503, "overloaded")
            async with api.events(first, paths[0]) as again:
                assert (await anext(again)).data


@pytest.mark.parametrize("path", ["/v1/runs/live", "/v1/overview/live", "/v1/runs/{run}/events/stream"])
async def test_while_the_database_is_away_streams_pause_between_their_readings(
    runtime: Runtime, client: httpx.AsyncClient, stub: ProviderStub, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    """It goes away after a look that has found something new, and before that is read."""
    monkeypatch.setattr(overview_route, "REFRESH_SECONDS", 0.0)
    monkeypatch.setattr(overview_route, "STALE_SECONDS", 0.0)
    stub.script("alpha", Reply(header_delay=0.5))
    order = {"model": "baton-mini", "input": "2 + 2?", "background": True, "baton": {"plan": PLAN}}
    run = (await client.post("/v1/responses", json=order)).json()["id"].removeprefix("resp_")
    store, tries = cast(SqlStore, runtime.context.store), 0

    def make_refused(read: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
        async def refuse_callers(tenant: str | None, *more: Any, **named: Any) -> Any:
            nonlocal tries
            if tenant is None:
                return await read(None, *more, **named)
            tries += 1
            await asyncio.sleep(0)
            raise StoreUnavailable

        return refuse_callers

    session = Session((("authorization", client.headers["authorization"]),))
    query = {"period": "hour"} if "overview" in path else {}
    with app_over(runtime.gateway) as app:
        async with Api(app).events(session, path.format(run=run), query=query) as events:
            assert (await anext(events)).data
            with monkeypatch.context() as away:
                away.setattr(store, "read_for", make_refused(store.read_for))
                away.setattr(store, "journal_of", make_refused(store.journal_of))
                await until(lambda: tries > 0)
                await assert_stays(lambda: tries < 5, seconds=open_streams.AWAY_SECONDS / 2)
            async with asyncio.timeout(PATIENCE_SECONDS):
                assert (await anext(event async for event in events if event.data)).data


async def test_no_cache_keeps_a_reply_with_content(runtime: Runtime, client: httpx.AsyncClient) -> None:
    for path in ("/v1/me", "/v1/runs", "/v1/overview", "/v1/runs/run_none"):
        assert (await client.get(path)).headers["cache-control"] == "no-store", path
