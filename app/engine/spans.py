"""The spans of runs and of provider calls, with a call's share of the GenAI metrics.

A run has one span for each turn, and another one for each engine that takes the run from a lost one. All of them belong
to the trace of the admission; a turn whose request belongs to another trace is linked to it.

A call has the attributes of OpenTelemetry's conventions, and `baton.call`, `baton.worker`, `baton.step` (not for
planning calls), `baton.attempt`, `baton.outcome` and `baton.cost_micro_usd`. Everything is an id, a name or a figure:
names that a provider reports are left out where they do not look like one.
"""

import re
from collections.abc import Mapping
from typing import Final
from urllib.parse import urlsplit

from opentelemetry.trace import SpanKind

from app.core.message.chat import End
from app.core.pool.catalog import ProviderSpec
from app.core.run.events import CallFinished
from app.core.run.identifiers import Trace, continued
from app.core.run.kinds import Kind
from app.core.run.state import RunState
from app.engine.context import EngineContext
from app.network.tracing import SPAN_CALL, SPAN_RUN, Attributes, Span, Tracing
from app.providers.protocol import Request

NAME: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.:/@+-]{0,127}")
"""An id or a model's name as providers report it."""
HOSTS: Final[Mapping[str, str]] = {
    "api.openai.com": "openai",
    "api.anthropic.com": "anthropic",
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


def known_as(spec: ProviderSpec) -> str:
    """Return the name of a provider in the conventions; the pool file's where these have none."""
    host = urlsplit(spec.base_url).hostname or ""
    return CLOUDS.get(spec.auth) or HOSTS.get(host) or spec.name


def address(spec: ProviderSpec, endpoint: str) -> dict[str, str | int]:
    """Return the attributes of the server that is called: that of the endpoint of this name, where there are
    several."""
    urls = {known.name: known.base_url for known in spec.endpoints}
    parts = urlsplit(urls.get(endpoint, spec.base_url))
    if not parts.hostname:
        return {}
    return {"server.address": parts.hostname, "server.port": parts.port or PORTS.get(parts.scheme, 0)}


class CallSpan:
    """One provider call in the run's trace and in the metrics."""

    def __init__(self, tracing: Tracing, parent: Trace, spec: ProviderSpec, request: Request, endpoint: str) -> None:
        """Start the span; the call is made next. `endpoint` is the name of the provider's endpoint."""
        self._tracing = tracing
        self._shared: dict[str, str | int] = {}
        model = request.worker.model
        operation = "embeddings" if spec.format == "embeddings" else SPAN_CALL
        if tracing.exports:
            self._shared = {
                "gen_ai.operation.name": operation,
                "gen_ai.provider.name": known_as(spec),
                "gen_ai.request.model": model,
                **address(spec, endpoint),
            }
        self._span = tracing.start(f"{operation} {model}", parent, self._shared, kind=SpanKind.CLIENT)
        self.headers = self._span.trace.headers() if spec.traceparent else {}
        """The headers by which the provider continues the trace."""
        if self._span.is_recording:
            self._span.set({"baton.worker": request.worker.name, "gen_ai.request.stream": request.live})
            asked = {name: getattr(request.sampling, name) for name in REQUESTED}
            self._span.set({f"gen_ai.request.{name}": value for name, value in asked.items() if value is not None})

    @property
    def is_wanted(self) -> bool:
        """True if its end is exported or counted, so that `end` is worth calling."""
        return self._span.is_recording or self._tracing.exports

    def end(self, finished: CallFinished, attempt: int, said: End | None) -> None:
        """End the span with the outcome of the call. `said` is the end of the reply, if it came."""
        error = ""
        if finished.error is not None:
            error = finished.reason or finished.error or finished.outcome
        model: dict[str, str] = {}
        answered: dict[str, str] = {}
        if said is not None and said.model is not None and NAME.fullmatch(said.model):
            model = answered = {"gen_ai.response.model": said.model}
        if said is not None and said.id is not None and NAME.fullmatch(said.id):
            answered = answered | {"gen_ai.response.id": said.id}
        if self._span.is_recording:
            self._span.set({**answered, **_outcome(finished, attempt)})
        self._span.end(error)
        usage = finished.usage
        tokens = {"input": usage.input, "output": usage.output} if usage.total else {}
        self._tracing.measure(finished.seconds, tokens, {**self._shared, **model}, error)


def _outcome(finished: CallFinished, attempt: int) -> Attributes:
    usage = finished.usage
    found: dict[str, str | int | float | list[str] | None] = {
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
    return {key: value for key, value in found.items() if value is not None}


UNFAILED = (Kind.SUCCEEDED, Kind.CANCELLED)
"""The ends that are no errors."""


def start_run_span(context: EngineContext, state: RunState, *, taken_over: bool) -> Span:
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
    parent = continued(state.admitted.trace, state.turn.trace)
    return context.tracing.start(f"{SPAN_RUN} {tier}", parent, attributes, links=[state.turn.trace])


def end_run_span(span: Span, state: RunState, error: str) -> None:
    """End it with the state of the run. `error` says why this engine does not go on with the run; empty if it would."""
    if not span.is_recording:
        return span.end()
    ended = state.end
    attributes: dict[str, str | int | bool] = {"baton.state": state.state, "baton.rounds": state.rounds}
    if state.topology:
        attributes["baton.topology"] = state.topology
    if ended is not None:
        attributes |= {"baton.cost_micro_usd": ended.usd, "baton.degraded": ended.degraded}
        failed = ended.kind not in UNFAILED
        error = (ended.error or ended.kind.value) if failed else ""
    span.set(attributes)
    return span.end(error)
