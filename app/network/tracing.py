"""Every span of the service but a request's, and the object that makes spans and continues the traces of callers.

One trace goes from the caller through the gateway and the engine to each provider call:

    POST /v1/chat/completions      SERVER    gateway/http/connection.py
    └ invoke_workflow {tier}       INTERNAL  `start_run_span`: one for each turn and engine
      ├ baton.queue                INTERNAL  the wait of a run, or of one of its steps, for an engine
      ├ plan                       INTERNAL  a conductor proposes
      │ └ chat {model}             CLIENT    `CallSpan`
      └ chat {model}               CLIENT    one for each attempt of a step

Names and attributes are those of OpenTelemetry's HTTP and GenAI conventions, in the version that `SCHEMA` names, and
begin with `baton.` otherwise. They are ids, names and figures, never a text of a caller or a worker. A span's parent is
named by a `Trace`, which travels in the journal and in tickets; no context variable is used, since one task serves
several runs. `wiring.py` passes a tracer where spans are exported (`process/otlp.py`). Without one a span only stands
for its parent, so that the caller's trace id still reaches the journal and the providers.

A run has one span for each turn, and another one for each engine that takes the run from a lost one. All of them belong
to the trace of the admission; a turn whose request belongs to another trace is linked to it. A call has the attributes
of OpenTelemetry's conventions, and `baton.call`, `baton.worker`, `baton.step` (not for planning calls),
`baton.attempt`, `baton.outcome` and `baton.cost_micro_usd`. Names that a provider reports are left out where they do
not look like one. A call's share of the GenAI metrics is measured with its span.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Final
from urllib.parse import urlsplit

from opentelemetry import trace as otel
from opentelemetry.context import Context
from opentelemetry.metrics import Histogram, Meter
from opentelemetry.trace import Link, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from app.core.message.chat import End, Sampling
from app.core.pool.catalog import ProviderSpec, Worker
from app.core.run.events import CallFinished
from app.core.run.identifiers import NO_TRACE, Trace, trace_of_turn
from app.core.run.kinds import Kind
from app.core.run.state import RunState

SCHEMA = "https://opentelemetry.io/schemas/1.41.0"
"""The last version of the conventions that has the GenAI metrics below; the operation `plan` was added after it."""
SIGNALS = ("TRACES", "METRICS")
"""The signals that may be exported, by their names in OpenTelemetry's environment variables."""
SPAN_RUN, SPAN_PLAN, SPAN_CALL, SPAN_QUEUE = "invoke_workflow", "plan", "chat", "baton.queue"
TOKEN_USAGE, OPERATION_DURATION = "gen_ai.client.token.usage", "gen_ai.client.operation.duration"
TOKEN_BOUNDS = (1, 4, 16, 64, 256, 1024, 4096, 16384, 65536, 262144, 1048576, 4194304, 16777216, 67108864)
SECOND_BOUNDS = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 0.64, 1.28, 2.56, 5.12, 10.24, 20.48, 40.96, 81.92)
"""The limits of the buckets that the conventions give for the two metrics."""
LONGEST_HEADER = 512
"""Characters of a `traceparent` or `tracestate` that are read; a request with longer ones begins a trace of its own."""
NANOSECONDS = 1_000_000_000

Attributes = Mapping[str, str | int | float | bool | Sequence[str]]


class Span:
    """One operation of a trace, which is exported when it has ended.

    Where nothing is exported it only stands for its parent: what is set on it has no effect.
    """

    __slots__ = ("_span", "trace")

    def __init__(self, trace: Trace, span: otel.Span | None = None) -> None:
        """`trace` is the place of the span, by which others name it as their parent."""
        self.trace = trace
        self._span = span

    @property
    def is_recording(self) -> bool:
        """Return True if what is set on it is exported, so that it is worth computing."""
        return self._span is not None and self._span.is_recording()

    def set(self, attributes: Attributes) -> None:
        """Set attributes; later ones replace earlier ones of the same name."""
        if self._span is not None:
            self._span.set_attributes(attributes)

    def rename(self, name: str) -> None:
        """Give it another name than the one that it was started with."""
        if self._span is not None:
            self._span.update_name(name)

    def link(self, other: Trace) -> None:
        """Link it to a span of another trace."""
        if self._span is not None and other and other.id != self.trace.id:
            self._span.add_link(_context_of(other))

    def end(self, error: str = "") -> None:
        """End it, with the status ERROR and `error.type` if there is an error. Later calls change nothing."""
        if self._span is None:
            return
        if error:
            self._span.set_attribute("error.type", error)
            self._span.set_status(Status(StatusCode.ERROR))
        self._span.end()


class Tracing:
    """The spans of one process, and its metrics that are exported with them; made in `wiring.py` and passed on."""

    def __init__(self, tracer: otel.Tracer | None = None, meter: Meter | None = None) -> None:
        """Without a `tracer` no span is exported, and without a `meter` no metric."""
        self._tracer = tracer
        self._tokens: Histogram | None = None
        self._durations: Histogram | None = None
        if meter is not None:
            self._tokens = meter.create_histogram(
                TOKEN_USAGE,
                "{token}",
                "Number of input and output tokens used.",
                explicit_bucket_boundaries_advisory=TOKEN_BOUNDS,
            )
            self._durations = meter.create_histogram(
                OPERATION_DURATION,
                "s",
                "GenAI operation duration.",
                explicit_bucket_boundaries_advisory=SECOND_BOUNDS,
            )

    @property
    def exports(self) -> bool:
        """Return True if spans or metrics are exported, so that their attributes are worth computing."""
        return self._tracer is not None or self._durations is not None

    def start(
        self,
        name: str,
        parent: Trace,
        attributes: Attributes,
        *,
        kind: SpanKind = SpanKind.INTERNAL,
        links: Iterable[Trace] = (),
    ) -> Span:
        """Start a span, which the caller ends. Without a parent it begins a trace. `links` are spans of other traces.

        The flag of the parent says whether it is sampled, as far as `OTEL_TRACES_SAMPLER` leaves it to the parent.
        """
        if self._tracer is None:
            return Span(parent)
        others = []
        for link in links:
            if link and link.id != parent.id:
                others.append(Link(_context_of(link)))
        span = self._tracer.start_span(name, _below(parent), kind, attributes=attributes, links=others)
        return Span(_place(span), span)

    def record_wait(self, parent: Trace, since: float, until: float, attributes: Attributes) -> None:
        """Note a wait for an engine as a span; the times are in seconds since 1970."""
        if self._tracer is None or not parent or until <= since:
            return
        began = int(since * NANOSECONDS)
        span = self._tracer.start_span(SPAN_QUEUE, _below(parent), attributes=attributes, start_time=began)
        span.end(int(until * NANOSECONDS))

    def measure(self, seconds: float, tokens: Mapping[str, int], attributes: Attributes, error: str = "") -> None:
        """Add a provider call to the metrics: `tokens` by their type, `input` and `output`."""
        if self._tokens is None or self._durations is None:
            return
        error_attributes = {"error.type": error} if error else {}
        self._durations.record(seconds, {**attributes, **error_attributes})
        for kind, number in tokens.items():
            self._tokens.record(number, {**attributes, "gen_ai.token.type": kind})


def endpoint_variable(signal: str, environ: Mapping[str, str]) -> str:
    """Return which of OpenTelemetry's variables says where a signal, `TRACES` or `METRICS`, is exported to; empty if it
    is not."""
    if environ.get("OTEL_SDK_DISABLED", "").lower() == "true" or environ.get(f"OTEL_{signal}_EXPORTER") == "none":
        return ""
    for variable in (f"OTEL_EXPORTER_OTLP_{signal}_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT"):
        if environ.get(variable):
            return variable
    return ""


def read_trace_headers(headers: Iterable[tuple[bytes, bytes]]) -> Trace:
    """Return the place in the caller's trace that a request's headers name; none if they name none or are malformed."""
    values_by_name: dict[str, list[str]] = {}
    for name, value in headers:
        if name in (b"traceparent", b"tracestate"):
            values_by_name.setdefault(name.decode(), []).append(value.decode("latin-1"))
    parents, states = values_by_name.get("traceparent", []), ",".join(values_by_name.get("tracestate", []))
    if len(parents) != 1 or len(parents[0]) > LONGEST_HEADER:
        return NO_TRACE
    state = {"tracestate": states} if 0 < len(states) <= LONGEST_HEADER else {}
    return _place(otel.get_current_span(_read({"traceparent": parents[0], **state})))


def _read(headers: Mapping[str, str]) -> Context:
    return TraceContextTextMapPropagator().extract(headers)


def _below(parent: Trace) -> Context:
    """Return the context of the children of a span; that of a new trace where there is no parent."""
    if parent:
        return _read(parent.headers())
    return Context()


def _context_of(place: Trace) -> otel.SpanContext:
    return otel.get_current_span(_below(place)).get_span_context()


def _place(span: otel.Span) -> Trace:
    carrier: dict[str, str] = {}
    TraceContextTextMapPropagator().inject(carrier, otel.set_span_in_context(span, Context()))
    return Trace(carrier.get("traceparent", ""), carrier.get("tracestate", ""))


# -- the spans of runs and calls


NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@+-]{0,127}")
"""An id or a model's name as providers report it."""
HOSTS: Final[Mapping[str, str]] = {
    "api.openai.com": "openai",
    "api.anthropic.com": "anthropic",
    "api.cohere.com": "cohere",
    "generativelanguage.googleapis.com": "gcp.gemini",
    "api.deepseek.com": "deepseek",
    "api.groq.com": "groq",
    "api.mistral.ai": "mistral_ai",
    "api.perplexity.ai": "perplexity",
    "api.x.ai": "x_ai",
}
"""The names that the conventions give to providers, by host."""
CLOUDS: Final[Mapping[str, str]] = {
    "api-key": "azure.ai.openai",
    "azure": "azure.ai.openai",
    "aws": "aws.bedrock",
    "google": "gcp.vertex_ai",
}
"""The names of the clouds in the conventions, by the `auth` of the pool file."""
PORTS: Final[Mapping[str, int]] = {"http": 80, "https": 443}
REQUESTED: Final = ("max_tokens", "temperature", "top_p", "presence_penalty", "frequency_penalty", "seed")
"""Sampling parameters that the conventions have under the same names."""


def provider_name(spec: ProviderSpec) -> str:
    """Return the name of a provider in the conventions; the pool file's where these have none."""
    host = urlsplit(spec.base_url).hostname or ""
    return CLOUDS.get(spec.auth) or HOSTS.get(host) or spec.name


def address(spec: ProviderSpec, endpoint: str) -> dict[str, str | int]:
    """Return the attributes of the server that is called: that of the endpoint of this name, where there are
    several."""
    urls = {endpoint_spec.name: endpoint_spec.base_url for endpoint_spec in spec.endpoints}
    parts = urlsplit(urls.get(endpoint, spec.base_url))
    if not parts.hostname:
        return {}
    return {"server.address": parts.hostname, "server.port": parts.port or PORTS.get(parts.scheme, 0)}


class CallSpan:
    """One provider call in the run's trace and in the metrics."""

    def __init__(
        self,
        tracing: Tracing,
        parent: Trace,
        spec: ProviderSpec,
        worker: Worker,
        endpoint: str,
        *,
        sampling: Sampling,
        live: bool,
    ) -> None:
        """Start the span; the call is made next. `endpoint` is the name of the provider's endpoint."""
        self._tracing = tracing
        self._shared: dict[str, str | int] = {}
        model = worker.model
        operation = "embeddings" if spec.format == "embeddings" else SPAN_CALL
        if tracing.exports:
            self._shared = {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": provider_name(spec),
                "gen_ai.request.model": model,
                **address(spec, endpoint),
            }
        self._span = tracing.start(f"{operation} {model}", parent, self._shared, kind=SpanKind.CLIENT)
        self.headers = self._span.trace.headers() if spec.traceparent else {}
        """The headers by which the provider continues the trace."""
        if self._span.is_recording:
            self._span.set({"baton.worker": worker.name, "gen_ai.request.stream": live})
            parameters = {name: getattr(sampling, name) for name in REQUESTED}
            self._span.set({f"gen_ai.request.{name}": value for name, value in parameters.items() if value is not None})

    @property
    def is_wanted(self) -> bool:
        """Return True if its end is exported or counted, so that `end` is worth calling."""
        return self._span.is_recording or self._tracing.exports

    def end(self, finished: CallFinished, attempt: int, reply_end: End | None) -> None:
        """End the span with the outcome of the call. `reply_end` is the end of the reply, if it came."""
        error = ""
        if finished.error is not None:
            error = finished.reason or finished.error or finished.outcome
        model: dict[str, str] = {}
        response_attributes: dict[str, str] = {}
        if reply_end is not None and reply_end.model is not None and NAME.fullmatch(reply_end.model):
            model = response_attributes = {"gen_ai.response.model": reply_end.model}
        if reply_end is not None and reply_end.id is not None and NAME.fullmatch(reply_end.id):
            response_attributes = response_attributes | {"gen_ai.response.id": reply_end.id}
        if self._span.is_recording:
            self._span.set({**response_attributes, **_outcome(finished, attempt)})
        self._span.end(error)
        usage = finished.usage
        tokens = {"input": usage.input, "output": usage.output} if usage.total else {}
        self._tracing.measure(finished.seconds, tokens, {**self._shared, **model}, error)


def _outcome(finished: CallFinished, attempt: int) -> Attributes:
    usage = finished.usage
    attributes: dict[str, str | int | float | list[str] | None] = {
        "baton.call": finished.call,
        "baton.step": finished.n,
        "baton.attempt": attempt,
        "baton.outcome": finished.outcome,
        "baton.cost_micro_usd": finished.usd,
        "gen_ai.usage.input_tokens": usage.input,
        "gen_ai.usage.output_tokens": usage.output,
        "gen_ai.usage.cache_read.input_tokens": usage.cached or None,
        "gen_ai.usage.reasoning.output_tokens": usage.reasoning or None,
        "gen_ai.response.finish_reasons": [finished.finish] if finished.finish else None,
        "gen_ai.response.time_to_first_chunk": finished.first or None,
        "http.response.status_code": finished.http_status,
        "baton.provider_request": finished.request_id or None,
    }
    return {key: value for key, value in attributes.items() if value is not None}


UNFAILED = (Kind.SUCCEEDED, Kind.CANCELLED)
"""The ends that are no errors."""


def start_run_span(tracing: Tracing, state: RunState, *, taken_over: bool) -> Span:
    """Start the span of the present turn. `taken_over`: another engine has worked on this turn."""
    tier = state.admitted.tier
    attributes: dict[str, str | int | bool] = {
        "gen_ai.operation.name": SPAN_RUN,
        "gen_ai.workflow.name": tier,
        "baton.run": state.run,
        "baton.tier": tier,
        "baton.turn": state.turn.number,
        "baton.taken_over": taken_over,
    }
    parent = trace_of_turn(state.admitted.trace, state.turn.trace)
    return tracing.start(f"{SPAN_RUN} {tier}", parent, attributes, links=[state.turn.trace])


def end_run_span(span: Span, state: RunState, error: str) -> None:
    """End it with the state of the run. `error` says why this engine does not go on with the run; empty if it would."""
    if not span.is_recording:
        return span.end()
    end = state.end
    attributes: dict[str, str | int | bool] = {"baton.state": state.state, "baton.rounds": state.round_count}
    if state.topology:
        attributes["baton.topology"] = state.topology
    if end is not None:
        attributes |= {"baton.cost_micro_usd": end.usd, "baton.degraded": end.degraded}
        is_failure = end.kind not in UNFAILED
        error = (end.error or end.kind.value) if is_failure else ""
    span.set(attributes)
    return span.end(error)
