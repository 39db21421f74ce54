"""`baton policy check|diff|try`: who may be shown which requests, now and under another pool file."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import orjson
from rich.table import Table
from rich.text import Text

from app.cli import event_loop, storage, terminal
from app.cli.asked import Asked
from app.core.pool.catalog import Catalog, Worker
from app.core.pool.policy import exclusion
from app.core.pool.policy_change import Widening, labels_of, recipients, widenings
from app.core.pool.rules import CALLER, SOURCES, Reading, Rule
from app.core.records import record
from app.core.run.events import CallIntended, Event
from app.core.run.kinds import Kind
from app.core.run.labels import Flow, conversation
from app.core.run.state import RunState, advance, begin
from app.process.config import Settings, configure, read, read_catalog
from app.store.archive import Record, open_archive

FINE, REFUSED = 0, 1


def run(asked: Asked, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Carry out one of the verbs. Returns the exit status. Raises `ConfigInvalid` for a faulty pool file."""
    terminal.log_to_stderr("warning")
    if asked.verb == "check":
        catalog = read_catalog(Path(asked.file)) if asked.file else configure(environ).catalog
        return _check(catalog, as_json=asked.json)
    if asked.verb == "diff":
        found = list(widenings(read_catalog(Path(asked.old)), read_catalog(Path(asked.new))))
        return _diff(found, as_json=asked.json)
    settings, catalog = read(environ), read_catalog(Path(asked.file))
    storage.announce(settings)
    since = now() - asked.since if asked.since else None
    runs, refused = event_loop.run(_tried(settings, catalog, since))
    return _try(runs, refused, as_json=asked.json)


# -- check


@record(frozen=True, slots=True)
class Shown:
    """The recipients that may be shown a tier's requests with exactly these labels, and why the others may not."""

    tier: str
    labels: tuple[str, ...]
    shown: tuple[str, ...]
    excluded: Mapping[str, str]


def _check(catalog: Catalog, *, as_json: bool) -> int:
    rows, idle = _rows(catalog), list(map(_idle_words, _idle(catalog)))
    if as_json:
        terminal.print_json(
            {
                "rules": [rule.name for rule in catalog.rules],
                "shown": [
                    {
                        "tier": row.tier,
                        "labels": row.labels,
                        "recipients": row.shown,
                        "excluded": dict(row.excluded),
                    }
                    for row in rows
                ],
                "declassifies": {worker.name: sorted(worker.declassifies) for worker in _lowering(catalog)},
                "without_effect": idle,
            }
        )
        return FINE
    table = Table("tier", "labels", "may see it", "may not", box=None, header_style="bold", pad_edge=False)
    for row in rows:
        excluded = "; ".join(f"{name}: {reason}" for name, reason in row.excluded.items())
        cells = (row.tier, ", ".join(row.labels) or "none", ", ".join(row.shown) or "nobody", excluded)
        table.add_row(*(Text(cell, overflow="fold") for cell in cells))
    console = terminal.out()
    console.print(table)
    for worker in _lowering(catalog):
        lost = ", ".join(sorted(worker.declassifies))
        console.print(f"note: {worker.name} declassifies {lost}: what it writes loses these labels", markup=False)
    for words in idle:
        console.print(f"note: {words}", markup=False, soft_wrap=True)
    return FINE


def _rows(catalog: Catalog) -> list[Shown]:
    """Return a row for each tier and each set of labels that matters: none, each alone, and those of each rule."""
    alone = [(label,) for label in labels_of(catalog)]
    of_rules = [tuple(sorted(rule.labels)) for rule in catalog.rules]
    sets = dict.fromkeys(chain([()], alone, of_rules))
    return [_shown(catalog, name, labels) for name in catalog.tiers for labels in sets]


def _shown(catalog: Catalog, tier: str, labels: tuple[str, ...]) -> Shown:
    shown, excluded = [], {}
    for recipient, worker in recipients(catalog, catalog.tiers[tier]).items():
        name = worker.name if recipient.role == "worker" else f"{worker.name} ({recipient.role})"
        named = frozenset(labels)
        reason = exclusion(worker, Reading(named - SOURCES, named & SOURCES | {CALLER}))
        if reason:
            excluded[name] = reason
        else:
            shown.append(name)
    return Shown(tier, labels, tuple(shown), excluded)


def _lowering(catalog: Catalog) -> list[Worker]:
    return [worker for worker in catalog.workers.values() if worker.declassifies]


def _idle(catalog: Catalog) -> list[Rule]:
    """Return the rules that exclude nobody who is cleared for their labels."""
    effective: set[str] = set()
    for worker in catalog.workers.values():
        effective |= {bar.rule for bar in worker.bars if bar.labels <= worker.card.cleared | SOURCES}
    return [rule for rule in catalog.rules if rule.name not in effective]


def _idle_words(rule: Rule) -> str:
    labels = ", ".join(sorted(rule.labels)) or "any request"
    return f"the rule {rule.name} excludes nobody who is cleared for {labels}"


# -- diff


def _diff(found: Sequence[Widening], *, as_json: bool) -> int:
    if as_json:
        terminal.print_json({"widens": bool(found), "witnesses": [_witness(one) for one in found]})
    elif not found:
        terminal.out().print("Nothing is shown to anybody who did not see it before.")
    for one in () if as_json else found:
        who = f"{one.recipient.worker} at {one.recipient.provider}, as {one.recipient.role}"
        if one.through:
            who += f", as what {', then '.join(one.through)} makes of it"
        labels = f"labels {', '.join(one.labels)}" if one.labels else "no label"
        line = f"widens: {one.tier} with {labels} is shown to {who}; before: {one.reason}"
        terminal.out().print(line, markup=False, soft_wrap=True)
    return REFUSED if found else FINE


def _witness(one: Widening) -> dict[str, Any]:
    recipient = one.recipient
    return {
        "tier": one.tier,
        "labels": one.labels,
        "role": recipient.role,
        "worker": recipient.worker,
        "provider": recipient.provider,
        "through": one.through,
        "before": one.reason,
    }


# -- try


@record(frozen=True, slots=True)
class Refused:
    """A run with calls that the pool file would not have allowed, and the first reason for each worker."""

    run: str
    tier: str
    labels: tuple[str, ...]
    reasons: Mapping[str, str]


async def _tried(settings: Settings, catalog: Catalog, since: float | None) -> tuple[int, list[Refused]]:
    """Return the number of runs, and those with calls that would have been refused, oldest first."""
    runs, refused = 0, []
    async with storage.used(settings), open_archive(settings.database_url) as archive:
        records: AsyncIterator[Record] = archive.records(since=since)
        async for one in records:
            runs += 1
            found = _refused(one, catalog)
            if found is not None:
                refused.append(found)
    return runs, refused


def _refused(one: Record, catalog: Catalog) -> Refused | None:
    events = [
        Event(str(one.row["id"]), event.seq, Kind(event.kind), event.at, orjson.loads(event.body))
        for event in one.events
    ]
    if not events or events[0].kind is not Kind.ADMITTED:
        return None
    state, reasons = begin(events[0]), dict[str, str]()
    for event in events[1:]:
        if isinstance(event.fact, CallIntended):
            reason = _reason(catalog, state, event.fact)
            if reason:
                reasons.setdefault(event.fact.worker, reason)
        state = advance(state, event)
    labels = tuple(sorted(state.admitted.labels))
    return Refused(state.run, state.admitted.tier, labels, reasons) if reasons else None


def _reason(catalog: Catalog, state: RunState, call: CallIntended) -> str:
    """Return the reason why the pool file would not have allowed a call, from the labels of what was read in it."""
    known = catalog.workers.get(call.worker)
    if known is None:
        return "is not in the pool file"
    found = Flow(state, catalog, lowered_now=True)
    if call.n is not None:
        return exclusion(known, found.readings[call.n])
    open_proposal = state.unmade
    if open_proposal is None:
        return exclusion(known, conversation(state))
    return exclusion(known, found.planner(open_proposal.round, open_proposal.parent))


def _try(runs: int, refused: Sequence[Refused], *, as_json: bool) -> int:
    if as_json:
        listed = [
            {"run": one.run, "tier": one.tier, "labels": one.labels, "refused": dict(one.reasons)} for one in refused
        ]
        terminal.print_json({"runs": runs, "refused": listed})
        return REFUSED if refused else FINE
    console = terminal.out()
    for one in refused:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in one.reasons.items())
        labels = ", ".join(one.labels) or "no label"
        console.print(f"{one.run}  {one.tier}  {labels}  {reasons}", markup=False, soft_wrap=True)
    console.print(f"{len(refused):,} of {runs:,} runs made calls that this pool file would have refused.")
    return REFUSED if refused else FINE
