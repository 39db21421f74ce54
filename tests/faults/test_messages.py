"""F-26: every message of Redis comes three times and in another order, and some were written by nobody of ours."""

from collections.abc import Callable, Iterator

import pytest
from redis import Redis

from app.stepqueue.protocol import AGAIN, Ticket
from app.stepqueue.redis import KeyNames
from app.stepqueue.streams import FIELD, pack_ticket
from tests.faults.accounts import accounts, settle
from tests.faults.load import flood
from tests.faults.points import at, case
from tests.faults.scene import CHAIN, WORKERS, Scene, ask, scene
from tests.harness.waiting import wait_until
from tests.stubs import Reply

COPIES = 3
CALLERS = 20
Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def shared_scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    stutter = ("--copies", str(COPIES))
    programs = {"gateway": stutter, "dispatcher": stutter}
    with scene(tmp_path_factory.mktemp("messages"), program=programs, lease=4.0) as new_scene:
        yield new_scene


@at("F-26", "every message three times, batches in reverse", "each step is executed once", ci=True)
def test_messages_that_come_again_do_nothing(system: Scene, record_property: Record) -> None:
    with flood(system.gateways, CALLERS) as load:
        wait_until(lambda: len(load.answers) >= 2 * CALLERS, within=30, what="many runs are over")
    assert settle(system) == []
    assert load.statuses == {200: load.request_count}
    ours = accounts(system.database)
    record_property("measured", f"{len(ours)} runs")
    for run in ours:
        assert run.outcomes() == [["ok"]] * 3
    assert sum(len(system.stub.requests(name)) for name in WORKERS) == 3 * len(ours)


@at("F-26", "every live message three times, streamed", "the answer is told once", ci=True)
def test_words_that_come_again_are_told_once(system: Scene) -> None:
    words = tuple(f"word{n} " for n in range(30))
    system.stub.always("epsilon", Reply(chunks=words, gap=0.01))
    answered = ask(system.gateway, "baton-ultra", streams=True, extra_body={"baton": {"plan": CHAIN}})
    assert (answered.status, answered.text) == (200, "".join(words))
    assert settle(system) == []


FORGERIES: dict[str, Callable[[str], bytes]] = {
    "of a run that is none": lambda _run: forge_ticket("run_00000000000000000000000000000000", 0),
    "of a step that is done": lambda run: forge_ticket(run, 0),
    "of a step that is done, as if rung again": lambda run: forge_ticket(run, 0, version=AGAIN),
    "of a step that another one executes": lambda run: forge_ticket(run, 1),
    "of a step that another one executes, as if rung again": lambda run: forge_ticket(run, 1, version=AGAIN),
    "of a step that is not due yet": lambda run: forge_ticket(run, 3, version=AGAIN),
    "of a step that is none": lambda run: forge_ticket(run, 99, version=AGAIN),
    "from the end of the journal": lambda run: forge_ticket(run, 1, seq=10**9),
    "that is no ticket": lambda _run: b'{"run": "' + b"x" * 100_000,
}


def forge_ticket(run: str, step: int, *, version: int = 0, seq: int = 3) -> bytes:
    return pack_ticket(Ticket(run, step, "baton-ultra", "nobody", seq, version))


def forgery(name: str) -> object:
    place = f"forged ticket {name}"
    ci = "executes" in name or "no ticket" in name
    return case(name, family="F-26", place=place, expectation="ignored: no call, no event", ci=ci, name=place)


@pytest.mark.parametrize("name", [forgery(name) for name in FORGERIES])
def test_a_forged_ticket_is_ignored(system: Scene, name: str) -> None:
    system.stub.always("beta", Reply(chunks=("beta ", "says so."), first_delay=1.0))
    calling = system.aside(ask, system.gateway, "baton-ultra", extra_body={"baton": {"plan": CHAIN}})
    system.wait_for_requests("beta")
    run = system.latest()
    with Redis.from_url(system.redis.url) as redis:
        stream = KeyNames("baton").steps("baton-ultra")
        for _ in range(3):
            redis.xadd(stream, {FIELD: FORGERIES[name](run)})
        answered = calling.result(30)
        wait_until(lambda: not redis.xlen(stream), within=20, what="the forged tickets are gone")
    assert (answered.status, answered.run) == (200, run)
    assert settle(system) == []
    (ours,) = accounts(system.database)
    assert ours.outcomes() == [["ok"]] * len(WORKERS)
    assert len(system.stub.requests()) == len(WORKERS)
    assert all(process.alive for process in system.processes)


@at("F-26", "forged live messages to every process", "ignored; the answer is the worker's own", ci=True)
def test_live_messages_that_cannot_be_read_are_ignored(system: Scene) -> None:
    system.stub.always("epsilon", Reply(chunks=tuple("A word and another. "), gap=0.05))
    calling = system.aside(ask, system.gateway, "baton-ultra", streams=True, extra_body={"baton": {"plan": CHAIN}})
    system.wait_for_requests("epsilon")
    run = system.latest()
    rubbish = (
        b"",
        b"[",
        b'[["d", 1, 2, 3]]',
        b'[["d","' + run.encode() + b'",4,"call_0",0,"not what it says"]]',
        b'[["c","run_0",[[9,"run.succeeded",0,{}]]]]',
        b'[["x"]]',
        b"\xff" * 1000,
    )
    with Redis.from_url(system.redis.url) as redis:
        for address in redis.pubsub_channels():
            for payload in rubbish:
                redis.publish(address, payload)
    answered = calling.result(30)
    assert (answered.status, answered.text) == (200, "A word and another. ")
    assert settle(system) == []
