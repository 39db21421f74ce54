"""The task that writes entries: what it caches of a run, and the end of the store if it fails."""

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from app.core.contents import content_ref
from app.store.sql import open_store
from app.store.writing.group_commit import EVENT_BYTES, JournalCache
from tests.conformance.entries import SALT, admission_entry, note
from tests.harness.waiting import PATIENCE_SECONDS

MOST_BYTES = 1_000
TEXTS = (b"a" * 300, b"b" * 300)


@pytest.fixture
def database(tmp_path: Path, make_schema: Callable[[str], None]) -> str:
    url = f"sqlite:///{tmp_path}/baton.db"
    make_schema(url)
    return url


def measure(text: bytes) -> int:
    return len(text)


@pytest.mark.parametrize("reads", [True, False], ids=["by reading", "by writing"])
async def test_a_run_may_outgrow_the_cache_of_journals(database: str, reads: bool) -> None:
    refs = [content_ref(SALT, text) for text in TEXTS]
    async with open_store(database) as store:
        store._journals = JournalCache(size=MOST_BYTES)
        await store.append(admission_entry("run"))
        await store.append(note("run", contents=tuple(zip(refs, TEXTS, strict=True))))
        assert store._journals.contents("run", refs).keys() == set(refs), "the run is cached"
        if reads:
            keys = [(ref, measure) for ref in refs]
            assert await store.records("run", keys) == {(ref, measure): 300 for ref in refs}
        for _ in range(MOST_BYTES // EVENT_BYTES):
            await store.append(note("run"))
        assert store._journals.contents("run", refs) == {}, "the run has outgrown the cache"
        assert len((await store.journal("run")).events) == 2 + MOST_BYTES // EVENT_BYTES
        assert await store.contents("run", refs) == dict(zip(refs, TEXTS, strict=True))
        await store.append(admission_entry("other"))
        assert store._journals.journal("other")[1] == 1, "there is room for another run"


async def test_a_store_whose_writer_fails_is_closed(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The process ends then, and is started again, instead of waiting for ever with callers who wait for it."""

    def fail(*_: object) -> None:
        raise ZeroDivisionError

    async def write() -> None:
        async with open_store(database) as store:
            monkeypatch.setattr(store.writer, "_on_commit", fail)
            await store.append(admission_entry("run"))

    task = asyncio.create_task(write())
    await asyncio.wait([task], timeout=PATIENCE_SECONDS)
    assert task.done(), "the store waits for ever"
    with pytest.raises(ExceptionGroup) as failure:
        await task
    assert failure.group_contains(ZeroDivisionError)
