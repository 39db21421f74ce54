"""`baton top` draws the overview of the configured database, again every two seconds."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from app.cli import event_loop, storage, terminal
from app.cli.arguments import Arguments
from app.core.pool.catalog import MILLION
from app.gateway.runs.stored_overview import read_overview
from app.gateway.wire.query import OverviewFilters
from app.process.config import Settings

POLL_SECONDS = 2.0
MAX_WORKERS = 8
MAX_FAILURES = 5
Json = Mapping[str, Any]


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Carry out the command. Returns the exit status."""
    settings = storage.read_settings(environ)
    event_loop.run(_top(settings, args, now))
    return 0


async def _top(settings: Settings, args: Arguments, now: Callable[[], float]) -> None:
    filters = OverviewFilters(period=args.period, tenant=args.tenant)
    console = terminal.stdout()
    async with storage.open_configured_store(settings) as store:
        overview = await read_overview(store, filters, now())
        if args.json:
            terminal.print_json(overview)
            return
        if args.once or not console.is_terminal:
            console.print(draw(overview))
            return
        with Live(draw(overview), console=console, auto_refresh=False) as live:
            live.refresh()
            while True:
                await asyncio.sleep(POLL_SECONDS)
                live.update(draw(await read_overview(store, filters, now())), refresh=True)


def draw(overview: Json) -> RenderableType:
    """Draw an overview within 80 columns. No meaning depends on a colour."""
    blank = Text("")
    parts: list[RenderableType] = [_heading(overview), *_lines(overview)]
    for table in (_workers(overview), _failures(overview)):
        if table is not None:
            parts += [blank, table]
    return Group(*parts)


def _heading(overview: Json) -> Text:
    tenant = terminal.clean(overview["tenant"] or "every tenant")
    return Text(
        f"baton top  {terminal.second(overview['until'])} UTC  last {overview['period']}, {tenant}", style="bold"
    )


def _lines(overview: Json) -> Iterator[Text]:
    total, seconds, log = overview["total"], overview["seconds"], overview["log"]
    by_state = {group["state"]: group["runs"] for group in overview["open"]}
    waiting_runs = [f"{runs:,} {state}" for state, runs in sorted(by_state.items()) if state != "awaiting_approval"]
    yield _line("open runs", ", ".join(waiting_runs) or "none")
    yield _line("approvals", f"{by_state.get('awaiting_approval', 0):,} wait")
    queue = overview["queue"]
    oldest = queue["oldest_seconds"]
    waits = ""
    if oldest is not None:
        waits = f", the oldest for {terminal.duration(oldest)}"
    yield _line("queue", f"{queue['waiting']:,} wait{waits}")
    yield _line("runs", f"{total['runs']:,}, {total['ended']:,} ended, {total['degraded']:,} degraded")
    yield _line("success", _share(total["success_rate"]))
    cost = terminal.dollars(total["cost_usd"] * MILLION)
    yield _line("cost", f"{cost}, {total['tokens']:,} tokens")
    if seconds["count"]:
        yield _line("time", f"median {terminal.duration(seconds['p50'])}, p95 {terminal.duration(seconds['p95'])}")
    backlog = f"{log['waiting']:,} to be sealed, {terminal.duration(log['lag_seconds'])} behind"
    yield _line("log", f"{log['size']:,} entries, {backlog}")


def _line(name: str, value: str) -> Text:
    return Text(f"{name:<10} {value}")


def _workers(overview: Json) -> Table | None:
    """Return the workers with the most calls; None without any call."""
    if not overview["workers"]:
        return None
    table = terminal.table("worker")
    for column in ("calls", "failed", "ok", "tokens"):
        table.add_column(column, justify="right", no_wrap=True)
    for worker in overview["workers"][:MAX_WORKERS]:
        outcomes = worker["outcomes"]
        failures = worker["calls"] - sum(outcomes.get(outcome, 0) for outcome in ("ok", "open", "cancelled"))
        tokens = worker["input_tokens"] + worker["output_tokens"]
        cells = (
            worker["worker"],
            f"{worker['calls']:,}",
            f"{failures:,}",
            _share(worker["success_rate"]),
            f"{tokens:,}",
        )
        terminal.add_row(table, cells)
    return table


def _failures(overview: Json) -> Table | None:
    """Return the most frequent causes of runs that did not succeed; None without any."""
    if not overview["failures"]:
        return None
    table = terminal.table("not succeeded", "cause")
    table.add_column("runs", justify="right", no_wrap=True)
    for failure in overview["failures"][:MAX_FAILURES]:
        terminal.add_row(table, (failure["state"], failure["error"] or "-", f"{failure['runs']:,}"))
    return table


def _share(rate: float | None) -> str:
    if rate is None:
        return "-"
    return f"{rate:.1%}"
