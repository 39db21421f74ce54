"""Webhooks by real processes: one is killed right after the end was committed, and the next one tells of it."""

import base64
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from tests.harness.processes import Process, open_caller
from tests.harness.waiting import PATIENCE_SECONDS, wait_until
from tests.integration.installation import settings
from tests.stubs import Reply
from tests.stubs.control import StubControl

pytestmark = [pytest.mark.integration, pytest.mark.faults]

SECRET = "whsec_" + base64.b64encode(b"s" * 32).decode()
Came = list[tuple[dict[str, str], bytes]]


@pytest.fixture
def came() -> Came:
    """The events that the receiver has received."""
    return []


@pytest.fixture
def address(came: Came) -> Iterator[str]:
    """A receiver that takes everything."""

    class Receiver(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            came.append((dict(self.headers), body))
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing is printed."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Receiver) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}/hook"
        server.shutdown()
        thread.join()


def one(database: Path, statement: str) -> Any:
    """The first value of a statement's answer."""
    with closing(sqlite3.connect(database, timeout=PATIENCE_SECONDS)) as connection, connection:
        return connection.execute(statement).fetchone()[0]


def test_a_process_killed_between_commit_and_delivery_loses_nothing(
    tmp_path: Path, stub: StubControl, address: str, came: Came
) -> None:
    database = tmp_path / "baton.db"
    environ = settings(tmp_path, stub, f"sqlite:///{database}", "") | {
        "BATON_WEBHOOK_URL": address,
        "BATON_WEBHOOK_SECRET": SECRET,
    }
    crashing = ("tests.faults.crashing_process", "--at", "append.after[run.succeeded]")
    process = Process("serve", tmp_path, environ, program=crashing)
    try:
        process.start()
        stub.script("alpha", Reply(first_delay=2.0))
        with open_caller(process.url) as caller:
            response = caller.client.responses.create(model="baton-mini", input="What is 2 + 2?", background=True)
            assert response.status in ("queued", "in_progress")
        wait_until(lambda: not process.alive, what="it dies with its commit")
        process.kill()
        assert one(database, "SELECT state FROM runs") == "succeeded"
        assert one(database, "SELECT count(*) FROM notices") == 1
        assert came == []
        process.program = ("app",)
        process.start()
        wait_until(lambda: came, what="the webhook is delivered")
        wait_until(lambda: one(database, "SELECT count(*) FROM notices") == 0, what="and done with")
        assert process.metric('baton_webhooks_total{outcome="delivered"}') == 1
        with open_caller(process.url) as caller:
            assert caller.client.responses.retrieve(response.id).status == "completed"
        assert process.stop() == 0
    finally:
        process.kill()
    ((headers, body),) = came
    event = OpenAI(api_key="unused").webhooks.unwrap(body, headers, secret=SECRET)
    assert event.type == "response.completed"
    assert event.data.id == response.id
