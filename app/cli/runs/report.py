"""`baton report` prints what runs cost and what came of it: a table, or one part of it as JSON, CSV or Parquet."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from app.cli import event_loop, storage, terminal
from app.cli.arguments import Arguments
from app.cli.runs.run_list import query_of
from app.core.pool.catalog import MILLION
from app.core.rating.economics import GROUPINGS, METADATA, ReportOptions, TooManyGroups, is_grouping
from app.errors import ConfigInvalid
from app.gateway.runs import reports
from app.process.config import Settings, read

MAX_PRINTED_ROWS = 20
"""Rows of each table that are printed; the other forms have all of them."""
NUMBER_COLUMNS = frozenset(
    {"runs", "no answer", "no verdict", "successes", "cost", "cost of judged", "cost of a success"}
    | {"count", "of all", "lift"}
)
"""The columns that are justified to the right."""


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Make the report. Returns 0, also where there are no runs."""
    settings = read(environ)
    terminal.log_to_stderr("warning")
    if not all(is_grouping(name) for name in args.by):
        raise ConfigInvalid([f"--by: there are {', '.join(GROUPINGS)} and {METADATA}FIELD"])
    if sum(map(bool, (args.json, args.csv, args.parquet))) > 1:
        raise ConfigInvalid(["choose one of --json, --csv and --parquet"])
    storage.print_database(settings)
    figures, names = event_loop.run(_read(settings, args, now()))
    rows = reports.table(figures, args.part)
    if args.json:
        terminal.print_json(figures)
    elif args.csv:
        print(reports.as_csv(rows, args.part), end="", flush=True)
    elif args.parquet:
        body = reports.as_parquet(rows, args.part)
        Path(args.parquet).write_bytes(body)
        terminal.stderr().print(f"{len(rows):,} rows are in {args.parquet}.")
    else:
        _print(figures, names)
    return 0


async def _read(settings: Settings, args: Arguments, now: float) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the figures, and the names of the API keys by their ids."""
    try:
        zone = reports.zone_of(args.zone)
    except ValueError as error:
        raise ConfigInvalid([f"--zone: {error}"]) from None
    if args.before and args.since <= args.before:
        raise ConfigInvalid(["--since must be longer ago than --before"])
    options = ReportOptions(tuple(dict.fromkeys(args.by)) or ("tier",), args.success, args.threshold)
    async with storage.open_configured_store(settings) as store:
        keys = await store.keys()
        query = query_of(args, keys, now)
        try:
            figures = await reports.make(store, store, query, options, zone)
        except TooManyGroups as error:
            raise ConfigInvalid([f"--by: {reports.too_many_groups(error)}"]) from None
    period = {"since": query.since, "until": query.until, "time_zone": args.zone}
    return period | figures, {key.id: key.name for key in keys}


# -- printing


def _print(figures: Mapping[str, Any], names: Mapping[str, str]) -> None:
    console = terminal.stdout()
    total, left_out = figures["total"], figures["left_out"]
    period = f"{_moment(figures['since'])} to {_moment(figures['until'])}"
    console.print(f"Runs admitted from {period} that have ended: {total['runs']:,}.")
    console.print(
        f"Left out: {left_out['open']:,} that go on, {left_out['previews']:,} that were only planned, "
        f"{left_out['shadows']:,} shadows, {left_out['replays']:,} replays.",
    )
    if left_out["damaged"]:
        runs = terminal.count(left_out["damaged"], "run")
        console.print(f"Left out, too: {runs} whose journal cannot be read; `baton audit check` names them.")
    console.print(f"A success by {figures['success']}: {figures['definition']}", soft_wrap=True)
    if figures["threshold"] is not None:
        console.print(f"The threshold is {figures['threshold']:g}.")
    sources = ", ".join(f"{name} ({terminal.count(number, 'run')})" for name, number in figures["sources"].items())
    console.print(f"The verdicts come from: {sources or 'none yet'}.", soft_wrap=True)
    _print_rows(console, "Cost of a successful query", _group_rows(figures["groups"], names), "groups")
    _print_rows(console, "All of them", _group_rows([{"by": "all", "group": "", **total}], names), "summary")
    if total["runs"]:
        _print_dearest(console, figures["dearest"])
        _print_alternatives(console, figures)
        _print_rows(console, "Failures", _failure_rows(figures["failures"]), "failures")


def _print_rows(console: Console, title: str, rows: Sequence[Mapping[str, str]], part: reports.Part) -> None:
    """Print the first rows of a table. `part` is what has all of them in the other forms."""
    if not rows:
        return
    table = terminal.table(title=title)
    for name in rows[0]:
        if name in NUMBER_COLUMNS:
            table.add_column(name, justify="right")
        else:
            table.add_column(name)
    for row in rows[:MAX_PRINTED_ROWS]:
        terminal.add_row(table, row.values())
    console.print()
    console.print(table)
    if len(rows) > MAX_PRINTED_ROWS:
        more = f"... and {len(rows) - MAX_PRINTED_ROWS:,} more: --json has them, and so has --csv --part {part}"
        console.print(more)


def _group_rows(groups: Sequence[Mapping[str, Any]], names: Mapping[str, str]) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = []
    for group in groups:
        row = {
            "by": str(group["by"]),
            "group": _group(group["by"], group["group"], names),
            "runs": f"{group['runs']:,}",
            "no answer": f"{group['unanswered']:,}",
            "no verdict": f"{group['without_verdict']:,}",
            "successes": f"{group['successes']:,}",
            "cost": _dollars(group["cost_usd"]),
            "cost of judged": _dollars(group["judged_cost_usd"]),
            "cost of a success": _dollars(group["cost_per_success_usd"]),
        }
        rows.append(row)
    return rows


def _group(by: str, group: str | None, names: Mapping[str, str]) -> str:
    """Return a group in words: an API key by its name, where that is known."""
    if group is None:
        return "(none)"
    if by == "key":
        return names.get(group, group)
    return group


def _print_dearest(console: Console, dearest: Mapping[str, Any]) -> None:
    share = "-"
    if dearest["share_of_cost"] is not None:
        share = f"{dearest['share_of_cost']:.1%}"
    runs = terminal.count(dearest["runs"], "run")
    words = f"The most expensive {dearest['share_of_runs']:.0%} ({runs}) cost {share} of the total"
    console.print(f"\n{words}; each costs {_dollars(dearest['from_cost_usd'])} or more.")
    rows: list[dict[str, str]] = []
    for feature in dearest["features"]:
        row = {
            "feature": str(feature["feature"]),
            "value": str(feature["value"]),
            "runs": f"{feature['runs']:,}",
            "of all": f"{feature['of_runs']:,}",
            "lift": f"{feature['lift']:.2f}",
        }
        rows.append(row)
    _print_rows(console, "More frequent among them than among all runs", rows, "dearest")


def _print_alternatives(console: Console, figures: Mapping[str, Any]) -> None:
    lists, cheapest = figures["access_lists"], figures["cheapest"]
    console.print(
        f"\nAccess lists spared {lists['spared_tokens']:,} tokens, {lists['share_spared']:.1%} of what the calls of "
        f"steps would have read ({terminal.count(lists['calls_not_measured'], 'call')} could not be measured).",
        soft_wrap=True,
    )
    runs = terminal.count(cheapest["runs"], "run")
    console.print(
        f"The steps of {runs} cost {_dollars(cheapest['cost_usd'])}; with the cheapest worker of "
        f"each run's pool the same tokens would have cost {_dollars(cheapest['cheapest_cost_usd'])}.",
        soft_wrap=True,
    )


def _failure_rows(failures: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    rows: list[dict[str, str]] = []
    for failure in failures:
        cause = failure["cause"]
        if failure["reason"]:
            cause = f"{cause} ({failure['reason']})"
        row = {
            "level": failure["level"],
            "cause": cause,
            "shape": failure["topology"],
            "step": failure["position"],
            "worker": failure["worker"],
            "count": f"{failure['count']:,}",
            "first": _moment(failure["first_at"]),
            "last": _moment(failure["last_at"]),
            "for example": failure["examples"][0],
        }
        rows.append(row)
    return rows


def _dollars(amount: float | None) -> str:
    if amount is None:
        return "-"
    return terminal.dollars(amount * MILLION)


def _moment(at: float | None) -> str:
    if at is None:
        return "now"
    return f"{terminal.minute(at)} UTC"
