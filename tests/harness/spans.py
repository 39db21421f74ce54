"""The spans of services in this process, and callers that belong to a trace."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

from app.network.tracing import Tracing
from app.process.wiring import Runtime
from tests.harness.waiting import until

TRACE_ID: Final = "4bf92f3577b34da6a3ce929d0e0e4736"
CALLERS_SPAN: Final = "00f067aa0ba902b7"
CALLER: Final = {"traceparent": f"00-{TRACE_ID}-{CALLERS_SPAN}-01", "tracestate": "vendor=opaque"}
"""The headers of a caller that samples its trace."""


@dataclass
class Spans:
    """The spans that services in this process export."""

    exporter: InMemorySpanExporter = field(default_factory=InMemorySpanExporter)
    reader: InMemoryMetricReader = field(default_factory=InMemoryMetricReader)

    def record(self, runtime: Runtime) -> None:
        """Export the spans and metrics of a service from now on."""
        provider = TracerProvider(shutdown_on_exit=False)
        provider.add_span_processor(SimpleSpanProcessor(self.exporter))
        made = Tracing(provider.get_tracer("baton"), MeterProvider([self.reader]).get_meter("baton"))
        for name in ("_tracer", "_tokens", "_durations"):
            setattr(runtime.context.tracing, name, getattr(made, name))

    @property
    def ended(self) -> list[ReadableSpan]:
        """The spans that have ended, in the order of their beginnings."""
        return sorted(self.exporter.get_finished_spans(), key=lambda span: span.start_time or 0)

    async def wait_for_named(self, name: str, count: int = 1) -> list[ReadableSpan]:
        """So many spans whose names begin so, once they have ended."""

        def find_named() -> list[ReadableSpan]:
            return [span for span in self.ended if span.name.startswith(name)]

        await until(lambda: len(find_named()) >= count, what=f"{count} spans {name}")
        assert len(find_named()) == count, [span.name for span in self.ended]
        return find_named()

    def points(self, metric: str) -> list[Any]:
        """Return the data points of a metric."""
        data = self.reader.get_metrics_data()
        points: list[Any] = []
        for resource in data.resource_metrics if data else ():
            for scope in resource.scope_metrics:
                for recorded in scope.metrics:
                    if recorded.name == metric:
                        points += recorded.data.data_points
        return points


def parent_id(span: ReadableSpan) -> str:
    """Return the id of a span's parent; empty if it has none."""
    return f"{span.parent.span_id:016x}" if span.parent is not None else ""


def span_id(span: ReadableSpan) -> str:
    """Return the id of a span."""
    assert span.context is not None
    return f"{span.context.span_id:016x}"


def trace_of(span: ReadableSpan) -> str:
    """Return the id of a span's trace."""
    assert span.context is not None
    return f"{span.context.trace_id:032x}"


def attributes(span: ReadableSpan, *prefixes: str) -> Mapping[str, Any]:
    """Return the attributes of a span whose names begin with one of these; all of them without one."""
    every = dict(span.attributes or {})
    return {name: value for name, value in every.items() if not prefixes or name.startswith(prefixes)}


def has_failed(span: ReadableSpan) -> bool:
    """Return True if the span has the status ERROR."""
    return span.status.status_code is StatusCode.ERROR
