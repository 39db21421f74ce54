"""Random pools with rules, and an evaluator of rules that shares no code with the product's.

`python -m tests.core.policies` takes ten thousand pools and two thousand changes, and times the decisions for fifty
workers; the tests take some hundred.
"""

import argparse
import random
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations

from app.core.pool.catalog import Card, Catalog, ConductorSpec, Limits, ProviderSpec, Tier, Worker, attributes
from app.core.pool.policy import exclusion
from app.core.pool.policy_change import widenings
from app.core.pool.rules import ATTRIBUTES, Match, Rule, bars

LABELS = ("record", "secret", "draft", "region:eu", "retention:none")
PROVIDERS = ("house", "cloud", "far")
REGIONS, RETENTIONS = ("eu", "us", None), ("none", "30d", None)
Reach = set[tuple[str, str, str, tuple[str, ...]]]
"""Tier, worker, its provider, and the labels of a request that it may be shown."""


def pool(chance: random.Random, workers: int = 6) -> Catalog:
    """A random pool: workers, rules, and two tiers."""
    made = [_worker(f"w{number}", chance) for number in range(workers)]
    names = [worker.name for worker in made]
    tiers = [_tier(name, chance.sample(names, chance.randint(1, workers))) for name in ("mini", "ultra")]
    rules = tuple(_rule(f"r{number}", names, chance) for number in range(chance.randint(0, 4)))
    endpoints = {name: ProviderSpec(name, "openai", base_url=f"https://{name}.example") for name in PROVIDERS}
    workers_by_name = {worker.name: worker for worker in made}
    return compiled(Catalog(endpoints, workers_by_name, {tier.name: tier for tier in tiers}, {}, "", rules=rules))


def compiled(catalog: Catalog) -> Catalog:
    """Compile the rules into the workers again, as reading a pool file does."""
    known = {
        name: replace(worker, bars=bars(catalog.rules, attributes(worker))) for name, worker in catalog.workers.items()
    }
    return replace(catalog, workers=known)


def _worker(name: str, chance: random.Random) -> Worker:
    card = Card(
        region=chance.choice(REGIONS),
        retention=chance.choice(RETENTIONS),
        clearance=frozenset(label for label in LABELS if chance.random() < 0.5),
    )
    return Worker(name, chance.choice(PROVIDERS), name, card=card)


def _tier(name: str, workers: list[str]) -> Tier:
    return Tier(name, tuple(workers), ConductorSpec("fixed"), workers[0], {"medium": Limits()})


def _rule(name: str, workers: list[str], chance: random.Random) -> Rule:
    allow, deny = (_match(workers, chance) if chance.random() < 0.7 else None for _ in range(2))
    labels = frozenset(label for label in LABELS if chance.random() < 0.3)
    return Rule(name, labels, allow, deny or (None if allow else _match(workers, chance)))


def _match(workers: list[str], chance: random.Random) -> Match:
    values = {
        "worker": workers,
        "provider": PROVIDERS,
        "region": ("eu", "us"),
        "retention": ("none", "30d"),
        "clearance": LABELS,
    }
    asked = chance.sample(ATTRIBUTES, chance.randint(1, 2))
    return Match(**{name: frozenset(chance.sample(values[name], chance.randint(1, 2))) for name in asked})


# -- the evaluator


def allowed(catalog: Catalog, name: str, labels: frozenset[str]) -> bool:
    """What the rules and the card say, evaluated from their text."""
    worker = catalog.workers[name]
    card = worker.card
    for label in labels:
        by_card = label == f"region:{card.region}" or label == f"retention:{card.retention}"
        if label not in card.clearance and not by_card:
            return False
    for rule in catalog.rules:
        if any(label not in labels for label in rule.labels):
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


def label_sets() -> Iterator[frozenset[str]]:
    """All sets of the labels."""
    for size in range(len(LABELS) + 1):
        yield from map(frozenset, combinations(LABELS, size))


def reach(catalog: Catalog) -> Reach:
    """Everything that the pool shows to anybody."""
    return {
        (tier.name, name, catalog.workers[name].provider, tuple(sorted(labels)))
        for tier in catalog.tiers.values()
        for name in tier.pool
        for labels in label_sets()
        if allowed(catalog, name, labels)
    }


# -- changes


def change(catalog: Catalog, chance: random.Random) -> Catalog:
    """One random change of the file, in either direction."""
    made = chance.choice((_without_a_rule, _other_clearance, _other_pool, _other_rule, _other_provider))
    return compiled(made(catalog, chance))


def _without_a_rule(catalog: Catalog, chance: random.Random) -> Catalog:
    if not catalog.rules:
        return catalog
    gone = chance.choice(catalog.rules)
    return replace(catalog, rules=tuple(rule for rule in catalog.rules if rule is not gone))


def _other_clearance(catalog: Catalog, chance: random.Random) -> Catalog:
    worker = chance.choice(list(catalog.workers.values()))
    card = replace(worker.card, clearance=worker.card.clearance ^ {chance.choice(LABELS)})
    return replace(catalog, workers={**catalog.workers, worker.name: replace(worker, card=card)})


def _other_provider(catalog: Catalog, chance: random.Random) -> Catalog:
    worker = chance.choice(list(catalog.workers.values()))
    moved = replace(worker, provider=chance.choice(PROVIDERS))
    return replace(catalog, workers={**catalog.workers, worker.name: moved})


def _other_pool(catalog: Catalog, chance: random.Random) -> Catalog:
    tier = chance.choice(list(catalog.tiers.values()))
    workers = chance.sample(sorted(catalog.workers), chance.randint(1, len(catalog.workers)))
    return replace(catalog, tiers={**catalog.tiers, tier.name: _tier(tier.name, workers)})


def _other_rule(catalog: Catalog, chance: random.Random) -> Catalog:
    rule = _rule(f"r{len(catalog.rules)}", sorted(catalog.workers), chance)
    kept = catalog.rules[: chance.randint(0, len(catalog.rules))]
    return replace(catalog, rules=(*kept, rule, *catalog.rules[len(kept) + 1 :]))


def changes(chance: random.Random, wanted: int, *, widen: bool) -> Iterator[tuple[Catalog, Catalog]]:
    """Pairs of an old and a new pool of which the evaluator says that the new one shows more, or that it does not."""
    found = 0
    while found < wanted:
        old = pool(chance)
        new = change(old, chance)
        if bool(reach(new) - reach(old)) is widen:
            found += 1
            yield old, new


def disagreements(chance: random.Random, pools: int) -> int:
    """Decisions in random pools about which the product and the evaluator differ."""
    differ = 0
    for _ in range(pools):
        catalog = pool(chance)
        for name, worker in catalog.workers.items():
            differ += sum(bool(exclusion(worker, one)) is allowed(catalog, name, one) for one in label_sets())
    return differ


def decision_microseconds(chance: random.Random) -> float:
    """The time of the decisions about one request for fifty workers, the median of many requests."""
    workers = list(pool(chance, workers=50).workers.values())
    requests = [frozenset(chance.sample(LABELS, 2)) for _ in range(2_000)]
    taken = sorted(_timed(lambda one=one: [exclusion(worker, one) for worker in workers]) for one in requests)
    return taken[len(taken) // 2] * 1e6


def _timed(act: Callable[[], object]) -> float:
    begun = time.perf_counter()
    act()
    return time.perf_counter() - begun


def main() -> int:
    """Print how often the product is wrong, and how long it takes. Exits with 1 if it is ever wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.core.policies")
    parser.add_argument("--pools", type=int, default=10_000)
    parser.add_argument("--changes", type=int, default=1_000)
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    chance = random.Random(f"policies {chosen.seed}")
    differ = disagreements(chance, chosen.pools)
    missed = sum(not any(widenings(*pair)) for pair in changes(chance, chosen.changes, widen=True))
    invented = sum(any(True for _ in widenings(*pair)) for pair in changes(chance, chosen.changes, widen=False))
    print(f"{chosen.pools:,} pools: {differ} decisions differ from the evaluator's")
    print(f"{chosen.changes:,} widenings: {missed} missed; {chosen.changes:,} other changes: {invented} reported")
    print(f"decisions for fifty workers: {decision_microseconds(chance):.1f} us")
    return int(bool(differ or missed or invented))


if __name__ == "__main__":
    sys.exit(main())
