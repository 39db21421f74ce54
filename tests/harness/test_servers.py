"""The test servers are real, isolated from test to test, and survive being killed; the network is closed."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from redis.asyncio import Redis
from sqlalchemy import text
from sqlalchemy.ext.asyncio import create_async_engine

from app.store.sqlkit.runner import parse_url
from tests.conftest import NetworkBlocked
from tests.harness import servers
from tests.harness.waiting import wait_until

pytestmark = pytest.mark.integration

ORPHAN = """
import sys, time
from tests.harness import servers
with servers.redis() as server:
    print(server.port, server.directory, flush=True)
    time.sleep(60)
"""


async def _execute(url: str, *statements: str) -> list[object]:
    engine = create_async_engine(parse_url(url))
    try:
        async with engine.begin() as connection:
            results = [await connection.execute(text(statement)) for statement in statements]
            return [row[0] for row in results[-1]] if results[-1].returns_rows else []
    finally:
        await engine.dispose()


@pytest.mark.parametrize("turn", [1, 2])
async def test_each_test_gets_an_empty_database(postgres_url: str, turn: int) -> None:
    made = await _execute(postgres_url, "CREATE TABLE t (n int)", "INSERT INTO t VALUES (1)", "SELECT n FROM t")
    assert made == [1]


@pytest.mark.parametrize("turn", [1, 2])
async def test_each_test_gets_empty_tables(migrated_postgres_url: str, turn: int) -> None:
    made = "INSERT INTO contents (run, ref, body) VALUES ('r', 'c', 'x')"
    assert await _execute(migrated_postgres_url, made, "SELECT count(*) FROM contents") == [1]


@pytest.mark.parametrize("turn", [1, 2])
async def test_each_test_gets_an_empty_redis(redis_url: str, redis_prefix: str, turn: int) -> None:
    async with Redis.from_url(redis_url, decode_responses=True) as client:
        assert await client.keys("*") == []
        entry = await client.xadd(f"{redis_prefix}stream", {"k": "v"})
        assert await client.xrange(f"{redis_prefix}stream") == [(entry, {"k": "v"})]


async def test_postgres_keeps_what_was_committed_over_a_crash() -> None:
    with servers.postgres(fsync=True) as server:
        await _execute(server.url, "CREATE TABLE t (n int)", "INSERT INTO t VALUES (1)")
        server.crash()
        server.start()
        assert await _execute(server.url, "SELECT n FROM t") == [1]
        assert await _execute(server.url, "SHOW fsync") == ["on"]


async def test_redis_comes_back_empty_from_a_crash() -> None:
    with servers.redis() as server:
        async with Redis.from_url(server.url) as client:
            await client.set("k", "v")
        server.crash()
        server.start()
        async with Redis.from_url(server.url) as client:
            assert await client.get("k") is None


def test_a_server_dies_with_a_session_that_was_killed() -> None:
    with subprocess.Popen([sys.executable, "-c", ORPHAN], stdout=subprocess.PIPE, text=True) as session:
        assert session.stdout is not None
        port, directory = session.stdout.readline().split()
        os.kill(session.pid, signal.SIGKILL)
    wait_until(lambda: not Path(directory).exists(), what="the server ends with its session")
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(port)))


def test_the_network_is_closed(network_guard: list[str]) -> None:
    with socket.socket() as sock, pytest.raises(NetworkBlocked):
        sock.connect(("192.0.2.1", 80))
    with pytest.raises(NetworkBlocked):
        socket.getaddrinfo("worker.invalid", 443)
    assert [attempt.split()[0] for attempt in network_guard] == ["connect", "resolve"]
    network_guard.clear()
