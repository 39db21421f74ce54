"""Gateways admit and follow, engines drive: what each writes, what an engine takes, and what happens without the queue.

Houses over one database stand for processes: one that is a gateway alone, and one that is an engine as well.
"""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from msgspec.structs import replace

from app.core.pool.catalog import Amount
from app.core.run.events import Kind, RunAdmitted
from app.engine.delivery.messages import FollowedRun
from app.engine.runs.client import Cancellations
from app.engine.runs.driver import Driver
from app.engine.runs.registry import Drivers
from app.errors import OverQuota, QueueUnavailable, RunUndecided, StoreUnavailable
from app.process.wiring import Runtime
from app.stepqueue.protocol import ListenRequest, Live
from app.stepqueue.redis import RedisQueue
from app.store.protocol import UNDECIDED, AppendResult, Entry, Outbox, RunQuery, TicketMove
from tests.harness.conversations import Conversation, look_call, tool_call_reply
from tests.harness.in_process import (
    LONG_LEASE,
    Outcome,
    ask,
    client_of,
    events,
    finish,
    kinds,
    order,
    plan,
    pool_text,
    running_service,
)
from tests.harness.raw_facts import fact_from_json
from tests.harness.waiting import PATIENCE_SECONDS, until
from tests.stubs import Hang, ProviderStub, Reply

pytestmark = pytest.mark.usefixtures("patient_redis")

ONE_TWO_ONE = plan(
    ("alpha", "one", ["user"]), ("beta", "two", ["user", 0]), ("gamma", "three", ["user", 0]), ("alpha", "all", [1, 2])
)
LEASE = 1.0


@dataclass
class Two:
    """A gateway and an engine; which kinds of events each has asked its store to write, entry by entry."""

    gateway: Runtime
    engine: Runtime
    written: dict[str, list[list[Kind]]] = field(default_factory=lambda: {"gateway": [], "engine": []})

    def watch(self, name: str, runtime: Runtime) -> None:
        append = runtime.context.store.append

        async def noted(entry: Entry) -> AppendResult:
            self.written[name].append([draft.kind for draft in entry.events])
            return await append(entry)

        runtime.context.store.append = noted  # type: ignore[method-assign]

    async def run(self, tier: str = "baton-mini", **changes: object) -> FollowedRun:
        return await self.gateway.runs.start(order(self.gateway, tier, **changes))


@asynccontextmanager
async def two(folder: Path, stub: ProviderStub, redis: str, **settings: str) -> AsyncIterator[Two]:
    environ = {"BATON_LEASE_SECONDS": str(LEASE), "BATON_REDIS_URL": redis} | settings
    async with (
        running_service(folder, pool_text(stub), environ) as engine,
        running_service(folder, pool_text(stub), environ, drives=False) as gateway,
    ):
        both = Two(gateway, engine)
        await until(lambda: engine.drivers.has_room and gateway.context.queue.healthy)
        both.watch("gateway", gateway)
        both.watch("engine", engine)
        yield both


@pytest.mark.integration
@pytest.mark.long
async def test_a_gateway_writes_the_admission_and_nothing_else(
    stub: ProviderStub, tmp_path: Path, redis_url: str
) -> None:
    async with two(tmp_path, stub, redis_url) as both:
        outcome = await finish(await both.run("baton-ultra", plan=ONE_TWO_ONE))
    assert outcome.ended.error is None
    assert both.written["gateway"] == [[Kind.ADMITTED]]
    assert both.written["engine"][0][-2:] == [Kind.STEP_QUEUED, Kind.CALL_INTENDED]
    assert len(both.written["engine"]) == 1 + 4, "the entry that takes the run, and one for each step's end"


@pytest.mark.integration
async def test_the_words_of_an_answer_are_sent_to_the_gateway_as_they_come(
    stub: ProviderStub, tmp_path: Path, redis_url: str
) -> None:
    stub.always("alpha", Reply(chunks=("One ", "two ", "three."), gap=0.05))
    async with two(tmp_path, stub, redis_url) as both:
        outcome = await finish(await both.run(streams=True, stream_steps=True))
    assert "".join(outcome.texts) == "One two three."
    assert len(outcome.texts) >= 3
    assert [event.kind for event in outcome.step_events][:2] == ["plan.step", "plan.accepted"]


@pytest.mark.integration
@pytest.mark.long
async def test_a_next_turn_goes_to_the_engine_that_holds_the_state_of_the_run(
    stub: ProviderStub, tmp_path: Path, redis_url: str
) -> None:
    stub.script("alpha", tool_call_reply(look_call("a")), Reply(chunks=("It is 42.",)))
    async with two(tmp_path, stub, redis_url) as both:
        conversation = Conversation(both.gateway)
        conversation.add_results(await conversation.take_turn(), "A")
        await until(lambda: not len(both.engine.drivers))
        both.written["gateway"].clear()
        reads: list[str] = []
        step_input, journal = both.engine.context.store.step_input, both.engine.context.store.journal

        async def noted(run: str, after: int = 0) -> object:
            reads.append(run)
            return await step_input(run, after)

        async def also(run: str, upto: int | None = None, after: int = 0) -> object:
            reads.append(run)
            return await journal(run, upto, after)

        both.engine.context.store.step_input = noted  # type: ignore[method-assign, assignment]
        both.engine.context.store.journal = also  # type: ignore[method-assign, assignment]
        outcome = await conversation.take_turn()
    assert outcome.ended.answer == "It is 42."
    assert both.written["gateway"] == [[Kind.RESUMED, Kind.STEP_RESULTS]]
    assert reads == [], "the engine has folded the run's former turns already"


@pytest.mark.integration
@pytest.mark.parametrize("is_old", [True, False], ids=["0.1.0", "present"])
@pytest.mark.long
async def test_a_next_turn_of_a_run_of_0_1_0_has_the_tickets_for_which_its_processes_wait(
    stub: ProviderStub, tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, is_old: bool
) -> None:
    """A process of 0.1.0 that takes such a run over queues no step that has tool results. An engine of this release
    queues them, and uses the ticket that is there."""
    monkeypatch.setattr(RunAdmitted, "is_from_0_1_0", is_old)
    stub.script("alpha", tool_call_reply(look_call("a")), Reply(chunks=("It is 42.",)))
    async with two(tmp_path, stub, redis_url) as both:
        conversation = Conversation(both.gateway)
        conversation.add_results(await conversation.take_turn(), "A")
        tickets: list[Outbox] = []
        append = both.gateway.context.store.append

        async def noted(entry: Entry) -> AppendResult:
            tickets.extend(entry.outbox)
            return await append(entry)

        both.gateway.context.store.append = noted  # type: ignore[method-assign]
        outcome = await conversation.take_turn()
        run = outcome.ended.state.run
        assert await both.engine.context.store.find_ticket(run, 0) is None, "it was used"
    assert outcome.ended.answer == "It is 42."
    assert [(ticket.step, ticket.version) for ticket in tickets] == ([(0, 1)] if is_old else [])
    assert len(stub.requests_for("alpha")) == 2, "one call a turn"


@pytest.mark.integration
@pytest.mark.long
async def test_an_engine_takes_no_run_without_a_free_slot(stub: ProviderStub, tmp_path: Path, redis_url: str) -> None:
    stub.script("alpha", Hang())
    async with two(tmp_path, stub, redis_url, BATON_CONCURRENT_STEPS="1") as both:
        first = await both.run()
        await stub.wait_for(1, "alpha")
        second = await both.run()
        await until(lambda: len(both.written["gateway"]) == 2)
        for _ in range(2 * both.engine.pool.configuration.settings.concurrent_steps):
            await both.engine.drivers._recovery.sweep(both.engine.drivers.room, both.engine.drivers._renew)
        assert kinds(await events(both.gateway, second.run)) == [Kind.ADMITTED]
        both.gateway.runs.cancellations.ask(first.run, "caller")
        assert (await finish(first)).ended.state.state == "cancelled"
        assert (await finish(second)).ended.error is None, "it is taken as soon as there is a slot"


@pytest.mark.integration
@pytest.mark.long
async def test_a_gateway_refuses_runs_while_too_many_wait_for_an_engine(
    stub: ProviderStub, tmp_path: Path, redis_url: str
) -> None:
    settings = {"BATON_REDIS_URL": redis_url, "BATON_WAITING_RUNS": "2"}
    async with running_service(tmp_path, pool_text(stub), settings, drives=False, audits=False) as gateway:
        for _ in range(2):
            await gateway.runs.start(order(gateway, "baton-mini"))
        refusals: list[OverQuota] = []

        async def refused() -> bool:
            try:
                await gateway.runs.start(order(gateway, "baton-mini"))
            except OverQuota as error:
                refusals.append(error)
            return bool(refusals)

        await until(refused)
    (refusal,) = refusals
    assert (refusal.status, refusal.code) == (429, "rate_limit_exceeded")
    assert refusal.retry_after is not None
    assert refusal.retry_after > 0


async def test_requests_that_come_together_wait_for_one_count_of_the_runs_that_wait(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = []

    async with running_service(tmp_path, pool_text(stub), drives=False) as gateway:
        store, untaken = gateway.context.store, gateway.context.store.count_untaken_runs

        async def counted(now: float) -> Mapping[str, int]:
            counts.append(now)
            return await untaken(now)

        monkeypatch.setattr(store, "count_untaken_runs", counted)
        await asyncio.gather(*[gateway.runs.start(order(gateway, "baton-mini")) for _ in range(8)])
    assert len(counts) == 1


@pytest.mark.long
async def test_gateways_count_together_the_runs_that_wait_for_an_engine(stub: ProviderStub, tmp_path: Path) -> None:
    """Two gateways and no engine; what is refused leaves nothing, and is taken once there is an engine."""
    settings = {"BATON_WAITING_RUNS": "2"}
    async with (
        running_service(tmp_path, pool_text(stub), settings, drives=False) as gateway,
        running_service(tmp_path, pool_text(stub), settings, drives=False) as other,
        client_of(other) as client,
    ):
        waiting = [await gateway.runs.start(replace(order(gateway, "baton-mini"), tenant="acme")) for _ in range(2)]

        async def counted() -> bool:
            return await gateway.context.store.count_untaken_runs(gateway.context.now()) == {"acme": 2}

        await until(counted)
        reply = await ask(client)
        assert (reply.status_code, reply.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert int(reply.headers["retry-after"]) >= 1
        assert len(await other.context.store.runs(RunQuery())) == 2
        waiting.append(await other.runs.start(order(other, "baton-mini")))  # another tenant has its share
        async with running_service(tmp_path, pool_text(stub), settings):
            assert [(await finish(followed_run)).ended.error for followed_run in waiting] == [None, None, None]

            async def answered() -> bool:
                return (await ask(client)).status_code == 200

            await until(answered)


@pytest.fixture(params=["memory", pytest.param("redis", marks=pytest.mark.integration)])
def queue_settings(request: pytest.FixtureRequest) -> dict[str, str]:
    """Settings of a queue in the process, and of one over Redis."""
    return {"BATON_REDIS_URL": request.getfixturevalue("redis_url")} if request.param == "redis" else {}


@pytest.mark.long
async def test_a_flood_of_one_tenant_does_not_keep_anothers_run_waiting(
    stub: ProviderStub, tmp_path: Path, queue_settings: dict[str, str]
) -> None:
    """One slot, a flood of runs, then one run of another tenant: each tenant in turn has one taken."""
    stub.script("alpha", Hang())
    settings = {"BATON_CONCURRENT_STEPS": "1"} | queue_settings | LONG_LEASE  # nobody finds a run that waits for long
    async with running_service(tmp_path, pool_text(stub), settings) as engine:

        async def begin(tenant: str) -> FollowedRun:
            return await engine.runs.start(replace(order(engine, "baton-mini", tenant), tenant=tenant))

        first = await begin("flood")
        await stub.wait_for(1, "alpha")
        flood = [await begin("flood") for _ in range(30)]
        small = await begin("small")
        flood.append(await begin("flood"))
        engine.runs.cancellations.ask(first.run, "caller")
        assert (await finish(small)).ended.error is None
        assert [(await finish(followed_run)).ended.error for followed_run in flood] == [None] * 31
        questions = [str(request.json["messages"][-1]["content"]) for request in stub.requests_for("alpha")]
    assert len(questions) == 33
    assert questions.index("small") <= 1 + 2 + 1, (
        "the one that held the slot, one for each tenant, and one that was found"
    )


@pytest.mark.long
async def test_an_undecided_admission_is_cancelled_once_the_database_takes_its_gateways_wish(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The admission was committed unheard, and an engine has begun the run before its gateway can write again."""
    stub.always("alpha", Hang())
    async with (
        running_service(tmp_path, pool_text(stub)) as engine,
        running_service(tmp_path, pool_text(stub), drives=False) as gateway,
    ):
        append, away, tries = gateway.context.store.append, True, list[Entry]()

        async def unanswered(entry: Entry) -> AppendResult:
            if not away:
                return await append(entry)
            if entry.new is not None:
                await append(entry)
                raise StoreUnavailable(code=UNDECIDED)
            tries.append(entry)
            raise StoreUnavailable

        monkeypatch.setattr(gateway.context.store, "append", unanswered)
        with pytest.raises(RunUndecided):
            await gateway.runs.start(order(gateway, "baton-mini"))
        await stub.wait_for(1, "alpha")
        await until(lambda: len(tries) > 1)
        run, away, refused = tries[0].run, False, len(tries)

        async def ended() -> bool:
            return (await engine.context.store.run(run)).ended_at is not None

        await until(ended)
        journal = await events(engine, run)
    assert [event.body for event in journal if event.kind is Kind.CANCEL_ASKED] == [{"by": "client"}]
    assert journal[-1].kind is Kind.CANCELLED
    assert refused < 20, "it is tried about once a second, and not all the time"


@pytest.mark.integration
@pytest.mark.parametrize("queue", [True, False])
@pytest.mark.long
async def test_a_run_stops_whose_caller_has_left_its_gateway(
    stub: ProviderStub, tmp_path: Path, redis_url: str, monkeypatch: pytest.MonkeyPatch, queue: bool
) -> None:
    """A disconnect is a wish in the journal, so that it needs no queue."""
    stub.always("alpha", Hang())
    async with two(tmp_path, stub, redis_url) as both:
        followed_run = await both.run()
        await stub.wait_for(1, "alpha")
        if not queue:

            async def away(_self: RedisQueue, _address: str, _messages: Sequence[Live]) -> None:
                raise QueueUnavailable

            monkeypatch.setattr(RedisQueue, "publish", away)
        both.gateway.runs.leave(followed_run)

        async def ended() -> bool:
            return (await both.engine.context.store.run(followed_run.run)).ended_at is not None

        await until(ended)
        assert (await both.engine.context.store.run(followed_run.run)).state == "cancelled"
        journal = await events(both.engine, followed_run.run)
    (wish,) = [event for event in journal if event.kind is Kind.CANCEL_ASKED]
    assert wish.body == {"by": "client"}
    assert journal[-1].at - wish.at < 2.0


@pytest.mark.integration
@pytest.mark.long
async def test_with_spread_steps_every_step_is_executed_by_whoever_takes_its_ticket(
    stub: ProviderStub, tmp_path: Path, redis_url: str
) -> None:
    stub.always("alpha", Reply(chunks=("One ", "two ", "three."), gap=0.05))
    settings = {"BATON_LEASE_SECONDS": str(LEASE), "BATON_REDIS_URL": redis_url, "BATON_STEPS": "spread"}
    async with (
        running_service(tmp_path, pool_text(stub), settings) as first,
        running_service(tmp_path, pool_text(stub), settings) as other,
        running_service(tmp_path, pool_text(stub), settings, drives=False) as gateway,
    ):
        await until(lambda: first.drivers.has_room and other.drivers.has_room and gateway.context.queue.healthy)
        outcomes: list[Outcome] = []
        for _ in range(4):
            steps = plan(("beta", "one", ["user"]), ("alpha", "two", ["user", 0]))
            started = await gateway.runs.start(order(gateway, "baton-ultra", plan=steps, streams=True))
            outcomes.append(await finish(started))
    assert [outcome.ended.answer for outcome in outcomes] == ["One two three."] * 4
    assert all(len(outcome.texts) >= 3 for outcome in outcomes), "whoever executes a step sends its words itself"


async def outcomes_after_a_takeover(stub: ProviderStub, tmp_path: Path, **more: str) -> list[str]:
    """The outcomes of a step's calls, of which the first was claimed by an engine that has died; the claim would have
    lasted for a long time."""
    settings = {"BATON_LEASE_SECONDS": "60"} | more
    async with running_service(tmp_path, pool_text(stub), settings, dispatches=False, audits=False) as engine:
        followed_run = await engine.runs.start(order(engine, "baton-mini", on_disconnect="finish"))
        store, now = engine.context.store, engine.context.now()
        due = await store.find_ticket(followed_run.run, 0)
        assert due is not None
        body = {"call": "call_0", "n": 0, "worker": "alpha", "access": ["user"], "usd_held": 5, "tokens_held": 7}
        move = TicketMove(0, "take", version=due.version, holder="dead", until=now + 3600.0)
        intent = (fact_from_json(Kind.CALL_INTENDED, body),)
        await store.append(Entry(followed_run.run, now, intent, move=move, hold=Amount(5, 7)))
    # Its engine has died.
    with closing(sqlite3.connect(tmp_path / "baton.db", timeout=PATIENCE_SECONDS)) as database, database:
        database.execute("UPDATE runs SET driver = 'dead', lease_until = 0 WHERE id = ?", (followed_run.run,))
    async with running_service(tmp_path, pool_text(stub), settings, audits=False) as heir:

        async def ended() -> bool:
            return (await heir.context.store.run(followed_run.run)).ended_at is not None

        await until(ended)
        journal = await events(heir, followed_run.run)
    return [event.body["outcome"] for event in journal if event.kind is Kind.CALL_FINISHED]


async def test_an_engine_that_takes_over_settles_the_claims_of_the_one_that_is_gone(
    stub: ProviderStub, tmp_path: Path
) -> None:
    assert await outcomes_after_a_takeover(stub, tmp_path) == ["unknown", "ok"]


@pytest.mark.integration
@pytest.mark.long
async def test_an_engine_that_takes_over_by_a_ticket_settles_the_claims_of_the_one_that_is_gone(
    stub: ProviderStub, tmp_path: Path, redis_url: str
) -> None:
    """The engine that stopped has left the run's ticket in Redis."""
    assert await outcomes_after_a_takeover(stub, tmp_path, BATON_REDIS_URL=redis_url) == ["unknown", "ok"]


async def test_a_late_ticket_takes_no_run_from_an_engine_that_drives_it(stub: ProviderStub, tmp_path: Path) -> None:
    """The ticket of a run is delivered again, or comes after the run was found in the database."""
    stub.script("alpha", Hang())
    settings = {"BATON_LEASE_SECONDS": "60"}
    async with (
        running_service(tmp_path, pool_text(stub), settings) as engine,
        running_service(tmp_path, pool_text(stub), settings) as other,
    ):
        followed_run = await engine.runs.start(order(engine, "baton-mini"))
        await stub.wait_for(1, "alpha")
        assert await other.drivers.take(followed_run.run)
        row = await other.context.store.run(followed_run.run)
        assert (row.epoch, other.drivers.driver_of(followed_run.run)) == (1, None)
        engine.runs.cancellations.ask(followed_run.run, "caller")
        assert (await finish(followed_run)).ended.state.state == "cancelled"


@pytest.mark.long
async def test_a_late_ticket_takes_no_run_whose_driver_a_failover_has_ended(stub: ProviderStub, tmp_path: Path) -> None:
    """It is left to the sweep, which has the tickets of its steps report to the engine that takes it."""
    stub.script("alpha", Hang())
    settings = {"BATON_LEASE_SECONDS": "60"}
    async with (
        running_service(tmp_path, pool_text(stub), settings) as engine,
        running_service(tmp_path, pool_text(stub), settings, dispatches=False) as other,
    ):
        engine.drivers.recovers = other.drivers.recovers = False
        run = (await engine.runs.start(order(engine, "baton-mini", on_disconnect="finish"))).run
        await stub.wait_for(1, "alpha")
        store = other.context.store
        await store.begin_generation(other.context.now())
        assert await other.drivers.take(run)
        assert (await store.run(run)).driver == ""
        other.drivers.recovers = True
        other.drivers.sweep_soon()
        await until(lambda: other.drivers.driver_of(run) is not None)
        ticket = await store.find_ticket(run, 0)
        assert ticket is not None
        assert ticket.driver == (await store.run(run)).driver != ""


async def test_who_looks_on_at_another_gateway_ends_nothing_by_leaving(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub.always("alpha", Hang())
    async with (
        running_service(tmp_path, pool_text(stub)) as own,
        running_service(tmp_path, pool_text(stub), dispatches=False) as other,
    ):
        asked: list[str] = []
        ask = Cancellations.ask

        def ask_and_note(cancellations: Cancellations, run: str, by: str) -> None:
            asked.append("own" if cancellations is own.runs.cancellations else "other")
            ask(cancellations, run, by)

        monkeypatch.setattr(Cancellations, "ask", ask_and_note)
        followed_run = await own.runs.start(order(own, "baton-mini", streams=True))
        await stub.wait_for(1, "alpha")
        viewer = await other.runs.attach(followed_run.run, tenant=None)
        other.runs.leave(viewer)
        assert asked == []
        own.runs.leave(followed_run)
        assert asked == ["own"]
        await finish(followed_run)


async def test_a_run_that_an_engine_begins_as_it_stops_is_begun_and_offered_to_others(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    drivers, stopping = Drivers(runtime.context, home="leaver", bound=9), asyncio.Event()
    working = asyncio.create_task(drivers.run(stopping))
    await until(lambda: drivers.is_open)
    append = runtime.context.store.append

    async def append_as_the_engine_stops(entry: Entry) -> AppendResult:
        if entry.new is not None:
            stopping.set()
            await working
        return await append(entry)

    monkeypatch.setattr(runtime.context.store, "append", append_as_the_engine_stops)
    monkeypatch.setattr(runtime.runs, "engine", drivers)
    followed_run = await runtime.runs.start(order(runtime, "baton-mini"))
    assert (await finish(followed_run)).ended.error is None
    assert len(drivers) == 0


async def test_a_bug_upon_one_message_does_not_end_an_engines_other_runs(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()

    async def listen_with_a_bug(_driver: Driver, _message: ListenRequest) -> None:
        asked.set()
        raise ValueError("a bug")

    monkeypatch.setattr(Driver, "listen", listen_with_a_bug)
    followed_run = await runtime.runs.start(order(runtime, "baton-mini"))
    runtime.drivers.receive(ListenRequest(followed_run.run, "another gateway"))
    await asked.wait()
    assert (await finish(followed_run)).ended.error is None
    assert runtime.drivers.is_open
