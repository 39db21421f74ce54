"""Fixtures that need the service: a gateway over stubs with a key to it, and a whole service with a caller of it.

A file that needs another worker, pool or caller has a fixture of the same name in the place of the one here.
"""

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from app.process import wiring
from tests.harness.in_process import calling, open_house, pool_text
from tests.harness.stand_ins import House, row_of, shelve_content
from tests.stubs import ProviderStub


@pytest.fixture
def gateway() -> House:
    """A gateway whose store holds one run of the tenant `acme` and one of another."""
    house = House()
    house.store.rows = [row_of("run_mine", "acme"), row_of("run_theirs", "other")]
    shelve_content(house.store)
    return house


@pytest.fixture
def key(gateway: House) -> str:
    """A key of the tenant `acme`."""
    return gateway.add_key()


@pytest.fixture
async def stub() -> AsyncIterator[ProviderStub]:
    """Providers that answer as tests script them."""
    async with ProviderStub() as running:
        yield running


@pytest.fixture
async def opened(stub: ProviderStub, tmp_path: Path) -> AsyncIterator[wiring.House]:
    """The whole service over the `stub`."""
    async with open_house(tmp_path, pool_text(stub)) as running:
        yield running


@pytest.fixture
async def client(opened: wiring.House) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the service `opened`."""
    async with calling(opened) as running:
        yield running
