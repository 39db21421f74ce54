"""Exchanges with a real Redis: what comes back, and what becomes of a connection that fails."""

import asyncio
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
from redis.asyncio import ConnectionPool
from redis.exceptions import ConnectionError as RedisConnectionError
from redis.exceptions import ResponseError

from app.stepqueue.streams import MOST_CONNECTIONS, Connections
from app.telemetry import PoolUse
from tests.harness import servers

pytestmark = pytest.mark.integration


@pytest.fixture(scope="module")
def server() -> Iterator[servers.Server]:
    """A Redis to which nobody else turns."""
    with servers.redis() as running:
        yield running


def _pool(url: str) -> "ConnectionPool[Any]":
    """Connections that leave it to their callers how long an answer may take, as those of the queue do."""
    return ConnectionPool.from_url(url, protocol=2, socket_timeout=None)


@pytest.fixture
async def connections(server: servers.Server) -> AsyncIterator[Connections]:
    opened_connections = Connections(_pool(server.url))
    yield opened_connections
    await opened_connections.forget()


async def test_a_refusal_stands_among_the_replies_in_order(connections: Connections) -> None:
    await connections.send(("SET", "word", "a"))
    first, refusal, last = await connections.send(("ECHO", "1"), ("XLEN", "word"), ("ECHO", b"2"))
    assert (first, last) == (b"1", b"2")
    assert isinstance(refusal, ResponseError)
    assert await connections.send(("ECHO", 3)) == [b"3"]


async def test_what_must_be_raises_the_refusal_also_from_inside_a_transaction(connections: Connections) -> None:
    await connections.send(("SET", "word", "a"))
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await connections.call(("XLEN", "word"))
    with pytest.raises(ResponseError, match="WRONGTYPE"):
        await connections.call(("MULTI",), ("XDEL", "word", "1-1"), ("EXEC",))


async def test_connections_that_broke_while_nobody_used_them_go_unnoticed(connections: Connections) -> None:
    await asyncio.gather(*(connections.send(("ECHO", "at the same time")) for _ in range(3)))
    await connections.send(("CLIENT", "KILL", "TYPE", "normal", "SKIPME", "no"))
    assert await connections.send(("ECHO", "again")) == [b"again"]


async def test_a_server_that_is_gone_is_an_error(connections: Connections) -> None:
    with servers.redis() as other:
        gone = Connections(_pool(other.url))
        await gone.send(("PING",))
    with pytest.raises((RedisConnectionError, OSError)):
        await gone.send(("PING",))


async def test_the_answer_to_what_was_given_up_is_not_taken_for_the_next_one(connections: Connections) -> None:
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.1):
            await connections.send(("BLPOP", "nothing", "20"))
    assert [await connections.send(("ECHO", each)) for each in range(3)] == [[b"0"], [b"1"], [b"2"]]


async def test_connections_are_bounded_and_used_again(connections: Connections) -> None:
    await asyncio.gather(*(connections.send(("ECHO", each)) for each in range(4 * MOST_CONNECTIONS)))
    (clients,) = await connections.send(("CLIENT", "LIST", "TYPE", "normal"))
    assert len(clients.splitlines()) <= MOST_CONNECTIONS


async def test_whoever_waits_for_a_connection_is_counted(connections: Connections) -> None:
    sending = [asyncio.create_task(connections.send(("ECHO", each))) for each in range(MOST_CONNECTIONS + 1)]
    await asyncio.sleep(0)
    assert connections.use == PoolUse(in_use=MOST_CONNECTIONS, most=MOST_CONNECTIONS, waiting=1, waits=1)
    await asyncio.gather(*sending)
    assert connections.use == PoolUse(in_use=0, most=MOST_CONNECTIONS, waiting=0, waits=1)
