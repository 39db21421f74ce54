"""`baton policy check|diff|try`: who may be shown which requests, now and under another pool file."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import orjson
from rich.text import Text

from app.cli import event_loop, storage, terminal
from app.cli.arguments import Asked
from app.core.pool import policy_table
from app.core.pool.catalog import Catalog
from app.core.pool.policy_change import Widening, widenings
from app.core.run import policy_trial
from app.core.run.events import Event
from app.core.run.kinds import Kind
from app.core.run.policy_trial import Refused
from app.process.config import Settings, configure, read, read_catalog
from app.store.archive import Record

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


def _check(catalog: Catalog, *, as_json: bool) -> int:
    if as_json:
        terminal.print_json(policy_table.table(catalog))
        return FINE
    table = terminal.table("tier", "labels", "may see it", "may not")
    for row in policy_table.rows(catalog):
        excluded = "; ".join(f"{name}: {reason}" for name, reason in row.excluded.items())
        cells = (row.tier, ", ".join(row.labels) or "none", ", ".join(row.shown) or "nobody", excluded)
        table.add_row(*(Text(cell, overflow="fold") for cell in cells))
    console = terminal.out()
    console.print(table)
    for worker in policy_table.lowering(catalog):
        lost = ", ".join(sorted(worker.declassifies))
        console.print(f"note: {worker.name} declassifies {lost}: what it writes loses these labels", markup=False)
    for words in policy_table.without_effect(catalog):
        console.print(f"note: {words}", markup=False, soft_wrap=True)
    return FINE


# -- diff


def _diff(found: Sequence[Widening], *, as_json: bool) -> int:
    if as_json:
        terminal.print_json({"widens": bool(found), "witnesses": [policy_table.witness(one) for one in found]})
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


# -- try


async def _tried(settings: Settings, catalog: Catalog, since: float | None) -> tuple[int, list[Refused]]:
    """Return the number of runs, and those with calls that would have been refused, oldest first."""
    runs, refused = 0, []
    async with storage.used(settings), storage.journals(settings) as archive:
        records: AsyncIterator[Record] = archive.records(since=since)
        async for record in records:
            runs += 1
            found = policy_trial.refused(_events(record), catalog)
            if found is not None:
                refused.append(found)
    return runs, refused


def _events(one: Record) -> list[Event]:
    run = str(one.row["id"])
    return [Event(run, event.seq, Kind(event.kind), event.at, orjson.loads(event.body)) for event in one.events]


def _try(runs: int, refused: Sequence[Refused], *, as_json: bool) -> int:
    if as_json:
        listed = [one.as_json() for one in refused]
        terminal.print_json({"runs": runs, "refused": listed})
        return REFUSED if refused else FINE
    console = terminal.out()
    for one in refused:
        reasons = "; ".join(f"{name}: {reason}" for name, reason in one.reasons.items())
        labels = ", ".join(one.labels) or "no label"
        console.print(f"{one.run}  {one.tier}  {labels}  {reasons}", markup=False, soft_wrap=True)
    console.print(f"This pool file would have refused calls of {len(refused):,} of {terminal.count(runs, 'run')}.")
    return REFUSED if refused else FINE
