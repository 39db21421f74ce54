"""A pool file's policy as a table: who may be shown which requests, and which rules are without effect. Pure.

`baton policy check` and the admin API show it.
"""

from collections.abc import Mapping
from itertools import chain
from typing import Any

from msgspec import Struct

from app.core.pool.catalog import Catalog, Worker, attributes
from app.core.pool.policy import exclusion
from app.core.pool.policy_change import Widening, labels_of, recipients
from app.core.pool.rules import CALLER, SOURCES, Reading, Rule


class Row(Struct, frozen=True):
    """The recipients that may be shown a tier's requests with exactly these labels, and why the others may not."""

    tier: str
    labels: tuple[str, ...]
    recipients: tuple[str, ...]
    excluded: Mapping[str, str]


def rows(catalog: Catalog) -> list[Row]:
    """Return a row for each tier and each set of labels that matters: none, each alone, and those of each rule."""
    alone = [(label,) for label in labels_of(catalog)]
    of_rules = [tuple(sorted(rule.labels)) for rule in catalog.rules]
    sets = dict.fromkeys(chain([()], alone, of_rules))
    return [_row(catalog, name, labels) for name in catalog.tiers for labels in sets]


def _row(catalog: Catalog, tier: str, labels: tuple[str, ...]) -> Row:
    names = frozenset(labels)
    reading = Reading(names - SOURCES, names & SOURCES | {CALLER})
    readers: list[str] = []
    excluded: dict[str, str] = {}
    for recipient, worker in recipients(catalog, catalog.tiers[tier]).items():
        name = worker.name
        if recipient.role != "worker":
            name = f"{worker.name} ({recipient.role})"
        reason = exclusion(worker, reading)
        if reason:
            excluded[name] = reason
        else:
            readers.append(name)
    return Row(tier, labels, tuple(readers), excluded)


def list_declassifying_workers(catalog: Catalog) -> list[Worker]:
    """Return the workers that declassify: what they write loses labels."""
    return [worker for worker in catalog.workers.values() if worker.declassifies]


def list_rules_without_effect(catalog: Catalog) -> list[str]:
    """Return, in words, the rules that exclude nobody who is cleared for their labels, and ask for no approval before
    such a worker is called."""
    effective: set[str] = set()
    for worker in catalog.workers.values():
        excluding = {rule.name for rule in worker.excluding_rules}
        for rule in catalog.rules:
            asks = rule.approve is not None and rule.approve.fits(attributes(worker))
            if (asks or rule.name in excluding) and rule.labels <= worker.card.cleared | SOURCES:
                effective.add(rule.name)
    return [_words(rule) for rule in catalog.rules if rule.name not in effective]


def _words(rule: Rule) -> str:
    labels = ", ".join(sorted(rule.labels)) or "any request"
    return f"the rule {rule.name} excludes nobody who is cleared for {labels}"


def table(catalog: Catalog) -> dict[str, Any]:
    """Return the whole table as a JSON value."""
    return {
        "rules": [rule.name for rule in catalog.rules],
        "shown": [_row_to_json(row) for row in rows(catalog)],
        "declassifies": {worker.name: sorted(worker.declassifies) for worker in list_declassifying_workers(catalog)},
        "without_effect": list_rules_without_effect(catalog),
    }


def _row_to_json(row: Row) -> dict[str, Any]:
    return {"tier": row.tier, "labels": row.labels, "recipients": row.recipients, "excluded": dict(row.excluded)}


def witness_to_json(widening: Widening) -> dict[str, Any]:
    """Return the witness of a widening as a JSON value."""
    recipient = widening.recipient
    return {
        "tier": widening.tier,
        "labels": widening.labels,
        "role": recipient.role,
        "worker": recipient.worker,
        "provider": recipient.provider,
        "through": widening.through,
        "before": widening.reason,
    }
