"""Tools through the provider seam: each wire format takes the same conversations and gives the same calls."""

import json
from collections.abc import AsyncIterator
from typing import Any

import pytest

from app.core.message.chat import (
    Image,
    Keepsake,
    Message,
    Piece,
    Sampling,
    Text,
    TextDelta,
    Tool,
    Toolbox,
    ToolCall,
    ToolCallCollector,
)
from app.core.pool.catalog import ProviderSpec, Worker
from app.errors import WorkerMalformed
from app.providers.adapters.openai import Completion
from app.providers.http import ReplyReader
from tests.conformance.wire_formats import FORMATS, Line, connected, ending, request, text_of_pieces
from tests.stubs import ProviderStub, Reply, Trickle
from tests.stubs import ToolCall as Calls
from tests.stubs import Usage as Billed

NUMBERS = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": False}
ADD, LOOK = Tool("add", "Adds.", NUMBERS), Tool("look", "Looks.")
BOX = Toolbox((ADD, LOOK))
ASK = Message("user", (Text("Add, then look."),))
PIXEL = "data:image/png;base64,iVBORw0KGgo="
TWO = (Calls("add", '{"a":1,"b":"é\\"}"}', "c-1"), Calls("look", "", "c-2"))


def gather_calls(pieces: list[Piece]) -> tuple[ToolCall, ...]:
    """The calls of a reply."""
    gathering = ToolCallCollector()
    for piece in pieces:
        if hasattr(piece, "arguments"):
            gathering.take(piece)
    return gathering.calls


def keepsake_of(pieces: list[Piece]) -> dict[str, Any] | None:
    """The keepsake of a reply."""
    keepsakes = [piece for piece in pieces if isinstance(piece, Keepsake)]
    assert len(keepsakes) <= 1
    return dict(keepsakes[0].data) if keepsakes else None


def past(*results: Message, keepsake: dict[str, Any] | None = None, words: str = "I will.") -> tuple[Message, ...]:
    """A conversation in which an assistant called both tools, with these results or the usual ones."""
    calls = (ToolCall("c-1", "add", '{"a":1}'), ToolCall("c-2", "look", "{}"))
    usual = (Message("tool", (Text("1"),), call_id="c-1"), Message("tool", (), call_id="c-2"))
    spoken = (Text(words),) if words else ()
    return (ASK, Message("assistant", spoken, calls=calls, keepsake=keepsake), *(results or usual))


# --- what comes


@pytest.mark.parametrize("live", [True, False])
@pytest.mark.parametrize("words", [("Let me ", "see."), ()])
async def test_calls_come_whole_and_in_order_beside_the_words(line: Line, words: tuple[str, ...], live: bool) -> None:
    line.stub.script("model-a", Reply(chunks=words, tool_calls=TWO, finish="tool", usage=Billed(input=9, output=5)))
    pieces = await line.pieces(request(ASK, toolbox=BOX, live=live))
    assert text_of_pieces(pieces) == "".join(words)
    add, look = gather_calls(pieces)
    assert (add.name, json.loads(add.arguments)) == ("add", {"a": 1, "b": 'é"}'})
    assert (look.name, look.arguments) == ("look", "{}")
    assert [add.id, look.id] == ["c-1", "c-2"]
    assert ending(pieces).finish == "tool_calls"
    assert ending(pieces).usage is not None


async def test_arguments_stream_in_pieces_however_the_network_cuts_them(line: Line) -> None:
    line.stub.script("model-a", Reply(chunks=("x",), tool_calls=TWO, finish="tool", trickle=Trickle(size=7)))
    pieces = await line.pieces(request(ASK, toolbox=BOX))
    assert [json.loads(call.arguments) for call in gather_calls(pieces)] == [{"a": 1, "b": 'é"}'}, {}]
    if line.format.name != "gemini":
        assert sum(getattr(piece, "index", None) == 0 for piece in pieces) > 2


async def test_a_finish_reason_goes_by_what_came(line: Line) -> None:
    """OpenAI says `stop` after a call that was demanded; a `tool_calls` without any call is an answer."""
    line.stub.script("model-a", Reply(chunks=(), tool_calls=TWO, finish="stop"), Reply(finish="tool"))
    assert ending(await line.pieces(request(ASK, toolbox=BOX))).finish == "tool_calls"
    assert ending(await line.pieces(request(ASK, toolbox=BOX))).finish == "stop"


async def test_a_turn_that_was_cut_off_stays_one(line: Line) -> None:
    line.stub.script("model-a", Reply(chunks=(), tool_calls=TWO, finish="length"))
    assert ending(await line.pieces(request(ASK, toolbox=BOX))).finish == "length"


A, B = ("a", "add", "{}"), ("b", "look", "{}")


@pytest.mark.parametrize(
    ("deltas", "calls"),
    [
        ([(0, *A), (0, *B)], [A, B]),  # Google's compatible endpoint: every call whole, all of them number 0
        ([(None, "a", "add", "{"), (None, "", "", "}"), (None, *B)], [A, B]),
        ([(0, "", "", '{"a"'), (0, "a", "", ":1"), (0, "", "add", "}")], [("a", "add", '{"a":1}')]),
        ([(0, "a", "add", "{"), (0, "a", "add", "}")], [A]),
        ([(0, "a", "add", "{"), (0, "other", "", "}")], [A]),
        ([(1, "a", "add", "{"), (7, *B), (1, "", "", "}")], [A, B]),
        ([(0, "", "add", {"a": 1})], [("", "add", '{"a":1}')]),
    ],
)
def test_what_compatible_servers_make_of_the_stream(deltas: list[Any], calls: list[tuple[str, str, str]]) -> None:
    reading, pieces = Completion("w"), []
    for index, id_, name, text in deltas:
        call = {"index": index, "id": id_ or None, "function": {"name": name or None, "arguments": text}}
        _event(reading, {"tool_calls": [call]}, pieces)
    _event(reading, {}, pieces, "tool_calls")
    assert [(call.id, call.name, call.arguments) for call in gather_calls(pieces)] == calls
    assert reading.end().finish == "tool_calls"


def test_a_call_without_a_name_is_malformed() -> None:
    reading, pieces = Completion("w"), []
    _event(reading, {"tool_calls": [{"index": 0, "id": "a", "function": {"arguments": "{}"}}]}, pieces, "tool_calls")
    with pytest.raises(WorkerMalformed):
        reading.end()


def _event(reading: ReplyReader, delta: dict[str, Any], pieces: list[Piece], finish: str | None = None) -> None:
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    reading.event(json.dumps({"choices": [choice]}).encode(), pieces)


# --- what is sent


@pytest.mark.parametrize("model", ["model-a", "gemini-2.5-flash", "gemini-3-pro"])
@pytest.mark.parametrize("words", ["I will.", ""])
async def test_a_conversation_with_calls_and_results_is_taken(line: Line, words: str, model: str) -> None:
    """The stub refuses what the real APIs refuse: results apart from their calls, empty text, missing signatures."""
    picture = Message("tool", (Text("See:"), Image(PIXEL)), call_id="c-1")
    wrong = Message("tool", (Text("no such thing"),), call_id="c-2", failed=True)
    for messages in (past(words=words), past(picture, wrong, words=words)):
        for tail in ((), (Message("user", (Text("Go on."),)),)):
            for box in (BOX, Toolbox()):
                request_with_tools = request(*messages, *tail, toolbox=box, model=model)
                assert text_of_pieces(await line.pieces(request_with_tools)) == "Hello there."


@pytest.mark.parametrize("text", ["", "\n"])
async def test_a_failure_without_words_is_taken(line: Line, text: str) -> None:
    failure = Message("tool", (Text(text),), call_id="x", failed=True)
    called = Message("assistant", (), calls=(ToolCall("x", "look", "{}"),))
    answer = await line.pieces(request(ASK, called, failure, toolbox=Toolbox((LOOK,))))
    assert text_of_pieces(answer) == "Hello there."


@pytest.mark.parametrize(
    "id_", ["x", "functions.add:0", "call_" + "9" * 60, "toolu_01A09q90qw90lq917835lq9", "chatcmpl-tool-" + "f" * 32]
)
async def test_ids_from_elsewhere_are_taken(line: Line, id_: str) -> None:
    called = Message("assistant", (), calls=(ToolCall(id_, "9lives", "not json"),))
    result = Message("tool", (Text("1"),), call_id=id_)
    box = Toolbox((Tool("9lives"),))
    assert text_of_pieces(await line.pieces(request(ASK, called, result, toolbox=box))) == "Hello there."


async def test_ids_may_come_again_in_a_later_turn_or_differ_in_a_sign(line: Line) -> None:
    """As those of servers that count the calls of each turn. Every result stays with its call."""
    messages = [ASK]
    for turn in ("1", "2"):
        calls = tuple(ToolCall(id_, "look", json.dumps({"q": turn + id_})) for id_ in ("call.0", "call_0"))
        results = [Message("tool", (Text(f"of {turn}{call.id}"),), call_id=call.id) for call in calls]
        messages += [Message("assistant", (), calls=calls), *results]
    assert text_of_pieces(await line.pieces(request(*messages, toolbox=Toolbox((LOOK,))))) == "Hello there."
    if line.format.name == "anthropic":
        blocks = [block for turn in line.stub.requests[0].json["messages"][1:] for block in turn["content"]]
        asked = {block["id"]: block["input"]["q"] for block in blocks if block["type"] == "tool_use"}
        told = {block["tool_use_id"]: block["content"][0]["text"] for block in blocks if block["type"] == "tool_result"}
        assert told == {id_: f"of {question}" for id_, question in asked.items()}


@pytest.mark.parametrize(
    "box",
    [
        BOX,
        Toolbox((ADD, LOOK), "none"),
        Toolbox((ADD, LOOK), "none", parallel=False),
        Toolbox((ADD, LOOK), "required"),
        Toolbox((ADD, LOOK), "named", "look", parallel=False),
        Toolbox((Tool("add", "Adds.", NUMBERS, strict=True),)),
        Toolbox(
            (Tool("0start", parameters={"properties": {"a": {"type": "string", "minLength": 2}}}),), "named", "0start"
        ),
    ],
)
async def test_every_choice_is_taken(line: Line, box: Toolbox) -> None:
    assert text_of_pieces(await line.pieces(request(ASK, toolbox=box))) == "Hello there."


CLOSED: dict[str, Any] = {"type": "object", "additionalProperties": False}
EITHER = {"type": "object", "properties": {"a": {}, "b": {}}, "anyOf": [{"required": ["a"]}, {"required": ["b"]}]}
BRANCHES = {"type": "object", "oneOf": [{"properties": {"a": {"type": "string"}}}, {"properties": {"b": {}}}]}


@pytest.mark.parametrize("schema", [EITHER, BRANCHES, {"properties": {"a": {}, "b": {}}}])
async def test_schemas_that_combine_others_at_the_root_are_taken(line: Line, schema: dict[str, Any]) -> None:
    """As those of MCP servers. To those who do not take them, all of the arguments are described."""
    await line.pieces(request(ASK, toolbox=Toolbox((Tool("add", "Adds.", schema), LOOK))))
    if line.format.name in ("anthropic", "responses"):
        tool = line.stub.requests[0].json["tools"][0]
        sent = tool.get("input_schema") or tool["parameters"]
        assert (set(sent["properties"]), "anyOf" in sent, "oneOf" in sent) == ({"a", "b"}, False, False)


@pytest.mark.parametrize(
    ("model", "continues"),
    [
        *((name, True) for name in ("claude-3-7-sonnet", "claude-opus-4-5", "claude-sonnet-4@20250514", "glm-5")),
        *((name, False) for name in ("claude-opus-4-6", "anthropic.claude-sonnet-4-6-v1", "claude-opus-5")),
    ],
)
async def test_a_conversation_may_end_with_the_assistant(model: str, continues: bool) -> None:
    """Claude continues its words up to 4.5; the API refuses them of later models, which are asked to go on."""
    async with ProviderStub() as stub, connected(FORMATS["anthropic"], stub) as line:
        stub.always(model, Reply())
        said = Message("assistant", (Text("One, two, "),))
        assert text_of_pieces(await line.pieces(request(ASK, said, model=model))) == "Hello there."
    last = stub.requests[0].json["messages"][-1]
    words = "One, two," if continues else "Continue."
    assert (last["role"], last["content"]) == ("assistant" if continues else "user", [{"type": "text", "text": words}])


@pytest.mark.parametrize(("host", "between"), [("api.mistral.ai", ["assistant"]), ("api.openai.com", [])])
def test_mistral_is_shown_an_answer_between_results_and_words(host: str, between: list[str]) -> None:
    """It takes no message of the user or the system right behind results."""
    called = Message("assistant", (), calls=(ToolCall("x", "look"),))
    result = Message("tool", (Text("1"), Image(PIXEL)), call_id="x")
    spec = {"base_url": f"https://{host}/v1"}
    for more in ([], [Message("user", (Text("Go on."),))], [called, result], [Message("assistant", (Text("So."),))]):
        messages = render_body("openai", ASK, called, result, *more, spec=spec)["messages"]
        roles = ["user", "assistant", "tool", *between, "user"]
        assert [message["role"] for message in messages][: len(roles)] == roles
        assert all(message["content"] for message in messages if not message.get("tool_calls"))


@pytest.mark.parametrize("base_url", ["", "https://x.openai.azure.com/v1", "http://127.0.0.1:9/v1"])
def test_openai_itself_takes_no_root_that_combines_others(base_url: str) -> None:
    box = Toolbox((Tool("add", "", BRANCHES, strict=True), ADD))
    first, second = render_body("openai", toolbox=box, spec={"base_url": base_url})["tools"]
    plain = {"type": "object", "properties": {"a": {"type": "string"}, "b": {}}}
    assert first["function"]["parameters"] == (BRANCHES if "127.0.0.1" in base_url else plain)
    assert second["function"]["parameters"] == NUMBERS


NULLABLE = {"a": {"type": ["string", "null"]}, "b": {"anyOf": [{"type": "string"}, {"type": "null"}]}}
FIVE = {name: {"type": "string"} for name in "abcde"}


@pytest.mark.parametrize(
    ("schema", "number", "strict"),
    [
        ({**CLOSED, "properties": {}, "required": []}, 20, True),
        ({**CLOSED, "properties": {}, "required": []}, 21, False),
        ({**CLOSED, "properties": NULLABLE, "required": ["a", "b"]}, 8, True),
        ({**CLOSED, "properties": NULLABLE, "required": ["a", "b"]}, 9, False),
        ({**CLOSED, "properties": FIVE}, 4, True),
        ({**CLOSED, "properties": FIVE}, 5, False),
    ],
)
async def test_anthropics_decoders_take_no_more_strict_tools_than_they_can(
    schema: dict[str, Any], number: int, strict: bool
) -> None:
    tools = tuple(Tool(f"tool{n}", "", schema, strict=True) for n in range(number))
    async with ProviderStub() as stub, connected(FORMATS["anthropic"], stub) as line:
        await line.pieces(request(ASK, toolbox=Toolbox(tools)))
    assert {"strict" in tool for tool in stub.requests[0].json["tools"]} == {strict}


async def test_a_name_that_gemini_does_not_take_comes_back_as_it_was() -> None:
    async with ProviderStub() as stub, connected(FORMATS["gemini"], stub) as line:
        stub.script("model-a", Reply(chunks=(), tool_calls=(Calls("_0start"),), finish="tool"))
        (call,) = gather_calls(await line.pieces(request(ASK, toolbox=Toolbox((Tool("0start"),)))))
    assert call.name == "0start"


def render_body(form: str, *messages: Message, spec: dict[str, Any] | None = None, **changes: Any) -> dict[str, Any]:
    """The body that an adapter would send."""
    adapter = FORMATS[form].adapter(ProviderSpec("p", FORMATS[form].name, **(spec or {})), "k")
    body: dict[str, Any] = json.loads(adapter.render(request(*(messages or (ASK,)), **changes)))
    return body


STRICT = Toolbox((Tool("add", "Adds.", {**NUMBERS, "minProperties": 1}, strict=True),), "named", "add", parallel=False)


def test_openai_writes_definitions_and_choices() -> None:
    body = render_body("openai", toolbox=STRICT)
    function = {"name": "add", "description": "Adds.", "parameters": {**NUMBERS, "minProperties": 1}, "strict": True}
    assert body["tools"] == [{"type": "function", "function": function}]
    assert body["tool_choice"] == {"type": "function", "function": {"name": "add"}}
    assert body["parallel_tool_calls"] is False
    assert "strict" not in render_body("openai", toolbox=STRICT, spec={"structured": False})["tools"][0]["function"]
    assert render_body("openai", toolbox=BOX).keys().isdisjoint({"tool_choice", "parallel_tool_calls"})
    assert render_body("openai", toolbox=Toolbox((LOOK,), "required"))["tool_choice"] == "required"


def test_anthropic_writes_definitions_and_choices() -> None:
    body = render_body("anthropic", toolbox=STRICT)
    assert body["tools"] == [{"name": "add", "description": "Adds.", "input_schema": NUMBERS, "strict": True}]
    assert body["tool_choice"] == {"type": "tool", "name": "add", "disable_parallel_tool_use": True}
    loose = render_body("anthropic", toolbox=STRICT, spec={"structured": False})["tools"][0]
    assert (loose["input_schema"]["minProperties"], "strict" in loose) == (1, False)
    assert render_body("anthropic", toolbox=Toolbox((LOOK,), "required"))["tool_choice"] == {"type": "any"}
    assert render_body("anthropic", *past())["tool_choice"] == {"type": "none"}
    assert [tool["name"] for tool in render_body("anthropic", *past())["tools"]] == ["add", "look"]


def test_anthropics_cache_is_asked_for_where_tools_are_offered_and_the_provider_says_so() -> None:
    marked, system = {"cache_control": {"type": "ephemeral"}}, Message("system", (Text("Be brief."),))
    said = render_body("anthropic", system, ASK, toolbox=BOX, spec={"options": {"cache": "tools"}})
    assert said["system"] == [{"type": "text", "text": "Be brief."} | marked]
    assert said["messages"][-1]["content"][-1] == {"type": "text", "text": ASK.text} | marked
    results = render_body("anthropic", *past(), toolbox=BOX, spec={"options": {"cache": "tools"}})["messages"]
    assert ["cache_control" in block for message in results for block in message["content"]][-2:] == [False, True]
    for spec, changes in (({"options": {"cache": "tools"}}, {}), ({}, {"toolbox": BOX})):
        assert "cache_control" not in str(render_body("anthropic", system, ASK, spec=spec, **changes))


def test_gemini_writes_definitions_and_choices() -> None:
    body = render_body("gemini", toolbox=STRICT)
    (declared,) = body["tools"][0]["functionDeclarations"]
    assert declared == {"name": "add", "description": "Adds.", "parametersJsonSchema": {**NUMBERS, "minProperties": 1}}
    assert body["toolConfig"]["functionCallingConfig"] == {"mode": "ANY", "allowedFunctionNames": ["add"]}
    assert "toolConfig" not in render_body("gemini", toolbox=BOX)
    assert render_body("gemini", toolbox=Toolbox((LOOK,), "none"))["toolConfig"]["functionCallingConfig"] == {
        "mode": "NONE"
    }


def test_results_stand_where_each_format_wants_them() -> None:
    failed = Message("tool", (Text("boom"), Image(PIXEL)), call_id="c-2", failed=True)
    talk = past(Message("tool", (Text("1"),), call_id="c-1"), failed)
    *_, called, first_result, second_result, picture = render_body("openai", *talk)["messages"]
    assert [call["id"] for call in called["tool_calls"]] == ["c-1", "c-2"]
    assert (first_result["tool_call_id"], first_result["content"]) == ("c-1", "1")
    assert (second_result["tool_call_id"], second_result["content"]) == ("c-2", "boom")
    assert [part["type"] for part in picture["content"]] == ["text", "image_url"]
    results = render_body("anthropic", *talk)["messages"][-1]["content"]
    assert [(block["tool_use_id"], block.get("is_error")) for block in results] == [("c-1", None), ("c-2", True)]
    assert [block["type"] for block in results[1]["content"]] == ["text", "image"]
    parts = render_body("gemini", *talk)["contents"][-1]["parts"]
    assert parts[0]["functionResponse"] == {"name": "add", "response": {"output": "1"}}
    assert parts[1]["functionResponse"] == {"name": "look", "response": {"error": "boom"}}
    assert "inlineData" in parts[2]


def test_a_result_of_no_known_call_is_plain_words() -> None:
    stray = Message("tool", (Text("found"),), call_id="lost")
    assert render_body("anthropic", ASK, stray)["messages"][0]["content"][1] == {"type": "text", "text": "found"}
    assert render_body("gemini", ASK, stray)["contents"][0]["parts"][1] == {"text": "found"}
    assert render_body("openai", ASK, Message("tool", (Text("found"),)))["messages"][1]["role"] == "user"


def test_mistral_gets_ids_of_nine_letters() -> None:
    spec = {"base_url": "https://api.mistral.ai/v1"}
    *_, called, first_result, second_result = render_body("openai", *past(), spec=spec)["messages"]
    ids = [call["id"] for call in called["tool_calls"]]
    assert ids == [first_result["tool_call_id"], second_result["tool_call_id"]]
    assert all(len(id_) == 9 and id_.isalnum() for id_ in ids)
    assert len(set(ids)) == 2
    called = Message("assistant", (), calls=(ToolCall("abcdefgh9", "add"),))
    assert render_body("openai", ASK, called, spec=spec)["messages"][1]["tool_calls"][0]["id"] == "abcdefgh9"


# --- what is given back


async def _first_turn(line: Line, model: str = "model-a", **reply: Any) -> dict[str, Any] | None:
    act = Reply(chunks=(), tool_calls=TWO, finish="tool", **reply)
    line.stub.script(model, act, act)
    live = keepsake_of(await line.pieces(request(ASK, toolbox=BOX, model=model)))
    assert keepsake_of(await line.pieces(request(ASK, toolbox=BOX, model=model, live=False))) == live
    return live


@pytest.fixture
async def stub() -> AsyncIterator[ProviderStub]:
    async with ProviderStub() as stub:
        yield stub


async def test_signed_thinking_goes_back_to_anthropic_before_the_calls(stub: ProviderStub) -> None:
    async with connected(FORMATS["anthropic"], stub) as line:
        keepsake = await _first_turn(line, reasoning=("Hm, ", "add."))
        await line.pieces(request(*past(keepsake=keepsake), toolbox=BOX))
        thinking, words, *calls = stub.requests[-1].json["messages"][1]["content"]
        assert thinking == {"type": "thinking", "thinking": "Hm, add.", "signature": "c3R1Yg=="}
        assert (words["type"], [call["type"] for call in calls]) == ("text", ["tool_use", "tool_use"])
        assert await _first_turn(line) is None


async def test_redacted_thinking_goes_back_as_it_came() -> None:
    reading, pieces = FORMATS["anthropic"].reading("w"), []
    block = {"type": "redacted_thinking", "data": "sealed"}
    used = {"type": "tool_use", "id": "t", "name": "add", "input": {"a": 1}}
    whole = {"content": [block, used], "stop_reason": "tool_use", "usage": {}}
    reading.read_whole(json.dumps(whole).encode(), pieces)
    assert reading.keepsake() == {"blocks": [block]}


def test_anthropics_own_tools_are_no_calls() -> None:
    """The arguments of a search that the server carries out by itself come in pieces, too."""
    reading, pieces = FORMATS["anthropic"].reading("w"), list[Piece]()
    blocks = [
        {"type": "server_tool_use", "id": "s", "name": "web_search", "input": {}},
        {"type": "tool_use", "id": "t", "name": "add", "input": {}},
    ]
    for index, block in enumerate(blocks):
        delta = {"type": "input_json_delta", "partial_json": f'{{"a":{index}}}'}
        for event in (
            {"type": "content_block_start", "content_block": block},
            {"type": "content_block_delta", "delta": delta},
        ):
            reading.event(json.dumps({"index": index, **event}).encode(), pieces)
    for event in ({"type": "message_delta", "delta": {"stop_reason": "tool_use"}}, {"type": "message_stop"}):
        reading.event(json.dumps(event).encode(), pieces)
    assert [(call.name, call.arguments) for call in gather_calls(pieces)] == [("add", '{"a":1}')]
    assert reading.end().finish == "tool_calls"


async def test_signatures_and_ids_go_back_to_gemini_with_their_calls(stub: ProviderStub) -> None:
    async with connected(FORMATS["gemini"], stub) as line:
        keepsake = await _first_turn(line, model="gemini-3-pro")
        assert keepsake == {"signatures": ["c3R1Yg=="] * 2, "ids": ["c-1", "c-2"]}
        await line.pieces(request(*past(keepsake=keepsake), toolbox=BOX, model="gemini-3-pro"))
        _, model, user = stub.requests[-1].json["contents"]
        assert [part.get("thoughtSignature") for part in model["parts"]] == [None, "c3R1Yg==", "c3R1Yg=="]
        assert [part["functionCall"]["id"] for part in model["parts"][1:]] == ["c-1", "c-2"]
        assert [part["functionResponse"]["id"] for part in user["parts"]] == ["c-1", "c-2"]


async def test_calls_of_another_model_pass_geminis_signature_check(stub: ProviderStub) -> None:
    async with connected(FORMATS["gemini"], stub) as line:
        await line.pieces(request(*past(), toolbox=BOX, model="gemini-3-pro"))
        first, second = stub.requests[-1].json["contents"][1]["parts"][1:]
        assert first["thoughtSignature"] == "skip_thought_signature_validator"
        assert "thoughtSignature" not in second
        await line.pieces(request(*past(), toolbox=BOX, model="gemini-2.5-pro"))
        assert b"thoughtSignature" not in stub.requests[-1].body


async def test_reasoning_goes_back_to_the_server_that_wants_it(stub: ProviderStub) -> None:
    """DeepSeek refuses the next turn without it, vLLM's templates use it."""
    form = FORMATS["openai"]
    for options, expected in (({}, "Hm."), ({"reasoning": "drop"}, None)):
        async with connected(form, stub, base_url=stub.vllm_url, options=options) as line:
            keepsake = await _first_turn(line, reasoning=("Hm", "."))
            await line.pieces(request(*past(keepsake=keepsake), toolbox=BOX))
        assert stub.requests[-1].json["messages"][1].get("reasoning_content") == expected


def test_reasoning_details_are_put_together_and_signatures_stay_beside_their_calls() -> None:
    reading, pieces = Completion("w"), []
    text = {"type": "reasoning.text", "index": 0}
    sealed = {"type": "reasoning.encrypted", "index": 0, "data": "x"}
    for detail in ({**text, "text": "Hm"}, {**text, "text": "."}, {**text, "signature": "s"}, sealed, sealed):
        _event(reading, {"reasoning": "Hm.", "reasoning_details": [detail]}, pieces)
    google = {"google": {"thought_signature": "sig"}}
    calls = [
        {"index": 0, "id": "a", "function": {"name": "add", "arguments": "{}"}},
        {"index": 1, "id": "b", "function": {"name": "look", "arguments": "{}"}, "extra_content": google},
    ]
    _event(reading, {"tool_calls": calls}, pieces, "tool_calls")
    details = [{**text, "text": "Hm.", "signature": "s"}, sealed, sealed]
    assert reading.keepsake() == {"message": {"reasoning_details": details}, "extra_content": [None, google]}
    message = render_body("openai", *past(keepsake=reading.keepsake()))["messages"][1]
    assert message["reasoning_details"] == details
    assert [call.get("extra_content") for call in message["tool_calls"]] == [None, google]


async def test_without_calls_nothing_is_kept(line: Line) -> None:
    line.stub.script("model-a", Reply(reasoning=("hm",)))
    pieces = await line.pieces(request(ASK, toolbox=BOX, sampling=Sampling(max_tokens=9)))
    assert keepsake_of(pieces) is None
    assert any(isinstance(piece, TextDelta) for piece in pieces)
    assert Worker("w", "stub", "m").card.tools is False
