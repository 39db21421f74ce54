"""A stream holds little memory until its worker answers, in a gateway that has no dispatcher of its own.

Blocks are those of Python's allocators: a bound on them is the same on every machine. What the C library gets on top of
it is in `python -m tests.bench`, with the resident memory.
"""

import asyncio
import gc
import socket
import tracemalloc
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from urllib.parse import urlsplit

import orjson
import pytest

from app.engine.calls.attempt import Attempt
from app.engine.delivery.messages import Mailbox
from app.gateway.http.connection import Connection
from app.process.wiring import Runtime
from app.store.protocol import TicketClaim
from app.store.sql import SqlStore
from tests.harness.callers import add_key
from tests.harness.in_process import finish, order, plan, pool_text, running_service
from tests.harness.prepared_apps import lent_app
from tests.harness.stand_ins import chat_body, serving
from tests.harness.waiting import PATIENCE_SECONDS, until
from tests.stubs import Hang, ProviderStub

MORE = 25
BEGUN = b"assistant"
BOUND = 31_000
"""Bytes; 29,600 were measured, with the caller's end of the connection."""
EACH = 1_000
SHARED = 29
"""Attributes beyond which CPython gives an object a dictionary of its own, of more than a kilobyte."""


@pytest.fixture
def traced() -> Iterator[None]:
    """Every allocation from here on is counted."""
    tracemalloc.start(1)
    yield
    tracemalloc.stop()


def _all(kind: type[object]) -> list[object]:
    """Every object of this very type."""
    return [stored_object for stored_object in gc.get_objects() if type(stored_object) is kind]


async def _hold(stack: ExitStack, url: str, request: bytes) -> None:
    """One more stream, which has begun."""
    loop, where = asyncio.get_running_loop(), urlsplit(url)
    caller = stack.enter_context(socket.socket())
    caller.setblocking(False)
    async with asyncio.timeout(PATIENCE_SECONDS):
        await loop.sock_connect(caller, (where.hostname, where.port))
        await loop.sock_sendall(caller, request)
        received = b""
        while BEGUN not in received:
            received += await loop.sock_recv(caller, 4096)


async def _slope(stack: ExitStack, url: str, request: bytes) -> float:
    """Bytes that each of so many more streams takes."""
    gc.collect()
    before = tracemalloc.get_traced_memory()[0]
    for _ in range(MORE):
        await _hold(stack, url, request)
    gc.collect()
    return (tracemalloc.get_traced_memory()[0] - before) / MORE


@pytest.mark.long
async def test_an_idle_stream_holds_little(tmp_path: Path, traced: None) -> None:
    async with (
        ProviderStub() as stub,
        running_service(tmp_path, pool_text(stub), drives=False, audits=False) as runtime,
    ):
        key = await add_key(runtime)
        request_body = orjson.dumps(chat_body(stream=True, baton={"plan": plan(("alpha", "one", ["user"]))}))
        head = f"POST /v1/chat/completions HTTP/1.1\r\nhost: baton\r\nauthorization: Bearer {key}\r\n"
        request = f"{head}content-length: {len(request_body)}\r\n\r\n".encode() + request_body
        async with serving(lent_app(runtime.gateway), runtime.gateway) as url:
            with ExitStack() as stack:
                slopes = [await _slope(stack, url, request) for _ in range(3)]
                assert min(slopes) < BOUND, slopes  # a table of all streams may have grown in one of them
                connections = _all(Connection)
                assert len(connections) == 3 * MORE
                assert max(len(vars(connection)) for connection in connections) <= SHARED


@pytest.mark.long
async def test_so_does_a_call(stub: ProviderStub, runtime: Runtime) -> None:
    gc.collect()  # attempts of earlier tests
    stub.always("*", Hang())
    followed_run = await runtime.runs.start(order(runtime, "baton-ultra", plan=plan(("alpha", "one", ["user"]))))
    await stub.wait_for()
    [attempt] = _all(Attempt)
    assert len(vars(attempt)) <= SHARED
    runtime.runs.cancellations.ask(followed_run.run, "client")
    await finish(followed_run)


async def test_renewing_holds_nothing_until_the_next_time(
    stub: ProviderStub, runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    renewed, keep = asyncio.Event(), SqlStore.renew_claims

    async def renew_and_note(store: SqlStore, claims: Sequence[TicketClaim], until: float) -> frozenset[TicketClaim]:
        ours = await keep(store, claims, until)
        renewed.set()
        return ours

    monkeypatch.setattr(SqlStore, "renew_claims", renew_and_note)
    stub.always("*", Hang())
    followed_run = await runtime.runs.start(order(runtime, "baton-ultra", plan=plan(("alpha", "one", ["user"]))))
    await renewed.wait()
    await until(lambda: not _all(TicketClaim))
    runtime.runs.cancellations.ask(followed_run.run, "client")
    await finish(followed_run)


def test_so_does_an_empty_mailbox(traced: None) -> None:
    before = tracemalloc.get_traced_memory()[0]
    boxes: list[Mailbox[object]] = [Mailbox(8) for _ in range(EACH)]
    assert (tracemalloc.get_traced_memory()[0] - before) / len(boxes) < 200
