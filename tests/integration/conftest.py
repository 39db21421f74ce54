"""Fixtures of this folder: a stub in a process of its own, and a database for each file."""

import asyncio
import uuid
from collections.abc import Iterator

import pytest
from sqlalchemy.engine import make_url

from tests.integration.installation import execute
from tests.stubs.control import StubControl, stub_process


@pytest.fixture(scope="session")
def stub_of_all() -> Iterator[StubControl]:
    """The process of all stubs of providers; use `stub`."""
    with stub_process() as control:
        yield control


@pytest.fixture(scope="module")
def stub(stub_of_all: StubControl) -> StubControl:
    """All providers of one file's installation, which know nothing of another one's."""
    stub_of_all.clear()
    return stub_of_all


@pytest.fixture(scope="module")
def database(postgres_server_url: str, migrated_template: str) -> Iterator[str]:
    """A database with the schema in it; a fixture of pytest-asyncio would bind it to one test's event loop."""
    name = f"baton_test_{uuid.uuid4().hex}"
    asyncio.run(execute(postgres_server_url, f'CREATE DATABASE "{name}" TEMPLATE "{migrated_template}"'))
    yield make_url(postgres_server_url).set(database=name).render_as_string(hide_password=False)
    asyncio.run(execute(postgres_server_url, f'DROP DATABASE "{name}" WITH (FORCE)'))
