"""Spans leave the process if there is an endpoint for them. What would send them is loaded by nobody else: see
`test_commands.py`."""

from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from threading import Thread
from typing import Any, cast

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import Tracer

from app.process import wiring
from app.tracing import Tracing


class Collector(BaseHTTPRequestHandler):
    """Takes what is exported to it."""

    taken: list[tuple[str, bytes]]

    def do_POST(self) -> None:
        """One batch of spans."""
        self.taken.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_words: Any) -> None:
        """Say nothing."""


@pytest.fixture
def endpoint(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[str, bytes]]]:
    """What a collector has taken; its address is in the usual variable."""
    taken: list[tuple[str, bytes]] = []
    with HTTPServer(("127.0.0.1", 0), type("Taking", (Collector,), {"taken": taken})) as server:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", f"http://127.0.0.1:{server.server_port}")
        monkeypatch.setenv("no_proxy", "*")
        listening = Thread(target=server.serve_forever, args=(0.01,))
        listening.start()
        yield taken
        server.shutdown()
        listening.join()


def test_spans_go_to_the_endpoint(endpoint: list[tuple[str, bytes]]) -> None:
    tracer = cast(Tracer, wiring._tracer("house-1"))
    with tracer.start_as_current_span("invoke_workflow"):
        pass
    tracer.span_processor.shutdown()
    [(path, body)] = endpoint
    assert path == "/v1/traces"
    [exported] = ExportTraceServiceRequest.FromString(body).resource_spans
    assert [span.name for scope in exported.scope_spans for span in scope.spans] == ["invoke_workflow"]
    known = {one.key: one.value.string_value for one in exported.resource.attributes}
    assert (known["service.name"], known["service.instance.id"]) == ("baton", "house-1")


def test_without_an_endpoint_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OTEL_EXPORTER_OTLP_ENDPOINT", raising=False)
    assert wiring._tracer("house-1") is None
    tracing = Tracing(None)
    assert tracing.span("chat", {}) is tracing.span("plan", {})  # a waiting run holds nothing for it
