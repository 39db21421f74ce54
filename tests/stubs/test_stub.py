"""The stub is believed by all other tests, so it is proved here: by OpenAI's own client, and by raw requests."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest

from tests.harness.waiting import PATIENCE_SECONDS

from . import (
    KEYS,
    Behaviour,
    Drop,
    DuplicateFinish,
    Echo,
    Fail,
    Garbage,
    Hang,
    HugeLine,
    ProviderStub,
    Raw,
    Reply,
    Reset,
    Stall,
    StreamError,
    ToolCall,
    Trickle,
    Truncate,
    Usage,
    WrongSchema,
    plan_reply,
)
from .control import stub_process
from .script import from_json, to_json

USAGE = Usage(input=100, output=40, cached=60, cache_write=10, reasoning=15)
HELLO: Any = [{"role": "user", "content": "Hello?"}]
ANTHROPIC = {"x-api-key": KEYS["anthropic"], "anthropic-version": "2023-06-01"}
GEMINI = {"x-goog-api-key": KEYS["gemini"]}


@pytest.fixture
async def stub() -> AsyncIterator[ProviderStub]:
    async with ProviderStub() as running:
        yield running


@pytest.fixture
async def client(stub: ProviderStub) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=stub.openai_url, api_key=KEYS["openai"], max_retries=0) as openai_client:
        yield openai_client


@pytest.fixture
async def http() -> AsyncIterator[httpx.AsyncClient]:
    async with httpx.AsyncClient(timeout=PATIENCE_SECONDS, trust_env=False) as http_client:
        yield http_client


async def ask(http: httpx.AsyncClient, stub: ProviderStub, **fields: Any) -> httpx.Response:
    """A raw request to the OpenAI side."""
    body = {"model": "m", "messages": HELLO, **fields}
    headers = {"Authorization": f"Bearer {KEYS['openai']}"}
    return await http.post(f"{stub.openai_url}/chat/completions", json=body, headers=headers)


def events(text: str) -> list[dict[str, Any]]:
    """The JSON of every data line."""
    lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
    return [json.loads(line) for line in lines if line != "[DONE]"]


async def test_openai_document(stub: ProviderStub, client: openai.AsyncOpenAI) -> None:
    stub.script("m", Reply(chunks=("a", "b"), usage=USAGE, finish="length"))
    answer = await client.chat.completions.create(model="m", messages=HELLO, logprobs=True, top_logprobs=2)
    assert answer.choices[0].message.content == "ab"
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.completion_tokens_details is not None
    assert (answer.usage.total_tokens, answer.usage.prompt_tokens_details.cached_tokens) == (140, 60)
    assert answer.usage.completion_tokens_details.reasoning_tokens == 15
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert [len(token.top_logprobs) for token in answer.choices[0].logprobs.content] == [2, 2]
    assert stub.requests[0].header("Authorization") == f"Bearer {KEYS['openai']}"
    assert stub.requests[0].json["model"] == "m"


async def test_openai_stream(stub: ProviderStub, client: openai.AsyncOpenAI) -> None:
    stub.script("m", Reply(usage=USAGE, tool_calls=(ToolCall("look", '{"q": 1}', "call_1"),), finish="tool"))
    tools: Any = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}}]
    stream = await client.chat.completions.create(
        model="m", messages=HELLO, stream=True, stream_options={"include_usage": True}, tools=tools
    )
    chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "Hello there."
    calls = [call for c in chunks if c.choices for call in c.choices[0].delta.tool_calls or []]
    assert "".join(call.function.arguments or "" for call in calls if call.function) == '{"q": 1}'
    assert chunks[-2].choices[0].finish_reason == "tool_calls"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.total_tokens == 140
    assert all(chunk.usage is None for chunk in chunks[:-1])


async def test_openai_refusal_and_odd_text(stub: ProviderStub, client: openai.AsyncOpenAI) -> None:
    stub.script("m", Reply(refusal="I cannot"), Reply(chunks=("\x00", "\ud800")))
    stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True)
    assert "".join([c.choices[0].delta.refusal or "" async for c in stream]) == "I cannot"
    odd = await client.chat.completions.create(model="m", messages=HELLO)
    assert odd.choices[0].message.content == "\x00\ud800"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "robot", "content": ""}]}, "messages[0].role"),
        ({"messages": [{"role": "tool", "content": "", "tool_call_id": "x"}]}, "messages.[0].role"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"temperature": 3}, "temperature"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"response_format": {"type": "json_object"}}, "messages"),
        ({"guided_json": {}}, None),
        ({"model": "o3-mini", "max_tokens": 5}, "max_tokens"),
        ({"tool_choice": "auto"}, "tool_choice"),
    ],
)
async def test_openai_refuses(
    stub: ProviderStub, http: httpx.AsyncClient, fields: dict[str, Any], param: str | None
) -> None:
    answer = await ask(http, stub, **fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"]) == ("invalid_request_error", param)
    assert stub.requests[0].status == 400


async def test_openai_errors(stub: ProviderStub, client: openai.AsyncOpenAI) -> None:
    stub.script("m", Fail(status=429, retry_after=3), Fail(status=429, retry_after=60, as_date=True), Fail(status=503))
    with pytest.raises(openai.RateLimitError) as limited:
        await client.chat.completions.create(model="m", messages=HELLO)
    assert limited.value.response.headers["retry-after"] == "3"
    with pytest.raises(openai.RateLimitError) as limited:
        await client.chat.completions.create(model="m", messages=HELLO)
    assert limited.value.response.headers["retry-after"].endswith("GMT")
    with pytest.raises(openai.InternalServerError):
        await client.chat.completions.create(model="m", messages=HELLO)
    with pytest.raises(openai.AuthenticationError):
        await client.with_options(api_key="sk-wrong").chat.completions.create(model="m", messages=HELLO)


async def test_vllm_takes_more(stub: ProviderStub, http: httpx.AsyncClient) -> None:
    stub.script("m", Reply(reasoning=("hmm",)))
    body = {"model": "m", "messages": HELLO, "structured_outputs": {"json": {}}, "top_k": 1}
    answer = await http.post(f"{stub.vllm_url}/chat/completions", json=body)
    assert answer.json()["choices"][0]["message"]["reasoning_content"] == "hmm"
    assert (await http.get(f"{stub.url}/vllm/health")).status_code == 200


async def test_anthropic_stream(stub: ProviderStub, http: httpx.AsyncClient) -> None:
    stub.script("claude", Reply(usage=USAGE, reasoning=("think",), tool_calls=(ToolCall("look"),), finish="tool"))
    body = {"model": "claude", "max_tokens": 9, "messages": HELLO, "stream": True}
    answer = await http.post(f"{stub.anthropic_url}/v1/messages", json=body, headers=ANTHROPIC)
    frames = events(answer.text)
    assert answer.text.startswith("event: message_start\ndata: ")
    kinds = [frame["type"] for frame in frames]
    assert kinds[0] == "message_start"
    assert kinds[-2:] == ["message_delta", "message_stop"]
    assert "ping" in kinds
    usage = frames[0]["message"]["usage"]
    assert (usage["input_tokens"], usage["cache_read_input_tokens"], usage["cache_creation_input_tokens"]) == (
        30,
        60,
        10,
    )
    assert frames[-2]["delta"]["stop_reason"] == "tool_use"
    assert frames[-2]["usage"]["output_tokens"] == 40
    text = [f["delta"]["text"] for f in frames if f.get("delta", {}).get("type") == "text_delta"]
    assert "".join(text) == "Hello there."


@pytest.mark.parametrize(
    ("change", "headers", "status", "words"),
    [
        ({"max_tokens": None}, {}, 400, "max_tokens: Field required"),
        ({"messages": [{"role": "system", "content": "x"}]}, {}, 400, "Unexpected role"),
        ({"messages": [{"role": "assistant", "content": "x"}]}, {}, 400, "first message"),
        ({"n": 2}, {}, 400, "Extra inputs"),
        ({"temperature": 1.5}, {}, 400, "range: 0..1"),
        ({}, {"anthropic-version": ""}, 400, "header is required"),
        ({"temperature": 1}, {"anthropic-version": "2026-10-21"}, 400, "Extra inputs"),
        ({}, {"x-api-key": "wrong"}, 401, "invalid x-api-key"),
    ],
)
async def test_anthropic_refuses(
    stub: ProviderStub,
    http: httpx.AsyncClient,
    change: dict[str, Any],
    headers: dict[str, str],
    status: int,
    words: str,
) -> None:
    body = {"model": "c", "max_tokens": 9, "messages": HELLO, **change}
    answer = await http.post(f"{stub.anthropic_url}/v1/messages", json=body, headers={**ANTHROPIC, **headers})
    assert answer.status_code == status
    assert answer.json()["type"] == "error"
    assert words in answer.json()["error"]["message"]


async def test_anthropic_overloaded_before_and_inside(stub: ProviderStub, http: httpx.AsyncClient) -> None:
    stub.script("c", Fail(status=529), Reply(fault=StreamError()))
    body = {"model": "c", "max_tokens": 9, "messages": HELLO, "stream": True}
    before = await http.post(f"{stub.anthropic_url}/v1/messages", json=body, headers=ANTHROPIC)
    assert (before.status_code, before.json()["error"]["type"]) == (529, "overloaded_error")
    inside = await http.post(f"{stub.anthropic_url}/v1/messages", json=body, headers=ANTHROPIC)
    assert inside.status_code == 200
    assert "event: error\n" in inside.text
    assert events(inside.text)[-1]["error"]["type"] == "overloaded_error"


async def test_gemini(stub: ProviderStub, http: httpx.AsyncClient) -> None:
    stub.script("g", Reply(usage=USAGE, reasoning=("hm",)), Reply(refusal=""), Reply(finish="blocked"), Reply())
    url = f"{stub.gemini_url}/v1beta/models/g:streamGenerateContent?alt=sse"
    body = {"contents": [{"role": "user", "parts": [{"text": "Hello?"}]}]}
    frames = events((await http.post(url, json=body, headers=GEMINI)).text)
    usage = frames[-1]["usageMetadata"]
    assert frames[-1]["candidates"][0]["finishReason"] == "STOP"
    assert (usage["promptTokenCount"], usage["candidatesTokenCount"], usage["thoughtsTokenCount"]) == (100, 25, 15)
    assert (usage["cachedContentTokenCount"], usage["totalTokenCount"]) == (60, 140)
    unsafe = events((await http.post(url, json=body, headers=GEMINI)).text)
    assert unsafe[-1]["candidates"][0]["finishReason"] == "SAFETY"
    blocked = events((await http.post(url, json=body, headers=GEMINI)).text)
    assert blocked[0]["promptFeedback"]["blockReason"] == "PROHIBITED_CONTENT"
    whole = await http.post(url.replace("streamG", "g").split("?")[0], json=body, headers=GEMINI)
    assert whole.json()["candidates"][0]["content"] == {"parts": [{"text": "Hello there."}], "role": "model"}


async def test_gemini_refuses(stub: ProviderStub, http: httpx.AsyncClient) -> None:
    stub.script("g", Fail(status=429, retry_after=17))
    url = f"{stub.gemini_url}/v1beta/models/g:generateContent"
    body: dict[str, Any] = {"contents": [{"role": "user", "parts": [{"text": "Hello?"}]}]}
    assert (await http.post(url, json=body)).json()["error"]["status"] == "PERMISSION_DENIED"
    wrong = await http.post(url, json=body, headers={"x-goog-api-key": "no"})
    assert wrong.json()["error"]["details"][0]["reason"] == "API_KEY_INVALID"
    limited = (await http.post(url, json=body, headers=GEMINI)).json()["error"]
    assert (limited["status"], limited["details"][0]["retryDelay"]) == ("RESOURCE_EXHAUSTED", "17s")
    for bad in ({}, {**body, "max_tokens": 1}, {"contents": [{"role": "assistant", "parts": [{"text": "x"}]}]}):
        assert (await http.post(url, json=bad, headers=GEMINI)).json()["error"]["status"] == "INVALID_ARGUMENT"


@pytest.mark.parametrize(
    ("behaviour", "delta_count", "ended"),
    [
        (Reply(fault=Truncate(1)), 1, True),
        (Reply(fault=Truncate("end")), 3, True),
        (Reply(fault=Truncate(2, clean=False)), 2, False),
        (Reply(fault=Reset(1)), 1, False),
        (Reply(fault=StreamError(2)), 2, True),
        (Reply(fault=Garbage(1)), 3, True),
        (Reply(fault=WrongSchema(1)), 3, True),
        (Reply(fault=HugeLine(1, 1 << 20)), 4, True),
        (Reply(fault=DuplicateFinish()), 3, True),
        (Reply(trickle=Trickle(1)), 3, True),
        (Reply(comments=True, newline="\r\n"), 3, True),
        (Drop(), 0, False),
        (Reply(fault=Stall(1, seconds=0.05)), 3, True),
    ],
)
async def test_faults(
    stub: ProviderStub, http: httpx.AsyncClient, behaviour: Behaviour, delta_count: int, ended: bool
) -> None:
    stub.script("m", behaviour)
    text = ""
    headers = {"Authorization": f"Bearer {KEYS['openai']}"}
    body = {"model": "m", "messages": HELLO, "stream": True}
    try:
        url = f"{stub.openai_url}/chat/completions"
        async with http.stream("POST", url, json=body, headers=headers) as answer:
            async for piece in answer.aiter_text():
                text += piece
        complete = True
    except httpx.HTTPError:
        complete = False
    assert text.count('"delta": {"content": "') == delta_count
    assert complete is ended
    faulty = isinstance(behaviour, Reply) and isinstance(behaviour.fault, Truncate | Reset | StreamError)
    assert ("data: [DONE]" in text) is not (faulty or isinstance(behaviour, Drop))
    await asyncio.sleep(0)
    assert stub.requests[0].disconnected_at is None


async def test_faults_of_documents(stub: ProviderStub, http: httpx.AsyncClient) -> None:
    stub.script(
        "m", Reply(fault=Truncate(clean=False)), Reply(fault=Garbage()), Reply(usage=None), Fail(status=502, html=True)
    )
    with pytest.raises(httpx.RemoteProtocolError):
        await ask(http, stub)
    with pytest.raises(ValueError, match="Unterminated"):
        (await ask(http, stub)).json()
    assert "usage" not in (await ask(http, stub)).json()
    assert (await ask(http, stub)).headers["content-type"].startswith("text/html")


async def test_sees_the_client_leave(stub: ProviderStub, client: openai.AsyncOpenAI) -> None:
    stub.script("m", Reply(fault=Stall(1)), Hang())
    stream = await client.chat.completions.create(model="m", messages=HELLO, stream=True)
    await anext(aiter(stream))
    left = time.monotonic()
    await stream.close()
    assert await stub.requests[0].wait_until_gone() >= left
    waiting = asyncio.create_task(client.chat.completions.create(model="m", messages=HELLO))
    hung = (await stub.wait_for(2))[1]
    waiting.cancel()
    await hung.wait_until_gone()
    assert hung.status is None


async def test_other_modes(stub: ProviderStub, http: httpx.AsyncClient) -> None:
    stub.script("m", Echo("CANARY-7", mirror=True), plan_reply((2, "Do it.", ["user", 0])), Raw(body="{}", status=200))
    assert (await ask(http, stub)).json()["choices"][0]["message"]["content"].startswith("CANARY-7{")
    plan = json.loads((await ask(http, stub)).json()["choices"][0]["message"]["content"])
    assert plan == {"steps": [{"worker": 2, "subtask": "Do it.", "access": ["user", 0]}]}
    assert (await ask(http, stub)).json() == {}
    stub.script("m", Reply(streams="refuse"), Reply(streams="json"), lambda got: Reply(chunks=(got.json["user"],)))
    assert (await ask(http, stub, stream=True)).status_code == 400
    assert (await ask(http, stub, stream=True)).json()["object"] == "chat.completion"
    assert (await ask(http, stub, user="me")).json()["choices"][0]["message"]["content"] == "me"
    async with ProviderStub(models=["m"]) as small:
        assert (await ask(http, small, model="other")).json()["error"]["code"] == "model_not_found"


def test_behaviours_survive_json() -> None:
    behaviour = Reply(usage=USAGE, fault=Truncate(2, clean=False), trickle=Trickle(3), tool_calls=(ToolCall("f"),))
    assert from_json(json.loads(json.dumps(to_json(behaviour)))) == behaviour


async def test_as_a_process(http: httpx.AsyncClient) -> None:
    with stub_process() as remote:
        remote.script("m", Reply(chunks=("over", " there")))
        remote.always("m", Fail(status=500))
        body = {"model": "m", "messages": HELLO}
        headers = {"Authorization": f"Bearer {KEYS['openai']}"}
        url = f"{remote.openai_url}/chat/completions"
        answers = [await http.post(url, json=body, headers=headers) for _ in range(2)]
        assert [answer.status_code for answer in answers] == [200, 500]
        records = remote.requests("m")
        assert [record["status"] for record in records] == [200, 500]
        assert json.loads(records[0]["body"]) == body
