"""Rules about keys, tenants, budgets, legal holds and conductors: each is as the log of changes says,
which agrees with itself.

A key that was made before the log began has no making in it; from its first logged change on it is checked all the
same. The log's records of keys are computed here again from the rows, by code that shares nothing with their writer.
"""

import hashlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any

import orjson

from app.audit.report import Report, Violation
from app.core.pool.serving import tier_in
from app.store.archive import Administration

UNLOGGED, BROKEN = "change-unlogged", "change-log-broken"
OLDER = "keys from before the log of changes"
UNSTORED = ("conductor", "tier", "retention")
"""Kinds of entries that are not the history of a row: changes of conductors, of tiers and of settings."""
LISTS = ("scopes", "tiers", "labels")
DIGESTS = ("digest", "previous_digest")


def check_administration(administration: Administration, report: Report) -> Iterator[Violation]:
    """Check every key, tenant, budget, legal hold and change of a conductor against the log."""
    histories: defaultdict[tuple[str, str], list[Mapping[str, Any]]] = defaultdict(list)
    for event in administration.events:
        histories[event["action"].partition(".")[0], event["target"]].append(event)
    for (kind, name), history in histories.items():
        if kind not in UNSTORED:
            yield from _check_chain(f"{kind} {name}", history)
    for row in administration.keys:
        yield from _check_key(row, histories.pop(("key", row["id"]), []), administration.since, report)
    for row in administration.tenants:
        record = {"created_at": row["created_at"], "disabled_at": row["disabled_at"]}
        yield from _check_record(f"tenant {row['name']}", record, histories.pop(("tenant", row["name"]), []))
    for row in administration.budgets:
        record = {name: value for name, value in row.items() if name != "id"}
        yield from _check_record(f"budget {row['id']}", record, histories.pop(("budget", row["id"]), []))
    for row in administration.holds:
        record = {name: value for name, value in row.items() if name != "id"}
        yield from _check_record(f"hold {row['id']}", record, histories.pop(("hold", row["id"]), []))
    yield from _check_changes(administration, histories)
    for (kind, name), history in histories.items():
        if kind not in UNSTORED and history[-1]["after"] is not None:
            yield Violation(f"{kind} {name}", 0, UNLOGGED, f"the log has the {kind}, and it is not stored")


def _check_chain(name: str, history: Sequence[Mapping[str, Any]]) -> Iterator[Violation]:
    """Each change begins with what the one before has left."""
    for earlier, later in pairwise(history):
        if read_fields(later["before"]) != read_fields(earlier["after"]):
            yield Violation(name, later["seq"], BROKEN, "the change does not begin with what the one before has left")


def _check_key(
    row: Mapping[str, Any], history: Sequence[Mapping[str, Any]], since: float, report: Report
) -> Iterator[Violation]:
    name = f"key {row['id']}"
    if not history and row["created_at"] < since:
        report.unverifiable[OLDER] += 1
        return
    record = dict(row)
    for field in LISTS:
        record[field] = _read_list(row[field])
    for field in DIGESTS:
        record[field] = None if row[field] is None else hashlib.sha256(row[field]).hexdigest()
    yield from _check_record(name, record, history)


def _check_record(name: str, record: Mapping[str, Any], history: Sequence[Mapping[str, Any]]) -> Iterator[Violation]:
    if not history:
        yield Violation(name, 0, UNLOGGED, "nothing in the log of changes has made it")
        return
    logged = read_fields(history[-1]["after"]) or {}
    wrong = [field for field in sorted({*record, *logged}) if record.get(field) != logged.get(field)]
    if wrong:
        yield Violation(name, history[-1]["seq"], UNLOGGED, f"{', '.join(wrong)} changed without an entry in the log")


def _check_changes(
    administration: Administration, histories: Mapping[tuple[str, str], Sequence[Mapping[str, Any]]]
) -> Iterator[Violation]:
    """Each change of a conductor's version, or of what serves a tier, since the log began stands in it, and each that
    stands in it is stored."""
    logged: dict[str, tuple[str, str, str]] = {}
    stored = {change.id for change in administration.changes}
    for (kind, target), history in histories.items():
        if kind not in ("conductor", "tier"):
            continue
        for event in history:
            after = read_fields(event["after"]) or {}
            change_id = str(after.get("change"))
            logged[change_id] = (target, event["action"], str(after.get("version")))
            if change_id not in stored:
                words = f"the log has the change {change_id} of what is in force, and it is not stored"
                yield Violation(f"{kind} {target}", event["seq"], UNLOGGED, words)
    for change in administration.changes:
        kind, target = "conductor", change.conductor
        if tier := tier_in(change.conductor):
            kind, target = "tier", tier
        expected = (target, f"{kind}.{change.kind}", change.version)
        if change.at >= administration.since and logged.get(change.id) != expected:
            words = f"the change {change.id} of what is in force is not in the log"
            yield Violation(f"{kind} {target}", 0, UNLOGGED, words)


def read_fields(body: bytes | None) -> Mapping[str, Any] | None:
    """Return the record of an entry; one that is not JSON any more is empty, and so fits nothing."""
    if body is None:
        return None
    try:
        record = orjson.loads(body)
    except orjson.JSONDecodeError:
        return {}
    if not isinstance(record, dict):
        return {}
    return record


def _read_list(text: str) -> Any:
    """Return a list of a key's; a text that is not JSON any more is returned as it is, and so fits no entry."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        return text
