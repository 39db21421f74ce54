"""`baton audit reads` lists who has read texts of callers and workers, and logs such readings by commands."""

import sys
from collections.abc import Callable, Mapping

from app.cli import storage, terminal
from app.cli.arguments import Arguments
from app.cli.audit import changes
from app.errors import StoreUnavailable
from app.store.protocol import CONTENT_READ, AdminEvent, Store


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Carry out the command on the configured database. Returns the exit status."""
    readings = changes.read_changes(args, environ, now, target=args.run, action=CONTENT_READ)
    if args.json:
        terminal.print_json([_record(reading) for reading in readings])
        return 0
    table = terminal.table("at", "who", "via", "run", "tenant", "what")
    for reading in readings:
        at = terminal.second(reading.at)
        cells = (at, reading.actor, reading.via, reading.target or "several", reading.tenant, part_of(reading))
        terminal.add_row(table, cells)
    terminal.print_table(table, "No such reading is logged; a run is named by its whole id, a key by its id.")
    return 0


def _record(reading: AdminEvent) -> dict[str, object]:
    run = reading.target or None
    return {
        "at": reading.at,
        "who": reading.actor,
        "via": reading.via,
        "run": run,
        "tenant": reading.tenant,
        "what": part_of(reading),
    }


def part_of(event: AdminEvent) -> str:
    """Return the part of a run that was read."""
    return str((event.after or {}).get("what", ""))


async def record_read(store: Store, run: str, tenant: str, part: str, digest: str = "") -> None:
    """Log that the user of this command reads content. On a read replica, which cannot be written, it says so."""
    try:
        await store.note_read(run, tenant, part, by=storage.operator(), digest=digest)
    except StoreUnavailable:
        print("baton: this reading could not be logged: the database takes no writes", file=sys.stderr)
