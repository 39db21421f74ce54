"""Requests of well-known clients, as they send them: each works, or is refused with its reason.

`known_clients.py`, `known_codex.py` and `known_refusals.py` have the bodies.
"""

from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest

from tests.harness.known_clients import HEADERS, HI, MARK, MESSAGES, RESPONSES, SCHEMA, WORK, text
from tests.harness.known_codex import CODEX
from tests.harness.known_refusals import REFUSED
from tests.stubs import ProviderStub, Reply
from tests.stubs.script import ToolCall


@pytest.fixture
async def stub() -> AsyncIterator[ProviderStub]:
    async with ProviderStub() as running:
        running.always("alpha", Reply(chunks=("{", "}")))
        yield running


@pytest.mark.long
async def test_what_works(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    """One service for all of them; the worker is asked once for each."""
    clients = {**WORK, **CODEX}
    for name, (path, body) in clients.items():
        reply = await client.post(path, json={"model": "baton-mini"} | body, headers=HEADERS)
        assert reply.status_code == 200, (name, reply.text)
        ended = "[DONE]" in reply.text or "message_stop" in reply.text or "response.completed" in reply.text
        assert ended if body.get("stream") else reply.json()["usage"], name
        assert "error" not in reply.text.replace('"error":null', "").replace("is_error", ""), (name, reply.text)
    assert len(stub.requests_for("alpha")) == len(clients)


async def test_what_is_refused(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    for name, (path, body, param, says) in REFUSED.items():
        reply = await client.post(path, json={"model": "baton-mini"} | body)
        error = reply.json()["error"]
        assert reply.status_code in (400, 404), (name, reply.text)
        assert says in error["message"], (name, error)
        if path != MESSAGES:  # Anthropic's errors have no such field
            assert error["param"] == param, (name, error)
        assert param is None or param in error["message"] or error.get("param") == param, (name, error)
    assert not stub.requests


async def test_what_they_ask_beside(client: httpx.AsyncClient) -> None:
    """Lists of models, by either client; a token count; and what is tried before anything is sent."""
    for path in ("/v1/models", "/v1/models/baton-mini", "/v1/models?limit=1000", "/v1/models/baton-mini?beta=true"):
        for headers in ({}, {"anthropic-version": "2023-06-01"}):
            assert (await client.get(path, headers=headers)).status_code == 200
    counted = await client.post(
        "/v1/messages/count_tokens?beta=true",
        json={
            "model": "baton-mini",
            "messages": [HI],
            "tools": [],
            "system": [text("x", cache_control=MARK)],
            "thinking": {"type": "enabled", "budget_tokens": 1024},
        },
        headers=HEADERS,
    )
    assert counted.json()["input_tokens"] > 0
    assert (await client.head("/")).status_code == 200
    assert (await client.get("/")).json()["api"] == "/v1"
    for path, says in {
        "/v1/embeddings": "embeddings provider",
        "/chat/completions": "/v1",
        "/v1/audio/speech": "text",
    }.items():
        reply = await client.post(path, json={})
        assert (reply.status_code, says in reply.json()["error"]["message"]) == (404, True)


async def test_vercels_second_turn_refers_to_the_first(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    """Its provider `openai` sends ids in place of what is stored, also of a call whose result it brings."""
    tools = [{"type": "function", "name": "look", "parameters": SCHEMA}]
    calls = [ToolCall("look", '{"q": "x"}', "c1")]
    stub.script(
        "alpha", Reply(chunks=("Let me look.",), tool_calls=calls, finish="tool"), Reply(chunks=("Found.",)), Reply()
    )
    conversation: list[Any] = [{"role": "user", "content": [text("Hi", "input_text")]}]
    first = (await client.post(RESPONSES, json={"model": "baton-mini", "input": conversation, "tools": tools})).json()
    assert "output" in first, first
    message, call = first["output"]
    conversation += [{"type": "item_reference", "id": message["id"]}, {"type": "item_reference", "id": call["id"]}]
    conversation += [{"type": "function_call_output", "call_id": call["call_id"], "output": "x"}]
    second = (await client.post(RESPONSES, json={"model": "baton-mini", "input": conversation, "tools": tools})).json()
    assert second["output"][0]["content"][0]["text"] == "Found."
    assert second["id"].startswith(first["id"])  # the same run goes on
    conversation += [{"id": second["output"][0]["id"]}, {"role": "user", "content": "Thanks."}]
    third = await client.post(RESPONSES, json={"model": "baton-mini", "input": conversation, "tools": tools})
    assert third.status_code == 200, third.text
    messages_sent = stub.requests_for("alpha")[-1].json["messages"]
    assert [(message["role"], message.get("content") or "") for message in messages_sent] == [
        ("user", "Hi"),
        ("assistant", "Let me look."),
        ("tool", "x"),
        ("assistant", "Found."),
        ("user", "Thanks."),
    ]
    assert messages_sent[1]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"q": "x"}'}


async def test_deferred_tools_are_offered_once_they_are_found(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    """Claude Code's search is a tool of its own; what it finds, and nothing else, is offered with the next request."""
    path, body = WORK["claude code, deferred tools"]
    for messages, offered in ((body["messages"][:1], ["ToolSearch"]), (body["messages"], ["ToolSearch", "look"])):
        full_body = {"model": "baton-mini"} | body | {"messages": messages}
        assert (await client.post(path, json=full_body)).status_code == 200
        request_body = stub.requests_for("alpha")[-1].json
        assert [tool["function"]["name"] for tool in request_body["tools"]] == offered
    assert request_body["messages"][-1]["content"] == "The tool look can be called now."
    choice = {"tool_choice": {"type": "tool", "name": "later"}}
    stub.script("alpha", Reply(chunks=(), tool_calls=[ToolCall("later", "{}", "c1")], finish="tool"))
    assert (await client.post(path, json={"model": "baton-mini"} | body | choice)).status_code == 200
    assert [tool["function"]["name"] for tool in stub.requests_for("alpha")[-1].json["tools"]][-1] == "later"
