"""Stores over an empty SQLite file and over an empty Postgres database."""

from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import pytest

from app.store.migrate import migrate
from app.store.sql import SqlStore, open_store
from tests.conformance.entries import GRACE, Opener


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.integration)])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty database with the schema in it."""
    url = f"sqlite:///{tmp_path}/baton.db" if request.param == "sqlite" else request.getfixturevalue("postgres_url")
    migrate(url)
    return str(url)


@pytest.fixture
def opener(database: str) -> Opener:
    """Opens stores over one database, as several processes would."""
    return partial(open_store, database, grace=GRACE, lanes=2)


@pytest.fixture
async def store(opener: Opener) -> AsyncIterator[SqlStore]:
    async with opener() as opened:
        yield opened
