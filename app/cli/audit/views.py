"""`baton audit views` makes the SQL views for auditors in the configured Postgres, or drops them."""

from collections.abc import Callable, Mapping

from app.cli import storage, terminal
from app.cli.arguments import Arguments
from app.errors import ConfigInvalid
from app.store.sqlkit import audit_views, revisions


def run(args: Arguments, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Carry out the command. Returns the exit status."""
    settings = storage.read_settings(environ)
    if settings.database_url.startswith("sqlite"):
        raise ConfigInvalid(["the views are for Postgres; an SQLite file has no roles that could be kept from texts"])
    names = ", ".join(audit_views.VIEWS)
    with storage.name_database_in_failures(settings):
        if args.drop:
            revisions.change(settings.database_url, audit_views.drop)
            views, words = [], f"The views {names} are dropped."
        else:
            revisions.change(settings.database_url, lambda conn: audit_views.make(conn, args.role))
            views, words = list(audit_views.VIEWS), f"The views {names} are made."
    if args.json:
        terminal.print_json({"views": views, "role": args.role})
        return 0
    if args.role and not args.drop:
        words += f" The role {args.role} may read them."
    terminal.stdout().print(words, soft_wrap=True)
    return 0
