"""`baton audit check|export|tiles|rules` checks a journal against Baton's promises, by code that did not write it.

Exit status: 0 clean, 1 violations, 2 the journal could not be read.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from pathlib import Path

from app.audit.check import WRONG_TYPE_ERRORS, Auditor
from app.audit.export import Export
from app.audit.log.folder import save
from app.audit.report import RULES, Report, Violation
from app.cli import event_loop, storage, terminal
from app.cli.arguments import Arguments
from app.cli.audit import content_reads
from app.cli.terminal import count
from app.errors import ConfigInvalid, NotFound, StoreUnavailable
from app.process.config import read
from app.providers.formats import adapter
from app.store.archive import Archive
from app.store.journal_file import write
from app.store.protocol import Store
from app.store.sealed_rows import SealedRows, in_one_snapshot

MAX_PRINTED_VIOLATIONS = 200
"""Violations that are printed; `--json` has up to 10,000."""
MAX_MISTYPED_VALUES = 100
"""Values of other types than their columns that are named; `baton audit verify` has all of them."""
CLEAN, VIOLATIONS, UNREADABLE = 0, 1, 2


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Carry out one of the verbs. Returns the exit status."""
    terminal.log_to_stderr("warning")
    if args.verb == "rules":
        return _rules(as_json=args.json)
    if args.verb != "check" or args.file is None:
        storage.print_database(read(environ))
    try:
        if args.verb == "export":
            return event_loop.run(_export(args, environ, now()))
        if args.verb == "tiles":
            return event_loop.run(_save_tiles(args, environ))
        report = event_loop.run(_check(args, environ, now()))
    except StoreUnavailable as error:
        print(f"baton: {error.message}", file=sys.stderr)
        return UNREADABLE
    if args.run is not None and not (report.runs or report.pruned or report.violations):
        print("baton: there is no such run", file=sys.stderr)
        return UNREADABLE
    if args.json:
        terminal.print_json(_record(report))
    else:
        _print(report)
    if report.is_clean:
        return CLEAN
    return VIOLATIONS


async def _check(args: Arguments, environ: Mapping[str, str], now: float) -> Report:
    since, earlier = args.start(now), None
    if args.against:
        earlier = Export(Path(args.against))
    if args.file is not None:
        export = Export(Path(args.file))
        return await Auditor(export.at, adapter).audit(export, run=args.run, since=since, against=earlier)
    settings = read(environ)
    async with storage.existing_database(settings), storage.open_journals(settings) as archive:
        mistyped = await _find_mistyped_values(archive, args.run)
        try:
            report = await Auditor(now, adapter).audit(archive, run=args.run, since=since, against=earlier)
        except WRONG_TYPE_ERRORS:
            mistyped = mistyped or await _find_mistyped_values(archive)
            if not mistyped:
                raise
            report = Report()  # a row with such a value cannot be read
        for violation in mistyped:
            report.add(violation)
        return report


async def _find_mistyped_values(archive: Archive, run: str | None = None) -> Sequence[Violation]:
    """Return the values that have another type than their columns, which SQLite stores; with a run, its own alone."""
    violations: list[Violation] = []

    def find(rows: SealedRows) -> None:
        for table, key, column, type_name in islice(rows.find_mistyped_values(run), MAX_MISTYPED_VALUES):
            words = f"its column `{column}` has a value of the type {type_name}"
            violations.append(Violation(f"{table} {key}", 0, "body-malformed", words))

    await in_one_snapshot(archive, find)
    return violations


async def _export(args: Arguments, environ: Mapping[str, str], now: float) -> int:
    since = args.start(now)
    settings = read(environ)
    tenant = ""
    async with storage.open_configured_store(settings) as store:
        if args.run is not None:
            try:
                tenant = await _find_tenant(store, args.run)
            except NotFound:
                print("baton: there is no such run", file=sys.stderr)
                return UNREADABLE
        async with storage.open_journals(settings) as archive:
            try:
                runs = await write(archive, Path(args.file), now=now, run=args.run, since=since)
            except WRONG_TYPE_ERRORS:
                if not await _find_mistyped_values(archive):
                    raise
                words = "a value has another type than its column, so nothing is exported; `baton audit check` names it"
                print(f"baton: {words}", file=sys.stderr)
                return UNREADABLE
        await content_reads.record_read(store, args.run or "", tenant, f"export of {count(runs, 'run')}")
    if args.json:
        terminal.print_json({"file": args.file, "runs": runs})
        return CLEAN
    terminal.stderr().print(f"Wrote {count(runs, 'run')} to {args.file}; it holds callers' texts.")
    return CLEAN


async def _find_tenant(store: Store, run: str) -> str:
    """Return the tenant of a run that is stored, or was pruned. Raises `NotFound`."""
    try:
        return (await store.run(run)).tenant
    except NotFound:
        return (await store.pruned_run(run)).tenant


async def _save_tiles(args: Arguments, environ: Mapping[str, str]) -> int:
    """Save the transparency log in a folder."""
    settings = read(environ)
    entry_count = 0

    def save_rows(rows: SealedRows) -> None:
        nonlocal entry_count
        state = rows.state()
        if state is None or state["checkpoint"] is None:
            raise ConfigInvalid(["Nothing was sealed in this database yet; engines of 0.3.0 and later seal."])
        entry_count = save(Path(args.folder), (entry.entry for entry in rows.entries()), state["checkpoint"])

    async with storage.existing_database(settings), storage.open_journals(settings) as archive:
        await in_one_snapshot(archive, save_rows)
    if args.json:
        terminal.print_json({"folder": args.folder, "entries": entry_count})
        return CLEAN
    terminal.stderr().print(f"Wrote {count(entry_count, 'entry', 'entries')} of the log to {args.folder}.")
    return CLEAN


def _record(report: Report) -> dict[str, object]:
    return {
        "clean": report.is_clean,
        "runs": report.runs,
        "events": report.events,
        "calls": report.calls,
        "rendered": report.rebuilt_requests,
        "unverifiable": dict(report.unverifiable),
        "pruned": report.pruned,
        "pending": report.pending,
        "rules": {name: {"violations": count, "promises": RULES[name][0]} for name, count in report.rules.items()},
        "violations": report.violations,
    }


def _print(report: Report) -> None:
    console = terminal.stdout()
    for violation in report.violations[:MAX_PRINTED_VIOLATIONS]:
        console.print(str(violation), soft_wrap=True)
    if report.rules.total() > MAX_PRINTED_VIOLATIONS:
        console.print(f"... and {report.rules.total() - MAX_PRINTED_VIOLATIONS:,} more")
    for name, number in report.rules.most_common():
        promises, meaning = RULES[name]
        console.print(f"{number:,} x {name} ({promises}): {meaning}", style="red", soft_wrap=True)
    unverifiable = f"{report.unverifiable.total():,} unverifiable"
    if report.unverifiable:
        reasons = [f"{reason}: {number:,}" for reason, number in sorted(report.unverifiable.items())]
        unverifiable += f" ({', '.join(reasons)})"
    journals = (count(report.runs, "run"), count(report.events, "event"), count(report.calls, "call"))
    looked_at = (
        ", ".join(journals),
        f"{count(report.rebuilt_requests, 'request')} rendered again",
        unverifiable,
        f"{count(report.pruned, 'run')} pruned",
        f"{count(report.pending, 'outcome')} still to come",
    )
    console.print("; ".join(looked_at), soft_wrap=True)
    style = "bold red"
    if report.is_clean:
        style = "green"
    console.print(count(report.rules.total(), "violation"), style=style)


def _rules(*, as_json: bool) -> int:
    if as_json:
        terminal.print_json(
            [{"rule": name, "promise": promise, "meaning": words} for name, (promise, words) in RULES.items()]
        )
        return CLEAN
    table = terminal.table("rule", "promise", "what holds")
    for name, (promises, meaning) in RULES.items():
        table.add_row(name, promises, meaning)
    terminal.stdout().print(table)
    return CLEAN
