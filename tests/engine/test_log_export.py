"""Checkpoints of the transparency log are written outside of the database, and sealing never waits for that."""

import asyncio
import shutil
from pathlib import Path

import pytest
from sqlalchemy import update

from app.audit.log.tree import read_checkpoint, read_key
from app.core.transparency.notes import Checkpoint, Signer, open_checkpoint, sign
from app.core.transparency.witnesses import read_witnesses
from app.engine.log_export import Authorities, CheckpointExport, file_name
from app.engine.sealer import Sealer
from app.process.wiring import Runtime
from app.store.archive_files import Folder
from app.store.sqlkit.tables import LOG_STATE
from tests.harness.callers import add_key, client_over_socket
from tests.harness.in_process import pool_text, running_service
from tests.harness.log_authorities import NAME, log_authorities, make_authority, openssl
from tests.stubs import ProviderStub

SIGNER = Signer("log.example/baton", bytes(range(32)))


async def seal_a_run(runtime: Runtime) -> int:
    """Make a run and seal it. Returns the size of the log."""
    async with client_over_socket(runtime, await add_key(runtime)) as client:
        await client.post("/v1/responses", json={"model": "baton-mini", "input": "hello"})
    await Sealer(runtime.context, (SIGNER,)).look(asyncio.Event())
    return (await runtime.context.store.log.state()).size


@pytest.mark.long
async def test_each_checkpoint_is_a_file_of_its_own(stub: ProviderStub, tmp_path: Path) -> None:
    exported = tmp_path / "held"
    async with running_service(tmp_path, pool_text(stub)) as runtime:
        export = CheckpointExport(runtime.context, Folder(exported))
        sizes = []
        for _ in range(2):
            sizes.append(await seal_a_run(runtime))
            await export.look()
            await export.look()  # there is no newer one
    assert sorted(path.name for path in exported.iterdir()) == [file_name(size) for size in sizes]
    checkpoint = open_checkpoint((exported / file_name(sizes[-1])).read_text(), [SIGNER.verifier])
    assert checkpoint.size == sizes[-1]


@pytest.mark.long
async def test_a_log_that_was_made_anew_replaces_no_checkpoint_of_the_same_size(
    stub: ProviderStub, tmp_path: Path
) -> None:
    exported = tmp_path / "held"
    async with running_service(tmp_path, pool_text(stub)) as runtime:
        size = await seal_a_run(runtime)
        export = CheckpointExport(runtime.context, Folder(exported))
        await export.look()
        (before,) = [path.read_text() for path in exported.iterdir()]
        forged = sign(Checkpoint("log.example/baton", size, bytes(32)).text, [SIGNER])
        await runtime.context.store._write(  # type: ignore[attr-defined]
            lambda conn: conn.execute(update(LOG_STATE).values(checkpoint=forged))
        )
        await export.look()
    assert {path.read_text() for path in exported.iterdir()} == {before, forged}


async def test_sealing_goes_on_while_the_place_is_away_and_the_newest_is_tried_again(
    stub: ProviderStub, tmp_path: Path
) -> None:
    place = tmp_path / "held"
    place.write_text("a file where the folder should be")
    async with running_service(tmp_path, pool_text(stub)) as runtime:
        export = CheckpointExport(runtime.context, Folder(place))
        value = runtime.context.telemetry.registry.get_sample_value
        await seal_a_run(runtime)
        await export.look()
        assert value("baton_log_export_failures_total") == 1
        size = await seal_a_run(runtime)
        place.unlink()
        await export.look()
        assert (value("baton_log_exported_size"), value("baton_log_export_failures_total")) == (size, 1)
    assert [path.name for path in place.iterdir()] == [file_name(size)]


@pytest.mark.long
async def test_a_witness_cosigns_each_exported_checkpoint_from_the_size_that_it_knows(
    stub: ProviderStub, tmp_path: Path
) -> None:
    exported = tmp_path / "held"
    async with (
        running_service(tmp_path, pool_text(stub)) as runtime,
        log_authorities(SIGNER.verifier, tmp_path) as served,
    ):
        authorities = Authorities(read_witnesses(f"{served.url} {served.verifier}"))
        sizes = []
        for _ in range(2):  # the second engine does not know what the first one has sent
            sizes.append(await seal_a_run(runtime))
            export = CheckpointExport(runtime.context, Folder(exported), authorities)
            export._leadership._mine = b"one engine after the other"
            await export.look()
            await export.look()
    assert served.old_sizes == [0, 0, sizes[0]]
    key = read_key(served.verifier)
    for size in sizes:
        checkpoint = read_checkpoint((exported / file_name(size)).read_text())
        assert (checkpoint.size, checkpoint.signers([key])) == (size, [NAME])


@pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl is the authority for time stamps")
@pytest.mark.long
async def test_export_goes_on_without_a_witness_and_without_stamps_and_both_are_added_later(
    stub: ProviderStub, tmp_path: Path
) -> None:
    exported, authority = tmp_path / "held", tmp_path / "authority"
    make_authority(authority)
    async with (
        running_service(tmp_path, pool_text(stub)) as runtime,
        log_authorities(SIGNER.verifier, authority) as served,
    ):
        witnesses = read_witnesses(f"{served.url} {served.verifier}")
        export = CheckpointExport(runtime.context, Folder(exported), Authorities(witnesses, f"{served.url}/stamp"))
        value = runtime.context.telemetry.registry.get_sample_value
        served.away = True
        size = await seal_a_run(runtime)
        await export.look()
        assert (value("baton_log_exported_size"), value("baton_log_export_failures_total")) == (size, 0)
        assert value("baton_log_witness_failures_total", {"witness": NAME}) == 1
        assert value("baton_log_timestamp_failures_total") == 1
        served.away, served.forges = False, True
        await export.look()
        assert value("baton_log_witness_failures_total", {"witness": NAME}) == 2
        served.forges = False
        await export.look()
        assert value("baton_log_witnessed_size", {"witness": NAME}) == value("baton_log_timestamped_size") == size
    checkpoint, token = exported / file_name(size), exported / file_name(size, "tsr")
    assert read_checkpoint(checkpoint.read_text()).signers([read_key(served.verifier)]) == [NAME]
    assert "Verification: OK" in openssl(
        authority, "ts", "-verify", "-data", str(checkpoint), "-in", str(token), "-CAfile", "tsa.pem"
    )


async def test_without_a_place_nothing_is_exported(stub: ProviderStub, tmp_path: Path) -> None:
    async with running_service(tmp_path, pool_text(stub)) as runtime:
        await seal_a_run(runtime)
        await CheckpointExport(runtime.context, None).run(asyncio.Event())  # returns at once
