"""Erasing the content of many runs, on SQLite and on Postgres."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from app.core.message.chat import Message, Task, Text, task_to_json
from app.core.rating.feedback import Feedback
from app.store.protocol import ContentQuery, Entry, Store
from app.store.rows import retention
from app.store.rows.content import address
from app.store.sql import SqlStore
from tests.conformance.entries import SALT, Opener, admitted, note

QUESTION = "what-only-this-user-said"


def asked(run: str, user: str | None = "ann", at: float = 1.0, tenant: str = "tenant", text: str = QUESTION) -> Entry:
    """The admission of a run with a task of the user's."""
    body = orjson.dumps(task_to_json(Task((Message("user", (Text(text),)),), user=user)))
    return replace(admitted(run, at, tenant=tenant), contents=((address(SALT, body), body),))


async def found(store: Store, query: ContentQuery, limit: int = 200) -> list[str]:
    """The runs that a query selects, over all pages."""
    names: list[str] = []
    place = None
    while True:
        page = await store.runs_with_content(query, place, limit)
        names += [row.id for row in page.runs]
        if page.following is None:
            return names
        place = page.following


async def fill(store: Store, entries: Sequence[Entry]) -> None:
    for entry in entries:
        await store.append(entry)


async def test_runs_are_found_by_user_tenant_and_time_until_they_are_erased(store: Store) -> None:
    await fill(
        store,
        [
            asked("old", at=1.0),
            asked("new", at=9.0),
            asked("else", tenant="other", at=2.0),
            asked("bob", "bob", at=3.0, text='"user":"ann"'),
            asked("nobody", None, at=4.0),
            asked("quoted", 'a"n\\n', at=5.0),
        ],
    )
    quotes = b'{"user":"ann"} is what ann writes'
    await store.append(note("nobody", contents=((address(SALT, quotes), quotes),)))
    everything = ["old", "else", "bob", "nobody", "quoted", "new"]
    for limit in (1, 2, 200):
        assert await found(store, ContentQuery(), limit) == everything
        assert await found(store, ContentQuery(user="ann"), limit) == ["old", "else", "new"]
    assert await found(store, ContentQuery(user="ann", tenant="tenant")) == ["old", "new"]
    assert await found(store, ContentQuery(user="ann", before=9.0)) == ["old", "else"]
    assert await found(store, ContentQuery(user='a"n\\n')) == ["quoted"]
    assert await found(store, ContentQuery(user="an")) == []
    assert await store.erase_contents(["old", "nobody", "none"]) == 2
    assert await found(store, ContentQuery()) == ["else", "bob", "quoted", "new"]
    assert await store.erase_contents(["old"]) == 0


async def test_erasing_leaves_the_journal_and_nothing_else(opener: Opener) -> None:
    async with opener() as store, opener() as other:
        await fill(store, [asked("one"), asked("two"), asked("kept")])
        ref = asked("one").contents[0][0]
        await store.rate(Feedback("fb", "one", "tenant", "key", 5.0, "explicit", "user", "", 1.0, "good", QUESTION))
        assert QUESTION.encode() in (await other.contents("one", [ref]))[ref]
        assert await other.erase_contents(["one", "two"]) == 2
        for run in ("one", "two"):
            assert (await store.run(run)).erased
            journal = await store.journal(run)
            assert (journal.salt, len(journal.events)) == (b"", 1)
            assert await store.contents(run, [ref]) == {}
        assert [(one.label, one.comment) for one in await store.feedback("one")] == [("good", "")]
        assert not (await store.run("kept")).erased
        late = b"late"
        await store.append(note("one", contents=((address(SALT, late), late),)))
        assert await store.contents("one", [address(SALT, late)]) == {}


async def test_one_transaction_erases_a_bounded_part(store: SqlStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retention, "ERASED_RUNS", 3)
    monkeypatch.setattr(retention, "ERASED_BYTES", 3000)
    sizes = {"a": 2000, "b": 2000, "c": 10, "d": 10, "e": 10, "f": 5000, "g": 10}
    await fill(store, [asked(run, text="x" * size) for run, size in sizes.items()])
    groups = await store._read(lambda conn: retention.groups(conn, sorted(sizes)))
    assert groups == [["a"], ["b", "c", "d"], ["e"], ["f"], ["g"]]
    assert await store.erase_contents(sorted(sizes)) == len(sizes)


async def test_no_byte_is_left_in_the_files_of_sqlite(tmp_path: Path, opener: Opener, database: str) -> None:
    if not database.startswith("sqlite"):
        pytest.skip("Postgres overwrites erased rows itself, some time after VACUUM")

    def files_with(text: str) -> list[str]:
        return [path.name for path in tmp_path.iterdir() if text.encode() in path.read_bytes()]

    async with opener() as store:
        large = QUESTION * 2000
        await fill(store, [asked(f"run-{n:03}", text=large if n % 10 == 0 else f"{QUESTION}{n}") for n in range(100)])
        await fill(store, [asked("kept", "bob", text="what-bob-said")])
        assert files_with(QUESTION)
        await store.erase_contents(await found(store, ContentQuery(user="ann")))
        assert await store.overwrite_erased()
        assert files_with(QUESTION) == []
        assert files_with("what-bob-said")
        assert await store.erase("kept")
        assert files_with("what-bob-said") == []
