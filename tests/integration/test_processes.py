"""The distributed set-up as real processes: one gateway and two dispatchers over Postgres and Redis, killed at will.

Workers and conductor are the provider stub in a process of its own; callers use the official client. The house is
shared by the whole file, because starting it takes longer than any test; who kills a process starts it again.
"""

import json
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from redis import Redis

from tests.harness import servers
from tests.harness.processes import Caller, Process, open_caller, run_command, running_process, user_message
from tests.harness.waiting import PATIENCE_SECONDS, fastest_in_thread, wait_until
from tests.integration.installation import CHAIN, TREE, WORKERS, Installation, launch, settings
from tests.stubs import Hang, Reply, Stall
from tests.stubs.control import StubControl

pytestmark = [pytest.mark.integration, pytest.mark.faults]

BEFORE_ITS_DEADLINE = 10.0
"""Seconds: a call that is closed sooner was closed by the caller, since no deadline of its own has passed by then."""
EMPTY_PAUSE = 0.15
"""Seconds between two times that Redis is emptied."""
PROMPTLY = 2.0
"""Seconds for a run of workers that answer at once."""


@pytest.fixture(scope="module")
def shared_installation(
    tmp_path_factory: pytest.TempPathFactory, stub: StubControl, database: str, redis_server_url: str
) -> Iterator[Installation]:
    folder = tmp_path_factory.mktemp("house")
    environ = settings(folder, stub, database, redis_server_url)
    with launch(folder, environ, "gateway", "dispatcher", "dispatcher") as (gateway, *dispatchers):
        wait_until(gateway.ready)
        yield Installation(stub, database, redis_server_url, gateway, dispatchers)


@pytest.fixture
def installation(shared_installation: Installation) -> Installation:
    """The house, with a stub that plans a tree and otherwise answers at once."""
    shared_installation.stub.clear()
    shared_installation.stub.always("planner", TREE)
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


def outcomes(run: dict[str, Any]) -> list[list[str]]:
    """Return the outcomes of each step's attempts."""
    outcomes_of_calls = []
    for step in run["steps"]:
        outcomes_of_calls.append([attempt["outcome"] for attempt in step["attempts"]])
    return outcomes_of_calls


def calls(installation: Installation, model: str, count: int = 1) -> list[dict[str, Any]]:
    """The stub's records of that model, as soon as there are so many."""
    requests: list[dict[str, Any]] = wait_until(
        lambda: requests if len(requests := installation.stub.requests(model)) >= count else None,
        what=f"{model} was called",
    )
    return requests


def list_disconnected(installation: Installation, model: str) -> list[dict[str, Any]]:
    """The stub's records of that model whose connection was closed before their answer was over."""
    return [request for request in installation.stub.requests(model) if request["disconnected_at"]]


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
@pytest.mark.parametrize(("tier", "shape"), [("baton-mini", "single"), ("baton-ultra", "tree")])
def test_the_official_client_gets_an_answer(caller: Caller, tier: str, shape: str, streams: bool) -> None:
    replies: list[dict[str, Any]] = []

    def seconds_to_answer() -> float:
        began = time.monotonic()
        text, reply = (caller.ask_streaming if streams else caller.ask_whole)(tier, "Is anybody there?")
        assert text == "Hello there."
        replies.append(reply)
        return time.monotonic() - began

    assert fastest_in_thread(seconds_to_answer, enough=PROMPTLY) <= PROMPTLY, "a message did not come"
    reply = replies[0]
    assert reply["usage"]["total_tokens"] == reply["usage"]["prompt_tokens"] + reply["usage"]["completion_tokens"]
    run = caller.run(reply["baton"]["run"])
    assert (run["state"], run["degraded"]) == ("succeeded", False)
    assert outcomes(run) == [["ok"]] * (3 if tier == "baton-ultra" else 1)


def test_steps_are_shared_between_both_dispatchers(installation: Installation, caller: Caller, aside: Any) -> None:
    for name in WORKERS:
        installation.stub.always(name, Reply(first_delay=0.4))
    answers = [aside(caller.ask_whole, "baton-ultra", "Work together.") for _ in range(8)]
    engines: set[int] = set()
    wait_until(lambda: engines.update(installation.holders()) or len(engines) == 2, what="both dispatchers hold a step")
    assert engines == {dispatcher.pid for dispatcher in installation.dispatchers}
    assert {answer.result()[1]["baton"]["state"] for answer in answers} == {"succeeded"}


def test_a_dispatcher_that_is_told_to_stop_finishes_its_steps(
    installation: Installation, caller: Caller, aside: Any
) -> None:
    for name in WORKERS:
        installation.stub.always(name, Reply(first_delay=0.7))
    answers = [aside(caller.ask_whole, "baton-ultra", "Do not lose me.") for _ in range(6)]
    leaving = installation.dispatchers[0]
    wait_until(lambda: leaving.pid in installation.holders(), what="it works")
    assert leaving.stop() == 0
    for answer in answers:
        run = caller.run(answer.result()[1]["baton"]["run"])
        assert (run["state"], outcomes(run)) == ("succeeded", [["ok"]] * 3)
    leaving.start()


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_a_killed_dispatcher_is_replaced_and_its_call_is_unknown(
    installation: Installation, caller: Caller, aside: Any, streams: bool
) -> None:
    installation.stub.script("alpha", Hang())
    answer = aside(caller.ask_streaming if streams else caller.ask_whole, "baton-mini", "Survive.")
    calls(installation, "alpha")
    victim = installation.holding()
    victim.kill()
    text, reply = answer.result()
    assert text == "Hello there."
    run = caller.run(reply["baton"]["run"])
    assert outcomes(run) == [["unknown", "ok"]]
    assert run["held"] == {"usd": 0.0, "tokens": 0}
    assert run["spent"]["tokens"] == run["total_usage"]["input"] + run["total_usage"]["output"]
    assert run["total_usage"]["estimated"] is True
    victim.start()


def test_an_answer_that_had_begun_is_not_mixed_with_its_successor(
    installation: Installation, caller: Caller, aside: Any
) -> None:
    installation.stub.script("alpha", Reply(chunks=("Hello", " there"), fault=Stall(after=1)))
    installation.stub.always("alpha", Reply(chunks=("World", " over")))
    chunks = caller.client.chat.completions.create(model="baton-mini", messages=user_message("Go on."), stream=True)  # type: ignore[call-overload]
    first_pieces = [next(chunks).choices[0].delta.content for _ in range(2)]
    victim = installation.holding()
    victim.kill()
    with pytest.raises(openai.APIError, match="changed while it was streamed"):
        first_pieces.extend(chunk.choices[0].delta.content for chunk in chunks)
    assert "".join(filter(None, first_pieces)) == "Hello"
    (row,) = caller.read("/v1/runs", limit=1)["data"]
    assert outcomes(caller.run(row["id"])) == [["unknown", "ok"]]
    victim.start()


@pytest.mark.parametrize("stage", ["planning", "working"])
def test_a_run_whose_gateway_was_killed_is_brought_to_its_end(
    installation: Installation, aside: Any, stage: str
) -> None:
    model = "planner" if stage == "planning" else "alpha"
    installation.stub.script(model, Hang(None if stage == "planning" else 2.0))
    with open_caller(installation.gateway.url) as caller, suppress(openai.APIError):
        request = {"model": "baton-ultra", "messages": user_message("Outlive it."), "extra_body": {}}
        if stage == "working":
            request["extra_body"] = {"baton": {"plan": CHAIN}}
        lost = aside(caller.client.chat.completions.create, **request)
        calls(installation, model)
        (name,) = [row["id"] for row in caller.read("/v1/runs", limit=1)["data"]]
        installation.gateway.kill()
        lost.result()
    wait_until(lambda: installation.has_ended(name), what="dispatchers bring the run to its end")
    installation.gateway.start()
    wait_until(installation.gateway.ready, what="the gateway is back")
    with open_caller(installation.gateway.url) as caller:
        run, events = caller.run(name), caller.events(name)
    assert run["state"] == "succeeded"
    assert [event["kind"] for event in events].count("run.succeeded") == 1
    assert all(attempts.count("ok") == 1 for attempts in outcomes(run))
    if stage == "planning":
        first, again = run["proposals"]
        assert [call["outcome"] for call in first["attempts"]] == ["error"], "its engine has waited for it to the end"
        assert (first["outage"], again["mode"], again["state"]) == (True, "fallback", "accepted")


@pytest.mark.parametrize(("tier", "model"), [("baton-mini", "alpha"), ("baton-ultra", "planner")])
@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_a_caller_who_leaves_ends_the_call_upstream(
    installation: Installation, caller: Caller, tier: str, model: str, streams: bool
) -> None:
    installation.stub.script(model, Hang())
    body = {"model": tier, "messages": user_message("Never mind."), "stream": streams}
    gateway = caller.http.base_url
    connection = HTTPConnection(gateway.host, gateway.port)
    headers = {"authorization": caller.http.headers["authorization"], "content-type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    wait_until(lambda: installation.stub.requests(model), what="the call is made")
    connection.close()
    wait_until(
        lambda: list_disconnected(installation, model), within=BEFORE_ITS_DEADLINE, what="the call is broken off"
    )
    (row,) = caller.read("/v1/runs", limit=1)["data"]
    wait_until(lambda: caller.run(row["id"])["ended_at"], what="the run ends")
    run = caller.run(row["id"])
    assert run["state"] == "cancelled"
    assert run["held"] == {"usd": 0.0, "tokens": 0}


def test_a_caller_who_leaves_in_the_middle_of_an_answer_ends_it(installation: Installation, caller: Caller) -> None:
    installation.stub.script("alpha", Reply(endless=True, gap=0.02))
    chunks = caller.client.chat.completions.create(model="baton-mini", messages=user_message("Go on."), stream=True)  # type: ignore[call-overload]
    for _ in range(4):
        next(chunks)
    chunks.close()
    wait_until(
        lambda: list_disconnected(installation, "alpha"), within=BEFORE_ITS_DEADLINE, what="the call is broken off"
    )


def test_an_emptied_redis_is_no_event(installation: Installation, caller: Caller, aside: Any) -> None:
    for name in WORKERS:
        installation.stub.always(name, Reply(first_delay=0.3))
    answers = [aside(caller.ask_whole, "baton-ultra", "Remember me.") for _ in range(6)]
    with Redis.from_url(installation.redis) as redis:
        while not all(answer.done() for answer in answers):
            empty(redis)
            time.sleep(EMPTY_PAUSE)
    for answer in answers:
        run = caller.run(answer.result()[1]["baton"]["run"])
        of_steps = outcomes(run)
        # An engine that stands still for longer than its lease loses the run, whose plan is then made anew.
        in_force = [of_steps[n] for n in run["proposals"][-1]["steps"]]
        assert (run["state"], [attempts.count("ok") for attempts in in_force]) == ("succeeded", [1] * 3)


def empty(redis: Redis) -> None:
    """FLUSHALL, or as much of it as a server that is not ours allows."""
    if "BATON_TEST_REDIS_URL" not in os.environ:
        redis.flushall()
    elif keys := list(redis.scan_iter("baton:*")):
        redis.delete(*keys)


def test_processes_may_start_before_their_servers(
    tmp_path: Path, stub: StubControl, shared_installation: Installation, postgres_data: Path
) -> None:
    """In whatever order a machine comes up, and without a restart."""
    stub.clear()
    with servers.postgres(copied=postgres_data) as postgres, servers.redis() as redis:
        postgres.stop()
        redis.stop()
        environ = settings(tmp_path, stub, postgres.url, redis.url)
        with (
            running_process("gateway", tmp_path, environ, wait=False) as gateway,
            running_process("dispatcher", tmp_path, environ, wait=False) as dispatcher,
        ):
            wait_until(lambda: answers(gateway, "/healthz") == 200, what="it lives")
            dispatcher.wait_until_announced()
            assert answers(gateway, "/readyz") == 503
            with open_caller(gateway.url) as caller, pytest.raises(openai.InternalServerError):
                caller.ask_whole("baton-mini", "Too early?")
            postgres.start()
            redis.start()
            assert answers(gateway, "/readyz") == 503, "it has no schema yet"
            assert run_command(tmp_path, environ, "migrate").returncode == 0
            wait_until(gateway.ready, what="it is ready")
            with open_caller(gateway.url) as caller:
                text, _ = wait_until(lambda: patient(caller), what="its first key is there")
                assert text == "Hello there."
                redis.stop()
                assert caller.ask_whole("baton-mini", "Is the bell needed?")[0] == "Hello there."
                assert answers(gateway, "/readyz") == 200, "it serves, degraded"


def answers(process: Process, path: str) -> int:
    """The status of a probe; 0 while nobody listens."""
    with suppress(httpx.TransportError):
        return httpx.get(f"{process.url}{path}", timeout=PATIENCE_SECONDS, trust_env=False).status_code
    return 0


def patient(caller: Caller) -> tuple[str, dict[str, Any]] | None:
    """An answer, unless the caller's key is not known yet."""
    with suppress(openai.AuthenticationError):
        return caller.ask_whole("baton-mini", "And now?")
    return None
