"""Text of workers and callers in every field that they can fill: nothing runs, nothing breaks a page."""

import json
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest

from tests.browser.distributed import Service
from tests.stubs import Fail, Reply, ToolCall, plan_reply

if TYPE_CHECKING:
    from playwright.sync_api import Page

MARKUP = (
    '"\'></pre></textarea></title><script>window.ran=1</script><img src=x onerror="window.ran=1">'
    '<svg onload="window.ran=1"><a href="javascript:window.ran=1">'
)
ELEMENT = '<h1 id="hostile">x</h1><hx-partial hx-target="main"><b id="hostile">x</b></hx-partial>'
HTMX = '<p id="hostile" hx-get="/console/sign-out" hx-trigger="load" hx-on:click="window.ran=1">'
STREAM = "\n\ndata: <b id='hostile'>x</b>\n\nevent: end\n\n"
TEMPLATE = "{{ 76543*98765 }}{% if true %}{{ config }}{% endif %}${76543*98765}<%= 76543*98765 %>"
"""Its product has ten digits: no id and no duration of a page has these by chance."""
MARKDOWN = "[x](javascript:window.ran=1) ![y](https://evil.example/z.png)"
MARKS = "invoice\u202efdp.exe\u2066\u200f \x1b[31m\x07\x08"
HOSTILE = MARKUP + ELEMENT + HTMX + STREAM + TEMPLATE + MARKDOWN + MARKS
LONG_WORD = "w" * 200_000
"""One word of 200 kB: the budget of tokens of a tier refuses a much longer one."""
HARM = """() => [
  window.ran === undefined ? '' : 'a script ran',
  document.querySelector('#hostile') ? 'an element was made' : '',
  document.querySelector('main img, main [onload], main [onerror], main iframe, main base') ? 'markup was made' : '',
  document.querySelector('a[href^="javascript:"], a[href*="evil.example"]') ? 'a link was made' : '',
  document.body.innerText.includes('7559769395') ? 'a template was carried out' : '',
  document.querySelectorAll('h1').length === 1 ? '' : 'the page is broken',
  document.querySelector('body > header nav') ? '' : 'the page has lost its head',
].filter(one => one)"""


@pytest.fixture(scope="module")
def runs(service: Service) -> dict[str, str]:
    """Runs with hostile texts everywhere: of three steps, failed, and with a long word; and a plan."""
    stub, runs_by_name = service.stub, {}
    stub.always("planner", plan_reply((0, HOSTILE, ["user"]), (1, HOSTILE, ["user"]), (2, HOSTILE, ["user", 0, 1])))
    for worker in ("alpha", "beta", "gamma"):
        stub.always(worker, Reply(chunks=(HOSTILE,)))
    more: dict[str, Any] = {"user": MARKUP, "metadata": {"team": HOSTILE[:500]}, "safety_identifier": MARKUP[:64]}
    runs_by_name["steps"] = ask(service, "baton-ultra", **more)
    rating = {"thumbs": "down", "comment": HOSTILE, "source": "test"}
    service.api("POST", f"/v1/runs/{runs_by_name['steps']}/feedback", json=rating)
    stub.always("alpha", Fail(status=400, message=HOSTILE))
    for worker in ("beta", "gamma"):
        stub.always(worker, Fail(status=400, message=HOSTILE))
    runs_by_name["failed"] = ask(service, "baton-mini")
    stub.always("alpha", Reply())
    runs_by_name["long"] = ask(service, "baton-mini", messages=[{"role": "user", "content": LONG_WORD}])
    plan = service.caller.http.post("/v1/plans", json=body("baton-ultra")).json()
    runs_by_name["plan"] = str(plan.get("id", ""))
    return runs_by_name


def body(tier: str, **more: Any) -> dict[str, Any]:
    """The body of a request whose every text is hostile."""
    messages = [{"role": "system", "content": HOSTILE}, {"role": "user", "content": HOSTILE}]
    return {"model": tier, "messages": messages} | more


def ask(service: Service, tier: str, **more: Any) -> str:
    """Send a request; return the id of its run, whatever becomes of it."""
    reply = service.caller.http.post("/v1/chat/completions", json=body(tier, **more))
    rows = service.caller.read("/v1/runs", request_id=reply.headers["x-request-id"])["data"]
    assert rows, reply.text
    return str(rows[0]["id"])


def addresses(runs: dict[str, str]) -> Iterator[str]:
    """Every page that shows something of these runs."""
    for name in ("steps", "failed", "long"):
        run = runs[name]
        yield from (f"/console/runs/{run}", f"/console/runs/{run}/explain", f"/console/playground/{run}")
        yield from (f"/console/runs/{run}?step={step}" for step in ("0", "1", "2", "plan:0"))
    yield f"/console/runs/{runs['steps']}?t=0.01&by=money"
    yield f"/console/compare?a={runs['steps']}&b={runs['failed']}"
    yield from ("/console", "/console/runs", "/console/plans", f"/console/plans/{runs['plan']}", "/console/approvals")
    yield "/console/disclosures"


def test_no_page_runs_or_obeys_a_text(page: "Page", runs: dict[str, str]) -> None:
    harm = {}
    for address in addresses(runs):
        page.goto(address)
        page.wait_for_load_state()
        if harm_done := page.evaluate(HARM):
            harm[address] = harm_done
    assert harm == {}


def test_what_was_written_is_shown_as_it_was_written(page: "Page", runs: dict[str, str]) -> None:
    page.goto(f"/console/runs/{runs['steps']}?step=2")
    text = page.inner_text("main")
    assert "<script>window.ran=1</script>" in text
    assert "{{ 76543*98765 }}" in text
    assert "[U+202E]" in text, "a mark that turns the text round is invisible"
    assert "\x1b" not in page.content()


def test_a_very_long_word_is_cut_with_its_length(page: "Page", runs: dict[str, str]) -> None:
    page.goto(f"/console/runs/{runs['long']}?step=0")
    assert len(page.content()) < 2 << 20
    assert "more characters" in page.inner_text("main")
    wider = page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth")
    assert wider <= 0


@pytest.mark.parametrize(
    "address",
    [
        "/console/runs/%3Cscript%3Ewindow.ran=1%3C%2Fscript%3E",
        "/console/runs/..%2F..%2Fadmin%2Fv1%2Fkeys",
        "/console/runs/run_1%0d%0aset-cookie:x",
        "/console/compare?a=%22%3E%3Cscript%3Ewindow.ran=1%3C/script%3E&b=x",
        "/console/runs?status=%22%3E%3Cimg%20src=x%20onerror=window.ran=1%3E&after=%00",
        "/console/sign-in?next=javascript:window.ran=1",
        "/console/plans/%7B%7B76543*98765%7D%7D",
    ],
)
def test_a_forged_address_is_a_page_that_says_so(page: "Page", address: str) -> None:
    page.goto(address)
    assert page.evaluate(HARM) == []


def test_the_playground_shows_hostile_texts_of_everybody_as_text(
    page: "Page", service: Service, runs: dict[str, str]
) -> None:
    """The caller's question and tools, the worker's call of a tool, what is typed as its result, and the answer."""
    assert runs
    typed = HOSTILE.replace("\x1b", "").replace("\x07", "").replace("\x08", "")
    call = ToolCall("look", json.dumps({"at": HOSTILE}))
    pieces = tuple([HOSTILE[at : at + 40] for at in range(0, len(HOSTILE), 40)])
    service.stub.script("alpha", Reply(chunks=pieces, tool_calls=(call,), finish="tool"), Reply(chunks=pieces))
    page.goto("/console/playground")
    page.get_by_text("System prompt, budget, labels, tools, format").click()
    page.get_by_label("Tools").fill(json.dumps([{"name": "look", "description": typed}]))
    page.get_by_label("System prompt").fill(typed)
    page.get_by_label("Question").fill(typed)
    page.get_by_label("Tier").select_option("baton-mini")
    page.get_by_role("button", name="Ask", exact=True).click()
    page.get_by_label("Result of look").fill(typed)
    assert page.evaluate(HARM) == []
    page.get_by_role("button", name="Send the results").click()
    page.get_by_role("heading", name="Why it went so").wait_for()
    assert "window.ran=1" in page.get_by_role("region", name="Text of the answer").inner_text()
    assert page.evaluate(HARM) == []
