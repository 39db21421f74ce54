"""Databases that have the schema already: an SQLite file and a data folder of Postgres, which each worker copies.

To make both takes two seconds of a core, and to copy them a tenth of one. `start` has another process make them
(`python -m tests.harness.prepared_databases FOLDER`): a session of several workers starts that before it collects the
tests, which keeps one core only.
"""

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Final

import asyncpg
from sqlalchemy.engine import make_url

from app.store.sqlkit.migrate import migrate
from tests.harness import servers

ROOT: Final = Path(__file__).resolve().parents[2]
SQLITE_FILE: Final = "baton.db"
"""The name of the SQLite file in the folder."""
POSTGRES_DATA: Final = "data"
"""The name of the data folder of Postgres in the folder."""
TEMPLATE: Final = "baton_template"
"""The name of the database of Postgres with the schema in it. Nobody connects to it, so that it can be copied."""


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Start to make both in another process."""
    return subprocess.Popen([sys.executable, "-m", "tests.harness.prepared_databases", str(folder)], cwd=ROOT)


def make_sqlite(file: Path) -> None:
    """Make the SQLite file."""
    migrate(f"sqlite:///{file}")


def make_postgres(folder: Path) -> None:
    """Make the data folder of Postgres."""
    with servers.postgres() as server:
        asyncio.run(_create(server.url))
        migrate(make_url(server.url).set(database=TEMPLATE).render_as_string(hide_password=False))
        server.shut_down()
        servers.copy_data(server.directory / "data", folder)


async def _create(url: str) -> None:
    connection = await asyncpg.connect(url)
    try:
        await connection.execute(f'CREATE DATABASE "{TEMPLATE}" TEMPLATE template0')
    finally:
        await connection.close()


if __name__ == "__main__":
    chosen = Path(sys.argv[1])
    make_sqlite(chosen / SQLITE_FILE)
    make_postgres(chosen / POSTGRES_DATA)
