"""Fixtures of the auditor's tests: the real service over stub providers."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.process.wiring import Runtime
from tests.audit.scenes import Journal, play
from tests.audit.tampers import Subject, prepare
from tests.harness.in_process import pool_text, running_service
from tests.stubs import ProviderStub


@pytest.fixture
async def stub() -> AsyncIterator[ProviderStub]:
    """The providers."""
    async with ProviderStub() as running:
        yield running


@pytest.fixture
async def runtime(stub: ProviderStub, tmp_path: Path) -> AsyncIterator[Runtime]:
    """The service over them."""
    async with running_service(tmp_path, pool_text(stub)) as running:
        yield running


@pytest.fixture(scope="session")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Journal:
    """Runs of every kind, made once."""
    return asyncio.run(play(tmp_path_factory.mktemp("scenes")))


@pytest.fixture(scope="session")
def subject(tmp_path_factory: pytest.TempPathFactory) -> Subject:
    """A sealed database, with the checkpoints that are held outside of it."""
    return asyncio.run(prepare(tmp_path_factory.mktemp("sealed")))
