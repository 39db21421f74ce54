"""The transparency log over HTTP: an auditor who has only the verifier key checks all that was sealed."""

import asyncio
from base64 import b64decode
from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest
from msgspec.structs import replace

from app.core.transparency.leaves import parse_leaf
from app.core.transparency.merkle import includes, leaf_hash, range_root
from app.core.transparency.notes import Checkpoint, Signer, open_checkpoint
from app.core.transparency.tiles import hashes_of, node_reader, tiles_of
from app.engine.sealer import Sealer
from app.gateway.http.api_keys import mint
from app.process.wiring import Runtime
from tests.harness.in_process import ask, client_of, pool_text, running_service
from tests.stubs import ProviderStub

SIGNER = Signer("log.example/baton", bytes(range(32)))


@pytest.fixture
async def runtime(stub: ProviderStub, tmp_path: Path) -> AsyncIterator[Runtime]:
    async with running_service(tmp_path, pool_text(stub)) as runtime:
        yield runtime


def unbundle(body: bytes) -> list[bytes]:
    """Return the entries of a bundle, each of which comes behind its length in two bytes."""
    entries = []
    while body:
        end = 2 + int.from_bytes(body[:2], "big")
        entries.append(body[2:end])
        body = body[end:]
    return entries


async def seal(runtime: Runtime) -> None:
    await Sealer(runtime.context, [SIGNER]).look(asyncio.Event())


async def headers_of_an_auditor(runtime: Runtime) -> dict[str, str]:
    key, row = mint(runtime.gateway.pepper, tenant="ops", name="auditor", scopes=["audit:read"], now=0.0)
    assert await runtime.gateway.store.add_key(replace(row, all_tenants=True))
    return {"authorization": f"Bearer {key}"}


async def checkpoint(client: httpx.AsyncClient) -> Checkpoint:
    reply = await client.get("/v1/log/checkpoint")
    assert reply.headers["content-type"] == "text/plain; charset=utf-8"
    return open_checkpoint(reply.text, [SIGNER.verifier])


async def test_an_auditor_reads_the_whole_log_by_its_tiles(runtime: Runtime) -> None:
    async with client_of(runtime) as client:
        run = (await ask(client)).json()["baton"]["run"]
        await seal(runtime)
        client.headers.update(await headers_of_an_auditor(runtime))
        head = await checkpoint(client)
        bodies = {tile: (await client.get(f"/v1/log/{tile.path}")).content for tile in tiles_of(head.size)}
    (entries,) = [unbundle(body) for tile, body in bodies.items() if tile.level is None]
    (hashes,) = [hashes_of(body) for tile, body in bodies.items() if tile.level == 0]
    assert hashes == [leaf_hash(entry) for entry in entries]
    assert range_root(0, head.size, node_reader(lambda _level, _number: hashes)) == head.root
    assert [leaf.kind for leaf in map(parse_leaf, entries) if leaf.id == run] == ["run"]


async def test_a_caller_gets_the_proof_of_its_run(runtime: Runtime) -> None:
    async with client_of(runtime) as client:
        run = (await ask(client)).json()["baton"]["run"]
        before = (await client.get(f"/v1/runs/{run}/proof")).json()
        await seal(runtime)
        after = (await client.get(f"/v1/runs/{run}/proof")).json()
        head = await checkpoint(client)
        whole = (await client.get(f"/v1/runs/{run}/events")).json()["data"]
    assert (before["checkpoint"], before["leaves"]) == (None, [])
    (leaf,) = after["leaves"]
    proof = [b64decode(step) for step in leaf["proof"]]
    assert includes(leaf["index"], head.size, leaf_hash(leaf["entry"].encode()), proof, head.root)
    assert parse_leaf(leaf["entry"].encode()).events == after["events"] == len(whole)
    assert len(b64decode(leaf["salt"])) == 16


async def test_entries_are_for_keys_of_all_tenants(runtime: Runtime) -> None:
    await seal(runtime)
    async with client_of(runtime) as client:
        assert (await client.get("/v1/log/tile/0/000.p/1")).status_code == 200
        assert (await client.get("/v1/log/tile/entries/000.p/1")).status_code == 403
        for path in ("0/000", "0/000.p/9", "0/001.p/1", "1/000.p/1", "0/0", "x"):
            assert (await client.get(f"/v1/log/tile/{path}")).status_code == 404, path


async def test_without_a_checkpoint_there_is_none(runtime: Runtime) -> None:
    async with client_of(runtime) as client:
        assert (await client.get("/v1/log/checkpoint")).status_code == 404
