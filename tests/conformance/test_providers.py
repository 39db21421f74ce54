"""The provider seam: each wire format gives the same pieces for the same answer, and sends exactly what it rendered."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import suppress
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from app.core.message.chat import (
    SAMPLING,
    Form,
    Image,
    Message,
    Piece,
    Sampling,
    Text,
    TextDelta,
    Tool,
    Toolbox,
    Usage,
    message_to_json,
)
from app.core.pool.catalog import ProviderSpec
from app.core.pool.wire_formats import FORMATS as WIRE_FORMATS
from app.errors import ConfigInvalid, WorkerError
from app.providers.http import EventReader, ReplyReader
from tests.conformance.wire_formats import (
    FORMATS,
    PATIENT,
    Format,
    Line,
    connected,
    ending,
    list_chosen_tokens,
    request,
    text_of_pieces,
)
from tests.stubs import ProviderStub, Raw, Reply, Trickle
from tests.stubs import Usage as Billed

SCHEMA = {
    "type": "object",
    "additionalProperties": False,
    "required": ["steps"],
    "properties": {"steps": {"type": "array", "minItems": 1, "maxItems": 3, "items": {"type": "integer"}}},
}
PIXEL = "data:image/png;base64,iVBORw0KGgo="


@pytest.fixture(params=FORMATS)
def form(request: pytest.FixtureRequest) -> Format:
    return FORMATS[request.param]


@pytest.fixture
async def stub() -> AsyncIterator[ProviderStub]:
    async with ProviderStub() as stub:
        yield stub


@pytest.fixture
async def line(form: Format, stub: ProviderStub) -> AsyncIterator[Line]:
    async with connected(form, stub) as line:
        yield line


# --- answers


async def test_text_model_and_usage_of_a_streamed_answer(line: Line) -> None:
    line.stub.script("model-a", Reply(chunks=("Hé", "llo", " 🌍"), usage=Billed(input=12, output=7)))
    pieces = await line.pieces(request())
    assert text_of_pieces(pieces) == "Héllo 🌍"
    end = ending(pieces)
    assert (end.finish, end.usage, end.model, end.refused) == ("stop", Usage(12, 0, 7, 0), "model-a", False)


async def test_cached_and_reasoning_tokens_are_subsets_and_reasoning_is_not_part_of_the_answer(line: Line) -> None:
    billed = Billed(input=100, cached=60, output=40, reasoning=25)
    line.stub.script("model-a", Reply(reasoning=("secret thoughts",), usage=billed))
    pieces = await line.pieces(request())
    assert text_of_pieces(pieces) == "Hello there."
    assert ending(pieces).usage == Usage(100, 60, 40, 25)


@pytest.mark.parametrize("name", ["anthropic", "openai", "responses"])
async def test_what_a_cache_wrote_is_input_too(stub: ProviderStub, name: str) -> None:
    stub.script("model-a", Reply(usage=Billed(input=100, cached=20, cache_write=50, output=5)))
    async with connected(FORMATS[name], stub) as line:
        assert ending(await line.pieces(request())).usage == Usage(100, 20, 5, 0, written=50)


async def test_no_usage_is_none_and_never_a_guess(line: Line) -> None:
    line.stub.script("model-a", Reply(usage=None))
    assert ending(await line.pieces(request())).usage is None


async def test_a_refusal_is_marked(line: Line) -> None:
    line.stub.script("model-a", Reply(refusal="I cannot help with that.", finish="refusal"))
    pieces = await line.pieces(request())
    assert ending(pieces).refused
    if line.format.name in ("openai", "responses"):
        assert text_of_pieces(pieces).strip() == "I cannot help with that."


@pytest.mark.parametrize(
    ("finish", "expected"),
    [("length", "length"), ("content_filter", "content_filter"), ("brand_new_reason", "length")],
)
async def test_finish_reasons(line: Line, finish: str, expected: str) -> None:
    line.stub.script("model-a", Reply(finish=finish))
    assert ending(await line.pieces(request())).finish == expected


async def test_a_blocked_prompt_is_a_refusal_without_words(line: Line) -> None:
    line.stub.script("model-a", Reply(chunks=(), finish="blocked"))
    pieces = await line.pieces(request())
    assert text_of_pieces(pieces) == ""
    assert (ending(pieces).finish, ending(pieces).refused) == ("content_filter", True)


async def test_the_model_that_answered_is_reported_even_if_it_is_another(line: Line) -> None:
    line.stub.script("model-a", Reply(model="something-else"))
    assert ending(await line.pieces(request())).model == "something-else"


@pytest.mark.parametrize("live", [True, False])
async def test_the_id_of_the_reply_is_reported(line: Line, live: bool) -> None:
    ids = {"openai": "chatcmpl-stub", "responses": "resp_stub", "anthropic": "msg_01stub", "gemini": "stubresponse"}
    assert ending(await line.pieces(replace(request(), live=live))).id == ids[line.format.name]


async def test_the_headers_of_a_trace_are_sent_beside_the_adapters_own(line: Line) -> None:
    trace = {"traceparent": f"00-{'a' * 32}-{'b' * 16}-01", "tracestate": "vendor=opaque"}
    await line.pieces(request())
    await line.pieces(replace(request(), headers=trace))
    plain, traced = [dict(request.headers) for request in line.stub.requests]
    assert {name: value for name, value in traced.items() if plain.get(name) != value} == trace


async def test_comments_blank_bytes_and_crlf_change_nothing(line: Line) -> None:
    line.stub.script("model-a", Reply(comments=True, newline="\r\n", trickle=Trickle(size=3)))
    assert text_of_pieces(await line.pieces(request())) == "Hello there."


async def test_an_empty_answer_still_ends(line: Line) -> None:
    line.stub.script("model-a", Reply(chunks=()))
    pieces = await line.pieces(request())
    assert (text_of_pieces(pieces), ending(pieces).finish) == ("", "stop")


async def test_a_server_that_answers_whole_although_asked_to_stream(line: Line) -> None:
    line.stub.script("model-a", Reply(streams="json", usage=Billed(input=9, output=3)))
    pieces = await line.pieces(request())
    assert text_of_pieces(pieces) == "Hello there."
    assert ending(pieces).usage == Usage(9, 0, 3, 0)


async def test_a_server_that_cannot_stream_is_not_asked_to(form: Format, stub: ProviderStub) -> None:
    async with connected(form, stub, streams=False) as line:
        pieces = await line.pieces(request())
    assert (text_of_pieces(pieces), ending(pieces).usage) == ("Hello there.", Usage(12, 0, 7, 0))
    assert not stub.requests[0].streaming


async def test_what_nobody_watches_comes_whole_with_the_same_pieces(line: Line) -> None:
    billed = Reply(reasoning=("hm",), usage=Billed(input=9, cached=4, output=8, reasoning=3))
    line.stub.script("model-a", billed, billed)
    live = await line.pieces(request())
    batches = [batch async for batch in line.stream(request(live=False))]
    assert len(batches) == 1
    assert (text_of_pieces(batches[0]), ending(batches[0])) == (text_of_pieces(live), ending(live))
    assert [received.streaming for received in line.stub.requests] == [True, False]


async def test_pieces_of_one_read_come_together(line: Line, recorded_stream: bytes) -> None:
    line.stub.script("model-a", Raw(body=recorded_stream.decode()))
    batches = [batch async for batch in line.stream(request())]
    assert len(batches) <= 2 < len(TEXTS)
    assert text_of_pieces([piece for batch in batches for piece in batch]) == "".join(TEXTS)


async def test_log_probabilities_of_the_chosen_tokens(stub: ProviderStub) -> None:
    async with connected(FORMATS["openai"], stub) as line:
        pieces = await line.pieces(request(logprobs=3))
    assert [token.token for token in list_chosen_tokens(pieces)] == ["Hello", " there", "."]
    assert list_chosen_tokens(pieces)[0].logprob == -0.125
    assert [name for name, _ in list_chosen_tokens(pieces)[0].others] == [" alternative0", " alternative1"]
    assert [likely.token for likely in list_chosen_tokens(pieces)[0].top] == ["Hello", " alternative0", " alternative1"]
    assert [token.raw for token in list_chosen_tokens(pieces)] == [b"Hello", b" there", b"."]


async def test_log_probabilities_without_alternatives(stub: ProviderStub) -> None:
    async with connected(FORMATS["openai"], stub) as line:
        pieces = await line.pieces(request(logprobs=0))
    assert [(token.token, token.top) for token in list_chosen_tokens(pieces)] == [
        ("Hello", ()),
        (" there", ()),
        (".", ()),
    ]


async def test_a_connection_is_used_again(line: Line) -> None:
    """The body is read to its end after the terminal marker, so that the next call finds a warm connection."""
    line.stub.always("model-a", Reply())
    for _ in range(4):
        await line.pieces(request())
    assert len({received.port for received in line.stub.requests}) == 1


# --- requests


async def test_what_is_sent_is_exactly_what_was_rendered(line: Line) -> None:
    rendered_request = request(
        sampling=Sampling(max_tokens=64, temperature=0.5, stop=("END",), seed=None), form=Form(SCHEMA, strict=True)
    )
    assert line.adapter.render(rendered_request) == line.adapter.render(rendered_request)
    await line.pieces(rendered_request)
    (received,) = line.stub.requests
    assert received.body == line.adapter.render(rendered_request)
    assert received.header("accept-encoding") == "identity"
    assert received.header("cookie") is None


async def test_the_body_on_the_wire_is_the_one_that_was_given(line: Line) -> None:
    """`stream` sends its `body`, not a second rendering of its request."""
    body = line.adapter.render(request(Message("user", (Text("rendered earlier"),))))
    async for _ in line.adapter.stream(request(), body, PATIENT):
        pass
    assert line.stub.requests[0].body == body


async def test_every_kind_of_conversation_is_accepted(line: Line) -> None:
    """The stub refuses what the real APIs refuse: alternation, empty text, system roles, images."""
    picture = Message("user", (Text("What is this?"), Image(PIXEL), Image("https://example.org/a.png", "low")))
    conversations = [
        [Message("system", (Text("Be brief."),))],
        [Message("assistant", (Text("Hi"),)), Message("user", (Text("Go on"),))],
        [
            Message("system", (Text("Be brief."),)),
            Message("developer", (Text("Use English."),)),
            Message("user", (Text("A"),), name="ann"),
            Message("user", (Text("B"), Text(""))),
            Message("assistant", (Text(""),)),
            Message("assistant", (Text("C "),)),
            picture,
        ],
        [Message("user", (Text("Finish:"),)), Message("assistant", (Text("One, two, "),))],
        [Message("user", (Text("Finish:"),)), Message("assistant", (Text("One, "), Text("\n")))],
        [Message("user", (Text(" "),)), Message("assistant", (Text("\n"),)), Message("user", (Text("\t"), Text("Go")))],
        [Message("user", (Image("data:image/jpg;base64,/9j/2Q=="),))],
    ]
    for messages in conversations:
        assert text_of_pieces(await line.pieces(request(*messages))) == "Hello there."


def _render_body(name: str, spec: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    form = FORMATS[name]
    adapter = form.adapter(ProviderSpec("p", form.name, **(spec or {})), "k")
    body: dict[str, Any] = json.loads(adapter.render(request(*changes.pop("messages", ()), **changes)))
    return body


ALL = Sampling(1.5, 0.9, 99, ("END",), 7, 0.1, 0.2, (("50256", -100),))


@pytest.mark.parametrize("parameter", sorted(SAMPLING))
def test_a_sampling_parameter_is_sent_unless_the_format_is_listed_as_one_without_it(
    form: Format, parameter: str
) -> None:
    sampling = replace(Sampling(max_tokens=64), **{parameter: getattr(ALL, parameter)})
    is_sent = _render_body(form.name, sampling=sampling) != _render_body(form.name)
    assert is_sent != (parameter in WIRE_FORMATS[form.name].lacks)


def test_the_size_of_a_request_is_about_what_the_format_is_said_to_need_around_its_messages(form: Format) -> None:
    conversation = json.dumps([message_to_json(message) for message in request().messages], separators=(",", ":"))
    envelope = len(json.dumps(_render_body(form.name), separators=(",", ":"))) - len(conversation) - len("model-a")
    assert envelope == pytest.approx(WIRE_FORMATS[form.name].envelope_bytes, abs=30)


def test_openai_renders_all_of_the_sampling_and_the_schema() -> None:
    body = _render_body("openai", sampling=ALL, form=Form(SCHEMA, strict=True), logprobs=40)
    assert body["max_completion_tokens"] == 99
    assert "max_tokens" not in body
    assert (body["temperature"], body["top_p"], body["stop"], body["seed"]) == (1.5, 0.9, ["END"], 7)
    assert (body["presence_penalty"], body["frequency_penalty"]) == (0.1, 0.2)
    assert body["logit_bias"] == {"50256": -100}
    assert (body["logprobs"], body["top_logprobs"]) == (True, 20)
    assert body["response_format"]["json_schema"] == {"name": "answer", "strict": True, "schema": SCHEMA}
    assert (body["stream"], body["stream_options"]) == (True, {"include_usage": True})


def test_openai_options_for_compatible_servers() -> None:
    spec = {"base_url": "http://127.0.0.1:9/v1", "structured": False}
    messages = (Message("developer", (Text("d"),)), Message("user", (Text("u"),)))
    body = _render_body("openai", spec, form=Form(SCHEMA, strict=True), messages=messages)
    assert body["max_tokens"] == 64
    assert "response_format" not in body
    assert body["messages"][0]["role"] == "system"
    spec |= {
        "options": {"stream_options": "omit", "max_tokens_field": "max_completion_tokens", "ignore": "temperature"}
    }
    body = _render_body("openai", spec, sampling=ALL)
    assert "stream_options" not in body
    assert "temperature" not in body
    assert body["max_completion_tokens"] == 99


def test_openai_itself_takes_no_form_but_objects() -> None:
    form = Form({"type": "array", "items": {"type": "integer"}})
    assert "response_format" not in _render_body("openai", form=form)
    assert "response_format" not in _render_body("openai", {"base_url": "https://x.openai.azure.com/v1"}, form=form)
    assert "response_format" in _render_body("openai", {"base_url": "http://127.0.0.1:9/v1"}, form=form)


def test_openai_names_and_images() -> None:
    messages = (Message("user", (Text("see"), Image("https://example.org/a.png", "low")), name="ann"),)
    (message,) = _render_body("openai", messages=messages)["messages"]
    assert message == {
        "role": "user",
        "content": [
            {"type": "text", "text": "see"},
            {"type": "image_url", "image_url": {"url": "https://example.org/a.png", "detail": "low"}},
        ],
        "name": "ann",
    }


def test_anthropic_renders_what_it_can_and_says_what_it_cannot() -> None:
    body = _render_body("anthropic", sampling=ALL, form=Form(SCHEMA, strict=True))
    assert (body["temperature"], body["max_tokens"], body["stop_sequences"]) == (1.0, 99, ["END"])
    assert body.keys().isdisjoint({"top_p", "seed", "presence_penalty", "frequency_penalty"})
    steps = body["output_config"]["format"]["schema"]["properties"]["steps"]
    assert steps == {"type": "array", "items": {"type": "integer"}}
    adapter: Any = FORMATS["anthropic"].adapter(ProviderSpec("p", "anthropic", options={"ignore": "top_p"}), "k")
    assert adapter.unsupported == {"seed", "presence_penalty", "frequency_penalty", "logit_bias", "top_p"}


@pytest.mark.parametrize(("stop", "sent"), [(("\n", "END"), ["END"]), (("\n", " "), None)])
async def test_anthropic_is_sent_no_stop_sequence_that_it_refuses(
    stub: ProviderStub, stop: tuple[str, ...], sent: list[str] | None
) -> None:
    async with connected(FORMATS["anthropic"], stub) as line:
        assert text_of_pieces(await line.pieces(request(sampling=Sampling(max_tokens=64, stop=stop)))) == "Hello there."
    assert stub.requests[0].json.get("stop_sequences") == sent


@pytest.mark.parametrize("seed", [2**31 - 1, 2**31, 2**53 - 1, -1])
async def test_gemini_takes_any_seed(stub: ProviderStub, seed: int) -> None:
    async with connected(FORMATS["gemini"], stub) as line:
        assert text_of_pieces(await line.pieces(request(sampling=Sampling(max_tokens=64, seed=seed)))) == "Hello there."
    assert stub.requests[0].json["generationConfig"]["seed"] == (seed if abs(seed) < 2**31 else seed % 2**31)


OPEN: dict[str, Any] = {"type": "object", "properties": {"a": {"type": "object"}}, "required": []}
OPTIONAL = {**OPEN, "properties": {"a": {"type": "integer", "minimum": 0}}, "additionalProperties": False}


EITHER = {**OPTIONAL, "properties": {"not": {"oneOf": [{"type": "integer"}, {"type": "string"}]}}}


@pytest.mark.parametrize("schema", [OPEN, {**OPEN, "additionalProperties": False}, OPTIONAL, EITHER])
async def test_schemas_that_no_strict_mode_takes_are_taken(line: Line, schema: dict[str, Any]) -> None:
    strict_tool = Toolbox((Tool("add", "Adds.", schema, strict=True),))
    for more in ({"form": Form(schema)}, {"toolbox": strict_tool}):
        assert text_of_pieces(await line.pieces(request(**more))) == "Hello there."


def test_anthropics_decoders_are_constrained_where_objects_are_closed() -> None:
    closed = {**OPTIONAL, "properties": {"a": {"type": "integer"}}}
    strict_tool = Toolbox((Tool("add", "Adds.", OPTIONAL, strict=True),))
    body = _render_body("anthropic", form=Form(OPTIONAL), toolbox=strict_tool)
    assert body["output_config"]["format"]["schema"] == closed
    assert (body["tools"][0]["strict"], body["tools"][0]["input_schema"]) == (True, closed)
    declared = _render_body("anthropic", {"options": {"open_schemas": "true"}}, form=Form(OPEN))
    assert declared["output_config"]["format"]["schema"] == OPEN


def test_anthropic_blocks() -> None:
    messages = (
        Message("system", (Text("S"),)),
        Message("assistant", (Text("hello"),)),
        Message("user", (Image(PIXEL), Image("https://example.org/a.png"))),
        Message("developer", (Text("D"),)),
    )
    body = _render_body("anthropic", messages=messages)
    assert [block["text"] for block in body["system"]] == ["S", "D"]
    assert [turn["role"] for turn in body["messages"]] == ["user", "assistant", "user"]
    assert [block["source"] for block in body["messages"][2]["content"]] == [
        {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="},
        {"type": "url", "url": "https://example.org/a.png"},
    ]


def test_gemini_parts_and_configuration() -> None:
    messages = (
        Message("system", (Text("S"),)),
        Message("user", (Text("U"), Image(PIXEL), Image("https://example.org/a.jpg?x=1"))),
        Message("assistant", (Text("A"),)),
        Message("user", (Text("V"),)),
    )
    body = _render_body("gemini", messages=messages, sampling=ALL, form=Form(SCHEMA, strict=True))
    assert body["systemInstruction"] == {"parts": [{"text": "S"}]}
    assert [turn["role"] for turn in body["contents"]] == ["user", "model", "user"]
    assert body["contents"][0]["parts"][1:] == [
        {"inlineData": {"mimeType": "image/png", "data": "iVBORw0KGgo="}},
        {"fileData": {"mimeType": "image/jpeg", "fileUri": "https://example.org/a.jpg?x=1"}},
    ]
    config = body["generationConfig"]
    assert (config["maxOutputTokens"], config["seed"], config["stopSequences"]) == (99, 7, ["END"])
    assert (config["responseMimeType"], config["responseJsonSchema"]) == ("application/json", SCHEMA)


def test_what_the_conductor_is_told_passes_the_adapters(form: Format) -> None:
    form.adapter(ProviderSpec("p", form.name, options={"positional": "true", "logprobs": "true"}), "k")


@pytest.mark.parametrize(
    "changes",
    [
        {"options": {"no_such_option": "1"}},
        {"options": {"ignore": "temprature"}},
        {"options": {"ignore": "max_tokens"}},
        {"base_url": "ftp://example.org"},
        {"base_url": "https://user:secret@example.org"},
        {"base_url": "https://example.org/v1?key=1"},
    ],
)
def test_an_endpoint_that_cannot_work_is_refused_at_the_start(form: Format, changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigInvalid):
        form.adapter(ProviderSpec("p", form.name, **changes), "k")


def test_a_key_that_no_header_can_carry_is_refused_and_not_shown(form: Format) -> None:
    with pytest.raises(ConfigInvalid) as caught:
        form.adapter(ProviderSpec("p", form.name), "sk-secret\r\nx: y")
    assert "secret" not in str(caught.value)


# --- properties of the readers

TEXTS = ("Hé", "l\u2028lo", " 🌍", "\\n\n", "")


async def _record_stream(form: Format) -> bytes:
    """The bytes of a whole stream, as the stub sends them."""
    async with ProviderStub() as stub, connected(form, stub) as line:
        adapter: Any = line.adapter
        stub.script("model-a", Reply(chunks=TEXTS, comments=True, reasoning=("hm",)))
        endpoint = adapter._endpoint
        response = await endpoint.post(endpoint.url(form.path), adapter.render(request()), 5, "w")
        raw: bytes = await response.aread()
    return raw


RECORDED: dict[str, bytes] = {}


@pytest.fixture
def recorded_stream(form: Format) -> bytes:
    if form.name not in RECORDED:
        RECORDED[form.name] = asyncio.run(_record_stream(form))
    return RECORDED[form.name]


def _read(reading: ReplyReader, chunks: list[bytes]) -> list[Piece]:
    events, pieces = EventReader("w"), list[Piece]()
    for chunk in chunks:
        for event in events.feed(chunk):
            reading.event(event, pieces)
    return [*pieces, reading.end()]


def _cut(raw: bytes, cuts: list[int]) -> list[bytes]:
    places = [0, *sorted(cut % (len(raw) + 1) for cut in cuts), len(raw)]
    return [raw[a:b] for a, b in pairwise(places)]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(cuts=st.lists(st.integers(0, 1 << 20), max_size=30))
@pytest.mark.long
def test_any_split_of_a_stream_gives_the_same_pieces(form: Format, recorded_stream: bytes, cuts: list[int]) -> None:
    whole = _read(form.reading("w"), [recorded_stream])
    assert _read(form.reading("w"), _cut(recorded_stream, cuts)) == whole
    assert "".join(piece.text for piece in whole if isinstance(piece, TextDelta)) == "".join(TEXTS)


@pytest.mark.long
def test_a_stream_cut_at_any_byte_is_never_a_success_before_its_marker(form: Format, recorded_stream: bytes) -> None:
    whole = text_of_pieces(_read(form.reading("w"), [recorded_stream]))
    for end in range(len(recorded_stream)):
        try:
            pieces = _read(form.reading("w"), [recorded_stream[:end]])
        except WorkerError:
            continue
        assert text_of_pieces(pieces) == whole


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inside: st.lists(inside, max_size=3) | st.dictionaries(st.text(max_size=5), inside, max_size=3),
    max_leaves=8,
)
NAMES = st.sampled_from(
    (
        "choices",
        "index",
        "delta",
        "message",
        "content",
        "refusal",
        "logprobs",
        "finish_reason",
        "usage",
        "error",
        "object",
        "model",
        "token",
        "logprob",
        "top_logprobs",
        "type",
        "text",
        "content_block",
        "stop_reason",
        "candidates",
        "parts",
        "thought",
        "finishReason",
        "usageMetadata",
        "promptFeedback",
        "blockReason",
        "prompt_tokens",
        "completion_tokens",
        "total_tokens",
        "input_tokens",
        "output_tokens",
        "code",
        "status",
        "details",
        "reason",
        "retryDelay",
        "prompt_tokens_details",
        "completion_tokens_details",
        "output_tokens_details",
        "response",
        "item",
        "output",
        "output_index",
        "call_id",
        "name",
        "arguments",
        "incomplete_details",
    )
)
KINDS = st.sampled_from(
    (
        "message_start",
        "message_delta",
        "message_stop",
        "content_block_start",
        "content_block_delta",
        "text",
        "text_delta",
        "response.created",
        "response.completed",
        "response.failed",
        "response.output_item.added",
        "response.output_item.done",
        "response.output_text.delta",
        "response.function_call_arguments.delta",
        "function_call",
        "reasoning",
        "completed",
        "error",
    )
)
SHAPED = st.recursive(
    JSON | KINDS,
    lambda inside: st.lists(inside, max_size=2) | st.dictionaries(NAMES, inside, max_size=4),
    max_leaves=12,
)


def _assert_contained(reading: ReplyReader, data: bytes) -> None:
    """Whatever comes, there are pieces that can be encoded, or a WorkerError; nothing else."""
    pieces: list[Piece] = []
    with suppress(WorkerError):
        reading.event(data, pieces)
        pieces.append(reading.end())
    for piece in pieces:
        if isinstance(piece, TextDelta):
            piece.text.encode()


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(document=st.dictionaries(NAMES, SHAPED, max_size=5))
@pytest.mark.long
def test_any_document_is_contained(form: Format, document: dict[str, Any]) -> None:
    data = json.dumps(document).encode()
    _assert_contained(form.reading("w"), data)
    with suppress(WorkerError):
        form.reading("w").read_whole(data, [])


@settings(max_examples=200, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(garbage=st.binary(max_size=200) | st.text(max_size=60).map(lambda text: f"data: {text}\n\n".encode()))
@pytest.mark.long
def test_any_bytes_are_contained(form: Format, garbage: bytes) -> None:
    with suppress(WorkerError):
        _read(form.reading("w"), [garbage])
    _assert_contained(form.reading("w"), garbage)
