"""Pages of runs that go on, whose connection breaks anywhere: each equals a fresh page after every reconnect.

`BATON_TEST_CUTS=1000 python -m pytest --timeout=0 -m faults_suite tests/faults/test_console_cuts.py`
breaks it more often.
"""

import asyncio
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

import httpx
import pytest
from msgspec.structs import replace

from app.console.app import Console
from app.console.following import REGIONS
from app.core.run.events import Event
from app.core.run.fold import fold
from app.gateway.http.api_keys import mint
from app.process.wiring import Runtime
from app.store.protocol import Journal
from tests.console.test_run_page import apply_patches, regions
from tests.core.play import Play
from tests.harness.console import console_client, sign_in
from tests.harness.playground import SCOPES, run_of_page, submit_form
from tests.harness.prepared_apps import app_over
from tests.harness.stand_ins import PEPPER, GatewayStandIn, row_of, store_contents
from tests.stubs import Fail, ProviderStub, Reply, Stall, plan_reply

CUTS = int(os.environ.get("BATON_TEST_CUTS", "100"))
ADDRESS = "/console/runs/run_mine"
WHOLE = 10**9
"""More bytes than any stream has."""
PLAYGROUND = [f"run-{name}" for name in REGIONS]


def now() -> float:
    """Return the console's clock."""
    return 1e9


@dataclass
class GrowingRun:
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


def play_run(chance: Random, gateway: GatewayStandIn) -> GrowingRun:
    """A run that was played by chance, with an event every quarter of a second."""
    play = Play(chance)
    play.play()
    facts = [event.fact for event in play.events]
    return GrowingRun(
        gateway, tuple(Event.of("run_mine", seq, 1e9 + seq / 4, fact) for seq, fact in enumerate(facts, 1))
    )


def cookie_of(browser: httpx.AsyncClient) -> str:
    """Return the header of a browser's cookies."""
    return "; ".join(f"{name}={value}" for name, value in browser.cookies.items())


async def receive_until_cut(
    console: Console, cookie: str, address: str, bytes_: int, *, last: int | None = None, enough: bytes = b"id: "
) -> str:
    """Return what a browser receives whose connection breaks behind so many bytes, or with the part that is enough for
    it."""
    parts: list[bytes] = []
    broken = asyncio.Event()

    async def receive() -> dict[str, Any]:
        await broken.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        parts.append(message.get("body", b""))
        if sum(map(len, parts)) >= bytes_ or enough in parts[-1]:
            broken.set()

    path, _, query = address.partition("?")
    headers = [(b"cookie", cookie.encode()), (b"host", b"baton")]
    headers += [(b"last-event-id", str(last).encode())] if last is not None else []
    scope = {"type": "http", "method": "GET", "path": path, "query_string": query.encode(), "headers": headers}
    async with asyncio.timeout(60):
        await console(scope | {"scheme": "http", "server": ("baton", 80), "root_path": ""}, receive, send)
    return b"".join(parts)[:bytes_].decode(errors="ignore")


def raise_error(error: Exception, _path: str) -> None:
    """Raise what the console reports as a bug of its own."""
    raise error


def complete(text: str) -> str:
    """Return the events of a stream that have come whole."""
    return text[: text.rfind("\n\n") + 2]


async def test_after_any_cut_the_page_equals_a_fresh_one(monkeypatch: pytest.MonkeyPatch) -> None:
    chance = Random(CUTS)
    cuts = 0
    while cuts < CUTS:
        gateway = GatewayStandIn()
        store_contents(gateway.store)
        run = play_run(chance, gateway)
        monkeypatch.setattr(gateway.store, "journal", run.journal)
        monkeypatch.setattr(gateway.store, "last_seqs", run.last_seqs, raising=False)
        run.write(1)
        key = gateway.add_key("owner", scopes=["runs:read", "audit:read"])
        with app_over(gateway.context) as app:
            console = Console(app, lambda: (PEPPER,), now, raise_error)
            async with console_client(app, now) as browser:
                await sign_in(browser, key)
                cookie = cookie_of(browser)
                regions_shown, last = regions((await browser.get(ADDRESS)).text), 1
                while run.seq < len(run.events):
                    run.write(chance.randint(run.seq + 1, len(run.events)))
                    whole = chance.random() < 0.5
                    most = WHOLE if whole else chance.randrange(60_000)
                    text = await receive_until_cut(console, cookie, f"{ADDRESS}/live", most, last=last)
                    last = max([last, *apply_patches(regions_shown, complete(text))])
                    cuts += 1
                if last < run.seq:
                    apply_patches(
                        regions_shown, await receive_until_cut(console, cookie, f"{ADDRESS}/live", WHOLE, last=last)
                    )
                assert regions_shown == regions((await browser.get(ADDRESS)).text), (
                    f"run {run.events[0].run}, {cuts} cuts"
                )


async def test_after_any_cut_the_playground_equals_a_fresh_one(stub: ProviderStub, runtime: Runtime) -> None:
    """The connection breaks while the plan is decoded, while the answer streams, and at the end of the run."""
    chance = Random(CUTS)
    cuts = 0
    key, row = mint(runtime.gateway.pepper, tenant="acme", name="person", scopes=SCOPES, now=0.0)
    assert await runtime.gateway.store.add_key(row)
    with app_over(runtime.gateway) as app:
        console = Console(app, lambda: (PEPPER,), runtime.gateway.now, raise_error)
        async with console_client(app, runtime.gateway.now) as browser:
            await sign_in(browser, key)
            while cuts < CUTS:
                gates = script_stalls(stub, chance)
                page = await submit_form(browser, tier="baton-ultra", once=f"{cuts}")
                run, regions_shown = run_of_page(page), regions(page.text, PLAYGROUND)
                address = f"/console/playground/{run}?live"
                for gate in (*gates, None):
                    for _ in range(chance.randint(0, 3)):
                        text = await receive_until_cut(
                            console, cookie_of(browser), address, chance.randrange(9_000), enough=b"</hx-partial>"
                        )
                        apply_patches(regions_shown, complete(text))
                        cuts += 1
                    if gate is not None:
                        gate.set()
                apply_patches(
                    regions_shown,
                    await receive_until_cut(console, cookie_of(browser), address, WHOLE, enough=b"event: end"),
                )
                fresh = (await browser.get(f"/console/playground/{run}")).text
                assert "hx-sse:connect" not in fresh, "the run has ended"
                assert regions_shown == regions(fresh, PLAYGROUND), f"{run}, {cuts} cuts"


def script_stalls(stub: ProviderStub, chance: Random) -> Sequence[asyncio.Event]:
    """Script a run whose plan, and then whose workers, stop in the middle until their event is set."""
    decodes, answers = asyncio.Event(), asyncio.Event()
    steps = [(n, "Think.", ["user", *range(n)]) for n in range(chance.randint(1, 3))]
    plan = plan_reply(*steps)
    at = chance.randrange(1, len(plan.chunks))
    stub.clear()
    stub.always("planner", replace(plan, fault=Stall(after=at, seconds=decodes)))
    for worker in ("alpha", "beta", "gamma"):
        words = tuple([f"{worker} {n} " for n in range(chance.randint(2, 9))])
        stub.always(worker, Reply(chunks=words, fault=Stall(after=1, seconds=answers)))
    if chance.random() < 0.3:
        stub.script("alpha", Fail(status=500))
    return decodes, answers
