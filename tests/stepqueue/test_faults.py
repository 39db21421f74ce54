"""The Redis queue while its server or its dispatchers are broken on purpose."""

import asyncio
import os
import signal
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from functools import partial
from types import MappingProxyType
from typing import Any

import pytest
from redis.asyncio import Redis
from redis.asyncio.connection import AbstractConnection

from app.core.run.events import Event, Kind
from app.errors import QueueUnavailable
from app.network.retries import REDIS_PAUSE
from app.stepqueue.live import MOST_WAITING, PROBE_SECONDS, pack_live, seal_payload
from app.stepqueue.protocol import CommittedEvents, Delta, Live, SealKeys, Stop, Ticket
from app.stepqueue.redis import GIVE_UP_SECONDS, KeyNames, RedisQueue
from app.stepqueue.streams import GROUP, pack_ticket
from tests.harness import servers
from tests.harness.waiting import PATIENCE_SECONDS, assert_stays, let_others_run, until

pytestmark = [pytest.mark.integration, pytest.mark.faults]

TIERS = ("ultra", "mini")
LEASE = 1.0
ANSWER_SECONDS = 30.0
"""Every call ends before this, whatever Redis does; the longest waits of callers here are twice as long."""

VICTIM = """
import asyncio, sys
from app.stepqueue.redis import GIVE_UP_SECONDS, RedisQueue

async def main() -> None:
    async with RedisQueue(sys.argv[1], ("ultra", "mini"), float(sys.argv[2])) as queue:
        await queue.take(1, 10.0)
        print("taken", flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.fixture
def server() -> Iterator[servers.Server]:
    """A Redis of this test's own, to be broken."""
    with servers.redis() as running:
        yield running


@pytest.fixture
async def queue(server: servers.Server) -> AsyncIterator[RedisQueue]:
    async with RedisQueue(server.url, TIERS, LEASE) as opened:
        yield opened


def ticket(number: int, tier: str = "mini") -> Ticket:
    return Ticket(f"run-{number}", number, tier, "driver", number)


async def _again(call: Callable[[], Awaitable[Any]]) -> Any:
    """Try until the queue is back, as a dispatcher's loop does; return the call's value."""

    async def answered() -> list[Any]:
        with suppress(QueueUnavailable):
            return [await call()]
        return []

    (value,) = await until(answered, what="the queue is back")
    return value


@contextmanager
def _frozen(pid: int) -> Iterator[None]:
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


async def _pid(server: servers.Server) -> int:
    async with Redis.from_url(server.url) as client:
        return int((await client.info("server"))["process_id"])


@asynccontextmanager
async def _proxy(port: int) -> AsyncIterator[tuple[int, asyncio.Event]]:
    """A way to Redis that can be blackholed without anybody closing a connection; yields its port and `open`."""
    is_open = asyncio.Event()
    is_open.set()
    writers: list[asyncio.StreamWriter] = []
    serving: list[asyncio.Task[Any]] = []

    async def pump(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            if is_open.is_set():
                writer.write(data)
        writer.close()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", port)
        writers.extend((writer, far_writer))
        serving.extend(filter(None, [asyncio.current_task()]))
        await asyncio.gather(pump(reader, far_writer), pump(far_reader, writer), return_exceptions=True)

    listener = await asyncio.start_server(connected, "127.0.0.1", 0)
    try:
        yield listener.sockets[0].getsockname()[1], is_open
    finally:
        listener.close()
        for writer in writers:
            writer.close()
        await asyncio.gather(*serving, return_exceptions=True)


@pytest.mark.long
async def test_the_ticket_of_a_killed_dispatcher_comes_back(server: servers.Server, queue: RedisQueue) -> None:
    argv = (sys.executable, "-c", VICTIM, server.url, str(LEASE))
    victim = await asyncio.create_subprocess_exec(*argv, stdout=asyncio.subprocess.PIPE)
    try:
        await queue.enqueue([ticket(1)])
        assert victim.stdout is not None
        assert await victim.stdout.readline() == b"taken\n"
    finally:
        victim.kill()
        await victim.communicate()
    (ticket_again,) = await queue.take(1, PATIENCE_SECONDS)
    assert ticket_again.step == 1


async def test_flushall_is_a_non_event(server: servers.Server, queue: RedisQueue) -> None:
    messages: list[Live] = []
    await queue.enqueue([ticket(1), ticket(2)])
    mine = await queue.take(1, 1.0)
    waiting = asyncio.create_task(queue.take(1, 5.0))
    assert [each.step for each in await waiting] == [2]
    waiting = asyncio.create_task(queue.take(1, 5.0))
    async with queue.subscribe("a", messages.append), Redis.from_url(server.url) as client:
        await assert_stays(lambda: not waiting.done(), seconds=0.1)
        await client.flushall()
        await queue.keep(mine)
        await queue.done(mine)
        await queue.enqueue([ticket(3)])
        assert [each.step for each in await waiting] == [3]
        await queue.publish("a", [Stop("run")])
        await until(lambda: bool(messages))


async def test_it_works_again_after_a_restart(server: servers.Server, queue: RedisQueue) -> None:
    messages: list[Live] = []
    async with queue.subscribe("a", messages.append):
        await queue.enqueue([ticket(1)])
        server.crash()
        for call in (queue.enqueue([ticket(2)]), queue.take(1, 1.0), queue.ready()):
            with pytest.raises(QueueUnavailable):
                await asyncio.wait_for(call, ANSWER_SECONDS)
        server.start()
        await _again(lambda: queue.enqueue([ticket(3)]))
        assert [each.step for each in await queue.take(1, 1.0)] == [3]
        await _tell_until_heard(queue, messages)


async def _tell_until_heard(queue: RedisQueue, messages: list[Live]) -> None:
    async def publish_and_look() -> bool:
        await _end(queue.publish("a", [Stop("run")]))
        return bool(messages)

    await until(publish_and_look)


async def test_a_restart_under_idle_connections_goes_unnoticed(server: servers.Server, queue: RedisQueue) -> None:
    await queue.enqueue([ticket(1)])
    await queue.ready()
    server.crash()
    server.start()
    await queue.enqueue([ticket(2)])
    assert [each.step for each in await queue.take(1, 1.0)] == [2]


async def test_a_frozen_server_hangs_nobody(server: servers.Server, queue: RedisQueue) -> None:
    messages: list[Live] = []
    await queue.enqueue([ticket(1)])
    (mine,) = await queue.take(1, 1.0)
    waiting = asyncio.create_task(queue.take(1, 60.0))
    await assert_stays(lambda: not waiting.done(), seconds=0.1)
    async with queue.subscribe("a", messages.append):
        with _frozen(await _pid(server)):
            calls = [
                queue.enqueue([ticket(2)]),
                queue.take(1, 60.0),
                queue.keep([mine]),
                queue.done([mine]),
                queue.ready(),
            ]
            async with asyncio.timeout(ANSWER_SECONDS):
                async with asyncio.timeout(0):  # whoever waits for anything is interrupted
                    for _ in range(40):
                        await queue.publish("a", [Stop("lost")])
                deaf = asyncio.create_task(_end(_hear_once(queue)))
                ends = await asyncio.gather(*(_end(call) for call in calls), _end(waiting))
                assert [type(end) for end, _ in ends] == [QueueUnavailable] * len(ends)
                ends.append(await deaf)
                assert ends[-1][0] is None, "hearing begins when the server answers again"
        await _again(lambda: queue.enqueue([ticket(3)]))
        steps = {each.step for each in await _again(lambda: queue.take(9, 1.0))}
        assert 3 in steps
        messages.clear()
        await _tell_until_heard(queue, messages)


async def test_a_frozen_server_is_paid_for_once(server: servers.Server, queue: RedisQueue) -> None:
    await queue.enqueue([ticket(1)])
    (mine,) = await queue.take(1, 1.0)
    with _frozen(await _pid(server)):
        await until(lambda: not queue.healthy)  # nobody asked for anything
        async with asyncio.timeout(20 * 4 * GIVE_UP_SECONDS / 2):
            for _ in range(20):
                for call in (
                    queue.enqueue([ticket(2)]),
                    queue.take(1, 9.0),
                    queue.publish("a", [Stop("run")]),
                    queue.done([mine]),
                ):
                    assert isinstance((await _end(call))[0], QueueUnavailable)
    await until(lambda: queue.healthy)
    await queue.enqueue([ticket(3)])


async def test_who_waits_for_a_frozen_server_is_let_go_with_the_first(
    server: servers.Server, queue: RedisQueue
) -> None:
    await queue.enqueue([ticket(2)])
    (mine,) = await queue.take(1, 1.0)
    with _frozen(await _pid(server)):
        first = asyncio.create_task(_end(queue.keep([mine])))
        await assert_stays(lambda: not first.done(), seconds=0.8)
        last = asyncio.create_task(_end(queue.enqueue([ticket(1)])))
        ends = await asyncio.gather(first, last)
    assert [type(fault) for fault, _ in ends] == [QueueUnavailable] * 2
    assert abs(ends[0][1] - ends[1][1]) < 0.4


async def test_more_than_can_be_carried_away_is_refused(server: servers.Server, queue: RedisQueue) -> None:
    messages: list[Live] = []
    async with queue.subscribe("a", messages.append):
        with _frozen(await _pid(server)):
            await queue.publish("a", [Stop("lost")])
            await let_others_run()  # that one is on its way, and the others wait
            await queue.publish("a", [Stop("lost")] * MOST_WAITING)
            with pytest.raises(QueueUnavailable):
                await queue.publish("a", [Stop("lost")])
        await until(lambda: queue.healthy)
        messages.clear()
        await _tell_until_heard(queue, messages)


async def _end(call: Awaitable[Any]) -> tuple[BaseException | None, float]:
    """Return how and when a call ended."""
    try:
        await call
    except QueueUnavailable as fault:
        return fault, time.monotonic()
    return None, time.monotonic()


async def test_who_begins_to_hear_before_the_server_is_there_hears_it_come(server: servers.Server) -> None:
    messages: list[Live] = []
    server.stop()
    async with RedisQueue(server.url, TIERS) as queue, queue.subscribe("a", messages.append):
        server.start()
        await _tell_until_heard(queue, messages)


async def _hear_once(queue: RedisQueue) -> None:
    async with queue.subscribe("b", lambda _: None):
        pass


async def test_a_hearer_notices_a_connection_that_has_died_in_silence(server: servers.Server) -> None:
    messages: list[Live] = []
    async with (
        _proxy(server.port) as (port, is_open),
        RedisQueue(f"redis://127.0.0.1:{port}/0", TIERS, LEASE) as queue,
        queue.subscribe("a", messages.append),
        Redis.from_url(server.url) as client,
    ):
        before = await _subscriptions(client)
        is_open.clear()
        await asyncio.sleep(2 * PROBE_SECONDS + 0.6)
        is_open.set()

        async def subscribed_anew() -> bool:
            return await _subscriptions(client) != before

        await until(subscribed_anew)
        await _tell_until_heard(queue, messages)


async def _subscriptions(client: Redis) -> set[str]:
    return {each["id"] for each in await client.client_list(_type="pubsub")}


async def test_a_transport_that_closed_under_its_writer_is_an_outage_and_nothing_more(
    server: servers.Server, queue: RedisQueue, monkeypatch: pytest.MonkeyPatch
) -> None:
    """uvloop raises a RuntimeError then, and redis-py passes it on."""
    messages: list[Live] = []

    async def closed(*_: object, **__: object) -> None:
        raise RuntimeError("unable to perform operation; the handler is closed")

    async with queue.subscribe("a", messages.append), Redis.from_url(server.url) as client:
        await client.ping()
        await client.client_kill_filter(_type="pubsub")
        with monkeypatch.context() as broken:
            broken.setattr(AbstractConnection, "send_packed_command", closed)
            with pytest.raises(QueueUnavailable):
                await queue.enqueue([ticket(1)])
            await asyncio.sleep(2 * REDIS_PAUSE)
        await _again(partial(queue.enqueue, [ticket(2)]))
        await _tell_until_heard(queue, messages)


async def test_it_can_be_opened_before_redis_is_there(server: servers.Server) -> None:
    server.stop()
    async with RedisQueue(server.url, TIERS, LEASE) as queue:
        with pytest.raises(QueueUnavailable):
            await queue.ready()
        server.start()
        await _again(queue.ready)
        await _again(lambda: queue.enqueue([ticket(1)]))
        assert len(await _again(lambda: queue.take(1, 1.0))) == 1


async def test_a_server_that_may_evict_tickets_is_refused() -> None:
    with servers.redis(settings=["--maxmemory-policy", "allkeys-lru"]) as lossy:
        with pytest.raises(QueueUnavailable, match="maxmemory-policy noeviction"):
            await RedisQueue(lossy.url, TIERS).__aenter__()
        async with Redis.from_url(lossy.url) as client:
            await client.config_set("maxmemory-policy", "noeviction")
            async with RedisQueue(lossy.url, TIERS) as queue:
                await client.config_set("maxmemory-policy", "volatile-ttl")
                with pytest.raises(QueueUnavailable, match="volatile-ttl"):
                    await queue.ready()


async def test_a_server_that_keeps_its_policy_to_itself_is_trusted() -> None:
    with servers.redis(settings=["--rename-command", "CONFIG", "HIDDEN"]) as shy:
        async with RedisQueue(shy.url, TIERS) as queue:
            await queue.ready()


async def test_a_server_out_of_memory_refuses_tickets(server: servers.Server, queue: RedisQueue) -> None:
    await queue.take(1, 0)  # makes what it needs
    await queue.enqueue([ticket(1)])
    async with Redis.from_url(server.url) as client:
        await client.config_set("maxmemory", "1")
        await until(lambda: not queue.healthy)  # whoever only takes tickets learns it as well
        with pytest.raises(QueueUnavailable):
            await queue.enqueue([ticket(2)])
        with pytest.raises(QueueUnavailable, match="memory"):
            await queue.ready()
        await queue.done(await queue.take(1, 1.0))  # what makes room goes on
        await queue.publish("a", [Stop("run")])
        await client.config_set("maxmemory", "0")
    await queue.enqueue([ticket(2)])
    await until(lambda: queue.healthy)


async def test_a_server_that_refuses_writes_is_not_healthy(server: servers.Server, queue: RedisQueue) -> None:
    """As one does that cannot save to its disk (MISCONF), or that has lost its replicas (NOREPLICAS)."""
    async with Redis.from_url(server.url) as client:
        await client.config_set("min-replicas-to-write", "1")
        await until(lambda: not queue.healthy)
        with pytest.raises(QueueUnavailable, match="Not enough good replicas") as refusal:
            await queue.ready()
        assert refusal.value.public_code == "queue_refuses_writes"
        await client.config_set("min-replicas-to-write", "0")
    await until(lambda: queue.healthy)
    await queue.ready()
    await queue.enqueue([ticket(1)])


@pytest.mark.usefixtures("patient_redis")
async def test_rubbish_is_dropped(server: servers.Server, queue: RedisQueue) -> None:
    messages: list[Live] = []
    keys = KeyNames("baton")
    async with Redis.from_url(server.url) as client, queue.subscribe("a", messages.append):
        for name, value in (
            ("t", b"\xff"),
            ("t", b"[1,2]"),
            ("other", b"{}"),
            ("t", b"[" * 5000),
            ("t", b'["run\\u0000",0,"ultra","engine",1,0]'),  # no database can look these two up
            ("t", b'["run",9223372036854775808,"ultra","engine",1,0]'),
        ):
            await client.xadd(keys.steps("ultra"), {name: value})
        for rubbish in (
            b"",
            b"\xff",
            b"7",
            b"[7]",
            b'[["d","run"]]',
            b'[["c","run",[[1,"no.kind",0,{}]]]]',
            b"[" * 5000,
        ):
            await client.publish(keys.live("a"), rubbish)
        await queue.enqueue([ticket(1)])
        turns = keys.steps("mini").encode()
        await client.rpush(turns + b":tenants", b"\xff")
        await client.rpush(turns + b":of:\xff", pack_ticket(ticket(9)))
        await queue.enqueue([ticket(2)])
        await queue.publish("a", [Stop("\ud800"), Stop("run")])
        assert [each.step for each in await queue.take(9, 1.0)] == [1, 2]
        await until(lambda: bool(messages))
        assert await client.xlen(keys.steps("ultra")) == 0
    assert messages == [Stop("run")]


@pytest.mark.usefixtures("patient_redis")
async def test_a_message_that_no_process_of_ours_sent_is_dropped_and_counted(server: servers.Server) -> None:
    messages: list[Live] = []
    delta = Delta("run", 0, "call", 0, "so says whoever can write to Redis")
    (payload,) = pack_live([delta])
    ours, theirs, channel = b"our key", b"another key", KeyNames("baton").live("a")
    async with (
        RedisQueue(server.url, TIERS, LEASE, seals=SealKeys((ours,))) as queue,
        RedisQueue(server.url, TIERS, LEASE, seals=SealKeys((theirs,))) as stranger,
        Redis.from_url(server.url) as client,
        queue.subscribe("a", messages.append),
    ):
        elsewhere = seal_payload(payload, KeyNames("baton").live("b"), ours)
        for forged in (payload, b"", seal_payload(payload, channel, theirs), elsewhere):
            await client.publish(channel, forged)
        await stranger.publish("a", [delta])
        await until(lambda: queue.forged == 5)
        await queue.publish("a", [Stop("run")])
        await until(lambda: bool(messages))
    assert messages == [Stop("run")]


@pytest.mark.usefixtures("patient_redis")
async def test_while_a_pepper_is_rotated_messages_under_both_are_accepted(server: servers.Server) -> None:
    messages: list[Live] = []
    seals = SealKeys((b"old",))
    async with (
        RedisQueue(server.url, TIERS, LEASE, seals=seals) as queue,
        RedisQueue(server.url, TIERS, LEASE, seals=SealKeys((b"new", b"old"))) as ahead,
        queue.subscribe("a", messages.append),
        ahead.subscribe("b", messages.append),
    ):
        await queue.publish("b", [Stop("sealed with the old one")])
        await until(lambda: len(messages) == 1)
        await ahead.publish("a", [Stop("not known yet")])
        await until(lambda: queue.forged == 1)
        seals.keys = (b"new", b"old")
        await ahead.publish("a", [Stop("known by now")])
        await queue.publish("b", [Stop("sealed with the new one")])
        await until(lambda: len(messages) == 3)
    assert Stop("not known yet") not in messages
    assert (queue.forged, ahead.forged) == (1, 0)


@pytest.mark.usefixtures("patient_redis")
async def test_a_large_backlog_of_lost_tickets_comes_back_whole(server: servers.Server, queue: RedisQueue) -> None:
    async with RedisQueue(server.url, TIERS, LEASE) as dead:
        await dead.enqueue([ticket(number) for number in range(500)])
        batch_of_dead = await dead.take(450, 1.0)
        assert len(await dead.take(50, 1.0)) == 50
        steps: set[int] = set()
        clock = asyncio.get_running_loop().time
        async with asyncio.timeout(60):
            while len(steps) < 50:  # the kept ones come first in Redis' list: pages of one must get past them
                since = clock()
                await dead.keep(batch_of_dead)
                batch = {each.step for each in await queue.take(1 if len(steps) < 3 else 20, LEASE / 10)}
                steps |= (
                    batch - set(range(450)) if clock() - since > LEASE else batch
                )  # a stall lets go of what is kept
        assert steps == set(range(450, 500))


@pytest.mark.usefixtures("patient_redis")
async def test_it_leaves_nothing_behind(server: servers.Server) -> None:
    async with Redis.from_url(server.url) as client:
        async with RedisQueue(server.url, TIERS, LEASE) as queue:
            await queue.enqueue([ticket(number) for number in range(5)])
            await queue.done(await queue.take(5, 1.0))
            stream = KeyNames("baton").steps("mini")
            assert len(await client.xinfo_consumers(stream, GROUP)) == 1
        assert await client.xinfo_consumers(stream, GROUP) == []
        assert await client.xlen(stream) == 0
        assert len(await client.client_list()) == 1


@pytest.mark.usefixtures("patient_redis")
async def test_a_read_that_brings_too_much_gives_the_rest_back(server: servers.Server, queue: RedisQueue) -> None:
    assert await queue.take(2, 0.02) == []  # nothing is left behind, so the next look is at all tiers at once
    await queue.enqueue(
        [*(ticket(number) for number in range(3)), *(ticket(number, "ultra") for number in range(3, 6))]
    )
    batch = await queue.take(2, 1.0)
    assert [each.step for each in batch] == [3, 4]
    async with RedisQueue(server.url, TIERS, LEASE) as other:
        rest = await other.take(9, 0)
        assert {each.step for each in rest} == {0, 1, 2, 5}
        assert rest[0].step == 5
        await other.done(rest)
        await queue.done(batch)
    async with Redis.from_url(server.url) as client:
        assert [await client.xlen(KeyNames("baton").steps(tier)) for tier in TIERS] == [0, 0]


@pytest.mark.usefixtures("patient_redis")
async def test_bodies_may_hold_any_mapping_and_sets(queue: RedisQueue) -> None:
    messages: list[Live] = []
    body = MappingProxyType({"access": frozenset({2, 1}), "labels": ("b", "a")})
    async with queue.subscribe("a", messages.append):
        await queue.publish("a", [CommittedEvents("run", (Event("run", 1, Kind.ADMITTED, 0.0, body),)), Stop("run")])
        bad = Event("run", 2, Kind.ADMITTED, 0.0, {"what": object()})
        await queue.publish("a", [CommittedEvents("run", (bad,)), Stop("run")])
        await until(lambda: len(messages) == 3)
    assert isinstance(messages[0], CommittedEvents)
    assert messages[0].events[0].body == {"access": [1, 2], "labels": ["b", "a"]}
