"""`baton disclosures` lists who was sent what; `baton disclosures rebuild` derives the rows of runs from before the
ledger."""

import sys
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from datetime import datetime

from msgspec.structs import replace
from rich.table import Table

from app.cli import event_loop, storage, terminal
from app.cli.arguments import Arguments
from app.core.run.visibility import complete_disclosures
from app.errors import ConfigInvalid
from app.gateway.runs import disclosures
from app.gateway.wire import query as wire
from app.process.config import Settings
from app.store.protocol import Disclosure, DisclosureQuery, Store

PAGE_ROWS = 500
"""Rows that are read at a time."""
BATCH_RUNS = 100
"""Runs whose rows one transaction derives, at the most."""
COLUMNS = ("when", "run", "step", "recipient", "kind", "region", "saw", "labels", "outcome", "by")


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Carry out the command on the configured database. Returns the exit status: 1 if a rebuild has met a journal that
    is damaged."""
    settings = storage.read_settings(environ)
    if args.action == "rebuild":
        return event_loop.run(_rebuild(settings, as_json=args.json))
    query = query_of(args, now())
    if args.json and args.csv:
        raise ConfigInvalid(["--json and --csv exclude each other"])
    return event_loop.run(_list(settings, args, query))


def query_of(args: Arguments, now: float) -> DisclosureQuery:
    """Return the query that the options choose. Raises `ConfigInvalid` for a faulty one."""
    try:
        saw = wire.saw_of([wire.parse_seen(value) for value in args.saw])
    except ValueError as error:
        raise ConfigInvalid([f"--saw: {error}"]) from None
    since, until = _seconds_of(args.since, now), _seconds_of(args.until, now)
    if since is not None and until is not None and since >= until:
        raise ConfigInvalid(["--since must be earlier than --until"])
    return DisclosureQuery(
        recipients=args.recipient,
        kinds=args.recipient_kind,
        providers=args.provider,
        saw=saw,
        since=since,
        until=until,
        tenants=args.tenant,
        users=args.user,
        runs=args.run,
        keys=args.key,
        ascending=args.reverse,
        limit=args.limit,
    )


def _seconds_of(moment: float | datetime | None, now: float) -> float | None:
    """Return a time in seconds since 1970. One that is given as a number is so many seconds before now."""
    if moment is None:
        return None
    if isinstance(moment, datetime):
        return moment.timestamp()
    return now - moment


async def _list(settings: Settings, args: Arguments, query: DisclosureQuery) -> int:
    row_count = 0
    async with storage.open_configured_store(settings) as store:
        if not args.json and not args.csv:
            rows: list[Disclosure] = []
            async for page in read_pages(store, query):
                rows += page
            terminal.print_table(
                _table(rows), "No such disclosure is recorded; a run is named by its whole id, a key by its id."
            )
            return 0
        async for page in read_pages(store, query):
            if args.json:
                sys.stdout.write(b"".join(disclosures.as_lines(page)).decode())
            elif not row_count:
                sys.stdout.write(disclosures.as_csv(page))
            else:
                _, _, rows_text = disclosures.as_csv(page).partition("\n")  # without the head
                sys.stdout.write(rows_text)
            row_count += len(page)
    if args.csv and not row_count:
        sys.stdout.write(disclosures.as_csv(()))
    return 0


async def read_pages(store: Store, query: DisclosureQuery) -> AsyncIterator[Sequence[Disclosure]]:
    """Yield the rows that a query chooses, page by page, up to its limit."""
    remaining = query.limit
    while remaining > 0:
        rows = await store.disclosures(replace(query, limit=min(remaining, PAGE_ROWS)))
        if rows:
            yield rows
        if len(rows) < min(remaining, PAGE_ROWS):
            return
        remaining -= len(rows)
        query = replace(query, before=(rows[-1].at, rows[-1].call))


def _table(rows: Sequence[Disclosure]) -> Table:
    table = terminal.table(*COLUMNS)
    for row in rows:
        step = ""
        if row.step is not None:
            step = str(row.step)
        cells = (
            terminal.second(row.at),
            row.run,
            step,
            row.recipient,
            row.kind,
            row.region,
            parts_text(row),
            " ".join(row.labels),
        )
        terminal.add_row(table, (*cells, row.outcome or "open", decision_text(row)))
    return table


def parts_text(row: Disclosure) -> str:
    """Return what a recipient saw, in a few words."""
    parts = []
    if row.saw_user:
        parts.append("user")
    parts += [f"step {n}" for n in row.saw_steps]
    if row.saw_results:
        parts.append("results")
    return ", ".join(parts)


def decision_text(row: Disclosure) -> str:
    """Return by whose decision a recipient saw that, and which workers were passed over for the call."""
    passed_over = [f"not {worker} ({reason})" for worker, reason in row.passed_over]
    return ", ".join([row.planned_by, *passed_over])


async def _rebuild(settings: Settings, *, as_json: bool) -> int:
    run_count = row_count = 0
    damaged: list[str] = []
    async with storage.open_configured_store(settings) as store:
        place: tuple[float, str] | None = None
        while True:
            batch = await store.rebuild_disclosures(place, BATCH_RUNS, complete_disclosures)
            run_count, row_count, place = run_count + batch.runs, row_count + batch.added, batch.following
            damaged += batch.damaged
            if place is None:
                break
    if as_json:
        terminal.print_json({"runs": run_count, "rows": row_count, "damaged": damaged})
    else:
        console = terminal.stdout()
        run_text, row_text = terminal.count(run_count, "run"), terminal.count(row_count, "row")
        console.print(f"Looked at {run_text}; added or completed {row_text}.")
        for name in damaged:
            console.print(f"{name} got no row: its journal is damaged. `baton audit check --run {name}` shows how.")
    return int(bool(damaged))
