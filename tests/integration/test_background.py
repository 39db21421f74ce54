"""A background response outlives the gateway that accepted it: a dispatcher drives it from its first step, whatever
becomes of that gateway, and another one serves it. Leases are so long here that nobody can be waiting for one."""

import asyncio
from collections.abc import Iterator
from typing import Any

import httpx
import orjson
import pytest

from tests.harness.processes import KEY, Process
from tests.harness.waiting import wait_until
from tests.integration.installation import CHAIN, TREE, execute, launch, settings
from tests.stubs import Hang, Reply, ToolCall
from tests.stubs.control import StubControl

pytestmark = [pytest.mark.integration, pytest.mark.faults]

PIECES = ("Vier ", "mal ", "fünf ", "ist ", "zwanzig.")
ASKED: dict[str, Any] = {"model": "baton-mini", "input": "What is 4 times 5?", "background": True}
LEASE = 120.0
SOON = 40.0
"""Seconds within which a run has ended: on a busy machine, and all the same long before a lease."""
TAKEN_UP = 20.0
"""Seconds within which a dispatcher has begun with a run; it would wait for a lease if it were not notified."""
TOOL = {"type": "function", "name": "add", "parameters": {"type": "object"}}


@pytest.fixture(scope="module")
def installed(
    tmp_path_factory: pytest.TempPathFactory, stub: StubControl, database: str, redis_server_url: str
) -> Iterator[tuple[Process, Process, Process]]:
    """Two gateways, the first of which the tests end, and a dispatcher."""
    folder = tmp_path_factory.mktemp("house")
    environ = settings(folder, stub, database, redis_server_url) | {"BATON_LEASE_SECONDS": str(LEASE)}
    with launch(folder, environ, "gateway", "gateway", "dispatcher") as (first_gateway, second_gateway, dispatcher):
        yield first_gateway, second_gateway, dispatcher


@pytest.fixture
def gateways(installed: tuple[Process, Process, Process], stub: StubControl) -> tuple[Process, Process]:
    """Both of them, ready; the first is started again where a test has ended it."""
    first_gateway, second_gateway, _ = installed
    for process in (first_gateway, second_gateway):
        if not process.alive:
            process.start()
        wait_until(process.ready)
        wait_until(lambda process=process: process.metric("baton_queue_sound") == 1, what="a run may be handed over")
    stub.clear()
    return first_gateway, second_gateway


@pytest.fixture
def dispatcher(installed: tuple[Process, Process, Process]) -> Process:
    return installed[2]


def ask(process: Process, method: str, path: str, **more: Any) -> httpx.Response:
    headers = {"Authorization": f"Bearer {KEY}"}
    url = f"{process.url}/v1/responses{path}"
    return httpx.request(method, url, headers=headers, timeout=30, trust_env=False, **more)


def status(process: Process, response: str) -> str:
    reply = ask(process, "GET", f"/{response}")
    assert reply.status_code == 200, reply.text
    state: str = reply.json()["status"]
    return state


def text(response: dict[str, Any]) -> str:
    return "".join(part["text"] for item in response["output"] for part in item["content"])


def driven(database: str, response: str) -> tuple[int, int, float]:
    """A run's epoch, the process id of its driver, and the seconds from its admission to its first call."""
    run = response.removeprefix("resp_")
    (row,) = asyncio.run(execute(database, f"SELECT epoch, driver FROM runs WHERE id = '{run}'"))
    rows = asyncio.run(execute(database, f"SELECT kind, at FROM events WHERE run = '{run}' ORDER BY seq"))
    called = next(event["at"] for event in rows if event["kind"] == "call.intended")
    return row["epoch"], int(row["driver"].split("-")[-2]), called - rows[0]["at"]


@pytest.mark.parametrize(("model", "more"), [("baton-mini", {}), ("baton-ultra", {}), ("baton-ultra", {"plan": CHAIN})])
def test_a_dispatcher_drives_it_from_its_first_step(
    gateways: tuple[Process, Process],
    dispatcher: Process,
    stub: StubControl,
    database: str,
    model: str,
    more: dict[str, Any],
) -> None:
    first_gateway, second_gateway = gateways
    stub.always("planner", TREE)
    response = ask(first_gateway, "POST", "", json=ASKED | {"model": model, "baton": more}).json()
    first_gateway.kill()
    wait_until(lambda: status(second_gateway, response["id"]) == "completed", within=SOON)
    epoch, pid, took = driven(database, response["id"])
    assert (epoch, pid) == (2, dispatcher.pid)
    assert took < TAKEN_UP
    assert len(stub.requests("planner")) == (model == "baton-ultra" and not more)


def test_who_streams_it_hears_its_words_as_they_come(gateways: tuple[Process, Process], stub: StubControl) -> None:
    first_gateway, _ = gateways
    stub.always("alpha", Reply(chunks=PIECES * 4, gap=0.15))
    stream_text = ask(first_gateway, "POST", "", json=ASKED | {"stream": True}).text
    assert stream_text.count("event: response.output_text.delta") > 5
    assert "event: response.completed" in stream_text


def test_its_next_turn_is_driven_by_a_dispatcher_too(
    gateways: tuple[Process, Process], dispatcher: Process, stub: StubControl, database: str
) -> None:
    first_gateway, second_gateway = gateways
    stub.script("alpha", Reply(chunks=(), tool_calls=(ToolCall("add", "{}"),)), Reply(chunks=PIECES, first_delay=0.5))
    response = ask(first_gateway, "POST", "", json=ASKED | {"tools": [TOOL]}).json()
    wait_until(lambda: status(second_gateway, response["id"]) == "completed", within=SOON)
    (call,) = ask(second_gateway, "GET", f"/{response['id']}").json()["output"]
    result = {"type": "function_call_output", "call_id": call["call_id"], "output": "20"}
    more = {"previous_response_id": response["id"], "input": [result], "tools": [TOOL]}
    again = ask(first_gateway, "POST", "", json=ASKED | more).json()
    first_gateway.kill()
    wait_until(lambda: status(second_gateway, again["id"]) == "completed", within=SOON)
    assert text(ask(second_gateway, "GET", f"/{again['id']}").json()) == "".join(PIECES)
    assert driven(database, response["id"])[1] == dispatcher.pid
    assert len(stub.requests("alpha")) == 2


@pytest.mark.parametrize("end", ["stopped", "killed"])
def test_it_is_completed_and_served_without_the_gateway_that_accepted_it(
    gateways: tuple[Process, Process], stub: StubControl, end: str
) -> None:
    first_gateway, second_gateway = gateways
    stub.always("alpha", Reply(chunks=PIECES, gap=0.05))
    response = ask(first_gateway, "POST", "", json=ASKED).json()
    assert response["status"] in ("queued", "in_progress")
    if end == "killed":
        first_gateway.kill()
    else:
        first_gateway.stop()
    wait_until(lambda: status(second_gateway, response["id"]) not in ("queued", "in_progress"), within=SOON)
    whole = ask(second_gateway, "GET", f"/{response['id']}").json()
    assert (whole["status"], text(whole)) == ("completed", "".join(PIECES))
    stream_text = ask(second_gateway, "GET", f"/{response['id']}", params={"stream": "true"}).text
    events = [
        orjson.loads(line.removeprefix("data: ")) for line in stream_text.splitlines() if line.startswith("data: ")
    ]
    assert events[-1]["response"] == whole
    assert len(stub.requests("alpha")) == 1


def test_a_stream_of_it_goes_on_at_another_gateway(gateways: tuple[Process, Process], stub: StubControl) -> None:
    first_gateway, second_gateway = gateways
    stub.always("alpha", Reply(chunks=PIECES * 8, gap=0.1))
    response = ask(first_gateway, "POST", "", json=ASKED).json()
    wait_until(lambda: stub.requests("alpha"), what="it is called")
    first_gateway.kill()
    path = f"{second_gateway.url}/v1/responses/{response['id']}?stream=true"
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
    first_gateway, second_gateway = gateways
    stub.always("alpha", Hang())
    response = ask(first_gateway, "POST", "", json=ASKED).json()
    wait_until(lambda: status(second_gateway, response["id"]) == "in_progress")
    stopped = ask(second_gateway, "POST", f"/{response['id']}/cancel").json()
    assert stopped["status"] == "cancelled"
    assert status(first_gateway, response["id"]) == "cancelled"


def test_it_is_deleted_everywhere(gateways: tuple[Process, Process], stub: StubControl) -> None:
    first_gateway, second_gateway = gateways
    stub.always("alpha", Reply(chunks=PIECES))
    response = ask(first_gateway, "POST", "", json=ASKED).json()
    wait_until(lambda: status(second_gateway, response["id"]) == "completed", within=SOON)
    assert ask(second_gateway, "DELETE", f"/{response['id']}").json()["deleted"] is True
    assert ask(first_gateway, "GET", f"/{response['id']}").status_code == 404
