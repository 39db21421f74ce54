"""Journals are archived, and checkpoints of the log exported, in a real S3-compatible server: see `make s3`."""

import asyncio
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import update

from app.audit.check import Auditor
from app.audit.export import Export
from app.core.transparency.notes import Checkpoint, sign
from app.engine.log_export import CheckpointExport, file_name
from app.engine.retention import Pruner, archiving
from app.errors import ArchiveUnavailable, NotFound
from app.providers.formats import adapter
from app.store.archive import open_archive
from app.store.archive_files import open_archive_files
from app.store.protocol import PruneQuery
from app.store.sql import SqlStore
from app.store.sqlkit.tables import LOG_STATE
from tests.engine.test_log_export import SIGNER, seal_a_run
from tests.harness.in_process import finish, order, pool_text, running_service
from tests.harness.sealing import seal_all
from tests.harness.servers import free_port
from tests.harness.waiting import until
from tests.stubs import ProviderStub

MOTO = os.environ.get("BATON_TEST_MOTO", "")
START_SECONDS = 60.0
EVERYTHING = PruneQuery(ended_before=1e12, deadline_before=1e12)
pytestmark = pytest.mark.skipif(not MOTO, reason="this test has an environment of its own: make s3")


@pytest.fixture
def credentials(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Credentials where botocore looks for them first, and none of this machine's."""
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "access")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))


@pytest.fixture
def endpoint(credentials: None) -> Iterator[str]:
    """The URL of a server with an empty bucket called `journals`."""
    url = f"http://127.0.0.1:{(port := free_port())}"
    process = subprocess.Popen(
        [MOTO, "-H", "127.0.0.1", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        asyncio.run(until(lambda: listening(port), within=START_SECONDS))
        client(url).create_bucket(Bucket="journals")
        yield url
    finally:
        process.kill()
        process.wait()


async def listening(port: int) -> bool:
    try:
        _, writer = await asyncio.open_connection("127.0.0.1", port)
    except OSError:
        return False
    writer.close()
    return True


def client(url: str) -> Any:
    """A client that is not Baton's."""
    botocore = pytest.importorskip("botocore.session")
    return botocore.Session().create_client("s3", endpoint_url=url, region_name="us-east-1")


async def test_runs_are_pruned_once_the_bucket_has_their_journals(
    endpoint: str, stub: ProviderStub, tmp_path: Path
) -> None:
    async def rest() -> bool:
        return True

    async with running_service(tmp_path, pool_text(stub)) as runtime:
        run = (await finish(await runtime.runs.start(order(runtime, "baton-mini")))).ended.state.run
        store = runtime.context.store
        assert isinstance(store, SqlStore)
        await seal_all(store)
        async with open_archive(runtime.pool.configuration.settings.database_url) as journals:

            async def prune(address: str) -> list[str]:
                archive = archiving(address, endpoint, contents=False)
                pruning = Pruner(store, journals, archive, now=runtime.context.now, name=str, pause=rest)
                return (await pruning.prune(EVERYTHING)).files

            with pytest.raises(ArchiveUnavailable, match=r"s3://absent/.* cannot be written: NoSuchBucket"):
                await prune("s3://absent/baton")
            assert (await store.run(run)).ended_at is not None
            [location] = await prune("s3://journals/baton/eu")
        with pytest.raises(NotFound):
            await store.run(run)
        assert (await store.pruned_run(run)).archive == location
    assert location.startswith("s3://journals/baton/eu/2")
    key = location.removeprefix("s3://journals/")
    file = tmp_path / "archived.jsonl.gz"
    file.write_bytes(client(endpoint).get_object(Bucket="journals", Key=key)["Body"].read())
    report = await Auditor(Export(file).at, adapter).audit(Export(file))
    assert (report.runs, report.violations) == (1, [])


async def test_checkpoints_are_exported_and_one_of_another_log_replaces_none(
    endpoint: str, stub: ProviderStub, tmp_path: Path
) -> None:
    bucket = client(endpoint)
    files = open_archive_files("s3://journals/held", endpoint)
    async with running_service(tmp_path, pool_text(stub)) as runtime:
        size = await seal_a_run(runtime)
        absent = CheckpointExport(runtime.context, open_archive_files("s3://absent/held", endpoint))
        await absent.look()
        assert runtime.context.telemetry.registry.get_sample_value("baton_log_export_failures_total") == 1
        note = (await runtime.context.store.log.state()).checkpoint
        for _ in range(2):  # another engine finds what the first one has exported
            export = CheckpointExport(runtime.context, files)
            export._leadership._mine = absent._leadership._mine
            await export.look()
        forged = sign(Checkpoint("log.example/baton", size, bytes(32)).text, [SIGNER])
        await runtime.context.store._write(  # type: ignore[attr-defined]
            lambda conn: conn.execute(update(LOG_STATE).values(checkpoint=forged))
        )
        await export.look()
    stored = {name: bucket.get_object(Bucket="journals", Key=f"held/{name}") for name in files.names("")}
    assert {stored_object["Body"].read().decode() for stored_object in stored.values()} == {note, forged}
    assert {stored_object["ContentType"] for stored_object in stored.values()} == {"text/plain"}
    assert file_name(size) in stored
    assert files.find_write_time(file_name(size)) is not None
    assert (files.read("absent"), files.find_write_time("absent")) == (None, None)


def test_a_store_that_nobody_listens_for_is_named(credentials: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.store.archive_files.TRIES", 1)
    files = open_archive_files("s3://journals", f"http://127.0.0.1:{free_port()}")
    with pytest.raises(ArchiveUnavailable, match="s3://journals/name cannot be written: EndpointConnectionError"):
        files.put("name", b"a journal")
