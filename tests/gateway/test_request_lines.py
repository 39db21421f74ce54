"""The log: one line for each HTTP request and one for each step, and nothing in them that a caller has written."""

import asyncio
import json
import logging
import re
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.process.wiring import Runtime
from app.telemetry import JsonLines
from tests.gateway.test_connection import Line
from tests.harness.conversations import look_call, tool_call_reply
from tests.harness.in_process import client_of, plan, pool_text, running_service
from tests.harness.prepared_apps import lent_app
from tests.harness.stand_ins import GatewayStandIn, chat_body, serving
from tests.harness.waiting import until
from tests.stubs import Fail, Hang, ProviderStub, Reply

QUESTION = "What is the canary's name?"
PAGE = Path(__file__).resolve().parents[2] / "deploy/docs/monitoring.md"
REQUEST, STEP = "A request has ended.", "A step has ended."
TOOLS = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]


class Lines(logging.Handler):
    """The lines of this process, as a collector of logs reads them."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.setFormatter(JsonLines())

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(self.format(record))

    def of(self, message: str) -> list[dict[str, Any]]:
        return [line for line in map(json.loads, self.texts) if line["message"] == message]


@pytest.fixture
def lines() -> Iterator[Lines]:
    log, records = logging.getLogger("baton"), Lines()
    log.addHandler(records)
    before = log.level
    log.setLevel(logging.INFO)
    yield records
    log.removeHandler(records)
    log.setLevel(before)


@pytest.fixture
async def service(stub: ProviderStub, tmp_path: Path) -> AsyncIterator[Runtime]:
    async with running_service(tmp_path, pool_text(stub)) as runtime:
        yield runtime


@pytest.fixture
async def caller(service: Runtime) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(service) as client:
        yield client


async def complete(client: httpx.AsyncClient, id_: str = "r1", **more: Any) -> httpx.Response:
    body = {"model": "baton-mini", "messages": [{"role": "user", "content": QUESTION}]} | more
    return await client.post("/v1/chat/completions", json=body, headers={"x-request-id": id_})


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_and_its_step_have_a_line_each(
    stub: ProviderStub, caller: httpx.AsyncClient, lines: Lines, stream: bool
) -> None:
    stub.always("alpha", Reply(chunks=("Tweety", ".")))
    reply = await complete(caller, stream=stream)
    run = reply.headers["x-baton-run"]
    (request,), (step,) = lines.of(REQUEST), lines.of(STEP)
    bill = (await caller.get(f"/v1/runs/{run}")).json()
    shared = {"run": run, "request": "r1", "tier": "baton-mini", "key": "caller", "tenant": "acme", "level": "info"}
    assert request.items() >= (shared | {"cost_usd": bill["cost_usd"], "outcome": "answered"}).items()
    assert (request["route"], request["method"], request["status"]) == ("/v1/chat/completions", "POST", 200)
    assert step.items() >= (shared | {"cost_usd": bill["cost_usd"], "outcome": "done"}).items()
    assert (step["step"], step["worker"], step["attempt"]) == (0, "alpha", 1)
    assert step["tokens"] == bill["spent"]["tokens"] > 0
    assert request["ms"] > step["ms"] > 0
    assert request["at"].endswith("Z")
    assert len(request["at"]) == len("2026-11-23T14:00:00.123Z")
    assert "canary" not in str(lines.texts)
    assert "Tweety" not in str(lines.texts)
    logs = PAGE.read_text().partition("\n## Logs\n")[2].partition("\n## ")[0]
    first_cells = [row.split("|")[1] for row in logs.splitlines() if row.startswith("|")]
    assert {*request, *step} <= set(re.findall(r"`(\w+)`", " ".join(first_cells)))


async def test_a_workflow_has_one_line_for_each_step(
    stub: ProviderStub, caller: httpx.AsyncClient, lines: Lines
) -> None:
    stub.always("alpha", Fail(status=500))
    stub.always("beta", Reply(chunks=("Fine.",)))
    steps = plan(("beta", "Think", ["user"]), ("alpha", "Answer", ["user", 0]))
    reply = await complete(caller, baton={"plan": steps})
    assert reply.status_code == 200, reply.text
    (request,) = lines.of(REQUEST)
    first, second = sorted(lines.of(STEP), key=lambda line: line["step"])
    assert (first["worker"], first["attempt"], first["outcome"]) == ("beta", 1, "done")
    assert (second["outcome"], second["attempt"] > 1, second["worker"] != "alpha") == ("done", True, True)
    assert request["cost_usd"] == pytest.approx(first["cost_usd"] + second["cost_usd"])


async def test_a_step_that_fails_names_the_reason(stub: ProviderStub, caller: httpx.AsyncClient, lines: Lines) -> None:
    for worker in ("alpha", "beta", "gamma"):
        stub.always(worker, Fail(status=400))
    assert (await complete(caller)).status_code == 400
    (step,), (request,) = lines.of(STEP), lines.of(REQUEST)
    assert (step["outcome"], step["error"], step["reason"]) == ("failed", "worker_refused", "refused")
    assert (request["status"], request["outcome"], request["code"]) == (400, "failed", "worker_refused")


async def test_each_turn_of_a_step_has_a_line(stub: ProviderStub, caller: httpx.AsyncClient, lines: Lines) -> None:
    stub.script("alpha", tool_call_reply(look_call("a")))
    message = (await complete(caller, "r1", tools=TOOLS)).json()["choices"][0]["message"]
    stub.always("alpha", Reply(chunks=("Tweety.",)))
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "4"}
    history = [{"role": "user", "content": QUESTION}, message, result]
    reply = await complete(caller, "r2", tools=TOOLS, messages=history)
    facts = [(line["request"], line["outcome"], line["attempt"]) for line in lines.of(STEP)]
    assert facts == [("r1", "awaiting_tool", 1), ("r2", "done", 1)]
    costs = [line["cost_usd"] for line in lines.of(STEP)]
    assert costs == [line["cost_usd"] for line in lines.of(REQUEST)]
    whole = (await caller.get(f"/v1/runs/{reply.headers['x-baton-run']}")).json()["cost_usd"]
    assert sum(costs) == pytest.approx(whole)


async def test_a_client_that_leaves_has_its_line(
    stub: ProviderStub, service: Runtime, caller: httpx.AsyncClient, lines: Lines
) -> None:
    stub.always("alpha", Hang())
    async with serving(lent_app(service.gateway), service.gateway) as url:
        async with httpx.AsyncClient(base_url=url, headers=caller.headers) as client:
            for stream in (True, False):
                asking = asyncio.create_task(complete(client, f"stream-{stream}", stream=stream))
                await until(lambda: len(service.dispatcher) == 1)
                asking.cancel()
                await asyncio.wait([asking])
                await until(lambda: len(service.dispatcher) == 0)
        await until(lambda: len(lines.of(REQUEST)) == 2)
    outcomes = {line["request"]: (line["status"], line["outcome"]) for line in lines.of(REQUEST)}
    assert outcomes == {"stream-True": (200, "disconnected"), "stream-False": (499, "disconnected")}
    assert [line["outcome"] for line in lines.of(STEP)] == ["cancelled", "cancelled"]


async def test_a_request_without_a_caller_has_its_line(gateway: GatewayStandIn, lines: Lines) -> None:
    async with gateway.client() as client:
        await client.post("/v1/chat/completions", json=chat_body())
        await client.get("/no/such/%1b[31mroute?text=canary")
        await client.get("/healthz")
        await client.get("/v1/runs", headers={"x-request-id": "two\nlines", "user-agent": "canary"})
    facts = [(line["route"], line["status"], line.get("code")) for line in lines.of(REQUEST)]
    assert facts == [
        ("/v1/chat/completions", 401, "invalid_api_key"),
        ("unmatched", 404, "unknown_url"),
        ("/healthz", 200, None),
        ("/v1/runs", 401, "invalid_api_key"),
    ]
    assert not [line for line in lines.of(REQUEST) if "key" in line or "run" in line]
    assert "canary" not in str(lines.texts)
    assert "31m" not in str(lines.texts)


async def test_bytes_that_are_no_request_have_a_line(gateway: GatewayStandIn, lines: Lines) -> None:
    async with serving(gateway.app, gateway.context) as url:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(url.rpartition(":")[2]))
        await Line(reader, writer).send(b"canary\r\n\r\n")
        assert (await Line(reader, writer).reply())[0] == 400
        writer.close()
    (line,) = lines.of(REQUEST)
    assert (line["route"], line["status"], line["code"]) == ("unmatched", 400, "invalid_http")
    assert "canary" not in str(lines.texts)


@pytest.mark.parametrize(("setting", "paths"), [("api", ["/v1/models"]), ("off", [])])
async def test_lines_can_be_switched_off(
    stub: ProviderStub, tmp_path: Path, lines: Lines, setting: str, paths: list[str]
) -> None:
    settings = {"BATON_LOG_REQUESTS": setting, "BATON_LOG_STEPS": "off"}
    stub.always("alpha", Reply(chunks=("Fine.",)))
    async with running_service(tmp_path, pool_text(stub), settings) as runtime, client_of(runtime) as client:
        for path in ("/healthz", "/readyz", "/metrics", "/v1/models"):
            await client.get(path)
        routes = [line["route"] for line in lines.of(REQUEST)]
        await complete(client)
    assert routes == paths
    assert lines.of(STEP) == []
