"""`baton tenants ls|add|disable|enable` manages tenants."""

from collections.abc import Callable, Mapping

from msgspec.structs import asdict

from app.cli import event_loop, storage, terminal
from app.cli.arguments import Arguments
from app.errors import NotFound
from app.process.config import Settings
from app.store.protocol import TenantRow


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Carry out one of the verbs on the configured database."""
    settings = storage.read_settings(environ)
    if args.verb != "ls":
        event_loop.run(_change(settings, args, now()))
    rows = event_loop.run(_read(settings))
    if args.verb != "ls":
        rows = tuple([row for row in rows if row.name == args.tenant])
    if args.json:
        terminal.print_json([asdict(row) for row in rows])
        return 0
    table = terminal.table("tenant", "created", "keys", "state")
    for row in rows:
        terminal.add_row(table, _cells(row))
    terminal.print_table(table, "There are no tenants; a key or `baton tenants add NAME` makes one.")
    return 0


def _cells(row: TenantRow) -> tuple[str, ...]:
    state = "in force"
    if row.disabled_at is not None:
        state = f"disabled {terminal.minute(row.disabled_at)}"
    creation = "-"
    if row.created_at is not None:
        creation = terminal.minute(row.created_at)
    return row.name, creation, str(row.keys), state


async def _change(settings: Settings, args: Arguments, now: float) -> None:
    by = storage.operator()
    async with storage.open_configured_store(settings) as store:
        if args.verb == "add":
            await store.add_tenant(args.tenant, now, by=by)
        elif not await store.switch_tenant(args.tenant, now, enabled=args.verb == "enable", by=by):
            raise NotFound("There is no such tenant; `baton tenants ls` lists them.")


async def _read(settings: Settings) -> tuple[TenantRow, ...]:
    async with storage.open_configured_store(settings) as store:
        return await store.tenants()
