"""The sampling parameters that workers are sent, and the log-probabilities that they send back."""

import json
from collections.abc import AsyncIterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.harness import in_process
from tests.harness.in_process import client_of, plan, pool_text, running_service
from tests.stubs import ProviderStub, Raw, Reply

WORDS = ("Two", " and", " two", " is", " four", ".")
ANSWER = plan(("alpha", "Think", ["user"]), ("beta", "Answer", ["user", 0]))
ask = partial(in_process.ask, baton={"plan": ANSWER})


@pytest.fixture
async def stub() -> AsyncIterator[ProviderStub]:
    async with ProviderStub() as running:
        running.always("alpha", Reply(chunks=("Hm", ".")))
        running.always("beta", Reply(chunks=WORDS))
        yield running


def chunks(reply: httpx.Response) -> list[dict[str, Any]]:
    data = [event.partition("data: ")[2] for event in reply.text.split("\n\n")]
    return [json.loads(line) for line in data if line.startswith("{")]


def bodies_of(stub: ProviderStub) -> Mapping[str, dict[str, Any]]:
    """The bodies of the requests by worker."""
    return {request.model: request.json for request in stub.requests}


async def test_the_answering_step_is_sent_all_of_it_and_the_others_what_is_theirs(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    sampling = {"temperature": 0.5, "top_p": 0.75, "seed": 3, "stop": ["\n\n"], "presence_penalty": 0.5}
    sampling |= {"frequency_penalty": -0.5, "logit_bias": {"50256": -100}, "max_tokens": 77}
    assert (await ask(client, **sampling)).status_code == 200
    answering, thinking = bodies_of(stub)["beta"], bodies_of(stub)["alpha"]
    assert {name: answering.get(name) for name in sampling} == sampling
    assert {name: thinking.get(name) for name in ("temperature", "top_p", "seed")} == {
        "temperature": 0.5,
        "top_p": 0.75,
        "seed": 3,
    }
    assert not {"stop", "presence_penalty", "frequency_penalty", "logit_bias", "logprobs"} & set(thinking)


@pytest.mark.parametrize("likeliest", [None, 2])
async def test_log_probabilities_of_the_answer(
    stub: ProviderStub, client: httpx.AsyncClient, likeliest: int | None
) -> None:
    options = {"logprobs": True} | ({} if likeliest is None else {"top_logprobs": likeliest})
    whole = (await ask(client, **options)).json()
    ChatCompletion.model_validate(whole, strict=True)
    content = whole["choices"][0]["logprobs"]["content"]
    assert [entry["token"] for entry in content] == list(WORDS)
    assert [bytes(entry["bytes"]).decode() for entry in content] == list(WORDS)
    assert {len(entry["top_logprobs"]) for entry in content} == {likeliest or 0}
    if likeliest:
        assert content[0]["top_logprobs"][0] == {"token": "Two", "logprob": -0.125, "bytes": list(b"Two")}
    streamed = chunks(await ask(client, stream=True, **options))
    for chunk in streamed:
        ChatCompletionChunk.model_validate(chunk, strict=True)
    choices = [choice for chunk in streamed for choice in chunk["choices"]]
    assert [entry for choice in choices for entry in (choice["logprobs"] or {}).get("content", [])] == content
    assert "logprobs" not in bodies_of(stub)["alpha"]


async def test_the_probability_of_a_last_token_without_text_comes_too(
    stub: ProviderStub, client: httpx.AsyncClient
) -> None:
    def event(delta: dict[str, str], token: str, finish: str | None) -> str:
        entry = {"token": token, "logprob": -0.5, "bytes": None, "top_logprobs": []}
        choice = {"index": 0, "delta": delta, "logprobs": {"content": [entry]}, "finish_reason": finish}
        return "data: " + json.dumps({"object": "chat.completion.chunk", "choices": [choice]}) + "\n\n"

    apart = ": " + "x" * 400_000 + "\n\n"  # more than one read holds
    body = event({"content": "Four."}, "Four.", None) + apart + event({}, "<end>", "stop") + "data: [DONE]\n\n"
    stub.always("beta", Raw(body=body))
    streamed = chunks(await ask(client, stream=True, logprobs=True))
    contents = [
        choice["logprobs"]["content"] for chunk in streamed for choice in chunk["choices"] if choice["logprobs"]
    ]
    tokens = []
    for entries in contents:
        tokens.append([entry["token"] for entry in entries])
    assert tokens == [["Four."], ["<end>"]]


async def test_nobody_asked_for_log_probabilities(client: httpx.AsyncClient) -> None:
    assert (await ask(client)).json()["choices"][0]["logprobs"] is None
    streamed = chunks(await ask(client, stream=True))
    assert all(choice["logprobs"] is None for chunk in streamed for choice in chunk["choices"])


async def test_log_probabilities_that_nobody_tells_are_refused_by_name(stub: ProviderStub, tmp_path: Path) -> None:
    pool = pool_text(stub).replace('logprobs = "true"', 'logprobs = "false"')
    async with running_service(tmp_path, pool) as runtime, client_of(runtime) as client:
        refused = await ask(client, logprobs=True)
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "logprobs")
        assert (await ask(client)).status_code == 200


@pytest.mark.parametrize("seed", [4, 0])
async def test_what_a_format_cannot_take_is_noted_with_the_call(stub: ProviderStub, tmp_path: Path, seed: int) -> None:
    pool = pool_text(stub).replace("options = {", 'options = { ignore = "logit_bias,seed",')
    async with running_service(tmp_path, pool) as runtime, client_of(runtime) as client:
        body = (await ask(client, logit_bias={"1": 5}, seed=seed)).json()
        events = (await client.get(f"/v1/runs/{body['baton']['run']}/events")).json()["data"]
    intents = {event["body"]["worker"]: event["body"] for event in events if event["kind"] == "call.intended"}
    assert intents["beta"]["ignored"] == ["logit_bias", "seed"]
    assert intents["alpha"]["ignored"] == ["seed"]
    assert not {"logit_bias", "seed"} & set(bodies_of(stub)["beta"])
