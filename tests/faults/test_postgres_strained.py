"""F-15, F-16 and F-19: Postgres comes late, has no connection left, is slow, or refuses a transaction now and then."""

import asyncio
import time
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack, contextmanager, suppress
from pathlib import Path

import asyncpg
import httpx
import openai
import pytest

from tests.faults.accounts import accounts, settle
from tests.faults.load import flood
from tests.faults.network_proxy import Delay, Mode, Slow
from tests.faults.points import at, case
from tests.faults.scene import WORKERS, Scene, ask, caller, probe, scene
from tests.harness.processes import run_command
from tests.harness.waiting import wait_until
from tests.stubs import Reply

pytestmark = pytest.mark.timeout(240)
CALLERS = 30
Record = Callable[[str, object], None]
REFUSING_SECONDS = 5.0
"""How long transactions are refused."""
SLOW_SECONDS = 8.0
"""How long the database is slow."""
RETRY_PAUSE = 0.05
"""Seconds before the next try to take a connection away."""
TROUBLE = """
CREATE SEQUENCE trouble;
CREATE FUNCTION trouble() RETURNS trigger AS $$
BEGIN
  IF pg_current_xact_id()::text::bigint % {every} = 0 THEN
    PERFORM nextval('trouble');
    RAISE EXCEPTION 'made up' USING ERRCODE = '{state}';
  END IF;
  RETURN NEW;
END $$ LANGUAGE plpgsql;
CREATE TRIGGER trouble BEFORE INSERT ON events FOR EACH ROW EXECUTE FUNCTION trouble();
"""
NO_TROUBLE = "DROP TRIGGER trouble ON events; DROP FUNCTION trouble(); DROP SEQUENCE trouble"


@pytest.fixture(scope="module")
def shared_scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    # The service's three processes take ten each at most.
    with scene(tmp_path_factory.mktemp("strained"), seconds=120, postgres=["max_connections=44"]) as new_scene:
        yield new_scene


@pytest.fixture
def system(shared_scene: Scene) -> Scene:
    shared_scene.reset()
    for name in WORKERS:
        shared_scene.stub.always(name, Reply(chunks=(f"{name} ", "says so."), first_delay=0.3))
    return shared_scene


@contextmanager
def trouble(system: Scene, state: str, every: int) -> Iterator[None]:
    """Each n-th transaction fails as soon as it inserts an event, whatever else is in it. (Were it each n-th event, a
    batch of more than n of them would never be committed.)"""
    system.script(TROUBLE.format(state=state, every=every))
    try:
        yield
    finally:
        system.script(NO_TROUBLE)


def case_of_refusal(state: str, meaning: str, *, ci: bool) -> object:
    place = f"Postgres ends transactions with {state}, {meaning}"
    return case(state, family="F-19", place=place, expectation="tried again, nothing dropped", ci=ci, name=state)


@pytest.mark.parametrize(
    "state",
    [
        case_of_refusal("40P01", "deadlock", ci=True),
        case_of_refusal("40001", "serialization failure", ci=False),
        case_of_refusal("57P01", "administrator's command", ci=False),
    ],
)
def test_a_transaction_that_is_refused_is_tried_again(system: Scene, state: str, record_property: Record) -> None:
    with flood(system.gateways, CALLERS) as load:
        wait_until(lambda: system.open_runs() > 5, within=20, what="the runs are in flight")
        with trouble(system, state, 4):
            time.sleep(REFUSING_SECONDS)
            struck = int(system.rows("SELECT last_value FROM trouble")[0][0])
    assert settle(system, 30) == []
    record_property("measured", f"{struck} transactions refused, {dict(load.statuses)}")
    assert struck >= 5
    assert load.statuses == {200: load.request_count}
    assert {account.row["state"] for account in accounts(system.database)} == {"succeeded"}


def case_of_strain(mode: Mode, place: str) -> object:
    return case(mode, family="F-19", place=place, expectation="slower, nothing dropped", name=place)


@pytest.mark.parametrize(
    "mode",
    [
        case_of_strain(Delay(0.3), "Postgres answers 0.3 s late"),
        case_of_strain(Slow(40_960), "Postgres at 40 KiB/s for each connection"),
        case_of_strain(Delay(2.5), "Postgres answers 2.5 s late"),
    ],
)
def test_a_slow_database_slows_and_drops_nothing(system: Scene, mode: Mode, record_property: Record) -> None:
    with flood(system.gateways, 5) as load:
        wait_until(lambda: system.open_runs() > 2, within=20, what="the runs are in flight")
        with system.to_postgres.in_mode(mode):
            time.sleep(SLOW_SECONDS)
    assert settle(system, 30) == []
    record_property("measured", f"{dict(load.statuses)}, slowest {load.slowest:.1f} s")
    assert set(load.statuses) <= {200, 503}
    assert {account.row["state"] for account in accounts(system.database)} == {"succeeded"}


@at("F-19", "Postgres locks the runs' table for 5 s", "it waits or is refused, nothing dropped")
def test_a_lock_on_the_runs_is_outlived(system: Scene, record_property: Record) -> None:
    with flood(system.gateways, CALLERS) as load:
        wait_until(lambda: system.open_runs() > 5, within=20, what="the runs are in flight")
        system.script("BEGIN; LOCK TABLE runs IN ACCESS EXCLUSIVE MODE; SELECT pg_sleep(5); COMMIT")
    assert settle(system, 30) == []
    record_property("measured", f"{dict(load.statuses)}, slowest {load.slowest:.1f} s")
    assert set(load.statuses) <= {200, 503}
    assert {account.row["state"] for account in accounts(system.database)} == {"succeeded"}


@at("F-16", "Postgres has no connection left", "503 within seconds; those in flight end; all well when some are free")
def test_no_connection_left(system: Scene, record_property: Record) -> None:
    asyncio.run(exhaust_connections(system, record_property))
    assert ask(system.gateway, "baton-mini").status == 200
    assert settle(system, 30) == []


async def exhaust_connections(system: Scene, record_property: Record) -> None:
    """Take every connection there is, once the service's own were closed under it."""
    async with AsyncExitStack() as stack:
        system.to_postgres.reset()
        count = 0
        until = time.monotonic() + 4
        while time.monotonic() < until:  # also those that the service opens, and loses again, meanwhile
            with suppress(asyncpg.PostgresError, OSError, TimeoutError):
                opened = await asyncpg.connect(system.database, timeout=2)
                stack.push_async_callback(opened.close)
                count += 1
                continue
            system.to_postgres.reset()
            await asyncio.sleep(RETRY_PAUSE)
        answer = await asyncio.to_thread(ask, system.gateway, "baton-mini")
        record_property("measured", f"{count} connections taken; 503 after {answer.seconds:.1f} s")
        assert (answer.status, answer.code) == (503, "store_unavailable")
        assert answer.seconds < 30
        assert await asyncio.to_thread(probe, system.gateway, "/healthz") == 200
        assert await asyncio.to_thread(probe, system.gateway, "/readyz") == 503
    wait_until(system.gateway.ready, within=15, what="it is ready again")


@at("F-15", "Postgres is down at boot, and without a schema at first", "ready without a restart", ci=True)
def test_a_database_that_comes_late(tmp_path: Path) -> None:
    with scene(tmp_path, dispatchers=1, start=False) as system:
        system.postgres.stop()
        for process in system.processes:
            process.start(wait=False)
        for process in system.processes:
            process.wait_until_announced()
        assert (probe(system.gateway, "/healthz"), probe(system.gateway, "/readyz")) == (200, 503)
        early = ask(system.gateway, "baton-mini", timeout=20)
        assert (early.status, early.code) == (503, "store_unavailable")
        system.postgres.start()
        assert probe(system.gateway, "/readyz") == 503, "it has no schema yet"
        migrated = run_command(tmp_path, system.environ, "migrate")
        assert migrated.returncode == 0, migrated.stderr
        wait_until(system.gateway.ready, within=20, what="it is ready")
        wait_until(lambda: is_key_known(system), within=10, what="its first key is there")
        assert ask(system.gateway, "baton-mini").text
        assert settle(system) == []


def is_key_known(system: Scene) -> bool:
    """Return whether our key is accepted yet."""
    with caller(system.gateway) as client, suppress(httpx.HTTPError, openai.APIError):
        client.client.models.list()
        return True
    return False
