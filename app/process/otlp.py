"""The export of spans over OTLP.

`wiring.py` imports this module by name, only where an endpoint is configured: it is a tenth of a process's imports, and
most processes do not need it.
"""

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor


def tracer(home: str) -> trace.Tracer:
    """Return the tracer of the process `home`. OpenTelemetry's own variables name the endpoint."""
    resource = Resource.create({"service.name": "baton", "service.instance.id": home})
    provider = TracerProvider(resource=resource)
    provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter()))
    return provider.get_tracer("baton")
