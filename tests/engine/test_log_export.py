"""Checkpoints of the transparency log are written outside of the database, and sealing never waits for that."""

import asyncio
from pathlib import Path

from app.core.transparency.notes import Signer, open_checkpoint
from app.engine.log_export import CheckpointExport, file_name
from app.engine.sealer import Sealer
from app.process.wiring import Runtime
from app.store.archive_files import Folder
from tests.harness.callers import calling, key_of
from tests.harness.in_process import pool_text, running_service
from tests.stubs import ProviderStub

SIGNER = Signer("log.example/baton", bytes(range(32)))


async def seal_a_run(opened: Runtime) -> int:
    """Make a run and seal it. Returns the size of the log."""
    async with calling(opened, await key_of(opened)) as client:
        await client.post("/v1/responses", json={"model": "baton-mini", "input": "hello"})
    await Sealer(opened.context, (SIGNER,)).look(asyncio.Event())
    return (await opened.context.store.log.state()).size


async def test_each_checkpoint_is_a_file_of_its_own(stub: ProviderStub, tmp_path: Path) -> None:
    held = tmp_path / "held"
    async with running_service(tmp_path, pool_text(stub)) as opened:
        export = CheckpointExport(opened.context, Folder(held))
        sizes = []
        for _ in range(2):
            sizes.append(await seal_a_run(opened))
            await export.look()
            await export.look()  # there is no newer one
    assert sorted(path.name for path in held.iterdir()) == [file_name(size) for size in sizes]
    checkpoint = open_checkpoint((held / file_name(sizes[-1])).read_text(), [SIGNER.verifier])
    assert checkpoint.size == sizes[-1]


async def test_sealing_goes_on_while_the_place_is_away_and_the_newest_is_tried_again(
    stub: ProviderStub, tmp_path: Path
) -> None:
    place = tmp_path / "held"
    place.write_text("a file where the folder should be")
    async with running_service(tmp_path, pool_text(stub)) as opened:
        export = CheckpointExport(opened.context, Folder(place))
        value = opened.context.telemetry.registry.get_sample_value
        await seal_a_run(opened)
        await export.look()
        assert value("baton_log_export_failures_total") == 1
        size = await seal_a_run(opened)
        place.unlink()
        await export.look()
        assert (value("baton_log_exported_size"), value("baton_log_export_failures_total")) == (size, 1)
    assert [path.name for path in place.iterdir()] == [file_name(size)]


async def test_without_a_place_nothing_is_exported(stub: ProviderStub, tmp_path: Path) -> None:
    async with running_service(tmp_path, pool_text(stub)) as opened:
        await seal_a_run(opened)
        await CheckpointExport(opened.context, None).run(asyncio.Event())  # returns at once
