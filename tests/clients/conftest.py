"""A service over stub workers on a real port, and `driven`: the reports of every official client on one surface."""

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec import Struct
from openai import AsyncOpenAI, OpenAI

from app.gateway.http.api_keys import mint
from tests.clients import async_drives, sync_drives
from tests.clients.npm import MissingPackage, Node, install
from tests.clients.reports import Report
from tests.harness.in_process import pool_text, running_service
from tests.harness.prepared_apps import app_over
from tests.harness.stand_ins import serving
from tests.stubs import Fail, ProviderStub, Reply, Truncate
from tests.stubs.script import Usage

BROKEN = """
[tiers.baton-broken]
pool = ["gamma"]
conductor = { kind = "fixed", shape = "single", workers = ["gamma"] }
limits = { attempts = 1, seconds = 10 }
"""
"""A tier whose only worker breaks off in a stream, and fails a whole reply."""
CLIENTS = ("python", "python-async", "node")


class Address(Struct, frozen=True):
    """The URL of the service, and a key to it."""

    url: str
    key: str


@pytest.fixture
async def stub() -> AsyncIterator[ProviderStub]:
    async with ProviderStub() as running:
        usage = Usage(input=40, cached=30, output=9, reasoning=4)
        running.always("alpha", Reply(chunks=("Fo", "ur", "."), usage=usage))
        running.always("gamma", break_off)
        yield running


def break_off(received: object) -> Reply | Fail:
    streaming = getattr(received, "streaming", False)
    return Reply(chunks=("Fo", "ur"), gap=0.05, fault=Truncate(after=1)) if streaming else Fail(status=400)


@asynccontextmanager
async def run_service(folder: Path, pool: str) -> AsyncIterator[Address]:
    """The service over a pool and the broken tier; its journal is audited when it has closed."""
    async with running_service(folder, pool + BROKEN) as runtime:
        scopes = ["runs:write", "runs:read"]
        key, row = mint(runtime.gateway.pepper, tenant="acme", name="client", scopes=scopes, now=0.0)
        await runtime.gateway.store.add_key(row)
        with app_over(runtime.gateway) as app:
            async with serving(app, runtime.gateway) as url:
                yield Address(url, key)


@pytest.fixture
async def address(stub: ProviderStub, tmp_path: Path) -> AsyncIterator[Address]:
    async with run_service(tmp_path, pool_text(stub)) as opened:
        yield opened


@pytest.fixture(scope="session")
def node() -> Node:
    """The official Node client; a test that asks for it is skipped where it cannot be had."""
    try:
        return install()
    except MissingPackage as reason:
        pytest.skip(str(reason))


@pytest.fixture(params=CLIENTS)
def driven(request: pytest.FixtureRequest, address: Address) -> Callable[[str], Awaitable[Report]]:
    """Drives one surface with one of the clients, and gives its report."""
    name: str = request.param
    node: Node | None = request.getfixturevalue("node") if name == "node" else None

    async def drive(surface: str) -> Report:
        if node is not None:
            environ = {"PATH": os.environ["PATH"], "BATON_URL": address.url, "BATON_API_KEY": address.key}
            report: Report = await node.run(surface, environ)
            return report
        base = f"{address.url}/v1"
        if name == "python":
            with OpenAI(base_url=base, api_key=address.key, max_retries=0) as client:
                report = await asyncio.to_thread(getattr(sync_drives, surface), client)
            return report
        async with AsyncOpenAI(base_url=base, api_key=address.key, max_retries=0) as async_client:
            report = await getattr(async_drives, surface)(async_client)
        return report

    return drive
