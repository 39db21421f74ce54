"""A gateway over stand-ins for every example of a fuzzer, and one event loop to ask it in."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import httpx
import pytest
from msgspec import Struct

from app.gateway.app import create_app
from tests.harness.stand_ins import GatewayStandIn, row_of, store_contents


class FuzzTarget(Struct, frozen=True):
    """The application that is fuzzed, a key to it, and `send`, which posts a body to a path."""

    stand_in: GatewayStandIn
    key: str
    send: Callable[[str, bytes], httpx.Response]


def stock_gateway() -> tuple[GatewayStandIn, str]:
    """A gateway that holds a run of the key's own and one of somebody else, for more than one test."""
    stand_in = GatewayStandIn()
    stand_in.app = create_app(stand_in.context)  # a lent one would be taken back after the first test
    stand_in.store.rows = [row_of("run_mine", "acme"), row_of("run_theirs", "other")]
    store_contents(stand_in.store)
    return stand_in, stand_in.add_key()


@pytest.fixture(scope="session")
def fuzzed() -> Iterator[FuzzTarget]:
    """One for all examples."""
    stand_in, key = stock_gateway()
    with asyncio.Runner() as runner:
        client = stand_in.client(key)

        def send(path: str, body: bytes) -> httpx.Response:
            stand_in.runs.orders.clear()
            headers = {"content-type": "application/json"}
            asked: Coroutine[Any, Any, httpx.Response] = client.post(path, content=body, headers=headers)
            return runner.run(asked)

        yield FuzzTarget(stand_in, key, send)
        runner.run(client.aclose())
