"""The number of round trips that the Redis queue makes."""

import asyncio
import time
from collections.abc import Iterator

import pytest
from redis.asyncio import Redis

from app.stepqueue import live
from app.stepqueue.live import BURST
from app.stepqueue.protocol import Live, Stop, Ticket
from app.stepqueue.redis import RedisQueue
from tests.harness import servers
from tests.harness.waiting import fastest, until

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("patient_redis")]

TIERS = ("ultra", "mini")
PAUSE = 0.001
"""Seconds between two messages of a gateway that keeps talking."""
PACE = 0.03
"""Seconds between two publishes: more than in the service, so that a busy machine is told from a message that waits."""


@pytest.fixture(scope="module")
def server() -> Iterator[servers.Server]:
    """A Redis to which nobody else turns."""
    with servers.redis() as running:
        yield running


async def test_tellers_share_publishes_and_what_was_told_last_is_heard_before_the_end(server: servers.Server) -> None:
    messages: list[Live] = []
    async with RedisQueue(server.url, ["mini"]) as hearer, hearer.subscribe("a", messages.append):
        async with RedisQueue(server.url, ["mini"]) as teller, Redis.from_url(server.url) as client:
            before = await _calls(client, "publish")
            for step in range(500):
                await teller.publish("a", [Stop("run", step)])
            await teller.close()
            assert await _calls(client, "publish") - before <= 4
        await until(lambda: len(messages) == 500)
    assert messages == [Stop("run", step) for step in range(500)]


async def test_who_keeps_talking_is_published_at_a_pace(
    server: servers.Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(live, "PACE", PACE)
    messages: list[Live] = []
    teller, hearer = RedisQueue(server.url, TIERS), RedisQueue(server.url, TIERS)
    async with hearer, hearer.subscribe("a", messages.append), teller, Redis.from_url(server.url) as client:
        before, began = await _calls(client, "publish"), time.monotonic()
        for step in range(400):
            await teller.publish("a", [Stop("run", step)])
            await asyncio.sleep(PAUSE)
        seconds = time.monotonic() - began
        assert await _calls(client, "publish") - before <= BURST + seconds / PACE + 2
        await until(lambda: len(messages) == 400)
        assert messages == [Stop("run", step) for step in range(400)]
        assert await fastest(lambda: _seconds_of_ten(teller, messages), enough=9 * PACE) < 10 * PACE


async def _seconds_of_ten(teller: RedisQueue, messages: list[Live]) -> float:
    """Return the seconds for ten messages to be published and received one by one, after some silence."""
    await asyncio.sleep(BURST * PACE)
    began = time.monotonic()
    for _ in range(10):
        messages.clear()
        await teller.publish("a", [Stop("run")])
        while not messages:  # noqa: ASYNC110 - a sink has no event
            await asyncio.sleep(0)
    return time.monotonic() - began


async def test_while_there_is_room_for_all_a_ticket_costs_one_read(server: servers.Server) -> None:
    async with RedisQueue(server.url, TIERS) as queue, Redis.from_url(server.url) as client:
        assert await queue.take(9, 0.02) == []
        before = await _calls(client, "xreadgroup")
        for number in range(20):
            await queue.enqueue([Ticket(f"run-{number}", number, "mini", "driver", number)])
            assert [each.step for each in await queue.take(9, 1.0)] == [number]
        assert await _calls(client, "xreadgroup") - before == 20


async def _calls(client: Redis, command: str) -> int:
    return int((await client.info("commandstats")).get(f"cmdstat_{command}", {"calls": 0})["calls"])
