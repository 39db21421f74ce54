"""`baton migrate` upgrades the schema of the database, shows its state, or prints the SQL that would run."""

from collections.abc import Callable, Mapping

import msgspec

from app.cli import storage, terminal
from app.cli.arguments import Arguments
from app.errors import ConfigInvalid, StoreUnavailable
from app.process.config import Settings, read
from app.store.sqlkit import revisions
from app.store.sqlkit.migrate import migrate
from app.store.sqlkit.revisions import Status


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Bring the schema to a revision. With `--status`, return 1 unless the database has this version's schema."""
    settings = read(environ)
    terminal.log_to_stderr(settings.log_level)
    storage.print_database(settings)
    with storage.name_database_in_failures(settings):
        status = revisions.status(settings.database_url)
    if args.status:
        return _print_status(settings, status, as_json=args.json)
    if status.newer:
        raise StoreUnavailable(
            f"The database is newer than this program: it has revision {status.current}, and this program knows "
            f"revisions up to {status.head}. Use the version of Baton that has migrated it."
        )
    earlier = revisions.is_earlier(settings.database_url, status.current, args.to)
    if earlier and not args.down:
        raise ConfigInvalid(
            [f"--to: {args.to} is earlier than {status.current}; add --down to drop what later revisions have added"]
        )
    if args.sql:
        print(revisions.statements(settings.database_url, status.current, args.to, down=earlier))
        return 0
    return _migrate(settings, args, up=not earlier)


def _migrate(settings: Settings, args: Arguments, *, up: bool) -> int:
    with terminal.stderr().status("migrating the database"), storage.name_database_in_failures(settings):
        migrate(settings.database_url, args.to, up=up)
        status = revisions.status(settings.database_url)
    if args.json:
        return _print_status(settings, status, as_json=True)
    if status.is_current:
        terminal.stdout().print("The database has this version's schema.")
        if terms := _row_security(settings):
            terminal.stdout().print(terms, soft_wrap=True)
    else:
        terminal.stdout().print(f"The database has the schema of revision {status.current}.")
    return 0


def _row_security(settings: Settings) -> str:
    """Return the state of row-level security in words; empty for SQLite, which has none."""
    if settings.database_url.startswith("sqlite"):
        return ""
    security = revisions.row_security(settings.database_url)
    if security.reader:
        return f"Row-level security is in force: reads for callers are made by the role {security.reader}."
    return f"Row-level security is not in force: {security.reason}."


def _print_status(settings: Settings, status: Status, *, as_json: bool) -> int:
    """Print the state of the schema. Returns 0 if it is this version's."""
    if as_json:
        terminal.print_json({"database": storage.database_name(settings), **msgspec.to_builtins(status)})
    else:
        _print_status_in_words(settings, status)
    return int(not status.is_current)


def _print_status_in_words(settings: Settings, status: Status) -> None:
    print(f"current  {status.current or 'no tables'}")
    print(f"head     {status.head}")
    for revision in status.pending:
        print(f"pending  {revision.id}  {revision.title}")
    if status.newer:
        print("The database is newer than this program.")
    elif status.pending:
        print(f"{len(status.pending)} to apply: run `baton migrate`.")
    else:
        print("The database has this version's schema.")
        if terms := _row_security(settings):
            print(terms)
