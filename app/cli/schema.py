"""`baton migrate` upgrades the schema of the database."""

from collections.abc import Callable, Mapping

from app.cli import terminal
from app.cli.asked import Asked
from app.process.config import read
from app.store.sqlkit.migrate import migrate


def run(asked: Asked, environ: Mapping[str, str], now: Callable[[], float]) -> int:
    """Upgrade the schema to this version. Does nothing if it is current."""
    settings = read(environ)
    terminal.log_to_stderr(settings.log_level)
    with terminal.err().status("migrating the database"):
        migrate(settings.database_url)
    terminal.out().print("The database has this version's schema.")
    return 0
