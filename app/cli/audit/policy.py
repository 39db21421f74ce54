"""`baton policy check|diff|try`: who may be shown which requests, now and under another pool file."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path

from app.cli import event_loop, storage, terminal
from app.cli.arguments import Arguments
from app.core.pool import policy_table
from app.core.pool.catalog import Catalog
from app.core.pool.policy_change import Widening, widenings
from app.core.run import policy_trial
from app.core.run.events import Event
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
        changes = list(widenings(read_catalog(Path(args.old)), read_catalog(Path(args.new))))
        return _diff(changes, as_json=args.json)
    settings, catalog = read(environ), read_catalog(Path(args.file))
    storage.print_database(settings)
    run_count, refused_runs = event_loop.run(_try_policy(settings, catalog, args.start(now())))
    return _print_trial(run_count, refused_runs, as_json=args.json)


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


async def _try_policy(settings: Settings, catalog: Catalog, since: float | None) -> tuple[int, list[RefusedRun]]:
    """Return the number of runs, and those with calls that would have been refused, oldest first."""
    run_count, refused_runs = 0, []
    async with storage.existing_database(settings), storage.open_journals(settings) as archive:
        records: AsyncIterator[Record] = archive.records(since=since)
        async for record in records:
            run_count += 1
            refused_run = policy_trial.find_refused_calls(_events(record), catalog)
            if refused_run is not None:
                refused_runs.append(refused_run)
    return run_count, refused_runs


def _events(record: Record) -> list[Event]:
    run = str(record.row["id"])
    return [Event.stored(run, event.seq, event.kind, event.at, event.body) for event in record.events]


def _print_trial(runs: int, refused_runs: Sequence[RefusedRun], *, as_json: bool) -> int:
    if as_json:
        records = [run.as_json() for run in refused_runs]
        terminal.print_json({"runs": runs, "refused": records})
    else:
        _print_refused(runs, refused_runs)
    if refused_runs:
        return REFUSED
    return FINE


def _print_refused(runs: int, refused_runs: Sequence[RefusedRun]) -> None:
    console = terminal.stdout()
    for run in refused_runs:
        reasons = "; ".join([f"{name}: {reason}" for name, reason in run.reasons.items()])
        labels = ", ".join(run.labels) or "no label"
        console.print(f"{run.run}  {run.tier}  {labels}  {reasons}", soft_wrap=True)
    console.print(f"This pool file would have refused calls of {len(refused_runs):,} of {terminal.count(runs, 'run')}.")
