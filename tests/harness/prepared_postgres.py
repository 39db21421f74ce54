"""A data folder of Postgres that has a database with the schema in it; the server of each worker begins with a copy.

To make such a folder takes two seconds of a core, and to copy it a tenth of one. `start` has another process make it
(`python -m tests.harness.prepared_postgres FOLDER`): a session of several workers starts that before it collects the
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
TEMPLATE: Final = "baton_template"
"""The name of the database with the schema in it. Nobody connects to it, so that it can be copied."""


def start(folder: Path) -> subprocess.Popen[bytes]:
    """Start to make the data folder in another process."""
    return subprocess.Popen([sys.executable, "-m", "tests.harness.prepared_postgres", str(folder)], cwd=ROOT)


def make(folder: Path) -> None:
    """Make the data folder."""
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
    make(Path(sys.argv[1]))
