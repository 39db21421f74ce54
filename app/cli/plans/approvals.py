"""`baton approvals ls|show|approve|refuse`: the plans that wait for an approval, in the configured database."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

from rich.table import Table

from app.cli import event_loop, storage, terminal
from app.cli.arguments import Arguments
from app.cli.audit import content_reads
from app.cli.runs import run_words
from app.core.pool.catalog import MILLION, Catalog
from app.engine.runs.approvals import Decision, write_decision
from app.errors import EventMalformed, NotFound
from app.gateway.runs.approvals import WAITING, approval_of, estimate, mark
from app.gateway.runs.forecasts import read_history
from app.process.config import Settings, configure
from app.store.protocol import APPROVAL_TAG, ASKED, RunQuery, RunRow, Store
from app.store.run_pages import run_pages


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Carry out one of the verbs on the configured database."""
    settings = storage.read_settings(environ)
    if args.verb == "ls":
        approvals = event_loop.run(_list(settings, args.limit, decided=args.decided))
        if args.json:
            terminal.print_json(approvals)
        elif args.decided:
            terminal.print_table(_decisions_table(approvals), "No plan was decided.")
        else:
            terminal.print_table(_waiting_table(approvals), "No plan waits for an approval.")
        return 0
    if args.verb == "show":
        approval = event_loop.run(_show(settings, configure(environ).catalog, args.run))
    else:
        approval = event_loop.run(_decide(settings, args, environ, now))
    if args.json:
        terminal.print_json(approval)
    else:
        for line in _lines(approval):
            terminal.stdout().print(line, soft_wrap=True)
    return 0


async def _list(settings: Settings, limit: int, *, decided: bool) -> list[dict[str, Any]]:
    query = RunQuery(state=WAITING, limit=limit)
    if decided:
        query = RunQuery(tags=((APPROVAL_TAG, ASKED),), limit=limit)
    approvals: list[dict[str, Any]] = []
    async with storage.open_configured_store(settings) as store:
        async for rows in run_pages(store.runs, query):
            for row in rows:
                if len(approvals) == limit:
                    return approvals
                if decided == (row.state != WAITING):
                    approvals += await _read_if_whole(store, row)
    return approvals


async def _read_if_whole(store: Store, row: RunRow) -> list[dict[str, Any]]:
    """Return the approval that a run needs; none for a damaged run, on which nobody can decide: others must not wait
    for that."""
    try:
        approval = await _with_texts(store, row)
    except EventMalformed as error:
        terminal.stderr().print(f"A plan is left out: {error}", soft_wrap=True)
        return []
    if approval is None:
        return []
    return [approval]


async def _show(settings: Settings, catalog: Catalog, name: str) -> dict[str, Any]:
    """Return the approval that a run needs; while its plan waits, with an estimate by the prices of the pool file."""
    async with storage.open_configured_store(settings) as store:
        approval = await _read(store, name)
        if approval["status"] == "waiting":
            of_tenant = store.of_tenant(approval["tenant"])
            history = await read_history(of_tenant, approval["tenant"])
            approval["estimate"] = await estimate(catalog, of_tenant, await of_tenant.run(approval["run"]), history)
        return approval


async def _read(store: Store, name: str) -> dict[str, Any]:
    approval = await _with_texts(store, await storage.find_run(store, name))
    if approval is None:
        raise NotFound("No plan of this run has needed an approval.")
    return approval


async def _with_texts(store: Store, row: RunRow) -> dict[str, Any] | None:
    """Return the approval that a run needs, with its texts, or None. The reading of the texts is logged."""
    approval = await approval_of(store.of_tenant(None), row, reads=True)
    if approval is not None:
        await content_reads.record_read(store, row.id, row.tenant, "approval", mark(approval))
    return approval


async def _decide(
    settings: Settings, args: Arguments, environ: Mapping[str, str], now: Callable[[], float]
) -> dict[str, Any]:
    catalog = configure(environ).catalog
    async with storage.open_configured_store(settings) as store:
        approval = await _read(store, args.run)
        verdict: Literal["approve", "refuse"] = "refuse"
        replacements: tuple[str, ...] = ()
        max_usd = None
        if args.verb == "approve":
            verdict = "approve"
            replacements = tuple(args.replacement)
            if args.max_usd is not None:
                max_usd = round(args.max_usd * MILLION)
        decision = Decision(
            verdict=verdict,
            digest=args.digest or approval["digest"],
            by=f"command:{storage.operator().id}",
            key="",
            reason=args.reason,
            replacements=replacements,
            max_usd=max_usd,
        )
        await write_decision(store, catalog, now, approval["run"], None, decision, 0.0)
        return await _read(store, approval["run"])


def _waiting_table(approvals: list[dict[str, Any]]) -> Table:
    table = terminal.table()
    for column in ("run", "tier", "reasons", "workers", "worst case", "until"):
        table.add_column(column, overflow="fold")
    for approval in approvals:
        workers = ", ".join(approval["discloses"])
        cells = (
            approval["run"],
            approval["tier"],
            ", ".join(approval["reasons"]),
            workers,
            _money(approval),
            _minute(approval["expires_at"]),
        )
        terminal.add_row(table, cells)
    return table


def _decisions_table(approvals: list[dict[str, Any]]) -> Table:
    table = terminal.table()
    for column in ("run", "status", "by", "at", "reason", "workers"):
        table.add_column(column, overflow="fold")
    for approval in approvals:
        by, at, reason = "", "", ""
        if approval["decision"] is not None:
            decision = approval["decision"]
            by, at, reason = decision["by"], _minute(decision["at"]), decision["reason"] or ""
        texts = (by, at, reason, ", ".join(approval["discloses"]))
        terminal.add_row(table, (approval["run"], approval["status"], *texts))
    return table


def _money(approval: Mapping[str, Any]) -> str:
    if approval["worst_case_usd"] is None:
        return "unknown"
    return f"${approval['worst_case_usd']:.6f}"


def _minute(at: float) -> str:
    return f"{terminal.minute(at)} UTC"


def _lines(approval: Mapping[str, Any]) -> list[str]:
    """Return an approval in words: why, what would be called and disclosed, at what price, and what was decided."""
    lines = [
        f"{approval['run']}: {approval['status']} ({', '.join(approval['reasons'])})",
        f"digest {approval['digest']}",
        f"worst case {_money(approval)}, spent ${approval['spent_usd']:.6f}, limit ${approval['limit_usd']:.2f}",
    ]
    if approval["status"] == "waiting":
        lines.append(f"until {_minute(approval['expires_at'])}, then {approval['on_expiry']}")
    if approval["estimate"] is not None:
        lines.append(f"estimate: {run_words.estimate(approval['estimate'])}")
    for step in approval["plan"]["steps"]:
        sees = ", ".join(str(entry) for entry in step["access"]) or "nothing"
        lines.append(f"step {step['n']}: {step['worker']} sees {sees}: {step['instruction'] or '(the request itself)'}")
    decision = approval["decision"]
    if decision is not None:
        lines.append(
            f"{decision['decision']} by {decision['by']}, {_minute(decision['at'])}: {decision['reason'] or ''}"
        )
    return lines
