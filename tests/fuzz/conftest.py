"""A gateway over stand-ins for every example of a fuzzer, and one event loop to ask it in."""

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from dataclasses import dataclass
from typing import Any

import httpx
import pytest

from tests.harness.stand_ins import House, row_of, shelve_content


@dataclass(frozen=True, slots=True)
class Fuzzed:
    """What is fuzzed: the application, a key to it, and `send`, which posts a body to a path."""

    house: House
    key: str
    send: Callable[[str, bytes], httpx.Response]


def stocked() -> tuple[House, str]:
    """A gateway that holds a run of the key's own and one of somebody else."""
    house = House()
    house.store.rows = [row_of("run_mine", "acme"), row_of("run_theirs", "other")]
    shelve_content(house.store)
    return house, house.add_key()


@pytest.fixture(scope="session")
def fuzzed() -> Iterator[Fuzzed]:
    """One for all examples."""
    house, key = stocked()
    with asyncio.Runner() as runner:
        client = house.client(key)

        def send(path: str, body: bytes) -> httpx.Response:
            house.drivers.orders.clear()
            headers = {"content-type": "application/json"}
            asked: Coroutine[Any, Any, httpx.Response] = client.post(path, content=body, headers=headers)
            return runner.run(asked)

        yield Fuzzed(house, key, send)
        runner.run(client.aclose())
