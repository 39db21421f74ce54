"""`baton audit changes` lists who changed keys, tenants and conductors, and what."""

from collections.abc import Callable, Mapping
from dataclasses import asdict

from app.cli import event_loop, storage, terminal
from app.cli.arguments import Asked
from app.process.config import Settings, read
from app.store.protocol import AdminEvent, AdminEventQuery


def run(asked: Asked, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Carry out the command on the configured database. Returns the exit status."""
    found = listed(asked, environ, now, target=asked.target)
    if asked.json:
        terminal.print_json([asdict(one) for one in found])
        return 0
    table = terminal.table("at", "who", "via", "change", "target", "tenant", "fields")
    for one in found:
        at = terminal.second(one.at)
        cells = (at, one.actor, one.via, one.action, one.target, one.tenant, fields(one))
        terminal.add_row(table, cells)
    terminal.out().print(table if found else "Nothing was changed.")
    return 0


def listed(
    asked: Asked,
    environ: Mapping[str, str],
    now: Callable[[], float],
    *,
    target: str | None,
    action: str | None = None,
) -> tuple[AdminEvent, ...]:
    """Read what a command asks for from the log of changes of the configured database, the newest first."""
    settings = read(environ)
    terminal.log_to_stderr("warning")
    storage.announce(settings)
    since = now() - asked.since if asked.since else None
    query = AdminEventQuery(
        limit=asked.limit, tenant=asked.tenant, target=target, actor=asked.actor, action=action, since=since
    )
    return event_loop.run(_read(settings, query))


async def _read(settings: Settings, query: AdminEventQuery) -> tuple[AdminEvent, ...]:
    async with storage.opened(settings) as store:
        return await store.admin_events(query)


def fields(event: AdminEvent) -> str:
    """Return the fields that a change has altered; of what is new, all that have a value."""
    after = event.after or {}
    if event.before is None:
        return ", ".join(f"{name}: {value}" for name, value in after.items() if value and "digest" not in name)
    before = event.before
    changed = [name for name in after if after[name] != before.get(name)]
    return ", ".join(name if "digest" in name else f"{name}: {before.get(name)} -> {after[name]}" for name in changed)
