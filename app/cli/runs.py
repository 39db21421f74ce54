"""`baton runs ls|show|watch|cancel` reads the journal of the configured database, or stops a run."""

import argparse
import asyncio
from collections.abc import Callable, Mapping
from typing import Any

import orjson
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from app.cli import event_loop, run_record, run_tree, run_words, storage, terminal
from app.core.run.events import TERMINAL, Event, Kind
from app.gateway.runs import audit, cancel
from app.process.config import Settings, read
from app.store.protocol import RunQuery, RunRow

POLL_SECONDS = 0.25
CANCEL_SECONDS = 4.0
"""Seconds that a cancelled run needs at most, in addition to the lease of its owner."""
COLUMNS = ("run", "when", "tier", "state", "shape", "took", "tokens", "cost")
NARROW = ("run", "when", "tier", "state", "took", "cost")
WIDE, PREFIX = 130, 20


def run(asked: argparse.Namespace, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Carry out one of the verbs. Returns the exit status."""
    settings = read(environ)
    terminal.log_to_stderr("warning")
    if asked.verb == "ls":
        storage.check_state(asked.state)
        event_loop.run(_list(settings, asked, now()))
    elif asked.verb == "show":
        event_loop.run(_show(settings, asked))
    elif asked.verb == "cancel":
        return event_loop.run(_cancel(settings, asked.run, now()))
    else:
        return event_loop.run(_watch(settings, asked.run))
    return 0


# -- ls


async def _list(settings: Settings, asked: argparse.Namespace, now: float) -> None:
    query = RunQuery(
        tenant=asked.tenant,
        state=asked.state,
        tier=asked.tier,
        key=asked.key,
        since=now - asked.since if asked.since else None,
        degraded=True if asked.degraded else None,
        tags=tuple((name, value) for name in ("worker", "label") if (value := getattr(asked, name))),
        limit=min(asked.limit, 1_000),
    )
    async with storage.opened(settings) as store:
        rows = await store.runs(query)
    if asked.json:
        print(orjson.dumps([audit.summary(row) for row in rows], option=orjson.OPT_INDENT_2).decode())
    elif not rows:
        terminal.out().print("There are no such runs.")
    else:
        console = terminal.out()
        console.print(_table(rows, console.width))


def _table(rows: tuple[RunRow, ...], width: int) -> Table:
    """Return the table of runs. A narrow one has prefixes of ids, which `show` accepts as well."""
    wide = width >= WIDE
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in COLUMNS if wide else NARROW:
        table.add_column(column, justify="right" if column in ("took", "tokens", "cost") else "left", no_wrap=True)
    for row in rows:
        note = " (degraded)" if wide else " *"
        state = row.state + (note if row.degraded else "")
        cells: dict[str, RenderableType] = {
            "run": row.id if wide else row.id[:PREFIX],
            "when": run_words.moment(row.created_at)[0 if wide else 5 : None if wide else 16],
            "tier": terminal.clean(row.tier),
            "state": Text(state, style="yellow" if row.degraded else run_tree.COLOURS.get(row.state, "yellow")),
            "shape": f"{row.topology or '-'} {row.steps or ''}",
            "took": run_words.seconds(row.ended_at - row.created_at) if row.ended_at else "…",
            "tokens": f"{row.spent.tokens:,}",
            "cost": terminal.dollars(row.spent.usd),
        }
        table.add_row(*(cells[str(column.header)] for column in table.columns))
    return table


# -- show


async def _show(settings: Settings, asked: argparse.Namespace) -> None:
    async with storage.opened(settings) as store:
        shown, question = await run_record.read(store, await storage.find(store, asked.run))
    if asked.json:
        print(orjson.dumps(shown, option=orjson.OPT_INDENT_2).decode())
    else:
        terminal.out().print(run_tree.draw(shown, question, full=asked.full))


# -- watch


async def _watch(settings: Settings, wanted: str) -> int:
    """Print events as they are committed. Returns 0 if the run succeeds, else 1."""
    console = terminal.out()
    async with storage.opened(settings) as store:
        row = await storage.find(store, wanted)
        console.print(f"{row.id}  {row.tier}", markup=False, style="bold")
        seq, began = 0, row.created_at
        with terminal.err().status("following") as status:
            while True:
                for event in (await store.journal(row.id, after=seq)).events:
                    seq = event.seq
                    console.print(Text(f"{event.at - began:8.2f} s  "), Text(_event_in_words(event)), soft_wrap=True)
                    if event.kind in TERMINAL:
                        status.stop()
                        return 0 if event.kind is Kind.SUCCEEDED else 1
                await asyncio.sleep(POLL_SECONDS)


# -- cancel


async def _cancel(settings: Settings, wanted: str, now: float) -> int:
    """Ask a run to end. Returns 0 if it has ended within two leases and some seconds, else 1: it will end later."""
    console = terminal.out()
    async with storage.opened(settings) as store:
        row = await storage.find(store, wanted)
        await cancel.ask(store, None, row, "operator", now)
        with terminal.err().status("waiting for its driver"):
            row = await cancel.settled(store, row, 2 * settings.lease_seconds + CANCEL_SECONDS)
    if row.ended_at is None:
        console.print(f"{row.id} was asked to end; `baton runs watch {row.id}` follows it.", markup=False)
        return 1
    console.print(f"{row.id} has ended: {row.state}.", markup=False)
    return 0


def _event_in_words(event: Event) -> str:
    """Return one event in words."""
    body = event.body
    words = DETAILS.get(event.kind)
    detail = words(body) if words else ", ".join(str(body[name]) for name in ("error",) if body.get(name))
    return terminal.clean(f"{event.kind.value:<18} {detail}")


def _call(body: Mapping[str, Any]) -> str:
    return "plan" if body["n"] is None else f"step {body['n']}"


def _round(body: Mapping[str, Any]) -> str:
    return f", round {body['round']}" if body.get("round", 1) > 1 else ""


def _finished(body: Mapping[str, Any]) -> str:
    usage = run_words.tokens(body["usage"])
    why = f" ({body['error']})" if body.get("error") else ""
    spent = f"{terminal.dollars(body['usd'])}, {run_words.seconds(body['seconds'])}"
    return f"{_call(body)}: {body['outcome']}{why}, {usage}, {spent}"


DETAILS: Mapping[Kind, Callable[[Mapping[str, Any]], str]] = {
    Kind.ADMITTED: lambda body: f"{body['conductor']} conductor, pool {', '.join(body['pool'])}",
    Kind.PLAN_OPENED: lambda body: f"proposal {body['proposal']}, {body['mode']}{_round(body)}",
    Kind.PLAN_STEP: lambda body: f"step {body['n']}: {body['worker']}, sees {run_words.sees(body['access'])}",
    Kind.PLAN_ACCEPTED: lambda body: (
        f"{body['topology']}, {body['steps']} steps" if body["steps"] else run_words.ENOUGH
    ),
    Kind.PLAN_REJECTED: lambda body: "; ".join(body["reasons"]),
    Kind.STEP_QUEUED: lambda body: f"step {body['n']}",
    Kind.CALL_INTENDED: lambda body: f"{_call(body)}: {body['worker']}, {terminal.dollars(body['usd_held'])} reserved",
    Kind.CALL_FINISHED: _finished,
    Kind.STEP_AWAITING: lambda body: f"step {body['n']}: calls {', '.join(one['name'] for one in body['calls'])}",
    Kind.AWAITING: lambda body: f"turn {body['turn']}, until {run_words.moment(body['until'])}",
    Kind.RESUMED: lambda body: f"turn {body['turn']}",
    Kind.STEP_RESULTS: lambda body: f"step {body['n']}: {run_words.count(len(body['ids']), 'result')}",
    Kind.STEP_DONE: lambda body: f"step {body['n']}: {body['chars']:,} characters",
    Kind.STEP_FAILED: lambda body: f"step {body['n']}: {body['error']}",
    Kind.STEP_SKIPPED: lambda body: f"step {body['n']}: {body['reason']}",
    Kind.SUCCEEDED: lambda body: f"{terminal.dollars(body['usd'])}",
}
