"""`baton approvals ls|show|approve|refuse`: the plans that wait for an approval, in the configured database."""

from collections.abc import Callable, Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from app.cli import event_loop, storage, terminal
from app.cli.arguments import Asked
from app.cli.audit import content_reads
from app.cli.runs import run_words
from app.core.pool.catalog import MILLION, Catalog
from app.engine.runs.approvals import Decision, settle
from app.errors import NotFound
from app.gateway.runs.approvals import WAITING, estimate, mark, shown
from app.gateway.runs.forecasts import read_history
from app.process.config import Settings, configure, read
from app.store.protocol import APPROVAL_TAG, ASKED, RunQuery, RunRow, Store


def run(asked: Asked, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Carry out one of the verbs on the configured database."""
    settings = read(environ)
    terminal.log_to_stderr("warning")
    storage.announce(settings)
    if asked.verb == "ls":
        found = event_loop.run(_listed(settings, asked.limit, decided=asked.decided))
        terminal.print_json(found) if asked.json else terminal.out().print(_table(found, decided=asked.decided))
        return 0
    if asked.verb == "show":
        one = event_loop.run(_show(settings, configure(environ).catalog, asked.run))
    else:
        one = event_loop.run(_decide(settings, asked, environ, now))
    if asked.json:
        terminal.print_json(one)
    else:
        for line in _lines(one):
            terminal.out().print(Text(terminal.clean(line)))
    return 0


async def _listed(settings: Settings, limit: int, *, decided: bool) -> list[dict[str, Any]]:
    waits = RunQuery(state=WAITING, limit=limit)
    asked = RunQuery(tags=((APPROVAL_TAG, ASKED),), limit=limit)
    async with storage.opened(settings) as store:
        rows = [row for row in await store.runs(asked if decided else waits) if decided == (row.state != WAITING)]
        found = [await _shown(store, row) for row in rows]
        return [one for one in found if one is not None]


async def _show(settings: Settings, catalog: Catalog, name: str) -> dict[str, Any]:
    """Return the question of a run; while its plan waits, with an estimate by the prices of the pool file."""
    async with storage.opened(settings) as store:
        one = await _one(store, name)
        if one["status"] == "waiting":
            of_tenant = store.of_tenant(one["tenant"])
            history = await read_history(of_tenant, one["tenant"])
            one["estimate"] = await estimate(catalog, of_tenant, await of_tenant.run(one["run"]), history)
        return one


async def _one(store: Store, name: str) -> dict[str, Any]:
    found = await _shown(store, await storage.find(store, name))
    if found is None:
        raise NotFound("No plan of this run has needed an approval.")
    return found


async def _shown(store: Store, row: RunRow) -> dict[str, Any] | None:
    """Return the question of a run with its texts. That they are read is logged."""
    found = await shown(store.of_tenant(None), row, reads=True)
    if found is not None:
        await content_reads.note(store, row.id, row.tenant, "approval", mark(found))
    return found


async def _decide(
    settings: Settings, asked: Asked, environ: Mapping[str, str], now: Callable[[], float]
) -> dict[str, Any]:
    catalog, approves = configure(environ).catalog, asked.verb == "approve"
    async with storage.opened(settings) as store:
        one = await _one(store, asked.run)
        max_usd = asked.max_usd if approves else None
        decision = Decision(
            verdict="approve" if approves else "refuse",
            digest=asked.digest or one["digest"],
            by=f"command:{storage.operator().id}",
            key="",
            reason=asked.reason,
            replacements=tuple(asked.replacement) if approves else (),
            max_usd=round(max_usd * MILLION) if max_usd is not None else None,
        )
        await settle(store, catalog, now, one["run"], None, decision, 0.0)
        return await _one(store, one["run"])


def _table(found: list[dict[str, Any]], *, decided: bool) -> Table | str:
    if not found:
        if decided:
            return "No plan was decided."
        return "No plan waits for an approval."
    if decided:
        return _decided(found)
    table = terminal.table()
    for column in ("run", "tier", "reasons", "workers", "worst case", "until"):
        table.add_column(column, overflow="fold")
    for one in found:
        workers = ", ".join(one["discloses"])
        cells = (one["run"], one["tier"], ", ".join(one["reasons"]), workers, _money(one), _minute(one["expires_at"]))
        table.add_row(*[Text(terminal.clean(cell)) for cell in cells])
    return table


def _decided(found: list[dict[str, Any]]) -> Table:
    table = terminal.table()
    for column in ("run", "status", "by", "at", "reason", "workers"):
        table.add_column(column, overflow="fold")
    for one in found:
        decision = one["decision"] or {"by": "", "at": one["expires_at"], "reason": ""}
        texts = (decision["by"], _minute(decision["at"]), decision["reason"] or "", ", ".join(one["discloses"]))
        table.add_row(*[Text(terminal.clean(cell)) for cell in (one["run"], one["status"], *texts)])
    return table


def _money(one: Mapping[str, Any]) -> str:
    if one["worst_case_usd"] is None:
        return "unknown"
    return f"${one['worst_case_usd']:.6f}"


def _minute(at: float) -> str:
    return f"{terminal.minute(at)} UTC"


def _lines(one: Mapping[str, Any]) -> list[str]:
    """Return a question in words: why, what would be called and disclosed, at what price, and what was decided."""
    lines = [
        f"{one['run']}: {one['status']} ({', '.join(one['reasons'])})",
        f"digest {one['digest']}",
        f"worst case {_money(one)}, spent ${one['spent_usd']:.6f}, limit ${one['limit_usd']:.2f}; "
        f"until {_minute(one['expires_at'])}, then {one['on_expiry']}",
    ]
    if one["estimate"] is not None:
        lines.append(f"estimate: {run_words.estimate(one['estimate'])}")
    for step in one["plan"]["steps"]:
        sees = ", ".join(str(entry) for entry in step["access"]) or "nothing"
        lines.append(f"step {step['n']}: {step['worker']} sees {sees}: {step['instruction'] or '(the request itself)'}")
    decision = one["decision"]
    if decision is not None:
        lines.append(
            f"{decision['decision']} by {decision['by']}, {_minute(decision['at'])}: {decision['reason'] or ''}"
        )
    return lines
