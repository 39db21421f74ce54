"""A process whose database comes late: it listens, and what waits for the database is made up for."""

import asyncio
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
