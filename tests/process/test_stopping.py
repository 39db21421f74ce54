"""A gateway that is told to stop: it is not ready at once, and serves on until balancers have noticed."""

import asyncio
import http.client
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from uvicorn import Config

from app.gateway.http import connection as connections
from app.process.serve import Server
from tests.harness.processes import Process, environment, running_process
from tests.harness.stand_ins import GatewayStandIn
from tests.harness.waiting import PATIENCE_SECONDS, until, wait_until

NEVER = "3600"
"""A drain time that no test waits for."""


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Process]:
    """The whole service in one process, which drains until it is told a second time."""
    environ = environment(tmp_path, BATON_REHEARSAL_DELAY="0", BATON_DRAIN_SECONDS=NEVER)
    with running_process("serve", tmp_path, environ) as process:
        yield process
        process.send_sigterm()
        process.send_sigterm()


def readiness(service: Process) -> tuple[int, dict[str, Any]]:
    reply = httpx.get(f"{service.url}/readyz", timeout=PATIENCE_SECONDS, trust_env=False)
    return reply.status_code, reply.json()["checks"]


def ask(connection: http.client.HTTPConnection, key: str) -> http.client.HTTPResponse:
    """Ask a question over a connection that may be open already, and read the answer to its end."""
    body = {"model": "baton-mini", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}
    headers = {"Authorization": f"Bearer {key}", "Content-Type": "application/json"}
    connection.request("POST", "/v1/chat/completions", json.dumps(body), headers)
    reply = connection.getresponse()
    assert "choices" in json.loads(reply.read())
    return reply


def test_it_is_not_ready_and_serves_until_it_is_told_again(service: Process) -> None:
    match = re.search(r"export BATON_API_KEY=(bt_\S+)", service.output)
    assert match is not None
    open_connection, fresh = (
        http.client.HTTPConnection("127.0.0.1", service.port, timeout=PATIENCE_SECONDS) for _ in range(2)
    )
    assert ask(open_connection, match[1]).getheader("connection") is None
    assert readiness(service)[0] == 200
    service.send_sigterm()
    wait_until(lambda: readiness(service)[0] == 503, what="it is not ready")
    assert readiness(service)[1]["process"] == "stopping"
    for connection in (open_connection, fresh):  # one that was open before, and a new one
        reply = ask(connection, match[1])
        assert (reply.status, reply.getheader("connection")) == (200, "close")
        connection.close()
    assert service.alive
    assert service.stop() == 0


@pytest.mark.long
def test_every_reply_closes_its_connection_for_as_long_as_it_drains(service: Process) -> None:
    service.send_sigterm()
    wait_until(lambda: readiness(service)[0] == 503, what="it is not ready")
    seconds: set[str] = set()

    def three_seconds() -> bool:
        reply = httpx.get(f"{service.url}/healthz", timeout=PATIENCE_SECONDS, trust_env=False)
        assert reply.headers["connection"] == "close", seconds
        seconds.add(reply.headers["date"])
        return len(seconds) == 3

    wait_until(three_seconds, what="uvicorn has made its headers anew")


async def test_a_request_that_comes_as_the_process_stops_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "LINGER_SECONDS", PATIENCE_SECONDS)
    stand_in = GatewayStandIn()
    protocol = connections.connection(stand_in.context)
    server = Server(Config(stand_in.app, port=0, http=protocol, log_config=None, lifespan="off"))
    serving = asyncio.create_task(server.serve())
    await server.listening.wait()
    port = int(server.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    await until(lambda: bool(server.server_state.connections))
    server.should_exit = True
    await until(lambda: not server.servers[0].is_serving())
    writer.write(b"GET /healthz HTTP/1.1\r\nhost: baton\r\nconnection: close\r\n\r\n")
    assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
    writer.close()
    await serving


def test_an_interrupted_process_does_not_drain(tmp_path: Path) -> None:
    environ = environment(tmp_path, BATON_DRAIN_SECONDS=NEVER)
    with running_process("serve", tmp_path, environ) as process:
        process.interrupt()
        assert process.wait_for_exit() == 0


def test_an_idle_connection_is_kept_as_long_as_the_setting_says(tmp_path: Path) -> None:
    environ = environment(tmp_path, BATON_KEEP_ALIVE_SECONDS="1")
    with running_process("serve", tmp_path, environ) as process:
        connection = http.client.HTTPConnection("127.0.0.1", process.port, timeout=PATIENCE_SECONDS)
        connection.request("GET", "/healthz")
        assert connection.getresponse().read()
        assert connection.sock.recv(1) == b""  # closed by the gateway; with the default of 75 s this would time out
        connection.close()
