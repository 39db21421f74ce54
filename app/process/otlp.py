"""The export of spans and of GenAI metrics over OTLP.

`wiring.py` imports this module by name, only where an endpoint is configured: it is a tenth of a process's imports, and
most processes do not need it. OpenTelemetry's own variables configure it: endpoints, headers, certificates, time-outs,
`OTEL_TRACES_SAMPLER`, `OTEL_RESOURCE_ATTRIBUTES`, the sizes and pauses of `OTEL_BSP_*`.

Nothing here holds up a caller. Spans that have ended wait in a bounded queue (`OTEL_BSP_MAX_QUEUE_SIZE`, 2,048), from
which a thread sends them; what does not fit is dropped. `Export.close` gives the last batch `FLUSH_SECONDS`.
"""

import time
from collections.abc import Callable, Mapping
from importlib.metadata import version
from threading import Thread

from msgspec import Struct
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.metrics import Meter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor
from opentelemetry.trace import Tracer

from app.network.tracing import SCHEMA, endpoint_variable

FLUSH_SECONDS = 3.0
"""Time for which a process that stops waits until its last spans and figures are sent."""


class Export(Struct, frozen=True):
    """The exporters of one process. None stands for a signal that is not exported."""

    tracer: Tracer | None
    meter: Meter | None
    shutdowns: tuple[Callable[[], object], ...]

    def close(self) -> None:
        """Send what waits, for at most `FLUSH_SECONDS` altogether; call it in a thread."""
        until = time.monotonic() + FLUSH_SECONDS
        # The threads do not keep the process alive: one that still waits for a dead collector ends with it.
        flushing = [Thread(target=shutdown, daemon=True) for shutdown in self.shutdowns]
        for thread in flushing:
            thread.start()
        for thread in flushing:
            thread.join(max(until - time.monotonic(), 0.0))


def export(home: str, environ: Mapping[str, str]) -> Export:
    """Open the exporters of the process `home` that OpenTelemetry's variables ask for."""
    resource = _resource(home, environ)
    tracer, meter = None, None
    shutdowns: list[Callable[[], object]] = []
    if endpoint_variable("TRACES", environ):
        spans = TracerProvider(resource=resource, shutdown_on_exit=False)
        spans.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
        tracer = spans.get_tracer("baton", version("baton"), schema_url=SCHEMA)
        shutdowns.append(spans.shutdown)
    if endpoint_variable("METRICS", environ):
        reader = PeriodicExportingMetricReader(OTLPMetricExporter())
        figures = MeterProvider([reader], resource=resource, shutdown_on_exit=False)
        meter = figures.get_meter("baton", version("baton"), schema_url=SCHEMA)
        shutdowns.append(figures.shutdown)
    return Export(tracer, meter, tuple(shutdowns))


def _resource(home: str, environ: Mapping[str, str]) -> Resource:
    """Return the resource of all spans and metrics: this process, of the service `baton` unless the variables name
    another."""
    attributes = {"service.instance.id": home, "service.version": version("baton")}
    if not environ.get("OTEL_SERVICE_NAME") and "service.name=" not in environ.get("OTEL_RESOURCE_ATTRIBUTES", ""):
        attributes["service.name"] = "baton"
    return Resource.create(attributes)
