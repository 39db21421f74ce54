"""An auditor reads turns, exchanges and exact messages of tool calls, over HTTP and in a terminal."""

import io
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from app.cli.runs import run_tree
from app.core.run.fold import fold
from app.engine.runs import cancellation
from app.gateway.http.api_keys import mint
from app.gateway.openapi import run_replies
from app.gateway.runs import audit
from app.process.wiring import Runtime
from tests.harness.conversations import Conversation, look_call, tool_call_reply
from tests.harness.in_process import client_of, pool_text, running_service
from tests.harness.waiting import until
from tests.stubs import ProviderStub, Reply

DONE = Reply(chunks=("It is ", "42."))


@pytest.fixture
async def runtime(stub: ProviderStub, tmp_path: Path) -> AsyncIterator[Runtime]:
    async with running_service(tmp_path, pool_text(stub)) as runtime:
        yield runtime


async def whole(runtime: Runtime, run: str) -> dict[str, Any]:
    store = runtime.context.store
    record = audit.render_run(await store.run(run), await store.journal(run))
    run_replies.Turn.model_validate(record["turns"][-1])
    return json.loads(json.dumps(record))


async def in_full(runtime: Runtime, run: str, n: int = 0) -> dict[str, Any]:
    journal = await runtime.context.store.journal(run)
    return await audit.step_in_full(runtime.context.store, fold(journal.events), journal.events, n)


async def tree_of(runtime: Runtime, run: str, *, full: bool = False) -> str:
    run_record, question = await run_tree.read_run(runtime.context.store, await runtime.context.store.run(run))
    console = Console(file=io.StringIO(), width=200)
    console.print(run_tree.draw(run_record, question, full=full))
    file = console.file
    assert isinstance(file, io.StringIO)
    return file.getvalue()


async def test_a_waiting_run_shows_what_it_waits_for(stub: ProviderStub, runtime: Runtime) -> None:
    stub.script("alpha", tool_call_reply(look_call("a", "x"), words="Let me see."))
    ended = (await Conversation(runtime).take_turn()).ended
    (call,) = ended.calls
    record = await whole(runtime, ended.state.run)
    assert record["state"] == record["steps"][0]["state"] == "awaiting_tool"
    (turn,) = record["turns"]
    assert (turn["number"], turn["finish"], turn["ended_at"] < turn["results_until"]) == (0, "tool_calls", True)
    (exchange,) = record["steps"][0]["exchanges"]
    assert (exchange["calls"], exchange["answered_at"]) == ([{"id": call.id, "name": "look"}], None)
    assert exchange["attempt"] == record["steps"][0]["attempts"][0]["id"]
    assert "Let me see." not in str(record), "what was said is content"
    assert '"a"' not in str(record), "what a tool was called with is content"
    step = await in_full(runtime, ended.state.run)
    (exchange,) = step["exchanges"]
    assert exchange["said"]["content"] == [{"type": "text", "text": "Let me see."}]
    assert exchange["said"]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"q": "a"}'}
    assert exchange["results"] is None
    tree = await tree_of(runtime, ended.state.run)
    assert "1 turn, waits for tool results until" in tree
    assert 'tools: look({"q": "a"}) → waits for the caller' in tree


async def test_calls_that_nobody_answered_keep_no_ended_run_waiting(stub: ProviderStub, runtime: Runtime) -> None:
    stub.script("alpha", tool_call_reply(look_call("a", "x")))
    run = (await Conversation(runtime).take_turn()).ended.state.run
    store = runtime.context.store
    await cancellation.ask(store, None, await store.run(run), "operator", time.time())

    async def has_ended() -> bool:
        return (await store.run(run)).ended_at is not None

    await until(has_ended)
    assert 'tools: look({"q": "a"}) → not answered' in await tree_of(runtime, run)


async def test_a_step_shows_the_exact_messages_with_its_transcript(stub: ProviderStub, runtime: Runtime) -> None:
    stub.script(
        "alpha", tool_call_reply(look_call("a", "x"), look_call("b", "y")), tool_call_reply(look_call("c", "z")), DONE
    )
    conversation = Conversation(runtime)
    for results in (("A", "B"), ("C",)):
        conversation.add_results(await conversation.take_turn(), *results)
    run = (await conversation.take_turn()).ended.state.run
    step = await in_full(runtime, run)
    messages_sent = stub.requests_for("alpha")[-1].json["messages"]
    assert [message["role"] for message in step["messages"]] == [message["role"] for message in messages_sent]
    assert [message.get("tool_call_id") for message in step["messages"]] == [
        sent_message.get("tool_call_id") for sent_message in messages_sent
    ]
    assert [message.get("tool_calls") for message in step["messages"]] == [
        sent_message.get("tool_calls") for sent_message in messages_sent
    ]
    assert [result["content"][0]["text"] for result in step["exchanges"][0]["results"]] == ["A", "B"]
    assert step["exchanges"][0]["answered_at"] > step["exchanges"][0]["at"]
    record = await whole(runtime, run)
    assert [turn["finish"] for turn in record["turns"]] == ["tool_calls", "tool_calls", "stop"]
    assert sum(turn["usage"]["input"] for turn in record["turns"]) == record["total_usage"]["input"]
    assert sum(turn["cost_usd"] for turn in record["turns"]) == pytest.approx(record["cost_usd"])
    tree = await tree_of(runtime, run, full=True)
    assert "turns: 3 turns" in tree
    assert 'look({"q": "a"}), look({"q": "b"}) → A, B (after ' in tree


async def test_what_was_erased_is_null(stub: ProviderStub, runtime: Runtime) -> None:
    stub.script("alpha", tool_call_reply(look_call("a")), DONE)
    conversation = Conversation(runtime)
    conversation.add_results(await conversation.take_turn(), "A")
    run = (await conversation.take_turn()).ended.state.run
    assert await runtime.context.store.erase(run)
    step = await in_full(runtime, run)
    assert (step["erased"], step["messages"]) == (True, None)
    assert (step["exchanges"][0]["said"], step["exchanges"][0]["results"]) == (None, None)
    assert "look(erased) → erased" in await tree_of(runtime, run)


@pytest.mark.long
async def test_only_who_began_a_run_or_may_read_it_is_shown_the_ids_that_its_tool_calls_wait_under(
    stub: ProviderStub, runtime: Runtime
) -> None:
    """Another key may go on with a run, as clients rotate keys; it must have the ids from whoever received them."""
    stub.script("alpha", tool_call_reply(look_call("a")), DONE)
    tool = {"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}
    request_body = {"model": "baton-mini", "messages": [{"role": "user", "content": "Look."}], "tools": [tool]}
    store, pepper = runtime.gateway.store, runtime.gateway.pepper
    keys = {}
    for name, scopes in (("other", ["runs:read", "runs:write"]), ("auditor", ["runs:read", "audit:read"])):
        keys[name], row = mint(pepper, tenant="acme", name=name, scopes=scopes, now=0.0)
        assert await store.add_key(row)
    async with client_of(runtime) as own:
        reply = (await own.post("/v1/chat/completions", json=request_body)).json()
        [call] = reply["choices"][0]["message"]["tool_calls"]
        run = reply["baton"]["run"]
        for path in (f"/v1/runs/{run}", f"/v1/runs/{run}/events", f"/v1/runs/{run}/views", f"/v1/runs/{run}/explain"):
            texts = [(await own.get(path, headers={"authorization": f"Bearer {key}"})).text for key in keys.values()]
            assert call["id"] not in texts[0]
            assert (call["id"] in texts[1]) is not path.endswith("explain")
            assert '"look"' in texts[0] or path.endswith("explain")
        streamed = f"/v1/runs/{run}/events/stream?seconds=0"
        texts = [(await own.get(streamed, headers={"authorization": f"Bearer {key}"})).text for key in keys.values()]
        assert [call["id"] in text for text in texts] == [False, True]
        for view in ("graph", "timeline", "state"):
            assert call["id"] not in (await own.get(f"/v1/runs/{run}/{view}")).text
        assistant_turn = {"role": "assistant", "content": None, "tool_calls": [call]}
        result = {"role": "tool", "tool_call_id": call["id"], "content": "A"}
        further = request_body | {"messages": [*request_body["messages"], assistant_turn, result]}
        other = {"authorization": f"Bearer {keys['other']}"}
        ended = await own.post("/v1/chat/completions", json=further, headers=other)
        assert ended.json()["choices"][0]["message"]["content"] == "It is 42."
        answered = (await own.get(f"/v1/runs/{run}/events", headers=other)).text
    assert call["id"] in answered, "an id that waits for nothing is no secret"
