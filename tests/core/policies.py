"""Random pools with rules, and an evaluator of rules that shares no code with the product's.

`python -m tests.core.policies` takes ten thousand pools, two thousand changes and ten thousand runs
(`information_flow.py`), and times the decisions for fifty workers; the tests take some hundred.
"""

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from itertools import combinations

from msgspec.structs import replace

from app.core.pool.catalog import Card, Catalog, ConductorSpec, Limits, ProviderSpec, Tier, Worker, attributes
from app.core.pool.policy import exclusion, permits
from app.core.pool.policy_change import widenings
from app.core.pool.rules import ATTRIBUTES, Match, Reading, Rule, excluding_rules
from tests.core import information_flow

LABELS = ("record", "secret", "draft", "region:eu", "retention:none")
PROVIDERS = ("house", "cloud", "far")
REGIONS, RETENTIONS = ("eu", None), ("none", None)
FURTHER = ("us", "30d")
"""Another region and another retention, for decisions; a comparison of two pools would have to enumerate them too."""
CALLER, STEP, CONDUCTOR = "source:caller", "source:step", "source:conductor"
SOURCES = (CALLER, STEP)
"""The sources that random rules name."""
Names = frozenset[str]
Reach = set[tuple[str, str, str, str, bool, Names]]
"""Tier, role, worker, its provider, and the labels that it may see: in what it reads itself, with the sources of that,
or (true) in what is derived from a conversation."""


def pool(chance: random.Random, workers: int = 6, *, further: bool = False) -> Catalog:
    """A random pool: workers, rules, and two tiers."""
    all_workers = [_worker(f"w{number}", chance, further=further) for number in range(workers)]
    names = [worker.name for worker in all_workers]
    tiers = [
        _tier(name, chance.sample(names, chance.randint(1, workers)), chance.choice((None, None, names[0])))
        for name in ("mini", "ultra")
    ]
    rules = tuple(_rule(f"r{number}", names, chance) for number in range(chance.randint(0, 4)))
    endpoints = {name: ProviderSpec(name, "openai", base_url=f"https://{name}.example") for name in PROVIDERS}
    workers_by_name = {worker.name: worker for worker in all_workers}
    return compile_rules(Catalog(endpoints, workers_by_name, {tier.name: tier for tier in tiers}, {}, "", rules=rules))


def compile_rules(catalog: Catalog) -> Catalog:
    """Compile the rules into the workers again, as reading a pool file does."""
    with_bars = {
        name: replace(worker, excluding_rules=excluding_rules(catalog.rules, attributes(worker)))
        for name, worker in catalog.workers.items()
    }
    return replace(catalog, workers=with_bars)


def _worker(name: str, chance: random.Random, *, further: bool) -> Worker:
    region, retention = FURTHER if further and chance.random() < 0.3 else (None, None)
    card = Card(
        region=region or chance.choice(REGIONS),
        retention=retention or chance.choice(RETENTIONS),
        clearance=frozenset(label for label in LABELS if chance.random() < 0.5),
    )
    lost = frozenset(label for label in card.cleared if chance.random() < 0.1)
    return Worker(name, chance.choice(PROVIDERS), name, card=card, declassifies=lost)


def _tier(name: str, workers: list[str], model: str | None) -> Tier:
    conductor = ConductorSpec("model", worker=model) if model is not None else ConductorSpec("fixed")
    return Tier(name, tuple(workers), conductor, workers[0], {"medium": Limits()})


def _rule(name: str, workers: list[str], chance: random.Random) -> Rule:
    allow, deny = (_match(workers, chance) if chance.random() < 0.7 else None for _ in range(2))
    labels = frozenset(label for label in LABELS if chance.random() < 0.3)
    labels |= frozenset(source for source in SOURCES if chance.random() < 0.1)
    return Rule(name, labels, allow, deny or (None if allow else _match(workers, chance)))


def _match(workers: list[str], chance: random.Random) -> Match:
    values = {
        "worker": workers,
        "provider": PROVIDERS,
        "region": ("eu", "us"),
        "retention": ("none", "30d"),
        "clearance": LABELS,
    }
    chosen_attributes = chance.sample(ATTRIBUTES, chance.randint(1, 2))
    return Match(**{name: frozenset(chance.sample(values[name], chance.randint(1, 2))) for name in chosen_attributes})


# -- the evaluator


def passes_rules(catalog: Catalog, name: str, labels: Names, sources: Names = frozenset()) -> bool:
    """Return the verdict of the rules and the card, evaluated from their text."""
    worker = catalog.workers[name]
    card = worker.card
    for label in labels:
        by_card = label == f"region:{card.region}" or label == f"retention:{card.retention}"
        if label not in card.clearance and not by_card:
            return False
    for rule in catalog.rules:
        if any(label not in labels and label not in sources for label in rule.labels):
            continue
        if rule.allow is not None and not _all_have(worker, rule.allow):
            return False
        if rule.deny is not None and _all_have(worker, rule.deny):
            return False
    return True


def _all_have(worker: Worker, match: Match) -> bool:
    if match.worker and worker.name not in match.worker:
        return False
    if match.provider and worker.provider not in match.provider:
        return False
    if match.region and worker.card.region not in match.region:
        return False
    if match.retention and worker.card.retention not in match.retention:
        return False
    return not match.clearance or any(label in match.clearance for label in worker.card.clearance)


def label_sets(labels: tuple[str, ...] = LABELS) -> Iterator[Names]:
    """All sets of the labels."""
    for size in range(len(labels) + 1):
        yield from map(frozenset, combinations(labels, size))


def reach(catalog: Catalog, sources: tuple[str, ...] = ()) -> Reach:
    """Everything that the pool shows to anybody, with each set of these sources."""
    reached: Reach = set()
    for tier in catalog.tiers.values():
        readers = [("worker", name) for name in tier.pool]
        if tier.conductor.worker is not None:
            readers.append(("conductor", tier.conductor.worker))
        for role, name in readers:
            who = (tier.name, role, name, catalog.workers[name].provider)
            for labels in label_sets():
                for origin in label_sets(sources):
                    all_origins = origin if role == "worker" else origin | {CALLER}
                    if passes_rules(catalog, name, labels, all_origins):
                        reached.add((*who, False, labels | origin))
        for labels in label_sets():
            for name in _sees_some_of(catalog, tier, labels):
                reached.add((tier.name, "worker", name, catalog.workers[name].provider, True, labels))
    return reached


def _sees_some_of(catalog: Catalog, tier: Tier, labels: Names) -> set[str]:
    """The workers of a tier that can come to see words of a conversation, or what is derived from them."""
    words = {(labels, CALLER)}
    model = tier.conductor.worker
    if model is not None and passes_rules(catalog, model, labels, frozenset({CALLER})):
        words.add((labels - catalog.workers[model].declassifies, CONDUCTOR))
    readers: set[str] = set()
    while True:
        now = [
            (name, carried)
            for name in tier.pool
            for carried, origin in words
            if passes_rules(catalog, name, carried, frozenset({origin}))
        ]
        derived = {(carried - catalog.workers[name].declassifies, STEP) for name, carried in now}
        readers |= {name for name, _ in now}
        if derived <= words:
            return readers
        words |= derived


def find_named_sources(*catalogs: Catalog) -> tuple[str, ...]:
    """The sources that the rules of the pools name."""
    rule_labels = {label for catalog in catalogs for rule in catalog.rules for label in rule.labels}
    return tuple(sorted(rule_labels.intersection(SOURCES)))


def widens(old: Catalog, new: Catalog) -> Reach:
    """Return what the new pool shows to somebody who did not see it under the old one."""
    sources = find_named_sources(old, new)
    return reach(new, sources) - reach(old, sources)


# -- changes


def change(catalog: Catalog, chance: random.Random) -> Catalog:
    """One random change of the file, in either direction."""
    make_change = chance.choice(
        (_without_a_rule, _other_clearance, _other_pool, _other_rule, _other_provider, _other_declassifier)
    )
    return compile_rules(make_change(catalog, chance))


def _without_a_rule(catalog: Catalog, chance: random.Random) -> Catalog:
    if not catalog.rules:
        return catalog
    gone = chance.choice(catalog.rules)
    return replace(catalog, rules=tuple(rule for rule in catalog.rules if rule is not gone))


def _other_clearance(catalog: Catalog, chance: random.Random) -> Catalog:
    worker = chance.choice(list(catalog.workers.values()))
    card = replace(worker.card, clearance=worker.card.clearance ^ {chance.choice(LABELS)})
    declassified = worker.declassifies & card.cleared
    return replace(
        catalog, workers={**catalog.workers, worker.name: replace(worker, card=card, declassifies=declassified)}
    )


def _other_declassifier(catalog: Catalog, chance: random.Random) -> Catalog:
    worker = chance.choice(list(catalog.workers.values()))
    lost = frozenset(label for label in worker.card.cleared if chance.random() < 0.4)
    return replace(catalog, workers={**catalog.workers, worker.name: replace(worker, declassifies=lost)})


def _other_provider(catalog: Catalog, chance: random.Random) -> Catalog:
    worker = chance.choice(list(catalog.workers.values()))
    moved = replace(worker, provider=chance.choice(PROVIDERS))
    return replace(catalog, workers={**catalog.workers, worker.name: moved})


def _other_pool(catalog: Catalog, chance: random.Random) -> Catalog:
    tier = chance.choice(list(catalog.tiers.values()))
    workers = chance.sample(sorted(catalog.workers), chance.randint(1, len(catalog.workers)))
    return replace(catalog, tiers={**catalog.tiers, tier.name: _tier(tier.name, workers, tier.conductor.worker)})


def _other_rule(catalog: Catalog, chance: random.Random) -> Catalog:
    rule = _rule(f"r{len(catalog.rules)}", sorted(catalog.workers), chance)
    rules_before = catalog.rules[: chance.randint(0, len(catalog.rules))]
    return replace(catalog, rules=(*rules_before, rule, *catalog.rules[len(rules_before) + 1 :]))


def changes(chance: random.Random, count_wanted: int, *, widen: bool) -> Iterator[tuple[Catalog, Catalog]]:
    """Pairs of an old and a new pool of which the evaluator says that the new one shows something more, or that it
    shows less and nothing more."""
    count = 0
    while count < count_wanted:
        old = pool(chance)
        new = change(old, chance)
        shows_more = bool(widens(old, new))
        fits = shows_more if widen else not shows_more and bool(widens(new, old))
        if fits:
            count += 1
            yield old, new


def disagreements(chance: random.Random, pools: int) -> int:
    """Decisions in random pools about which the product and the evaluator differ."""
    differ = 0
    for _ in range(pools):
        catalog = pool(chance, further=True)
        origin = frozenset(chance.sample(SOURCES, chance.randint(0, 2)))
        for name, worker in catalog.workers.items():
            for labels in label_sets():
                right, reading = passes_rules(catalog, name, labels, origin), Reading(labels, origin)
                differ += permits(worker, reading) is not right or bool(exclusion(worker, reading)) is right
    return differ


def decision_microseconds(chance: random.Random) -> float:
    """The time of the decisions about one request for fifty workers, the median of many requests."""
    workers = list(pool(chance, workers=50, further=True).workers.values())
    requests = [Reading(frozenset(chance.sample(LABELS, 2)), frozenset({CALLER})) for _ in range(2_000)]
    durations = []
    for request in requests:
        durations.append(_time_call(lambda request=request: [permits(worker, request) for worker in workers]))
    return statistics.median_high(durations) * 1e6


def _time_call(act: Callable[[], object]) -> float:
    started = time.perf_counter()
    act()
    return time.perf_counter() - started


def main() -> int:
    """Print how often the product is wrong, and how long it takes. Exits with 1 if it is ever wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.core.policies")
    parser.add_argument("--pools", type=int, default=10_000)
    parser.add_argument("--changes", type=int, default=1_000)
    parser.add_argument("--runs", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    chance = random.Random(f"policies {chosen.seed}")
    differ = disagreements(chance, chosen.pools)
    missed = sum(not any(widenings(*pair)) for pair in changes(chance, chosen.changes, widen=True))
    invented = sum(bool(list(widenings(*pair))) for pair in changes(chance, chosen.changes, widen=False))
    print(f"{chosen.pools:,} pools: {differ} decisions differ from the evaluator's")
    print(f"{chosen.changes:,} widenings: {missed} missed; {chosen.changes:,} narrowings: {invented} reported")
    flows = information_flow.explore(chance, chosen.runs, pool, passes_rules)
    print(f"{chosen.runs:,} runs, {flows.calls:,} calls: {len(flows.leaks)} read what the rules forbid")
    print(f"decisions for fifty workers: {decision_microseconds(chance):.1f} us")
    return int(bool(differ or missed or invented or flows.leaks))


if __name__ == "__main__":
    sys.exit(main())
