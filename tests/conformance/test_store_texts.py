"""Contents in parts, on SQLite and on Postgres: what runs have in common is stored once, and erased with the last."""

import asyncio
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest
from sqlalchemy import Connection
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine

from app.core.run.events import RunSucceeded
from app.store.protocol import PROCESS, ContentQuery, Entry, Store
from app.store.rows import content
from app.store.rows.texts import count_unused
from app.store.sql import SqlStore
from app.store.sqlkit.runner import parse_url
from app.store.writing.batch import RowCache, apply_to_cached_rows, commit, conditional_write, encode
from tests.conformance.conversations import answer, contents_of, converse, only_tools, turn
from tests.conformance.entries import Opener, gather_outcomes
from tests.conformance.test_store_retention import find_rest_of
from tests.harness.waiting import PATIENCE_SECONDS


async def rows(store: SqlStore) -> dict[str, int]:
    def count(conn: Connection) -> dict[str, int]:
        tables = ("contents", "shared_contents", "texts")
        return {name: conn.exec_driver_sql(f"SELECT count(*) FROM {name}").scalar_one() for name in tables}

    return await store._read(count)


async def complete(store: Store, run: str, turns: int, name: str = "") -> bool:
    """True if a run has all of its contents."""
    expected = contents_of(run, turns, name)
    return await store.contents(run, list(expected)) == expected


async def test_turns_share_their_texts_and_each_is_read_as_it_was_written(opener: Opener) -> None:
    async with opener() as store, opener() as other:
        runs = await converse(store, 5)
        for number, run in enumerate(runs, 1):
            assert await complete(other, run, number)
        messages = 5 + 5  # questions, the first one with the instructions, and answers
        assert await rows(store) == {"contents": 0, "shared_contents": 10, "texts": messages + 1}


async def test_two_conversations_share_their_beginning_and_two_owners_nothing(opener: Opener) -> None:
    async with opener() as store, opener() as other:
        await converse(store, 3)
        alone = (await rows(store))["texts"]
        await store.append(turn("branch", 3))
        assert (await rows(store))["texts"] == alone
        await store.append(turn("foreign", 3, owner="0b" * 32))
        assert (await rows(store))["texts"] == 2 * alone - 1, "but for the answer, which it has not got yet"
        assert await complete(other, "3", 3)


@pytest.mark.parametrize("order", [(0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)])
async def test_an_erasure_deletes_the_texts_that_no_other_run_names(opener: Opener, order: Sequence[int]) -> None:
    async with opener() as store, opener() as other:
        runs = await converse(store, 4)
        left = dict(zip(runs, range(1, 5), strict=True))
        for place in order:
            assert await store.erase_contents([runs[place]]) == 1
            del left[runs[place]]
            for run, number in left.items():
                assert await complete(other, run, number)
            assert await other._read(count_unused) == 0
            assert await other.contents(runs[place], list(contents_of(runs[place], place + 1))) == {}
            longest = max(left.values(), default=0)
            assert (await rows(store))["texts"] == (2 * longest + 1 if longest else 0)
        assert await rows(store) == {"contents": 0, "shared_contents": 0, "texts": 0}


async def test_branches_that_are_erased_together_leave_nothing(opener: Opener) -> None:
    async with opener() as store:
        await converse(store, 3)
        for name in ("left", "right"):
            await store.append(turn(name, 3, name))
        assert await store.erase_contents(["1", "2", "3", "left", "right"]) == 5
        assert await rows(store) == {"contents": 0, "shared_contents": 0, "texts": 0}


async def test_pruning_a_run_deletes_the_texts_that_no_other_run_names(opener: Opener) -> None:
    async with opener() as store, opener() as other:
        runs = await converse(store, 3)
        for run in runs:
            await store.append(Entry(run, 4.0, (RunSucceeded(),), epoch=1))
        assert await store.prune([await find_rest_of(store, run) for run in runs[:2]]) == runs[:2]
        assert await complete(other, "3", 3)
        assert await store.prune([await find_rest_of(store, "3")]) == ["3"]
        assert await rows(store) == {"contents": 0, "shared_contents": 0, "texts": 0}


async def test_nothing_is_stored_of_a_run_that_was_erased_while_it_went_on(opener: Opener) -> None:
    async with opener() as store, opener() as other:
        await store.append(turn("run", 3))
        assert await other.erase("run")
        await store.append(answer("run", 3))
        assert await rows(store) == {"contents": 0, "shared_contents": 0, "texts": 0}


async def test_runs_are_found_by_a_user_whose_task_is_in_parts(store: SqlStore) -> None:
    await converse(store, 3)
    assert (await store.runs_with_content(ContentQuery(user="ann"))).runs
    assert not (await store.runs_with_content(ContentQuery(user="bob"))).runs


async def test_contents_are_whole_while_a_process_of_the_release_before_may_read_them(opener: Opener) -> None:
    async with opener() as store:
        await store._write(lambda conn: conn.exec_driver_sql("UPDATE forms SET since = 5"))
        await converse(store, 3)
        assert await rows(store) == {"contents": 6, "shared_contents": 0, "texts": 0}
        await store.append(turn("later", 3, at=5.0))
        assert (await rows(store))["shared_contents"] == 1
        assert await complete(store, "3", 3)


@pytest.mark.long
async def test_turns_that_begin_while_others_are_erased_lose_nothing(opener: Opener) -> None:
    """Several processes write turns of one conversation, and erase them at once."""
    chance = random.Random(7)
    async with opener() as first_store, opener() as second_store:
        live_runs: dict[str, int] = {}
        for wave in range(4):
            turns = {f"{wave}-{n}": chance.randint(1, 6) for n in range(6)}
            doomed = [run for run in live_runs if chance.random() < 0.7]
            writes = [
                chance.choice((first_store, second_store)).append(turn(run, number)) for run, number in turns.items()
            ]
            erasures = [
                store.erase_contents(doomed[place::2]) for place, store in enumerate((first_store, second_store))
            ]
            both: list[Awaitable[Any]] = [*writes, *erasures]
            chance.shuffle(both)
            assert not [outcome for outcome in await gather_outcomes(both) if isinstance(outcome, Exception)]
            live_runs = {run: number for run, number in (live_runs | turns).items() if run not in doomed}
            async with opener() as fresh:
                for run, number in live_runs.items():
                    expected = dict(turn(run, number).contents)
                    assert await fresh.contents(run, list(expected)) == expected
            assert await first_store._read(count_unused) == 0
        await first_store.erase_contents(list(live_runs))
        assert await rows(first_store) == {"contents": 0, "shared_contents": 0, "texts": 0}


@asynccontextmanager
async def disposing(engine: AsyncEngine) -> AsyncIterator[AsyncEngine]:
    try:
        yield engine
    finally:
        await engine.dispose()


Work = Callable[[Connection], object]


def transaction_of(store: SqlStore, entry: Entry, *, optimistic: bool) -> Work:
    """The work of a commit of this entry alone."""
    batch = [encode(entry)]
    if not optimistic:
        return partial(commit, statements=store._statements, batch=batch)
    speculative = apply_to_cached_rows(batch, RowCache())
    assert speculative is not None
    return conditional_write(store._statements, speculative)


async def a_lock_is_waited_for(store: SqlStore) -> None:
    def waiting(conn: Connection) -> int:
        query = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND NOT granted"
        return int(conn.exec_driver_sql(query).scalar_one())

    async with asyncio.timeout(PATIENCE_SECONDS):
        while not await store._read(waiting):
            pass


@pytest.mark.parametrize("way", ["statement", "transaction", "tools"])
@pytest.mark.parametrize("first", ["erasure", "turn"])
async def test_a_turn_and_an_erasure_wait_for_each_other(opener: Opener, database: str, first: str, way: str) -> None:
    """Whichever commits first: the turn has all of its texts, and none is left that nobody names."""
    if database.startswith("sqlite"):
        pytest.skip("SQLite has one writer at a time")
    async with disposing(create_async_engine(parse_url(database))) as engine, opener() as store, opener() as other:
        old, new = (only_tools("old"), only_tools("new")) if way == "tools" else (turn("old", 3), turn("new", 4))
        await store.append(old)
        begin_turn = transaction_of(store, new, optimistic=way != "transaction")
        erased: Work = partial(
            content.erase,
            statements=store._statements,
            runs=["old"],
            decrypt=store._decrypt,
            cause="operator",
            by=PROCESS,
        )
        works = {"erasure": erased, "turn": begin_turn}
        (second,) = works.keys() - {first}
        async with engine.connect() as conn:
            await conn.begin()
            await conn.run_sync(works[first])
            waiting = asyncio.ensure_future(other._runner.write(works[second]))
            await a_lock_is_waited_for(store)
            assert not waiting.done()
            await conn.commit()
        await waiting
        expected = dict(new.contents)
        assert await store.contents("new", list(expected)) == expected
        assert await store._read(count_unused) == 0
        assert (await rows(store))["shared_contents"] == 1
