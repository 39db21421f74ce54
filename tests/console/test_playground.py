"""The playground in front of a real service: asking, following, tools, ratings, refusals, and the request as code."""

import ast
import asyncio
import json
import re
from asyncio.subprocess import PIPE
from collections.abc import AsyncIterator
from contextlib import redirect_stdout
from html import unescape
from io import StringIO
from pathlib import Path
from typing import Any

import httpx
import pytest

from app.console.api import Api, timeout_error
from app.gateway.http.api_keys import mint
from app.process.wiring import Runtime
from tests.harness.console import SAME_ORIGIN, hidden_value, page_text
from tests.harness.conversations import look_call, tool_call_reply
from tests.harness.in_process import ANSWERS, plan_text, pool_text, running_service, script_answers, script_plans
from tests.harness.playground import (
    HOSTILE,
    live_stream,
    recording_requests,
    run_of_page,
    section,
    submit_form,
    visiting,
)
from tests.harness.prepared_apps import app_over
from tests.harness.stand_ins import serving
from tests.harness.waiting import until
from tests.stubs import Fail, ProviderStub, Reply, Stall, ToolCall


@pytest.fixture
async def browser(runtime: Runtime) -> AsyncIterator[httpx.AsyncClient]:
    async with visiting(runtime) as client:
        yield client


@pytest.mark.long
async def test_a_question_is_planned_carried_out_and_answered_before_the_readers_eyes(
    stub: ProviderStub, browser: httpx.AsyncClient
) -> None:
    script_answers(stub)
    script_plans(stub, plan_text((0, "Think it over.", ["user"]), (1, "Answer it.", [0])))
    page = await submit_form(browser, tier="baton-ultra", usd="0.5", system="Be brief.")
    run = run_of_page(page)
    live = await live_stream(browser, run)
    assert live.rstrip().endswith("event: end")
    text = page_text(section(live, "steps"))
    assert re.search(r"Think it over\. Shown: the conversation", text)
    assert "Withheld: the conversation (not listed" in text
    assert f'href="/console/runs/{run}?step=1#run-pane"' in section(live, "steps")
    assert any(answer in section(live, "answer") for answer in ANSWERS.values())
    outcome = page_text(section(live, "outcome"))
    for fact in ("succeeded", "Cost $0.0", "Tokens", "Time", run, "Why it went so", "What nobody knows"):
        assert fact in outcome
    again = (await browser.get(f"/console/playground/{run}")).text
    for name in ("steps", "answer", "outcome"):
        assert section(live, name) == section(again, name), "a fresh page shows what the patches have made"
    assert "hx-sse:connect" not in again
    ids = re.findall(r'\bid="([^"]*)"', again)
    assert len(ids) == len(set(ids)), "a patch replaces one element by its id"


async def test_a_step_has_its_number_and_what_it_was_shown(stub: ProviderStub, browser: httpx.AsyncClient) -> None:
    """A step of a second plan does not begin at 0 again, and one that was skipped was shown nothing."""
    rejected = plan_text((0, "Think it over.", ["user"]), (1, "Answer it.", ["user", 7]))
    accepted = Reply(chunks=(plan_text((0, "Draft it.", ["user"]), (1, "Answer it.", [0])),))
    stub.script("planner", Reply(chunks=(rejected[:-30], rejected[-30:]), gap=0.1), accepted)
    for worker in ("alpha", "beta", "gamma"):
        stub.always(worker, Fail(status=400))
    run = run_of_page(await submit_form(browser, tier="baton-ultra"))
    await live_stream(browser, run)
    page = (await browser.get(f"/console/playground/{run}")).text
    first, second = section(page, "steps").split("<ol ")[1:]
    assert first.startswith('class="steps" start="0">')
    assert second.startswith('class="steps" start="1">')
    assert "Draft it. Shown: the conversation." in page_text(second)
    assert "Answer it. Shown: nothing." in page_text(second)
    assert "Workers alpha, beta, gamma Run" in page_text(section(page, "outcome")), "as in the list of runs"


@pytest.mark.long
async def test_the_form_sent_twice_begins_one_run(stub: ProviderStub, browser: httpx.AsyncClient) -> None:
    script_answers(stub)
    first, again = await submit_form(browser, once="a"), await submit_form(browser, once="a")
    assert run_of_page(first) == run_of_page(again)
    assert run_of_page(await submit_form(browser, once="a", question="And 3 + 3?")) != run_of_page(first)
    assert run_of_page(await submit_form(browser, once="b")) != run_of_page(first)


async def test_a_question_whose_reply_is_lost_begins_one_run_when_it_is_asked_again(
    runtime: Runtime, stub: ProviderStub, browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    script_answers(stub)
    begin_really = Api.begin_run
    runs: list[str] = []

    async def begin_and_lose_the_reply(self: Api, *args: Any) -> str:
        runs.append(await begin_really(self, *args))
        raise timeout_error("The run has not begun.")

    with monkeypatch.context() as patch:
        patch.setattr(Api, "begin_run", begin_and_lose_the_reply)
        lost = await submit_form(browser, once="a")
    assert lost.status_code == 504
    again = await submit_form(browser, once=hidden_value(lost.text, "once"))
    assert [run_of_page(again)] == runs


@pytest.mark.long
async def test_a_long_answer_says_how_much_of_it_is_not_shown_and_a_huge_one_breaks_no_page(
    stub: ProviderStub, browser: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.console.following.SHOWN_CHARS", 10)
    stub.always("*", Reply(chunks=("w" * 2_010,)))
    live = await live_stream(browser, run_of_page(await submit_form(browser, tier="baton-mini")))
    assert "wwwwwwwwww 2,000 more characters are not shown here" in page_text(section(live, "answer"))
    stub.always("*", Reply(chunks=("w" * 50_000,) * 200))
    live = await live_stream(browser, run_of_page(await submit_form(browser, tier="baton-mini", once="second")))
    assert len(live) < 100_000
    assert "failed" in page_text(section(live, "outcome")), "it is longer than the tier permits"


async def test_an_answer_that_the_key_may_not_read_is_not_said_to_be_missing(
    stub: ProviderStub, client: httpx.AsyncClient, browser: httpx.AsyncClient
) -> None:
    script_answers(stub)
    body = {"model": "baton-mini", "messages": [{"role": "user", "content": "What is 2 + 2?"}]}
    run = (await client.post("/v1/chat/completions", json=body)).headers["x-baton-run"]
    text = page_text(section((await browser.get(f"/console/playground/{run}")).text, "answer"))
    assert "audit:read for the answer of another key" in text
    assert "without an answer" not in text


@pytest.mark.long
async def test_a_run_goes_on_when_its_page_is_closed(stub: ProviderStub, browser: httpx.AsyncClient) -> None:
    goes_on = asyncio.Event()
    stub.always("alpha", Reply(chunks=("Fo", "ur."), fault=Stall(after=1, seconds=goes_on)))
    page = await submit_form(browser)
    run = run_of_page(page)
    assert f'hx-sse:connect="/console/playground/{run}?live"' in page.text
    assert hidden_value(page.text, "next") == f"/console/playground/{run}", (
        "the choice of a theme leads back to the run"
    )
    reading = asyncio.create_task(browser.get(f"/console/playground/{run}?live"))
    await stub.wait_for(model="alpha")
    reading.cancel()
    await asyncio.wait([reading])
    goes_on.set()
    assert "Four." in section(await live_stream(browser, run), "answer")
    assert len(stub.requests_for("alpha")) == 1


@pytest.mark.long
async def test_a_call_of_a_tool_is_answered_in_a_form(stub: ProviderStub, browser: httpx.AsyncClient) -> None:
    stub.script(
        "alpha", tool_call_reply(look_call(HOSTILE)), tool_call_reply(look_call("b")), Reply(chunks=("It is 4.",))
    )
    tools = '[{"name": "look", "parameters": {"type": "object"}}]'
    page = await submit_form(browser, tools=tools)
    run = run_of_page(page)
    live = await live_stream(browser, run)
    assert "The worker calls 1 tool." in page_text(section(live, "answer"))
    assert "<script>" not in live
    second = await submit_form(
        browser,
        "results",
        tools=tools,
        turn=hidden_value(live, "turn"),
        history=hidden_value(page.text, "history"),
        result="A",
    )
    assert run_of_page(second) == run
    live = await live_stream(browser, run)
    third = await submit_form(
        browser,
        "results",
        tools=tools,
        turn=hidden_value(live, "turn"),
        history=hidden_value(second.text, "history"),
        result="B",
    )
    assert run_of_page(third) == run
    assert "It is 4." in section(await live_stream(browser, run), "answer")
    script_answers(stub)
    anew = await submit_form(browser, once="anew", tools=tools, history=hidden_value(third.text, "history"))
    assert run_of_page(anew) != run, "another question begins another run"
    assert hidden_value(anew.text, "history") == ""
    assert [message["role"] for message in stub.requests_for("alpha")[2].json["messages"]][-4:] == [
        "assistant",
        "tool",
    ] * 2


@pytest.mark.long
async def test_a_call_of_a_tool_of_free_text_is_answered_in_a_form(
    stub: ProviderStub, browser: httpx.AsyncClient
) -> None:
    stub.script("alpha", tool_call_reply(ToolCall("sh", '{"input":"ls -l"}')), Reply(chunks=("Two files.",)))
    tools = '[{"type": "custom", "custom": {"name": "sh"}}]'
    page = await submit_form(browser, tools=tools)
    run = run_of_page(page)
    live = await live_stream(browser, run)
    assert "Result of sh" in page_text(section(live, "answer"))
    assert ">ls -l</pre>" in section(live, "answer")
    history, turn = hidden_value(page.text, "history"), hidden_value(live, "turn")
    second = await submit_form(browser, "results", tools=tools, turn=turn, history=history, result="a b")
    assert run_of_page(second) == run
    assert "Two files." in section(await live_stream(browser, run), "answer")


@pytest.mark.long
async def test_results_that_are_refused_stay_on_the_page_with_their_run(
    stub: ProviderStub, browser: httpx.AsyncClient
) -> None:
    two_calls = tool_call_reply(look_call("a"), look_call("b"))
    stub.script("alpha", two_calls, Reply(chunks=("It is 4.",)))
    tools = '[{"name": "look", "parameters": {"type": "object"}}]'
    page = await submit_form(browser, tools=tools)
    run = run_of_page(page)
    live = await live_stream(browser, run)
    fields = {"tools": tools, "turn": hidden_value(live, "turn"), "run": run, "result": ["\nfirst <b>", "second"]}
    for wrong in ({"usd": "much"}, {"usd": "-1"}):
        refused = await submit_form(browser, "results", history=hidden_value(page.text, "history"), **fields, **wrong)
        assert refused.status_code == 400
        assert 'id="usd-fault"' in refused.text
        assert run_of_page(refused) == run
        assert re.findall(r'name="result"[^>]*>\n(.*?)</textarea>', refused.text, re.DOTALL) == [
            "\nfirst &lt;b&gt;",
            "second",
        ]
        assert hidden_value(refused.text, "turn") == fields["turn"]
    taken = await submit_form(browser, "results", history=hidden_value(refused.text, "history"), **fields)
    assert run_of_page(taken) == run
    assert "It is 4." in section(await live_stream(browser, run), "answer")


@pytest.mark.long
async def test_a_rating_is_stored_and_the_page_stays(stub: ProviderStub, browser: httpx.AsyncClient) -> None:
    script_answers(stub)
    page = await submit_form(browser)
    run = run_of_page(page)
    await live_stream(browser, run)
    too_long = "so " * 1_400
    refused = await submit_form(browser, "up", run=run, comment=too_long)
    assert (refused.status_code, refused.text.count(too_long)) == (400, 1)
    rated = await submit_form(browser, "up", run=run, sent=hidden_value(page.text, "sent"), comment="Right.")
    assert f"Your rating of {run} is stored: good." in page_text(rated.text)
    assert "The same request as code" in rated.text
    assert "The draft." in section(rated.text, "answer")
    for forged in ("[1]", '"x"', "{}", '{"model": 1, "messages": [5]}'):
        rated = await submit_form(browser, "up", run=run, sent=forged)
        assert rated.status_code == 200, page_text(rated.text)
        assert "The same request as code" not in rated.text


@pytest.mark.long
async def test_who_changes_their_mind_on_another_page_has_one_rating(
    stub: ProviderStub, browser: httpx.AsyncClient
) -> None:
    script_answers(stub)
    run = run_of_page(await submit_form(browser))
    await live_stream(browser, run)
    await submit_form(browser, "up", run=run)
    await browser.post(f"/console/runs/{run}/feedback", data={"thumbs": "down"}, headers=SAME_ORIGIN)
    compared = page_text((await browser.get(f"/console/compare?a={run}&b={run}")).text)
    assert "Score 0.0 0.0" in compared


FAULTS = [
    ({"question": " "}, "question", "Write a question."),
    ({"tools": "[{"}, "tools", "This is not JSON"),
    ({"usd": "much"}, "usd", "Write a number"),
    ({"usd": "-1"}, "usd", "baton.budget.usd"),
    ({"steps": "1.5"}, "steps", "Write a whole number"),
    ({"format": "json_schema"}, "schema", "Write the JSON schema"),
    ({"labels": "no!"}, "labels", "baton.labels"),
    ({"max_tokens": "0"}, "max_tokens", "max_completion_tokens"),
    ({"tier": "none"}, "tier", "Choose another tier"),
    *[
        ({name: text}, name, "Write a")
        for name in ("usd", "steps", "max_tokens")
        for text in ("1e999", "nan", "9" * 30)
    ],
]
"""Fields that cannot be sent, with the field that is blamed and a word of the message."""


@pytest.mark.long
async def test_a_fault_stands_beside_its_field(browser: httpx.AsyncClient) -> None:
    for fields, field, message in FAULTS:
        page = await submit_form(browser, **fields)
        assert page.status_code in (400, 404)
        assert 'role="alert"' in page.text
        assert message in page_text(page.text)
        assert f'id="{field}-fault"' in page.text
        assert re.search(rf'id="{field}"[^>]* aria-describedby="{field}-fault[^>]* aria-invalid="true"', page.text), (
            field
        )


@pytest.mark.long
async def test_hidden_fields_that_somebody_has_changed_are_refused_as_a_page(browser: httpx.AsyncClient) -> None:
    for turn in ("5", "[5]", '{"tool_calls": 5}', '{"tool_calls": [5]}', '{"tool_calls": [{}]}', "no"):
        for history in ("", "5", '{"a": 1}', "[" * 200):
            page = await submit_form(browser, "results", turn=turn, history=history, result="4")
            assert (page.status_code, 'role="alert"' in page.text) == (400, True), (turn, history)


async def test_what_a_caller_writes_is_text(stub: ProviderStub, browser: httpx.AsyncClient) -> None:
    stub.always("alpha", Reply(chunks=(HOSTILE,)))
    page = await submit_form(browser, question=HOSTILE, system=HOSTILE)
    html = page.text + await live_stream(browser, run_of_page(page))
    assert "<svg" not in html
    assert "<script>alert" not in html
    assert "7 * 7" in html
    assert "[U+202E]" in section(await live_stream(browser, run_of_page(page)), "answer")
    assert "\\u202e" in page.text, "in code an invisible character is escaped, so that what is copied is the same"


@pytest.mark.long
async def test_a_refusal_is_shown_with_its_cause_and_the_next_step(
    runtime: Runtime, stub: ProviderStub, browser: httpx.AsyncClient
) -> None:
    barred = await submit_form(browser, labels="secret")
    assert barred.status_code == 400
    assert "not cleared for secret" in page_text(barred.text)
    assert "Take away a label or a tool" in page_text(barred.text)
    poor = await submit_form(browser, usd="0.000001")
    text = page_text(
        section(await live_stream(browser, run_of_page(poor)), "answer") if poor.status_code == 200 else poor.text
    )
    assert "Raise the budget of this request" in text
    for worker in ("alpha", "beta", "gamma"):
        stub.always(worker, Fail(status=401))
    failed = await live_stream(browser, run_of_page(await submit_form(browser)))
    assert "GET /v1/runs" in page_text(section(failed, "answer"))
    assert "failed" in page_text(section(failed, "outcome"))
    async with visiting(runtime, name="hasty", rpm=1) as hasty:
        pages = [await submit_form(hasty) for _ in range(2)]
    assert pages[1].status_code == 429
    assert re.search(r"Send it again in \d+ seconds", page_text(pages[1].text))


@pytest.mark.long
async def test_a_run_that_waits_for_an_approval_says_so_and_goes_on_by_itself(
    runtime: Runtime, stub: ProviderStub, browser: httpx.AsyncClient
) -> None:
    script_answers(stub)
    run = run_of_page(await submit_form(browser, approval="required"))
    key, row = mint(runtime.gateway.pepper, tenant="acme", name="boss", scopes=BOSS, now=0.0)
    assert await runtime.gateway.store.add_key(row)
    boss = {"authorization": f"Bearer {key}"}

    async def waits() -> bool:
        return (await browser.get(f"/v1/approvals/{run}", headers=boss)).status_code == 200

    await until(waits)
    html = section((await browser.get(f"/console/playground/{run}")).text, "answer")
    assert "waiting for approval" in html
    assert f'href="/console/approvals/{run}"' in html
    live = asyncio.create_task(live_stream(browser, run))
    digest = (await browser.get(f"/v1/approvals/{run}", headers=boss)).json()["digest"]
    decision = {"decision": "approve", "digest": digest}
    assert (await browser.post(f"/v1/approvals/{run}", headers=boss, json=decision)).status_code == 200
    assert ANSWERS["alpha"] in section(await live, "answer")


BOSS = ("approvals:decide", "runs:read")
TRICKY = {
    "question": 'It\'s "2 + 2"\\n\ttab \u202e \x7f \U0001f600?\r\nNo $HOME, `no`, %s, ${none}.',
    "system": "Be 'brief'.",
    "tools": '[{"name": "look", "description": "Looks \\u2028.", "parameters": {"type": "object"}}]',
    "format": "json_schema",
    "schema": '{"type": "object", "properties": {"sum": {"type": ["integer", "null"], "const": null}}, "required": []}',
    "max_tokens": "300",
    "usd": "0.05",
    "seconds": "25",
    "labels": "region:eu, phi",
    "effort": "low",
}
"""A form with every kind of value that is written otherwise in another language."""


def code_in(page: httpx.Response, language: str, url: str) -> str:
    """A piece of code of a page, for the service at another address."""
    match = re.search(rf'aria-label="Code: {re.escape(language)}">(.*?)</pre>', page.text, re.DOTALL)
    assert match is not None
    return unescape(match[1]).replace("http://baton", url)


def run_and_read_output(code: str) -> str:
    """The output of Python code that makes a `client`."""
    names: dict[str, Any] = {}
    output = StringIO()
    with redirect_stdout(output):
        exec(code, names)
    names["client"].close()
    return output.getvalue()


def arguments_in(code: str) -> dict[str, Any]:
    """The keyword arguments of the call in Python code that opens a stream."""
    call = next(
        node for node in ast.walk(ast.parse(code)) if isinstance(node, ast.Call) and "stream" in ast.unparse(node.func)
    )
    return {keyword.arg or "": ast.literal_eval(keyword.value) for keyword in call.keywords}


@pytest.mark.long
async def test_the_code_sends_what_the_page_has_sent(
    stub: ProviderStub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool = pool_text(stub).replace("strengths =", 'region = "eu"\nclearance = ["phi"]\nstrengths =')
    stub.always("alpha", Reply(chunks=('{"sum": null}',)))
    requests: list[tuple[str, dict[str, Any]]] = []
    async with running_service(tmp_path, pool) as runtime, visiting(runtime, requests) as browser:
        page = await submit_form(browser, **TRICKY)
        key, row = mint(runtime.gateway.pepper, tenant="acme", name="program", scopes=["runs:write"], now=0.0)
        assert await runtime.gateway.store.add_key(row)
        assert key not in page.text
        monkeypatch.setenv("BATON_API_KEY", key)
        with app_over(runtime.gateway) as app:
            async with serving(recording_requests(app, requests), runtime.gateway) as url:
                command = await asyncio.create_subprocess_shell(code_in(page, "curl", url), stdout=PIPE)
                printed = (await command.communicate())[0].decode()
                assert printed.endswith("data: [DONE]\n\n"), printed
                assert (
                    await asyncio.to_thread(run_and_read_output, code_in(page, "Python (openai)", url))
                    == '{"sum": null}'
                )
                arguments = arguments_in(code_in(page, "Python (anthropic)", url))
                body = arguments.pop("extra_body") | arguments | {"stream": True}
                headers = {"x-api-key": key, "anthropic-version": "2023-06-01"}
                async with httpx.AsyncClient(base_url=url, headers=headers) as client:
                    reply = await client.post("/v1/messages", json=body)
                assert "message_stop" in reply.text, reply.text
    console, curl, python, anthropic = [
        body for path, body in requests if path in ("/v1/chat/completions", "/v1/messages")
    ]
    assert console["messages"][1]["content"] == TRICKY["question"].replace("\r\n", "\n")
    assert console["baton"] == {
        "stream_steps": True,
        "budget": {"usd": 0.05, "seconds": 25.0},
        "labels": ["region:eu", "phi"],
    }
    assert curl == console
    assert python == console
    node = code_in(page, "Node (openai)", "").partition(".create(")[2].partition(");\nfor ")[0]
    assert json.loads(node) == console
    assert anthropic["messages"] == console["messages"][1:]
    assert anthropic["baton"] == console["baton"]
    assert anthropic["tools"][0]["name"] == "look"
