"""The service goes on while a part of it is away: real processes over a Postgres and a Redis, broken on purpose.

One gateway and two dispatchers, shared by the file; whoever breaks a server mends it again.
"""

import os
import signal
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from redis import Redis
from sqlalchemy.engine import make_url

from app.store.writing.group_commit import DECIDE_SECONDS
from tests.harness import prepared_databases, servers
from tests.harness.processes import KEY, Caller, Process, open_caller
from tests.harness.waiting import PATIENCE_SECONDS, fastest_in_thread, wait_until
from tests.integration.installation import WORKERS, Installation, launch, settings
from tests.stubs import Hang, Reply, plan_reply
from tests.stubs.control import StubControl

pytestmark = [pytest.mark.integration, pytest.mark.faults]

LEASE = 4.0
"""The default: nothing here may wait for one."""
EXTRA_PER_STEP = 1.0
THREE_STEPS = {
    "steps": [
        {"worker": "alpha", "subtask": "Plan it.", "access": ["user"]},
        {"worker": "beta", "subtask": "Do it.", "access": ["user", 0]},
        {"worker": "gamma", "subtask": "Check it.", "access": ["user", 1]},
    ]
}


@pytest.fixture(scope="module")
def redis() -> Iterator[servers.Server]:
    """A Redis of this file's own."""
    with servers.redis() as server:
        yield server


@pytest.fixture(scope="module")
def postgres(postgres_data: Path) -> Iterator[servers.Server]:
    """A Postgres of this file's own, with a database that has the schema."""
    with servers.postgres(copied=postgres_data) as server:
        yield server


@pytest.fixture(scope="module")
def shared_installation(
    tmp_path_factory: pytest.TempPathFactory, stub: StubControl, redis: servers.Server, postgres: servers.Server
) -> Iterator[Installation]:
    folder = tmp_path_factory.mktemp("house")
    database = make_url(postgres.url).set(database=prepared_databases.TEMPLATE).render_as_string(hide_password=False)
    environ = settings(folder, stub, database, redis.url) | {"BATON_LEASE_SECONDS": str(LEASE)}
    pool = folder / "pool.toml"
    pool.write_text(pool.read_text().replace("probe = 0", "probe = 1.5"))
    with launch(folder, environ, "gateway", "dispatcher", "dispatcher") as (gateway, *dispatchers):
        wait_until(gateway.ready)
        yield Installation(stub, database, redis.url, gateway, dispatchers)


@pytest.fixture
def installation(shared_installation: Installation) -> Installation:
    shared_installation.stub.clear()
    return shared_installation


@pytest.fixture
def caller(installation: Installation) -> Iterator[Caller]:
    with open_caller(installation.gateway.url) as client:
        yield client


@pytest.fixture
def aside() -> Iterator[Callable[..., "Future[Any]"]]:
    """Calls beside the test's own."""
    with ThreadPoolExecutor(16) as threads:
        yield threads.submit


def readiness(process: Process) -> dict[str, Any]:
    body: dict[str, Any] = httpx.get(f"{process.url}/readyz", timeout=PATIENCE_SECONDS, trust_env=False).json()
    return body


def healthy(installation: Installation) -> bool:
    """Return True if the gateway takes its queue for healthy."""
    return installation.gateway.metric("baton_queue_sound") == 1


@contextmanager
def frozen(redis: servers.Server) -> Iterator[None]:
    """Redis takes connections and bytes, and answers nothing: to its clients a black hole."""
    with Redis.from_url(redis.url) as client:
        pid = client.info("server")["process_id"]
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


@contextmanager
def stop_redis(redis: servers.Server) -> Iterator[None]:
    redis.crash()
    try:
        yield
    finally:
        redis.start()


@contextmanager
def out_of_memory(redis: servers.Server) -> Iterator[None]:
    with Redis.from_url(redis.url) as client:
        client.config_set("maxmemory", "1")
        try:
            yield
        finally:
            client.config_set("maxmemory", "0")


@pytest.mark.parametrize("fault", [frozen, stop_redis, out_of_memory])
def test_without_redis_three_steps_take_no_more_than_a_second_more_each(
    installation: Installation, caller: Caller, redis: servers.Server, fault: Callable[[servers.Server], Any]
) -> None:
    plan = {"baton": {"plan": THREE_STEPS}}
    wait_until(lambda: healthy(installation), what="the queue is healthy")
    with fault(redis):
        wait_until(lambda: not healthy(installation), what="the gateway knows without being asked")

        def seconds_of_three_steps() -> float:
            began = time.monotonic()
            text, reply = caller.ask_streaming("baton-mini", "Who needs a bell?", extra_body=plan)
            assert (text, reply["baton"]["degraded"]) == ("Hello there.", False)
            return time.monotonic() - began

        promised = 3 * EXTRA_PER_STEP + 0.5
        assert fastest_in_thread(seconds_of_three_steps, enough=promised) <= promised
        assert readiness(installation.gateway)["status"] == "degraded"
    wait_until(lambda: healthy(installation), what="it mends itself")
    assert wait_until(lambda: readiness(installation.gateway)["status"] == "ready")
    caller.ask_whole("baton-mini", "And now?", extra_body=plan)


def test_runs_in_flight_do_not_notice_that_redis_freezes(
    installation: Installation, caller: Caller, redis: servers.Server, aside: Any
) -> None:
    for name in WORKERS:
        installation.stub.always(name, Reply(first_delay=0.5))
    answers = [
        aside(caller.ask_whole, "baton-mini", "Go on.", extra_body={"baton": {"plan": THREE_STEPS}}) for _ in "ab"
    ]
    wait_until(lambda: len(installation.stub.requests("beta")) == 2, what="both are in their second step")
    with frozen(redis):
        for answer in answers:
            text, reply = answer.result(timeout=PATIENCE_SECONDS)
            assert text == "Hello there."
            steps = caller.run(reply["baton"]["run"])["steps"]
            assert [len(step["attempts"]) for step in steps] == [1, 1, 1]
    wait_until(lambda: healthy(installation), what="it mends itself")


def conductor(installation: Installation) -> str:
    check: str = readiness(installation.gateway)["checks"]["conductor"]
    return check


def test_a_dead_conductor_is_found_without_traffic_and_the_fallback_serves(
    installation: Installation, caller: Caller
) -> None:
    installation.stub.always("planner", plan_reply((0, "Do it.", ["user"])))
    wait_until(lambda: conductor(installation) == "ok", what="it lives")
    installation.stub.always("planner", Hang())
    wait_until(lambda: conductor(installation) == "degraded", what="nobody asked it for a plan")
    assert httpx.get(f"{installation.gateway.url}/readyz", timeout=PATIENCE_SECONDS, trust_env=False).status_code == 200
    text, reply = caller.ask_whole("baton-ultra", "Who plans?")
    assert (text, reply["baton"]["degraded"]) == ("Hello there.", True)
    assert [proposal["reasons"] for proposal in reply["baton"]["proposals"]] == [["conductor_out"], []]
    installation.stub.always("planner", plan_reply((0, "Do it.", ["user"])))
    wait_until(lambda: conductor(installation) == "ok", what="it is back")
    wait_until(  # the engines probe by themselves, and may find it after the gateway
        lambda: not caller.ask_whole("baton-ultra", "And now?")[1]["baton"]["degraded"],
        what="engines have found it too",
    )


STRANGER = "bt_stranger1_0123456789abcdef0123456789abcdef"


def read_refusal(process: Process, key: str) -> tuple[int, str | None]:
    """The status and the Retry-After of a request's reply."""
    body = {"model": "baton-mini", "messages": [{"role": "user", "content": "Hello?"}]}
    reply = httpx.post(
        f"{process.url}/v1/chat/completions",
        json=body,
        headers={"Authorization": f"Bearer {key}"},
        timeout=PATIENCE_SECONDS,  # one that was being written when the database went away is in doubt for so long
        trust_env=False,
    )
    return reply.status_code, reply.headers.get("retry-after")


def test_runs_outlive_an_outage_of_the_database_and_new_ones_are_told_to_come_back(
    installation: Installation, caller: Caller, postgres: servers.Server, aside: Any
) -> None:
    for name in WORKERS:
        installation.stub.always(name, Reply(first_delay=0.8))
    plan = {"extra_body": {"baton": {"plan": THREE_STEPS}}}
    answers = [aside(tell, "baton-mini", "Remember.", **plan) for tell in (caller.ask_whole, caller.ask_streaming) * 2]
    wait_until(lambda: len(installation.stub.requests("alpha")) == 4, what="all are under way")
    postgres.crash()
    crashed = time.monotonic()
    wait_until(lambda: read_refusal(installation.gateway, KEY)[0] == 503, what="new runs are refused")
    wait_until(lambda: installation.gateway.metric("baton_queue_sound") == 1)
    began = time.monotonic()
    for key in (KEY, STRANGER):
        for _ in range(5):
            assert read_refusal(installation.gateway, key) == (503, "1")
    assert time.monotonic() - began < 5 * DECIDE_SECONDS, "not all ten are in doubt, and none waits for the database"
    assert (
        httpx.get(f"{installation.gateway.url}/healthz", timeout=PATIENCE_SECONDS, trust_env=False).status_code == 200
    )
    assert httpx.get(f"{installation.gateway.url}/readyz", timeout=PATIENCE_SECONDS, trust_env=False).status_code == 503
    time.sleep(max(0.0, crashed + LEASE + 1.5 - time.monotonic()))
    assert {model: len(installation.stub.requests(model)) for model in WORKERS} == {"alpha": 4, "beta": 0, "gamma": 0}
    postgres.start()
    for answer in answers:
        text, reply = answer.result(timeout=PATIENCE_SECONDS)
        run = caller.run(reply["baton"]["run"])
        assert (text, run["state"], run["degraded"]) == ("Hello there.", "succeeded", False)
        refusals = []
        for step in run["steps"]:
            refusals.append([attempt["outcome"] for attempt in step["attempts"]])
        assert refusals == [["ok"]] * 3
    assert read_refusal(installation.gateway, STRANGER)[0] == 401
    assert wait_until(lambda: readiness(installation.gateway)["status"] == "ready")
