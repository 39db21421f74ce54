"""The database goes away between an admission's COMMIT and its answer, and does not come back in time: F-18.

Nobody knows then whether there is a run, and nobody is told otherwise. Nor does a request that is cancelled meanwhile.
"""

import asyncio
import sqlite3
from collections.abc import AsyncIterator, Awaitable
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.core.run.events import Kind
from app.errors import NotFound, StoreUnavailable
from app.process.wiring import Runtime
from app.store.protocol import UNDECIDED, AppendResult, Entry, RunRow
from tests.harness.in_process import (
    await_ended_row,
    client_of,
    events,
    kinds,
    order,
    pool_text,
    running_service,
)
from tests.harness.waiting import let_others_run, until
from tests.stubs import Hang, ProviderStub, Reply

SETTINGS = {"BATON_LEASE_SECONDS": "0.5"}


@pytest.fixture
async def runtime(stub: ProviderStub, tmp_path: Path) -> AsyncIterator[Runtime]:
    async with running_service(tmp_path, pool_text(stub), SETTINGS) as running:
        yield running


def leave_commit_unanswered(runtime: Runtime, monkeypatch: pytest.MonkeyPatch, *, lands: bool) -> None:
    """The next admission is committed or not, and the store cannot find out which."""
    append, has_failed = runtime.context.store.append, False

    async def append_undecided(entry: Entry) -> AppendResult:
        nonlocal has_failed
        if entry.new is None or has_failed:
            return await append(entry)
        has_failed = True
        if lands:
            await append(entry)
        raise StoreUnavailable(code=UNDECIDED)

    monkeypatch.setattr(runtime.context.store, "append", append_undecided)


async def send(client: httpx.AsyncClient, **more: Any) -> httpx.Response:
    body = {"model": "baton-mini", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}
    return await client.post("/v1/chat/completions", json=body | more.pop("body", {}), **more)


async def await_end(runtime: Runtime, run: str) -> RunRow:
    """The run's row once it has ended."""
    return await await_ended_row(runtime.context.store, run)


@pytest.mark.parametrize("lands", [True, False])
async def test_the_caller_is_told_that_it_is_not_known_and_the_runs_id(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, lands: bool
) -> None:
    leave_commit_unanswered(runtime, monkeypatch, lands=lands)
    async with client_of(runtime) as client:
        reply = await send(client)
        run = reply.headers["x-baton-run"]
        error = reply.json()["error"]
        assert (reply.status_code, error["code"], int(reply.headers["retry-after"]) >= 1) == (503, UNDECIDED, True)
        assert run in error["message"]
        assert "nothing was started" not in error["message"]
        assert (await client.get(f"/v1/runs/{run}")).status_code == (200 if lands else 404)
        assert len(runtime.drivers) == 0
        assert (await send(client)).status_code == 200, "its place is free again"


async def test_a_run_that_nobody_waits_for_is_cancelled(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, stub: ProviderStub
) -> None:
    stub.always("alpha", Hang())
    leave_commit_unanswered(runtime, monkeypatch, lands=True)
    async with client_of(runtime) as client:
        reply = await send(client)
    assert (await await_end(runtime, reply.headers["x-baton-run"])).state == "cancelled"


async def test_a_run_that_is_to_be_finished_goes_on(runtime: Runtime, monkeypatch: pytest.MonkeyPatch) -> None:
    leave_commit_unanswered(runtime, monkeypatch, lands=True)
    async with client_of(runtime) as client:
        reply = await send(client, body={"baton": {"on_disconnect": "finish"}})
    assert reply.status_code == 503
    assert (await await_end(runtime, reply.headers["x-baton-run"])).state == "succeeded"


@pytest.mark.parametrize("lands", [True, False])
async def test_the_same_request_with_an_idempotency_key_may_simply_be_sent_again(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, stub: ProviderStub, lands: bool
) -> None:
    leave_commit_unanswered(runtime, monkeypatch, lands=lands)
    async with client_of(runtime) as client:
        first = await send(client, headers={"Idempotency-Key": "one"})
        again = await send(client, headers={"Idempotency-Key": "one"})
    assert (first.status_code, again.status_code) == (503, 200)
    assert (again.headers["x-baton-run"] == first.headers["x-baton-run"]) == lands
    assert len(stub.requests) == 1
    if not lands:
        with pytest.raises(NotFound):
            await runtime.context.store.run(first.headers["x-baton-run"])


# -- a request that is cancelled meanwhile, as when its process is stopped


@pytest.mark.parametrize(("on_disconnect", "end"), [("cancel", "cancelled"), ("finish", "succeeded")])
async def test_a_run_whose_request_is_cancelled_as_it_is_admitted_stops_or_goes_on_as_for_a_caller_who_leaves(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch, stub: ProviderStub, on_disconnect: Any, end: str
) -> None:
    stub.script("alpha", Hang() if on_disconnect == "cancel" else Reply())
    append, admitted = runtime.context.store.append, asyncio.Event()

    async def append_unheard(entry: Entry) -> AppendResult:
        appended = await append(entry)
        if entry.new is not None:
            admitted.set()
            await asyncio.Event().wait()
        return appended

    monkeypatch.setattr(runtime.context.store, "append", append_unheard)
    run = runtime.context.name("run")
    request = asyncio.create_task(
        runtime.runs.start(order(runtime, "baton-mini", run=run, on_disconnect=on_disconnect))
    )
    await admitted.wait()
    request.cancel()
    assert (await await_end(runtime, run)).state == end


async def test_a_run_is_cancelled_whose_request_is_cancelled_before_its_admission_is_committed(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with running_service(tmp_path, pool_text(stub), drives=False) as gateway:
        await gateway.runs.start(order(gateway, "baton-mini"))  # the pool is stored from now on
        append, appending, run = gateway.context.store.append, list[Entry](), gateway.context.name("run")

        def note_and_append(entry: Entry) -> Awaitable[AppendResult]:
            appending.append(entry)
            return append(entry)

        monkeypatch.setattr(gateway.context.store, "append", note_and_append)
        with closing(sqlite3.connect(tmp_path / "baton.db", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            request = asyncio.create_task(gateway.runs.start(order(gateway, "baton-mini", run=run)))
            await until(lambda: len(appending) == 1)
            await let_others_run()  # its batch waits for the file
            request.cancel()
            await until(lambda: len(appending) == 2)
            other.execute("ROLLBACK")
        await until(lambda: is_asked_to_stop(gateway, run))


async def is_asked_to_stop(runtime: Runtime, run: str) -> bool:
    """True if the run is there, and its cancellation was asked for."""
    with suppress(NotFound):
        return Kind.CANCEL_ASKED in kinds(await events(runtime, run))
    return False
