"""Every promise of the queue seam, kept by every implementation of it."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from app.core.message.chat import ToolDelta
from app.core.run.events import Event, Kind
from app.core.run.identifiers import Trace
from app.errors import QueueUnavailable
from app.stepqueue.memory import MemoryQueue
from app.stepqueue.protocol import (
    AGAIN,
    WHOLE_RUN,
    CommittedEvents,
    Delta,
    EngineChange,
    ListenRequest,
    Live,
    StepQueue,
    Stop,
    Ticket,
)
from app.stepqueue.redis import RedisQueue
from tests.harness.waiting import PATIENCE_SECONDS, assert_stays, fastest, until

TIERS = ("ultra", "mini")
LEASE = 0.6
PAUSE = 0.005
"""Seconds between two tickets of a queue that never runs empty."""
Opener = Callable[..., AbstractAsyncContextManager[StepQueue]]


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.integration)])
def open_queue(request: pytest.FixtureRequest) -> Opener:
    """Opens queues that see the same tickets: two processes over Redis, or twice the same object in memory."""
    if request.param == "memory":
        shared: list[MemoryQueue] = []

        @asynccontextmanager
        async def in_memory(**options: Any) -> AsyncIterator[StepQueue]:
            if not shared:
                shared.append(MemoryQueue(TIERS, **{"lease": LEASE, **options}))
            async with shared[0] as queue:
                yield queue

        return in_memory
    url, prefix = request.getfixturevalue("redis_url"), request.getfixturevalue("redis_prefix")
    request.getfixturevalue("patient_redis")
    return lambda **options: RedisQueue(url, TIERS, prefix=prefix, **{"lease": LEASE, **options})


@pytest.fixture
async def queue(open_queue: Opener) -> AsyncIterator[StepQueue]:
    async with open_queue() as opened:
        yield opened


def ticket(number: int, tier: str = "mini") -> Ticket:
    return Ticket(run=f"run-{number}", step=number, tier=tier, driver="driver", seq=number, version=2)


def bare(tickets: list[Ticket]) -> list[Ticket]:
    return [replace(each, receipt="") for each in tickets]


async def test_a_ticket_comes_out_as_it_went_in(queue: StepQueue) -> None:
    await queue.enqueue([ticket(1)])
    (received,) = await queue.take(4, 1.0)
    assert bare([received]) == [ticket(1)]
    assert received.receipt


async def test_a_ticket_keeps_its_trace(queue: StepQueue) -> None:
    traced = replace(ticket(1), trace=Trace(f"00-{'a' * 32}-{'b' * 16}-01", "vendor=opaque"), at=1_763_900_000.25)
    await queue.enqueue([traced])
    (received,) = await queue.take(4, 1.0)
    assert bare([received]) == [traced]


async def test_each_ticket_goes_to_one_taker(open_queue: Opener) -> None:
    async with open_queue() as first_queue, open_queue() as second_queue:
        takers = [
            asyncio.create_task(_drain(queue)) for queue in (first_queue, second_queue, first_queue, second_queue)
        ]
        for number in range(0, 60, 3):
            await first_queue.enqueue([ticket(number + index) for index in range(3)])
        tickets = [ticket_of_batch for batch in await asyncio.gather(*takers) for ticket_of_batch in batch]
    assert sorted(each.step for each in tickets) == list(range(60))


async def _drain(queue: StepQueue) -> list[Ticket]:
    tickets: list[Ticket] = []
    while batch := await queue.take(3, 0.4):
        tickets += batch
        await queue.done(batch)
    return tickets


async def test_higher_tiers_come_first_and_each_in_its_order(queue: StepQueue) -> None:
    await queue.enqueue([ticket(1), ticket(2), ticket(3, "ultra"), ticket(4, "ultra")])
    assert [each.step for each in await queue.take(3, 0)] == [3, 4, 1]
    assert [each.step for each in await queue.take(3, 0)] == [2]


async def test_steps_come_before_runs_of_any_tier(queue: StepQueue) -> None:
    """A step belongs to a run that has begun; a run is begun when there is nothing else to do."""
    await queue.enqueue([replace(ticket(1, "ultra"), step=WHOLE_RUN), ticket(2), ticket(3, "ultra")])
    assert [each.run for each in await queue.take(9, 0)] == ["run-3", "run-2", "run-1"]


async def test_who_can_drive_no_more_runs_leaves_them_to_others(queue: StepQueue) -> None:
    whole = replace(ticket(1, "ultra"), step=WHOLE_RUN)
    await queue.enqueue([whole, ticket(2)])
    assert [each.run for each in await queue.take(9, 0, runs=False)] == ["run-2"]
    assert await queue.take(9, 0, runs=False) == []
    assert [each.run for each in await queue.take(9, 0)] == ["run-1"]


async def test_a_taker_gets_no_more_than_it_has_room_for(queue: StepQueue) -> None:
    await queue.enqueue([ticket(number, tier) for number, tier in enumerate(TIERS * 3)])
    assert len(await queue.take(2, 0)) == 2
    assert len(await queue.take(1, 0)) == 1
    assert await queue.take(0, 0) == []
    assert len(await queue.take(9, 0)) == 3


def of(tenant: str, *numbers: int, step: int = WHOLE_RUN) -> list[Ticket]:
    return [replace(ticket(number), step=step, tenant=tenant) for number in numbers]


@pytest.mark.parametrize("step", [0, WHOLE_RUN])
async def test_tenants_take_turns_however_many_tickets_one_of_them_has(open_queue: Opener, step: int) -> None:
    """A flood of 500, two takers of four at a time, and then one ticket each of two other tenants."""
    async with open_queue(lease=PATIENCE_SECONDS) as first_queue, open_queue(lease=PATIENCE_SECONDS) as second_queue:
        await first_queue.enqueue(of("flood", *range(500), step=step))
        first = await first_queue.take(4, 1.0) + await second_queue.take(4, 1.0)
        assert len(first) == 8
        await first_queue.enqueue(of("small", 1000, step=step))
        await second_queue.enqueue(of("other", 2000, step=step))
        await first_queue.enqueue(of("flood", 500, step=step))
        third = [(await taker.take(1, 1.0))[0] for taker in (first_queue, second_queue, first_queue)]
        assert {each.run for each in third} >= {"run-1000", "run-2000"}, (
            "each within as many takes as there are tenants"
        )
        left = [each for taker in (first_queue, second_queue) for each in await taker.take(400, 1.0)]
        assert {each.run for each in [*first, *third, *left]} == {f"run-{n}" for n in [*range(501), 1000, 2000]}
        assert [each.seq for each in left] == sorted(each.seq for each in left), "a tenant's own come in their order"
        await first_queue.done([*first, *third, *left])
        assert await first_queue.take(1, 0.0) == []


async def test_a_ticket_that_waited_for_its_turn_keeps_its_trace_and_comes_back(open_queue: Opener) -> None:
    trace = Trace(f"00-{'a' * 32}-{'b' * 16}-01")
    async with open_queue() as queue:
        await queue.enqueue([replace(each, trace=trace, at=5.0) for each in of("flood", *range(3), step=0)])
        tickets = await queue.take(3, 1.0)
        assert [(each.run, each.trace, each.at) for each in tickets] == [(f"run-{n}", trace, 5.0) for n in range(3)]
        back: list[Ticket] = []
        async with asyncio.timeout(PATIENCE_SECONDS):
            while len(back) < 3:
                back += await queue.take(3, LEASE)
        assert {(each.run, each.version) for each in back} == {(f"run-{n}", AGAIN) for n in range(3)}


async def test_runs_that_wait_are_noted(queue: StepQueue) -> None:
    assert not queue.crowded
    await queue.enqueue(of("flood", *range(4)))
    assert await queue.take(2, 1.0)
    assert queue.crowded
    assert await queue.take(4, 1.0)
    assert not queue.crowded


async def test_runs_that_other_processes_have_taken_do_not_wait_any_more(open_queue: Opener) -> None:
    async with open_queue() as first_queue, open_queue() as second_queue:
        await first_queue.enqueue(of("flood", *range(4)))
        assert await first_queue.take(2, 1.0)
        assert first_queue.crowded
        assert len(await second_queue.take(4, 1.0)) == 2
        assert await first_queue.take(1, 0.0) == []
        assert not first_queue.crowded


async def test_a_tier_that_is_not_configured_goes_with_the_last(queue: StepQueue) -> None:
    await queue.enqueue([ticket(1, "of tomorrow"), ticket(2, "ultra")])
    assert bare(await queue.take(2, 0)) == [ticket(2, "ultra"), ticket(1, "of tomorrow")]


@pytest.mark.parametrize("wait", [0.0, 0.7])
async def test_nothing_to_take_is_an_empty_list_after_the_wait(queue: StepQueue, wait: float) -> None:
    await queue.take(1, 0)  # a first look makes what it needs
    began = time.monotonic()
    assert await queue.take(1, wait) == []
    assert wait <= time.monotonic() - began


async def test_a_waiting_taker_wakes_at_once(open_queue: Opener) -> None:
    async with open_queue() as dispatcher, open_queue() as gateway:

        async def seconds_to_wake() -> float:
            taking = asyncio.create_task(dispatcher.take(1, PATIENCE_SECONDS))
            await assert_stays(lambda: not taking.done(), seconds=0.05)
            began = time.monotonic()
            await gateway.enqueue([ticket(1)])
            tickets = await taking
            assert bare(tickets) == [ticket(1)]
            seconds = time.monotonic() - began
            await dispatcher.done(tickets)
            return seconds

        assert await fastest(seconds_to_wake, enough=0.15) <= 0.15


async def test_a_ticket_that_is_not_kept_comes_back(open_queue: Opener) -> None:
    async with open_queue() as dead, open_queue() as other:
        await dead.enqueue([ticket(1)])
        began = time.monotonic()  # not behind the take, from which on the lease counts
        (lost,) = await dead.take(1, 1.0)
        (ticket_again,) = await other.take(1, LEASE + PATIENCE_SECONDS)
        assert time.monotonic() - began >= LEASE - 0.05
        assert bare([ticket_again]) == bare([replace(lost, version=AGAIN)])


async def test_lost_tickets_come_back_although_new_ones_keep_coming(queue: StepQueue) -> None:
    await queue.enqueue([ticket(0)])
    await queue.take(1, 0)
    began, number = time.monotonic(), 0
    while time.monotonic() < began + PATIENCE_SECONDS:
        number += 1
        await queue.enqueue([ticket(number), ticket(number)])
        tickets = await queue.take(1, 1.0)
        await queue.done(tickets)
        if tickets[0].step == 0:
            return
        await asyncio.sleep(PAUSE)
    pytest.fail("the lost ticket starved")


async def take_while_kept(queue: StepQueue, mine: list[Ticket]) -> list[Ticket]:
    """Keep `mine`, and take for half a lease: nothing, unless this machine has stood still for a whole one."""
    began = time.monotonic()
    await queue.keep(mine)
    came = await queue.take(1, LEASE / 2)
    assert not came or time.monotonic() - began >= LEASE
    return came


async def test_a_ticket_that_is_kept_stays_where_it_is(queue: StepQueue) -> None:
    mine: list[Ticket] = []
    for number in range(1, 20, 2):
        await queue.enqueue([ticket(number), ticket(number + 1)])
        mine, came = await queue.take(2, 0), []
        for _ in range(5):
            came = await take_while_kept(queue, mine)
            if came:
                break
        if not came:
            break
        await queue.done([*mine, *came, *await queue.take(2, LEASE)])  # the machine stood still: once more
    assert mine, "it never ran for two leases"
    await queue.keep([])
    assert len(await queue.take(2, LEASE + PATIENCE_SECONDS)) >= 1


async def test_a_ticket_that_is_done_is_forgotten(queue: StepQueue) -> None:
    await queue.enqueue([ticket(1), ticket(2, "ultra")])
    await queue.done(await queue.take(2, 0))
    assert await queue.take(1, LEASE + 0.5) == []


async def test_keep_and_done_of_strangers_do_nothing(queue: StepQueue) -> None:
    await queue.enqueue([ticket(1)])
    (mine,) = await queue.take(1, 0)
    await queue.done([mine])
    for stranger in (mine, ticket(7), replace(ticket(8), receipt="no receipt of ours")):
        await queue.keep([stranger])
        await queue.done([stranger])
    assert await queue.take(1, LEASE + 0.5) == []


async def test_a_full_tier_refuses_until_something_is_done(open_queue: Opener) -> None:
    async with open_queue(bound=3) as queue:
        await queue.enqueue([ticket(1), ticket(2), ticket(3)])
        with pytest.raises(QueueUnavailable):
            await queue.enqueue([ticket(4)])
        await queue.enqueue([ticket(5, "ultra")])
        await queue.done(await queue.take(2, 0))
        await queue.enqueue([ticket(4)])
        assert {each.step for each in await queue.take(9, 0)} == {2, 3, 4}


MESSAGES: list[Live] = [
    Delta("run", 1, "call", 0, "héllo \U0001f600\x00"),
    Delta("run", 1, "call", 8, "y", ({"token": "y", "logprob": -0.5, "bytes": [121], "top_logprobs": []},)),
    Stop("run"),
    Stop("run", 3),
    ListenRequest("run", "here"),
    ListenRequest("run", "here", "call", 5, 2),
    EngineChange("run", "here"),
    CommittedEvents("run", (Event("run", 4, Kind.STEP_DONE, 1.5, {"step": 1, "sizes": [1, 2], "why": None}),)),
    Delta("run", 1, "call", 9, "", (), 2, (ToolDelta(1, "id", "look", '{"q":'), ToolDelta(1, arguments='"é"}'))),
    Delta("run", 1, "call", 9, "z", ({"token": "z"},), 4, (ToolDelta(0),)),
    *(Delta("run", 1, "call", offset, "x") for offset in range(600)),
]


async def test_messages_reach_their_address_in_order(open_queue: Opener) -> None:
    mine: list[Live] = []
    others: list[Live] = []
    async with open_queue() as hearer, open_queue() as teller:
        async with hearer.subscribe("a", mine.append), hearer.subscribe("b", others.append):
            await teller.publish("a", MESSAGES[:3])
            await teller.publish("nobody", MESSAGES)
            await teller.publish("a", [])
            await teller.publish("a", MESSAGES[3:])
            await until(lambda: len(mine) >= len(MESSAGES))
        await teller.publish("a", MESSAGES)
        await assert_stays(lambda: len(mine) == len(MESSAGES), seconds=0.05)
    assert mine == MESSAGES
    assert others == []


async def test_tells_that_meet_keep_their_order(queue: StepQueue) -> None:
    messages: list[Live] = []

    async def stream(step: int) -> None:
        for offset in range(20):
            await queue.publish(f"address-{step % 2}", [Delta("run", step, "call", offset, "x")])

    async with queue.subscribe("address-0", messages.append), queue.subscribe("address-1", messages.append):
        await asyncio.gather(*map(stream, range(30)))
        await until(lambda: len(messages) == 600)
    for step in range(30):
        mine = [each.offset for each in messages if isinstance(each, Delta) and each.step == step]
        assert mine == list(range(20))


async def test_every_hearer_of_an_address_hears(queue: StepQueue) -> None:
    first: list[Live] = []
    second: list[Live] = []
    async with queue.subscribe("a", first.append):
        async with queue.subscribe("a", second.append):
            await queue.publish("a", [Stop("1")])
            await until(lambda: bool(first and second))
        await queue.publish("a", [Stop("2")])
        await until(lambda: len(first) == 2)
    assert second == [Stop("1")]


async def test_a_sink_that_raises_disturbs_nobody(queue: StepQueue) -> None:
    messages: list[Live] = []

    def sink(message: Live) -> None:
        messages.append(message)
        raise RuntimeError("broken sink")

    async with queue.subscribe("a", sink):
        await queue.publish("a", [Stop("1"), Stop("2")])
        await queue.publish("a", [Stop("3")])
        await until(lambda: len(messages) == 3)


async def test_an_error_while_hearing_passes_through_unchanged(queue: StepQueue) -> None:
    with pytest.raises(LookupError):
        async with queue.subscribe("a", lambda _: None):
            raise LookupError


async def test_ready_until_closed(open_queue: Opener) -> None:
    async with open_queue() as queue:
        await queue.ready()
        taking = asyncio.create_task(queue.take(1, PATIENCE_SECONDS))
        await assert_stays(lambda: not taking.done(), seconds=0.05)
        async with queue.subscribe("a", lambda _: None):
            await queue.close()
        await queue.close()
        for call in (
            queue.ready(),
            queue.enqueue([ticket(1)]),
            queue.take(1, 0),
            queue.publish("a", [Stop("1")]),
            taking,
        ):
            with pytest.raises(QueueUnavailable):
                await call
