"""The page of a run that goes on, whose connection breaks anywhere: it equals a fresh page after every reconnect.

`BATON_TEST_CUTS=1000 python -m pytest -m faults_suite tests/faults/test_console_cuts.py` breaks it more often.
"""

import asyncio
import os
from dataclasses import dataclass, field
from random import Random
from typing import Any

import pytest

from app.console.app import Console
from app.core.run.events import Event
from app.core.run.state import fold
from app.store.protocol import Journal
from tests.console.test_run_page import patched, regions
from tests.core.play import Play
from tests.harness.console import browsing, sign_in
from tests.harness.stand_ins import PEPPER, GatewayStandIn, row_of, shelve_content

CUTS = int(os.environ.get("BATON_TEST_CUTS", "100"))
ADDRESS = "/console/runs/run_mine"


def now() -> float:
    """The console's clock."""
    return 1e9


@dataclass
class Growing:
    """A run whose journal is written while the page is open."""

    gateway: GatewayStandIn
    events: tuple[Event, ...]
    seq: int = 1
    headers: dict[str, str] = field(default_factory=dict)

    def write(self, seq: int) -> None:
        """Commit the events up to this one."""
        self.seq = seq
        state = fold(self.events[:seq])
        self.gateway.store.rows = [row_of("run_mine", "acme", key="owner", state=state.state, seq=seq)]

    async def journal(self, _run: str, upto: int | None = None, after: int = 0) -> Journal:
        return Journal(b"salt", self.events[after : self.seq])

    async def last_seqs(self, names: list[str]) -> dict[str, int]:
        return dict.fromkeys(names, self.seq)


def played(chance: Random, gateway: GatewayStandIn) -> Growing:
    """A run that was played by chance, with an event every quarter of a second."""
    play = Play(chance)
    play.play()
    facts = [event.fact for event in play.events]
    return Growing(gateway, tuple(Event.of("run_mine", seq, 1e9 + seq / 4, fact) for seq, fact in enumerate(facts, 1)))


async def received(console: Console, cookie: str, last: int, bytes_: int) -> str:
    """What a browser receives whose connection breaks behind so many bytes, or once it has what there is."""
    parts: list[bytes] = []
    broken = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await broken.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        parts.append(message.get("body", b""))
        if sum(map(len, parts)) >= bytes_ or b"id: " in parts[-1]:
            broken.set()

    headers = [(b"cookie", cookie.encode()), (b"last-event-id", str(last).encode()), (b"host", b"baton")]
    scope = {"type": "http", "method": "GET", "path": f"{ADDRESS}/live", "query_string": b"", "headers": headers}
    async with asyncio.timeout(60):
        await console(scope | {"scheme": "http", "server": ("baton", 80), "root_path": ""}, receive, send)
    return b"".join(parts)[:bytes_].decode(errors="ignore")


async def test_after_any_cut_the_page_equals_a_fresh_one(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = Random(CUTS)
    cuts = 0
    while cuts < CUTS:
        gateway = GatewayStandIn()
        shelve_content(gateway.store)
        run = played(chance, gateway)
        monkeypatch.setattr(gateway.store, "journal", run.journal)
        monkeypatch.setattr(gateway.store, "last_seqs", run.last_seqs, raising=False)
        run.write(1)
        key = gateway.add_key("owner", scopes=["runs:read", "audit:read"])
        console = Console(gateway.app, lambda: (PEPPER,), now, lambda error, _path: None)
        async with browsing(gateway.app, now) as browser:
            await sign_in(browser, key)
            cookie = "; ".join(f"{name}={value}" for name, value in browser.cookies.items())
            shown, last = regions((await browser.get(ADDRESS)).text), 1
            while run.seq < len(run.events):
                run.write(chance.randint(run.seq + 1, len(run.events)))
                whole = chance.random() < 0.5
                text = await received(console, cookie, last, 10**9 if whole else chance.randrange(60_000))
                complete = text[: text.rfind("\n\n") + 2]
                last = max([last, *patched(shown, complete)])
                cuts += 1
            if last < run.seq:
                patched(shown, await received(console, cookie, last, 10**9))
            assert shown == regions((await browser.get(ADDRESS)).text), f"run {run.events[0].run}, {cuts} cuts"
