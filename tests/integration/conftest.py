"""What the files here share: a stub in a process of its own, and a database, each for one file."""

import asyncio
import uuid
from collections.abc import Iterator

import pytest
from sqlalchemy.engine import make_url

from app.store.sqlkit.migrate import migrate
from tests.integration.installation import execute
from tests.stubs.control import StubControl, stub_process


@pytest.fixture(scope="module")
def stub() -> Iterator[StubControl]:
    """All providers of one file's installation."""
    with stub_process() as control:
        yield control


@pytest.fixture(scope="module")
def database(postgres_server_url: str) -> Iterator[str]:
    """A database with the schema in it; a fixture of pytest-asyncio would bind it to one test's event loop."""
    name = f"baton_test_{uuid.uuid4().hex}"
    asyncio.run(execute(postgres_server_url, f'CREATE DATABASE "{name}" TEMPLATE template0'))
    url = make_url(postgres_server_url).set(database=name).render_as_string(hide_password=False)
    migrate(url)
    yield url
    asyncio.run(execute(postgres_server_url, f'DROP DATABASE "{name}" WITH (FORCE)'))
