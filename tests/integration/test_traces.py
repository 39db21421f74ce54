"""One trace over two processes, a gateway and an engine, as a collector receives it; also when the engine is killed."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.harness.otlp import Collector, ExportedSpan, running_collector
from tests.harness.processes import KEY
from tests.harness.spans import CALLER, CALLERS_SPAN, TRACE_ID
from tests.harness.waiting import PATIENCE_SECONDS, wait_until
from tests.integration.installation import CHAIN, TREE, Installation, launch, settings
from tests.stubs import Hang
from tests.stubs.control import StubControl

pytestmark = [pytest.mark.integration, pytest.mark.faults]


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    """The collector to which both processes export."""
    with running_collector() as running:
        yield running


@pytest.fixture(scope="module")
def installation(
    tmp_path_factory: pytest.TempPathFactory,
    stub: StubControl,
    database: str,
    redis_server_url: str,
    collector: Collector,
) -> Iterator[Installation]:
    """A gateway and an engine, whose steps go over the queue."""
    folder = tmp_path_factory.mktemp("traces")
    environ = settings(folder, stub, database, redis_server_url) | {
        "BATON_STEPS": "spread",
        "OTEL_EXPORTER_OTLP_ENDPOINT": collector.url,
        "OTEL_BSP_SCHEDULE_DELAY": "20",
    }
    with launch(folder, environ, "gateway", "dispatcher") as (gateway, dispatcher):
        wait_until(gateway.ready)
        yield Installation(stub, database, redis_server_url, gateway, [dispatcher])


@pytest.fixture
def spans(installation: Installation, collector: Collector) -> Collector:
    """The collector, emptied, and a stub that plans three steps."""
    installation.stub.clear()
    installation.stub.always("planner", TREE)
    collector.requests.clear()
    return collector


def ask(installation: Installation, **more: Any) -> httpx.Response:
    """One request of a caller who belongs to a trace."""
    headers = CALLER | {"authorization": f"Bearer {KEY}"}
    body = {"model": "baton-ultra", "messages": [{"role": "user", "content": "What is it?"}], **more}
    url = f"{installation.gateway.url}/v1/chat/completions"
    return httpx.post(url, json=body, headers=headers, timeout=PATIENCE_SECONDS, trust_env=False)


def wait_for_spans(collector: Collector, name: str, count: int = 1) -> list[ExportedSpan]:
    """So many spans whose names begin so, once they were exported."""

    def enough_spans() -> list[ExportedSpan] | None:
        spans = [span for span in collector.spans if span.name.startswith(name)]
        return spans if len(spans) >= count else None

    return wait_until(enough_spans, what=f"{count} spans {name}") or []


def test_one_ultra_request_is_one_trace_over_two_processes(installation: Installation, spans: Collector) -> None:
    reply = ask(installation)
    assert reply.status_code == 200
    [server], [run], [plan] = (
        wait_for_spans(spans, "POST"),
        wait_for_spans(spans, "invoke_workflow"),
        wait_for_spans(spans, "plan"),
    )
    planning, *steps = wait_for_spans(spans, "chat", 4)
    of_run, *of_steps = wait_for_spans(spans, "baton.queue", 4)
    assert {span.trace for span in spans.spans} == {TRACE_ID}
    assert len(spans.spans) == 1 + 1 + 1 + 4 + 4
    assert (server.name, server.kind, server.parent) == ("POST /v1/chat/completions", "SERVER", CALLERS_SPAN)
    assert (run.name, run.kind, run.parent) == ("invoke_workflow baton-ultra", "INTERNAL", server.id)
    assert (plan.name, plan.parent) == ("plan", run.id)
    assert (planning.name, planning.kind, planning.parent) == ("chat planner", "CLIENT", plan.id)
    assert [span.parent for span in (of_run, *of_steps, *steps)] == [run.id] * 7
    assert sorted(step.name for step in steps) == ["chat alpha", "chat beta", "chat gamma"]
    assert sorted(step.attributes["baton.step"] for step in steps) == [0, 1, 2]
    assert sorted(step.attributes["baton.step"] for step in of_steps) == [0, 1, 2]
    assert server.attributes["baton.run"] == run.attributes["baton.run"] == reply.headers["x-baton-run"]
    assert run.process != server.process
    assert {span.process for span in spans.spans if span != server} == {run.process}
    assert not any(span.failed for span in spans.spans)
    traceparents = {
        request["model"]: dict(request["headers"])["traceparent"] for request in installation.stub.requests()
    }
    calls = {step.attributes["gen_ai.request.model"]: step for step in (planning, *steps)}
    assert traceparents == {model: f"00-{TRACE_ID}-{call.id}-01" for model, call in calls.items()}


def test_a_run_whose_engine_is_killed_continues_its_trace(installation: Installation, spans: Collector) -> None:
    installation.stub.script("beta", Hang())
    [engine] = installation.dispatchers
    with ThreadPoolExecutor(1) as aside:
        calling = aside.submit(ask, installation, baton={"plan": CHAIN})
        wait_until(lambda: installation.stub.requests("beta"), what="the last step is called")
        [lost] = wait_for_spans(spans, "chat alpha")
        engine.kill()
        engine.start()
        assert calling.result(PATIENCE_SECONDS).status_code == 200
    [workflow], [again], [server] = (
        wait_for_spans(spans, "invoke_workflow"),
        wait_for_spans(spans, "chat beta"),
        wait_for_spans(spans, "POST"),
    )
    assert {span.trace for span in spans.spans} == {TRACE_ID}
    assert lost.process != workflow.process == again.process
    assert (workflow.parent, workflow.attributes["baton.taken_over"]) == (server.id, True)
    assert again.parent in (workflow.id, server.id), "the step may be taken before the run"
    assert again.attributes["baton.attempt"] == 2
