"""Every metric and log-field name of the service, in one place, and the object that carries them.

Labels come from closed sets (tier, worker, outcome, kind), never from callers. Logs are JSON lines whose fields are
listed here: ids, sizes and states, never a body, a prompt or a key. Spans are in `network/tracing.py`.
"""

import logging
from collections.abc import Callable, Iterator, Mapping
from datetime import UTC, datetime
from types import TracebackType
from typing import Any, Literal

import orjson
from msgspec import Struct
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    GCCollector,
    Histogram,
    PlatformCollector,
    ProcessCollector,
    generate_latest,
)
from prometheus_client.core import CounterMetricFamily
from prometheus_client.registry import Collector

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600, 1800)

BUILD = ("version", "revision", "python")
TENANTS = 100
"""Tenants whose spending is counted apart, by default."""

COUNTERS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "baton_runs_total": (
        "Runs that ended, by state; abandoned: the run expired while it waited for tool results.",
        ("tier", "outcome"),
    ),
    "baton_calls_total": ("Provider calls that ended.", ("worker", "outcome")),
    "baton_call_failures_total": (
        "Provider calls that failed, by reason (deploy/docs/failures.md).",
        ("worker", "reason"),
    ),
    "baton_tokens_total": ("Tokens of all calls.", ("worker", "direction")),
    "baton_cost_micro_usd_total": (
        "Micro-dollars of all calls; what those of a lost engine (`unknown`) count as stands in their runs alone.",
        ("worker",),
    ),
    "baton_tenant_cost_micro_usd_total": (
        "Micro-dollars of all calls but those of shadows, by tenant; tenants beyond BATON_METRICS_TENANTS are `other`.",
        ("tenant",),
    ),
    "baton_plans_total": ("Proposals, by outcome.", ("tier", "outcome")),
    "baton_version_calls_total": (
        "Planning calls of a version of a conductor that ended; those of the pool file's own model are left out.",
        ("worker", "version", "outcome"),
    ),
    "baton_rounds_total": (
        "Rounds after a run's first: opened, accepted (the empty plan kept the answer), or stopped without an answer.",
        ("tier", "outcome"),
    ),
    "baton_feedback_total": ("Ratings of runs that were received over HTTP.", ("tier", "kind")),
    "baton_approvals_total": ("Plans that needed an approval, and what was decided.", ("tier", "outcome")),
    "baton_tool_turns_total": ("Replies that asked for tool results.", ("tier",)),
    "baton_degraded_total": ("Runs that a fallback decided.", ("tier",)),
    "baton_budget_refusals_total": ("Runs that ended because a budget had not enough left.", ("scope",)),
    "baton_budget_warnings_total": ("Windows of budgets whose soft limit was reached.", ("scope",)),
    "baton_budget_overrun_micro_usd_total": (
        "Micro-dollars that providers billed beyond the worst case that was held in a budget.",
        ("scope",),
    ),
    "baton_dead_letters_total": ("Steps given up because their dispatchers stopped, one after the other.", ("tier",)),
    "baton_lease_lost_total": ("Steps that this process had and another one has taken over.", ("kind",)),
    "baton_swept_total": ("Tickets sent again or found in the outbox, and runs taken over or handed over.", ("kind",)),
    "baton_probes_total": ("One-token requests that check whether a conductor answers.", ("worker", "outcome")),
    "baton_ejections_total": ("Ejections of workers, which are not called for a while.", ("worker", "reason")),
    "baton_endpoint_ejections_total": (
        "Ejections of endpoints of providers that have several.",
        ("provider", "endpoint", "reason"),
    ),
    "baton_retries_total": ("Attempts beyond a step's first, by the worker that was called.", ("worker", "kind")),
    "baton_retry_budget_exhausted_total": (
        "Attempts beyond a step's first that the retry budget did not allow.",
        ("worker",),
    ),
    "baton_shadow_cost_micro_usd_total": (
        "What calls of shadows have cost, which no tenant's spending counts, in micro-dollars.",
        ("worker",),
    ),
    "baton_rollbacks_total": (
        "Versions of a conductor, and what served `tier NAME`, that engines rolled back, by the breached condition.",
        ("conductor", "condition"),
    ),
    "baton_shadows_total": (
        "Runs that were drawn for a shadow, by what became of it: started, or why there was none.",
        ("tier", "outcome"),
    ),
    "baton_contents_erased_total": ("Runs whose content an engine erased because its time was over.", ()),
    "baton_runs_pruned_total": ("Runs that an engine deleted because their time was over.", ()),
    "baton_archive_failures_total": ("Times that pruning stopped because the archive could not be written.", ()),
    "baton_log_entries_total": ("Entries that this process has appended to the transparency log.", ()),
    "baton_log_export_failures_total": ("Times that a checkpoint of the transparency log was not exported.", ()),
    "baton_log_failures_total": ("Times that sealing stopped because the database was unavailable.", ()),
    "baton_log_timestamp_failures_total": ("Times that an exported checkpoint got no time stamp.", ()),
    "baton_log_witness_failures_total": ("Times that a witness did not cosign a checkpoint.", ("witness",)),
    "baton_webhooks_total": (
        "Attempts to deliver a webhook: delivered, to be retried, or failed for good.",
        ("outcome",),
    ),
    "baton_requests_total": ("HTTP requests by status.", ("route", "status")),
    "baton_refusals_total": (
        "HTTP requests that were refused (4xx and 503), by the code of the error or the limit that was reached.",
        ("status", "reason"),
    ),
}
GAUGES: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "baton_runs_driven": ("Runs that this process drives now.", ()),
    "baton_runs_waiting": ("Runs of the whole service that wait for tool results, counted up to 10,000.", ()),
    "baton_tickets_waiting": (
        "Steps and runs of the whole service that no engine has taken, counted up to 10,000 of each.",
        (),
    ),
    "baton_tickets_oldest_seconds": ("Age of the oldest step or run that no engine has taken; 0 if there is none.", ()),
    "baton_steps_running": ("Steps that this process executes now.", ()),
    "baton_outcomes_waiting": ("Outcomes of steps that this process buffers while the database is unavailable.", ()),
    "baton_outcomes_waiting_bytes": ("Bytes of the outcomes of steps that this process buffers.", ()),
    "baton_queue_sound": ("0 while the queue may lose tickets and messages, and dispatchers poll the outbox.", ()),
    "baton_messages_forged": ("Live messages dropped because their sender does not have this process's pepper.", ()),
    "baton_orphans_stranded": ("Runs without an owner that this process cannot take over.", ()),
    "baton_breaker_state": ("A worker's breaker: 0 closed, 1 half-open, 2 open (ejected).", ("worker",)),
    "baton_endpoint_state": (
        "The breaker of an endpoint, where a provider has several: 0 closed, 1 half-open, 2 open (ejected).",
        ("provider", "endpoint"),
    ),
    "baton_webhooks_pending": ("Webhooks of the whole service not yet delivered, counted up to 10,000.", ()),
    "baton_shadows_waiting": ("Runs that wait for their shadow.", ("tier",)),
    "baton_selector_ratings": ("Ratings that a tier's selector has learned from.", ("tier",)),
    "baton_log_exported_size": ("Entries that the last exported checkpoint of the transparency log counts.", ()),
    "baton_log_timestamped_size": ("Entries that the last exported checkpoint with a time stamp counts.", ()),
    "baton_log_witnessed_size": ("Entries that the last checkpoint counts that a witness has cosigned.", ("witness",)),
    "baton_log_size": ("Entries of the transparency log when this process last looked.", ()),
    "baton_log_lag_seconds": (
        "Time for which the oldest change that is not in the transparency log waited when this process last looked.",
        (),
    ),
    "baton_log_sealed_timestamp_seconds": ("When this process last found everything sealed, or sealed it itself.", ()),
    "baton_rehearsal": ("1 if no real provider is configured.", ()),
    "baton_pool_connections_in_use": ("Connections of this process that are in use.", ("pool",)),
    "baton_pool_connections_max": ("Most connections that this process may use at once.", ("pool",)),
    "baton_pool_waiting": ("Tasks of this process that wait for a connection.", ("pool",)),
    "baton_build_info": ("1, with the version of this code, its revision, and Python's version.", BUILD),
}
TOTALS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "baton_pool_waits_total": ("Times that no connection was free when one was needed.", ("pool",)),
}
"""Counters that are kept elsewhere and read when the metrics are."""
HISTOGRAMS: Mapping[str, tuple[str, tuple[str, ...]]] = {
    "baton_run_seconds": ("Time from admission to the terminal state.", ("tier",)),
    "baton_first_delta_seconds": ("Time from admission to the first delta of the answer.", ("tier",)),
    "baton_call_seconds": ("Duration of one provider call.", ("worker",)),
    "baton_request_seconds": (
        "Time from an HTTP request to the end of its reply; method is read or write, status a class such as 2xx.",
        ("route", "method", "status"),
    ),
    "baton_stream_first_text_seconds": ("Time from an HTTP request to the first text of its stream.", ("route",)),
}
LOG_FIELDS = frozenset(
    {
        "run",
        "step",
        "call",
        "tier",
        "worker",
        "state",
        "outcome",
        "error",
        "seconds",
        "count",
        "route",
        "status",
        "origin",
        "reason",
        "provider",
        "endpoint",
    }
    | {"request", "address", "faults", "versions"}
    | {"code", "provider_request"}
    | {"key", "tenant", "method", "attempt", "tokens", "ms", "cost_usd"}
)
RequestLines = Literal["all", "api", "off"]
"""The HTTP requests that get a line in the log: all; all but probes and `/metrics`; none."""
OTHER = "other"
"""The value of a label beyond its bound."""
PROBES = frozenset({"/healthz", "/readyz", "/metrics"})
"""The routes of requests that no caller makes."""


class PoolUse(Struct, frozen=True):
    """The use of a pool of connections at one moment, and how often somebody had to wait for one so far."""

    in_use: int
    most: int
    waiting: int
    waits: int


class Telemetry:
    """The metrics and logs of one process, made once in `wiring.py` and passed on."""

    def __init__(self, *, request_lines: RequestLines = "all", step_lines: bool = True, tenants: int = TENANTS) -> None:
        """`request_lines` and `step_lines` say which requests and steps get a line in the log; the spending of at most
        `tenants` tenants is counted apart."""
        self._tenants = tenants
        self._request_lines = request_lines
        self._step_lines = step_lines
        self.registry = CollectorRegistry()
        self._counters: dict[str, Counter] = {}
        self._gauges: dict[str, Gauge] = {}
        self._histograms: dict[str, Histogram] = {}
        self._totals: dict[str, dict[tuple[str, ...], Callable[[], float]]] = {}
        for name, (doc, labels) in COUNTERS.items():
            self._counters[name] = Counter(name, doc, labels, registry=self.registry)
        for name, (doc, labels) in GAUGES.items():
            self._gauges[name] = Gauge(name, doc, labels, registry=self.registry)
        for name, (doc, labels) in HISTOGRAMS.items():
            self._histograms[name] = Histogram(name, doc, labels, buckets=SECONDS, registry=self.registry)
        for name in TOTALS:
            self._totals[name] = {}
        self.registry.register(_Totals(self._totals))
        ProcessCollector(registry=self.registry)
        PlatformCollector(registry=self.registry)
        GCCollector(registry=self.registry)
        self._children: dict[tuple[str, ...], Any] = {}
        self._values: dict[str, set[str]] = {}
        self._log = logging.getLogger("baton")

    def count(self, name: str, *labels: str, by: float = 1) -> None:
        """Add to a counter of the table."""
        self._child(self._counters, name, labels).inc(by)

    def observe(self, name: str, seconds: float, *labels: str) -> None:
        """Add a duration to a histogram of the table."""
        self._child(self._histograms, name, labels).observe(seconds)

    def gauge(self, name: str, value: float, *labels: str) -> None:
        """Set a gauge of the table."""
        self._labelled_gauge(name, labels).set(value)

    def watch(self, name: str, value: Callable[[], float], *labels: str) -> None:
        """Compute the value of a gauge of the table whenever it is read."""
        self._labelled_gauge(name, labels).set_function(value)

    def unwatch(self, name: str, *labels: str) -> None:
        """Show the gauge with these labels no longer."""
        self._gauges[name].remove(*labels)

    def _labelled_gauge(self, name: str, labels: tuple[str, ...]) -> Gauge:
        if not labels:
            return self._gauges[name]
        return self._gauges[name].labels(*labels)

    def _child(self, family: Mapping[str, Any], name: str, labels: tuple[str, ...]) -> Any:
        if not labels:
            return family[name]
        child = self._children.get((name, *labels))
        if child is None:
            child = self._children[(name, *labels)] = family[name].labels(*labels)
        return child

    def watch_pool(self, pool: str, use: Callable[[], PoolUse]) -> None:
        """Show the use of a pool of connections whenever the metrics are read."""
        self.watch("baton_pool_connections_in_use", lambda: use().in_use, pool)
        self.watch("baton_pool_connections_max", lambda: use().most, pool)
        self.watch("baton_pool_waiting", lambda: use().waiting, pool)
        self._totals["baton_pool_waits_total"][(pool,)] = lambda: use().waits

    def spend(self, tenant: str, micro_usd: int) -> None:
        """Count what a call has cost its tenant."""
        self.count("baton_tenant_cost_micro_usd_total", self.bounded("tenant", tenant, self._tenants), by=micro_usd)

    def bounded(self, kind: str, value: str, most: int) -> str:
        """Return the value of a label that has no table: the first `most` values of this kind stand for themselves, and
        all others, and none, are `other`."""
        values = self._values.setdefault(kind, set())
        if value in values:
            return value
        if not value or len(values) >= most:
            return OTHER
        values.add(value)
        return value

    def log(self, level: int, message: str, bug: Exception | None = None, /, **fields: object) -> None:
        """Write one line. Raises `KeyError` for a field that is not in `LOG_FIELDS`; `bug` is logged with its place."""
        unknown = set(fields) - LOG_FIELDS
        if unknown:
            raise KeyError(f"log fields not in the table: {sorted(unknown)}")
        if self._log.isEnabledFor(level):
            place = None
            if bug is not None:
                place = (type(bug), bug, bug.__traceback__)
            # `Logger.log` would look for its caller in the stack, which takes as long as everything else.
            record = self._log.makeRecord(self._log.name, level, "", 0, message, (), place, extra={"fields": fields})
            self._log.handle(record)

    def log_request(self, route: str, fields: Mapping[str, object]) -> None:
        """Write the line of an HTTP request, unless it is switched off."""
        if self._request_lines == "all" or (self._request_lines == "api" and route not in PROBES):
            self.log(logging.INFO, "A request has ended.", route=route, **fields)

    def log_step(self, fields: Mapping[str, object]) -> None:
        """Write the line of a step, unless it is switched off."""
        if self._step_lines:
            self.log(logging.INFO, "A step has ended.", **fields)

    def exposition(self) -> bytes:
        """Return all metrics in Prometheus' text format."""
        return generate_latest(self.registry)


class _Totals(Collector):
    """The counters of `TOTALS`, as prometheus_client wants them."""

    def __init__(self, totals: Mapping[str, Mapping[tuple[str, ...], Callable[[], float]]]) -> None:
        self._totals = totals

    def collect(self) -> Iterator[CounterMetricFamily]:
        """Yield one family for each counter."""
        for name, (doc, labels) in TOTALS.items():
            family = CounterMetricFamily(name, doc, labels=labels)
            for values, total in self._totals[name].items():
                family.add_metric(values, total())
            yield family


def metrics_page() -> str:
    """Return the page of all metrics (deploy/docs/metrics.md), as Markdown."""
    lines = [
        "# Metrics",
        "",
        "All metrics of a process, made from the tables in `app/telemetry.py`. Besides these there are the usual",
        "`process_*`, `python_info` and `python_gc_*`. Histograms have `_bucket`, `_sum` and `_count`, in seconds.",
        "",
        "| metric | kind | labels | meaning |",
        "|---|---|---|---|",
    ]
    tables = {"counter": {**COUNTERS, **TOTALS}, "gauge": GAUGES, "histogram": HISTOGRAMS}
    for kind, table in tables.items():
        for name, (doc, labels) in table.items():
            lines.append(f"| `{name}` | {kind} | {', '.join(labels)} | {doc} |")
    return "\n".join(lines) + "\n"


class JsonLines(logging.Formatter):
    """Formats each record as one JSON object with time, level, message and fields. The time is UTC, in milliseconds.

    An exception is given by its type and place, without its values or local variables.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Render one record."""
        at = datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds")
        line: dict[str, object] = {
            "at": f"{at[:-6]}Z",
            "level": record.levelname.lower(),
            "message": record.getMessage(),
        } | getattr(record, "fields", {})
        if record.exc_info and record.exc_info[0] is not None:
            line["error"] = f"{record.exc_info[0].__name__} at {raised_at(record.exc_info[2])}"
        return orjson.dumps(line, default=str).decode()


def raised_at(trail: TracebackType | None) -> str:
    """Return the file and the line at which an error was raised; empty where that is not known."""
    if trail is None:
        return ""
    while trail.tb_next is not None:
        trail = trail.tb_next
    return f"{trail.tb_frame.f_code.co_filename}:{trail.tb_lineno}"
