"""Callers who come all at once are let in within few turns of the event loop, whatever a turn takes."""

import asyncio
import socket
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import uvicorn
import uvloop

from app.process.serve import SOCKETS_PER_ADDRESS, Server

CALLERS = 64


class ConnectionCounter(asyncio.Protocol):
    """In the place of the HTTP protocol."""

    connections = 0

    def __init__(self, **_given: Any) -> None:
        pass

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        ConnectionCounter.connections += 1
        transport.close()


async def nothing(_scope: Any, _receive: Any, _send: Any) -> None:
    """The app behind it."""


@contextmanager
def waiting(port: int) -> Iterator[None]:
    """Connections that the kernel has taken, and nobody has accepted yet."""
    with ExitStack() as stack:
        for _ in range(CALLERS):
            stack.enter_context(socket.create_connection(("127.0.0.1", port)))
        yield


async def turns_until_all_are_in() -> int:
    config = uvicorn.Config(nothing, host="127.0.0.1", port=0, http=ConnectionCounter, lifespan="off", log_config=None)  # type: ignore[arg-type]
    server = Server(config)
    serving = asyncio.create_task(server.serve())
    await server.listening.wait()
    turns = 0
    with waiting(int(server.url.rpartition(":")[2])):
        while ConnectionCounter.connections < CALLERS:
            turns += 1
            await asyncio.sleep(0)
    server.should_exit = True
    await serving
    return turns


def test_many_are_accepted_in_one_turn_of_the_loop() -> None:
    ConnectionCounter.connections = 0
    assert uvloop.run(turns_until_all_are_in()) <= 2 * CALLERS // SOCKETS_PER_ADDRESS
