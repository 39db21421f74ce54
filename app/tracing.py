"""Every span name of the service, in one place, and the object that makes spans.

Spans have OpenTelemetry's GenAI names where those exist (`invoke_workflow`, `plan`, `chat`) and begin with `baton.`
otherwise. They are exported only when `OTEL_EXPORTER_OTLP_ENDPOINT` is set, and cost almost nothing otherwise.
"""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

from opentelemetry import trace

NO_SPAN: AbstractContextManager[object] = nullcontext()
"""Shared by all callers, because every waiting run and call holds a span."""
SPAN_RUN, SPAN_PLAN, SPAN_CALL = "invoke_workflow", "plan", "chat"


class Tracing:
    """The spans of one process, made once in `wiring.py` and passed on."""

    def __init__(self, tracer: trace.Tracer | None = None) -> None:
        self._tracer = tracer

    def span(self, name: str, attributes: Mapping[str, str | int | float | bool]) -> AbstractContextManager[object]:
        """Return a span around a block, or a null context when no exporter is configured."""
        if self._tracer is None:
            return NO_SPAN
        return self._tracer.start_as_current_span(name, attributes=dict(attributes))
