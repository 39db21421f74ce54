"""F-14: Postgres is away for seconds or half a minute: nothing new begins, what was in flight is written later."""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager

import httpx
import pytest
from msgspec import Struct

from tests.faults.accounts import accounts, settle
from tests.faults.load import Flood, flood
from tests.faults.network_proxy import Cut, Hole, Mode, Refuse
from tests.faults.points import at, case
from tests.faults.scene import WORKERS, Scene, ask, probe, scene
from tests.harness.processes import KEY, user_message
from tests.harness.waiting import wait_until
from tests.stubs import Reply

pytestmark = pytest.mark.timeout(300)
CALLERS = 60
BACK = 15.0
"""Seconds after the database is back within which new runs are admitted."""
NOTICED_SECONDS = 6.0
"""Seconds within which a request is refused while it is away: connections time out first."""
Record = Callable[[str, object], None]


@pytest.fixture(scope="module")
def shared_scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with scene(tmp_path_factory.mktemp("postgres"), seconds=120) as new_scene:
        yield new_scene


@pytest.fixture
def system(shared_scene: Scene) -> Scene:
    shared_scene.reset()
    for name in WORKERS:
        shared_scene.stub.always(name, Reply(chunks=(f"{name} ", "says so."), first_delay=0.7))
    return shared_scene


@contextmanager
def restart_postgres(system: Scene) -> Iterator[None]:
    system.postgres.stop()
    try:
        yield
    finally:
        system.postgres.start()


@contextmanager
def crash_postgres(system: Scene) -> Iterator[None]:
    system.postgres.crash()
    try:
        yield
    finally:
        system.postgres.start()


def line_is(mode: Mode) -> Callable[[Scene], AbstractContextManager[None]]:
    return lambda system: system.to_postgres.in_mode(mode)


class Outage(Struct, frozen=True):
    """A fault of Postgres and its seconds."""

    name: str
    breaks: Callable[[Scene], AbstractContextManager[None]]
    seconds: float
    ci: bool = False


CUTTING_SECONDS, WHOLE_SECONDS = 0.2, 0.5
"""How long connections are cut, and how long they are left alone after that."""
AWAY_SECONDS = 5.0
"""How long the database is away during one call."""
OUTAGES = (
    Outage("stopped for 9 s", restart_postgres, 9, ci=True),
    Outage("stopped for 30 s", restart_postgres, 30),
    Outage("killed for 9 s", crash_postgres, 9),
    Outage("behind a black hole for 9 s", line_is(Hole()), 9, ci=True),
    Outage("behind a black hole for 30 s", line_is(Hole()), 30),
    Outage("refused for 10 s", line_is(Refuse()), 10),
)


def away(outage: Outage) -> object:
    expectation = "503, never 401; no new call; outcomes written later; 0 runs lost"
    place = f"Postgres {outage.name}, {CALLERS} runs in flight"
    return case(outage, family="F-14", place=place, expectation=expectation, ci=outage.ci, name=outage.name)


@pytest.mark.parametrize("outage", [away(outage) for outage in OUTAGES])
def test_while_the_database_is_away_nothing_begins_and_nothing_is_lost(
    system: Scene, outage: Outage, record_property: Record
) -> None:
    with flood(system.gateways, CALLERS) as load:
        wait_until(lambda: system.open_runs() > CALLERS * 0.8, within=20, what="the runs are in flight")
        calm = ask(system.gateway, "baton-mini", timeout=60).seconds
        wait_until(lambda: system.open_runs() > CALLERS * 0.3, within=20, what="the runs are in flight")
        with outage.breaks(system):
            began = time.monotonic()
            time.sleep(NOTICED_SECONDS)
            stranger(system)
            called = len(system.stub.requests())
            time.sleep(max(0.0, outage.seconds - (time.monotonic() - began)))
            assert len(system.stub.requests()) == called, "no worker was called meanwhile"
            assert (probe(system.gateway, "/healthz"), probe(system.gateway, "/readyz")) == (200, 503)
        mended = time.monotonic()
        wait_until(
            lambda: ask(system.gateway, "baton-mini", timeout=20).status == 200, within=20, what="it admits again"
        )
        recovered = time.monotonic() - mended
    assert settle(system, 30) == []
    assert_refused_politely(load)
    ours = accounts(system.database)
    record_property(
        "measured",
        f"{len(ours)} runs; {load.statuses[503]} refused; back after {recovered:.1f} s, all within the limit",
    )
    assert {run.row["state"] for run in ours} == {"succeeded"}
    assert recovered < BACK + max(3 * 0.7, 2 * calm), "a run takes three times as long as its workers think"


def stranger(system: Scene) -> None:
    """Keys cannot be looked up: that is our fault and never the caller's."""
    for key in (KEY, KEY.replace("0", "9")):
        reply = httpx.post(
            f"{system.gateway.url}/v1/chat/completions",
            json={"model": "baton-mini", "messages": user_message("Hello?")},
            headers={"Authorization": f"Bearer {key}"},
            timeout=20,
            trust_env=False,
        )
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "store_unavailable")
        assert int(reply.headers["retry-after"]) >= 1


def assert_refused_politely(load: Flood) -> None:
    """Every answer is one, or a 503 that says when to come back, and which names no run unless there is one."""
    assert set(load.statuses) <= {200, 503}, load.statuses
    for answer in load.answers:
        assert answer.status == 200 or int(answer.headers["retry-after"]) >= 1


@at("F-14", "Postgres resets connections in the middle of answers", "0 runs lost, no call unaccounted for", ci=True)
def test_connections_that_break_now_and_then_are_replaced(system: Scene, record_property: Record) -> None:
    with flood(system.gateways, CALLERS) as load:
        wait_until(lambda: system.open_runs() > CALLERS * 0.8, within=20, what="the runs are in flight")
        for _ in range(6):
            with system.to_postgres.in_mode(Cut(after=20_000)):
                time.sleep(CUTTING_SECONDS)
            time.sleep(WHOLE_SECONDS)
    assert system.to_postgres.cuts > 0
    assert settle(system, 30) == []
    assert_refused_politely(load)
    record_property("measured", f"{system.to_postgres.cuts} cuts, {dict(load.statuses)}")
    assert {account.row["state"] for account in accounts(system.database)} == {"succeeded"}


@at("F-14", "Postgres goes away while one call is in flight", "its outcome is written later, no second call", ci=True)
def test_an_outcome_waits_for_the_database(system: Scene) -> None:
    system.stub.always("alpha", Reply(first_delay=3.0))
    answer = system.aside(ask, system.gateway, "baton-mini")
    system.wait_for_requests("alpha")
    with restart_postgres(system):
        time.sleep(AWAY_SECONDS)
    answered = answer.result(40)
    assert answered.status in (200, 503), answered
    assert settle(system, 30) == []
    (run,) = accounts(system.database)
    assert (run.row["state"], run.outcomes()) == ("succeeded", [["ok"]])
    assert len(system.stub.requests("alpha")) == 1
