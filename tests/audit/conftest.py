"""Fixtures of the auditor's tests: the real service over stub providers."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from app.process.wiring import House
from tests.audit.scenes import Journal, play
from tests.harness.in_process import open_house, pool_text
from tests.stubs import ProviderStub


@pytest.fixture
async def stub() -> AsyncIterator[ProviderStub]:
    """The providers."""
    async with ProviderStub() as running:
        yield running


@pytest.fixture
async def opened(stub: ProviderStub, tmp_path: Path) -> AsyncIterator[House]:
    """The service over them."""
    async with open_house(tmp_path, pool_text(stub)) as running:
        yield running


@pytest.fixture(scope="session")
def journal(tmp_path_factory: pytest.TempPathFactory) -> Journal:
    """Runs of every kind, made once."""
    return asyncio.run(play(tmp_path_factory.mktemp("scenes")))
