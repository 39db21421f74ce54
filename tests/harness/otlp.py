"""A collector: it takes spans and metrics over OTLP/HTTP and keeps them. It can be slow, or refuse everything."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Event, Thread
from typing import Any

from msgspec import Struct
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.proto.common.v1.common_pb2 import KeyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

KINDS = {Span.SPAN_KIND_INTERNAL: "INTERNAL", Span.SPAN_KIND_SERVER: "SERVER", Span.SPAN_KIND_CLIENT: "CLIENT"}


class ExportedSpan(Struct, frozen=True):
    """One span as a collector reads it; `process` is the `service.instance.id` of its process."""

    name: str
    kind: str
    trace: str
    id: str
    parent: str
    failed: bool
    attributes: dict[str, Any]
    links: tuple[str, ...]
    """The traces that it is linked to."""
    process: str
    service: str
    start: int


@dataclass
class Collector:
    """A collector of spans: what it has received, and its answers."""

    url: str = ""
    requests: list[tuple[str, bytes]] = field(default_factory=list)
    """The paths and bodies of requests."""
    status: int = 200
    may_answer: Event = field(default_factory=Event)
    """Answers wait for it."""

    @property
    def spans(self) -> list[ExportedSpan]:
        """All spans, in the order of their beginnings."""
        found: list[ExportedSpan] = []
        for path, body in list(self.requests):
            if path == "/v1/traces":
                found += _spans(body)
        return sorted(found, key=lambda exported: exported.start)

    @property
    def metrics(self) -> set[str]:
        """The names of all metrics."""
        bodies = [body for path, body in list(self.requests) if path == "/v1/metrics"]
        parts = [
            resource for body in bodies for resource in ExportMetricsServiceRequest.FromString(body).resource_metrics
        ]
        return {metric.name for part in parts for scope in part.scope_metrics for metric in scope.metrics}


def _spans(body: bytes) -> Iterator[ExportedSpan]:
    for part in ExportTraceServiceRequest.FromString(body).resource_spans:
        process = _values(part.resource.attributes)
        for span in [span for scope in part.scope_spans for span in scope.spans]:
            yield ExportedSpan(
                name=span.name,
                kind=KINDS[span.kind],
                trace=span.trace_id.hex(),
                id=span.span_id.hex(),
                parent=span.parent_span_id.hex(),
                failed=span.status.code == Status.STATUS_CODE_ERROR,
                attributes=_values(span.attributes),
                links=tuple(link.trace_id.hex() for link in span.links),
                process=process["service.instance.id"],
                service=process["service.name"],
                start=span.start_time_unix_nano,
            )


def _values(pairs: Any) -> dict[str, Any]:
    return {pair.key: _value(pair) for pair in pairs}


def _value(pair: KeyValue) -> Any:
    name = pair.value.WhichOneof("value")
    value = getattr(pair.value, name)
    return tuple(item.string_value for item in value.values) if name == "array_value" else value


@contextmanager
def running_collector() -> Iterator[Collector]:
    """A collector on a port of its own."""
    collector = Collector()
    collector.may_answer.set()

    class Taking(BaseHTTPRequestHandler):
        """One connection."""

        def do_POST(self) -> None:
            """Take one request."""
            collector.requests.append((self.path, self.rfile.read(int(self.headers["Content-Length"]))))
            collector.may_answer.wait()
            self.send_response(collector.status)
            self.end_headers()

        def log_message(self, *_words: Any) -> None:
            """Log nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Taking) as server:
        server.daemon_threads = True
        collector.url = f"http://127.0.0.1:{server.server_port}"
        listening = Thread(target=server.serve_forever, args=(0.01,))
        listening.start()
        try:
            yield collector
        finally:
            collector.may_answer.set()
            server.shutdown()
            listening.join()
