"""The list of runs in the console."""

import re
from urllib.parse import parse_qs, urlsplit

import pytest

from tests.harness.console import page_text, signed_in_client
from tests.harness.stand_ins import GatewayStandIn, row_of


def stock_with_runs(gateway: GatewayStandIn) -> str:
    """Give the stand-in 23 runs, some of which are particular; returns a key."""
    gateway.store.rows = [row_of(f"run_{n:02}", "acme", 1e9 + n) for n in range(20)]
    gateway.store.rows += [
        row_of("run_planned", "acme", 1e9 + 30, degraded=True),
        row_of("run_shadow", "acme", 1e9 + 31, origin_kind="shadow", origin_run="run_01"),
        row_of("run_waits", "acme", 1e9 + 32, state="awaiting_approval", ended_at=None),
        row_of("run_failed", "acme", 1e9 + 33, state="failed", error="<script>alert(1)</script>\u202e"),
        row_of("run_of_others", "other", 1e9 + 34),
    ]
    return gateway.add_key()


async def test_each_run_has_its_facts_and_a_word_for_what_is_particular(gateway: GatewayStandIn) -> None:
    async with signed_in_client(gateway, stock_with_runs(gateway)) as client:
        page = (await client.get("/console/runs")).text
    rows = {name: html for name, html in re.findall(r'<tr id="row-([^"]+)">(.*?)</tr>', page, re.DOTALL)}
    assert "run_of_others" not in page
    assert 'href="/console/runs/run_shadow"' in rows["run_shadow"]
    assert 'class="state mark shadow">shadow<' in rows["run_shadow"]
    assert 'class="state mark preview">preview<' in rows["run_planned"]
    assert 'class="state mark degraded">degraded<' in rows["run_planned"]
    assert 'class="state awaiting_approval">awaiting approval<' in rows["run_waits"]
    words = page_text(rows["run_19"]).split()
    assert (words[1], *words[4:6]) == ("succeeded", "baton-mini", "chain,")
    assert "<script>alert" not in page
    assert "&lt;script&gt;alert(1)&lt;/script&gt;[U+202E]" in rows["run_failed"]
    assert "Runs 1 to 20 of 24" in page_text(page)


async def test_the_address_is_the_state_of_the_form_and_of_the_pages(gateway: GatewayStandIn) -> None:
    async with signed_in_client(gateway, stock_with_runs(gateway)) as client:
        page = (await client.get("/console/runs?state=succeeded&tier=&limit=20&sort=time")).text
        assert '<option value="succeeded" selected>' in page
        following = re.search(r'rel="next" href="([^"]+)"', page)
        assert following is not None
        query = parse_qs(urlsplit(following[1].replace("&amp;", "&")).query)
        assert (query["state"], "tier" in query) == (["succeeded"], False)
        second = (await client.get(following[1].replace("&amp;", "&"))).text
        assert 'rel="prev"' in second
        assert "Previous" not in page_text(page)
        assert "hx-sse:connect" not in (await client.get("/console/runs?follow=no")).text
        empty = page_text((await client.get("/console/runs?state=expired")).text)
        assert "No run of those that your key may see fits these filters." in empty


@pytest.mark.parametrize(("query", "message"), [("since=x", "since"), ("after=x", "after"), ("state=x", "state")])
async def test_a_filter_that_the_api_refuses_is_named_above_the_list(
    gateway: GatewayStandIn, query: str, message: str
) -> None:
    async with signed_in_client(gateway, stock_with_runs(gateway)) as client:
        reply = await client.get(f"/console/runs?{query}")
    fault = re.search(r'role="alert">([^<]*)<', reply.text)
    assert fault is not None
    assert (reply.status_code, message in fault[1]) == (400, True)
    assert 'name="tier"' in reply.text


async def test_only_a_key_of_all_tenants_is_offered_tenants(gateway: GatewayStandIn) -> None:
    key = stock_with_runs(gateway)
    async with signed_in_client(gateway, key) as client:
        assert 'name="tenant"' not in (await client.get("/console/runs")).text
    wide = gateway.add_key("wide", all_tenants=True)
    async with signed_in_client(gateway, wide) as client:
        page = (await client.get("/console/runs")).text
    assert 'name="tenant"' in page
    assert "run_of_others" in page
