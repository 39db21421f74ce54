"""`baton runs ls` lists runs of the configured database, and follows the list with `--follow`."""

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import orjson
from msgspec.structs import replace
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from app.cli import event_loop, storage, terminal
from app.cli.administration.keys import find_key
from app.cli.arguments import Arguments
from app.cli.runs import run_tree
from app.errors import ConfigInvalid
from app.gateway.runs import audit
from app.process.config import Settings
from app.store.protocol import METADATA_TAG, KeyRow, RatingFilter, RunQuery, RunRow, Store

POLL_SECONDS = 0.5
FILTERS = ("tenant", "state", "tier", "topology", "model", "user", "request_id", "trace_id")
"""Options whose values are filters of the same name."""
PREVIEWS = {None: None, "only": True, "none": False}
TAGS = ("worker", "label", METADATA_TAG)
"""Options whose values are tags of the same name."""
COLUMNS = ("run", "when", "tier", "key", "state", "shape", "took", "tokens", "cost")
NARROW_TABLE = ("run", "when", "tier", "state", "took", "cost")
WIDE_COLUMNS, PREFIX_CHARS = 130, 19
"""The width from which on the table has all columns, and the characters of an id in a narrower one."""


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Print the list. Returns 0."""
    settings = storage.read_settings(environ)
    if args.follow:
        event_loop.run(_follow(settings, args, now))
    else:
        event_loop.run(_list(settings, args, now()))
    return 0


async def _list(settings: Settings, args: Arguments, now: float) -> None:
    async with storage.open_configured_store(settings) as store:
        keys = await store.keys()
        rows = await store.runs(_build_sorted_query(args, keys, now))
        previews = await _previews(store, rows)
    names = {key.id: key.name for key in keys}
    if args.json:
        terminal.print_json([_summary(row, names, previews) for row in rows])
    else:
        table = _table(rows, names, previews, terminal.stdout().width)
        terminal.print_table(table, "There are no such runs.")


def _build_sorted_query(args: Arguments, keys: Sequence[KeyRow], now: float) -> RunQuery:
    order = {"sort": args.sort, "ascending": args.reverse, "limit": args.limit}
    return replace(query_of(args, keys, now), **order)


async def _follow(settings: Settings, args: Arguments, now: Callable[[], float]) -> None:
    """Print a line for each run of the list, and again for each that is new on it or has changed, until interrupted."""
    earlier: Mapping[str, Mapping[str, Any]] = {}
    mark: tuple[object, ...] | None = None
    async with storage.open_configured_store(settings) as store:
        keys = await store.keys()
        names = {key.id: key.name for key in keys}
        while True:
            latest = await store.lists.mark()
            if latest != mark:
                mark, rows = latest, await store.runs(_build_sorted_query(args, keys, now()))
                previews = await _previews(store, rows)
                summaries = {row.id: _summary(row, names, previews) for row in rows}
                for row in reversed(rows):
                    if earlier.get(row.id) != summaries[row.id]:
                        _print_line(row, summaries[row.id], args)
                earlier = summaries
            await asyncio.sleep(POLL_SECONDS)


def _print_line(row: RunRow, summary: Mapping[str, Any], args: Arguments) -> None:
    if args.json:
        print(orjson.dumps(summary).decode(), flush=True)
        return
    key = summary["key_name"] or row.key
    state = f"{row.state}{_note(row, is_preview=summary['preview'], wide=True)}"
    words = (terminal.moment(row.created_at), row.id, row.tier, key, state)
    terminal.stdout().print("  ".join((*words, terminal.dollars(row.spent.usd))), soft_wrap=True)


def query_of(args: Arguments, keys: Sequence[KeyRow], now: float) -> RunQuery:
    """Return the query for the runs that the options in `FILTERS` and the times choose."""
    if args.metadata is not None and "=" not in args.metadata:
        raise ConfigInvalid(["--metadata: must be FIELD=VALUE"])
    filters: dict[str, Any] = {name: getattr(args, name, None) for name in FILTERS}
    if getattr(args, "before", None):
        filters["until"] = now - args.before
    if getattr(args, "degraded", False):
        filters["degraded"] = True
    if getattr(args, "rated", None) is not None:
        filters["rated"] = RatingFilter(args.rated == "good")
    if getattr(args, "queue", None) == "untaken":
        filters["untaken_at"] = now
    origin = getattr(args, "origin", None)
    if origin == "none":
        origin = ""
    tags = []
    for name in TAGS:
        value = getattr(args, name)
        if value:
            tags.append((name, value))
    return RunQuery(
        since=args.start(now),
        min_usd=getattr(args, "min_cost", None),
        max_usd=getattr(args, "max_cost", None),
        key=_key_id(keys, args.key, now),
        preview=PREVIEWS[getattr(args, "previews", None)],
        origin_kind=origin,
        origin_run=getattr(args, "origin_run", None),
        tags=tuple(tags),
        **filters,
    )


def _key_id(rows: Sequence[KeyRow], key: str | None, now: float) -> str | None:
    """Return the id of the key with this name. A text that no key has as its name is taken for an id."""
    if key is None or key not in {row.name for row in rows}:
        return key
    return find_key(rows, key, now).id


async def _previews(store: Store, rows: Sequence[RunRow]) -> frozenset[str]:
    """Return the ids of those runs that were only planned, by `baton plan` or for a plan over HTTP."""
    details = await store.lists.details([row.id for row in rows])
    return frozenset([run for run, detail in details.items() if detail.is_preview])


def _summary(row: RunRow, names: Mapping[str, str], previews: frozenset[str]) -> dict[str, Any]:
    """Return a run as lists show it, with the name of its key (null if the key is not in the database)."""
    return audit.summary(row) | {"key_name": names.get(row.key), "preview": row.id in previews}


def _table(rows: tuple[RunRow, ...], names: Mapping[str, str], previews: frozenset[str], width: int) -> Table:
    """Return the table of runs. A narrow one has prefixes of ids, which `show` accepts as well."""
    wide = width >= WIDE_COLUMNS
    table = terminal.table()
    table.padding = (0, 1, 0, 0)
    columns: tuple[str, ...] = NARROW_TABLE
    if wide:
        table.padding = (0, 2, 0, 0)
        columns = COLUMNS
    for column in columns:
        may_fold = column in ("tier", "state")
        table.add_column(column, justify=_justification(column), overflow="fold", no_wrap=wide or not may_fold)
    for row in rows:
        cells = _cells(row, names, previews, wide=wide)
        table.add_row(*[cells[column] for column in columns])
    return table


def _justification(column: str) -> Literal["left", "right"]:
    if column in ("took", "tokens", "cost"):
        return "right"
    return "left"


def _cells(
    row: RunRow, names: Mapping[str, str], previews: frozenset[str], *, wide: bool
) -> Mapping[str, RenderableType]:
    """Return the cells of a run by their columns; in a narrow table the id and the time are shortened."""
    run, when = row.id, terminal.moment(row.created_at)
    if not wide:
        run, when = run[:PREFIX_CHARS], when[5:16]
    took = "…"
    if row.ended_at:
        took = terminal.duration(row.ended_at - row.created_at)
    state = row.state + _note(row, is_preview=row.id in previews, wide=wide)
    return {
        "run": run,
        "when": when,
        "tier": row.tier,
        "key": names.get(row.key, row.key),
        "state": Text(state, style=_colour(row), overflow="fold"),
        "shape": f"{row.topology or '-'} {row.steps or ''}",
        "took": took,
        "tokens": f"{row.spent.tokens:,}",
        "cost": terminal.dollars(row.spent.usd),
    }


def _colour(row: RunRow) -> str:
    if row.degraded:
        return "yellow"
    return run_tree.COLOURS.get(row.state, "yellow")


def _note(row: RunRow, *, is_preview: bool, wide: bool) -> str:
    """Return what is particular about a run: it was only planned, it follows from another one, or a fallback decided
    it."""
    if is_preview:
        return " (preview)"
    if row.origin_kind:
        return f" ({row.origin_kind})"
    if not row.degraded:
        return ""
    if wide:
        return " (degraded)"
    return " *"
