"""Where the driver is another process, a step's end travels with what follows from it all the same: its dispatcher
writes that ahead of the driver, unless anybody has written anything that it has not heard of.

Two houses over one database stand for two processes.
"""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from app.core.run.events import Kind, fact_from_json
from app.engine.commit.speculative import Ahead
from app.engine.steps import execution
from app.process.wiring import House
from app.stepqueue.protocol import Committed
from app.store.protocol import Appended, Entry, StepInput
from tests.harness.conversations import Talk, calling, look
from tests.harness.in_process import Outcome, events, finish, kinds, of, open_house, order, plan, pool_text
from tests.stubs import ProviderStub, Reply

ONE_TWO_ONE = plan(
    ("alpha", "one", ["user"]), ("beta", "two", ["user", 0]), ("gamma", "three", ["user", 0]), ("alpha", "all", [1, 2])
)
CHAIN = plan(("alpha", "one", ["user"]), ("beta", "two", ["user", 0]))
TWO_CHAINS = plan(
    ("alpha", "one", ["user"]), ("gamma", "slow", ["user"]), ("beta", "two", [0]), ("alpha", "all", [1, 2])
)
QUEUED, INTENDED = Kind.STEP_QUEUED, Kind.CALL_INTENDED
DONE = [Kind.CALL_FINISHED, Kind.STEP_DONE]


@dataclass
class Two:
    """A process that drives and one that executes; what each has asked its store to write, and to read."""

    driving: House
    other: House
    written: dict[str, list[list[Kind]]] = field(default_factory=lambda: {"driving": [], "other": []})
    entries: list[Entry] = field(default_factory=list)
    read: list[str] = field(default_factory=list)

    def ends(self) -> list[Entry]:
        """The entries with which it was tried to end a step."""
        return [entry for entry in self.entries if [draft.kind for draft in entry.events][:2] == DONE]

    def watch(self, name: str, house: House) -> None:
        store = house.means.store
        append, contents, step_input = store.append, store.contents, store.step_input

        async def noted(entry: Entry) -> Appended:
            self.written[name].append([draft.kind for draft in entry.events])
            self.entries.append(entry)
            return await append(entry)

        async def read(run: str, refs: list[str]) -> object:
            self.read.append(f"{name}: contents")
            return await contents(run, refs)

        async def opened(run: str, after: int = 0) -> object:
            self.read.append(f"{name}: step_input after {after}" if after else f"{name}: step_input")
            return await step_input(run, after)

        store.append = noted  # type: ignore[method-assign]
        store.contents = read  # type: ignore[method-assign, assignment]
        store.step_input = opened  # type: ignore[method-assign, assignment]


@asynccontextmanager
async def two(folder: Path, stub: ProviderStub, redis: str, lease: float = 5.0) -> AsyncIterator[Two]:
    settings = {"BATON_LEASE_SECONDS": str(lease), "BATON_REDIS_URL": redis}
    async with (
        open_house(folder, pool_text(stub), settings) as other,
        open_house(folder, pool_text(stub), settings, dispatches=False) as driving,
    ):
        driving.drivers.beside = None
        async with asyncio.timeout(5):
            while driving.drivers._group is None or other.drivers._group is None:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
        both = Two(driving, other)
        both.watch("driving", driving)
        both.watch("other", other)
        yield both


@asynccontextmanager
async def talking(folder: Path, stub: ProviderStub, redis: str) -> AsyncIterator[tuple[Two, Talk]]:
    """A conversation of three turns, two of which end with a call of a tool."""
    stub.script("alpha", calling(look("a")), calling(look("b")), Reply(chunks=("It is ", "42.")))
    async with two(folder, stub, redis) as both:
        yield both, Talk(both.driving)


async def run(both: Two, steps: object) -> Outcome:
    return await finish(await both.driving.drivers.start(order(both.driving, "baton-ultra", plan=steps)))


async def test_a_workflow_costs_its_driver_one_entry(stub: ProviderStub, tmp_path: Path, redis_url: str) -> None:
    stub.script("alpha", Reply(chunks=("One.",)), Reply(chunks=("Four.",)))
    stub.always("beta", Reply(chunks=("Two.",)))
    stub.always("gamma", Reply(chunks=("Three.",), header_delay=0.2))
    heard: list[str] = []
    async with two(tmp_path, stub, redis_url) as both:
        both.driving.means.store.accept_rows = lambda run, _rows: heard.append(run)  # type: ignore[method-assign]
        outcome = await run(both, ONE_TWO_ONE)
    assert (outcome.ended.answer, outcome.ended.error) == ("Four.", None)
    assert heard == [outcome.ended.state.run] * 5
    assert len(both.written["driving"]) == 1
    assert both.written["other"] == [
        [INTENDED],
        [*DONE, QUEUED, QUEUED, INTENDED, INTENDED],
        DONE,  # nothing follows while the other one is still running
        [*DONE, QUEUED, INTENDED],
        [*DONE, Kind.SUCCEEDED],
    ]
    assert both.read == ["other: step_input"]


async def test_what_others_have_written_meanwhile_is_heard_before_anything_follows(
    stub: ProviderStub, tmp_path: Path, redis_url: str
) -> None:
    """Somebody asks for the end of the run, which the dispatcher is not told."""
    stub.always("alpha", Reply(header_delay=0.4))
    async with two(tmp_path, stub, redis_url) as both:
        driven = await both.driving.drivers.start(order(both.driving, "baton-ultra", plan=CHAIN))
        await stub.wait_for(1)
        asked = fact_from_json(Kind.CANCEL_ASKED, {"by": "client"})
        await both.driving.means.store.append(Entry(driven.run, both.driving.means.now(), (asked,)))
        outcome = await finish(driven)
        journal = kinds(await events(both.driving, driven.run))
    assert outcome.ended.state.state == "cancelled"
    assert journal.count(QUEUED) == 1
    assert [entry.seq is None for entry in both.ends()] == [False, True]


async def test_nothing_is_written_under_the_epoch_of_a_driver_that_lost_its_run(
    stub: ProviderStub, tmp_path: Path, redis_url: str
) -> None:
    stub.always("alpha", Reply(header_delay=0.3))
    async with two(tmp_path, stub, redis_url) as both:
        driven = await both.driving.drivers.start(order(both.driving, "baton-ultra", plan=CHAIN))
        await stub.wait_for(1)
        now, code = both.driving.means.now(), both.driving.means.code
        assert await both.other.means.store.take_over("another", now + 100, now + 200, 10, [("baton-ultra", code)])
        for _ in range(100):
            await asyncio.sleep(0.05)
            if Kind.STEP_DONE in kinds(journal := await events(both.driving, driven.run)):
                break
    assert [entry.epoch for entry in both.ends()] == [1, None]
    assert kinds(journal).count(QUEUED) == 1


async def test_a_turn_ends_with_its_tool_calls_in_the_entry_that_brings_them(
    stub: ProviderStub, tmp_path: Path, redis_url: str
) -> None:
    async with talking(tmp_path, stub, redis_url) as (both, talk):
        for result in ("A", "B"):
            both.read.clear()
            outcome = await talk.say()
            assert outcome.ended.state.state == "awaiting_tool"
            assert both.written["other"][-1] == [Kind.CALL_FINISHED, Kind.STEP_AWAITING, Kind.AWAITING]
            assert both.written["driving"][-1][0] in (Kind.ADMITTED, Kind.RESUMED)
            assert "driving: contents" not in both.read
            talk.answer(outcome, result)
        assert (await talk.say()).ended.answer == "It is 42."
        row = await both.driving.means.store.run(outcome.ended.state.run)
    assert len(both.written["driving"]) == 3
    assert (row.state, row.held.usd) == ("succeeded", 0)


async def test_a_turn_is_read_from_where_the_one_before_it_ended(
    stub: ProviderStub, tmp_path: Path, redis_url: str
) -> None:
    async with talking(tmp_path, stub, redis_url) as (both, talk):
        for result in ("A", "B"):
            talk.answer(outcome := await talk.say(), result)
            both.read.clear()
        assert (await talk.say()).ended.answer == "It is 42."
        seqs = [
            event.seq for event in await events(both.driving, outcome.ended.state.run) if event.kind is Kind.AWAITING
        ]
        assert both.read == [f"other: step_input after {seqs[-1]}"]
    told = [message for message in stub.requests[-1].json["messages"] if message["role"] == "tool"]
    assert [message["content"] for message in told] == ["A", "B"]


async def test_what_was_erased_meanwhile_is_shown_to_nobody(
    stub: ProviderStub, tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step of it is still executed here, so that its texts are at hand."""
    monkeypatch.setattr(Ahead, "_follows", lambda *_: None)  # the driver queues the last step, and it is read anew
    stub.always("alpha", Reply(header_delay=1.0))
    steps = plan(("alpha", "one", ["user"]), ("beta", "two", ["user"]), ("gamma", "three", ["user", 1]))
    async with two(tmp_path, stub, redis_url) as both:
        step_input = both.other.means.store.step_input

        async def erased(run: str, after: int = 0) -> StepInput:
            if after:
                await both.driving.means.store.erase(run)
            return await step_input(run, after)

        monkeypatch.setattr(both.other.means.store, "step_input", erased)
        driven = await both.driving.drivers.start(order(both.driving, "baton-ultra", plan=steps))
        await finish(driven)
        journal = await events(both.driving, driven.run)
    assert [failed["error"] for failed in of(journal, Kind.STEP_FAILED, n=2)] == ["content_erased"]
    assert stub.of("gamma") == []


@pytest.mark.parametrize("said", ["another text", "Hello there. "])
async def test_a_text_that_is_not_what_its_ref_says_is_read_instead(
    stub: ProviderStub, tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, said: str
) -> None:
    told = execution.told

    def lying(*given: object) -> Committed:
        true = told(*given)  # type: ignore[arg-type]
        return Committed(true.run, true.events, true.rows, tuple([(ref, said) for ref, _ in true.contents]))

    monkeypatch.setattr(execution, "told", lying)
    async with two(tmp_path, stub, redis_url) as both:
        assert (await run(both, CHAIN)).ended.answer == "Hello there."
    assert "driving: contents" in both.read


async def test_a_cancellation_that_comes_after_the_end_changes_nothing(
    stub: ProviderStub, tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The driver has not heard that a dispatcher has ended its run, and sees it in the journal."""

    async def unheard(*_: object, **__: object) -> None:
        return None

    async with two(tmp_path, stub, redis_url) as both:
        monkeypatch.setattr(both.other.means.queue, "tell", unheard)
        driven = await both.driving.drivers.start(order(both.driving, "baton-mini"))
        async with asyncio.timeout(5):
            while Kind.SUCCEEDED not in kinds(await events(both.other, driven.run)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        both.driving.drivers.cancel(driven.run, "client")
        outcome = await finish(driven)
        journal = kinds(await events(both.other, driven.run))
    assert (outcome.ended.answer, outcome.ended.error, outcome.ended.state.state) == ("Hello there.", None, "succeeded")
    assert journal[-1] is Kind.SUCCEEDED


async def test_a_driver_that_is_behind_decides_nothing_that_was_decided_ahead_of_it(
    stub: ProviderStub, tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It hears of a step's end, and not of the next step, which others have queued and begun upon it."""

    async def unheard(*_: object, **__: object) -> None:
        return None

    stub.always("gamma", Reply(header_delay=1.0))
    async with two(tmp_path, stub, redis_url) as both:
        monkeypatch.setattr(both.other.means.queue, "tell", unheard)
        driven = await both.driving.drivers.start(order(both.driving, "baton-ultra", plan=TWO_CHAINS))
        async with asyncio.timeout(5):
            while Kind.STEP_DONE not in (journal := kinds(told := await events(both.other, driven.run))):  # noqa: ASYNC110
                await asyncio.sleep(0.02)
        upto = journal.index(Kind.STEP_DONE) + 1
        assert QUEUED in journal[upto:]
        both.driving.drivers._drivers[driven.run].inbox.push(Committed(driven.run, tuple(told[:upto])))
        outcome = await finish(driven)
        told = await events(both.other, driven.run)
    assert (outcome.ended.answer, outcome.ended.error) == ("Hello there.", None)
    assert [event.body["n"] for event in told if event.kind is QUEUED] == [0, 1, 2, 3]
