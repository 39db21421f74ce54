"""`baton audit changes` lists who changed keys, tenants, budgets, holds, conductors and retention; and who erased."""

from collections.abc import Callable, Mapping

from msgspec.structs import asdict

from app.cli import event_loop, storage, terminal
from app.cli.arguments import Arguments
from app.console.admin.change_words import change_facts
from app.process.config import Settings
from app.store.protocol import AdminEvent, AdminEventQuery


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Carry out the command on the configured database. Returns the exit status."""
    changes = read_changes(args, environ, now, target=args.target, action=args.action)
    if args.json:
        terminal.print_json([asdict(change) for change in changes])
        return 0
    table = terminal.table("at", "who", "via", "change", "target", "tenant", "fields")
    for change in changes:
        at = terminal.second(change.at)
        facts = change_facts(asdict(change))
        cells = (at, change.actor, change.via, change.action, change.target, change.tenant, facts)
        terminal.add_row(table, cells)
    terminal.print_table(table, "No such change is logged; a key is named by its id, which `baton keys ls` shows.")
    return 0


def read_changes(
    args: Arguments,
    environ: Mapping[str, str],
    now: Callable[[], float],
    *,
    target: str | None,
    action: str | None,
) -> tuple[AdminEvent, ...]:
    """Read what a command asks for from the log of changes of the configured database, the newest first."""
    settings = storage.read_settings(environ)
    query = AdminEventQuery(
        limit=args.limit, tenant=args.tenant, target=target, actor=args.actor, action=action, since=args.start(now())
    )
    return event_loop.run(_read(settings, query))


async def _read(settings: Settings, query: AdminEventQuery) -> tuple[AdminEvent, ...]:
    async with storage.open_configured_store(settings) as store:
        return await store.admin_events(query)
