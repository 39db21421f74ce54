"""Fixtures that need the service: a gateway over stubs with a key to it, and a whole service with a caller of it.

A file that needs another worker, pool or caller has a fixture of the same name in the place of the one here.
"""

import asyncio
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.process import wiring
from tests.harness.in_process import client_of, pool_text, running_service
from tests.harness.prepared_apps import app_over, take_back
from tests.harness.stand_ins import APPROVED_RUN, PLAN_RUN, GatewayStandIn, row_of, store_contents
from tests.stubs import ProviderStub


@pytest.fixture(autouse=True)
def _lent_apps() -> Iterator[None]:
    """Take back the applications that were lent to the test."""
    yield
    take_back()


@pytest.fixture
def gateway() -> Iterator[GatewayStandIn]:
    """A gateway whose store holds one run and one plan of the tenant `acme`, and one run of another."""
    stand_in = GatewayStandIn()
    stand_in.store.rows = [row_of(name, "acme") for name in ("run_mine", PLAN_RUN, APPROVED_RUN)]
    stand_in.store.rows.append(row_of("run_theirs", "other"))
    store_contents(stand_in.store)
    with app_over(stand_in.context) as stand_in.app:
        yield stand_in


@pytest.fixture(scope="session")
def document() -> dict[str, Any]:
    """The OpenAPI document as it is served, made once: it is the same for every gateway."""

    async def read() -> dict[str, Any]:
        async with GatewayStandIn().client() as client:
            reply = await client.get("/openapi.json", headers={"authorization": ""})
            assert reply.status_code == 200
            found: dict[str, Any] = reply.json()
            return found

    return asyncio.run(read())


@pytest.fixture
def key(gateway: GatewayStandIn) -> str:
    """A key of the tenant `acme`."""
    return gateway.add_key()


@pytest.fixture
async def stub() -> AsyncIterator[ProviderStub]:
    """Providers that answer as tests script them."""
    async with ProviderStub() as running:
        yield running


@pytest.fixture
async def runtime(stub: ProviderStub, tmp_path: Path) -> AsyncIterator[wiring.Runtime]:
    """The whole service over the `stub`."""
    async with running_service(tmp_path, pool_text(stub)) as running:
        yield running


@pytest.fixture
async def client(runtime: wiring.Runtime) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the service `runtime`."""
    async with client_of(runtime) as running:
        yield running
