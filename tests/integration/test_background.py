"""A background response outlives the gateway that accepted it: stopped or killed right after, another one serves it."""

from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest

from tests.integration.installation import LEASE, launched, settings
from tests.processes import KEY, Process, within
from tests.stubs import Hang, Reply
from tests.stubs.control import StubControl

pytestmark = [pytest.mark.integration, pytest.mark.faults, pytest.mark.timeout(90)]

PIECES = ("Vier ", "mal ", "fünf ", "ist ", "zwanzig.")
ASKED: dict[str, Any] = {"model": "baton-mini", "input": "What is 4 times 5?", "background": True}
TAKEN_OVER = 2 * LEASE + 10
"""Seconds within which another process must have taken a run over, and ended it."""


@pytest.fixture(scope="module")
def installed(
    tmp_path_factory: pytest.TempPathFactory, stub: StubControl, database: str, redis_server_url: str
) -> Iterator[tuple[Process, Process]]:
    """Two gateways, the first of which the tests end, and a dispatcher."""
    folder = tmp_path_factory.mktemp("house")
    environ = settings(folder, stub, database, redis_server_url)
    with launched(folder, environ, "gateway", "gateway", "dispatcher") as (one, other, _):
        yield one, other


@pytest.fixture
def gateways(installed: tuple[Process, Process], stub: StubControl) -> tuple[Process, Process]:
    """Both of them, ready; the first is started again where a test has ended it."""
    for process in installed:
        if not process.alive:
            process.start()
        within(10, process.ready)
    stub.clear()
    return installed


def ask(process: Process, method: str, path: str, **more: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {KEY}"}
    url = f"{process.url}/v1/responses{path}"
    return httpx.request(method, url, headers=headers, timeout=30, trust_env=False, **more)


def status(process: Process, response: str) -> str:
    reply = ask(process, "GET", f"/{response}")
    assert reply.status_code == 200, reply.text
    found: str = reply.json()["status"]
    return found


def text(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_it_is_completed_and_served_without_the_gateway_that_accepted_it(
    gateways: tuple[Process, Process], stub: StubControl, end: str
) -> None:
    one, other = gateways
    stub.always("alpha", Reply(chunks=PIECES, gap=0.05))
    made = ask(one, "POST", "", json=ASKED).json()
    assert made["status"] in ("queued", "in_progress")
    if end == "killed":
        one.kill()
    else:
        one.stop()
    within(TAKEN_OVER, lambda: status(other, made["id"]) not in ("queued", "in_progress"))
    whole = ask(other, "GET", f"/{made['id']}").json()
    assert (whole["status"], text(whole)) == ("completed", "".join(PIECES))
    told = ask(other, "GET", f"/{made['id']}", params={"stream": "true"}).text
    events = [orjson.loads(line.removeprefix("data: ")) for line in told.splitlines() if line.startswith("data: ")]
    assert events[-1]["response"] == whole
    assert len(stub.requests("alpha")) == 1


def test_a_stream_of_it_goes_on_at_another_gateway(gateways: tuple[Process, Process], stub: StubControl) -> None:
    one, other = gateways
    stub.always("alpha", Reply(chunks=PIECES * 8, gap=0.1))
    made = ask(one, "POST", "", json=ASKED).json()
    within(5, lambda: stub.requests("alpha"), "it is called")
    one.kill()
    path = f"{other.url}/v1/responses/{made['id']}?stream=true"
    numbers, deltas = [], []
    headers = {"Authorization": f"Bearer {KEY}"}
    with httpx.stream("GET", path, headers=headers, timeout=30, trust_env=False) as reply:
        for line in reply.iter_lines():
            if line.startswith("data: "):
                event = orjson.loads(line.removeprefix("data: "))
                numbers.append(event["sequence_number"])
                deltas += [event["delta"]] if event["type"] == "response.output_text.delta" else []
    assert "".join(deltas) == "".join(PIECES * 8)
    assert len(deltas) > 5, "words came as they were said"
    assert numbers == sorted(set(numbers))
    assert (event["type"], event["response"]["status"]) == ("response.completed", "completed")


def test_it_is_cancelled_at_another_gateway(gateways: tuple[Process, Process], stub: StubControl) -> None:
    one, other = gateways
    stub.always("alpha", Hang())
    made = ask(one, "POST", "", json=ASKED).json()
    within(5, lambda: status(other, made["id"]) == "in_progress")
    stopped = ask(other, "POST", f"/{made['id']}/cancel").json()
    assert stopped["status"] == "cancelled"
    assert status(one, made["id"]) == "cancelled"


def test_it_is_deleted_everywhere(gateways: tuple[Process, Process], stub: StubControl) -> None:
    one, other = gateways
    stub.always("alpha", Reply(chunks=PIECES))
    made = ask(one, "POST", "", json=ASKED).json()
    within(TAKEN_OVER, lambda: status(other, made["id"]) == "completed")
    assert ask(other, "DELETE", f"/{made['id']}").json()["deleted"] is True
    assert ask(one, "GET", f"/{made['id']}").status_code == 404
