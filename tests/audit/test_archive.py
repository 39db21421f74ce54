"""The journal is read the same way from both databases and from an export of them, page by page."""

import asyncio
from collections.abc import AsyncIterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from app.audit.check import Auditor
from app.audit.export import Export
from app.core.pool.conductor_versions import Change
from app.errors import ConfigInvalid, StoreUnavailable
from app.process.wiring import Runtime
from app.providers.formats import adapter
from app.store import archive
from app.store.archive import Archive, Record, open_archive
from app.store.journal_file import Source, write
from app.store.sql import SqlStore
from app.store.sqlkit.migrate import migrate
from tests.audit.scenes import Journal
from tests.conformance.test_store_retention import find_rest_of
from tests.harness.in_process import finish, order, plan, pool_text, running_service
from tests.stubs import ProviderStub

RUNS = 5
PAUSE = 0.005
"""Seconds between two looks at a journal that grows."""


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.integration)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    database_url = (
        f"sqlite:///{tmp_path}/other.db"
        if request.param == "sqlite"
        else request.getfixturevalue("migrated_postgres_url")
    )
    return str(database_url)


@pytest.fixture
async def runtime(url: str, stub: ProviderStub, tmp_path: Path) -> AsyncIterator[Runtime]:
    await asyncio.to_thread(migrate, url)
    async with running_service(tmp_path, pool_text(stub), {"BATON_DATABASE_URL": url}) as running:
        yield running


async def run_some(runtime: Runtime) -> list[str]:
    """Runs of two steps; the first one's content is erased."""
    steps = plan(("alpha", "Think", ["user"]), ("beta", "Answer", ["user", 0]))
    started = [await runtime.runs.start(order(runtime, "baton-ultra", plan=steps)) for _ in range(RUNS)]
    names = [(await finish(followed_run)).ended.state.run for followed_run in started]
    assert await runtime.context.store.erase(names[0])
    return names


async def all_of(source: Source, **filters: float | str) -> list[Record]:
    return [record async for record in source.records(**filters)]  # type: ignore[arg-type]


def modes(folder: Path) -> list[tuple[str, int]]:
    return sorted((path.name, path.stat().st_mode & 0o777) for path in folder.iterdir())


@pytest.mark.long
async def test_every_run_is_read_once_whatever_the_pages(
    runtime: Runtime, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = await run_some(runtime)
    async with open_archive(url) as source:
        whole = await all_of(source)
        assert [record.row["id"] for record in whole] == sorted(names)
        assert [len(record.contents) for record in whole].count(0) == 1
        for page, size in ((2, 10_000_000), (200, 1), (1, 1)):
            monkeypatch.setattr(archive, "PAGE", page)
            monkeypatch.setattr(archive, "PAGE_BYTES", size)
            assert await all_of(source) == whole
        assert [record.row["id"] for record in await all_of(source, run=names[1])] == [names[1]]
        assert await all_of(source, run="run_nobody") == []
        third = whole[2].row["created_at"]
        assert await all_of(source, since=third) == [record for record in whole if record.row["created_at"] >= third]


@pytest.mark.long
async def test_an_export_holds_all_that_the_database_does(runtime: Runtime, url: str, tmp_path: Path) -> None:
    await run_some(runtime)
    changes = [Change(f"change_{n}", n / 7, "me", "planner", "promoted", f"planner@{n}", 0.5, "fit") for n in (2, 1)]
    for change in changes:
        await runtime.context.store.change(change)
    changes.reverse()
    path = tmp_path / "journal.jsonl"
    async with open_archive(url) as source:
        assert await write(source, path, now=1.5) == RUNS
        export = Export(path)
        assert export.at == 1.5
        assert await export.catalogs() == await source.catalogs()
        assert await export.changes() == list(await source.changes()) == changes
        assert await all_of(export) == await all_of(source)
        run = (await all_of(source))[1].row["id"]
        assert await all_of(export, run=run) == await all_of(source, run=run)
        assert await write(source, path, now=2.5, run=run) == 1
    assert [record.row["id"] for record in await all_of(export)] == [run]
    assert [(name, mode) for name, mode in modes(tmp_path) if name.startswith("journal")] == [("journal.jsonl", 0o600)]


@pytest.mark.long
async def test_what_happens_while_an_export_is_written_is_in_it(
    runtime: Runtime, url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is pruned meanwhile is neither stored any more nor was it pruned before."""
    names, store = await run_some(runtime), runtime.context.store
    monkeypatch.setattr(archive, "PAGE", 1)
    change = Change("change_1", 1.0, "me", "planner", "promoted", "planner@1", 0.5, "fit")
    path = tmp_path / "journal.jsonl"
    async with open_archive(url) as source:
        read = source.records

        async def records(**filters: Any) -> AsyncIterator[Record]:
            async for record in read(**filters):
                if record.row["id"] == names[0]:
                    assert isinstance(store, SqlStore)
                    assert await store.prune([await find_rest_of(store, names[-1])]) == [names[-1]]
                    await store.keep_catalog("d" * 64, lambda: b"later")
                    await store.change(change)
                yield record

        monkeypatch.setattr(source, "records", records)
        assert await write(source, path, now=1.5) == RUNS - 1
    export = Export(path)
    pruned = [pruned_run.id async for pruned_run in export.pruned_runs()]
    assert ([record.row["id"] for record in await all_of(export)], pruned) == (names[:-1], names[-1:])
    assert ((await export.catalogs())["d" * 64], await export.changes()) == (b"later", [change])


@pytest.mark.long
async def test_a_journal_that_grows_is_read_as_it_stood_at_one_moment(runtime: Runtime, url: str) -> None:
    started = [await runtime.runs.start(order(runtime, "baton-mini")) for _ in range(RUNS)]
    async with open_archive(url) as source:
        for _ in range(20):
            report = await Auditor(runtime.context.now(), adapter).audit(source)
            assert [str(violation) for violation in report.violations] == []
            await asyncio.sleep(PAUSE)
    for followed_run in started:
        await finish(followed_run)


@pytest.mark.long
async def test_a_pool_that_comes_while_journals_are_read_is_not_missing(
    runtime: Runtime, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await finish(await runtime.runs.start(order(runtime, "baton-mini")))
    async with open_archive(url) as source:
        read, first_readings = source.catalogs, [dict[str, bytes]()]

        async def catalogs() -> Mapping[str, bytes]:
            if first_readings:
                return first_readings.pop()
            return await read()

        monkeypatch.setattr(source, "catalogs", catalogs)
        report = await Auditor(runtime.context.now(), adapter).audit(source)
    assert (report.runs, report.violations) == (1, [])


@pytest.mark.long
async def test_a_pool_is_kept_once_and_stays_as_it_was(runtime: Runtime, url: str) -> None:
    store = runtime.context.store
    bodies: list[bytes] = []

    def snapshot(body: bytes) -> bytes:
        bodies.append(body)
        return body

    await store.keep_catalog("d" * 64, lambda: snapshot(b"first"))
    await store.keep_catalog("d" * 64, lambda: snapshot(b"second"))
    async with open_archive(url) as source:
        catalogs = await source.catalogs()
    assert (catalogs["d" * 64], bodies) == (b"first", [b"first"])


async def test_what_cannot_be_read_is_said_so(tmp_path: Path) -> None:
    with pytest.raises(StoreUnavailable):
        async with open_archive(f"sqlite:///{tmp_path}/absent.db"):
            pass
    (tmp_path / "empty.db").touch()
    async with open_archive(f"sqlite:///{tmp_path}/empty.db") as source:
        with pytest.raises(StoreUnavailable):
            await all_of(source)
    async with open_archive("postgresql://nobody@127.0.0.1:1/nothing") as source:
        with pytest.raises(StoreUnavailable):
            await source.catalogs()


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: text.rpartition("\n{")[0] + "\n",
        lambda text: text[: len(text) // 2],
        lambda text: "",
        lambda text: text.replace('"version":3', '"version":9'),
        lambda text: text.replace('{"event":', '{"even":', 1),
        lambda text: "[]\n" + text,
        lambda text: text + '{"event":1}\n',
        lambda text: text.replace('"body":"', '"body":"!', 1),
        lambda text: text.replace('"change":{"id"', '"change":{"ID"', 1),
    ],
    ids=["no end", "half", "empty", "version", "field", "list", "after the end", "base64", "change"],
)
@pytest.mark.long
async def test_a_damaged_export_is_refused(journal: Journal, tmp_path: Path, damage: object) -> None:
    path = tmp_path / "journal.jsonl"
    async with open_archive(f"sqlite:///{journal.folder}/baton.db") as source:
        await write(source, path, now=1.5)
    path.write_text(damage(path.read_text()))  # type: ignore[operator]
    export = Export(path)
    with pytest.raises(ConfigInvalid, match=r"journal\.jsonl:\d+: "):
        await Auditor(export.at, adapter).audit(export)


def test_an_archive_is_what_an_audit_needs() -> None:
    source: type[Source] = Archive
    assert source
