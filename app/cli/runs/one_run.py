"""`baton runs show|explain|watch|cancel` reads the journal of one run in the configured database, or stops the run."""

import asyncio
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import orjson
from rich.console import Group
from rich.live import Live
from rich.text import Text

from app.cli import event_loop, storage, terminal
from app.cli.arguments import Arguments
from app.cli.audit import content_reads
from app.cli.runs import run_tree, run_views, run_words
from app.core.message.chat import usage_to_json
from app.core.run.events import (
    TERMINAL,
    CallFinished,
    CallIntended,
    Event,
    Fact,
    Kind,
    PlanAccepted,
    PlanOpened,
    PlanRejected,
    PlanStep,
    RunAdmitted,
    RunApprovalExpired,
    RunApproved,
    RunAwaitingApproval,
    RunAwaitingTool,
    RunCancelAsked,
    RunEnd,
    RunRefused,
    RunResumed,
    RunSucceeded,
    StepAwaitingTool,
    StepDone,
    StepFailed,
    StepQueued,
    StepSkipped,
    StepToolResults,
)
from app.core.run.graph import graph
from app.core.run.instant import Instant, instant, snapshot
from app.core.run.kinds import ENDED
from app.core.run.timeline import timeline
from app.engine.runs import cancellation
from app.errors import ConfigInvalid
from app.gateway.runs import audit, cancel, explanation
from app.process.config import Settings

POLL_SECONDS = 0.25
CANCEL_SECONDS = 4.0
"""Seconds that a cancelled run needs at most, in addition to the lease of its owner."""


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Carry out one of the verbs. Returns the exit status."""
    settings = storage.read_settings(environ)
    if args.verb == "show":
        event_loop.run(_show(settings, args, now()))
    elif args.verb == "explain":
        event_loop.run(_explain(settings, args))
    elif args.verb == "cancel":
        return event_loop.run(_cancel(settings, args, now()))
    else:
        return event_loop.run(_watch(settings, args, now))
    return 0


# -- show


async def _show(settings: Settings, args: Arguments, now: float) -> None:
    if args.view != "tree":
        return await _show_view(settings, args, now)
    if args.at is not None or args.seconds is not None:
        raise ConfigInvalid(["--at, --seconds: need --view graph, timeline or state"])
    async with storage.open_configured_store(settings) as store:
        row = await storage.find_run(store, args.run)
        record, question = await run_tree.read_run(store, row)
        await content_reads.record_read(store, row.id, row.tenant, "show")
        key = await store.key(record["key"])
    record["key_name"] = None
    if key is not None:
        record["key_name"] = key.name
    if args.json:
        terminal.print_json(record)
    else:
        terminal.stdout().print(run_tree.draw(record, question, full=args.full))


async def _show_view(settings: Settings, args: Arguments, now: float) -> None:
    """Draw the graph, the timeline or the state of a run at an instant."""
    async with storage.open_configured_store(settings) as store:
        row = await storage.find_run(store, args.run)
        journal = await store.journal(row.id)
    try:
        document = _document(args.view, instant(journal.events, now, seq=args.at, seconds=args.seconds))
    except ValueError as error:
        raise ConfigInvalid([f"--at: {error}"]) from None
    if args.json:
        terminal.print_json(document)
        return
    console = terminal.stdout()
    for line in _draw(args, document, console.width):
        console.print(line, soft_wrap=True)


def _document(view: str, at: Instant) -> Mapping[str, Any]:
    """Return the document of a view, as the API gives it to a key that may not read texts."""
    if view == "graph":
        return graph(at).to_json()
    if view == "timeline":
        return timeline(at).to_json()
    return snapshot(at)


def _draw(args: Arguments, document: Mapping[str, Any], width: int) -> Iterator[Text]:
    if args.view == "graph":
        return run_views.graph(document)
    if args.view == "timeline":
        return run_views.timeline(document, width, by_money=args.by == "money")
    return run_views.state(document)


async def _explain(settings: Settings, args: Arguments) -> None:
    async with storage.open_configured_store(settings) as store:
        row = await storage.find_run(store, args.run)
        await content_reads.record_read(store, row.id, row.tenant, "reasons")
        document = await explanation.explain(store, store, row, content=True)
    if args.json:
        terminal.print_json(document)
    else:
        terminal.stdout().print(document["text"], soft_wrap=True)


# -- watch


async def _watch(settings: Settings, args: Arguments, now: Callable[[], float]) -> int:
    """Print events as they are committed, or keep a drawing up to date. Returns 0 if the run succeeds, else 1."""
    if args.view != "tree" and not args.json:
        return await _watch_view(settings, args, now)
    console = terminal.stdout()
    async with storage.open_configured_store(settings) as store:
        row = await storage.find_run(store, args.run)
        if not args.json:
            console.print(f"{row.id}  {row.tier}", style="bold")
        seq, began = 0, row.created_at
        with terminal.stderr().status("following") as status:
            while True:
                for event in (await store.journal(row.id, after=seq)).events:
                    seq = event.seq
                    _print_event(event, began, as_json=args.json)
                    if event.kind in TERMINAL:
                        status.stop()
                        return int(event.kind is not Kind.SUCCEEDED)
                await asyncio.sleep(POLL_SECONDS)


def _print_event(event: Event, began: float, *, as_json: bool) -> None:
    """Print one line for an event, with its time since the run `began`."""
    if as_json:
        print(orjson.dumps(_event(event)).decode(), flush=True)
        return
    terminal.stdout().print(Text(f"{event.at - began:8.2f} s  "), Text(_event_in_words(event)), soft_wrap=True)


async def _watch_view(settings: Settings, args: Arguments, now: Callable[[], float]) -> int:
    """Redraw a view until the run has ended. What is no terminal gets the last drawing alone."""
    console = terminal.stdout()
    async with storage.open_configured_store(settings) as store:
        row = await storage.find_run(store, args.run)
        with Live(console=console, auto_refresh=False) as live:
            while True:
                at = instant((await store.journal(row.id)).events, now())
                lines = _draw(args, _document(args.view, at), console.width)
                live.update(Group(*lines), refresh=True)
                if at.state.state in ENDED:
                    return int(at.state.state != "succeeded")
                await asyncio.sleep(POLL_SECONDS)


# -- cancel


async def _cancel(settings: Settings, args: Arguments, now: float) -> int:
    """Ask a run to end. Returns 0 if it has ended within two leases and some seconds, else 1: it will end later."""
    console = terminal.stdout()
    async with storage.open_configured_store(settings) as store:
        row = await storage.find_run(store, args.run)
        await cancellation.ask(store, None, row, "operator", now)
        with terminal.stderr().status("waiting for its driver"):
            row = await cancel.wait_until_ended(store, row, 2 * settings.lease_seconds + CANCEL_SECONDS)
    if args.json:
        terminal.print_json(audit.summary(row))
        return int(row.ended_at is None)
    if row.ended_at is None:
        console.print(f"{row.id} was asked to end; `baton runs watch {row.id}` follows it.")
        return 1
    console.print(f"{row.id} has ended: {row.state}.")
    return 0


def _event(event: Event) -> dict[str, Any]:
    """Return one event as `GET /v1/runs/{id}/events` shows it."""
    return {"object": "run.event", "seq": event.seq, "kind": event.kind.value, "at": event.at, "body": event.body}


def _event_in_words(event: Event) -> str:
    """Return one event in words."""
    fact = event.fact
    detail = _run_detail(fact) or _approval_detail(fact) or _plan_detail(fact) or _step_detail(fact)
    return terminal.clean(f"{event.kind.value:<21} {detail}")


def _run_detail(fact: Fact) -> str:
    match fact:
        case RunAdmitted():
            return f"{fact.conductor} conductor, pool {', '.join(fact.pool)}"
        case RunCancelAsked():
            return f"by {fact.by}"
        case RunAwaitingTool():
            return f"turn {fact.turn}, until {terminal.moment(fact.until)}"
        case RunResumed():
            return f"turn {fact.turn}"
        case RunSucceeded():
            return terminal.dollars(fact.usd)
        case RunEnd():
            return fact.error
        case _:
            return ""


def _approval_detail(fact: Fact) -> str:
    match fact:
        case RunAwaitingApproval():
            price = "at an unknown price" if fact.price is None else f"for at most {terminal.dollars(fact.price)}"
            reasons = ", ".join(fact.reasons)
            workers = ", ".join(fact.discloses)
            until = terminal.moment(fact.until)
            return f"proposal {fact.proposal}, because of {reasons}: {workers}, {price}, until {until}"
        case RunApproved():
            return f"proposal {fact.proposal}, by {fact.by}, for at most {terminal.dollars(fact.max_usd)} in all"
        case RunRefused():
            return f"proposal {fact.proposal}, by {fact.by}"
        case RunApprovalExpired():
            return f"proposal {fact.proposal}: nobody has decided in time"
        case _:
            return ""


def _plan_detail(fact: Fact) -> str:
    match fact:
        case PlanOpened():
            if fact.round > 1:
                return f"proposal {fact.proposal}, {fact.mode}, round {fact.round}"
            return f"proposal {fact.proposal}, {fact.mode}"
        case PlanStep():
            return f"step {fact.n}: {fact.worker}, sees {run_words.sees(fact.access.as_list())}"
        case PlanAccepted():
            if fact.steps:
                return f"{fact.topology}, {terminal.count(fact.steps, 'step')}"
            return run_words.ANSWER_ACCEPTED
        case PlanRejected():
            return "; ".join(fact.reasons)
        case CallIntended():
            return f"{_call(fact)}: {fact.worker}, {terminal.dollars(fact.usd_held)} reserved"
        case CallFinished():
            return f"{_call(fact)}: {_outcome(fact)}"
        case _:
            return ""


def _step_detail(fact: Fact) -> str:
    match fact:
        case StepQueued():
            return f"step {fact.n}"
        case StepAwaitingTool():
            return f"step {fact.n}: calls {', '.join(call.name for call in fact.calls)}"
        case StepToolResults():
            return f"step {fact.n}: {terminal.count(len(fact.ids), 'result')}"
        case StepDone():
            return f"step {fact.n}: {fact.chars:,} characters"
        case StepFailed():
            return f"step {fact.n}: {fact.error}"
        case StepSkipped():
            return f"step {fact.n}: {fact.reason}"
        case _:
            return ""


def _call(fact: CallIntended | CallFinished) -> str:
    if fact.n is None:
        return "plan"
    return f"step {fact.n}"


def _outcome(fact: CallFinished) -> str:
    outcome: str = fact.outcome
    if fact.error:
        outcome = f"{outcome} ({fact.error})"
    tokens = run_words.tokens(usage_to_json(fact.usage))
    return f"{outcome}, {tokens}, {terminal.dollars(fact.usd)}, {terminal.duration(fact.seconds)}"
