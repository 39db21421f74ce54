"""F-30: callers go away at every moment, go silent, or read slowly; what they began is accounted for."""

import json
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from typing import Any

import psutil
import pytest
from msgspec import Struct

from tests.faults.accounts import Account, account, settle
from tests.faults.network_proxy import Hole, NetworkProxy, Refuse, Slow, run_proxy
from tests.faults.points import at, case
from tests.faults.scene import LEASE, Scene, ask, scene
from tests.harness.processes import KEY, user_message
from tests.harness.waiting import wait_until
from tests.stubs import Hang, Reply

STOPPED = 2.0
"""Seconds within which a worker's call is closed once nobody waits for it."""
SLACK = 10.0
"""Seconds that a busy machine may take for it on top."""
READERS, SIZE = 20, 400_000
"""Slow readers, and the characters of the answer that each of them reads."""
LOOK_PAUSE = 0.1
"""Seconds between two looks at the memory of a process."""
EACH = 2**20
"""Bytes that a gateway may need for one of them."""
Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def shared_scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene(tmp_path_factory.mktemp("callers"), dispatchers=1) as new_scene:
        yield new_scene


@pytest.fixture
def wire(system: Scene) -> Iterator[NetworkProxy]:
    """A line to the gateway."""
    with run_proxy(system.gateway.port) as proxy:
        yield proxy


def connect_and_send(port: int, *, streams: bool, **extension: Any) -> socket.socket:
    """A connection on which a request has been sent."""
    body = json.dumps(
        {"model": "baton-mini", "messages": user_message("Go on."), "stream": streams, "baton": extension}
    ).encode()
    head = (
        "POST /v1/chat/completions HTTP/1.1\r\nhost: baton\r\ncontent-type: application/json\r\n"
        f"authorization: Bearer {KEY}\r\ncontent-length: {len(body)}\r\n\r\n"
    )
    peer = socket.create_connection(("127.0.0.1", port), timeout=20)
    peer.sendall(head.encode() + body)
    return peer


def read_until(peer: socket.socket, word: bytes) -> bytes:
    data_so_far = b""
    while word not in data_so_far:
        data = peer.recv(1 << 16)
        assert data, data_so_far[-500:]
        data_so_far += data
    return data_so_far


class Departure(Struct, frozen=True):
    """The moment at which a caller leaves, and what its worker is doing then."""

    name: str
    streams: bool
    until: bytes = b""
    """The caller leaves when it has read this; empty: as soon as the worker was asked."""
    ci: bool = False


WORDS = tuple(f"word{n} " for n in range(40))
LEAVINGS = (
    Departure("before any header", streams=False),
    Departure("after the headers of a stream", streams=True),
    Departure("in the middle of a stream", streams=True, until=b"word5", ci=True),
    Departure("just before the end of a stream", streams=True, until=b"word39"),
)


def leaving(leaver: Departure, policy: str) -> object:
    ends = "it is cancelled, and so is its call" if policy == "cancel" else "it is finished all the same"
    place = f"caller leaves {leaver.name}, policy {policy}"
    return case(leaver, policy, family="F-30", place=place, expectation=ends, ci=leaver.ci, name=place)


@pytest.mark.parametrize(
    ("leaver", "policy"), [leaving(leaver, policy) for policy in ("cancel", "finish") for leaver in LEAVINGS]
)
def test_a_run_whose_caller_is_gone(system: Scene, leaver: Departure, policy: str, record_property: Record) -> None:
    system.stub.always("alpha", Reply(chunks=WORDS, gap=0.1) if leaver.until else Reply(chunks=WORDS, first_delay=6.0))
    with closing(connect_and_send(system.gateway.port, streams=leaver.streams, on_disconnect=policy)) as peer:
        if leaver.until:
            read_until(peer, leaver.until)
        system.wait_for_requests("alpha")
    left = time.time()
    run = system.latest()
    wait_until(lambda: system.has_ended(run), within=30, what="the run ends")
    assert settle(system) == []
    run_account = account(system, run)
    took = run_account.row["ended_at"] - left
    record_property("measured", f"{run_account.row['state']} {took:.1f} s later")
    if policy == "finish":
        assert (run_account.row["state"], run_account.outcomes()) == ("succeeded", [["ok"]])
    elif "end" in leaver.name:
        assert run_account.row["state"] in ("succeeded", "cancelled")
    else:
        assert (run_account.row["state"], run_account.outcomes()) == ("cancelled", [["cancelled"]])
        assert took < STOPPED + SLACK
        assert system.stub.requests("alpha")[0]["disconnected_at"] is not None
    nothing_is_held(run_account)


def nothing_is_held(run: Account) -> None:
    """The reservation was released."""
    assert (run.row["held_usd"], run.row["held_tokens"]) == (0, 0)


@at("F-30", "a hundred callers leave at once", "each run is cancelled; the gateway serves on", ci=True)
def test_many_callers_leave_at_once(system: Scene) -> None:
    system.stub.always("alpha", Hang())
    peers = [connect_and_send(system.gateway.port, streams=bool(n % 2)) for n in range(100)]
    wait_until(lambda: system.open_runs() == len(peers), within=20, what="all are admitted")
    for peer in peers:
        peer.close()
    assert settle(system, 30) == []
    states = system.rows("SELECT state, count(*) FROM runs GROUP BY state")
    assert {row[0]: row[1] for row in states} == {"cancelled": len(peers)}
    system.stub.always("alpha", Reply())
    assert ask(system.gateway, "baton-mini").status == 200


@at("F-30", "caller's line goes dead in the middle of a stream", "the run ends; nothing is held for it")
def test_a_half_open_caller_holds_nothing(system: Scene, wire: NetworkProxy) -> None:
    system.stub.always("alpha", Reply(chunks=WORDS, gap=0.05))
    with closing(connect_and_send(wire.port, streams=True)) as peer:
        read_until(peer, b"word3")
        wire.set(Hole())
        wait_until(lambda: system.has_ended(system.latest()), within=30, what="the run ends")
        assert settle(system) == []
        run = account(system, system.latest())
        assert run.row["state"] in ("succeeded", "cancelled")
        nothing_is_held(run)
    wire.set(Refuse())
    wait_until(lambda: connections(system) == 0, within=20, what="its connection is closed")


def connections(system: Scene) -> int:
    """Return how many callers are connected to the gateway."""
    open_connections = psutil.Process(system.gateway.pid).net_connections("tcp")
    return sum(
        connection.laddr.port == system.gateway.port and connection.status == psutil.CONN_ESTABLISHED
        for connection in open_connections
    )


@at("F-30", "callers who read slowly", "others unaffected; no more than 1 MiB for each of them")
def test_slow_readers_cost_little(system: Scene, wire: NetworkProxy, record_property: Record) -> None:
    system.stub.always("alpha", Reply(chunks=("Hello.",)))
    for _ in range(3):
        assert ask(system.gateway, "baton-mini").status == 200
    chunk = "x" * 1_000
    system.stub.always("alpha", Reply(chunks=(chunk,) * (SIZE // len(chunk))))
    process = psutil.Process(system.gateway.pid)
    before = process.memory_info().rss
    wire.set(Slow(2_000))
    peers = [connect_and_send(wire.port, streams=True) for _ in range(READERS)]
    try:
        most = 0
        until = time.monotonic() + 4 * LEASE
        while time.monotonic() < until:
            most = max(most, process.memory_info().rss - before)
            time.sleep(LOOK_PAUSE)
        wait_until(lambda: system.open_runs() == 0, within=20, what="their runs end, however slowly they read")
        most = max(most, process.memory_info().rss - before)
        system.stub.always("alpha", Reply(chunks=("Hello.",)))
        other = ask(system.gateway, "baton-mini")
        assert other.status == 200
        assert other.seconds < 30
    finally:
        for peer in peers:
            peer.close()
    record_property("measured", f"{most / READERS / 1024:.0f} KiB for each of {READERS}, of {SIZE // 1024} KiB answers")
    assert most / READERS < EACH
    wire.set(Refuse())
    assert settle(system) == []
