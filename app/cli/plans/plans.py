"""`baton plans make|show|edit|run`: plans as `/v1/plans` has them, in the configured database."""

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import orjson
from msgspec.structs import replace
from rich.console import RenderableType
from rich.text import Text
from rich.tree import Tree

from app.cli import event_loop, storage, terminal
from app.cli.arguments import Arguments
from app.cli.audit import content_reads
from app.cli.embedded import engine
from app.cli.plans import preview
from app.cli.plans.preview import PREVIEW_KEY
from app.core.pool.catalog import MILLION, Catalog
from app.core.roles import SCOPES
from app.core.run.kinds import WAITING
from app.engine.calls.step_request import task_of
from app.engine.delivery.messages import TurnEnd
from app.engine.runs.admission import Order
from app.errors import ConfigInvalid, Conflict, InvalidRequest, NotFound
from app.gateway.http.callers import Caller
from app.gateway.plans import orders, reply, requests, revisions
from app.gateway.plans.revisions import Plan, Revision
from app.gateway.runs.forecasts import read_history
from app.process.config import Configuration, configure
from app.store.protocol import FIRST_REVISION, PLAN_TAG, TAKEN, DisclosureQuery, KeyRow, RunQuery, RunRow, Store

RUN_KEY = "baton-plans"
"""The key of runs that `baton plans run` has executed."""
EDITS = ("change", "add", "remove", "move")
MOST_DIGITS = 6
"""A longer text of digits names no step of any plan. Python reads no number of more than 4,300 digits."""


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Carry out one of the verbs. Returns the exit status."""
    config = configure(environ)
    terminal.log_to_stderr("warning")
    storage.print_database(config.settings)
    if args.verb == "make":
        document = event_loop.run(_make(config, args))
    elif args.verb == "edit":
        document = event_loop.run(_edit(config, args))
    elif args.verb == "show":
        document = event_loop.run(_show(config, args))
    else:
        return event_loop.run(_execute(config, args))
    if getattr(args, "lists", False):
        terminal.print_json(document["plan"])
    elif args.json:
        terminal.print_json(document)
    else:
        terminal.stdout().print(_draw(document))
    return 0


async def _make(config: Configuration, args: Arguments) -> dict[str, Any]:
    order = orders.to_preview(preview.order_of(config.catalog, args))
    async with storage.existing_database(config.settings), engine.start_engine(config, 1) as runtime:
        end = _successful_end(await preview.run_to_end(runtime, order))
        store = runtime.context.store
        plan = Plan((revisions.revision_of_state(end.state, PREVIEW_KEY),))
        return await _document(store, config.catalog, plan, plan.first)


async def _show(config: Configuration, args: Arguments) -> dict[str, Any]:
    async with storage.open_configured_store(config.settings) as store:
        plan, row = await _find(store, args.plan)
        await content_reads.record_read(store, row.id, row.tenant, "plan")
        return await _document(store, config.catalog, plan, plan.revision(args.revision), lists=args.lists)


async def _edit(config: Configuration, args: Arguments) -> dict[str, Any]:
    change = requests.read_revision(_change(args))
    async with storage.existing_database(config.settings), engine.start_engine(config, 1) as runtime:
        store = runtime.context.store
        plan, row = await _find(store, args.plan)
        await content_reads.record_read(store, row.id, row.tenant, "plan")
        base = plan.revision(args.revision)
        number = orders.next_number(plan, base)
        before = revisions.as_value(await revisions.steps_of(store.of_tenant(None), base))
        value = requests.apply_revision(change, before, plan.first.state.admitted.pool)
        usual = await _repeat_order(store, config.catalog, plan, base, row.tenant, PREVIEW_KEY)
        order = orders.to_revision(usual, plan, value, number)
        record = orders.record_of_revision(plan, number, row.tenant, {"command": runtime.context.name("edit")})
        until = runtime.context.now() + order.limits.seconds + runtime.gateway.remembered
        try:
            end = await engine.run_to_end(runtime, replace(order, once=replace(record, until=until)))
        except InvalidRequest as refused:
            raise orders.edit_error(refused) from None
        except Conflict as conflict:
            if conflict.public_code == TAKEN:
                raise orders.overtaken_error() from None
            raise conflict from None
        new_revision = revisions.revision_of_state(_successful_end(end).state, PREVIEW_KEY)
        return await _document(store, config.catalog, Plan((*plan.revisions, new_revision)), new_revision)


def _change(args: Arguments) -> dict[str, Any]:
    """Return the body that `PATCH /v1/plans/{id}` would be sent; its revision is looked up later."""
    edits = {name: getattr(args, name) for name in EDITS}
    edits = {name: place for name, place in edits.items() if place is not None}
    if len(edits) + (args.file is not None) != 1:
        raise ConfigInvalid(["give one of --change, --add, --remove, --move and --file"])
    if args.file is not None:
        return {"revision": 1, "plan": _read(args.file)}
    ((op, step),) = edits.items()
    fields = {"worker": args.worker, "subtask": args.subtask, "to": args.to}
    if args.access is not None:
        words = [word.strip() for word in args.access.split(",")]
        fields["access"] = [_entry(word) for word in words if word]
    values = {name: value for name, value in fields.items() if value is not None}
    return {"revision": 1, "edits": [{"op": op, "step": step, **values}]}


def _entry(text: str) -> str | int:
    """Return an entry of an access list: the number of a step, or what is none, which the edit is refused for."""
    if text.isdecimal() and len(text) <= MOST_DIGITS:
        return int(text)
    return text


def _read(name: str) -> Any:
    try:
        if name == "-":
            return orjson.loads(sys.stdin.buffer.read())
        return orjson.loads(Path(name).read_bytes())
    except orjson.JSONDecodeError as error:
        raise ConfigInvalid([f"--file: {name} cannot be read as JSON: {error}"]) from None


async def _execute(config: Configuration, args: Arguments) -> int:
    async with storage.existing_database(config.settings), engine.start_engine(config, 1, dispatches=True) as runtime:
        store = runtime.context.store
        plan, row = await _find(store, args.plan)
        revision = plan.revision(args.revision)
        steps = await revisions.steps_of(store.of_tenant(None), revision)
        usual = await _repeat_order(store, config.catalog, plan, revision, row.tenant, RUN_KEY)
        order = orders.to_execution(usual, revision, steps, requests.read_run({}))
        try:
            end = await engine.run_to_end(runtime, order)
        except InvalidRequest as refused:
            raise orders.changed_conditions_error(refused) from None
        _successful_end(end)
        if end.state.state in WAITING:
            raise Conflict(_describe_wait(end))
        await content_reads.record_read(store, end.state.run, row.tenant, "answer")
    summary: dict[str, Any] = {"run": end.state.run, "state": end.state.state, "answer": end.answer}
    summary |= {"cost_usd": end.bill.usd / MILLION, "plan": plan.id, "revision": revision.number}
    if args.json:
        terminal.print_json(summary)
    else:
        terminal.stdout().print(end.answer, soft_wrap=True)
        terminal.stderr().print(f"{end.state.run}: {terminal.dollars(end.bill.usd)}")
    return 0


def _describe_wait(end: TurnEnd) -> str:
    """Return why a run has no answer yet, and how it gets one."""
    run = end.state.run
    if end.state.state == "awaiting_approval":
        return f"The run waits for an approval; `baton approvals show {run}` shows it. An engine goes on with it then."
    return f"The run waits for the results of tool calls, which only its caller can send; `baton runs show {run}`."


def _successful_end(end: TurnEnd) -> TurnEnd:
    """Return the end of a run; raises the error that it ended with."""
    if end.error is not None:
        raise end.error
    return end


async def _find(store: Store, name: str) -> tuple[Plan, RunRow]:
    """Return the plan of this id, of this run, or the newest one. Raises `NotFound`."""
    if name == "last":
        rows = [row for row in await store.runs(RunQuery(tags=((PLAN_TAG, FIRST_REVISION),))) if not row.erased]
        if not rows:
            raise NotFound("There are no plans yet; make one with `baton plans make`.")
        name = rows[0].id
    try:
        return await revisions.find(store.of_tenant(None), name)
    except NotFound as error:
        if error.public_code != NotFound.code:  # it says more
            raise
        raise NotFound("There is no such plan; `baton runs ls --previews only` lists the newest.") from None


async def _repeat_order(store: Store, catalog: Catalog, plan: Plan, base: Revision, tenant: str, key: str) -> Order:
    """Return the order of the plan's request in the name of this command, which has every scope in the plan's
    tenant."""
    caller = Caller(KeyRow(key, tenant, key, b"", frozenset(SCOPES), 0.0))
    task = await task_of(store, plan.run, plan.first.state.admitted.task)
    return orders.repeat_order(catalog, caller, plan, base, tenant, task)


async def _document(
    store: Store, catalog: Catalog, plan: Plan, revision: Revision, *, lists: bool = False
) -> dict[str, Any]:
    theirs = store.of_tenant(None)
    content = reply.RevisionContent(
        steps=await revisions.steps_of(theirs, revision),
        task=await task_of(store, plan.run, plan.first.state.admitted.task),
        history=await read_history(theirs, plan.first.state.admitted.tenant),
        disclosed=await theirs.disclosures(DisclosureQuery(runs=(plan.run,), ascending=True)),
    )
    return reply.render_plan(catalog, plan, revision, content, lists=lists)


# -- what is shown


def _draw(document: Mapping[str, Any]) -> RenderableType:
    number = f"revision {document['revision']} of {len(document['revisions'])}"
    tree = Tree(Text(f"{document['id']}  {number}  {document['tier']}, {document['topology']}", style="bold"))
    estimates = (document["estimate"] or {"steps": []})["steps"]
    for n, step in enumerate(document["plan"]["steps"]):
        tree.add(_step(n, step, document["disclosures"][n], estimates))
    for recipient in document["disclosed"]:
        who = f"{recipient['recipient']} ({recipient['provider']})"
        tree.add(Text(f"{who} has read the conversation, as {recipient['recipient_kind']}"))
    tree.add(preview.estimate(document["estimate"], document["planning_cost_usd"]))
    tree.add(Text(f"digest: {document['digest']}"))
    return tree


def _step(n: int, step: Mapping[str, Any], to: Mapping[str, Any], estimates: Any) -> RenderableType:
    sources = []
    for entry in step["access"]:
        if entry == "user":
            sources.append("the conversation")
        else:
            sources.append(f"step {entry}")
    title = f" ({to['provider']})  sees: {', '.join(sources) or 'nothing'}"
    tree = Tree(Text.assemble((f"{n} {step['worker']}", "bold"), title))
    tree.add(Text(terminal.clean(step["subtask"]) or "Answer the conversation."))
    withheld = [item["what"] for item in to["why"]["withheld"]]
    if withheld:
        tree.add(Text(f"withheld: {', '.join(withheld)}"))
    if to["labels"]:
        tree.add(Text(f"labels: {', '.join(to['labels'])}"))
    if n < len(estimates):
        of_step = estimates[n]
        likely = f"about {_cost(of_step)} and {terminal.duration(of_step['seconds']['p50'])}"
        tree.add(Text(f"{likely}, by {of_step['basis']}"))
    return tree


def _cost(figures: Mapping[str, Any]) -> str:
    return terminal.dollars(figures["cost_usd"]["p50"] * MILLION)
