"""The legacy route: a prompt is a run, whole and streamed, by the official client and byte for byte."""

import functools
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import openai
import pytest
from openai import AsyncOpenAI
from openai.resources.beta.beta import Beta
from openai.types import Completion

from app.core.message.chat import Message, Text
from app.gateway.wire.parameters import COMPLETIONS
from app.gateway.wire.unsupported_routes import NOT_OFFERED
from tests.harness.bad_bodies import CANARY, RAW
from tests.harness.exact_replies import exactly
from tests.harness.stand_ins import GatewayStandIn
from tests.stubs import ProviderStub, Reply

PROMPT: dict[str, Any] = {"model": "baton-mini", "prompt": "2 + 2 ="}
REFUSED: dict[str, Any] = {"n": 2, "best_of": 3, "echo": True, "suffix": "!", "logprobs": 0}


@pytest.fixture
async def stub() -> AsyncIterator[ProviderStub]:
    async with ProviderStub() as running:
        running.always("alpha", Reply(chunks=("Fo", "ur", ".")))
        yield running


def test_every_documented_parameter_has_a_row() -> None:
    from openai.types import completion_create_params as sdk

    documented = set(sdk.CompletionCreateParamsStreaming.__annotations__)
    assert len(documented) > 15
    assert set(COMPLETIONS) - documented == {"baton"}
    assert documented <= set(COMPLETIONS)


async def test_a_prompt_is_answered(client: httpx.AsyncClient) -> None:
    reply = await client.post("/v1/completions", json=PROMPT)
    body = reply.json()
    exactly(Completion, body)
    assert body["id"] == f"cmpl-{body['baton']['run']}"
    assert body["choices"] == [{"index": 0, "text": "Four.", "logprobs": None, "finish_reason": "stop"}]
    assert body["usage"]["total_tokens"] == body["usage"]["prompt_tokens"] + body["usage"]["completion_tokens"]
    run = (await client.get(f"/v1/runs/{body['id']}")).json()
    assert run["usage"] == body["usage"]
    assert reply.headers["x-baton-run"] == run["id"]


async def test_a_stream_says_the_same(client: httpx.AsyncClient) -> None:
    whole = (await client.post("/v1/completions", json=PROMPT)).json()
    request_body = PROMPT | {"stream": True, "stream_options": {"include_usage": True}}
    lines = (await client.post("/v1/completions", json=request_body)).text.split("\n\n")
    assert lines[-2].endswith("data: [DONE]")
    data = [line.partition("data: ")[2] for line in lines]
    *chunks, last = [json.loads(line) for line in data if line.startswith("{")]
    assert {chunk["object"] for chunk in (*chunks, last)} == {"text_completion"}
    assert "".join(choice["text"] for chunk in chunks for choice in chunk["choices"]) == "Four."
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks][-2:] == [None, "stop"]
    assert (last["choices"], last["usage"]) == ([], whole["usage"])
    assert all(chunk["usage"] is None for chunk in chunks)


async def test_the_official_client(gateway: GatewayStandIn, key: str) -> None:
    async with gateway.serve() as url, AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
        whole = await client.completions.create(model="mini", prompt="2 + 2 =")
        stream = await client.completions.create(model="mini", prompt=["2 + 2 ="], stream=True)
        text = "".join([choice.text async for chunk in stream for choice in chunk.choices])
    assert (whole.choices[0].text, text) == ("Four.", "Four.")


async def test_everything_of_a_prompt_reaches_the_order(gateway: GatewayStandIn, key: str) -> None:
    body = PROMPT | {"max_tokens": 5, "stop": "END", "user": "u", "echo": False, "n": 1, "baton": {"labels": ["phi"]}}
    async with gateway.client(key) as client:
        assert (await client.post("/v1/completions", json=body)).status_code == 200
    [order] = gateway.runs.orders
    assert order.task.messages == (Message("user", (Text("2 + 2 ="),)),)
    assert (order.task.sampling.max_tokens, order.task.sampling.stop, order.task.user) == (5, ("END",), "u")
    assert (order.labels, order.ignored) == ({"phi"}, ("echo", "n"))


@pytest.mark.parametrize(
    ("body", "param"),
    [
        ({"model": "mini"}, "prompt"),
        (PROMPT | {"prompt": [1, 2, 3]}, "prompt"),
        (PROMPT | {"prompt": [[1]]}, "prompt"),
        (PROMPT | {"prompt": ["a", "b"]}, "prompt"),
        (PROMPT | {"prompt": []}, "prompt"),
        (PROMPT | {"messages": []}, "messages"),
        (PROMPT | {"temperature": 3}, "temperature"),
        (PROMPT | {"max_completion_tokens": 3}, "max_completion_tokens"),
        ({"prompt": "x"}, "model"),
        *((PROMPT | {name: value}, name) for name, value in REFUSED.items()),
    ],
)
async def test_what_is_wrong_is_named(gateway: GatewayStandIn, key: str, body: dict[str, Any], param: str) -> None:
    async with gateway.client(key) as client:
        reply = await client.post("/v1/completions", json=body)
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, param)
    assert gateway.runs.orders == []


@pytest.mark.parametrize("name", ["nan", "duplicate keys", "depth 900", "1e5 bad messages", "utf-16"])
async def test_its_ingress_is_as_strict(gateway: GatewayStandIn, key: str, name: str) -> None:
    async with gateway.client(key) as client:
        headers = {"content-type": "application/json"}
        reply = await client.post("/v1/completions", content=RAW[name], headers=headers)
    assert reply.status_code == 400
    assert CANARY not in reply.text


@pytest.mark.parametrize("family", sorted(NOT_OFFERED))
async def test_what_is_not_offered_is_refused_in_openais_shape(gateway: GatewayStandIn, key: str, family: str) -> None:
    """Whatever is sent, with a key or without one, and nothing of it is read."""
    async with gateway.client(key) as client, gateway.client() as stranger:
        replies = [
            await client.post(f"/v1/{family}", json={"model": "x", "input": CANARY}),
            await client.post(f"/v1/{family}/{CANARY}/cancel", content=b"{"),
            await client.post(f"/v1/{family}", files={"file": ("a.txt", CANARY.encode())}),
            await client.get(f"/v1/{family}"),
            await client.delete(f"/v1/{family}/x"),
            await stranger.post(f"/v1/{family}", json={}),
        ]
    for reply in replies:
        error = reply.json()["error"]
        assert (reply.status_code, error["type"], error["code"]) == (404, "invalid_request_error", "unknown_url")
        assert error["message"] == f"Baton does not offer this API: {NOT_OFFERED[family]}."
        assert CANARY not in reply.text


def test_every_family_of_the_official_client_is_served_or_told_of() -> None:
    """The families are the properties of the client, those under `beta` included."""
    families = {name for name, value in vars(openai.OpenAI).items() if isinstance(value, functools.cached_property)}
    families |= {name for name, value in vars(Beta).items() if isinstance(value, functools.cached_property)}
    apart = {"with_raw_response", "with_streaming_response", "beta", "webhooks", "admin"}
    assert len(families) > 15
    assert families - apart - {"chat", "completions", "models", "responses"} <= set(NOT_OFFERED)


async def test_embeddings_are_not_offered_and_the_reply_says_so(gateway: GatewayStandIn, key: str) -> None:
    async with gateway.client(key) as client:
        reply = await client.post("/v1/embeddings", json={"model": "baton-mini", "input": "x"})
    assert reply.status_code == 404
    error = reply.json()["error"]
    assert (error["type"], error["code"], error["param"]) == ("invalid_request_error", "unknown_url", None)
    assert error["message"] == (
        "Baton does not offer this API: a run has an answer and no vector: ask an embeddings provider directly."
    )


async def test_stored_completions_are_not_offered_and_the_reply_names_the_run(
    gateway: GatewayStandIn, key: str
) -> None:
    async with gateway.client(key) as client:
        reply = await client.get("/v1/chat/completions/chatcmpl-run_mine")
        every = await client.get("/v1/chat/completions")  # as the official client lists them
        models = await client.delete("/v1/models")
    assert (reply.status_code, "GET /v1/runs/{id}" in reply.json()["error"]["message"]) == (404, True)
    assert (every.status_code, "GET /v1/runs lists" in every.json()["error"]["message"]) == (405, True)
    assert models.json()["error"]["message"] == "This route does not take that method, only GET."


@pytest.mark.parametrize(
    ("path", "meant"),
    [
        ("/v1/chat/completions/", "/v1/chat/completions"),
        ("/v1//chat/completions", "/v1/chat/completions"),
        ("/v1/v1/chat/completions", "/v1/chat/completions"),
        ("/openai/v1/chat/completions", "/v1/chat/completions"),
        (f"/v1/responses/{CANARY}/", "/v1/responses/{response}"),
    ],
)
async def test_a_path_that_is_almost_a_route_is_told_of_it(gateway: GatewayStandIn, path: str, meant: str) -> None:
    async with gateway.client() as client:
        reply = await client.post(f"http://baton{path}", json={})
    error = reply.json()["error"]
    assert (reply.status_code, error["code"]) == (404, "unknown_url")
    assert f"Did you mean {meant}?" in error["message"]
    assert CANARY not in error["message"]
