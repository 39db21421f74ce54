"""The database goes away under runs and comes back: nothing is called that could not be recorded, and nothing that was
called is forgotten."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import pytest

from app.core.run.events import Kind
from app.core.run.fold import fold
from app.engine.commit import run_writer
from app.engine.delivery.messages import FollowedRun
from app.engine.runs import driver
from app.engine.steps import claimed_step
from app.engine.steps.claimed_step import PendingOutcomes
from app.errors import StoreUnavailable
from app.process.wiring import Runtime
from app.store.protocol import AppendResult, Entry, Store
from app.store.sql import SqlStore
from app.store.sqlkit.runner import Fault
from app.telemetry import Telemetry
from tests.harness.in_process import events, finish, kinds, limits_with, order, plan, pool_text, running_service
from tests.harness.waiting import PATIENCE_SECONDS, assert_stays, let_others_run, until
from tests.stubs import Fail, ProviderStub, Reply

LEASE = 0.6
REFUSED = 10
"""Requests that are refused one after the other."""
GROUP_PATIENCE = 5.0
"""Seconds for which one of them would wait for the database, did the store not know that it is away."""
LONG_DELAY = 0.3
"""The seconds for which some outcomes wait before others come."""
SETTINGS = {"BATON_LEASE_SECONDS": str(LEASE)}
CHAIN = plan(("alpha", "Begin.", ["user"]), ("beta", "Go on.", ["user", 0]))


@contextmanager
def away(runtime: Runtime) -> Iterator[None]:
    """The database of a house can be neither read nor written."""
    runner = cast(SqlStore, runtime.context.store)._runner
    read_rows, write = runner.read, runner.write

    async def down(_: object, **_more: object) -> Any:
        raise Fault("down")

    runner.read = runner.write = down  # type: ignore[method-assign]
    try:
        yield
    finally:
        runner.read, runner.write = read_rows, write  # type: ignore[method-assign]


def metric(runtime: Runtime, name: str) -> float:
    lines = runtime.context.telemetry.exposition().decode().splitlines()
    return float(next(line.rpartition(" ")[2] for line in lines if line.startswith(f"{name} ")))


async def came_to(runtime: Runtime, followed_run: FollowedRun) -> list[str | None]:
    """Return the outcomes of the calls, in the order in which they were made."""
    return [call.outcome for call in fold(await events(runtime, followed_run.run)).calls.values()]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.long
async def test_a_run_outlives_an_outage_longer_than_its_lease(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, streams: bool
) -> None:
    """It goes on as soon as the database is back: nobody lives to see the next look at the database."""
    monkeypatch.setattr(claimed_step, "HEALTH_WAIT_SECONDS", 3600.0)
    stub.script("alpha", Reply(header_delay=0.3))
    async with running_service(tmp_path, pool_text(stub), SETTINGS) as runtime:
        followed_run = await runtime.runs.start(order(runtime, "baton-mini", plan=CHAIN, streams=streams))
        await stub.wait_for(1, "alpha")
        with away(runtime):
            await until(lambda: metric(runtime, "baton_outcomes_waiting") == 1)
            assert metric(runtime, "baton_outcomes_waiting_bytes") > 0
            await assert_stays(
                lambda: stub.requests_for("beta") == [], seconds=2 * LEASE
            )  # no call is made that cannot be recorded
        outcome = await finish(followed_run)
        assert (outcome.ended.error, outcome.ended.answer) == (None, "Hello there.")
        assert await came_to(runtime, followed_run) == ["ok", "ok"]
        assert metric(runtime, "baton_outcomes_waiting") == 0


async def test_what_is_asked_of_it_meanwhile_is_refused_at_once(stub: ProviderStub, tmp_path: Path) -> None:
    async with running_service(tmp_path, pool_text(stub), SETTINGS) as runtime:
        store = runtime.context.store
        with away(runtime):
            with pytest.raises(StoreUnavailable):
                await store.ready()
            assert (store.healthy, store.seconds_since_recovery) == (False, 0.0)
            async with asyncio.timeout(REFUSED * GROUP_PATIENCE / 2):  # none of them waits for the database
                for _ in range(REFUSED):
                    with pytest.raises(StoreUnavailable) as refused:
                        await runtime.runs.start(order(runtime, "baton-mini"))
                    assert refused.value.retry_after
                    with pytest.raises(StoreUnavailable):
                        await store.key("a key")
        assert await store.wait_until_healthy(PATIENCE_SECONDS)
        assert 0 <= store.seconds_since_recovery < PATIENCE_SECONDS
        assert len(runtime.drivers) == 0
        assert (await finish(await runtime.runs.start(order(runtime, "baton-mini")))).ended.error is None
        assert len(stub.requests) == 1


@pytest.mark.long
async def test_the_outcome_of_a_failed_call_is_kept_too_and_its_step_goes_on(
    stub: ProviderStub, tmp_path: Path
) -> None:
    stub.script("alpha", Fail(status=500, delay=0.2))
    async with running_service(tmp_path, pool_text(stub), SETTINGS) as runtime:
        followed_run = await runtime.runs.start(order(runtime, "baton-mini"))
        await stub.wait_for(1, "alpha")
        with away(runtime):
            await until(lambda: metric(runtime, "baton_outcomes_waiting") == 1)
            await assert_stays(lambda: len(stub.requests) == 1, seconds=LEASE)
        assert (await finish(followed_run)).ended.error is None
        assert await came_to(runtime, followed_run) == ["error", "ok"]


async def test_a_planning_call_goes_on_and_is_settled(stub: ProviderStub, tmp_path: Path) -> None:
    stub.script(
        "planner", Reply(chunks=('{"steps": [{"worker": 0, "subtask": "Do.", "access": ["user"]}]}',), header_delay=0.3)
    )
    async with running_service(tmp_path, pool_text(stub), SETTINGS) as runtime:
        followed_run = await runtime.runs.start(order(runtime, "baton-ultra"))
        await stub.wait_for(1, "planner")
        with away(runtime):
            await asyncio.sleep(2 * LEASE)
        assert (await finish(followed_run)).ended.error is None
        assert await came_to(runtime, followed_run) == ["ok", "ok"]
        assert not (await runtime.context.store.run(followed_run.run)).degraded


async def test_an_outage_beyond_the_deadline_ends_the_run_as_expired(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_writer, "WRITE_GRACE_SECONDS", 0.2)
    monkeypatch.setattr(driver, "QUIESCE_SECONDS", 0.1)
    stub.script("alpha", Reply(header_delay=0.3))
    async with running_service(tmp_path, pool_text(stub), SETTINGS) as runtime:
        limits = limits_with(runtime, "baton-mini", seconds=2.0)
        followed_run = await runtime.runs.start(order(runtime, "baton-mini", plan=CHAIN, limits=limits))
        await stub.wait_for(1, "alpha")
        with away(runtime):
            await until(lambda: len(runtime.drivers) == 0, what="the driver has given its run up")
        assert (await finish(followed_run)).ended.state.state == "expired"
        assert await came_to(runtime, followed_run) == ["ok"]
        assert stub.requests_for("beta") == []


async def test_what_others_hold_is_left_to_them_for_a_lease_after_the_return(
    stub: ProviderStub, tmp_path: Path
) -> None:
    """Nobody could prolong anything, so everything has lapsed: whoever is back first must not take it all."""
    stub.always("alpha", Reply(header_delay=4 * LEASE))
    async with running_service(tmp_path, pool_text(stub), SETTINGS) as first:
        followed_run = await first.runs.start(order(first, "baton-mini"))
        await stub.wait_for(1, "alpha")
        async with running_service(tmp_path, pool_text(stub), SETTINGS) as second:
            with away(first):
                with away(second):
                    await asyncio.sleep(2 * LEASE)
                await asyncio.sleep(LEASE / 3)  # it comes back last, though it has more to lose
            assert (await finish(followed_run)).ended.error is None
            assert await came_to(first, followed_run) == ["ok"]
            assert (await first.context.store.run(followed_run.run)).epoch == 1
        assert len(stub.requests) == 1


async def commit_and_pretend(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, chosen: Callable[[Entry], bool]
) -> list[Entry]:
    """From now on the chosen entries are committed, and the first answer to each is that they were not."""
    append, entries = runtime.context.store.append, list[Entry]()

    async def commit_and_raise(entry: Entry) -> AppendResult:
        appended = await append(entry)
        if chosen(entry) and not any(entry is written for written in entries):
            entries.append(entry)
            raise StoreUnavailable
        return appended

    monkeypatch.setattr(runtime.context.store, "append", commit_and_raise)
    return entries


@pytest.mark.parametrize("tier", ["baton-mini", "baton-ultra"])
async def test_a_drivers_entry_that_was_committed_unheard_is_not_written_twice(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, tier: str
) -> None:
    stub.script("planner", Reply(chunks=('{"steps": [{"worker": 0, "subtask": "Do.", "access": ["user"]}]}',)))
    async with running_service(tmp_path, pool_text(stub), SETTINGS) as runtime:
        entries = await commit_and_pretend(
            runtime, monkeypatch, lambda entry: entry.new is None and entry.move is None and bool(entry.events)
        )
        followed_run = await runtime.runs.start(order(runtime, tier))
        assert (await finish(followed_run)).ended.error is None
        journal = kinds(await events(runtime, followed_run.run))
        once = (Kind.PLAN_ACCEPTED, Kind.STEP_QUEUED, Kind.STEP_DONE, Kind.SUCCEEDED)
        assert [journal.count(kind) for kind in once] == [1] * len(once)
        assert bool(entries) == (tier == "baton-ultra")


async def test_an_outcome_that_was_committed_unheard_is_not_written_twice(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It travels with the intent of the next call, which is then never made: `unknown`, and possibly billed."""
    stub.script("alpha", Fail(status=500))

    def next_intent(entry: Entry) -> bool:
        outcomes = [(draft.kind, draft.to_json().get("outcome")) for draft in entry.events]
        return outcomes == [(Kind.CALL_FINISHED, "error"), (Kind.CALL_INTENDED, None)]

    async with running_service(tmp_path, pool_text(stub), SETTINGS) as runtime:
        entries = await commit_and_pretend(runtime, monkeypatch, next_intent)
        followed_run = await runtime.runs.start(order(runtime, "baton-mini"))
        assert (await finish(followed_run)).ended.error is None
        assert len(entries) == 1
        assert await came_to(runtime, followed_run) == ["error", "unknown", "ok"]
        assert len(stub.requests) == 2


class Shelf:
    """A database that can be told to be away."""

    def __init__(self) -> None:
        self.there = asyncio.Event()
        self.written: list[int] = []

    @property
    def healthy(self) -> bool:
        return self.there.is_set()

    async def wait_until_healthy(self, seconds: float) -> bool:
        try:
            async with asyncio.timeout(seconds):
                await self.there.wait()
        except TimeoutError:
            return False
        return True

    def append(self, number: int) -> Callable[[], Awaitable[None]]:
        async def write() -> None:
            if not self.healthy:
                raise StoreUnavailable
            self.written.append(number)

        return write


def outcome(size: int = 0) -> Entry:
    return Entry("run", 0.0, contents=(("ref", b"x" * size),) if size else ())


@contextmanager
def open_buffer(shelf: Shelf, **bounds: int) -> Iterator[tuple[PendingOutcomes, list[int]]]:
    """Outcomes over a shelf, and their depth whenever it changed."""
    depths: list[int] = []
    telemetry = Telemetry()
    buffer = PendingOutcomes(
        cast(Store, shelf), telemetry, monotonic=time.monotonic, freed=lambda: depths.append(len(buffer)), **bounds
    )
    yield buffer, depths


async def test_outcomes_are_written_in_the_order_in_which_they_came() -> None:
    shelf = Shelf()
    with open_buffer(shelf) as (buffer, depths):
        async with asyncio.TaskGroup() as group:
            group.create_task(buffer.keep())
            writing = []
            for number in range(200):
                writing.append(group.create_task(buffer.write_later(outcome(), shelf.append(number))))
                if number % 50 == 0:
                    await asyncio.sleep(LONG_DELAY)  # some have been waiting for long, and were woken in vain
                    shelf.there.set()
                    shelf.there.clear()
            await asyncio.sleep(0)
            assert len(buffer) == 200
            shelf.there.set()
            await asyncio.wait(writing)
            buffer.close()
        assert shelf.written == list(range(200))
        assert (max(depths), depths[-1]) == (200, 0)


@pytest.mark.parametrize("bounds", [{"entries": 3}, {"size": 3 * 10_000}])
async def test_a_full_buffer_stops_new_steps_and_loses_nothing(bounds: dict[str, int]) -> None:
    shelf = Shelf()
    with open_buffer(shelf, **bounds) as (buffer, depths):
        async with asyncio.TaskGroup() as group:
            group.create_task(buffer.keep())
            writing = [group.create_task(buffer.write_later(outcome(10_000), shelf.append(n))) for n in range(5)]
            await until(lambda: buffer.full)
            await let_others_run()
            assert (buffer.full, len(buffer)) == (True, 3), "the others keep their slots"
            shelf.there.set()
            await asyncio.wait(writing)
            buffer.close()
        assert shelf.written == list(range(5))
        assert max(depths) == 3
        assert not buffer.full


@pytest.mark.parametrize("closes", [False, True])
async def test_an_outcome_is_given_up_after_its_time_or_with_its_process(
    monkeypatch: pytest.MonkeyPatch, closes: bool
) -> None:
    monkeypatch.setattr(claimed_step, "OUTCOME_WAIT_SECONDS", 60.0 if closes else 0.2)
    shelf = Shelf()
    with open_buffer(shelf) as (buffer, _):
        async with asyncio.TaskGroup() as group:
            group.create_task(buffer.keep())
            writing = group.create_task(is_refused(buffer.write_later(outcome(), shelf.append(1))))
            await until(lambda: len(buffer) == 1)
            if closes:
                buffer.close()
            assert await writing
            buffer.close()
        assert (shelf.written, len(buffer)) == ([], 0)


async def is_refused(call: Awaitable[None]) -> bool:
    try:
        await call
    except StoreUnavailable:
        return True
    return False
