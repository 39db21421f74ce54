"""Spans and metrics leave the process if there is an endpoint for them, and a collector that fails holds nothing up.

What would send them is loaded by nobody else: see `test_commands.py`.
"""

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from app.core.run.identifiers import NO_TRACE
from app.network.tracing import OPERATION_DURATION, TOKEN_USAGE, Tracing, endpoint_variable
from app.process import otlp
from tests.harness.in_process import ask, client_of, pool_text, running_service
from tests.harness.otlp import Collector, running_collector
from tests.harness.servers import free_port
from tests.harness.waiting import until, wait_until
from tests.stubs import ProviderStub

ENDPOINT = "OTEL_EXPORTER_OTLP_ENDPOINT"
TRACES_ENDPOINT = "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT"
HUNG_SECONDS = 30.0
"""A process that waited for a hung export would take longer: the exporter's own patience is twice that."""


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    """A collector whose address is in the usual variable."""
    with running_collector() as running:
        monkeypatch.setenv(ENDPOINT, running.url)
        monkeypatch.setenv("no_proxy", "*")
        yield running


@pytest.mark.long
async def test_spans_and_metrics_go_to_the_endpoint(collector: Collector, stub: ProviderStub, tmp_path: Path) -> None:
    async with running_service(tmp_path, pool_text(stub)) as runtime, client_of(runtime) as client:
        assert (await ask(client)).status_code == 200
    assert [(span.name, span.kind, span.service) for span in collector.spans] == [
        ("POST /v1/chat/completions", "SERVER", "baton"),
        ("invoke_workflow baton-mini", "INTERNAL", "baton"),
        ("chat alpha", "CLIENT", "baton"),
    ]
    assert len({span.trace for span in collector.spans}) == 1
    assert collector.metrics >= {TOKEN_USAGE, OPERATION_DURATION}


@pytest.mark.parametrize(
    ("environ", "traces", "metrics"),
    [
        ({}, "", ""),
        ({ENDPOINT: "http://c:4318"}, ENDPOINT, ENDPOINT),
        ({TRACES_ENDPOINT: "http://c:4318/v1/traces"}, TRACES_ENDPOINT, ""),
        ({ENDPOINT: "http://c:4318", TRACES_ENDPOINT: "http://d:4318/v1/traces"}, TRACES_ENDPOINT, ENDPOINT),
        ({ENDPOINT: "http://c:4318", "OTEL_METRICS_EXPORTER": "none"}, ENDPOINT, ""),
        ({ENDPOINT: "http://c:4318", "OTEL_TRACES_EXPORTER": "none"}, "", ENDPOINT),
        ({ENDPOINT: "http://c:4318", "OTEL_SDK_DISABLED": "true"}, "", ""),
    ],
)
def test_the_usual_variables_say_what_is_exported(environ: dict[str, str], traces: str, metrics: str) -> None:
    assert (endpoint_variable("TRACES", environ), endpoint_variable("METRICS", environ)) == (traces, metrics)


def test_the_sampler_and_the_service_name_are_those_of_the_variables(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = []
    for sampler in ("always_on", "always_off"):
        monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
        monkeypatch.setenv("OTEL_SERVICE_NAME", sampler)
        export = otlp.export("here", {ENDPOINT: collector.url, "OTEL_SERVICE_NAME": sampler})
        Tracing(export.tracer).start("a", NO_TRACE, {}).end()
        export.close()
        names = [span.service for span in collector.spans]
    assert names == ["always_on"]


@pytest.mark.long
async def test_a_collector_that_hangs_or_is_down_costs_a_caller_nothing(
    collector: Collector, stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The service serves while an export hangs, and ends long before that export would."""
    monkeypatch.setattr(otlp, "FLUSH_SECONDS", 0.1)
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "600")
    collector.may_answer.clear()
    async with running_service(tmp_path, pool_text(stub)) as runtime, client_of(runtime) as client:
        assert (await ask(client)).status_code == 200
        await until(lambda: collector.requests, what="an export hangs")
        assert (await ask(client)).status_code == 200
        leaving = time.monotonic()
    assert time.monotonic() - leaving < HUNG_SECONDS
    monkeypatch.setenv(ENDPOINT, f"http://127.0.0.1:{free_port()}")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    (tmp_path / "down").mkdir()
    async with running_service(tmp_path / "down", pool_text(stub)) as runtime, client_of(runtime) as client:
        assert (await ask(client)).status_code == 200
    collector.may_answer.set()
    # Exporters that go on would draw their pauses by `random`, for which Hypothesis would blame a later test.
    await until(lambda: not any(thread.name.startswith("Otel") for thread in threading.enumerate()))


def test_spans_that_cannot_be_sent_wait_in_a_bounded_queue(
    collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "10")
    monkeypatch.setenv("OTEL_BSP_MAX_QUEUE_SIZE", "4")
    monkeypatch.setenv("OTEL_BSP_MAX_EXPORT_BATCH_SIZE", "2")
    collector.may_answer.clear()
    export = otlp.export("here", {ENDPOINT: collector.url})
    tracing = Tracing(export.tracer)
    tracing.start("first", NO_TRACE, {}).end()
    wait_until(lambda: collector.requests, what="an export hangs")
    for number in range(20):
        tracing.start(f"span {number}", NO_TRACE, {}).end()
    collector.may_answer.set()
    export.close()
    assert [span.name for span in collector.spans] == ["first", *(f"span {number}" for number in range(16, 20))]
