"""The overview: numbers that lead to the runs behind them, reasons for what is hidden, and the check of the log."""

import asyncio
import html
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.parse import parse_qsl

import httpx
import pytest
from msgspec.structs import replace

from app.console.api import Api, Session
from app.console.app import Console
from app.console.session import COOKIE
from app.core.pool.budgets import Budget
from app.engine.sealer import Sealer
from app.gateway.http.api_keys import mint
from app.gateway.runs import overview_route
from app.process.wiring import Runtime
from tests.harness.console import ORIGIN, SAME_ORIGIN, console_client, hidden_value, page_text, sign_in
from tests.harness.in_process import app_over, ask, client_of, pool_text, running_service, script_answers
from tests.harness.stand_ins import GatewayStandIn
from tests.harness.waiting import until
from tests.stubs import Hang, ProviderStub


@pytest.fixture
async def runtime(tmp_path: Path) -> AsyncIterator[Runtime]:
    async with ProviderStub() as stub, running_service(tmp_path, pool_text(stub)) as running:
        script_answers(stub)
        yield running


async def wide_key(runtime: Runtime) -> str:
    key, row = mint(runtime.gateway.pepper, tenant="ops", name="ops", scopes=["admin"], now=0.0)
    assert await runtime.gateway.store.add_key(replace(row, all_tenants=True))
    return key


async def page_of(client: httpx.AsyncClient, path: str) -> str:
    reply = await client.get(path)
    assert reply.status_code == 200, reply.text
    return reply.text


async def test_a_number_whose_runs_no_filter_selects_leads_nowhere(tmp_path: Path) -> None:
    """Runs without a plan: a list without a filter by the topology would have all runs."""
    async with ProviderStub() as stub, running_service(tmp_path, pool_text(stub)) as runtime:
        script_answers(stub)
        stub.script("planner", Hang())
        async with client_of(runtime) as caller:
            await ask(caller)
            order = {"model": "baton-ultra", "input": "2 + 2?", "background": True}
            response = (await caller.post("/v1/responses", json=order)).json()["id"]
            await until(lambda: any(request.model == "planner" for request in stub.requests))
            assert (await caller.post(f"/v1/runs/{response}/cancel")).json()["topology"] is None
        with app_over(runtime.gateway) as app:
            async with console_client(app) as client:
                await sign_in(client, await wide_key(runtime))
                page = await page_of(client, "/console?period=hour")
    [row] = re.findall(r"<tr><th[^>]*>no plan yet</th>(.*?)</tr>", page, re.DOTALL)
    assert page_text(row).startswith("1 ")
    assert "href" not in row


@pytest.mark.long
async def test_every_link_of_the_overview_leads_to_runs_and_the_log_is_checked(runtime: Runtime) -> None:
    await runtime.gateway.store.set_budget(Budget("acme", "tenant", "", "day", 5_000_000))
    async with client_of(runtime) as caller:
        run = (await ask(caller)).json()["baton"]["run"]
        await caller.post(f"/v1/runs/{run}/feedback", json={"thumbs": "up"})
    await Sealer(runtime.context, ()).look(asyncio.Event())
    with app_over(runtime.gateway) as app:
        async with console_client(app) as client:
            await sign_in(client, await wide_key(runtime))
            page = await page_of(client, "/console?period=hour")
            links = sorted(set(re.findall(r'href="(/console/runs\?[^"]+)"', page)))
            assert len(links) > 10
            counts = {}
            for link in [html.unescape(link) for link in links]:
                counts[link] = "Runs 1 to 1 of 1" in page_text(await page_of(client, link))
            ours = [link for link in counts if "tier=baton-mini" in link or "worker=" in link or "metadata=" in link]
            assert all(counts[link] for link in ours), counts
            assert not [link for link in counts if re.search(r"(since|until)=\d{9}", link)], "times are for people"
            parts = ("outcome=ok", "topology=single", "tier=baton-mini&state=succeeded", "tenant=acme&sort=cost")
            for part in (*parts, "&rated=good", "queue=untaken"):
                assert any(part in link for link in counts), part
            past = html.unescape(await page_of(client, "/console?period=hour&until=2000000"))
            spent = re.search(r'"(/console/runs[^"]*tenant=acme&sort=cost)">\$', past)
            assert spent is not None
            await page_of(client, spent[1])
            form = dict(re.findall(r'<input type="hidden" name="(size|root)" value="([^"]+)">', page))
            verify = re.search(r'action="(/console/verify[^"]*)"', page)
            assert verify is not None
            checked = await client.post(verify[1], data=form, headers=SAME_ORIGIN)
            assert "and its root fits the log. The log that this page has shown before is its beginning" in page_text(
                checked.text
            )
            assert hidden_value(checked.text, "next") == "/console?period=hour", "as the choice of a theme leads back"
            wrong = await client.post("/console/verify", data=form | {"root": "0" * 64}, headers=SAME_ORIGIN)
            assert "The transparency log is not in order" in page_text(wrong.text)


@pytest.mark.long
async def test_hidden_parts_say_why_and_a_wrong_period_is_named(gateway: GatewayStandIn) -> None:
    async with console_client(gateway.app, lambda: gateway.seconds) as client:
        await sign_in(client, gateway.add_key(scopes=["runs:read"]))
        text = page_text(await page_of(client, "/console"))
        assert "All tenants share it: only a key of all tenants sees it." in text
        assert text.count("The key lacks the scope `") == 4
        assert "No run of this period has ended." in text
        wrong = await client.get("/console?period=year")
        assert (wrong.status_code, 'role="alert"' in wrong.text) == (400, True)
        refused = await client.post("/console/verify", data={"size": "1"}, headers=SAME_ORIGIN)
        assert refused.status_code == 403


@pytest.mark.long
async def test_a_list_that_is_followed_is_patched_to_what_a_fresh_page_shows(runtime: Runtime) -> None:
    key = await wide_key(runtime)
    async with client_of(runtime) as caller, open_browser(runtime) as (console, client):
        await sign_in(client, key)
        session = Session((("cookie", f"{COOKIE}={client.cookies[COOKIE]}"),))
        query = {"limit": "20", "live": "1"}
        async with Api(console).events(session, "/console/runs", query=query) as patches:
            assert "There are no runs yet" in (await anext(patches)).data
            run = (await ask(caller)).json()["baton"]["run"]
            patch = ""
            while f"row-{run}" not in patch or ">succeeded<" not in patch:
                patch = (await anext(patches)).data
        page = await page_of(client, "/console/runs?limit=20")
    region = re.search(r'<div id="runs">.*</nav>', patch, re.DOTALL)
    assert region is not None
    assert region[0] in page


@pytest.mark.long
async def test_an_overview_is_patched_to_what_a_fresh_page_shows(
    runtime: Runtime, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(overview_route, "REFRESH_SECONDS", 0.0)
    async with client_of(runtime) as caller, open_browser(runtime) as (console, client):
        await sign_in(client, await wide_key(runtime))
        session = Session((("cookie", f"{COOKIE}={client.cookies[COOKIE]}"),))
        empty = await page_of(client, "/console?period=hour")
        live = re.search(r'hx-sse:connect="([^"]+)"', empty)
        assert live is not None
        query = dict(parse_qsl(html.unescape(live[1]).partition("?")[2]))
        async with Api(console).events(session, "/console", query=query) as patches:
            await ask(caller)
            patch = ""
            while "worker=alpha" not in patch and "outcome=ok" not in patch:
                patch = (await anext(patches)).data
        page = await page_of(client, "/console?period=hour")
    assert "No call was made in this period." in empty
    for region in ("overview-now", "overview-sums", "overview-buckets", "overview-tables"):
        assert f'hx-target="#{region}"' in patch
        assert page.count(f'id="{region}"') == patch.count(f'id="{region}"') == 1


@asynccontextmanager
async def open_browser(runtime: Runtime) -> AsyncIterator[tuple[Console, httpx.AsyncClient]]:
    """A console of the service, and a browser of it."""

    def fail(error: Exception, _path: str) -> None:
        raise error

    with app_over(runtime.gateway) as app:
        console = Console(app, runtime.gateway.peppers, runtime.gateway.now, fail)
        transport = httpx.ASGITransport(console)
        async with httpx.AsyncClient(transport=transport, base_url=ORIGIN) as client:
            yield console, client
