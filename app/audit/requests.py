"""Rules about the worker of each call, its money, and the exact bytes of its request, checked against the pool's
snapshot."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from msgspec.structs import replace

from app.audit.audited_run import EMBEDS, AuditedRun, Call, Event
from app.audit.choices import check_masked_prices
from app.audit.contents import content_ref
from app.audit.labels import (
    FROM_CALLER,
    FROM_CONDUCTOR,
    Provenance,
    check_declassification,
    check_losses_without_call,
    labels_of,
)
from app.audit.report import Report, Violation
from app.audit.request_rebuilding import ERASED, RebuildError, UnknownTemplate, rebuild_request
from app.core.message.chat import Text
from app.core.plan.arms import tier_of
from app.core.pool.catalog import MILLION, Catalog, ConductorSpec, Price, ProviderSpec, Tier, Worker
from app.core.pool.rules import Match
from app.core.pool.snapshot import restore_catalog
from app.core.run.kinds import Kind
from app.errors import BatonError
from app.providers.protocol import Provider, Request

NO_SNAPSHOT = "no snapshot of the pool"
ROUNDING_SECONDS = 5.0
"""Seconds that may pass between choosing the deadline and writing the admission."""
OVER_BUDGET = "over_budget"
"""The reason for which a worker is passed over whose answer the run could not pay."""


@dataclass(slots=True)
class Pools:
    """The pools that were in force, by digest, and the adapters of their providers."""

    adapter: Callable[[ProviderSpec], Provider]
    snapshots: Mapping[str, bytes]
    _restored: dict[str, Catalog | None] = field(default_factory=dict)
    _adapters: dict[tuple[str, str], Provider] = field(default_factory=dict)

    def catalog(self, digest: str) -> Catalog | None:
        """Return the pool of a digest; None if it is missing or its content has another digest."""
        if digest not in self._restored:
            self._restored[digest] = self._restore(digest)
        return self._restored[digest]

    def provider(self, catalog: Catalog, name: str) -> Provider:
        """Return the adapter of one provider of a pool."""
        place = (catalog.digest, name)
        if place not in self._adapters:
            self._adapters[place] = self.adapter(catalog.providers[name])
        return self._adapters[place]

    def _restore(self, digest: str) -> Catalog | None:
        try:
            catalog = restore_catalog(self.snapshots[digest])
        except (KeyError, ValueError):
            return None
        if catalog.digest != digest:
            return None
        return catalog


def check_requests(run: AuditedRun, pools: Pools, report: Report) -> Iterator[Violation]:
    """Apply all rules of this module. Calls that cannot be verified are counted in the report."""
    for digest in sorted({run.admission["catalog"], *(call.intent.body["catalog"] for call in run.calls.values())}):
        if pools.catalog(digest) is None:
            rule = "catalog-altered" if digest in pools.snapshots else "catalog-missing"
            yield run.violation(rule, 1, f"there is no snapshot of the pool {digest[:12]} with this digest")
    yield from _check_admission(run, pools)
    labels = labels_of(run)
    yield from check_losses_without_call(run)
    for call in run.calls.values():
        catalog = pools.catalog(call.intent.body["catalog"])
        if catalog is None:
            report.unverifiable[NO_SNAPSHOT] += 1
            continue
        worker = catalog.workers.get(call.intent.body["worker"])
        if worker is None or worker.provider not in catalog.providers:
            yield run.violation("worker-changed", call.intent.seq, f"{call.id}: the pool has no such worker")
            continue
        worker = _as_served(call, worker)
        yield from _check_passed_over(run, call, catalog)
        yield from check_declassification(run, labels, call, catalog)
        yield from _check_worker(run, call, catalog, worker, labels.of_call(call))
        yield from _check_price(run, call, worker)
        yield from _check_request_bytes(run, call, catalog, worker, pools, report)


# -- admission


def _tier_members(run: AuditedRun, tier: Tier) -> Sequence[str]:
    """Return the workers that a run of this tier may have: the tier's, or the one that answers alone as the tier's
    shadow."""
    shadow = tier.shadow
    if run.admission.get("origin_kind") == "shadow" and run.admission.get("plan") and shadow is not None:
        return (shadow.worker,)
    return tier.pool


def _check_admission(run: AuditedRun, pools: Pools) -> Iterator[Violation]:
    """The run's pool and limits are within its tier's, and every worker in the pool may do some step of the task."""
    catalog = pools.catalog(run.admission["catalog"])
    tier = tier_of(catalog, *run.tier_reference) if catalog is not None else None
    if catalog is None or tier is None:
        return
    pool, members = run.admission["pool"], _tier_members(run, tier)
    excluded = set(run.admission["excluded"])
    if tier.served_by:  # the request may have excluded workers that only the tier's own definition has
        excluded -= set(catalog.tiers[tier.name].pool) - set(members)
    if not pool or sorted([*pool, *excluded]) != sorted(members):
        yield run.violation("pool-outside-tier", 1, f"pool and excluded workers together are not those of {tier.name}")
    least = _least_provenance(run, catalog, tier)
    for name in pool:
        worker = catalog.workers.get(name)
        if worker is not None and (missing := _count_uncleared_labels(least, worker)):
            yield run.violation("clearance", 1, f"{name} is in the pool and not cleared for {missing} labels")
        for rule in _excluding_rules(least, catalog, worker) if worker is not None else ():
            yield run.violation("rule", 1, f"{name} is in the pool, and the rule {rule} excludes it")
    yield from _check_limits(run, tier)
    yield from check_masked_prices(run, catalog)


def _least_provenance(run: AuditedRun, catalog: Catalog, tier: Tier) -> Provenance:
    """Return what every worker of the run reads: under a model its subtasks, in a caller's own plan
    and in a repeated one nothing, else the conversation."""
    conductor, labels = run.admission["conductor"], frozenset(run.admission["labels"])
    if conductor in ("caller", "replay"):
        return Provenance()
    if conductor != "model":
        return Provenance(labels, frozenset({FROM_CALLER}))
    model = catalog.workers.get(tier.conductor.worker or "")
    return Provenance(labels - (model.declassifies if model is not None else frozenset()), frozenset({FROM_CONDUCTOR}))


def _check_limits(run: AuditedRun, tier: Tier) -> Iterator[Violation]:
    allowed = tier.efforts.get(run.admission["effort"])
    if allowed is None:
        yield run.violation("limits-widened", 1, f"{tier.name} has no such effort level")
        return
    for name, value in run.limits.items():
        most = getattr(allowed, name, None)
        is_floor = name == "floor_tokens"  # a higher one allows nothing more
        if most is not None and value > most and not is_floor:
            yield run.violation("limits-widened", 1, f"{name} is {value}, the tier has {most}")


def _count_uncleared_labels(provenance: Provenance, worker: Worker) -> int:
    """Return the number of labels for which a worker is not cleared, by name or by its card's region and retention."""
    card, missing = worker.card, set(provenance.labels) - worker.card.clearance
    if card.region:
        missing.discard("region:" + card.region)
    if card.retention:
        missing.discard("retention:" + card.retention)
    return len(missing)


def _excluding_rules(provenance: Provenance, catalog: Catalog, worker: Worker) -> list[str]:
    """Return the names of the pool file's rules that keep this worker from what was read, from the rules alone."""
    labels = set(provenance.labels | provenance.sources)
    names = []
    for rule in catalog.rules:
        if not set(rule.labels) <= labels:
            continue
        refused = rule.allow is not None and not _matches(worker, rule.allow)
        if refused or (rule.deny is not None and _matches(worker, rule.deny)):
            names.append(rule.name)
    return names


def _matches(worker: Worker, match: Match) -> bool:
    """Return True if a worker has one of the values of every attribute that a match names."""
    card = worker.card
    pairs = (
        (match.worker, {worker.name}),
        (match.provider, {worker.provider}),
        (match.region, {card.region}),
        (match.retention, {card.retention}),
        (match.clearance, set(card.clearance)),
    )
    return all(not required or required & values for required, values in pairs)


# -- the worker


def _as_served(call: Call, worker: Worker) -> Worker:
    """Return a conductor's worker with the version that its intent names, which is another model of the same server."""
    version = call.intent.body.get("version", "") if call.step is None else ""
    if isinstance(version, str) and version:
        return replace(worker, model=version)
    return worker


def _check_worker(
    run: AuditedRun, call: Call, catalog: Catalog, worker: Worker, provenance: Provenance
) -> Iterator[Violation]:
    body, seq = call.intent.body, call.intent.seq
    if (body["provider"], body["model"]) != (worker.provider, worker.model):
        yield run.violation("worker-changed", seq, f"{call.id}: provider or model is not that of {worker.name}")
    if missing := _count_uncleared_labels(provenance, worker):
        yield run.violation("clearance", seq, f"{worker.name} is not cleared for {missing} labels")
    for rule in _excluding_rules(provenance, catalog, worker):
        yield run.violation("rule", seq, f"the rule {rule} keeps {worker.name} from the labels of what it reads")
    if call.step is not None and body["max_tokens"] > worker.card.max_output:
        yield run.violation("output-over-limit", seq, f"{worker.name} writes at most {worker.card.max_output} tokens")
    if call.step is None:
        yield from _check_conductor(run, call, catalog, worker)


def _check_conductor(run: AuditedRun, call: Call, catalog: Catalog, worker: Worker) -> Iterator[Violation]:
    """A planning call goes to the tier's conductor, or for an embedding to its embedder, and its brief is true."""
    tier, seq = tier_of(catalog, *run.tier_reference), call.intent.seq
    if tier is not None and _expected_worker(tier.conductor, call) != worker.name:
        yield run.violation("worker-outside-pool", seq, f"{worker.name} is not the conductor of {tier.name}")
    if call.intent.body.get("usd_left") not in _possible_remainders(run, call):
        yield run.violation("brief-wrong", seq, f"{call.id} is told another budget than there was")
    if (call.intent.body.get("seconds_left") or 0) > run.limits["seconds"] + ROUNDING_SECONDS:
        yield run.violation("brief-wrong", seq, f"{call.id} is told of more time than the run has")
    rejected = call.intent.body.get("rejected")
    if rejected and rejected not in _earlier_planning_outputs(run, call):
        yield run.violation("brief-wrong", seq, f"{call.id} is shown what was not the rejected plan")


def _expected_worker(conductor: ConductorSpec, call: Call) -> str | None:
    """Return the worker for a planning call with this template."""
    if call.intent.body["template"] != EMBEDS:
        return conductor.worker
    if conductor.selector is None:
        return None
    return conductor.selector.embedder


def _possible_remainders(run: AuditedRun, call: Call) -> set[int]:
    """Return the budgets that were left at some time between the proposal's opening and the call."""
    proposal = run.proposal(call.proposal)
    opening_seq = proposal.opening.seq if proposal is not None else 0
    remaining = run.limits["usd"]
    remaining_by_seq = {opening_seq: remaining}
    for event in run.events_of(Kind.CALL_FINISHED):
        if event.seq < call.intent.seq:
            remaining -= event.body["usd"]
            remaining_by_seq[max(event.seq, opening_seq)] = remaining
    return {max(limit, 0) for limit in remaining_by_seq.values()}


def _earlier_planning_outputs(run: AuditedRun, call: Call) -> set[str]:
    """Return the outputs of the planning calls before this one."""
    outputs = set()
    for earlier in run.calls.values():
        is_earlier_planning = earlier.step is None and earlier.intent.seq < call.intent.seq
        if is_earlier_planning and earlier.outcome is not None:
            outputs.add(earlier.outcome.body["output"])
    return outputs


# -- the money


def _check_passed_over(run: AuditedRun, call: Call, catalog: Catalog) -> Iterator[Violation]:
    """A worker that was passed over as too expensive costs more at the floor of the tier, with at most twice the input
    of this call, than what this call holds."""
    body = call.intent.body
    most_input = max(body["tokens_held"] - body["max_tokens"], 0)
    for passed in body.get("passed_over") or ():
        worker = catalog.workers.get(passed["worker"]) if passed.get("reason") == OVER_BUDGET else None
        if worker is None:
            continue
        floor = min(run.limits["floor_tokens"], run.limits["output_tokens"], worker.card.max_output)
        if _max_cost(worker.price, 2 * most_input, floor) <= body["usd_held"]:
            yield run.violation(
                "mask-wrong", call.intent.seq, f"{worker.name} is passed over although it could be paid"
            )


def _check_price(run: AuditedRun, call: Call, worker: Worker) -> Iterator[Violation]:
    intent, price = call.intent.body, worker.price
    most_input = max(intent["tokens_held"] - intent["max_tokens"], 0)
    worst = _max_cost(price, most_input, intent["max_tokens"])
    if intent["usd_held"] < worst:
        yield run.violation("reservation-low", call.intent.seq, f"{intent['usd_held']} held, {worst} is the worst case")
    if call.outcome is not None and call.outcome_kind != "unknown":
        yield from _check_settled_cost(run, call.outcome, price)


def _check_settled_cost(run: AuditedRun, outcome: Event, price: Price) -> Iterator[Violation]:
    usage: Mapping[str, Any] = outcome.body["usage"]
    tier = price.long if price.long is not None and usage["input"] > price.long_after else price
    cost = _cost_at_rates(tier, usage)
    if outcome.body["usd"] != cost:
        yield run.violation("cost-wrong", outcome.seq, f"{outcome.body['usd']} micro-dollars, its usage costs {cost}")


def _max_cost(price: Price, input_tokens: int, output_tokens: int) -> int:
    """Return the most that a call of at most so many tokens can cost, in micro-dollars."""
    tiers = [price] if price.long is None or input_tokens <= price.long_after else [price, price.long]
    return max([_max_cost_at_rates(tier, input_tokens, output_tokens) for tier in tiers])


def _max_cost_at_rates(price: Price, input_tokens: int, output_tokens: int) -> int:
    """Return the most that so many tokens can cost at the rates of one tier, in micro-dollars, rounded up."""
    input_rate = max(price.input, price.cached, _written_rate(price))
    output_rate = max(price.output, _reasoning_rate(price))
    return (input_tokens * input_rate + output_tokens * output_rate + MILLION - 1) // MILLION


def _written_rate(price: Price) -> int:
    """Return the rate of input that is written to a provider's cache: that of other input, where it has none."""
    if price.written is None:
        return price.input
    return price.written


def _reasoning_rate(price: Price) -> int:
    """Return the rate of reasoning: that of other output, where it has none."""
    if price.reasoning is None:
        return price.output
    return price.reasoning


def _cost_at_rates(price: Price, usage: Mapping[str, Any]) -> int:
    """Return the cost of a usage at the rates of one tier, in micro-dollars, rounded up."""
    uncached = max(usage["input"] - usage["cached"], 0)
    written = min(usage.get("written", 0), uncached)
    reasoning = usage["reasoning"]
    parts = [
        (uncached - written, price.input),
        (written, _written_rate(price)),
        (usage["cached"], price.cached),
        (usage["output"] - reasoning, price.output),
        (reasoning, _reasoning_rate(price)),
    ]
    exact = sum([int(tokens) * rate for tokens, rate in parts])
    return (exact + MILLION - 1) // MILLION


# -- the bytes


def _check_request_bytes(
    run: AuditedRun, call: Call, catalog: Catalog, worker: Worker, pools: Pools, report: Report
) -> Iterator[Violation]:
    body, salt = call.intent.body, run.record.row["salt"]
    try:
        if salt is None:
            raise RebuildError(ERASED)
        request = rebuild_request(run, call, catalog, worker)
    except (KeyError, TypeError, ValueError, AttributeError):
        yield run.violation(
            "request-altered", call.intent.seq, f"{call.id}: what it was made of is not what it must be"
        )
        return
    except UnknownTemplate:
        yield run.violation("template-unknown", call.intent.seq, f"{call.id}: this auditor knows no such template")
        return
    except RebuildError as reason:
        report.unverifiable[str(reason)] += 1
        return
    request_bytes = _render(pools, catalog, request)
    report.rebuilt_requests += 1
    if (content_ref(salt, request_bytes), len(request_bytes)) != (body["request"], body["bytes"]):
        yield run.violation(
            "request-altered", call.intent.seq, f"{call.id}: {body['bytes']} bytes sent, {len(request_bytes)} now"
        )
    if body["max_tokens"] != request.sampling.max_tokens:
        yield run.violation("request-altered", call.intent.seq, f"{call.id}: max_tokens is {body['max_tokens']}")
    if body["tokens_held"] < _text_bytes(request) + body["max_tokens"]:
        yield run.violation(
            "reservation-low", call.intent.seq, f"{call.id}: its texts alone may be more than what is held"
        )


def _render(pools: Pools, catalog: Catalog, request: Request) -> bytes:
    """Return the request as its provider's adapter renders it; empty if the adapter cannot render it."""
    try:
        return pools.provider(catalog, request.worker.provider).render(request)
    except (BatonError, LookupError, TypeError, ValueError):
        return b""


def _text_bytes(request: Request) -> int:
    """Return the bytes of a request's text, which bound its tokens: a token is at least a byte."""
    parts = [part for message in request.messages for part in message.parts]
    return sum(len(part.text.encode()) for part in parts if isinstance(part, Text))
