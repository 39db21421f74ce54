"""Checks between the entries of a pool file: names that must exist, and names that must not.

The functions are pure: they take a draft and yield its faults. A broken entry is in the draft without its broken
fields, or as None; its name still counts.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping

from msgspec import Struct

from app.core.plan.templates import MOST, count_arms
from app.core.pool.catalog import SELECTOR_ROUNDS, Deadlines
from app.core.pool.rules import SOURCES
from app.core.pool.wire_formats import FORMATS
from app.process.config.entries import (
    ALL,
    ConductorEntry,
    EvaluationEntry,
    LimitsEntry,
    ProviderEntry,
    RuleEntry,
    ShadowEntry,
    TierEntry,
    WorkerEntry,
)
from app.process.config.settings import did_you_mean
from app.providers import options
from app.providers.authentication import EXTRAS, missing_extra

MAX_DIMENSIONS = 16_384
"""The most numbers that an embedding may have."""

Fault = tuple[tuple[str, ...], str]

DEFAULT_ALIASES = {
    "fugu": "baton-mini",
    "fugu-mini": "baton-mini",
    "fugu-ultra": "baton-ultra",
    "mini": "baton-mini",
    "ultra": "baton-ultra",
}


class CheckedEntries(Struct, frozen=True):
    """A pool file whose entries were checked one by one. `aliases` is None where the file has no such section."""

    providers: Mapping[str, ProviderEntry | None]
    workers: Mapping[str, WorkerEntry | None]
    tiers: Mapping[str, TierEntry | None]
    aliases: Mapping[str, str] | None
    evaluation: EvaluationEntry
    rules: Mapping[str, RuleEntry | None]

    def provider_of(self, worker: str) -> str:
        """Return the provider of a worker whose entry is not None."""
        entry = self.workers[worker]
        assert entry is not None
        return entry.provider


def check(draft: CheckedEntries) -> Iterator[Fault]:
    """Yield every fault between entries."""
    yield from _options(draft)
    yield from _dimensions(draft)
    for name, provider in draft.providers.items():
        if provider is not None:
            for field_name, problem in _authentication(provider):
                yield ("providers", name, field_name), problem
    yield from _workers(draft)
    for name, tier in draft.tiers.items():
        if tier is not None:
            yield from _tier(name, tier, draft)
    yield from _aliases(draft)
    yield from _rules(draft)
    for worker in draft.evaluation.conductors:
        if worker not in draft.workers:
            yield ("evaluation", "conductors"), _unknown("worker", worker, draft.workers)
        elif _makes_embeddings(worker, draft):
            yield ("evaluation", "conductors"), f"the worker {worker} makes embeddings and cannot plan; remove it"


def _rules(draft: CheckedEntries) -> Iterator[Fault]:
    """Yield the names in rules that are of no worker, provider or source: such a rule would silently not do what it
    says."""
    for name, rule in draft.rules.items():
        for label in getattr(rule, "labels", ()):
            if label.startswith("source:") and label not in SOURCES:
                yield ("rules", name, "labels"), f"has {label}, which is no source; use {', '.join(sorted(SOURCES))}"
        for part in ("allow", "deny", "approve"):
            match = getattr(rule, part, None)
            if match is None:
                continue
            for worker in match.worker:
                if worker not in draft.workers:
                    yield ("rules", name, part, "worker"), _unknown("worker", worker, draft.workers)
            for provider in match.provider:
                if provider not in draft.providers:
                    yield ("rules", name, part, "provider"), _unknown("provider", provider, draft.providers)


def workers_of_tier(tier: TierEntry, draft: CheckedEntries) -> list[str]:
    """Return the tier's workers; `all` means every worker but those with `pooled = false`."""
    if tier.pool != [ALL]:
        return tier.pool
    return [name for name, worker in draft.workers.items() if worker is None or worker.pooled]


def aliases_in_force(draft: CheckedEntries) -> dict[str, str]:
    """Return the file's aliases; if it has no such section, the default ones whose tier exists and whose name is
    free."""
    if draft.aliases is not None:
        return dict(draft.aliases)
    return {name: tier for name, tier in DEFAULT_ALIASES.items() if tier in draft.tiers and name not in draft.tiers}


def _authentication(provider: ProviderEntry) -> Iterator[tuple[str, str]]:
    """Yield the faults of how a provider's requests are authenticated, by field."""
    auth = provider.auth
    facts = FORMATS[provider.format]
    if auth not in facts.auth:
        formats = [name for name, others in FORMATS.items() if auth in others.auth]
        yield "auth", f"does not go with the format {provider.format}; use {', '.join(formats)}"
    elif problem := missing_extra(auth):
        yield "auth", f'= "{auth}" {problem}'
    endpoint_keys = [endpoint.key for endpoint in provider.endpoints]
    if auth in EXTRAS and (provider.key or any(endpoint_keys)):
        yield "key", f'is of no use with auth = "{auth}", which finds its own credentials; remove it'
    is_each_endpoint_keyed = bool(endpoint_keys) and all(endpoint_keys)
    if auth == "api-key" and provider.key is None and not is_each_endpoint_keyed:
        yield "key", 'is missing; auth = "api-key" sends it'
    if auth == "aws" and provider.region is None:
        yield "region", 'is missing; auth = "aws" signs for a region, such as us-east-1'
    if auth != "aws" and provider.region is not None:
        yield "region", 'has no effect without auth = "aws"; remove it'
    if provider.api_version and "api-key" not in facts.auth:
        yield "api_version", f"has no effect with the format {provider.format}; remove it"


def _options(draft: CheckedEntries) -> Iterator[Fault]:
    """Yield options of providers that their wire format does not know."""
    for name, entry in draft.providers.items():
        if entry is not None:
            for option, problem in options.faults(entry.format, entry.options):
                yield ("providers", name, "options", option), problem


def _dimensions(draft: CheckedEntries) -> Iterator[Fault]:
    """Yield providers of embeddings that do not say how many numbers a vector has."""
    for name, entry in draft.providers.items():
        if entry is None or entry.format != "embeddings":
            continue
        text = entry.options.get("dimensions", "")
        is_number = text.isascii() and text.isdigit() and len(text) <= len(str(MAX_DIMENSIONS))
        if not is_number or not 0 < int(text) <= MAX_DIMENSIONS:
            yield ("providers", name, "options"), "must say how many numbers a vector has; write dimensions = 1536"


def _workers(draft: CheckedEntries) -> Iterator[Fault]:
    valid = {name: worker for name, worker in draft.workers.items() if worker is not None}
    models = Counter([(worker.provider, worker.model) for worker in valid.values()])
    for name, worker in valid.items():
        if worker.provider not in draft.providers:
            yield ("workers", name, "provider"), _unknown("provider", worker.provider, draft.providers)
        yield from _labels(name, worker)
        if models[worker.provider, worker.model] > 1:
            yield ("workers", name, "model"), "is used by another worker of the same provider too; keep one of them"
        provider = draft.providers.get(worker.provider)
        if provider is not None:
            yield from _sampling(("workers", name), worker.sampling, provider)
            if worker.anthropic_version and provider.format != "anthropic":
                yield (
                    ("workers", name, "anthropic_version"),
                    f"has no effect with the format {provider.format}; remove it",
                )
    for name, entry in draft.providers.items():
        if entry is not None:
            yield from _sampling(("providers", name), entry.sampling, entry)


def _labels(name: str, worker: WorkerEntry) -> Iterator[Fault]:
    """Yield labels that a worker cannot be cleared for, or cannot take away because it may not read them."""
    for label in sorted(SOURCES.intersection(worker.clearance)):
        yield ("workers", name, "clearance"), f"has {label}, which Baton sets itself; write a rule that names it"
    implied = {f"region:{worker.region}", f"retention:{worker.retention}"}
    for label in sorted(set(worker.declassifies) - set(worker.clearance) - implied):
        yield ("workers", name, "declassifies"), f"has {label}, for which the worker is not cleared; add a clearance"


def _sampling(place: tuple[str, str], table: Mapping[str, str], provider: ProviderEntry) -> Iterator[Fault]:
    """Yield parameters that are to be taken and cannot be sent; they may only be dropped or refused."""
    facts = FORMATS[provider.format]
    if table and not facts.takes_sampling:
        yield (*place, "sampling"), f"has no effect with the format {provider.format}; remove it"
        return
    ignored = {name.strip() for name in provider.options.get("ignore", "").split(",")}
    for name, treatment in table.items():
        if treatment == "take" and name in facts.lacks:
            yield (*place, "sampling", name), f"is not in the format {provider.format}; drop or refuse it"
        elif treatment == "take" and name in ignored:
            yield (*place, "sampling", name), "is left out by the provider's option `ignore`; remove it there"


def _tier(name: str, tier: TierEntry, draft: CheckedEntries) -> Iterator[Fault]:
    pool = workers_of_tier(tier, draft)
    if not pool:
        yield ("tiers", name, "pool"), "has no worker; name some, or add a worker without pooled = false"
    for worker in pool:
        if worker not in draft.workers:
            yield ("tiers", name, "pool"), _unknown("worker", worker, draft.workers)
    if tier.fallback is not None and tier.fallback not in pool:
        yield ("tiers", name, "fallback"), _not_in_pool("fallback", tier.fallback, pool)
    for worker in tier.conductor.workers:
        if worker not in pool:
            yield ("tiers", name, "conductor", "workers"), _not_in_pool("conductor's worker", worker, pool)
    yield from _approval(name, tier, pool, draft)
    yield from _selector(name, tier, pool, draft)
    yield from _rounds(name, tier)
    yield from _depth(name, tier)
    conductor = tier.conductor.worker
    if conductor is not None and conductor not in draft.workers:
        yield ("tiers", name, "conductor", "worker"), _unknown("worker", conductor, draft.workers)
    yield from _embedding(name, tier, draft)
    yield from _shadow(name, tier, draft)


def _shadow(name: str, tier: TierEntry, draft: CheckedEntries) -> Iterator[Fault]:
    """A shadow must be able to answer: a tier other than its own, a version of a conductor that is a model, or a
    worker that writes."""
    shadow = tier.shadow
    if shadow is None:
        return
    place = ("tiers", name, "shadow")
    if shadow.tier == name:
        yield (*place, "tier"), "is the tier itself; name another one"
    elif shadow.tier is not None and shadow.tier not in (*draft.tiers, *draft.workers):
        yield (*place, "tier"), _unknown("tier", shadow.tier, draft.tiers)
    worker = shadow_worker(shadow, draft)
    if worker is not None and worker not in draft.workers:
        yield (*place, "worker"), _unknown("worker", worker, draft.workers)
    elif worker is not None and _makes_embeddings(worker, draft):
        yield (*place, "worker"), f"the worker {worker} makes embeddings and cannot answer; name another one"
    if shadow.conductor is not None and tier.conductor.kind != "model":
        yield (*place, "conductor"), "is a version of a model, and no model conducts this tier; name a tier or a worker"
    if worker is not None and shadow.mode == "plan":
        yield (*place, "mode"), "has no effect with a worker that answers alone; remove it"


def shadow_worker(shadow: ShadowEntry, draft: CheckedEntries) -> str | None:
    """Return the worker that answers alone as a shadow, also one that stands in the place of a tier; None if none
    does."""
    if shadow.tier is not None and shadow.tier not in draft.tiers and shadow.tier in draft.workers:
        return shadow.tier
    return shadow.worker


def _approval(name: str, tier: TierEntry, pool: list[str], draft: CheckedEntries) -> Iterator[Fault]:
    """Yield names that are of no worker or provider, and models that read the task before anybody can approve a
    plan."""
    approval, place = tier.approval, ("tiers", name, "approval")
    if approval is None:
        return
    for worker in approval.workers:
        if worker not in pool:
            yield (*place, "workers"), _not_in_pool("worker", worker, pool)
    for provider in approval.providers:
        if provider not in draft.providers:
            yield (*place, "providers"), _unknown("provider", provider, draft.providers)
    for reader in (tier.conductor.worker, tier.conductor.embedder):
        if reader is None:
            continue
        entry = draft.workers.get(reader)
        if entry is not None and (reader in approval.workers or entry.provider in approval.providers):
            yield place, f"names {reader}, which reads the task before a plan can be approved; let another one conduct"


def _embedding(name: str, tier: TierEntry, draft: CheckedEntries) -> Iterator[Fault]:
    """Yield workers that make embeddings and are to answer or to plan, and an embedder that makes none."""
    for worker in workers_of_tier(tier, draft):
        if _makes_embeddings(worker, draft):
            yield ("tiers", name, "pool"), f"the worker {worker} makes embeddings and cannot answer; set pooled = false"
    place = ("tiers", name, "conductor")
    embedder, conductor = tier.conductor.embedder, tier.conductor.worker
    if conductor is not None and _makes_embeddings(conductor, draft):
        yield (*place, "worker"), f"the worker {conductor} makes embeddings and cannot plan; name another one"
    if embedder is not None and embedder not in draft.workers:
        yield (*place, "embedder"), _unknown("worker", embedder, draft.workers)
    elif embedder is not None and not _makes_embeddings(embedder, draft) and draft.workers[embedder] is not None:
        remedy = 'name one whose provider has format = "embeddings"'
        yield (*place, "embedder"), f"the worker {embedder} makes no embeddings; {remedy}"


def _makes_embeddings(worker: str, draft: CheckedEntries) -> bool:
    entry = draft.workers.get(worker)
    if entry is None:
        return False
    provider = draft.providers.get(entry.provider)
    return provider is not None and provider.format == "embeddings"


def _selector(name: str, tier: TierEntry, pool: list[str], draft: CheckedEntries) -> Iterator[Fault]:
    """Yield planners and checkers of a selector that are not in the pool, and templates that make too many arms to
    learn from."""
    conductor = tier.conductor
    for role in ("planners", "checkers"):
        for worker in getattr(conductor, role):
            if worker not in pool:
                yield ("tiers", name, "conductor", role), _not_in_pool(f"selector's {role[:-1]}", worker, pool)
    spec = conductor.core().selector
    entries = {worker: draft.workers.get(worker) for worker in pool}
    workers = [entry.core(worker, Deadlines(), {}) for worker, entry in entries.items() if entry is not None]
    count = count_arms(spec, workers, model=conductor.worker is not None) if spec is not None and workers else 0
    if count > MOST:
        remedy = "remove some templates, or name fewer planners and checkers"
        yield (
            ("tiers", name, "conductor", "templates"),
            f"make {count:,} arms with this pool, and at most {MOST} are learned; {remedy}",
        )


def _rounds(name: str, tier: TierEntry) -> Iterator[Fault]:
    """Yield limits of rounds that the tier's conductor does not use. A fixed one accepts its first answer unless it
    sets `again`, which needs a second round; the prompts for small conductors do not describe an earlier round."""
    conductor = tier.conductor
    has_several = False
    for place, limits in _limits_by_place(tier).items():
        rounds = limits.rounds or 1
        if rounds > 1:
            has_several = True
            for problem in _problems_of_rounds(conductor, rounds):
                yield ("tiers", name, *place, "rounds"), problem
    if conductor.again and not has_several:
        yield ("tiers", name, "conductor", "again"), "needs a second round; set rounds = 2 in the tier's limits"


def _problems_of_rounds(conductor: ConductorEntry, rounds: int) -> Iterator[str]:
    """Yield what is wrong with several rounds for a conductor."""
    if conductor.kind == "fixed" and not conductor.again:
        remedy = "remove it, or let the conductor say again = true"
        yield f"has no effect with a fixed conductor, which accepts the first answer; {remedy}"
    if conductor.kind == "selector" and rounds > SELECTOR_ROUNDS:
        yield f"is at most {SELECTOR_ROUNDS} with a selector; lower it"
    if conductor.prompt != "general":
        remedy = "remove it, or remove the prompt"
        yield f'has no effect with prompt = "{conductor.prompt}", which knows one round; {remedy}'


def _limits_by_place(tier: TierEntry) -> dict[tuple[str, ...], LimitsEntry]:
    """Return the limits of a tier, each with its place in the tier's table."""
    places: dict[tuple[str, ...], LimitsEntry] = {("limits",): tier.limits}
    for effort, limits in tier.efforts.items():
        places["efforts", effort] = limits
    return places


def _depth(name: str, tier: TierEntry) -> Iterator[Fault]:
    """Yield depths for a conductor that cannot take steps itself, which only a model with the general prompt can."""
    if tier.conductor.kind == "model" and tier.conductor.prompt == "general":
        return
    for place, limits in _limits_by_place(tier).items():
        if limits.depth:
            problem = "has no effect with a conductor that names workers only"
            remedy = 'remove it, or let a model plan with prompt = "general"'
            yield ("tiers", name, *place, "depth"), f"{problem}; {remedy}"


def _aliases(draft: CheckedEntries) -> Iterator[Fault]:
    aliases = draft.aliases or {}
    for name, target in aliases.items():
        path = ("aliases", name)
        if name in draft.tiers:
            yield path, "hides the tier of the same name; remove the alias"
        if target in draft.tiers:
            continue
        if target in aliases:
            yield path, _fault_of_chain(name, target, aliases)
        else:
            yield path, _unknown("tier", target, draft.tiers)


def _fault_of_chain(name: str, target: str, aliases: Mapping[str, str]) -> str:
    if _leads_to_itself(name, aliases):
        return "leads to itself; point it at a tier"
    return f"points at the alias {target}; point it at {_end_of_chain(target, aliases)}, aliases do not chain"


def _leads_to_itself(name: str, aliases: Mapping[str, str]) -> bool:
    names: set[str] = set()
    while name in aliases and name not in names:
        names.add(name)
        name = aliases[name]
    return name in names


def _end_of_chain(name: str, aliases: Mapping[str, str]) -> str:
    while name in aliases:
        name = aliases[name]
    return name


def _unknown(kind: str, name: str, choices: Iterable[str]) -> str:
    names = list(choices)
    remedy = did_you_mean(name, names)
    if not remedy and names:
        remedy = f"use one of {', '.join(names[:12])}"
    if not remedy:
        remedy = f"add [{kind}s.{name}]"
    return f"there is no {kind} {name}; {remedy}"


def _not_in_pool(role: str, name: str, pool: list[str]) -> str:
    return f"the {role} {name} is not in the tier's pool; add it to the pool, or use one of {', '.join(pool[:12])}"
