"""Streams that stay open: they end with their key, and a key and a process have only so many."""

from collections.abc import AsyncIterator

import httpx
import pytest
from msgspec.structs import replace

from app.console.api import Api, ApiError, Session
from app.gateway.runs import open_streams
from app.process.wiring import Runtime
from app.store.protocol import Actor
from tests.harness.in_process import client_of, plan, script_answers
from tests.harness.prepared_apps import app_over
from tests.harness.waiting import until
from tests.stubs import Hang, ProviderStub

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


async def test_no_cache_keeps_a_reply_with_content(runtime: Runtime, client: httpx.AsyncClient) -> None:
    for path in ("/v1/me", "/v1/runs", "/v1/overview", "/v1/runs/run_none"):
        assert (await client.get(path)).headers["cache-control"] == "no-store", path
