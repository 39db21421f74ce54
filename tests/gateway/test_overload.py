"""More than the gateway can take: it says so at once, reads nothing it need not, and what runs goes on."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from app.engine.delivery.messages import CallerMessage, Mailbox
from app.engine.runs.admission import Order
from app.errors import StoreUnavailable
from app.gateway.http.callers import MOST_LOOKUPS
from app.gateway.http.context import Bounds, Rates
from app.store.protocol import KeyRow
from tests.harness.stand_ins import SECRET, GatewayStandIn, chat_body, turn_end
from tests.harness.waiting import let_others_run, until

BEGINS = ("/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses")


class Busy(GatewayStandIn):
    """A gateway of a few places, all of them taken until `done` is set."""

    def __init__(self, running: int = 3, **changes: Any) -> None:
        super().__init__(rates=Rates(running=running), **changes)
        self.done = asyncio.Event()
        self.runs.script = self._wait

    async def _wait(self, _order: Order, run: str, line: Mailbox[CallerMessage]) -> None:
        await self.done.wait()
        line.put(turn_end(run))


@pytest.fixture
async def busy() -> AsyncIterator[Busy]:
    gateway = Busy()
    key = gateway.add_key()
    async with gateway.client(key) as client, asyncio.TaskGroup() as group:
        running = [group.create_task(client.post("/v1/chat/completions", json=chat_body())) for _ in range(3)]
        await until(lambda: len(gateway.runs.orders) == 3)
        try:
            yield gateway
        finally:
            gateway.done.set()
            assert [(await call).status_code for call in running] == [200] * 3


async def fail_if_read() -> AsyncIterator[bytes]:
    """A body that nobody should ask for."""
    pytest.fail("the body was read")
    yield b""


@pytest.mark.parametrize("route", BEGINS)
async def test_a_full_gateway_turns_away_before_it_reads_or_looks_up_anything(busy: Busy, route: str) -> None:
    looked_up = busy.store.lookups
    async with busy.client(f"bt_unheard_{SECRET}") as client:
        reply = await client.post(route, content=fail_if_read(), headers={"content-type": "application/json"})
    assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
    assert "overloaded" in reply.text
    assert busy.store.lookups == looked_up


async def test_a_full_gateway_still_answers_what_begins_no_run(busy: Busy) -> None:
    async with busy.client(busy.add_key()) as client:
        for path in ("/v1/models", "/v1/runs", "/healthz", "/readyz", "/metrics"):
            assert (await client.get(path)).status_code == 200


@pytest.mark.long
async def test_bodies_that_arrive_together_are_bounded_together() -> None:
    gateway = GatewayStandIn(bounds=Bounds(body=500_000, all_bodies=1_000_000))
    key = gateway.add_key()
    going_on, half_sent = asyncio.Event(), []

    async def slow() -> AsyncIterator[bytes]:
        yield b'{"model": "mini", "messages": [{"role": "user", "content": "' + b"x" * 200_000
        yield b'"}, {"role": "user", "content": "' + b"x" * 200_000
        half_sent.append(True)
        await going_on.wait()
        yield b'"}]}'

    kind = {"content-type": "application/json"}
    async with gateway.client(key) as client, asyncio.TaskGroup() as group:
        sending = [
            group.create_task(client.post("/v1/chat/completions", content=slow(), headers=kind)) for _ in range(2)
        ]
        await until(lambda: len(half_sent) == 2, what="the gateway has read half of both bodies")
        announced = await client.post("/v1/chat/completions", content=b" " * 300_000, headers=kind)
        second_reply = await client.post("/v1/chat/completions", content=slow(), headers=kind)
        for reply in (announced, second_reply):
            assert (reply.status_code, reply.headers["retry-after"]) == (503, "1")
        going_on.set()
        assert [(await call).status_code for call in sending] == [200, 200]
        assert (await client.post("/v1/chat/completions", content=slow(), headers=kind)).status_code == 200


@pytest.fixture(autouse=True)
def patient_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    """A lookup of a key may take as long as a crowded machine needs."""
    monkeypatch.setattr("app.gateway.http.callers.LOOKUP_SECONDS", 60.0)


class SlowStore:
    """In front of a house's keys: lookups take until `answers` is set."""

    def __init__(self, gateway: GatewayStandIn) -> None:
        self.answers = asyncio.Event()
        self.failure: Exception | None = None
        self.lookups = 0
        self._find = gateway.store.key
        gateway.store.key = self.key  # type: ignore[method-assign]

    async def key(self, public: str) -> KeyRow | None:
        self.lookups += 1
        await self.answers.wait()
        if self.failure is not None:
            raise self.failure
        return await self._find(public)


async def models(gateway: GatewayStandIn, key: str) -> httpx.Response:
    async with gateway.client(key) as client:
        return await client.get("/v1/models")


@pytest.mark.parametrize("fails", [False, True])
async def test_a_key_is_looked_up_once_for_all_who_bring_it(fails: bool) -> None:
    gateway = GatewayStandIn()
    key, slow = gateway.add_key(), SlowStore(gateway)
    slow.failure = StoreUnavailable() if fails else None
    async with asyncio.TaskGroup() as group:
        asking = [group.create_task(models(gateway, key)) for _ in range(50)]
        await let_others_run()
        assert slow.lookups == 1
        slow.answers.set()
    assert {call.result().status_code for call in asking} == {503 if fails else 200}
    assert gateway.store.lookups == (0 if fails else 1)


async def test_who_waits_for_a_lookup_outlives_whoever_began_it() -> None:
    gateway = GatewayStandIn()
    key, slow = gateway.add_key(), SlowStore(gateway)
    async with asyncio.TaskGroup() as group:
        first = group.create_task(models(gateway, key))
        await until(lambda: slow.lookups == 1)
        second = group.create_task(models(gateway, key))
        await let_others_run()
        first.cancel()
        await let_others_run()
        slow.answers.set()
    assert second.result().status_code == 200


async def test_a_flood_of_keys_is_bounded_and_known_ones_get_in() -> None:
    gateway = GatewayStandIn()
    existing_key = gateway.add_key()
    assert (await models(gateway, existing_key)).status_code == 200
    slow = SlowStore(gateway)
    async with asyncio.TaskGroup() as group:
        flood = [group.create_task(models(gateway, f"bt_stranger{n:03}_{SECRET}")) for n in range(MOST_LOOKUPS + 20)]
        await until(lambda: slow.lookups == MOST_LOOKUPS)
        await until(lambda: sum(call.done() for call in flood) >= 20)
        assert [call.result().status_code for call in flood if call.done()] == [503] * 20
        assert (await models(gateway, existing_key)).status_code == 200
        slow.answers.set()
    assert [call.result().status_code for call in flood].count(401) == MOST_LOOKUPS
