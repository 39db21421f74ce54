"""The whole table of upstream failures: every kind, in all wire formats of providers and callers, streamed or not."""

import asyncio
from pathlib import Path

import httpx
import pytest

from tests.conformance.upstream_failures import INBOUND, KINDS, Kind, receive_reply
from tests.conformance.wire_formats import FORMATS, Format
from tests.harness.in_process import ask, client_of, running_service
from tests.stubs import KEYS, Hang, ProviderStub

pytestmark = pytest.mark.faults_suite
SILENCE_SECONDS = 0.3
"""The first-byte deadline of the worker that is silent."""
AT_ONCE = 8
"""Kinds that are asked at the same time; each has a worker of its own."""
TIER = """
[tiers.baton-mini]
pool = "all"
conductor = {{ kind = "fixed", shape = "single", workers = ["{first}"] }}
limits = {{ steps = 1, attempts = 2, seconds = 20, output_tokens = 1000 }}
"""


def _pool(form: Format, stub: ProviderStub) -> str:
    """Return a pool file with one worker for each kind, all in that format; only the silent one has to be quick."""
    spec = form.spec(stub)
    lines = [f'[providers.stub]\nformat = "{spec.format}"\nbase_url = "{spec.base_url}"\nkey = "STUB_KEY"']
    for kind in KINDS:
        lines.append(f'[workers.{kind.name}]\nprovider = "stub"\nmodel = "{kind.name}"')
        if kind.name == "silence":
            lines.append(f"deadlines = {{ first = {SILENCE_SECONDS}, total = 0.5 }}")
    return "\n".join(lines) + TIER.format(first=KINDS[0].name)


@pytest.mark.parametrize("name", FORMATS)
async def test_every_kind_is_received_and_journaled_as_documented(name: str, tmp_path: Path) -> None:
    form = FORMATS[name]
    bound = asyncio.Semaphore(AT_ONCE)
    async with ProviderStub() as stub:
        environ = {"STUB_KEY": KEYS[name]}
        async with running_service(tmp_path, _pool(form, stub), environ) as runtime, client_of(runtime) as client:
            for kind in KINDS:
                stub.always(kind.name, kind.act)
            async with asyncio.TaskGroup() as group:
                for kind in KINDS:
                    group.create_task(_walk(client, kind, bound))


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.parametrize("name", FORMATS)
async def test_a_silent_worker_is_replaced_as_soon_as_its_silence_is_noticed(
    name: str, streams: bool, tmp_path: Path
) -> None:
    """It could write for forty seconds; that nobody receives its reply as it comes gives it no more time."""
    async with ProviderStub() as stub:
        pool, environ = _pool(FORMATS[name], stub), {"STUB_KEY": KEYS[name]}
        pool = pool.replace(f'workers = ["{KINDS[0].name}"]', 'workers = ["silence"]').replace(
            "total = 0.5", "total = 20"
        )
        stub.always("silence", Hang())
        async with running_service(tmp_path, pool, environ) as runtime, client_of(runtime) as client:
            reply = await ask(client, stream=streams)
            attempts = (await client.get(f"/v1/runs/{reply.headers['x-baton-run']}")).json()["steps"][0]["attempts"]
    assert [attempt["outcome"] for attempt in attempts] == ["error", "ok"]
    assert attempts[0]["seconds"] < SILENCE_SECONDS * 10


async def _walk(client: httpx.AsyncClient, kind: Kind, bound: asyncio.Semaphore) -> None:
    """One kind, in all formats of callers."""
    for inbound in INBOUND:
        for streams in (False, True):
            async with bound:
                outcome, run = await receive_reply(client, inbound, streams=streams, pin=kind.name)
                journal = (await client.get(f"/v1/runs/{run}")).json()
            assert outcome == kind.seen_by(inbound, streams=streams), (kind.name, inbound, streams)
            attempt = journal["steps"][0]["attempts"][-1]
            reasons = attempt["reason"], attempt["error"], attempt["http_status"]
            assert reasons == (kind.reason, kind.code, kind.http), (kind.name, inbound, streams)
