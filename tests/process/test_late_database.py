"""A process whose database comes late: it listens, and what waits for the database is made up for."""

import asyncio
import socket
from contextlib import suppress
from pathlib import Path

import pytest

from app.errors import StoreUnavailable
from app.network import retries
from app.process import serve
from app.process.config import configure
from app.process.serve import Announcement, Roles
from app.process.wiring import open_runtime
from app.store.protocol import KeyRow
from tests.harness.waiting import until


@pytest.mark.long
async def test_a_first_key_that_was_made_late_is_announced_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(retries, "STARTUP_PAUSE", 0.02)
    environ = {"BATON_DATA_DIR": str(tmp_path), "BATON_PORT": "0"}
    announcements: list[Announcement] = []
    stopping = asyncio.Event()
    async with open_runtime(configure(environ)) as runtime:
        store = runtime.gateway.store
        read_keys = store.keys
        is_away = True

        async def keys() -> tuple[KeyRow, ...]:
            if is_away:
                raise StoreUnavailable
            return tuple(await read_keys())

        monkeypatch.setattr(store, "keys", keys)
        both = Roles(gateway=True, dispatcher=True)
        listening = asyncio.create_task(serve._listen(runtime, environ, both, stopping, announcements.append))
        try:
            await until(lambda: announcements, what="it listens without its database")
            is_away = False
            await until(lambda: len(announcements) == 2, what="the key is announced")
        finally:
            stopping.set()
            await listening
    first, second = announcements
    assert first.key is None
    assert second.key is not None
    assert second.key.startswith("bt_")
    assert (second.url, second.origin) == (first.url, first.origin)


async def test_the_key_that_the_operator_names_is_adopted_before_the_process_listens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request that came before with this key would be refused as one with an incorrect key."""
    environ = {"BATON_DATA_DIR": str(tmp_path), "BATON_PORT": "0", "BATON_BOOTSTRAP_KEY": "bt_0a1b2c3d_" + "a" * 43}
    order: list[str] = []
    stopping, listens = asyncio.Event(), asyncio.Event()
    async with open_runtime(configure(environ)) as runtime:
        store = runtime.gateway.store
        add_key = store.add_key

        async def add_key_late(row: KeyRow) -> None:
            with suppress(TimeoutError):
                await asyncio.wait_for(listens.wait(), timeout=0.2)
            await add_key(row)
            order.append("key")

        def announce(_: Announcement) -> None:
            order.append("announced")
            stopping.set()

        class Listening(serve.Server):
            async def startup(self, sockets: list[socket.socket] | None = None) -> None:
                await super().startup(sockets)
                order.append("listening")
                listens.set()

        monkeypatch.setattr(store, "add_key", add_key_late)
        monkeypatch.setattr(serve, "Server", Listening)
        both = Roles(gateway=True, dispatcher=True)
        await serve._listen(runtime, environ, both, stopping, announce)
    assert order == ["key", "listening", "announced"]
