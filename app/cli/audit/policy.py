"""`baton policy check|diff|try`: who may be shown which requests, now and under another pool file."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

import orjson
from rich.text import Text

from app.cli import event_loop, storage, terminal
from app.cli.arguments import Arguments
from app.core.pool import policy_table
from app.core.pool.catalog import Catalog
from app.core.pool.policy_change import Widening, widenings
from app.core.run import policy_trial
from app.core.run.events import Event
from app.core.run.kinds import Kind
from app.core.run.policy_trial import RefusedRun
from app.process.config import Settings, configure, read, read_catalog
from app.store.archive import Record

FINE, REFUSED = 0, 1


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Carry out one of the verbs. Returns the exit status. Raises `ConfigInvalid` for a faulty pool file."""
    terminal.log_to_stderr("warning")
    if args.verb == "check":
        if args.file:
            return _check(read_catalog(Path(args.file)), as_json=args.json)
        return _check(configure(environ).catalog, as_json=args.json)
    if args.verb == "diff":
        found = list(widenings(read_catalog(Path(args.old)), read_catalog(Path(args.new))))
        return _diff(found, as_json=args.json)
    settings, catalog = read(environ), read_catalog(Path(args.file))
    storage.print_database(settings)
    since = None
    if args.since:
        since = now() - args.since
    runs, refused = event_loop.run(_tried_policy(settings, catalog, since))
    return _try(runs, refused, as_json=args.json)


# -- check


def _check(catalog: Catalog, *, as_json: bool) -> int:
    if as_json:
        terminal.print_json(policy_table.table(catalog))
        return FINE
    table = terminal.table("tier", "labels", "may see it", "may not")
    for row in policy_table.rows(catalog):
        excluded = "; ".join([f"{name}: {reason}" for name, reason in row.excluded.items()])
        cells = (row.tier, ", ".join(row.labels) or "none", ", ".join(row.recipients) or "nobody", excluded)
        table.add_row(*[Text(cell, overflow="fold") for cell in cells])
    console = terminal.stdout()
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
        witnesses = [policy_table.witness(widening) for widening in found]
        terminal.print_json({"widens": bool(found), "witnesses": witnesses})
    else:
        for widening in found:
            terminal.stdout().print(_widening_text(widening), markup=False, soft_wrap=True)
        if not found:
            terminal.stdout().print("Nothing is shown to anybody who did not see it before.")
    if found:
        return REFUSED
    return FINE


def _widening_text(widening: Widening) -> str:
    who = f"{widening.recipient.worker} at {widening.recipient.provider}, as {widening.recipient.role}"
    if widening.through:
        who += f", as what {', then '.join(widening.through)} makes of it"
    labels = "no label"
    if widening.labels:
        labels = f"labels {', '.join(widening.labels)}"
    return f"widens: {widening.tier} with {labels} is shown to {who}; before: {widening.reason}"


# -- try


async def _tried_policy(settings: Settings, catalog: Catalog, since: float | None) -> tuple[int, list[RefusedRun]]:
    """Return the number of runs, and those with calls that would have been refused, oldest first."""
    runs, refused = 0, []
    async with storage.existing_database(settings), storage.open_journals(settings) as archive:
        records: AsyncIterator[Record] = archive.records(since=since)
        async for record in records:
            runs += 1
            found = policy_trial.refused_calls(_events(record), catalog)
            if found is not None:
                refused.append(found)
    return runs, refused


def _events(record: Record) -> list[Event]:
    run = str(record.row["id"])
    return [Event(run, event.seq, Kind(event.kind), event.at, orjson.loads(event.body)) for event in record.events]


def _try(runs: int, refused: Sequence[RefusedRun], *, as_json: bool) -> int:
    if as_json:
        listed = [run.as_json() for run in refused]
        terminal.print_json({"runs": runs, "refused": listed})
    else:
        _print_refused(runs, refused)
    if refused:
        return REFUSED
    return FINE


def _print_refused(runs: int, refused: Sequence[RefusedRun]) -> None:
    console = terminal.stdout()
    for run in refused:
        reasons = "; ".join([f"{name}: {reason}" for name, reason in run.reasons.items()])
        labels = ", ".join(run.labels) or "no label"
        console.print(f"{run.run}  {run.tier}  {labels}  {reasons}", markup=False, soft_wrap=True)
    console.print(f"This pool file would have refused calls of {len(refused):,} of {terminal.count(runs, 'run')}.")
