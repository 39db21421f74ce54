"""F-09 to F-12: Redis restarts, forgets, fails over, freezes; with a hundred runs in flight none is lost."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial

import httpx
import pytest
from msgspec import Struct
from redis import Redis

from tests.faults.accounts import accounts, settle
from tests.faults.load import flood
from tests.faults.network_proxy import Cut, Delay, Hole, Mode, Refuse, Slow
from tests.faults.points import case
from tests.faults.scene import WORKERS, Scene, scene
from tests.harness import servers
from tests.harness.waiting import wait_until
from tests.stubs import Reply

pytestmark = pytest.mark.timeout(240)
CALLERS = 100
RECOVERED = 30.0
"""Seconds after the end of the fault within which every run that was caught in it has ended."""
Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def shared_scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene(tmp_path_factory.mktemp("redis"), seconds=120) as new_scene:
        yield new_scene


@pytest.fixture
def system(shared_scene: Scene) -> Scene:
    shared_scene.reset()
    for name in WORKERS:
        shared_scene.stub.always(name, Reply(chunks=(f"{name} ", "says so."), first_delay=0.5))
    return shared_scene


@pytest.fixture(scope="module")
def pace(shared_scene: Scene) -> float:
    """Seconds that this machine needs for as many runs at once while nothing is broken."""
    shared_scene.reset()
    with flood(shared_scene.gateways, CALLERS) as load:
        wait_until(lambda: load.answers, within=60, what="the first answer")
    return load.slowest


@contextmanager
def restart_redis(system: Scene) -> Iterator[None]:
    system.redis.stop()
    try:
        yield
    finally:
        system.redis.start()


@contextmanager
def flush_redis(system: Scene) -> Iterator[None]:
    """Again and again, so that it strikes between any two steps."""
    with Redis.from_url(system.redis.url) as redis:
        for _ in range(10):
            redis.flushall()
            time.sleep(FLUSH_PAUSE)
        yield


@contextmanager
def crash_redis(system: Scene) -> Iterator[None]:
    system.redis.crash()
    system.redis.start()
    yield


@contextmanager
def fail_over(system: Scene, *, lag: bool) -> Iterator[None]:
    """The primary dies; a replica that has missed the last seconds, or an empty one, answers in its place."""
    with servers.redis() as other, Redis.from_url(other.url) as replica:
        if lag:
            replica.replicaof("127.0.0.1", system.redis.port)
            wait_until(
                lambda: replica.info("replication")["master_link_status"] == "up", within=10, what="the replica follows"
            )
            replica.replicaof("NO", "ONE")
            time.sleep(LAG_SECONDS)
        system.redis.crash()
        system.to_redis.aim(other.port)
        yield
        system.to_redis.aim(system.redis.port)
        system.redis.start()


def line_is(mode: Mode) -> Callable[[Scene], AbstractContextManager[None]]:
    return lambda system: system.to_redis.in_mode(mode)


class Outage(Struct, frozen=True):
    """A fault of Redis and its seconds."""

    name: str
    breaks: Callable[[Scene], AbstractContextManager[None]]
    seconds: float
    family: str
    ci: bool = False


FLUSH_PAUSE = 0.2
"""Seconds between two FLUSHALLs."""
LAG_SECONDS = 1.0
"""How far a replica lags behind."""
PROBE_PAUSE = 0.5
"""Seconds between two looks at the health of a gateway."""
OUTAGES = (
    Outage("restarted, away for 3 s", restart_redis, 3, "F-09", ci=True),
    Outage("restarted, away for 10 s", restart_redis, 10, "F-09"),
    Outage("emptied ten times", flush_redis, 0, "F-10", ci=True),
    Outage("killed, back with an empty disk", crash_redis, 0, "F-10"),
    Outage("failed over to a lagging replica", partial(fail_over, lag=True), 3, "F-11", ci=True),
    Outage("failed over to an empty server", partial(fail_over, lag=False), 3, "F-11"),
    Outage("frozen for 6 s", lambda system: system.redis.frozen(), 6, "F-12", ci=True),
    Outage("frozen for 60 s", lambda system: system.redis.frozen(), 60, "F-12"),
    Outage("behind a black hole for 6 s", line_is(Hole()), 6, "F-12"),
    Outage("behind a black hole for 60 s", line_is(Hole()), 60, "F-12"),
    Outage("refused for 10 s", line_is(Refuse()), 10, "F-09"),
    Outage("reset in the middle of its replies", line_is(Cut(after=700)), 5, "F-12"),
    Outage("late by 0.3 s", line_is(Delay(0.3)), 5, "F-12"),
    Outage("slow, 4 KiB/s", line_is(Slow(4096)), 5, "F-12"),
)


def broken(outage: Outage) -> object:
    place = f"Redis {outage.name}, {CALLERS} runs in flight"
    return case(outage, family=outage.family, place=place, expectation="0 runs lost", ci=outage.ci, name=outage.name)


@pytest.mark.parametrize("outage", [broken(outage) for outage in OUTAGES])
def test_no_run_is_lost(pace: float, system: Scene, outage: Outage, record_property: Record) -> None:
    with flood(system.gateways, CALLERS) as load:
        wait_until(lambda: system.open_runs() > CALLERS * 0.8, within=20, what="the runs are in flight")
        with outage.breaks(system):
            slowest_probe = probe(system, outage.seconds)
        mended = time.time()
    assert settle(system, RECOVERED + pace) == []
    ours = accounts(system.database)
    took = max(run.row["ended_at"] for run in ours) - mended
    record_property("measured", f"{len(ours)} runs, slowest {load.slowest:.1f} s, last end {took:.1f} s after")
    assert load.statuses == {200: load.request_count}
    assert len(ours) == load.request_count
    assert {run.row["state"] for run in ours} == {"succeeded"}
    assert took < RECOVERED + pace
    assert slowest_probe < 15


def probe(system: Scene, seconds: float) -> float:
    """Return the slowest answer of the probes while it lasts: they live, and they are ready, if degraded."""
    until, slowest = time.monotonic() + seconds, 0.0
    while time.monotonic() < until:
        for path in ("/healthz", "/readyz"):
            began = time.monotonic()
            assert httpx.get(f"{system.gateway.url}{path}", timeout=20, trust_env=False).status_code == 200
            slowest = max(slowest, time.monotonic() - began)
        time.sleep(PROBE_PAUSE)
    return slowest
