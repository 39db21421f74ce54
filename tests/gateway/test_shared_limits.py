"""Rate limits over two gateways of one service: one database, and the real engine behind them."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from app.core.pool.rates import RateLimits, RateReply, RateRequest
from app.gateway.http.admission import MOST_COUNTED_TOGETHER, Headers, RateLimiter
from app.gateway.http.api_keys import mint
from app.gateway.http.context import Rates
from app.process.wiring import Runtime
from tests.harness.in_process import ask, pool_text, running_service
from tests.harness.prepared_apps import lent_app
from tests.harness.waiting import PATIENCE_SECONDS, until
from tests.stubs import Hang, ProviderStub


@asynccontextmanager
async def gateways(
    folder: Path, stub: ProviderStub, **limits: int
) -> AsyncIterator[tuple[Sequence[Runtime], Sequence[httpx.AsyncClient]]]:
    """Two gateways with one limited key; the first is an engine too."""
    pool = pool_text(stub)
    async with running_service(folder, pool) as first, running_service(folder, pool, drives=False) as second:
        scopes = ["runs:write", "runs:read"]
        key, row = mint(first.gateway.pepper, tenant="acme", name="limited", scopes=scopes, now=0.0)
        assert await first.gateway.store.add_key(replace(row, **limits))
        clients = [_client(runtime, key) for runtime in (first, second)]
        async with clients[0], clients[1]:
            yield (first, second), clients


def _client(runtime: Runtime, key: str) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(lent_app(runtime.gateway), raise_app_exceptions=False)
    headers = {"authorization": f"Bearer {key}"}
    return httpx.AsyncClient(transport=transport, base_url="http://b", headers=headers, timeout=PATIENCE_SECONDS)


async def together(clients: Sequence[httpx.AsyncClient], each: int, **more: Any) -> list[httpx.Response]:
    return await asyncio.gather(*[ask(client, **more) for client in clients for _ in range(each)])


@pytest.mark.long
async def test_both_gateways_together_let_a_keys_requests_through(tmp_path: Path, stub: ProviderStub) -> None:
    async with gateways(tmp_path, stub, rpm=5) as (_, clients):
        replies = await together(clients, 4)
        passed = [reply for reply in replies if reply.status_code == 200]
        assert sorted(reply.headers["x-ratelimit-remaining-requests"] for reply in passed) == ["0", "1", "2", "3", "4"]
        assert {reply.status_code for reply in replies if reply not in passed} == {429}
        body = {"model": "baton-mini", "max_tokens": 5, "messages": [{"role": "user", "content": "Hi"}]}
        refused = [await clients[1].post("/v1/messages", json=body)]
        refused.append(await clients[1].post("/v1/responses", json={"model": "baton-mini", "input": "Hi"}))
    assert [reply.status_code for reply in refused] == [429, 429]
    assert [1 <= int(reply.headers["retry-after"]) <= 60 for reply in refused] == [True, True]
    assert refused[0].headers["anthropic-ratelimit-requests-remaining"] == "0"
    assert refused[1].headers["x-ratelimit-remaining-requests"] == "0"


@pytest.mark.long
async def test_a_burst_at_both_gateways_uses_no_more_than_the_tokens_of_a_minute(
    tmp_path: Path, stub: ProviderStub
) -> None:
    async with gateways(tmp_path, stub, tpm=700) as (_, clients):
        replies = await together(clients, 6, max_tokens=200)
        used = [reply.json()["usage"]["total_tokens"] for reply in replies if reply.status_code == 200]
        assert 1 <= len(used) <= 2
        last = await ask(clients[1], max_tokens=600)
    assert sum(used) <= 700
    assert last.status_code == 200, "what the runs have not used is there again"
    reserved = 16 * 2 + 14 + 600
    assert int(last.headers["x-ratelimit-remaining-tokens"]) == 700 - sum(used) - reserved


@pytest.mark.long
async def test_open_runs_of_a_gateway_that_is_gone_hold_their_places_until_the_journal_ends_them(
    tmp_path: Path, stub: ProviderStub
) -> None:
    stub.script("alpha", Hang())
    async with gateways(tmp_path, stub, concurrency=1) as ((engine, _), clients):
        body = {"model": "baton-mini", "input": "Hi", "background": True}
        reply = await clients[1].post("/v1/responses", json=body)
        assert reply.status_code == 200, "its reply is over, and its run is open"
        await stub.wait_for(1, "alpha")
        refused = await ask(clients[0])
        assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
        run = reply.headers["x-baton-run"]
        engine.runs.cancellations.ask(run, "caller")

        async def ended() -> bool:
            return (await engine.context.store.run(run)).ended_at is not None

        await until(ended)
        assert (await ask(clients[0])).status_code == 200


@pytest.mark.long
async def test_a_user_is_limited_by_either_of_the_names_that_requests_have_for_one(
    tmp_path: Path, stub: ProviderStub
) -> None:
    async with gateways(tmp_path, stub) as ((user, _), clients):
        limited = replace(user.gateway, rates=Rates(user=RateLimits(rpm=1)))
        transport = httpx.ASGITransport(lent_app(limited), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://b", headers=clients[0].headers) as client:
            user_fields = [{"safety_identifier": "ann"}, {"safety_identifier": "ann"}, {"user": "ann"}, {"user": "bob"}]
            replies = [await ask(client, **user) for user in user_fields]
    assert [reply.status_code for reply in replies] == [200, 429, 429, 200]


class Held:
    """Counts requests in a store once it is opened."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.opened = asyncio.Event()
        self.asked = 0

    async def count_requests(self, requests: Sequence[RateRequest], now: float) -> Sequence[RateReply]:
        self.asked += 1
        await self.opened.wait()
        replies: Sequence[RateReply] = await self._store.count_requests(requests, now)
        return replies


async def test_requests_whose_callers_leave_before_they_are_counted_use_nothing(
    tmp_path: Path, stub: ProviderStub
) -> None:
    async with gateways(tmp_path, stub) as ((first, _), _):
        store = Held(first.gateway.store)
        limiter = RateLimiter(replace(first.gateway, store=store))
        rate_request = RateRequest((("key:k", RateLimits(rpm=900)),))
        headers: Headers = []
        counts = [asyncio.create_task(limiter.count(rate_request, [])) for _ in range(2 * MOST_COUNTED_TOGETHER)]
        last = asyncio.create_task(limiter.count(rate_request, headers))
        await until(lambda: store.asked)
        for waiting in counts[MOST_COUNTED_TOGETHER:]:
            waiting.cancel()
        store.opened.set()
        await asyncio.gather(*counts, return_exceptions=True)
        await last
    assert dict(headers)[b"x-ratelimit-remaining-requests"] == str(900 - MOST_COUNTED_TOGETHER - 1).encode()


async def test_a_key_that_was_revoked_at_one_gateway_ends_at_the_other_within_five_seconds(
    tmp_path: Path, stub: ProviderStub
) -> None:
    async with gateways(tmp_path, stub, rpm=9) as ((first, second), clients):
        ticks = second.gateway.tick()
        headers = dict(clients[1].headers)
        late = replace(second.gateway, tick=lambda: ticks)
        transport = httpx.ASGITransport(lent_app(late), raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://b", headers=headers) as client:
            assert (await client.get("/v1/models")).status_code == 200
            (row,) = [row for row in await first.gateway.store.keys() if row.name == "limited"]
            assert await first.gateway.store.revoke_key(row.id, first.gateway.now())
            ticks += 5.0
            assert (await client.get("/v1/models")).status_code == 401
