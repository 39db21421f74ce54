"""The page of one run: what a person sees of the graph, the timeline and a step, at the present and at any instant."""

import asyncio
import re
from collections.abc import AsyncIterator, Iterable
from contextlib import asynccontextmanager
from html import unescape
from html.parser import HTMLParser
from random import Random
from types import SimpleNamespace
from typing import Any

import httpx
import pytest

from app.console import run as run_page
from app.console.api import Api, Event, Session
from app.console.live import END, Live, patch
from app.console.run import REGIONS
from app.console.step_pane import content as step_content
from app.console.step_pane import why_no_alternatives
from app.gateway.http.api_keys import mint
from app.process.wiring import Runtime
from tests.console.test_live import receive_in_browser, regions_of_event
from tests.harness.console import SAME_ORIGIN, console_client, page_text, sign_in
from tests.harness.in_process import plan, plan_text, script_answers, script_plans
from tests.harness.prepared_apps import app_over
from tests.harness.waiting import until
from tests.stubs import Fail, Hang, ProviderStub, Reply, ToolCall

HOSTILE = '</text><script>alert(1)</script>{{ 7*7 }}\x1b[31m\u202e"><img src=x onerror=alert(2)>'
STEPS = plan(("alpha", "Think about it", ["user"]), ("beta", "Draft it", ["user"]), ("gamma", "Answer it", [1]))
EMPTY = {"area", "br", "hr", "img", "input", "link", "meta"}


@pytest.fixture
async def browser(runtime: Runtime, client: httpx.AsyncClient) -> AsyncIterator[httpx.AsyncClient]:
    """A browser that is signed in with the key of `client`."""
    with app_over(runtime.gateway) as app:
        async with console_client(app) as opened_client:
            await sign_in(opened_client, client.headers["authorization"].removeprefix("Bearer "))
            yield opened_client


class Page(HTMLParser):
    """A page as its elements: every tag is closed where it must be, and ids are there once."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.ids: list[str] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(html)
        assert self.open == []
        assert len(set(self.ids)) == len(self.ids)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.ids += [value or "" for name, value in attrs if name == "id"]
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, f"<{tag}> is closed where it is not open"

    def links(self, part: str) -> list[str]:
        return [attrs["href"] or "" for tag, attrs in self.tags if tag == "a" and part in (attrs.get("href") or "")]


async def ask(client: httpx.AsyncClient, steps: Any = STEPS) -> str:
    body = {"model": "baton-mini", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}
    reply = await client.post("/v1/chat/completions", json=body | {"baton": {"plan": steps}})
    return str(reply.headers["x-baton-run"])


async def page_of(browser: httpx.AsyncClient, address: str) -> tuple[Page, str]:
    reply = await browser.get(address)
    assert reply.status_code == 200, reply.text
    return Page(reply.text), unescape(page_text(reply.text))


@pytest.mark.long
async def test_a_step_shows_what_it_saw_what_was_withheld_and_what_its_calls_came_to(
    stub: ProviderStub, client: httpx.AsyncClient, browser: httpx.AsyncClient
) -> None:
    script_answers(stub)
    stub.script("alpha", Fail(status=401))
    run = await ask(client)
    page, text = await page_of(browser, f"/console/runs/{run}")
    assert {tag for tag, _ in page.tags} >= {"svg", "path", "rect"}
    assert len([attrs for tag, attrs in page.tags if tag == "path" and "withheld" in (attrs["class"] or "")]) == 3
    assert "No step is chosen" in text
    assert "Answer the output of step 2 , by gamma" in text
    assert "waits for the first word" in text, "the colours of the timeline have a legend"
    [link] = set(page.links("step=2"))
    page, text = await page_of(browser, link)
    assert (
        "What it did not see, and why the caller's conversation. It is not on the access list, by the caller's own"
        in text
    )
    assert "the output of step 1. A call contained it." in text
    assert "Instruction Answer it" in text
    assert "The better answer." in text
    page, text = await page_of(browser, f"/console/runs/{run}?step=0")
    assert "There were no alternatives: the plan is the caller's own." in text
    assert "in place of alpha" in text
    assert "HTTP 401" in text
    page, text = await page_of(browser, f"/console/runs/{run}?by=money&step=plan:0")
    assert "Where its money went" in text
    assert "No model was called for this plan." in text


@pytest.mark.long
async def test_the_cursor_shows_the_run_as_it_was(
    stub: ProviderStub, client: httpx.AsyncClient, browser: httpx.AsyncClient
) -> None:
    script_answers(stub)
    run = await ask(client)
    page, _ = await page_of(browser, f"/console/runs/{run}?t=0&step=2")
    events = (await client.get(f"/v1/runs/{run}/events")).json()["data"]
    planned = next(event for event in events if event["kind"] == "plan.step" and event["body"]["n"] == 2)
    _, text = await page_of(browser, f"/console/runs/{run}?t={planned['at'] - events[0]['at']}&step=2")
    assert "As it was" in text
    assert "The better answer." not in text, "the answer had not been given"
    following = [attrs for tag, attrs in page.tags if tag == "a" and attrs.get("rel") == "next"]
    assert len(following) == 1
    last = await page_of(browser, f"/console/runs/{run}?t=999999&step=2")
    assert "The better answer." in last[1]
    for wrong in ("t=nan&step=%22%3E", "t=x&step=plan:x&by=%3Cb%3E", "t=-1&step=99"):
        await page_of(browser, f"/console/runs/{run}?{wrong}")


async def test_a_run_has_as_many_steps_on_its_page_as_in_the_list(
    stub: ProviderStub, client: httpx.AsyncClient, browser: httpx.AsyncClient
) -> None:
    """Those of a plan that was rejected are shown in the graph, and not counted."""
    script_answers(stub)
    rejected = plan_text((0, "Think about it", ["user"]), (1, "Answer it", ["user", 7]))
    accepted = Reply(chunks=(plan_text((1, "Answer it", ["user"])),))
    stub.script("planner", Reply(chunks=(rejected[:-30], rejected[-30:]), gap=0.1), accepted)
    body = {"model": "baton-ultra", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}
    reply = await client.post("/v1/chat/completions", json=body)
    graph = (await client.get(f"/v1/runs/{reply.headers['x-baton-run']}/graph")).json()
    assert len([node for node in graph["nodes"] if node["kind"] == "step"]) == 2
    for address in (f"/console/runs/{reply.headers['x-baton-run']}", "/console/runs"):
        assert "single, 1 step " in (await page_of(browser, address))[1]


@pytest.mark.long
async def test_text_of_workers_is_text_whatever_it_contains(
    stub: ProviderStub, client: httpx.AsyncClient, browser: httpx.AsyncClient
) -> None:
    stub.always("*", Reply(chunks=(HOSTILE,)))
    run = await ask(client, plan(("alpha", HOSTILE.replace("\x1b", ""), ["user"]), ("beta", "Answer", [0])))
    for address in (f"/console/runs/{run}?step=0", f"/console/runs/{run}/explain", f"/console/compare?a={run}&b={run}"):
        reply = await browser.get(address)
        page = Page(reply.text)
        assert all(attrs.get("src", "").startswith("/console/static/") for tag, attrs in page.tags if tag == "script")
        assert "img" not in {tag for tag, _ in page.tags}
        assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
        assert not re.search("[\x1b\u202e]", reply.text)
    text = page_text((await browser.get(f"/console/runs/{run}?step=0")).text)
    assert "␛[31m[U+202E]" in text


@pytest.mark.parametrize(
    ("probability", "reason"), [(None, "reports no probabilities"), (0.5, "not those of the other")]
)
def test_why_a_model_has_no_alternatives_is_said_from_what_it_reported(probability: float | None, reason: str) -> None:
    assert reason in why_no_alternatives({"chosen_by": "conductor", "probability": probability})


@pytest.mark.parametrize(("proposal", "shown"), [(1, True), (0, False)])
def test_the_alternatives_of_a_selector_stand_at_the_steps_of_the_plan_that_it_chose(
    proposal: int, *, shown: bool
) -> None:
    choice = {"proposal": 1, "action": "reason bob"}
    own = {"n": 0, "chosen_by": "selector", "probability": None}
    views = {
        "explanation": {"steps": [own], "shape": {"choice": choice}},
        "graph": {"nodes": [{"kind": "step", "number": 0, "proposal": proposal}]},
        "step": None,
    }
    content = step_content(views, 0)
    assert (content["choice"], content["no_choice"] == "") == (choice if shown else None, shown)


@pytest.mark.long
async def test_a_step_whose_output_a_replay_has_kept_says_whose_output_it_is(
    stub: ProviderStub, client: httpx.AsyncClient, browser: httpx.AsyncClient
) -> None:
    script_answers(stub)
    run = await ask(client)
    replay = await client.post(f"/v1/runs/{run}/replay", json={"from_step": 2, "wait": 30})
    page, text = await page_of(browser, f"/console/runs/{replay.json()['id']}?step=1")
    assert text.count("Nobody was called: its output is that of step 1 of") == 2
    assert len(page.links(f"/console/runs/{run}?step=1")) == 2
    assert "None" not in text


@pytest.mark.long
async def test_a_step_of_the_conductor_itself_says_where_its_calls_are(
    stub: ProviderStub, client: httpx.AsyncClient, browser: httpx.AsyncClient
) -> None:
    script_answers(stub)
    outer = plan_text((0, "Draft it", ["user"]), (3, "Take it apart", [0]), (1, "Put it together", ["user", 1]))
    script_plans(stub, outer, plan_text((1, "Look at it", ["user"])), plan_text())
    body = {"model": "baton-nested", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}
    run = (await client.post("/v1/chat/completions", json=body)).headers["x-baton-run"]
    _, text = await page_of(browser, f"/console/runs/{run}?step=1")
    assert text.count("The conductor itself has the step: its calls are those of the plan inside it.") == 2
    assert "Nothing has been sent" not in text


@pytest.mark.long
async def test_a_step_that_waits_for_tools_shows_what_it_has_called(
    stub: ProviderStub, client: httpx.AsyncClient, browser: httpx.AsyncClient
) -> None:
    call = ToolCall("weather", '{"city": "Bonn"}')
    stub.script("alpha", Reply(chunks=(), tool_calls=(call,), finish="tool"), Reply(chunks=("Take a coat.",)))
    tool = {"type": "function", "function": {"name": "weather", "parameters": {"type": "object"}}}
    body = {"model": "baton-mini", "messages": [{"role": "user", "content": "What shall I wear?"}], "tools": [tool]}
    reply_body = (await client.post("/v1/chat/completions", json=body)).json()
    message, address = reply_body["choices"][0]["message"], f"/console/runs/{reply_body['baton']['run']}?step=0"
    _, text = await page_of(browser, address)
    assert 'whose results have not come yet. calls weather({"city": "Bonn"})' in text
    before = (await client.get(f"/v1/runs/{reply_body['baton']['run']}/state")).json()["seconds"]
    result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "It rains."}
    await client.post("/v1/chat/completions", json={**body, "messages": [*body["messages"], message, result]})
    _, text = await page_of(browser, address)
    assert 'calls weather({"city": "Bonn"}) tool It rains. Answer Take a coat.' in text
    _, text = await page_of(browser, f"{address}&t={before}")
    assert 'whose results have not come yet. calls weather({"city": "Bonn"})' in text
    assert "It rains." not in text, "the results had not come at that instant"


@pytest.mark.long
async def test_an_empty_panel_says_why(
    stub: ProviderStub, client: httpx.AsyncClient, browser: httpx.AsyncClient
) -> None:
    script_answers(stub)
    run = await ask(client)
    assert "Nobody has rated this run." in (await page_of(browser, f"/console/runs/{run}"))[1]
    refused, rated = [
        await browser.post(
            f"/console/runs/{run}/feedback", data={"thumbs": "up", "comment": comment}, headers=SAME_ORIGIN
        )
        for comment in ("<b>" * 1_400, "Fine")
    ]
    assert (refused.status_code, rated.status_code) == (400, 303)
    assert 'role="alert"' in refused.text
    assert unescape(refused.text).count("<b>" * 1_400) == 1, "what somebody wrote is not lost"
    assert "by console" in (await page_of(browser, f"/console/runs/{run}"))[1]
    assert "Replay it" in (await page_of(browser, f"/console/runs/{run}"))[1]
    await client.delete(f"/v1/runs/{run}")
    _, text = await page_of(browser, f"/console/runs/{run}?step=2")
    assert "Replay it" not in text, "there is nothing left to repeat"
    for what in ("Content", "The instruction was", "The answer was"):
        assert re.search(rf"{what} erased on \d{{4}}-\d\d-\d\d \d\d:\d\d:\d\d UTC by a request for this run", text), (
            what
        )
    assert "The better answer." not in text
    for worker in ("alpha", "beta", "gamma"):
        stub.always(worker, Fail(status=400))
    failed = await ask(client)
    _, text = await page_of(browser, f"/console/runs/{failed}?step=2")
    assert "before anything was sent" in text or "was skipped" in text


@pytest.mark.long
async def test_two_runs_are_compared_side_by_side(
    stub: ProviderStub, client: httpx.AsyncClient, browser: httpx.AsyncClient
) -> None:
    script_answers(stub)
    first, second = await ask(client), await ask(client, plan(("beta", "Answer it", ["user"])))
    _, text = await page_of(browser, f"/console/compare?a={first}&b={second}")
    assert "the same subtask" in text
    assert "it has no such step" in text
    assert "Only the second saw the conversation." in text
    missing = await browser.get(f"/console/compare?a={first}&b=none")
    assert (missing.status_code, 'role="alert"' in missing.text) == (404, True)
    assert f'name="a" value="{first}"' in missing.text, "what was typed is kept"
    assert (await browser.get("/console/compare")).status_code == 200


def regions(html: str, names: Iterable[str] = REGIONS) -> dict[str, str]:
    """The regions of a page that patches replace, by their ids."""
    regions_by_id = {}
    for name in names:
        [(start, tag)] = [(match.start(), match[1]) for match in re.finditer(rf'<(\w+) id="{name}"', html)]
        depth = 0
        for one in re.finditer(rf"<(/?){tag}\b", html[start:]):
            depth += -1 if one[1] else 1
            if not depth:
                regions_by_id[name] = html[start : start + one.end()] + ">"
                break
    return regions_by_id


def apply_patches(regions_shown: dict[str, str], stream: str) -> list[int]:
    """Put the patches of a stream in place, and return their ids."""
    ids = []
    for block in stream.split("\n\n"):
        data = "\n".join(line[6:] for line in block.split("\n") if line.startswith("data: "))
        for name, html in re.findall(r'<hx-partial hx-target="#([a-z-]+)"[^>]*>(.*?)</hx-partial>', data, re.DOTALL):
            regions_shown[name] = html.strip()
        ids += [int(line[4:]) for line in block.split("\n") if line.startswith("id: ")]
    return ids


@pytest.mark.long
async def test_after_any_break_the_page_equals_a_fresh_one(
    stub: ProviderStub, client: httpx.AsyncClient, browser: httpx.AsyncClient
) -> None:
    script_answers(stub)
    stub.script("gamma", Hang())
    order = {"model": "baton-mini", "input": "2 + 2?", "background": True, "baton": {"plan": STEPS}}
    run = (await client.post("/v1/responses", json=order)).json()["id"].removeprefix("resp_")
    await until(lambda: any(request.model == "gamma" for request in stub.requests))
    address, live = f"/console/runs/{run}?step=2", f"/console/runs/{run}/live?step=2"
    page = (await browser.get(address)).text
    assert f'hx-sse:connect="/console/runs/{run}/live?after=' in page
    stale = regions(page)
    async with asyncio.TaskGroup() as group:
        following = group.create_task(browser.get(live))
        await asyncio.sleep(0)
        assert (await client.post(f"/v1/runs/{run}/cancel")).status_code == 200
    fresh = regions((await browser.get(address)).text)
    last = (await client.get(f"/v1/runs/{run}")).json()["seq"]
    assert stale != fresh
    regions_shown = dict(stale)
    ids = apply_patches(regions_shown, following.result().text)
    assert (ids[-1], ids, regions_shown) == (last, sorted(set(ids)), fresh)
    assert following.result().text.endswith("event: end\ndata: \n\n")
    chance = Random(run)
    for cut in chance.sample(range(last), 3):
        regions_shown = dict(stale)
        reply = await browser.get(live, headers={"last-event-id": str(cut)})
        assert apply_patches(regions_shown, reply.text)[-1] == last
        assert regions_shown == fresh
    nothing = await browser.get(live, headers={"last-event-id": str(last)})
    assert apply_patches(dict(fresh), nothing.text) == []


def test_a_patch_keeps_every_character_of_a_text() -> None:
    text = "one\u2028two\x85three\x0cfour"
    assert [line for line in patch("7", {"a": f"<p>{text}</p>"}).split("\n") if text in line]


@pytest.mark.parametrize(("state", "is_over"), [("running", False), ("succeeded", True)])
async def test_a_page_is_to_connect_again_when_the_api_ends_its_stream_before_the_run(
    state: str, *, is_over: bool
) -> None:
    """As it does where the service stops, which waits for its open streams."""

    class Streams:
        @asynccontextmanager
        async def events(self, *_: Any, last_event_id: str | None) -> AsyncIterator[AsyncIterator[Event]]:
            async def each() -> AsyncIterator[Event]:
                assert last_event_id == "7"
                yield Event("10", "", "{}")

            yield each()

        async def get(self, *_: Any) -> dict[str, str]:
            return {"state": state}

    pages: Any = SimpleNamespace(api=Streams())
    live = Live(run_page._journal(pages, Session(()), "run_1", "7"), regions_of_event)
    received = await receive_in_browser(live)
    assert "id: 10" in received
    assert (f"event: {END}" in received) is is_over


@pytest.mark.long
async def test_a_live_page_sends_no_content_again_after_it_was_erased(
    stub: ProviderStub, client: httpx.AsyncClient, runtime: Runtime
) -> None:
    script_answers(stub)
    run = await ask(client)
    session = Session((("authorization", client.headers["authorization"]),))
    cache, cursor = run_page._Cache(), run_page.Cursor(run, step="2")
    with app_over(runtime.gateway) as app:
        reader = run_page._Reader(SimpleNamespace(api=Api(app)))  # type: ignore[arg-type]
        before = await reader.read(session, cursor, cache=cache)
        await client.delete(f"/v1/runs/{run}")
        after = await reader.read(session, cursor, cache=cache)
    assert "Answer it" in str(before)
    assert "The better answer." in str(before)
    assert "Answer it" not in str(after)
    assert "The better answer." not in str(after)


async def test_a_part_of_the_page_runs_nothing_and_is_shown_in_no_frame(
    stub: ProviderStub, client: httpx.AsyncClient, browser: httpx.AsyncClient
) -> None:
    script_answers(stub)
    reply = await browser.get(f"/console/runs/{await ask(client)}/views")
    assert reply.headers["content-security-policy"] == "default-src 'none'; frame-ancestors 'none'"


@pytest.mark.long
async def test_who_may_not_write_is_offered_nothing_that_writes(
    stub: ProviderStub, client: httpx.AsyncClient, runtime: Runtime
) -> None:
    script_answers(stub)
    run = await ask(client)
    key, row = mint(runtime.gateway.pepper, tenant="acme", name="reader", scopes=["runs:read"], now=0.0)
    assert await runtime.gateway.store.add_key(row)
    with app_over(runtime.gateway) as app:
        async with console_client(app) as reader:
            await sign_in(reader, key)
            _, text = await page_of(reader, f"/console/runs/{run}?step=2")
    assert "Rating it needs a key with the scope runs:write." in text
    assert "The texts of this step need a key with the scope audit:read." in text
    assert "Replay it" not in text


@pytest.mark.long
async def test_an_ended_run_is_replayed_once_however_often_the_form_is_sent(
    stub: ProviderStub, client: httpx.AsyncClient, browser: httpx.AsyncClient
) -> None:
    script_answers(stub)
    run = await ask(client)
    page = (await browser.get(f"/console/runs/{run}")).text
    once = re.search(r'name="once" value="([^"]+)"', page)
    assert once is not None
    path, fields = f"/console/runs/{run}/replay", {"once": once[1]}
    replies = [await browser.post(path, data=fields, headers=SAME_ORIGIN) for _ in range(2)]
    assert replies[0].headers["location"] == replies[1].headers["location"] != f"/console/runs/{run}"
    _, text = await page_of(browser, replies[0].headers["location"])
    assert f"replay of {run}" in text


@pytest.mark.long
async def test_the_disclosures_of_all_runs_are_filtered_by_day_and_by_what_was_seen(
    stub: ProviderStub, client: httpx.AsyncClient, browser: httpx.AsyncClient
) -> None:
    script_answers(stub)
    run = await ask(client)
    page, text = await page_of(browser, "/console/disclosures?saw=user&since=2020-01-01")
    assert len(page.links(f"/console/runs/{run}?step=")) == 2, "two of its three steps see the conversation"
    assert "the caller's words" in text
    for filters in ("until=2020-01-01", "recipient=nobody", "user=nobody"):
        assert "Nothing that fits" in (await page_of(browser, f"/console/disclosures?{filters}"))[1]
    assert '<option value="embedder">' in (await browser.get("/console/disclosures")).text
    refused = await browser.get("/console/disclosures?since=tuesday")
    assert refused.status_code == 400
    assert 'role="alert"' in refused.text


async def test_a_picture_that_cannot_be_shown_has_the_browser_load_its_page_anew(
    stub: ProviderStub, client: httpx.AsyncClient, browser: httpx.AsyncClient
) -> None:
    """A sign-in page or an error in place of the picture would be put into the page."""
    script_answers(stub)
    views = f"/console/runs/{await ask(client)}/views?t=0"
    assert (await browser.get(views)).status_code == 200
    refusals = [await browser.get("/console/runs/run_none/views")]
    browser.cookies.clear()
    refusals.append(await browser.get(views))
    for reply in refusals:
        assert (reply.status_code, reply.headers["hx-refresh"], reply.content) == (204, "true", b"")
