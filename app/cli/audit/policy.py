"""`baton policy check|diff|try`: who may be shown which requests, now and under another pool file."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from app.cli import event_loop, storage, terminal
from app.cli.arguments import Arguments
from app.core.pool import policy_table
from app.core.pool.catalog import Catalog
from app.core.pool.policy_change import Widening, widenings
from app.core.run.events import Event
from app.core.run.policy_trial import PolicyTrial, find_refused_calls
from app.errors import EventMalformed
from app.process.config import Settings, configure, read, read_catalog
from app.store.archive import Record

FINE, REFUSED = 0, 1


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Carry out one of the verbs. Returns the exit status. Raises `ConfigInvalid` for a faulty pool file."""
    terminal.log_to_stderr("warning")
    if args.verb == "check":
        if args.file:
            return _check(read_catalog(Path(args.file), environ), as_json=args.json)
        return _check(configure(environ).catalog, as_json=args.json)
    if args.verb == "diff":
        changes = list(widenings(read_catalog(Path(args.old), environ), read_catalog(Path(args.new), environ)))
        return _diff(changes, as_json=args.json)
    settings, catalog = read(environ), read_catalog(Path(args.file), environ)
    storage.print_database(settings)
    return _print_trial(event_loop.run(_try_policy(settings, catalog, args.start(now()))), as_json=args.json)


# -- check


def _check(catalog: Catalog, *, as_json: bool) -> int:
    if as_json:
        terminal.print_json(policy_table.table(catalog))
        return FINE
    table = terminal.table("tier", "labels", "may see it", "may not")
    for row in policy_table.rows(catalog):
        exclusions = "; ".join([f"{name}: {reason}" for name, reason in row.excluded.items()])
        cells = (row.tier, ", ".join(row.labels) or "none", ", ".join(row.recipients) or "nobody", exclusions)
        terminal.add_row(table, cells)
    console = terminal.stdout()
    console.print(table)
    for worker in policy_table.list_declassifying_workers(catalog):
        label_names = ", ".join(sorted(worker.declassifies))
        console.print(f"note: {worker.name} declassifies {label_names}: what it writes loses these labels")
    for words in policy_table.list_rules_without_effect(catalog):
        console.print(f"note: {words}", soft_wrap=True)
    return FINE


# -- diff


def _diff(changes: Sequence[Widening], *, as_json: bool) -> int:
    if as_json:
        witnesses = [policy_table.witness_to_json(widening) for widening in changes]
        terminal.print_json({"widens": bool(changes), "witnesses": witnesses})
    else:
        for widening in changes:
            terminal.stdout().print(_widening_text(widening), soft_wrap=True)
        if not changes:
            terminal.stdout().print("Nothing is shown to anybody who did not see it before.")
    if changes:
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


async def _try_policy(settings: Settings, catalog: Catalog, since: float | None) -> PolicyTrial:
    """Apply the catalog to the runs admitted since then, the oldest first. None of their texts is read."""
    trial = PolicyTrial()
    async with storage.existing_database(settings), storage.open_journals(settings) as archive:
        async for record in archive.records(since=since, contents=False):
            trial.runs += 1
            try:
                refused_run = find_refused_calls(_events(record), catalog)
            except EventMalformed:
                trial.damaged.append(str(record.row["id"]))
                continue
            if refused_run is not None:
                trial.refused.append(refused_run)
    return trial


def _events(record: Record) -> list[Event]:
    run = str(record.row["id"])
    if not record.events:
        raise EventMalformed(run, 1)
    return [Event.stored(run, event.seq, event.kind, event.at, event.body) for event in record.events]


def _print_trial(trial: PolicyTrial, *, as_json: bool) -> int:
    if as_json:
        terminal.print_json(trial.as_json())
    else:
        _print_refused(trial)
    if trial.refused or trial.damaged:
        return REFUSED
    return FINE


def _print_refused(trial: PolicyTrial) -> None:
    console = terminal.stdout()
    for run in trial.refused:
        reasons = "; ".join([f"{name}: {reason}" for name, reason in run.reasons.items()])
        labels = ", ".join(run.labels) or "no label"
        console.print(f"{run.run}  {run.tier}  {labels}  {reasons}", soft_wrap=True)
    for name in trial.damaged:
        console.print(f"{name}  its journal cannot be read: `baton audit check --run {name}` says more", soft_wrap=True)
    runs = terminal.count(trial.runs, "run")
    console.print(f"This pool file would have refused calls of {len(trial.refused):,} of {runs}.")
