"""A trace over two processes, as a real back end shows it: Arize Phoenix takes it over OTLP. Run by `make trace`."""

import os
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.harness.processes import KEY
from tests.harness.servers import free_port
from tests.harness.spans import CALLER, CALLERS_SPAN, TRACE_ID
from tests.harness.waiting import wait_until
from tests.integration.installation import TREE, launch, settings
from tests.stubs.control import StubControl

PROGRAM = os.environ.get("BATON_TEST_PHOENIX", "")
START_SECONDS = 240.0
"""Phoenix makes its tables first, which takes ten seconds on an idle machine."""

pytestmark = [
    pytest.mark.integration,
    pytest.mark.faults,
    pytest.mark.timeout(600),
    pytest.mark.skipif(not PROGRAM, reason="Phoenix has an environment of its own: make trace"),
]


@contextmanager
def phoenix(folder: Path) -> Iterator[str]:
    """A Phoenix of its own, at this address."""
    port = free_port()
    url = f"http://127.0.0.1:{port}"
    environ = {
        "PATH": os.environ["PATH"],
        "HOME": str(folder),
        "PHOENIX_WORKING_DIR": str(folder),
        "PHOENIX_HOST": "127.0.0.1",
        "PHOENIX_PORT": str(port),
        "PHOENIX_GRPC_PORT": str(free_port()),
        "PHOENIX_TELEMETRY_ENABLED": "false",
    }
    with (folder / "phoenix.log").open("wb") as log:
        process = subprocess.Popen([PROGRAM, "serve"], env=environ, stdout=log, stderr=log)
        try:
            wait_until(lambda: get(url, "/healthz") is not None, within=START_SECONDS, what="Phoenix answers")
            yield url
        finally:
            process.terminate()
            process.wait()


def get(url: str, path: str, **parameters: str) -> httpx.Response | None:
    """The reply to a request; None while there is none."""
    try:
        reply = httpx.get(url + path, params=parameters, timeout=30, trust_env=False)
    except httpx.TransportError:
        return None
    return reply if reply.status_code == httpx.codes.OK else None


def find_exported_spans(url: str) -> list[dict[str, Any]] | None:
    """The spans of the caller's trace, once the run's own is among them, which ends last."""
    reply = get(url, "/v1/projects/default/spans", trace_id=TRACE_ID, limit="100")
    spans: list[dict[str, Any]] = reply.json()["data"] if reply is not None else []
    names = {span["name"] for span in spans}
    return spans if {"invoke_workflow baton-ultra", "POST /v1/chat/completions"} <= names else None


def test_phoenix_shows_one_trace_over_two_processes(
    tmp_path: Path, stub: StubControl, database: str, redis_server_url: str
) -> None:
    stub.always("planner", TREE)
    with phoenix(tmp_path) as url:
        environ = settings(tmp_path, stub, database, redis_server_url) | {
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{url}/v1/traces",
            "OTEL_BSP_SCHEDULE_DELAY": "100",
        }
        with launch(tmp_path, environ, "gateway", "dispatcher") as (gateway, _):
            wait_until(gateway.ready)
            body = {"model": "baton-ultra", "messages": [{"role": "user", "content": "What is it?"}]}
            headers = CALLER | {"authorization": f"Bearer {KEY}"}
            chat_url = f"{gateway.url}/v1/chat/completions"
            reply = httpx.post(chat_url, json=body, headers=headers, timeout=60, trust_env=False)
            assert reply.status_code == 200
            spans = wait_until(lambda: find_exported_spans(url), what="Phoenix shows the spans") or []
    by_name = {span["name"]: span for span in spans}
    own = {name: span["context"]["span_id"] for name, span in by_name.items()}
    assert {span["context"]["trace_id"] for span in spans} == {TRACE_ID}
    assert {name: span["parent_id"] for name, span in by_name.items()} == {
        "POST /v1/chat/completions": CALLERS_SPAN,
        "invoke_workflow baton-ultra": own["POST /v1/chat/completions"],
        "baton.queue": own["invoke_workflow baton-ultra"],
        "plan": own["invoke_workflow baton-ultra"],
        "chat planner": own["plan"],
        "chat alpha": own["invoke_workflow baton-ultra"],
        "chat beta": own["invoke_workflow baton-ultra"],
        "chat gamma": own["invoke_workflow baton-ultra"],
    }
    call = by_name["chat alpha"]
    assert call["span_kind"] == "LLM", "Phoenix knows a model's call by the attributes of the conventions"
    assert call["attributes"]["llm.model_name"] == call["attributes"]["baton.worker"] == "alpha"
    assert call["attributes"]["llm.token_count.completion"] > 0
