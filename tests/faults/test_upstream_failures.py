"""The whole table of upstream failures: every kind, in all wire formats of providers and callers, streamed or not."""

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.conformance.upstream_failures import INBOUND, KINDS, Kind, received
from tests.conformance.wire_formats import FORMATS, Format
from tests.harness.in_process import calling, running_service
from tests.stubs import KEYS, ProviderStub

pytestmark = pytest.mark.faults_suite
AT_ONCE = 8
"""Kinds that are asked at the same time; each has a worker of its own."""
TIER = """
[tiers.baton-mini]
pool = "all"
conductor = {{ kind = "fixed", shape = "single", workers = ["{first}"] }}
limits = {{ steps = 1, attempts = 2, seconds = 20, output_tokens = 1000 }}
"""


def _pool(form: Format, stub: ProviderStub) -> str:
    """A pool file with one worker for each kind, all in that format; only the silent one has to be quick."""
    spec = form.spec(stub)
    lines = [f'[providers.stub]\nformat = "{spec.format}"\nbase_url = "{spec.base_url}"\nkey = "STUB_KEY"']
    for kind in KINDS:
        lines.append(f'[workers.{kind.name}]\nprovider = "stub"\nmodel = "{kind.name}"')
        if kind.name == "silence":
            lines.append("deadlines = { first = 0.3, total = 0.5 }")
    return "\n".join(lines) + TIER.format(first=KINDS[0].name)


@pytest.mark.parametrize("name", FORMATS)
async def test_every_kind_is_received_and_journaled_as_documented(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    bound = asyncio.Semaphore(AT_ONCE)
    async with ProviderStub() as stub:
        environ = {"STUB_KEY": KEYS[name]}
        async with running_service(tmp_path, _pool(form, stub), environ) as opened, calling(opened) as client:
            for kind in KINDS:
                stub.always(kind.name, kind.act)
            async with asyncio.TaskGroup() as group:
                for kind in KINDS:
                    group.create_task(_walk(client, kind, bound))


async def _walk(client: httpx.AsyncClient, kind: Kind, bound: asyncio.Semaphore) -> None:
    """One kind, in all formats of callers."""
    for inbound in INBOUND:
        for streams in (False, True):
            async with bound:
                seen, run = await received(client, inbound, streams=streams, pin=kind.name)
                journal = (await client.get(f"/v1/runs/{run}")).json()
            assert seen == kind.seen_by(inbound, streams=streams), (kind.name, inbound, streams)
            attempt = journal["steps"][0]["attempts"][-1]
            found = attempt["reason"], attempt["error"], attempt["http_status"]
            assert found == (kind.reason, kind.code, kind.http), (kind.name, inbound, streams)
