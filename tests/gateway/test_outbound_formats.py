"""Requests of Anthropic's format at workers of each wire format: what those are sent, and what the caller receives."""

import re
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.conformance.wire_formats import FORMATS
from tests.harness.in_process import client_of, running_service
from tests.harness.stand_ins import GatewayStandIn
from tests.stubs import KEYS, ProviderStub, Reply
from tests.stubs.record import ReceivedRequest
from tests.stubs.script import ToolCall

POOL = """
[providers.stub]
format = "{format}"
base_url = "{url}"
key = "STUB_KEY"

[workers.alpha]
provider = "stub"
model = "{model}"
price = {{ input = 1.0, output = 2.0 }}
{worker}
[tiers.baton-mini]
pool = ["alpha"]
conductor = {{ kind = "fixed", shape = "single", workers = ["alpha"] }}
limits = {{ steps = 1, attempts = 2, seconds = 20, output_tokens = 1000 }}
"""
ASKED: dict[str, Any] = {
    "model": "baton-mini",
    "max_tokens": 64,
    "messages": [{"role": "user", "content": "What is 2 + 2?"}],
}


@asynccontextmanager
async def serving(
    stub: ProviderStub, folder: Path, name: str, worker: str = "", model: str = "alpha"
) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a service whose only worker speaks that format."""
    spec = FORMATS[name].spec(stub)
    pool = POOL.format(format=spec.format, url=spec.base_url, worker=worker, model=model)
    async with running_service(folder, pool, {"STUB_KEY": KEYS[name]}) as runtime, client_of(runtime) as client:
        yield client


STOPPED = Reply(chunks=("Four",), stop_sequence="END")
TOLD = ("stop_sequence", "END")
NOT_TOLD = ("end_turn", None)


@pytest.mark.parametrize(("name", "stop"), [("anthropic", TOLD), ("openai", TOLD), ("gemini", NOT_TOLD)])
async def test_the_stop_sequence_that_ended_the_answer_is_named_where_the_worker_names_it(
    stub: ProviderStub, tmp_path: Path, name: str, stop: tuple[str, str | None]
) -> None:
    """OpenAI's format as vLLM extends it; of Gemini's no model says which it was."""
    cases = [
        (STOPPED, ["STOP", "END"], stop),
        (STOPPED, ["STOP"], NOT_TOLD),
        (Reply(), ["END"], NOT_TOLD),
        (Reply(finish="length"), ["END"], ("max_tokens", None)),
    ]
    async with serving(stub, tmp_path, name) as client:
        for reply, stops, expected in cases:
            stub.always("alpha", reply)
            request_body = ASKED | {"stop_sequences": stops}
            key = {"Idempotency-Key": f"{stops}{reply.finish}{reply.stop_sequence}"}
            whole = (await client.post("/v1/messages", json=request_body, headers=key)).json()
            second_body = (await client.post("/v1/messages", json=request_body, headers=key)).json()
            streamed = (await client.post("/v1/messages", json=request_body | {"stream": True})).text
            assert (whole["stop_reason"], whole["stop_sequence"]) == expected, (reply, whole)
            assert second_body == whole
            reason, sequence = expected
            sequence_json = "null" if sequence is None else f'"{sequence}"'
            assert f'"stop_reason":"{reason}","stop_sequence":{sequence_json}' in streamed


async def test_the_journal_has_no_text_of_a_stop_sequence(stub: ProviderStub, tmp_path: Path) -> None:
    stub.always("alpha", STOPPED)
    async with serving(stub, tmp_path, "anthropic") as client:
        body = (await client.post("/v1/messages", json=ASKED | {"stop_sequences": ["STOP", "END"]})).json()
        events = (await client.get(f"/v1/runs/{body['baton']['run']}/events")).json()["data"]
    [step_done] = [event["body"] for event in events if event["kind"] == "step.done"]
    assert step_done["stop_sequence"] == 1
    assert "END" not in str(events)


PDF = "JVBERi0xLjQK"
URL = f"data:application/pdf;base64,{PDF}"
READS = 'modalities = ["text", "image", "pdf"]\ntools = true\n'
SHOWN = {
    "anthropic": {
        "type": "document",
        "source": {"type": "base64", "media_type": "application/pdf", "data": PDF},
        "title": "Report",
    },
    "openai": {"type": "file", "file": {"filename": "Report", "file_data": URL}},
    "responses": {"type": "input_file", "filename": "Report", "file_data": URL},
    "gemini": {"inlineData": {"mimeType": "application/pdf", "data": PDF}},
}
"""How each format holds a PDF."""


def document(source: dict[str, Any], **more: Any) -> dict[str, Any]:
    return {"type": "document", "source": source, **more}


def pdf(**more: Any) -> dict[str, Any]:
    return document({"type": "base64", "media_type": "application/pdf", "data": PDF}, title="Report", **more)


def plain(text: str, **more: Any) -> dict[str, Any]:
    return document({"type": "text", "media_type": "text/plain", "data": text}, **more)


def saying(*blocks: dict[str, Any]) -> dict[str, Any]:
    question = {"type": "text", "text": "Sum it up."}
    return ASKED | {"messages": [{"role": "user", "content": [*blocks, question]}]}


@pytest.mark.parametrize("name", SHOWN)
async def test_pdfs_reach_workers_that_read_them(stub: ProviderStub, tmp_path: Path, name: str) -> None:
    """In a question, and in the result of a tool."""
    called = {"role": "assistant", "content": [{"type": "tool_use", "id": "toolu_1", "name": "look", "input": {}}]}
    result = {"role": "user", "content": [{"type": "tool_result", "tool_use_id": "toolu_1", "content": [pdf()]}]}
    looked = saying(pdf(context="Of last year.")) | {"tools": [{"name": "look", "input_schema": {"type": "object"}}]}
    async with serving(stub, tmp_path, name, READS) as client:
        for turns, times in (([], 1), ([called, result], 2)):
            full_body = looked | {"messages": [*looked["messages"], *turns], "stream": bool(turns)}
            assert (await client.post("/v1/messages", json=full_body)).status_code == 200
            request_body = stub.requests_for("alpha")[-1].json
            assert list(occurrences(request_body, SHOWN[name])) == [SHOWN[name]] * times
            assert "Of last year." in str(request_body)
        run = (await client.get("/v1/runs")).json()["data"][-1]["id"]
        step = (await client.get(f"/v1/runs/{run}/steps/0")).json()
    assert {"type": "file", "file": {"filename": "Report", "file_data": URL}} in step["messages"][0]["content"]


def occurrences(value: Any, value_to_find: Any) -> Any:
    """The places of a value in JSON."""
    if value == value_to_find:
        yield value
    elif isinstance(value, dict | list):
        for inner in value.values() if isinstance(value, dict) else value:
            yield from occurrences(inner, value_to_find)


async def test_a_pdf_that_no_worker_reads_is_a_400_that_says_so(stub: ProviderStub, tmp_path: Path) -> None:
    async with serving(stub, tmp_path, "anthropic") as client:
        for streams in (False, True):
            reply = await client.post("/v1/messages", json=saying(pdf()) | {"stream": streams})
            error = reply.json()["error"]
            assert (reply.status_code, error["type"]) == (400, "invalid_request_error")
            assert "PDF" in error["message"]
    assert stub.requests == []


async def test_documents_of_text_reach_every_worker_as_text(stub: ProviderStub, tmp_path: Path) -> None:
    parts = [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}]
    blocks = [
        plain("The sky is green.", title="Sky", context="A novel."),
        document({"type": "content", "content": "As a text."}),
        document({"type": "content", "content": parts}),
        {"type": "search_result", "title": "Hit", "source": "https://x.example/1", "content": parts},
    ]
    async with serving(stub, tmp_path, "openai") as client:
        whole = await client.post("/v1/messages", json=saying(*blocks))
        count = await client.post(
            "/v1/messages/count_tokens", json={key: saying(*blocks)[key] for key in ("model", "messages")}
        )
    assert (whole.status_code, count.status_code) == (200, 200)
    [message] = stub.requests_for("alpha")[-1].json["messages"]
    texts = [part["text"] for part in message["content"]]
    assert texts == [
        "<document>\n<title>Sky</title>\n<context>A novel.</context>\nThe sky is green.\n</document>\n",
        "<document>\nAs a text.\n</document>\n",
        "<document>\nOne.Two.\n</document>\n",
        "<document>\n<title>Hit</title>\n<source>https://x.example/1</source>\nOne.Two.\n</document>\n",
        "Sum it up.",
    ]


@pytest.mark.parametrize(
    ("block", "says"),
    [
        (document({"type": "url", "url": "https://x.example/a.pdf"}), "send a PDF as base64"),
        (document({"type": "file", "file_id": "file_1"}), "'messages.0.content.0.source.type'"),
        (plain("x", citations={"enabled": True}), "'messages.0.content.0.citations'"),
        (pdf(citations={"enabled": True}), "'messages.0.content.0.citations'"),
    ],
)
async def test_documents_that_cannot_be_had_are_refused_by_name(
    gateway: GatewayStandIn, key: str, block: dict[str, Any], says: str
) -> None:
    async with gateway.client(key) as client:
        reply = await client.post("/v1/messages", json=saying(block))
        spared = await client.post("/v1/messages", json=saying(plain("x", citations={"enabled": False})))
    assert (reply.status_code, says in reply.json()["error"]["message"]) == (400, True), reply.text
    assert spared.status_code == 200


TEXT = "data:text/csv;charset=utf-8;base64,YSxiCjEsMgo="
MADE = "<document>\n<title>sums.csv</title>\na,b\n1,2\n\n</document>\n"


def chat(file: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    parts = [{"type": "file", "file": file}, {"type": "text", "text": "Sum it up."}]
    return "/v1/chat/completions", {"model": "baton-mini", "messages": [{"role": "user", "content": parts}]}


def response(file: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    parts = [{"type": "input_file", **file}, {"type": "input_text", "text": "Sum it up."}]
    return "/v1/responses", {"model": "baton-mini", "input": [{"role": "user", "content": parts}]}


@pytest.mark.parametrize("request_of", [chat, response])
async def test_files_of_openais_formats_reach_workers_in_theirs(
    stub: ProviderStub, tmp_path: Path, request_of: Callable[[dict[str, Any]], tuple[str, dict[str, Any]]]
) -> None:
    async with serving(stub, tmp_path, "anthropic", READS) as client:
        for streams in (False, True):
            for file in ({"file_data": URL, "filename": "Report"}, {"file_data": TEXT, "filename": "sums.csv"}):
                path, request_body = request_of(file)
                reply = await client.post(path, json=request_body | {"stream": streams})
                assert reply.status_code == 200, reply.text
        if request_of is response:
            whole = (await client.post(path, json=response({"file_data": URL, "filename": "Report"})[1])).json()
            items = (await client.get(f"/v1/responses/{whole['id']}/input_items")).json()["data"]
            assert items[0]["content"][0]["file_data"] == URL
    contents = [request.json["messages"][0]["content"][0] for request in stub.requests_for("alpha")]
    assert contents[:2] == contents[2:4] == [SHOWN["anthropic"], {"type": "text", "text": MADE}]


@pytest.mark.parametrize("request_of", [chat, response])
async def test_files_that_cannot_be_had_are_refused_by_name(
    gateway: GatewayStandIn, key: str, request_of: Callable[[dict[str, Any]], tuple[str, dict[str, Any]]]
) -> None:
    binary = "data:application/zip;base64,UEsDBA=="
    broken = "data:text/plain;base64,/w=="
    async with gateway.client(key) as client:
        for file, says in (
            ({"file_id": "file-1"}, "keeps no files"),
            ({"file_data": binary}, "PDFs or texts"),
            ({"file_data": broken}, "UTF-8"),
            ({"file_data": "YWJj"}, "file_data"),
        ):
            path, request_body = request_of(file)
            error = (await client.post(path, json=request_body)).json()["error"]
            assert says in error["message"], error
            assert error["param"].startswith(("messages[0].content[0]", "input[0].content[0]"))
    assert gateway.runs.orders == []


async def test_an_image_by_the_id_of_a_file_is_refused_by_name(gateway: GatewayStandIn, key: str) -> None:
    image = {"type": "input_image", "file_id": "file-1", "detail": "auto"}
    request_body = {"model": "baton-mini", "input": [{"role": "user", "content": [image]}]}
    async with gateway.client(key) as client:
        error = (await client.post("/v1/responses", json=request_body)).json()["error"]
    assert (error["param"], error["code"]) == ("input[0].content[0]", "unsupported_parameter")
    assert "keeps no files: send `image_url`" in error["message"]


@pytest.mark.parametrize("name", FORMATS)
async def test_neighbouring_turns_of_one_role_are_one_turn(stub: ProviderStub, tmp_path: Path, name: str) -> None:
    """Calls in two turns of the assistant, and their results in two of the user's, with words between them."""
    calls: list[dict[str, Any]] = [{"type": "tool_use", "id": id_, "name": "look", "input": {}} for id_ in "ab"]
    results: list[dict[str, Any]] = [{"type": "tool_result", "tool_use_id": id_, "content": id_} for id_ in "ab"]
    words = [{"type": "text", "text": "And?"}]
    turns = [("assistant", [call]) for call in calls] + [("user", [result, *words]) for result in results]
    messages = [*ASKED["messages"], *({"role": role, "content": content} for role, content in turns)]
    async with serving(stub, tmp_path, name, "tools = true\n") as client:
        reply = await client.post("/v1/messages", json=ASKED | {"messages": messages})
    assert reply.status_code == 200, stub.requests[-1].json
    assert str(stub.requests[-1].json).count("And?") == 2


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("model", "constrained"), [("gemini-2.5-flash", False), ("gemini-3-pro", True)])
async def test_geminis_older_models_are_told_the_form_of_an_answer_beside_tools(
    stub: ProviderStub, tmp_path: Path, model: str, constrained: bool, stream: bool
) -> None:
    """Their API takes no form then; the answer is checked, and asked for again."""
    texts = ['{"sum": 4}'] if constrained else ["Four.", '{"sum": 4}']
    stub.script(model, *(Reply(chunks=(text,)) for text in texts))
    stub.always("*", Reply(chunks=('{"sum": 4}',)))
    properties = {"sum": {"type": "integer"}}
    schema = {"type": "object", "properties": properties, "required": ["sum"], "additionalProperties": False}
    more = {"tools": [{"name": "look", "input_schema": {"type": "object"}}], "stream": stream}
    form = {"output_config": {"format": {"type": "json_schema", "schema": schema}}}
    async with serving(stub, tmp_path, "gemini", "tools = true\n", model) as client:
        reply = await client.post("/v1/messages", json=ASKED | more | form)
        without_tools = await client.post("/v1/messages", json=ASKED | form)
    assert (reply.status_code, "Four." in reply.text) == (200, False), reply.text
    assert "sum" in reply.text
    first, *_, last = [request.json for request in stub.requests]
    assert ("responseJsonSchema" in first["generationConfig"], "sum" in str(first["contents"])) == (
        constrained,
        not constrained,
    )
    assert (without_tools.status_code, "responseJsonSchema" in last["generationConfig"]) == (200, True)


@pytest.mark.parametrize("stream", [False, True])
async def test_bounds_that_a_decoder_does_not_keep_are_told_in_words_and_checked(
    stub: ProviderStub, tmp_path: Path, stream: bool
) -> None:
    """Anthropic's decoders take no bounds of numbers. Nothing of an answer beyond them is sent to the caller."""
    stub.script("alpha", *(Reply(chunks=("{", f'"score": {n}}}'), gap=0.1) for n in (11, 4)))
    properties = {"score": {"type": "integer", "maximum": 10}}
    schema = {"type": "object", "properties": properties, "required": ["score"], "additionalProperties": False}
    form = {"type": "json_schema", "json_schema": {"name": "score", "strict": True, "schema": schema}}
    question = {"model": "baton-mini", "messages": ASKED["messages"], "response_format": form, "stream": stream}
    async with serving(stub, tmp_path, "anthropic") as client:
        reply = await client.post("/v1/chat/completions", json=question)
        events = (await client.get(f"/v1/runs/{reply.headers['x-baton-run']}/events")).json()["data"]
    assert (reply.status_code, ": 4}" in reply.text, ": 11}" in reply.text) == (200, True, False)
    first, second = [request.json for request in stub.requests]
    assert '"maximum": 10' in str(first["messages"]).replace("'", '"')
    sent = first["output_config"]["format"]["schema"]
    assert (sent["properties"], "output_config" in second) == ({"score": {"type": "integer"}}, True)
    calls = [event["body"]["template"] for event in events if event["kind"] == "call.intended"]
    assert calls == ["loosened-1", "loosened-1"]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", FORMATS)
async def test_a_tool_may_have_a_name_of_128_characters(
    stub: ProviderStub, tmp_path: Path, name: str, stream: bool
) -> None:
    """As those of MCP servers have; some workers take 64 at most."""
    tool = {"name": "mcp__" + "server" * 20, "input_schema": {"type": "object"}}
    asked = ASKED | {"tools": [tool], "tool_choice": {"type": "tool", "name": tool["name"]}, "stream": stream}

    def call(received: ReceivedRequest) -> Reply:
        (name_sent,) = set(re.findall(r"mcp__[a-z0-9_]+", str(received.json)))
        return Reply(chunks=(), tool_calls=(ToolCall(name_sent, "{}", "c1"),), finish="tool")

    stub.script("alpha", call, Reply())
    async with serving(stub, tmp_path, name, "tools = true\n") as client:
        reply = await client.post("/v1/messages", json=asked)
        [(id_, told)] = re.findall(r'"type":"tool_use","id":"([^"]+)","name":"([^"]+)"', reply.text)
        assert told == tool["name"]
        for call_id in (id_, "toolu_1"):  # the run goes on; another run has the call in its conversation
            called = {"type": "tool_use", "id": call_id, "name": told, "input": {}}
            result = {"type": "tool_result", "tool_use_id": call_id, "content": "ok"}
            turns = [{"role": "assistant", "content": [called]}, {"role": "user", "content": [result]}]
            more = {"messages": [*ASKED["messages"], *turns], "tool_choice": {"type": "auto"}}
            assert (await client.post("/v1/messages", json=asked | more)).status_code == 200
    assert len(stub.requests) == 3


@pytest.mark.parametrize("name", FORMATS)
async def test_the_form_of_an_answer_may_be_a_list(stub: ProviderStub, tmp_path: Path, name: str) -> None:
    """OpenAI's decoders take objects alone: its workers are told the form in words."""
    stub.always("alpha", Reply(chunks=("[1, 2]",)))
    form = {"format": {"type": "json_schema", "schema": {"type": "array", "items": {"type": "integer"}}}}
    async with serving(stub, tmp_path, name) as client:
        reply = await client.post("/v1/messages", json=ASKED | {"output_config": form})
    assert (reply.status_code, reply.json()["content"][0]["text"]) == (200, "[1, 2]")
    assert "integer" in str(stub.requests[0].json.get("messages", stub.requests[0].json))
