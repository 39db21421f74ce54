"""Spans on their way out over OTLP. `wiring.py` looks this up by name, where there is an endpoint: what it imports is a
tenth of a process's imports, and most processes have none."""

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor


def tracer(home: str) -> trace.Tracer:
    """Of the process `home`; where to comes from the usual variables."""
    resource = Resource.create({"service.name": "baton", "service.instance.id": home})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider.get_tracer("baton")
