"""Callers who come back: real processes of two gateways and two dispatchers over Postgres and Redis, killed at will.

A request with an Idempotency-Key is one run and one reply, whichever gateway is asked, and whatever has died meanwhile.
"""

import asyncio
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from tests.harness.processes import KEY, Process, run_command, user_message
from tests.harness.waiting import PATIENCE_SECONDS, wait_until
from tests.integration.installation import Installation, execute, launch, settings
from tests.stubs import Fail, Hang, Reply, Stall
from tests.stubs.control import StubControl

pytestmark = [pytest.mark.integration, pytest.mark.faults]

PIECES = ("Vier ", "mal ", "fünf ", "ist ", "zwanzig.")
ANSWER = "".join(PIECES)
ASKED = {"model": "baton-mini", "messages": user_message("What is 4 times 5?")}


@pytest.fixture(scope="module")
def installed(
    tmp_path_factory: pytest.TempPathFactory, stub: StubControl, database: str, redis_server_url: str
) -> Iterator[tuple[Installation, Process]]:
    folder = tmp_path_factory.mktemp("house")
    environ = settings(folder, stub, database, redis_server_url)
    with launch(folder, environ, "gateway", "gateway", "dispatcher", "dispatcher") as (
        first_gateway,
        second_gateway,
        *dispatchers,
    ):
        wait_until(lambda: first_gateway.ready() and second_gateway.ready())
        yield Installation(stub, database, redis_server_url, first_gateway, dispatchers), second_gateway


@pytest.fixture
def installation(installed: tuple[Installation, Process]) -> Installation:
    """The house, with a worker that says its answer piece by piece. Its gateway is the one that is killed."""
    installation, _ = installed
    installation.stub.clear()
    installation.stub.always("alpha", Reply(chunks=PIECES))
    return installation


@pytest.fixture
def other(installed: tuple[Installation, Process]) -> Process:
    """The gateway that lives."""
    return installed[1]


@pytest.fixture
def aside() -> Iterator[Callable[..., "Future[Any]"]]:
    """Calls beside the test's own."""
    with ThreadPoolExecutor(16) as threads:
        yield threads.submit


@contextmanager
def revive_at_end(process: Process) -> Iterator[None]:
    """Whatever becomes of it in the block, it is there again afterwards."""
    try:
        yield
    finally:
        process.kill()
        process.start()
        wait_until(process.ready)


def post(process: Process, key: str, **more: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {KEY}", "Idempotency-Key": key}
    return httpx.post(
        f"{process.url}/v1/chat/completions", json=ASKED | more, headers=headers, timeout=30, trust_env=False
    )


@dataclass
class Part:
    """The part of a stream that a caller has received."""

    text: str = ""
    number: int = -1
    error: dict[str, Any] | None = None
    done: bool = False
    run: str = ""
    created: set[int] = field(default_factory=set)
    pieces: int = 0


def stream(
    process: Process, key: str, after: int | None = None, until: Callable[[Part], bool] = lambda part: False
) -> Part:
    """A streamed answer, from behind an event; to its end, or as far as wanted, or until the connection breaks."""
    headers = {"Authorization": f"Bearer {KEY}", "Idempotency-Key": key}
    headers |= {"Last-Event-ID": str(after)} if after is not None else {}
    body, part = ASKED | {"stream": True}, Part()
    with (
        httpx.Client(timeout=30, trust_env=False) as client,
        client.stream("POST", f"{process.url}/v1/chat/completions", json=body, headers=headers) as reply,
        suppress(httpx.TransportError),
    ):
        if reply.status_code != httpx.codes.OK:
            reply.read()
            part.error = reply.json()["error"] | {"status": reply.status_code}
            return part
        part.run = reply.headers["x-baton-run"]
        for line in reply.iter_lines():
            take(part, line)
            if until(part):
                break
    return part


def take(part: Part, line: str) -> None:
    """Note one line of a stream."""
    name, _, value = line.partition(": ")
    if name == "id":
        part.number = int(value)
    elif name == "data" and value == "[DONE]":
        part.done = True
    elif name == "data":
        chunk = orjson.loads(value)
        part.error = chunk.get("error")
        part.created |= {chunk["created"]} if "created" in chunk else set()
        text = "".join(choice["delta"].get("content") or "" for choice in chunk.get("choices", ()))
        part.text += text
        part.pieces += bool(text)


def attempts(process: Process, run: str) -> list[str]:
    """Return the outcomes of the attempts of a run's only step."""
    reply = httpx.get(
        f"{process.url}/v1/runs/{run}",
        headers={"Authorization": f"Bearer {KEY}"},
        timeout=PATIENCE_SECONDS,
        trust_env=False,
    )
    (step,) = reply.json()["steps"]
    return [attempt["outcome"] for attempt in step["attempts"]]


@pytest.mark.parametrize("act", [Reply(chunks=PIECES), Fail(status=400)], ids=["answered", "failed"])
def test_a_reply_is_the_same_bytes_after_its_gateway_was_killed(
    installation: Installation, other: Process, act: Any
) -> None:
    for name in ("alpha", "beta", "gamma"):
        installation.stub.always(name, act)
    key = uuid.uuid4().hex
    first = post(installation.gateway, key)
    calls = len(installation.stub.requests())
    with revive_at_end(installation.gateway):
        installation.gateway.kill()
        again = post(other, key)
    revenant = post(installation.gateway, key)
    assert first.status_code == (400 if isinstance(act, Fail) else 200)
    assert (first.status_code, first.content) == (again.status_code, again.content)
    assert (first.status_code, first.content) == (revenant.status_code, revenant.content)
    assert [reply.headers.get("idempotent-replayed") for reply in (first, again, revenant)] == [None, "true", "true"]
    assert len(installation.stub.requests()) == calls


def test_equal_requests_to_both_gateways_at_once_are_one_run(
    installation: Installation, other: Process, aside: Any
) -> None:
    installation.stub.always("alpha", Reply(chunks=PIECES, first_delay=0.3))
    for _ in range(3):
        key, calls = uuid.uuid4().hex, len(installation.stub.requests())
        requests = [aside(post, gateway, key) for gateway in (installation.gateway, other) * 5]
        replies = [request.result() for request in requests]
        assert {(reply.status_code, reply.content) for reply in replies} == {(200, replies[0].content)}
        assert sum("idempotent-replayed" not in reply.headers for reply in replies) == 1
        assert len(installation.stub.requests()) == calls + 1


def deltas_sent(installation: Installation) -> int:
    """The number of pieces of their answers that workers have sent."""
    return sum(record["deltas_sent"] for record in installation.stub.requests("alpha"))


def test_a_stream_goes_on_at_another_gateway_when_its_own_is_killed(
    installation: Installation, other: Process, aside: Any
) -> None:
    """The dispatcher goes on with the call, another process takes the run over, and the words keep coming."""
    installation.stub.always("alpha", Reply(chunks=PIECES * 12, gap=0.15))
    key = uuid.uuid4().hex
    with revive_at_end(installation.gateway):
        stream_of_other = aside(stream, installation.gateway, key)
        wait_until(lambda: deltas_sent(installation) > 4, what="it is in the middle of its answer")
        installation.gateway.kill()
        first = stream_of_other.result()
        assert 0 < len(first.text) < len(ANSWER * 12)
        assert not first.done
        rest = stream(other, key, first.number)
        whole = stream(other, key)
    assert first.text + rest.text == whole.text == ANSWER * 12
    assert (rest.done, rest.error) == (True, None)
    assert first.run == rest.run == whole.run
    assert len(first.created | rest.created | whole.created) == 1
    assert rest.pieces > 10, "words came as they were said"
    assert attempts(other, whole.run) == ["ok"]


@pytest.mark.parametrize("streams", [False, True], ids=["whole", "streamed"])
def test_a_request_whose_gateway_is_killed_is_answered_by_another(
    installation: Installation, other: Process, aside: Any, streams: bool
) -> None:
    installation.stub.always("alpha", Reply(chunks=PIECES, first_delay=1.0))
    key = uuid.uuid4().hex
    with revive_at_end(installation.gateway):
        lost = aside(post, installation.gateway, key, stream=streams)
        wait_until(lambda: installation.stub.requests("alpha"), what="it is called")
        installation.gateway.kill()
        assert lost.exception() is not None
        again = post(other, key, stream=streams)
    assert again.status_code == 200
    if streams:
        assert stream(other, key).text == ANSWER
    else:
        assert again.content == post(other, key, stream=False).content
    assert len(installation.stub.requests("alpha")) == 1


def test_words_of_a_lost_attempt_are_never_continued(installation: Installation, other: Process, aside: Any) -> None:
    """A dispatcher killed in the middle of an answer: who heard it is told where the answer is, and gets it whole."""
    installation.stub.script("alpha", Reply(chunks=("Fünf ", "mal"), fault=Stall(after=1)))
    key = uuid.uuid4().hex
    stream_of_other = aside(stream, installation.gateway, key)
    wait_until(lambda: installation.stub.requests("alpha"), what="it is called")  # before the other follows its run
    half = stream(other, key, until=lambda part: part.text == "Fünf ")
    victim = installation.holding()
    victim.kill()
    first = stream_of_other.result()
    victim.start()
    assert first.text == half.text == "Fünf "
    assert first.error is not None
    assert first.error["code"] == "answer_changed"
    assert f"Run {first.run} has succeeded" in first.error["message"]
    assert f"GET /v1/runs/{first.run}/stream" in first.error["message"]
    again, mixed = stream(other, key), stream(other, key, half.number)
    assert (again.text, again.done) == (ANSWER, True)
    assert mixed.error is not None
    assert (mixed.error["status"], mixed.error["code"]) == (409, "answer_changed")
    assert stream(installation.gateway, key, again.number).error is None
    assert attempts(other, first.run) == ["unknown", "ok"]


def test_a_run_is_stopped_by_a_gateway_that_does_not_drive_it(
    installation: Installation, other: Process, aside: Any
) -> None:
    installation.stub.always("alpha", Hang())
    request = aside(post, installation.gateway, uuid.uuid4().hex)
    wait_until(lambda: installation.stub.requests("alpha"), what="it is called")
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.Client(base_url=other.url, headers=headers, timeout=PATIENCE_SECONDS, trust_env=False) as client:
        (row,) = client.get("/v1/runs", params={"limit": 1}).json()["data"]
        assert client.post(f"/v1/runs/{row['id']}/cancel").status_code == 200
    assert request.result().json()["error"]["code"] == "run_cancelled"
    (record,) = wait_until(
        lambda: [request for request in installation.stub.requests("alpha") if request["disconnected_at"]]
    )
    assert record


def test_a_run_is_stopped_from_the_command_line(installation: Installation, aside: Any, tmp_path: Path) -> None:
    installation.stub.always("alpha", Hang())
    request = aside(post, installation.gateway, uuid.uuid4().hex)
    wait_until(lambda: installation.stub.requests("alpha"), what="it is called")
    rows = asyncio.run(execute(installation.database, "SELECT id FROM runs ORDER BY created_at DESC LIMIT 1"))
    command = run_command(installation.gateway.folder, installation.gateway.environ, "runs", "cancel", rows[0][0])
    assert command.returncode == 0, command.stderr
    assert request.result().json()["error"]["code"] == "run_cancelled"
