"""Stores over an empty SQLite file and over an empty Postgres database; provider adapters over their stub."""

from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path

import pytest

from app.store.sql import SqlStore, open_store
from tests.conformance.entries import GRACE, Opener
from tests.conformance.wire_formats import FORMATS, Format, Line, connected
from tests.harness.waiting import PATIENCE_SECONDS
from tests.stubs import ProviderStub


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.integration)])
def database(request: pytest.FixtureRequest, tmp_path: Path, make_schema: Callable[[str], None]) -> str:
    """The URL of an empty database with the schema in it."""
    if request.param == "postgres":
        return str(request.getfixturevalue("migrated_postgres_url"))
    url = f"sqlite:///{tmp_path}/baton.db"
    make_schema(url)
    return url


@pytest.fixture
def opener(database: str, patient_store: None) -> Opener:
    """Opens stores over one database, as several processes would."""
    return partial(open_store, database, grace=GRACE, patience=PATIENCE_SECONDS)


@pytest.fixture
async def store(opener: Opener) -> AsyncIterator[SqlStore]:
    async with opener() as opened:
        yield opened


@pytest.fixture(params=FORMATS)
def form(request: pytest.FixtureRequest) -> Format:
    return FORMATS[request.param]


@pytest.fixture
async def line(form: Format) -> AsyncIterator[Line]:
    async with ProviderStub() as stub, connected(form, stub) as line:
        yield line


@pytest.fixture
async def openai() -> AsyncIterator[Line]:
    async with ProviderStub() as stub, connected(FORMATS["openai"], stub) as line:
        yield line
