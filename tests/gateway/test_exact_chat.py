"""Every kind of reply of the chat and model routes, against the official types and the published description."""

import json
from functools import partial
from typing import Any

import httpx
import pytest
from openai.pagination import SyncPage
from openai.types import Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.harness import in_process
from tests.harness.exact_replies import assert_published_schema, exactly
from tests.harness.in_process import plan
from tests.stubs import Fail, ProviderStub, Raw, Reply, Truncate
from tests.stubs.script import Usage

CHAIN = plan(("alpha", "Think", ["user"]), ("beta", "Answer", ["user", 0]))
ask = partial(in_process.ask, baton={"plan": CHAIN})
REPLIES: dict[str, Reply] = {
    "plain": Reply(chunks=("Fo", "ur", ".")),
    "empty": Reply(chunks=()),
    "cut off": Reply(chunks=("Fo",), finish="length"),
    "filtered": Reply(chunks=("Fo",), finish="content_filter"),
    "refusing": Reply(refusal="I will not say."),
    "with reasoning": Reply(usage=Usage(input=50, output=40, cached=30, reasoning=25)),
    "without usage": Reply(usage=None),
    "not ASCII": Reply(chunks=("\U0001f600", "\u2028", '"\\', "\x00")),
}


def events(reply: httpx.Response) -> list[dict[str, Any]]:
    data = [event.partition("data: ")[2] for event in reply.text.split("\n\n")]
    assert reply.text.endswith("data: [DONE]\n\n") or "error" in data[-2]
    return [json.loads(line) for line in data if line.startswith("{")]


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("name", REPLIES)
async def test_replies_and_chunks_are_openais(
    stub: ProviderStub, client: httpx.AsyncClient, name: str, logprobs: bool
) -> None:
    stub.always("beta", REPLIES[name])
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 2} if logprobs else {}
    whole = (await ask(client, **options)).json()
    exactly(ChatCompletion, whole)
    assert_published_schema("CreateChatCompletionResponse", whole)
    extension = {"plan": CHAIN, "stream_steps": True}
    reply = await ask(client, stream=True, stream_options={"include_usage": True}, baton=extension, **options)
    chunks = events(reply)
    for chunk in chunks:
        exactly(ChatCompletionChunk, chunk)
        assert_published_schema("CreateChatCompletionStreamResponse", chunk)
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    message = whole["choices"][0]["message"]
    for field in ("content", "refusal"):
        assert "".join(choice["delta"].get(field) or "" for choice in choices) == (message[field] or "")
    assert choices[-1]["finish_reason"] == whole["choices"][0]["finish_reason"]
    assert chunks[-1]["usage"] == whole["usage"]
    assert [choice["delta"].get("role") for choice in choices].count("assistant") == 1


@pytest.mark.parametrize("formed", [False, True])
async def test_a_refusal_is_no_content(stub: ProviderStub, client: httpx.AsyncClient, formed: bool) -> None:
    stub.always("beta", REPLIES["refusing"])
    schema = {
        "type": "object",
        "properties": {"n": {"type": "integer"}},
        "required": ["n"],
        "additionalProperties": False,
    }
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": schema, "strict": True}}
    options = {"response_format": form} if formed else {}
    whole = (await ask(client, **options)).json()
    assert whole["choices"][0]["message"] == {"role": "assistant", "content": None, "refusal": "I will not say."}
    deltas = [
        choice["delta"] for chunk in events(await ask(client, stream=True, **options)) for choice in chunk["choices"]
    ]
    assert "".join(delta.get("refusal") or "" for delta in deltas) == "I will not say."
    assert not any(delta.get("content") for delta in deltas)
    run = (await client.get(f"/v1/runs/{whole['baton']['run']}/steps/1")).json()
    assert (run["state"], run["output"], run["attempts"][0]["refused"]) == ("done", "I will not say.", True)


async def test_log_probabilities_of_a_refusal(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    stub.always("beta", REPLIES["refusing"])
    whole = (await ask(client, logprobs=True)).json()["choices"][0]
    chunks = events(await ask(client, stream=True, logprobs=True))
    pieces = [choice["logprobs"] for chunk in chunks for choice in chunk["choices"] if choice["logprobs"]]
    streamed = [token for piece in pieces for token in piece["refusal"]]
    for tokens in (whole["logprobs"]["refusal"], streamed):
        assert [token["token"] for token in tokens] == ["I ", "will ", "not ", "say."]


async def test_words_behind_a_refusal_make_it_an_answer(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    def event(delta: dict[str, str], finish: str | None) -> str:
        choice = {"index": 0, "delta": delta, "finish_reason": finish}
        return "data: " + json.dumps({"object": "chat.completion.chunk", "choices": [choice]}) + "\n\n"

    apart = ": " + "x" * 400_000 + "\n\n"  # more than one read holds
    body = event({"refusal": "No. "}, None) + apart + event({"content": "Yes."}, None) + apart + event({}, "stop")
    stub.always("beta", Raw(body=body + "data: [DONE]\n\n"))
    deltas = [choice["delta"] for chunk in events(await ask(client, stream=True)) for choice in chunk["choices"]]
    assert [delta["content"] for delta in deltas if delta.get("content")] == ["No. Yes."]


async def test_a_plan_that_was_repaired_and_one_that_degraded(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    stub.always("planner", Reply(chunks=("no plan",)))
    stub.script("beta", Reply(chunks=("Half",), fault=Truncate(after=1)), Reply(chunks=("Four.",)))
    whole = (await ask(client, model="baton-ultra", baton={})).json()
    assert whole["baton"]["degraded"] is True
    exactly(ChatCompletion, whole)
    assert_published_schema("CreateChatCompletionResponse", whole)


async def test_models_are_openais(client: httpx.AsyncClient) -> None:
    listed, model = (await client.get("/v1/models")).json(), (await client.get("/v1/models/baton-mini")).json()
    exactly(SyncPage[Model], listed, frozenset({"data[].baton", "first_id", "last_id", "has_more"}))
    assert_published_schema("ListModelsResponse", listed)
    exactly(Model, model)
    assert_published_schema("Model", model)


async def test_errors_are_openais(stub: ProviderStub, client: httpx.AsyncClient) -> None:
    stub.always("alpha", Fail(status=401))
    pinned = {"pool": {"pin": "alpha"}}
    failed = await ask(client, baton=pinned)
    replies = [
        failed,
        await ask(client, model="nothing"),
        await ask(client, n=2),
        await client.get("/v1/nothing"),
        await client.put("/v1/models"),
        await client.get("/v1/models", headers={"authorization": "Bearer no"}),
        await client.post("/v1/chat/completions", content=b"x" * (9 << 20)),
    ]
    assert [reply.status_code for reply in replies] == [failed.status_code, 404, 400, 404, 405, 401, 413]
    assert failed.status_code >= 500
    errors = [reply.json() for reply in replies] + events(await ask(client, stream=True, baton=pinned))[-1:]
    for error in errors:
        assert_published_schema("ErrorResponse", error)
        assert set(error) == {"error"}
        assert set(error["error"]) == {"message", "type", "param", "code"}
