"""Webhooks end to end: real drivers, store and sender, and a receiver on loopback that the official client plays."""

import asyncio
import base64
import sqlite3
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web
from openai import OpenAI

from app.core.run import notices
from app.engine.delivery import webhooks
from app.errors import StoreUnavailable
from app.gateway.responses import reply
from app.process.wiring import Runtime
from app.store.sql import SqlStore
from tests.harness.conversations import Conversation
from tests.harness.in_process import finish, order, pool_text, running_service
from tests.harness.waiting import PATIENCE_SECONDS, assert_stays, until
from tests.stubs import Fail, ProviderStub, Reply, ToolCall

SECRET = "whsec_" + base64.b64encode(b"s" * 32).decode()
BACKGROUND = {"format": "responses", "background": True}
GIVEN_UP = "A webhook was given up: the receiver did not accept it in time, or has gone."
Answer = Callable[[web.Request], Any]


@dataclass
class Receiver:
    """An operator's webhook; `answers` are given one after the other, and 200 once they are used up."""

    url: str = ""
    answers: list[Any] = field(default_factory=list)
    came: list[tuple[dict[str, str], bytes]] = field(default_factory=list)
    elsewhere: int = 0
    """Requests at the address that it redirects to."""

    async def take(self, request: web.Request) -> web.Response:
        self.came.append((dict(request.headers), await request.read()))
        answer = self.answers.pop(0) if self.answers else 200
        if answer == "hang":
            await asyncio.Event().wait()
        if answer == "redirect":
            return web.Response(status=307, headers={"location": f"{self.url}/elsewhere"})
        return web.Response(status=answer)

    async def wrong(self, _request: web.Request) -> web.Response:
        self.elsewhere += 1
        return web.Response()

    def events(self) -> list[Any]:
        """Return the events that came, as the official client reads them: a wrong signature raises."""
        client = OpenAI(api_key="unused")
        return [client.webhooks.unwrap(body, headers, secret=SECRET) for headers, body in self.came]

    def ids(self) -> list[str]:
        ids = []
        for headers, _ in self.came:
            lower = {name.lower(): value for name, value in headers.items()}
            ids.append(lower["webhook-id"])
        return ids

    async def wait_for(self, count: int) -> list[Any]:
        """The events, once that many have come."""
        await until(lambda: len(self.came) >= count)
        return self.events()


@pytest.fixture
async def receiver() -> AsyncIterator[Receiver]:
    new_receiver = Receiver()
    application = web.Application()
    application.router.add_post("/hook", new_receiver.take)
    application.router.add_route("*", "/hook/elsewhere", new_receiver.wrong)
    runner = web.AppRunner(application, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    new_receiver.url = f"http://127.0.0.1:{runner.addresses[0][1]}/hook"
    yield new_receiver
    await runner.cleanup()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses of tens of milliseconds where they are seconds."""
    monkeypatch.setattr(webhooks, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(webhooks, "COUNT_SECONDS", 0.02)
    monkeypatch.setattr(webhooks, "CLAIM_SECONDS", 4.0)
    monkeypatch.setattr(webhooks, "DELIVERY_SECONDS", 1.0)
    monkeypatch.setattr(notices, "SHORTEST_PAUSE_SECONDS", 0.05)


@asynccontextmanager
async def run_house(stub: ProviderStub, receiver: Receiver, folder: Path, **more: Any) -> AsyncIterator[Runtime]:
    environ = {"BATON_WEBHOOK_URL": receiver.url, "BATON_WEBHOOK_SECRET": SECRET} | more.pop("environ", {})
    async with running_service(folder, pool_text(stub), environ, **more) as runtime:
        yield runtime


async def run_of(runtime: Runtime, wire: dict[str, Any] | None = None) -> str:
    """A background run of this process, to its end."""
    followed_run = await runtime.runs.start(order(runtime, "baton-mini", wire=BACKGROUND if wire is None else wire))
    await finish(followed_run)
    return followed_run.run


def metric(runtime: Runtime, sample: str) -> float:
    lines = runtime.context.telemetry.exposition().decode().splitlines()
    return sum(float(line.rpartition(" ")[2]) for line in lines if line.startswith(f"{sample} "))


def outcomes(runtime: Runtime) -> list[float]:
    """Return the number of tries that were delivered, retried and failed."""
    return [metric(runtime, f'baton_webhooks_total{{outcome="{word}"}}') for word in ("delivered", "retried", "failed")]


async def none_left(runtime: Runtime) -> None:
    await until_pending(runtime, 0)


async def until_pending(runtime: Runtime, count: int) -> None:
    async def pending() -> bool:
        return await runtime.context.store.count_pending_notices(100) == count

    await until(pending)


@pytest.mark.long
async def test_the_end_of_a_background_response_is_told_once(
    stub: ProviderStub, receiver: Receiver, tmp_path: Path
) -> None:
    async with run_house(stub, receiver, tmp_path) as runtime:
        run = await run_of(runtime)
        (event,) = await receiver.wait_for(1)
        assert (event.type, event.data.id, event.object) == ("response.completed", f"resp_{run}", "event")
        assert event.created_at == int((await runtime.context.store.run(run)).ended_at or 0)
        await none_left(runtime)
        await assert_stays(lambda: len(receiver.came) == 1, seconds=0.3)
        assert outcomes(runtime) == [1, 0, 0]
    headers, body = receiver.came[0]
    assert headers["Content-Type"] == "application/json"
    assert set(event.to_dict()) == {"id", "object", "created_at", "type", "data"}
    assert b"2 + 2" not in body


async def test_runs_that_somebody_waits_for_are_not_told(
    stub: ProviderStub, receiver: Receiver, tmp_path: Path
) -> None:
    async with run_house(stub, receiver, tmp_path) as runtime:
        for wire in ({}, {"format": "responses"}, {"format": "chat", "background": True}):
            await run_of(runtime, wire)
        await run_of(runtime)
        await none_left(runtime)
        assert len(receiver.came) == 1


async def test_other_ends_have_other_words(stub: ProviderStub, receiver: Receiver, tmp_path: Path) -> None:
    async with run_house(stub, receiver, tmp_path) as runtime:
        for worker in ("alpha", "beta", "gamma"):
            stub.always(worker, Fail(status=400))
        failed = await run_of(runtime)
        await receiver.wait_for(1)
        followed_run = await runtime.runs.start(order(runtime, "baton-ultra", wire=BACKGROUND))
        runtime.runs.cancellations.ask(followed_run.run, "caller")
        assert (await finish(followed_run)).ended.state.state == "cancelled"
        events = await receiver.wait_for(2)
    types_and_ids = [(event.type, event.data.id) for event in events]
    assert types_and_ids == [("response.failed", f"resp_{failed}"), ("response.cancelled", f"resp_{followed_run.run}")]


async def test_each_background_turn_is_told_under_its_own_ids(
    stub: ProviderStub, receiver: Receiver, tmp_path: Path
) -> None:
    calls = [Reply(chunks=(), tool_calls=(ToolCall("look", "{}", f"id-{n}"),), finish="tool") for n in range(2)]
    stub.script("alpha", *calls, Reply(chunks=("Cut",), finish="length"))
    async with run_house(stub, receiver, tmp_path) as runtime:
        conversation = Conversation(runtime)
        outcome = await conversation.take_turn(wire=BACKGROUND)
        await none_left(runtime)
        conversation.add_results(outcome, "one")
        outcome = await conversation.take_turn(wire={"format": "responses"})  # this turn has a caller who waits for it
        conversation.add_results(outcome, "two")
        ended = await conversation.take_turn(wire=BACKGROUND)
        run = ended.ended.state.run
        events = await receiver.wait_for(2)
        await none_left(runtime)
    types_and_ids = [(event.type, event.data.id) for event in events]
    assert types_and_ids == [("response.completed", f"resp_{run}"), ("response.incomplete", f"resp_{run}_2")]
    assert len(set(receiver.ids())) == 2


@pytest.mark.long
async def test_an_end_that_nobody_can_explain_is_told_too(
    stub: ProviderStub, receiver: Receiver, tmp_path: Path
) -> None:
    """A run past its deadline is ended without its journal being understood: newer code has written to it."""
    async with run_house(stub, receiver, tmp_path, dispatches=False) as runtime:
        followed_run = await runtime.runs.start(order(runtime, "baton-mini", wire=BACKGROUND))
    with closing(sqlite3.connect(tmp_path / "baton.db", timeout=PATIENCE_SECONDS)) as database, database:
        database.execute("UPDATE events SET kind = 'plan.dreamt' WHERE kind = 'plan.accepted'")
        database.execute("UPDATE runs SET deadline = 0, lease_until = 0")
    async with run_house(stub, receiver, tmp_path, audits=False) as runtime:
        (event,) = await receiver.wait_for(1)
        assert (event.type, event.data.id) == ("response.failed", f"resp_{followed_run.run}")
        assert (await runtime.context.store.run(followed_run.run)).state == "expired"


@pytest.mark.parametrize("trouble", [500, 404, 429, "hang", "redirect"])
@pytest.mark.long
async def test_what_is_not_delivered_is_tried_again_under_the_same_id(
    stub: ProviderStub, receiver: Receiver, tmp_path: Path, trouble: Any
) -> None:
    receiver.answers = [trouble, trouble]
    async with run_house(stub, receiver, tmp_path) as runtime:
        await run_of(runtime)
        await receiver.wait_for(3)
        await none_left(runtime)
        assert outcomes(runtime) == [1, 2, 0]
    assert len(receiver.events()) == 3, "each is signed for its own time"
    assert len(set(receiver.ids())) == 1
    assert len({body for _, body in receiver.came}) == 1
    assert receiver.elsewhere == 0, "a redirect is not followed"


@pytest.mark.long
async def test_a_receiver_that_is_away_is_tried_again(stub: ProviderStub, receiver: Receiver, tmp_path: Path) -> None:
    nobody = {"BATON_WEBHOOK_URL": "http://127.0.0.1:1/hook"}
    async with run_house(stub, receiver, tmp_path, environ=nobody) as runtime:
        await run_of(runtime)
        await until(lambda: outcomes(runtime)[1] >= 2)
        await until(lambda: metric(runtime, "baton_webhooks_pending") == 1)
    async with run_house(stub, receiver, tmp_path) as runtime:
        assert [event.type for event in await receiver.wait_for(1)] == ["response.completed"]
        await none_left(runtime)


async def test_a_receiver_that_is_gone_is_not_tried_again(
    stub: ProviderStub, receiver: Receiver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    receiver.answers = [410]
    async with run_house(stub, receiver, tmp_path) as runtime:
        run = await run_of(runtime)
        await none_left(runtime)
        await run_of(runtime)
        await receiver.wait_for(2)
        await none_left(runtime)
        assert outcomes(runtime) == [1, 0, 1], "it is that delivery alone"
        (notice,) = await runtime.context.store.failed_notices(10)
        assert (notice.notice.run, notice.reason) == (run, "HTTP 410")
        assert await runtime.context.store.resend_notices([notice.notice], runtime.context.now()) == 1
        await receiver.wait_for(3)
        await none_left(runtime)
        assert (await runtime.context.store.failed_notices(10), outcomes(runtime)) == ((), [2, 0, 1])
    (given_up,) = [record for record in caplog.records if record.message == GIVEN_UP]
    assert given_up.levelname == "ERROR"
    assert (given_up.fields["run"], given_up.fields["status"]) == (run, 410)  # type: ignore[attr-defined]
    assert receiver.url not in caplog.text


async def test_after_its_last_try_it_is_given_up(
    stub: ProviderStub, receiver: Receiver, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with run_house(stub, receiver, tmp_path, environ={"BATON_WEBHOOK_URL": "http://127.0.0.1:1/"}) as runtime:
        await run_of(runtime)
        await until(lambda: outcomes(runtime)[1] >= 1)
    with closing(sqlite3.connect(tmp_path / "baton.db", timeout=PATIENCE_SECONDS)) as database, database:
        database.execute("UPDATE notices SET tries = ?, due = 0", (notices.MOST_TRIES - 1,))
    receiver.answers = [503]
    async with run_house(stub, receiver, tmp_path) as runtime:
        await none_left(runtime)
        assert (len(receiver.came), outcomes(runtime)) == (1, [0, 0, 1])
    assert GIVEN_UP in caplog.messages


@pytest.fixture(params=["sqlite", pytest.param("postgres", marks=pytest.mark.integration)])
def database(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, str]:
    """Settings for either database, with the schema in it."""
    if request.param == "sqlite":
        return {}
    return {"BATON_DATABASE_URL": request.getfixturevalue("migrated_postgres_url")}


@pytest.mark.long
async def test_a_process_that_dies_between_commit_and_delivery_loses_nothing(
    stub: ProviderStub, receiver: Receiver, tmp_path: Path, database: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(*_: object) -> tuple[()]:
        return ()

    with monkeypatch.context() as dying:  # it commits the end, and never gets to deliver anything
        dying.setattr(SqlStore, "take_notices", never)
        async with run_house(stub, receiver, tmp_path, environ=database) as runtime:
            run = await run_of(runtime)
            await until_pending(runtime, 1)
    assert receiver.came == []
    async with run_house(stub, receiver, tmp_path, environ=database) as runtime:
        (event,) = await receiver.wait_for(1)
        assert event.data.id == f"resp_{run}"
        await none_left(runtime)


@pytest.mark.long
async def test_a_process_that_dies_over_a_delivery_has_it_repeated_by_another(
    stub: ProviderStub, receiver: Receiver, tmp_path: Path, database: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def raise_unavailable(*_: object) -> bool:
        raise StoreUnavailable

    with monkeypatch.context() as dying:  # it is delivered, and that is all that anybody knows
        dying.setattr(SqlStore, "close_notice", raise_unavailable)
        dying.setattr(webhooks, "CLAIM_SECONDS", 1.5)
        async with run_house(stub, receiver, tmp_path, environ=database) as runtime:
            await run_of(runtime)
            await receiver.wait_for(1)
            assert await runtime.context.store.count_pending_notices(9) == 1
    async with run_house(stub, receiver, tmp_path, environ=database) as runtime:
        await receiver.wait_for(2)
        await none_left(runtime)
    assert len(set(receiver.ids())) == 1


@pytest.mark.long
async def test_of_two_processes_one_delivers(
    stub: ProviderStub,
    receiver: Receiver,
    tmp_path: Path,
    database: dict[str, str],
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Nobody takes a notice for lost, or a receiver for silent, because this machine stands still.
    monkeypatch.setattr(webhooks, "CLAIM_SECONDS", 2 * PATIENCE_SECONDS)
    monkeypatch.setattr(webhooks, "DELIVERY_SECONDS", PATIENCE_SECONDS)
    runs = []
    async with AsyncExitStack() as stack:
        houses = [
            await stack.enter_async_context(run_house(stub, receiver, tmp_path, environ=database)) for _ in range(2)
        ]
        async with asyncio.timeout(PATIENCE_SECONDS):  # which of them gets a notice is chance; both get some in the end
            while len(runs) < 12 or not all(outcomes(house)[0] for house in houses):
                runs += await asyncio.gather(*map(run_of, houses))
        await none_left(houses[0])
        await until(lambda: sum(outcomes(house)[0] for house in houses) >= len(runs))
        counted = [outcomes(house) for house in houses]
    # A busy machine may keep a process from writing down that it has delivered; it says so, and that one comes again.
    unstored = sum("could not be stored" in message for message in caplog.messages)
    assert {event.data.id for event in receiver.events()} == {f"resp_{run}" for run in runs}
    assert len(receiver.came) <= len(runs) + unstored
    assert [sum(column) for column in zip(*counted, strict=True)] == [len(receiver.came) - unstored, 0, 0]


@pytest.mark.long
async def test_a_slow_receiver_holds_up_nobody_else(
    stub: ProviderStub, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(webhooks, "DELIVERY_SECONDS", 3.0)
    receiver.answers = ["hang"]
    async with run_house(stub, receiver, tmp_path) as runtime:
        first = await run_of(runtime)
        await receiver.wait_for(1)
        second = await run_of(runtime)
        await until(lambda: outcomes(runtime)[0] == 1)
        assert outcomes(runtime) == [1, 0, 0]
        await none_left(runtime)
    assert [event.data.id for event in receiver.events()] == [f"resp_{run}" for run in (first, second, first)]


async def test_without_a_webhook_nothing_is_kept_and_old_notices_are_forgotten(
    stub: ProviderStub, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_house(stub, receiver, tmp_path, environ={"BATON_WEBHOOK_URL": "http://127.0.0.1:1/"}) as runtime:
        await run_of(runtime)
    monkeypatch.setattr(webhooks, "FORGET_SECONDS", 0.02)
    async with running_service(tmp_path, pool_text(stub)) as runtime:
        await run_of(runtime)
        assert await runtime.context.store.count_pending_notices(9) == 1
        with closing(sqlite3.connect(tmp_path / "baton.db", timeout=PATIENCE_SECONDS)) as database, database:
            database.execute("UPDATE notices SET at = at - ?, due = 0", (notices.KEPT_UNSENT_SECONDS,))
        await none_left(runtime)
    assert receiver.came == []


async def test_proxies_of_the_environment_are_not_used(
    stub: ProviderStub, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "HTTP_PROXY", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:1")
    monkeypatch.delenv("no_proxy", raising=False)
    monkeypatch.delenv("NO_PROXY", raising=False)
    async with run_house(stub, receiver, tmp_path) as runtime:
        await run_of(runtime)
        await receiver.wait_for(1)
        await none_left(runtime)
        assert outcomes(runtime) == [1, 0, 0]


def test_a_notice_and_the_response_agree_on_what_is_incomplete() -> None:
    assert set(reply.INCOMPLETE) == notices.CUT_SHORT


async def test_a_result_that_the_database_does_not_take_at_once_is_no_second_delivery(
    stub: ProviderStub, receiver: Receiver, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    close, refused = SqlStore.close_notice, list[notices.Notice]()

    async def unwilling(self: SqlStore, notice: notices.Notice) -> bool:
        if len(refused) < 2:
            refused.append(notice)
            raise StoreUnavailable
        return await close(self, notice)

    monkeypatch.setattr(SqlStore, "close_notice", unwilling)
    async with run_house(stub, receiver, tmp_path) as runtime:
        await run_of(runtime)
        await none_left(runtime)
        await until(lambda: outcomes(runtime)[0] == 1)
        assert (len(receiver.came), len(refused)) == (1, 2)
