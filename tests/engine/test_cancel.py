"""`POST /v1/runs/{id}/cancel` and `baton runs cancel`: whoever drives the run, and whatever has become of it."""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.core.run.events import Kind
from app.engine.runs import cancellation
from app.engine.runs import client as run_client
from app.errors import Overloaded
from app.gateway.runs import cancel
from app.process.wiring import Runtime
from app.stepqueue.protocol import Delta, Live
from app.store.protocol import AppendResult, Entry, RunRow
from tests.harness.callers import add_key, client_over_socket, post_chat
from tests.harness.conversations import Conversation, look_call, tool_call_reply
from tests.harness.in_process import LONG_LEASE, events, finish, kinds, order, plan, pool_text, running_service
from tests.harness.raw_facts import fact_from_json
from tests.harness.stand_ins import chat_body
from tests.harness.waiting import PATIENCE_SECONDS, until
from tests.stubs import Hang, ProviderStub, Reply


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a caller wait long for the end that it has asked for, though not as long as its run may last by itself."""
    monkeypatch.setattr(cancel, "PATIENCE", 20.0)


@pytest.fixture
async def client(runtime: Runtime) -> AsyncIterator[httpx.AsyncClient]:
    async with client_over_socket(runtime, await add_key(runtime)) as running:
        yield running


async def hanging(
    stub: ProviderStub, client: httpx.AsyncClient, **more: Any
) -> tuple[asyncio.Task[httpx.Response], str]:
    """A request whose worker says nothing, and its run."""
    stub.always("*", Hang())
    asking = asyncio.create_task(post_chat(client, chat_body(**more), "one"))
    await stub.wait_for(1)
    (row,) = (await client.get("/v1/runs")).json()["data"]
    return asking, row["id"]


@pytest.mark.parametrize("streams", [False, True])
@pytest.mark.long
async def test_a_run_is_stopped_and_its_caller_told(stub: ProviderStub, tmp_path: Path, streams: bool) -> None:
    """Its driver is notified at once: it does not renew its lease in this test, by which it would learn of the wish."""
    async with (
        running_service(tmp_path, pool_text(stub), LONG_LEASE) as runtime,
        client_over_socket(runtime, await add_key(runtime)) as client,
    ):
        asking, run = await hanging(stub, client, stream=streams)
        reply = await client.post(f"/v1/runs/{run}/cancel")
        assert (reply.status_code, reply.json()["id"], reply.json()["state"]) == (200, run, "cancelled")
        stop_reply = await asking
        assert stop_reply.status_code == (200 if streams else 499)
        assert b'"run_cancelled"' in stop_reply.content
        assert stub.requests[0].disconnected_at is not None
        assert (await client.get(f"/v1/runs/{run}")).json()["cancel_asked"] is True


@pytest.mark.long
async def test_it_may_be_asked_for_twice_and_too_late(
    stub: ProviderStub, runtime: Runtime, client: httpx.AsyncClient
) -> None:
    asking, run = await hanging(stub, client)
    both = await asyncio.gather(*(client.post(f"/v1/runs/{run}/cancel", json={}) for _ in range(2)))
    second_reply = await client.post(f"/v1/runs/chatcmpl-{run}/cancel")
    assert [reply.json()["state"] for reply in (*both, second_reply)] == ["cancelled"] * 3
    await asking
    assert kinds(await events(runtime, run)).count(Kind.CANCELLED) == 1
    stub.always("*", Reply())
    run_id = (await post_chat(client, chat_body())).headers["x-baton-run"]
    late = await client.post(f"/v1/runs/{run_id}/cancel")
    assert (late.status_code, late.json()["state"]) == (200, "succeeded")
    assert Kind.CANCEL_ASKED not in kinds(await events(runtime, run_id))


async def test_only_who_may_write_in_the_tenant_may_stop_a_run(
    stub: ProviderStub, runtime: Runtime, client: httpx.AsyncClient
) -> None:
    asking, run = await hanging(stub, client)
    statuses = []
    for tenant, scopes in (("acme", ("runs:read",)), ("other", ("runs:write",))):
        async with client_over_socket(runtime, await add_key(runtime, tenant, scopes)) as other:
            statuses.append((await other.post(f"/v1/runs/{run}/cancel")).status_code)
    assert statuses == [403, 404]
    assert not asking.done()
    async with client_over_socket(runtime, await add_key(runtime, scopes=("runs:write",))) as colleague:
        assert (await colleague.post(f"/v1/runs/{run}/cancel")).json()["state"] == "cancelled"
    await asking


@pytest.mark.long
async def test_another_process_stops_it_by_the_journal_alone(stub: ProviderStub, tmp_path: Path) -> None:
    """Over one database without a queue between them: the driver learns of it when it renews its lease."""
    async with (
        running_service(tmp_path, pool_text(stub)) as first,
        running_service(tmp_path, pool_text(stub)) as second,
    ):
        key = await add_key(first)
        async with client_over_socket(first, key) as here, client_over_socket(second, key) as there:
            asking, run = await hanging(stub, here)
            reply = await there.post(f"/v1/runs/{run}/cancel")
            assert reply.json()["state"] == "cancelled"
            assert (await asking).status_code == 499


@pytest.mark.long
async def test_a_run_without_a_driver_is_stopped_by_whoever_takes_it_over(stub: ProviderStub, tmp_path: Path) -> None:
    async with running_service(tmp_path, pool_text(stub), dispatches=False) as runtime:
        followed_run = await runtime.runs.start(order(runtime, "baton-mini"))
    async with running_service(tmp_path, pool_text(stub)) as runtime:
        await cancellation.ask(
            runtime.gateway.store,
            None,
            await runtime.gateway.store.run(followed_run.run),
            "operator",
            runtime.context.now(),
        )
        row: RunRow = await cancel.wait_until_ended(
            runtime.gateway.store, await runtime.gateway.store.run(followed_run.run), PATIENCE_SECONDS
        )
        assert row.state == "cancelled"
        journal = await events(runtime, followed_run.run)
        assert [event.body["by"] for event in journal if event.kind is Kind.CANCEL_ASKED] == ["operator"]


async def test_a_wish_that_comes_just_before_a_step_is_queued_is_heard(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a driver that nobody tells of it, whose dispatchers make no call that they could tell of either."""
    chain = plan(("alpha", "one", ["user"]), ("beta", "two", ["user", 0]))
    async with running_service(tmp_path, pool_text(stub)) as runtime:
        runtime.drivers.spread = True
        monkeypatch.setattr(runtime.drivers, "driver_of", lambda _run: None)
        append = runtime.context.store.append

        async def overtaken(entry: Entry) -> AppendResult:
            if any(draft.kind is Kind.STEP_QUEUED and draft.to_json()["n"] for draft in entry.events):
                await append(
                    Entry(entry.run, runtime.context.now(), (fact_from_json(Kind.CANCEL_ASKED, {"by": "caller"}),))
                )
            return await append(entry)

        runtime.context.store.append = overtaken  # type: ignore[method-assign]
        followed_run = await runtime.runs.start(order(runtime, "baton-mini", plan=chain))
        assert (await finish(followed_run)).ended.state.state == "cancelled"
        assert len(stub.requests) == 1


@pytest.mark.parametrize("apart", [False, True])
async def test_a_run_is_not_let_go_of_by_who_has_not_heard_of_a_wish(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, apart: bool
) -> None:
    """It would wait for its caller's tools, and nobody would look at it before that is over."""
    stub.script("alpha", tool_call_reply(look_call("a")))
    async with running_service(tmp_path, pool_text(stub)) as runtime:
        if apart:
            runtime.drivers.spread = True
            monkeypatch.setattr(runtime.drivers, "driver_of", lambda _run: None)
        append = runtime.context.store.append

        async def overtaken(entry: Entry) -> AppendResult:
            if any(draft.kind is Kind.AWAITING for draft in entry.events):
                await append(
                    Entry(entry.run, runtime.context.now(), (fact_from_json(Kind.CANCEL_ASKED, {"by": "caller"}),))
                )
            return await append(entry)

        runtime.context.store.append = overtaken  # type: ignore[method-assign]
        followed_run = await Conversation(runtime).start_turn()
        assert (await finish(followed_run)).ended.state.state == "cancelled"


async def test_a_run_that_is_taken_over_in_its_wait_is_not_let_go_of_either(
    stub: ProviderStub, runtime: Runtime
) -> None:
    stub.script("alpha", tool_call_reply(look_call("a")))
    run = (await Conversation(runtime).take_turn()).ended.state.run
    append, store = runtime.context.store.append, runtime.context.store

    wishes: list[Entry] = []

    async def overtaken(entry: Entry) -> AppendResult:
        if entry.lease is not None and not entry.events and not wishes:
            wishes.append(entry)
            await append(
                Entry(entry.run, runtime.context.now(), (fact_from_json(Kind.CANCEL_ASKED, {"by": "caller"}),))
            )
        return await append(entry)

    runtime.context.store.append = overtaken  # type: ignore[method-assign]
    now, ours = runtime.context.now(), [("baton-mini", runtime.context.code)]
    (row,) = await store.take_over(runtime.drivers._home, now + 1e4, now + 4.0, 1, ours)  # by a clock that is wrong
    await runtime.drivers._recovery._go_on(row)
    assert (await cancel.wait_until_ended(store, await store.run(run), PATIENCE_SECONDS)).state == "cancelled"


async def test_no_turn_is_begun_of_a_run_that_an_engine_has_just_taken_over(
    stub: ProviderStub, runtime: Runtime
) -> None:
    """The engine is about to cancel it, for example."""
    stub.script("alpha", tool_call_reply(look_call("a")))
    conversation, store, now = Conversation(runtime), runtime.context.store, runtime.context.now()
    first = await conversation.take_turn()
    run = first.ended.state.run
    (row,) = await store.take_over("other", now + 1e4, now + 60.0, 1, [("baton-mini", runtime.context.code)])
    runtime.runs._waiting.take(run)  # its results come to another gateway
    conversation.add_results(first, "A")
    with pytest.raises(Overloaded):
        await conversation.start_turn()
    assert ((await store.run(run)).driver, (await store.run(run)).epoch) == ("other", row.epoch)


async def test_a_wish_is_written_once(stub: ProviderStub, runtime: Runtime) -> None:
    stub.always("*", Hang())
    followed_run = await runtime.runs.start(order(runtime, "baton-mini"))
    row = await runtime.gateway.store.run(followed_run.run)
    for _ in range(3):
        await cancellation.ask(runtime.gateway.store, None, row, "operator", runtime.context.now())
    runtime.runs.cancellations.ask(followed_run.run, "client")
    outcome = await finish(followed_run)
    assert outcome.ended.state.state == "cancelled"
    assert kinds(await events(runtime, followed_run.run)).count(Kind.CANCEL_ASKED) == 1


async def test_a_run_with_an_event_of_a_newer_release_is_cancelled_as_well(stub: ProviderStub, tmp_path: Path) -> None:
    """Its gateway asks for that when its caller leaves, and goes on with other runs."""
    async with running_service(tmp_path, pool_text(stub), drives=False, audits=False) as gateway:
        followed_run = await gateway.runs.start(order(gateway, "baton-mini"))
        with closing(sqlite3.connect(tmp_path / "baton.db", timeout=PATIENCE_SECONDS)) as database:
            with database:
                database.execute("UPDATE events SET kind = 'run.dreamt' WHERE run = ?", (followed_run.run,))
            gateway.runs.leave(followed_run)
            wish = "SELECT count(*) FROM events WHERE run = ? AND kind = 'run.cancel_asked'"
            await until(lambda: database.execute(wish, (followed_run.run,)).fetchone() == (1,))
        await gateway.runs.start(order(gateway, "baton-mini"))


async def test_a_call_that_is_stopped_while_its_text_is_sent_on_has_its_time_in_the_journal(
    stub: ProviderStub, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, sending = runtime.context.queue.publish, asyncio.Event()

    async def send_no_text(address: str, messages: Sequence[Live]) -> None:
        if any(isinstance(message, Delta) for message in messages):
            sending.set()
            await asyncio.Event().wait()
        await publish(address, messages)

    monkeypatch.setattr(runtime.context.queue, "publish", send_no_text)
    followed_run = await runtime.runs.start(order(runtime, "baton-mini", streams=True))
    await sending.wait()
    runtime.runs.cancellations.ask(followed_run.run, "client")
    await finish(followed_run)
    (end,) = [event.body for event in await events(runtime, followed_run.run) if event.kind is Kind.CALL_FINISHED]
    assert end["outcome"] == "cancelled"
    assert end["seconds"] > 0


async def test_a_process_that_stops_does_not_wait_for_further_wishes(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_client, "WISH_RETRY_SECONDS", 3600.0)
    async with asyncio.timeout(PATIENCE_SECONDS), running_service(tmp_path, pool_text(stub)):
        pass
