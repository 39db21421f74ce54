"""Approvals in the console: what waits and what it would disclose, live, and a decision on what was shown."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.console.app import Console
from app.core.roles import ROLES
from app.gateway.http.api_keys import mint
from app.process.wiring import Runtime
from tests.gateway.test_approvals import QUESTION, pool, waiting
from tests.harness.console import SAME_ORIGIN, console_client, page_text, sign_in
from tests.harness.in_process import client_of, running_service
from tests.harness.prepared_apps import app_over
from tests.harness.stand_ins import PEPPER
from tests.harness.waiting import PATIENCE_SECONDS
from tests.stubs import ProviderStub

PLAN = {
    "steps": [
        {"worker": "alpha", "subtask": "Add <b>carefully</b>.", "access": ["user"]},
        {"worker": "beta", "subtask": "Check.", "access": [0]},
    ]
}


@pytest.fixture
async def runtime(stub: ProviderStub, tmp_path: Path) -> AsyncIterator[Runtime]:
    async with running_service(tmp_path, pool(stub)) as runtime:
        yield runtime


@pytest.fixture
async def caller(runtime: Runtime) -> AsyncIterator[httpx.AsyncClient]:
    async with client_of(runtime) as client:
        yield client


async def key_of(runtime: Runtime, name: str, role: str) -> str:
    """A new key of a role."""
    key, row = mint(runtime.gateway.pepper, tenant="acme", name=name, scopes=ROLES[role], now=0.0, public=name)
    assert await runtime.gateway.store.add_key(row)
    return key


def form_of(html: str) -> dict[str, str]:
    """The hidden fields of a page's form."""
    return dict(re.findall(r'<input type="hidden" name="(digest|once)" value="([^"]+)"', html))


@pytest.mark.long
async def test_exactly_what_was_shown_is_decided(runtime: Runtime, caller: httpx.AsyncClient) -> None:
    run = (await waiting(caller, baton={"plan": PLAN}, user="u"))["baton"]["run"]
    boss = await key_of(runtime, "boss", "operator")
    with app_over(runtime.gateway) as app:
        async with console_client(app) as client:
            await sign_in(client, boss)
            listed = page_text((await client.get("/console/approvals")).text)
            assert "1 plan waits for somebody's decision." in listed
            assert f"{run} " in listed
            assert "alpha, beta $" in listed
            page = await client.get(f"/console/approvals/{run}")
            text = page_text(page.text)
            assert re.search(r"Likely cost \$[\d.]+ \(\$[\d.]+ to \$[\d.]+\) Likely time [\d.]+ m?s \(", text)
            assert "alpha the caller's words nothing is withheld Add &lt;b&gt;carefully&lt;/b&gt;." in text
            assert "beta the output of step 0 the caller's words (by caller) Check." in text
            form = form_of(page.text) | {"decision": "refuse", "reason": "Not on a Monday."}
            other = await client.post(
                f"/console/approvals/{run}", data=form | {"digest": "0" * 64}, headers=SAME_ORIGIN
            )
            assert other.status_code == 409
            assert "Nothing was decided. What the run asks for now is shown below." in page_text(other.text)
            assert form["digest"] in other.text
            assert "Not on a Monday.</textarea>" in other.text
            assert "checked" not in other.text, "another plan needs another decision"
            for amount in ("much", "1.0e999", "nan"):
                wrong = form | {"decision": "approve", "max_usd": amount}
                faulty = await client.post(f"/console/approvals/{run}", data=wrong, headers=SAME_ORIGIN)
                assert (faulty.status_code, 'id="fault-max_usd">This must be a number.' in faulty.text) == (400, True)
                assert 'value="approve" required checked' in faulty.text
                assert "Not on a Monday.</textarea>" in faulty.text
            form["max_usd"] = "much"  # which a refusal does not need
            for _ in range(2):  # a double click decides once
                reply = await client.post(f"/console/approvals/{run}", data=form, headers=SAME_ORIGIN)
                assert (reply.status_code, reply.headers["location"]) == (303, f"/console/approvals/{run}")
            assert "Waits until" in text
            text = page_text((await client.get(f"/console/approvals/{run}")).text)
            assert "Refused by key:boss" in text
            assert "Waits until" not in text
            assert "No plan waits" in (await client.get("/console/approvals")).text
            decided = page_text((await client.get("/console/approvals?status=decided")).text)
            assert f"{run} refused key:boss" in decided
            assert "Not on a Monday." in decided
            second_reply = await client.post(
                "/v1/chat/completions", json=QUESTION, headers={"authorization": f"Bearer {boss}"}
            )
            own = second_reply.json()["baton"]["run"]
            text = page_text((await client.get(f"/console/approvals/{own}")).text)
            assert "began this run; somebody else must decide." in text
            client.cookies.clear()
            await sign_in(client, await key_of(runtime, "devel", "developer"))
            assert "Not on a Monday." not in (await client.get("/console/approvals?status=decided")).text


@pytest.mark.long
async def test_a_new_question_appears_by_itself(runtime: Runtime, caller: httpx.AsyncClient) -> None:
    key = await key_of(runtime, "devel", "developer")
    with app_over(runtime.gateway) as app:
        console = Console(app, lambda: (PEPPER,), lambda: 1e9, lambda _error, _path: None)
        async with console_client(app) as client:
            await sign_in(client, key)
            assert "scope approvals:decide" not in (await client.get("/console/approvals")).text
            cookie = client.cookies["baton_console"]
        patches: asyncio.Queue[str] = asyncio.Queue(8)
        left = asyncio.Event()

        async def receive() -> dict[str, Any]:
            await left.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            if message.get("body"):
                await patches.put(message["body"].decode())

        scope = {
            "type": "http",
            "method": "GET",
            "path": "/console/approvals",
            "query_string": b"live",
            "headers": [(b"cookie", f"baton_console={cookie}".encode())],
        }
        async with asyncio.TaskGroup() as group:
            group.create_task(console(scope, receive, send))
            assert "No plan waits" in await asyncio.wait_for(patches.get(), PATIENCE_SECONDS)
            run = (await waiting(caller))["baton"]["run"]
            patch = await asyncio.wait_for(patches.get(), PATIENCE_SECONDS)
            left.set()
        assert f"/console/approvals/{run}" in patch
        assert 'hx-target="#waiting"' in patch
