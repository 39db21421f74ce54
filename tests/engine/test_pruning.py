"""Engines delete runs that have ended once their time is over, and archive them first."""

import asyncio
import errno
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import httpx
import pytest
from sqlalchemy import create_engine, text

from app.audit.check import Auditor
from app.audit.export import Export
from app.core.run.journal_hash import root
from app.engine.retention import ArchiveTarget, RunRetention, archiving
from app.errors import ArchiveUnavailable, NotFound
from app.process.wiring import Runtime
from app.providers.formats import adapter
from app.store.archive import Record, open_archive
from app.store.archive_files import Folder
from app.store.sql import SqlStore
from tests.harness.callers import add_key, client_over_socket
from tests.harness.in_process import pool_text, running_service
from tests.harness.sealing import seal_all
from tests.harness.waiting import until
from tests.stubs import Hang, ProviderStub

MOMENT_SECONDS = 0.001
FORGOTTEN = -3_600.0
"""Idempotency claims count as lapsed an hour before a run's deadline, so that no test has to wait for a day."""


@dataclass
class Service:
    """A service, a client of it, and its archive in a folder."""

    runtime: Runtime
    client: httpx.AsyncClient
    url: str
    folder: Path

    async def ask(self, **more: object) -> str:
        """Begin a run, and return its id."""
        reply = await self.client.post("/v1/responses", json={"model": "baton-mini", "input": "hello", **more})
        assert reply.status_code == 200, reply.text
        return str(reply.json()["id"]).removeprefix("resp_")

    def retention(self, archive: ArchiveTarget | None = None, remembered: float = FORGOTTEN) -> RunRetention:
        """The task of another engine."""
        journals = partial(open_archive, self.url)
        return RunRetention(self.runtime.context, journals, archive, seconds=MOMENT_SECONDS, claim_seconds=remembered)

    async def prune(self, archive: ArchiveTarget | None = None, remembered: float = FORGOTTEN) -> None:
        """Let that task look once, after all events are sealed."""
        await self.seal()
        await self.retention(archive, remembered).look(asyncio.Event())

    async def seal(self) -> None:
        """Seal all that waits, as an engine does in time."""
        store = self.runtime.context.store
        assert isinstance(store, SqlStore)
        await seal_all(store)

    async def exists(self, run: str) -> bool:
        """True if the run's row is there."""
        try:
            return bool(await self.runtime.context.store.run(run))
        except NotFound:
            return False

    def list_archive(self) -> list[Path]:
        """The files of the archive."""
        return sorted(path for path in self.folder.rglob("*") if path.is_file())

    def tags(self) -> dict[str, int]:
        """The number of tags of all runs, by name."""
        engine = create_engine(self.url)
        with engine.connect() as conn:
            rows = conn.execute(text("SELECT name, count(*) FROM tags GROUP BY name")).all()
        engine.dispose()
        return dict(map(tuple, rows))

    def metric(self, name: str) -> float | None:
        """The value of a counter."""
        return self.runtime.context.telemetry.registry.get_sample_value(name)


def with_clearance(pool: str) -> str:
    """The pool file with its workers cleared for a label."""
    return pool.replace("\n[workers.alpha]\n", '\n[workers.alpha]\nclearance = ["phi"]\n')


@asynccontextmanager
async def running(stub: ProviderStub, folder: Path, *, audits: bool = True) -> AsyncIterator[Service]:
    async with (
        running_service(folder, with_clearance(pool_text(stub)), audits=audits) as runtime,
        client_over_socket(runtime, await add_key(runtime)) as client,
    ):
        yield Service(runtime, client, runtime.pool.configuration.settings.database_url, folder / "archive")


@pytest.fixture
async def service(stub: ProviderStub, tmp_path: Path) -> AsyncIterator[Service]:
    async with running(stub, tmp_path) as started:
        yield started


async def records_of(path: Path) -> list[Record]:
    return [record async for record in Export(path).records()]


@pytest.mark.long
async def test_runs_are_archived_and_deleted_when_they_have_ended_and_their_time_is_over(
    service: Service, stub: ProviderStub
) -> None:
    first, second = await service.ask(baton={"labels": ["phi"]}), await service.ask()
    assert service.tags() == {"label": 1, "request": 2, "worker": 2}
    stub.always("*", Hang())
    going_on = await service.ask(background=True)
    retention = service.retention(archiving(str(service.folder), None, contents=False))
    await service.seal()
    await retention.look(asyncio.Event())
    assert [await service.exists(run) for run in (first, second, going_on)] == [False, False, True]
    assert service.tags() == {"request": 1, "worker": 1}
    assert service.metric("baton_runs_pruned_total") == 2
    [path] = service.list_archive()
    assert [record.row["id"] for record in await records_of(path)] == [first, second]
    assert b"hello" not in Export(path)._path.read_bytes()
    report = await Auditor(Export(path).at, adapter).audit(Export(path))
    assert (report.runs, report.violations, set(report.unverifiable)) == (2, [], {"erased"})
    left = await service.runtime.context.store.pruned_run(first)
    [record, _] = await records_of(path)
    assert left.archive == str(path)
    assert left.root == root(first, [(event.seq, event.kind, event.at, event.body) for event in record.events])
    await service.client.post(f"/v1/runs/{going_on}/cancel")
    await until(lambda: _has_ended(service, going_on))
    await service.seal()
    await retention.look(asyncio.Event())
    assert not await service.exists(going_on)
    assert len(service.list_archive()) == 2


@pytest.mark.parametrize("contents", [False, True])
@pytest.mark.long
async def test_the_ratings_of_a_run_are_archived_and_their_comments_only_with_the_texts(
    service: Service, contents: bool
) -> None:
    run = await service.ask()
    reply = await service.client.post(f"/v1/runs/{run}/feedback", json={"score": 0.5, "comment": "too long"})
    assert reply.status_code < 300, reply.text
    await service.prune(archiving(str(service.folder), None, contents=contents))
    [path] = service.list_archive()
    [record] = await records_of(path)
    [rating] = record.ratings
    assert (rating["run"], rating["score"]) == (run, 0.5)
    assert rating["comment"] == ("too long" if contents else "")


async def _has_ended(service: Service, run: str) -> bool:
    return (await service.runtime.context.store.run(run)).ended_at is not None


@pytest.mark.long
async def test_a_pruned_run_is_a_404_that_says_so_to_its_own_tenant_alone(service: Service) -> None:
    run = await service.ask()
    await service.prune()
    gone = await service.client.get(f"/v1/runs/{run}")
    assert (gone.status_code, gone.json()["error"]["code"]) == (404, "run_pruned")
    assert "only a hash of its journal" in gone.json()["error"]["message"]
    assert (await service.client.get(f"/v1/responses/resp_{run}")).status_code == 404
    async with client_over_socket(service.runtime, await add_key(service.runtime, tenant="other")) as stranger:
        foreign = await stranger.get(f"/v1/runs/{run}")
    never = await service.client.get("/v1/runs/run_" + "0" * 31)
    assert foreign.json()["error"] == never.json()["error"] | {"message": foreign.json()["error"]["message"]}
    assert foreign.json()["error"]["code"] == "not_found"


async def test_nothing_is_deleted_while_the_archive_fails(service: Service, caplog: pytest.LogCaptureFixture) -> None:
    run = await service.ask()
    service.folder.write_text("This is no folder.")
    archive = archiving(str(service.folder), None, contents=False)
    stopping = asyncio.Event()
    await service.seal()
    async with asyncio.TaskGroup() as group:
        group.create_task(service.retention(archive).run(stopping))
        await until(lambda: service.metric("baton_archive_failures_total") == 1)
        stopping.set()
    assert await service.exists(run)
    assert "The archive failed, so no further run is pruned" in caplog.text


async def test_a_file_that_is_not_read_back_as_it_was_written_counts_as_failed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "read_bytes", lambda _path: b"something else")
    with pytest.raises(ArchiveUnavailable, match="does not hold what was written"):
        Folder(tmp_path).put("2026/11/name.jsonl.gz", b"the journal")


def test_what_a_crash_leaves_of_a_file_is_deleted_later_and_stops_no_other_write(tmp_path: Path) -> None:
    left, written = tmp_path / "name.jsonl.gz.0a1b2c3d.part", tmp_path / "other.jsonl.gz.0a1b2c3d.part"
    for part in (left, written):
        part.write_bytes(b"half of")
    os.utime(left, (1.0, 1.0))
    files = Folder(tmp_path)
    assert files.put("name.jsonl.gz", b"the journal") == str(tmp_path / "name.jsonl.gz")
    assert sorted(tmp_path.iterdir()) == [tmp_path / "name.jsonl.gz", written], "another process may write that one"
    assert files.names("") == ["name.jsonl.gz"]


def test_a_file_that_cannot_be_written_leaves_no_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(ArchiveUnavailable, match="No space left"):
        Folder(tmp_path).put("name.jsonl.gz", b"the journal")
    assert list(tmp_path.iterdir()) == []


def full(_descriptor: int) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


async def test_texts_are_archived_only_if_the_operator_says_so(service: Service) -> None:
    run = await service.ask()
    await service.prune(archiving(str(service.folder), None, contents=True))
    [path] = service.list_archive()
    [record] = await records_of(path)
    assert any(b"hello" in body for body in record.contents.values())
    report = await Auditor(Export(path).at, adapter).audit(Export(path))
    assert (report.violations, dict(report.unverifiable)) == ([], {})
    assert not await service.exists(run)


async def test_runs_stay_while_a_claim_lasts_on_them_and_where_another_engine_works(service: Service) -> None:
    run = await service.ask()
    await service.prune(remembered=0.0)
    assert await service.exists(run)
    await service.prune()
    assert await service.exists(run)


async def test_a_damaged_journal_is_kept_as_evidence(
    stub: ProviderStub, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with running(stub, tmp_path, audits=False) as service:
        damaged, whole = await service.ask(), await service.ask()
        engine = create_engine(service.url)
        with engine.begin() as conn:
            conn.execute(text("DELETE FROM events WHERE run = :run AND seq = 2"), {"run": damaged})
        engine.dispose()
        await service.prune()
        assert [await service.exists(run) for run in (damaged, whole)] == [True, False]
    assert "The journal of a run is damaged" in caplog.text
