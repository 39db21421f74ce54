"""Bringing a database to this version's schema. The versions stand in `migrations/` beside the package."""

import threading
from pathlib import Path

from alembic import command
from alembic.config import Config

from app.store.engines import parse_url

MIGRATIONS = Path(__file__).resolve().parents[2] / "migrations"
ONE_AT_A_TIME = threading.Lock()
"""Alembic keeps its context in globals. Between processes the database's own lock serves."""


def migrate(url: str, to: str = "head") -> None:
    """Upgrade (or, to an earlier revision, downgrade) a database. Must not be called on a thread with a running loop.

    Safe to call from several processes at once: the first one does the work while the others wait.
    """
    config = alembic_config(url)
    with ONE_AT_A_TIME:
        if to == "head":
            command.upgrade(config, to)
        else:
            command.downgrade(config, to)


def alembic_config(url: str) -> Config:
    """What Alembic's commands need to work on a database."""
    config = Config()
    config.set_main_option("script_location", str(MIGRATIONS).replace("%", "%%"))
    config.attributes["url"] = parse_url(url)
    return config
