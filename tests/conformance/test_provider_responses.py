"""OpenAI's Responses as an outbound format: what only this format has, and a whole run over it."""

import json
from pathlib import Path
from typing import Any

import pytest

from app.core.message.chat import Form, Image, Message, Piece, Sampling, Text, Tool, Toolbox, ToolCall
from app.core.pool.catalog import ProviderSpec
from app.errors import WorkerError, WorkerMalformed, WorkerRateLimited, WorkerRefused, WorkerUnavailable
from app.providers.adapters.responses import Response, ResponsesProvider
from tests.conformance.test_provider_tools import ASK, BOX, PIXEL, TWO, gather_calls, keepsake_of, past
from tests.conformance.wire_formats import FORMATS, connected, ending, request, text_of_pieces
from tests.harness.in_process import client_of, running_service
from tests.stubs import KEYS, ProviderStub, Reply
from tests.stubs import ToolCall as Calls

SEALED = {
    "id": "rs_stub",
    "type": "reasoning",
    "summary": [{"type": "summary_text", "text": "Hm."}],
    "encrypted_content": "c3R1Yg==",
}
POOL = """
[providers.stub]
format = "responses"
base_url = "{url}"
key = "STUB_KEY"

[workers.alpha]
provider = "stub"
model = "gpt-6-sol"
price = {{ input = 1.00, output = 2.00 }}
tools = true

[tiers.baton-mini]
pool = ["alpha"]
conductor = {{ kind = "fixed", shape = "single", workers = ["alpha"] }}
"""


def render_body(*messages: Message, options: dict[str, str] | None = None, **changes: Any) -> dict[str, Any]:
    """The body that the adapter would send."""
    adapter = ResponsesProvider(ProviderSpec("p", "responses", options=options or {}), "k")
    body: dict[str, Any] = json.loads(adapter.render(request(*(messages or (ASK,)), **changes)))
    return body


def test_sampling_tools_and_the_schema_as_the_format_spells_them() -> None:
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    box = Toolbox((Tool("look", "Looks."),), "named", "look", parallel=False)
    sampling = Sampling(0.5, 0.9, 99, ("\n\n",), 7, 0.1, 0.2, (("50256", -100),))
    body = render_body(sampling=sampling, toolbox=box, form=Form(schema, description="Empty.", strict=True))
    assert (body["max_output_tokens"], body["temperature"], body["top_p"]) == (99, 0.5, 0.9)
    assert body["store"] is False
    assert body.keys().isdisjoint({"stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias", "messages"})
    empty = {"type": "object", "properties": {}}
    # An absent `strict` would mean true to this API.
    assert body["tools"] == [
        {"type": "function", "name": "look", "description": "Looks.", "parameters": empty, "strict": False}
    ]
    assert (body["tool_choice"], body["parallel_tool_calls"]) == ({"type": "function", "name": "look"}, False)
    form = {"name": "answer", "description": "Empty.", "strict": True, "schema": schema}
    assert body["text"] == {"format": {"type": "json_schema", **form}}
    adapter = ResponsesProvider(ProviderSpec("p", "responses", options={"ignore": "top_p"}), "k")
    assert adapter.unsupported == {
        "stop", "seed", "presence_penalty", "frequency_penalty", "logit_bias", "top_p",
    }  # fmt: skip
    assert render_body(sampling=Sampling(max_tokens=1))["max_output_tokens"] == 16


async def test_reasoning_goes_back_sealed_before_what_it_led_to() -> None:
    async with ProviderStub() as stub, connected(FORMATS["responses"], stub) as line:
        stub.script("model-a", *[Reply(reasoning=("Hm", "."), tool_calls=TWO, finish="tool")] * 2)
        keepsake = keepsake_of(await line.pieces(request(ASK, toolbox=BOX)))
        assert keepsake is not None
        assert keepsake_of(await line.pieces(request(ASK, toolbox=BOX, live=False))) == keepsake
        await line.pieces(request(*past(keepsake=keepsake), toolbox=BOX))
        _, reasoning, message, *calls, first_result, second_result = stub.requests[-1].json["input"]
    assert reasoning == SEALED
    assert (message["role"], message["content"], message["phase"]) == ("assistant", "I will.", "final_answer")
    assert [(call["type"], call["call_id"]) for call in calls] == [("function_call", "c-1"), ("function_call", "c-2")]
    assert (first_result["call_id"], first_result["output"], second_result["output"]) == ("c-1", "1", "")


def test_each_reasoning_stays_before_its_own_call() -> None:
    items = [SEALED, {"type": "function_call"}, {**SEALED, "id": "rs_2"}, {"type": "function_call"}]
    turn = past(keepsake={"items": items}, words="")
    kinds = [item.get("id") or item.get("call_id") for item in render_body(*turn, toolbox=BOX)["input"][1:5]]
    assert kinds == ["rs_stub", "c-1", "rs_2", "c-2"]
    dropped = render_body(*turn, toolbox=BOX, options={"reasoning": "drop"})
    assert "include" not in dropped
    assert [item["type"] for item in dropped["input"][1:3]] == ["function_call", "function_call"]


@pytest.mark.parametrize("model", ["gpt-4.1", "ft:gpt-4o-mini:acme", "gpt-5-chat-latest", "chatgpt-4o-latest"])
async def test_models_that_do_not_reason_are_not_asked_for_reasoning(model: str) -> None:
    async with ProviderStub() as stub, connected(FORMATS["responses"], stub) as line:
        assert text_of_pieces(await line.pieces(request(model=model))) == "Hello there."


def test_images_in_questions_and_in_results_of_tools() -> None:
    picture = Message("tool", (Text("See:"), Image(PIXEL)), call_id="c-1")
    question = Message("user", (Text("see"), Image("https://example.org/a.png", "low")))
    items = render_body(question, *past(picture)[1:], toolbox=BOX)["input"]
    assert items[0]["content"][1] == {
        "type": "input_image", "image_url": "https://example.org/a.png", "detail": "low",
    }  # fmt: skip
    output = next(item["output"] for item in items if item["type"] == "function_call_output")
    assert output == [
        {"type": "input_text", "text": "See:"},
        {"type": "input_image", "image_url": PIXEL, "detail": "auto"},
    ]


def test_a_result_of_no_known_call_is_plain_words() -> None:
    stray = Message("tool", (Text("found"),), call_id="lost")
    assert render_body(ASK, stray)["input"][1] == {"type": "message", "role": "user", "content": "found"}


# --- replies


def read(*events: dict[str, Any]) -> tuple[Response, list[Piece]]:
    """A reader that has taken these events, and their pieces."""
    reading, pieces = Response("w at p"), list[Piece]()
    for event in events:
        reading.event(json.dumps(event).encode(), pieces)
    return reading, pieces


def failed_event(code: str | None) -> dict[str, Any]:
    """The event of a response that failed."""
    error = {"code": code, "message": "provider-body-canary"} if code else None
    return {"type": "response.failed", "response": {"status": "failed", "error": error}}


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("server_error", WorkerUnavailable),
        ("rate_limit_exceeded", WorkerRateLimited),
        ("invalid_prompt", WorkerRefused),
        ("invalid_image", WorkerRefused),
        ("a_new_code", WorkerUnavailable),
        (None, WorkerUnavailable),
    ],
)
def test_a_failed_response_is_the_error_that_it_names(code: str | None, expected: type[WorkerError]) -> None:
    with pytest.raises(WorkerError) as caught:
        read(failed_event(code))
    assert type(caught.value) is expected
    assert "canary" not in str(caught.value)


@pytest.mark.parametrize(
    ("document", "expected"),
    [
        ({"status": "failed", "error": {"code": "rate_limit_exceeded"}}, WorkerRateLimited),
        ({"status": "failed", "error": None}, WorkerUnavailable),
        ({"status": "cancelled"}, WorkerUnavailable),
        ({"status": "in_progress", "output": []}, WorkerMalformed),
        ({"object": "response"}, WorkerMalformed),
    ],
)
def test_a_whole_response_that_is_no_answer(document: dict[str, Any], expected: type[WorkerError]) -> None:
    with pytest.raises(WorkerError) as caught:
        Response("w").read_whole(json.dumps(document).encode(), [])
    assert type(caught.value) is expected


def test_an_error_event_that_nests_its_error() -> None:
    with pytest.raises(WorkerRateLimited):
        read({"type": "error", "sequence_number": 2, "error": {"type": "rate_limit_error", "code": None}})


def test_a_stream_without_deltas_gives_its_items_whole() -> None:
    """Some servers send only complete items, and some only the response."""
    message = {"type": "message", "content": [{"type": "output_text", "text": "Hi."}]}
    call = {"type": "function_call", "call_id": "a", "name": "add", "arguments": "{}"}
    end = {"type": "response.completed", "response": {"status": "completed", "output": [message, call]}}
    done_events = [
        {"type": "response.output_item.done", "output_index": place, "item": item}
        for place, item in enumerate((message, call))
    ]
    for events in ((end,), (*done_events, end)):
        reading, pieces = read(*events)
        assert text_of_pieces(pieces) == "Hi."
        assert gather_calls(pieces) == (ToolCall("a", "add", "{}"),)
        assert reading.end().finish == "tool_calls"


async def test_an_answer_that_the_provider_cut_off_by_its_filter_is_marked(tmp_path: Path) -> None:
    async with ProviderStub() as stub, connected(FORMATS["responses"], stub) as line:
        stub.script("model-a", Reply(finish="content_filter"))
        end = ending(await line.pieces(request()))
    assert (end.finish, end.refused) == ("content_filter", True)


async def test_a_run_with_tools_over_a_worker_that_speaks_responses(tmp_path: Path) -> None:
    """The caller's tool is called by the worker, and its result goes back to it with the reasoning before the call."""
    tools = [{"type": "function", "function": {"name": "look", "parameters": {"type": "object", "properties": {}}}}]
    async with ProviderStub() as stub:
        stub.script("gpt-6-sol", Reply(chunks=(), reasoning=("Hm.",), tool_calls=(Calls("look"),), finish="tool"))
        pool = POOL.format(url=stub.responses_url)
        async with (
            running_service(tmp_path, pool, {"STUB_KEY": KEYS["responses"]}) as runtime,
            client_of(runtime) as client,
        ):
            body = {"model": "baton-mini", "messages": [{"role": "user", "content": "Look."}], "tools": tools}
            message = (await client.post("/v1/chat/completions", json=body)).json()["choices"][0]["message"]
            result = {"role": "tool", "tool_call_id": message["tool_calls"][0]["id"], "content": "A tree."}
            body["messages"] = [*body["messages"], message, result]
            answer = (await client.post("/v1/chat/completions", json=body)).json()
        assert answer["choices"][0]["message"]["content"] == "Hello there."
        items = stub.requests[-1].json["input"]
    assert [item["type"] for item in items] == ["message", "reasoning", "function_call", "function_call_output"]
    assert items[1]["encrypted_content"] == "c3R1Yg=="
    assert items[3]["output"] == "A tree."


ABLE = """
[providers.able]
format = "responses"
base_url = "{url}"
key = "STUB_KEY"
options = {{ logprobs = "true" }}

[workers.beta]
provider = "able"
model = "gpt-4.1"
price = {{ input = 1.00, output = 2.00 }}
"""


async def test_log_probabilities_reach_the_caller_from_a_worker_that_gives_them(tmp_path: Path) -> None:
    """In both formats, whole and streamed; `alpha`, whose provider does not declare them, is not asked for them."""
    responses: dict[str, Any] = {"model": "baton-mini", "input": "Hi", "top_logprobs": 2}
    included = responses | {"include": ["message.output_text.logprobs"], "top_logprobs": 0}
    chat = {"model": "baton-mini", "messages": [{"role": "user", "content": "Hi"}], "logprobs": True, "top_logprobs": 2}
    async with ProviderStub() as stub:
        pool = (POOL + ABLE).format(url=stub.responses_url).replace('pool = ["alpha"]', 'pool = ["alpha", "beta"]')
        async with (
            running_service(tmp_path, pool, {"STUB_KEY": KEYS["responses"]}) as runtime,
            client_of(runtime) as client,
        ):
            whole = (await client.post("/v1/responses", json=responses)).json()
            bare = (await client.post("/v1/responses", json=included)).json()
            streamed = (await client.post("/v1/responses", json=responses | {"stream": True})).text
            completion = (await client.post("/v1/chat/completions", json=chat)).json()
            plain = (await client.post("/v1/responses", json={"model": "baton-mini", "input": "Hi"})).json()
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: ")]
    tokens = whole["output"][0]["content"][0]["logprobs"]
    assert [(token["token"], bytes(token["bytes"]).decode(), len(token["top_logprobs"])) for token in tokens] == [
        (token, token, 2) for token in ("Hello", " there", ".")
    ]
    assert [len(token["top_logprobs"]) for token in bare["output"][0]["content"][0]["logprobs"]] == [0, 0, 0]
    reported_tokens = [
        token for event in events if event["type"] == "response.output_text.delta" for token in event["logprobs"]
    ]
    assert [event["token"] for event in reported_tokens] == ["Hello", " there", "."]
    assert [token["token"] for token in completion["choices"][0]["logprobs"]["content"]] == ["Hello", " there", "."]
    assert plain["output"][0]["content"][0]["logprobs"] == []
    assert [request.model for request in stub.requests] == ["gpt-4.1"] * 4 + ["gpt-6-sol"]
    assert [request.json.get("top_logprobs") for request in stub.requests[:4]] == [2, None, 2, 2]
    assert {tuple(request.json["include"]) for request in stub.requests[:4]} == {("message.output_text.logprobs",)}
