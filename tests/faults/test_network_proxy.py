"""The line itself: a test of faults is worth nothing if the fault does not happen."""

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest

from tests.faults.crash_points import CrashPoints, InjectedError, Order, Orders
from tests.faults.network_proxy import Cut, Delay, Hole, NetworkProxy, Pass, Refuse, Slow, run_proxy


@pytest.fixture
def echo() -> Iterator[int]:
    """The port of a server that says everything back."""
    listener = socket.create_server(("127.0.0.1", 0))

    def serve(peer: socket.socket) -> None:
        with peer, suppress(OSError):
            while data := peer.recv(1 << 16):
                peer.sendall(data)

    def accept() -> None:
        with suppress(OSError):
            while True:
                threading.Thread(target=serve, args=listener.accept()[:1], daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    yield int(listener.getsockname()[1])
    listener.close()


@pytest.fixture
def wire(echo: int) -> Iterator[NetworkProxy]:
    with run_proxy(echo) as proxy:
        yield proxy


def connect(wire: NetworkProxy, seconds: float = 5.0) -> socket.socket:
    peer = socket.create_connection(("127.0.0.1", wire.port), timeout=seconds)
    peer.settimeout(seconds)
    return peer


def say(peer: socket.socket, data: bytes) -> bytes:
    peer.sendall(data)
    echoed = b""
    while len(echoed) < len(data):
        echoed += peer.recv(1 << 16)
    return echoed


def test_it_passes_everything_and_counts_the_answers(wire: NetworkProxy) -> None:
    with connect(wire) as peer:
        assert say(peer, b"x" * 200_000) == b"x" * 200_000
    assert wire.carried == 200_000


def test_it_refuses_and_comes_back_on_its_port(wire: NetworkProxy) -> None:
    with connect(wire) as peer:
        say(peer, b"x")
        wire.set(Refuse())
        with pytest.raises(ConnectionError):
            peer.recv(1)
    with pytest.raises(ConnectionRefusedError):
        connect(wire)
    wire.set(Pass())
    with connect(wire) as peer:
        assert say(peer, b"again") == b"again"


def test_a_hole_swallows_and_gives_back_when_it_is_mended(wire: NetworkProxy) -> None:
    with connect(wire, 0.3) as peer:
        with wire.in_mode(Hole()):
            peer.sendall(b"lost?")
            with pytest.raises(TimeoutError):
                peer.recv(1)
        peer.settimeout(5)
        assert peer.recv(5) == b"lost?"


def test_it_is_slow_or_late(wire: NetworkProxy) -> None:
    with connect(wire) as peer:
        wire.set(Slow(1_000))
        began = time.monotonic()
        say(peer, b"x" * 400)
        assert time.monotonic() - began > 0.3
        wire.set(Delay(0.3))
        began = time.monotonic()
        say(peer, b"x")
        assert time.monotonic() - began > 0.5


def test_it_cuts_in_the_middle(wire: NetworkProxy) -> None:
    wire.set(Cut(after=10))
    with connect(wire) as peer, pytest.raises(ConnectionResetError):
        say(peer, b"x" * 100)
    assert (wire.carried, wire.cuts) == (10, 1)


def test_it_can_lead_elsewhere(wire: NetworkProxy, echo: int) -> None:
    with run_proxy(echo) as other, connect(wire) as peer:
        assert say(peer, b"here") == b"here"
        wire.aim(other.port)
        with connect(wire) as again:
            assert say(again, b"there") == b"there"
        assert other.carried == 5


def test_an_order_strikes_once_at_the_passing_that_it_names(tmp_path: object) -> None:
    crashes = CrashPoints(own=Order.read("raise append.after[call.intended,step=2]:2"))
    crashes.pass_by("append.after", "call.intended", "step=2", "worker=alpha")
    crashes.pass_by("append.after", "call.intended", "step=1")
    crashes.pass_by("append.before", "call.intended", "step=2")
    with pytest.raises(InjectedError):
        crashes.pass_by("append.after", "call.intended", "step=2")
    crashes.pass_by("append.after", "call.intended", "step=2")
    with pytest.raises(ValueError, match="not an order"):
        Order.read("append.after[")


def test_a_watched_order_is_obeyed_by_one_process_only(tmp_path_factory: pytest.TempPathFactory) -> None:
    orders = Orders(tmp_path_factory.mktemp("orders") / "orders")
    crash_points = [CrashPoints(watched=orders.path) for _ in range(2)]
    orders.lay("raise take.after")
    with pytest.raises(InjectedError):
        crash_points[0].pass_by("take.after", "step=0")
    for crashes in crash_points:
        crashes.pass_by("take.after", "step=0")
    assert [(strike.boundary, strike.labels) for strike in orders.obeyed_orders] == [("take.after", ("step=0",))]
    orders.lay("* raise take.after")
    for crashes in crash_points:
        with pytest.raises(InjectedError):
            crashes.pass_by("take.after")
    assert len(orders.obeyed_orders) == 2
