"""A task and what comes back from a model, free of any provider's or client's wire format.

Adapters in `gateway/` and `providers/` translate to and from these records; everything between them believes the types.

The id of a tool call, as callers know it, is `call_bt` and 33 letters and digits: the run's id in base 62, then 71
random bits. It leads back to its run without an index, and stays within the 40 characters that OpenAI's own clients and
servers allow. It proves nothing by itself: the run's journal says whether it was issued, and to which caller.
"""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Final, Literal, NoReturn

import orjson
from msgspec import Struct
from msgspec.structs import asdict

Role = Literal["system", "developer", "user", "assistant", "tool"]
Finish = Literal["stop", "length", "content_filter", "tool_calls"]


class Text(Struct, frozen=True):
    """A piece of text."""

    text: str


class Image(Struct, frozen=True):
    """An image by `data:` URL or by a reference that the provider fetches; Baton never fetches it."""

    url: str
    detail: str | None = None


class Document(Struct, frozen=True):
    """A PDF as a base64 `data:` URL; `name` is its title or file name, or empty. Documents of plain text are `Text`."""

    url: str
    name: str = ""


Part = Text | Image | Document


class ToolCall(Struct, frozen=True):
    """A model's wish to have one of the caller's functions called. `arguments` is JSON text as the model wrote it."""

    id: str
    name: str
    arguments: str = "{}"


class Message(Struct, frozen=True):
    """One turn of a conversation; `parts` keep their order, and tool calls come after them."""

    role: Role
    parts: tuple[Part, ...]
    name: str | None = None
    calls: tuple[ToolCall, ...] = ()
    """Calls of an assistant; their results follow as messages of the role `tool`, one for each call."""
    call_id: str = ""
    """The id of the call whose result a `tool` message holds."""
    failed: bool = False
    """True in a `tool` message if the caller marked the call as failed."""
    keepsake: Mapping[str, Any] | None = None
    """Data that the provider of an assistant's turn wants back with it; see `Keepsake`."""
    labels: frozenset[str] = frozenset()
    """The labels that its caller put on it and on its parts. No provider is sent them."""

    @property
    def text(self) -> str:
        """Return the message's text parts, joined."""
        return "".join(part.text for part in self.parts if isinstance(part, Text))


def labels_of(messages: Iterable[Message]) -> frozenset[str]:
    """Return the labels of all of the messages."""
    return frozenset[str]().union(*(message.labels for message in messages))


class Sampling(Struct, frozen=True):
    """Sampling parameters; None means the provider's default. `max_tokens` caps the answer, not the orchestration."""

    temperature: float | None = None
    top_p: float | None = None
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: tuple[tuple[str, float], ...] = ()
    """Pairs of a token's id, in the worker's own tokenizer, and its bias."""


class Tool(Struct, frozen=True):
    """A function of the caller's, which the caller's side executes. Names follow `[A-Za-z0-9_-]{1,64}`."""

    name: str
    description: str = ""
    parameters: Mapping[str, Any] | None = None
    """JSON schema of its arguments, an object; None means that it takes none."""
    strict: bool = False
    """True if the arguments must follow the schema, where the provider can enforce that."""
    spelling: Mapping[str, Any] | None = None
    """The tool as the request spelled it, where that is no function; used only for replies in the request's format."""


class Toolbox(Struct, frozen=True):
    """The tools on offer and how they are to be used. Empty means that there are none."""

    tools: tuple[Tool, ...] = ()
    choice: Literal["auto", "none", "required", "named"] = "auto"
    named: str = ""
    """The tool that must be called, for the choice `named`."""
    parallel: bool = True
    """True if one turn may call several tools."""

    @property
    def must(self) -> bool:
        """Return whether the model has to call a tool."""
        return self.choice in ("required", "named")


NO_TOOLS = Toolbox()
"""A toolbox without tools."""


class Form(Struct, frozen=True):
    """The form that the answer must have: JSON that validates against `schema`, or, without one, any JSON object."""

    schema: Mapping[str, Any] | None = None
    name: str = "answer"
    description: str = ""
    strict: bool = False
    """True if the caller restricts itself to the part of JSON Schema that providers can constrain decoding to in
    full."""

    @property
    def is_object(self) -> bool:
        """Return whether the answer is an object at its root, as OpenAI demands of forms."""
        return self.schema is None or self.schema.get("type") == "object"


class Task(Struct, frozen=True):
    """The request of a caller: the conversation, and the form and limits of the answer."""

    messages: Sequence[Message]
    sampling: Sampling = Sampling()
    user: str | None = None
    metadata: Mapping[str, str] = {}
    toolbox: Toolbox = NO_TOOLS
    logprobs: int | None = None
    """The number of likeliest tokens to return for each token of the answer; None for no log-probabilities at all."""
    form: Form | None = None
    """None where the answer is free text."""
    echoed: Mapping[str, Any] = {}
    """Parameters of the request that have no effect on the answer and are kept, as JSON values by name: those that its
    reply repeats, and the identifier of its end user."""

    @property
    def needs_tools(self) -> bool:
        """Return whether a worker must support tools: some are offered, or the conversation contains tool calls."""
        return bool(self.toolbox.tools) or any(message.calls or message.call_id for message in self.messages)

    @property
    def has_images(self) -> bool:
        """Return whether a worker must support images to do this task."""
        return self._has_part(Image)

    @property
    def has_documents(self) -> bool:
        """Return whether a worker must be able to read PDFs to do this task."""
        return self._has_part(Document)

    def _has_part(self, kind: type[Part]) -> bool:
        for message in self.messages:
            if any(isinstance(part, kind) for part in message.parts):
                return True
        return False


class Usage(Struct, frozen=True):
    """Tokens of one or several calls. `cached` is a subset of `input`, `reasoning` a subset of `output`.

    `written` is the part of `input` that the provider wrote to its cache, which some of them bill higher. `estimated`
    is true when a provider reported nothing and the figures are our upper bound.
    """

    input: int = 0
    cached: int = 0
    output: int = 0
    reasoning: int = 0
    estimated: bool = False
    written: int = 0

    @property
    def total(self) -> int:
        """Return the sum of input and output tokens."""
        return self.input + self.output


def sum_usages(usages: Iterable[Usage]) -> Usage:
    """Return the sum of all of them, made in one pass: each turn of a long run sums up all of its calls."""
    used, cached, output, reasoning, estimated, written = 0, 0, 0, 0, False, 0
    for usage in usages:
        used, cached, output = used + usage.input, cached + usage.cached, output + usage.output
        reasoning, estimated = reasoning + usage.reasoning, estimated or usage.estimated
        written += usage.written
    return Usage(used, cached, output, reasoning, estimated, written)


MOST_PIECES = 32
"""The number of pieces of a text at which they are joined."""


def append_piece(pieces: list[str], piece: str) -> None:
    """Append to a text that is kept in pieces, and join these from time to time: many short strings take ten times the
    memory of their characters."""
    pieces.append(piece)
    if len(pieces) >= MOST_PIECES:
        pieces[:] = ["".join(pieces)]


class TextDelta(Struct, frozen=True):
    """Some of the answer's text, as it streams; or of the model's refusal, where its format marks that.

    That of an embedding is a vector, as JSON.
    """

    text: str
    refusal: bool = False


class ToolDelta(Struct, frozen=True):
    """Part of a tool call, as it streams. `index` counts the turn's calls from 0, in the order in which they begin.

    `name` stands in a call's first delta, and `id` there too if the provider gives one; `arguments` is more of its
    text. Deltas of several calls may be mixed.
    """

    index: int
    id: str = ""
    name: str = ""
    arguments: str = ""


class Keepsake(Struct, frozen=True):
    """Data that a provider wants back when its turn is sent to it again, such as signed thinking.

    Plain JSON in the provider's own form. Only the model that gave it understands it, so it is sent to no other.
    """

    data: Mapping[str, Any]


class LikelyToken(Struct, frozen=True):
    """A token that a decoder might have chosen. `raw` are its bytes, which may be part of a character only."""

    token: str
    logprob: float
    raw: bytes | None = None


class ChosenToken(Struct, frozen=True):
    """One decoded token with its natural-log probability and the likeliest others, where the decoder reports them."""

    token: str
    logprob: float
    others: tuple[tuple[str, float], ...] = ()
    raw: bytes | None = None
    top: tuple[LikelyToken, ...] = ()
    """The likeliest as the decoder listed them, the chosen one among them if it is one of them."""


class End(Struct, frozen=True):
    """The stream's terminal marker: without one, a stream was truncated. `usage` is None when none was reported."""

    finish: Finish
    usage: Usage | None
    model: str | None = None
    refused: bool = False
    stop_sequence: str = ""
    """The one at which the answer ended; empty if it ended otherwise, or if the provider does not say."""
    id: str | None = None
    """The provider's id of the reply."""


Piece = TextDelta | ToolDelta | Keepsake | ChosenToken | End


SAMPLING = Sampling.__struct_fields__


def task_to_json(task: Task) -> dict[str, Any]:
    """Return a task as plain JSON values, for the content store."""
    value: dict[str, Any] = {
        "messages": [message_to_json(message) for message in task.messages],
        "sampling": {name: getattr(task.sampling, name) for name in SAMPLING},
        "user": task.user,
        "metadata": dict(task.metadata),
    }
    if task.toolbox.tools:
        value["toolbox"] = toolbox_to_json(task.toolbox)
    if task.form is not None:
        value["form"] = asdict(task.form)
    if task.echoed:
        value["echoed"] = dict(task.echoed)
    if task.logprobs is not None:
        value["logprobs"] = task.logprobs
    return value


def task_from_json(value: Mapping[str, Any]) -> Task:
    """Return the inverse of `task_to_json`; trusts its input, which only the content store gives."""
    return Task(
        messages=tuple(message_from_json(message) for message in value["messages"]),
        sampling=sampling_from_json(value["sampling"]),
        user=value["user"],
        metadata=dict(value["metadata"]),
        toolbox=toolbox_from_json(value["toolbox"]) if "toolbox" in value else NO_TOOLS,
        logprobs=value.get("logprobs"),
        form=Form(**value["form"]) if "form" in value else None,
        echoed=value.get("echoed", {}),
    )


def sampling_from_json(value: Mapping[str, Any]) -> Sampling:
    """Return a sampling from its fields as JSON values."""
    bias = tuple((token, weight) for token, weight in value.get("logit_bias", ()))
    return Sampling(**{**value, "stop": tuple(value["stop"]), "logit_bias": bias})


def toolbox_to_json(toolbox: Toolbox) -> dict[str, Any]:
    """Return a toolbox as plain JSON values, with its schemas as they came."""
    tools = [_tool_to_json(tool) for tool in toolbox.tools]
    return {"tools": tools, "choice": toolbox.choice, "named": toolbox.named, "parallel": toolbox.parallel}


def _tool_to_json(tool: Tool) -> dict[str, Any]:
    value: dict[str, Any] = {
        "name": tool.name,
        "description": tool.description,
        "parameters": tool.parameters,
        "strict": tool.strict,
    }
    if tool.spelling is not None:
        value["spelling"] = tool.spelling
    return value


def toolbox_from_json(value: Mapping[str, Any]) -> Toolbox:
    """Return the inverse of `toolbox_to_json`."""
    return Toolbox(tuple(Tool(**tool) for tool in value["tools"]), value["choice"], value["named"], value["parallel"])


def message_to_json(message: Message) -> dict[str, Any]:
    """Return a message as plain JSON values, with its parts by their fields. What belongs to tools stands there only if
    it is used."""
    parts = [_part_to_json(part) for part in message.parts]
    value: dict[str, Any] = {"role": message.role, "parts": parts, "name": message.name}
    if message.calls:
        value["calls"] = [{"id": call.id, "name": call.name, "arguments": call.arguments} for call in message.calls]
    if message.call_id:
        value |= {"call_id": message.call_id, "failed": message.failed}
    if message.labels:
        value["labels"] = sorted(message.labels)
    if not message.keepsake:
        return value
    return value | {"keepsake": message.keepsake}


def _part_to_json(part: Part) -> dict[str, Any]:
    """Return the fields of a part. A release that knows no documents reads one as an image, which its provider
    refuses."""
    if isinstance(part, Text):
        return {"text": part.text}
    if isinstance(part, Document):
        return {"url": part.url, "detail": None, "document": part.name}
    return {"url": part.url, "detail": part.detail}


def _part_from_json(value: Mapping[str, Any]) -> Part:
    if "text" in value:
        return Text(value["text"])
    if "document" in value:
        return Document(value["url"], value["document"])
    return Image(value["url"], value["detail"])


def message_from_json(value: Mapping[str, Any]) -> Message:
    """Return the inverse of `message_to_json`."""
    return Message(
        role=value["role"],
        parts=tuple([_part_from_json(part) for part in value["parts"]]),
        name=value["name"],
        calls=tuple([ToolCall(**call) for call in value.get("calls", ())]),
        call_id=value.get("call_id", ""),
        failed=value.get("failed", False),
        keepsake=value.get("keepsake"),
        labels=frozenset(value.get("labels", ())),
    )


def usage_to_json(usage: Usage) -> dict[str, Any]:
    """Return a usage as plain JSON values. They are written out, because `asdict` copies deeply and this is on every
    call's path."""
    plain = {
        "input": usage.input,
        "cached": usage.cached,
        "output": usage.output,
        "reasoning": usage.reasoning,
        "estimated": usage.estimated,
    }
    if usage.written:
        return {**plain, "written": usage.written}
    return plain


def usage_from_json(value: Mapping[str, Any]) -> Usage:
    """Return the inverse of `usage_to_json`."""
    counts = (value["input"], value["cached"], value["output"], value["reasoning"])
    return Usage(*counts, value["estimated"], value.get("written", 0))


Decoded = Mapping[str, Any]
"""The log-probability of one token of an answer, as plain JSON in OpenAI's form. It is made once, from the output of a
worker's decoder, and then stored, streamed and returned unchanged."""


def token_to_json(chosen: ChosenToken) -> dict[str, Any]:
    """Return a decoded token: itself, its natural-log probability, its bytes where they are known, and the
    likeliest."""
    likely = LikelyToken(chosen.token, chosen.logprob, chosen.raw)
    return _figures(likely) | {"top_logprobs": [_figures(likely_token) for likely_token in chosen.top]}


def _figures(likely: LikelyToken) -> dict[str, Any]:
    raw = None if likely.raw is None else list(likely.raw)
    return {"token": likely.token, "logprob": likely.logprob, "bytes": raw}


def token_size(token: Decoded) -> int:
    """Return the number of characters of its tokens: what a worker that says too much is measured by."""
    return len(token["token"]) + sum(1 + len(likely["token"]) for likely in token["top_logprobs"])


def count_tokens_covering(tokens: Sequence[Decoded], chars: int) -> int:
    """Return the number of tokens that hold the first `chars` characters.

    A character is counted with the first of its bytes, since a token may be a part of one.
    """
    for place, token in enumerate(tokens):
        if chars <= 0:
            return place
        raw = token["token"].encode() if token["bytes"] is None else token["bytes"]
        chars -= sum(byte & 0xC0 != 0x80 for byte in raw)
    return len(tokens)


# -- the bytes of a task in the content store, whole, and in the parts that the turns of a conversation have in common
#
# Callers send the whole conversation with every turn. Its bytes are therefore cut where turns begin and end: before and
# after each message of the assistant. The later turn of a conversation then begins with the very parts of the one
# before. Whatever is stored in this form must stay readable: neither `SPOKEN` nor the order of a task's fields may
# change.

BEGINNING = b'{"messages":['
SPOKEN = (b',{"role":"assistant","parts":[{"text":', b'}],"name":null}')
"""The bytes around the text of an assistant's message that has nothing else."""
LASTING = ("toolbox", "form", "logprobs")
"""The last fields of a task, which hardly change from turn to turn."""


class TaskParts(Struct, frozen=True):
    """The bytes of a task in parts, which are the whole if they are joined."""

    head: tuple[bytes, ...]
    """The conversation, cut at its turns."""
    body: bytes
    """The fields that follow it."""
    tail: bytes
    """The fields `LASTING` with the end of the task."""

    @property
    def whole(self) -> bytes:
        """Return the parts, joined."""
        return b"".join((*self.head, self.body, self.tail))


def task_bytes(task: Task) -> bytes:
    """Return the bytes of a task. Raises what `orjson` does for a value that is not JSON."""
    return orjson.dumps(task_to_json(task), default=dict)


def task_parts(task: Task) -> TaskParts:
    """Return the bytes of a task in parts: the same bytes as `task_bytes`."""
    fields = task_to_json(task)
    head = tuple(_head(task.messages, fields.pop("messages")))
    lasting = {name: fields.pop(name) for name in LASTING if name in fields}
    beginning = b"" if head else BEGINNING
    body = beginning + b"]," + orjson.dumps(fields, default=dict)[1:-1]
    tail = b"," + orjson.dumps(lasting, default=dict)[1:] if lasting else b"}"
    return TaskParts(head, body, tail)


def _head(messages: Sequence[Message], values: Sequence[object]) -> Iterator[bytes]:
    """Yield the bytes of the messages, cut before and after each one of the assistant."""
    part = BEGINNING
    for place, (message, value) in enumerate(zip(messages, values, strict=True)):
        is_answer = message.role == "assistant"
        if is_answer and place:
            yield part
            part = b""
        if place:
            part += b","
        part += orjson.dumps(value, default=dict)
        if is_answer:
            yield part
            part = b""
    if part and messages:
        yield part


def encode_spoken_message(text: bytes) -> bytes:
    """Return the part of a conversation that is an assistant's message with this text and nothing else."""
    return orjson.dumps(text.decode(errors="replace")).join(SPOKEN)


def decode_spoken_text(part: bytes) -> bytes | None:
    """Return the text of such a part of a conversation; None for any other part."""
    before, after = SPOKEN
    if not (part.startswith(before) and part.endswith(after)):
        return None
    written = part[len(before) : -len(after)]
    try:
        text = orjson.loads(written)
    except orjson.JSONDecodeError:
        return None
    if not isinstance(text, str) or orjson.dumps(text) != written:
        return None
    return text.encode()


# -- tool calls: their pieces, their faults, and the ids under which callers know them


def _no_constant(_name: str) -> NoReturn:
    raise ValueError("NaN and infinities are not JSON")


STRICT: Final = json.JSONDecoder(parse_constant=_no_constant)
"""Parse JSON as RFC 8259 defines it; raises ValueError and RecursionError."""
MINTED = re.compile(r"call_bt([0-9A-Za-z]{21})[0-9A-Za-z]{12}")
RUN = re.compile(r"run_([0-9a-f]{31})")
DIGITS = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
TOKEN_BYTES = 9
"""Random bytes that `mint_call_id` takes."""
MOST_CALLS = 128
"""In one turn; OpenAI's own limit."""


def mint_call_id(run: str, token: bytes) -> str:
    """Return an id for a tool call of this run; `token` is `TOKEN_BYTES` of randomness. ValueError for a run id of
    another form."""
    match = RUN.fullmatch(run)
    if match is None:
        raise ValueError("this is no run id")
    return f"call_bt{_to_base62(int(match[1], 16), 21)}{_to_base62(int.from_bytes(token) >> 1, 12)}"


def run_of(call_id: str) -> str | None:
    """Return the run that a minted id leads to; None if the id has not the form of ours, and so is somebody else's."""
    minted = MINTED.fullmatch(call_id)
    if minted is None:
        return None
    number = 0
    for digit in minted[1]:
        number = number * 62 + DIGITS.index(digit)
    if number < 16**31:
        return f"run_{number:031x}"
    return None


def _to_base62(number: int, places: int) -> str:
    digits = ""
    for _ in range(places):
        number, digit = divmod(number, 62)
        digits = DIGITS[digit] + digits
    return digits


class ToolCallCollector:
    """The tool calls of one turn, put together from the pieces that stream in."""

    def __init__(self) -> None:
        self._ids: list[str] = []
        self._names: list[str] = []
        self._arguments: list[list[str]] = []

    def take(self, delta: ToolDelta) -> None:
        """Note one more piece; an adapter promises that a call's index is at most one above the highest so far."""
        if delta.index == len(self._names):
            self._ids.append(delta.id)
            self._names.append(delta.name)
            self._arguments.append([])
        self._arguments[delta.index].append(delta.arguments)

    def __len__(self) -> int:
        return len(self._names)

    def name(self, index: int) -> str:
        """Return the tool that a call wants."""
        return self._names[index]

    @property
    def calls(self) -> tuple[ToolCall, ...]:
        """Return the calls as they are now. Missing arguments become an empty object; nothing that was sent is
        changed."""
        calls = []
        for id_, name, pieces in zip(self._ids, self._names, self._arguments, strict=True):
            text = "".join(pieces)
            if not text.strip():
                text += "{}"
            calls.append(ToolCall(id_, name, text))
        return tuple(calls)


def unsent_deltas(calls: Iterable[ToolCall], received_deltas: Iterable[ToolDelta]) -> tuple[ToolDelta, ...]:
    """Return the pieces of these calls that a caller has not received yet, given what it has."""
    chars: dict[int, int] = {}
    for delta in received_deltas:
        chars[delta.index] = chars.get(delta.index, 0) + len(delta.arguments)
    pieces = []
    for index, call in enumerate(calls):
        if index not in chars:
            pieces.append(ToolDelta(index, call.id, call.name, call.arguments))
        elif len(call.arguments) > chars[index]:
            pieces.append(ToolDelta(index, arguments=call.arguments[chars[index] :]))
    return tuple(pieces)


def calls_that_count(calls: tuple[ToolCall, ...], toolbox: Toolbox) -> tuple[ToolCall, ...]:
    """Return the calls that count: where only one is allowed at a time, a model that made several is asked again
    later."""
    if toolbox.parallel:
        return calls
    return calls[:1]


def fault_of_calls(calls: Iterable[ToolCall], toolbox: Toolbox) -> str:
    """Return the reason why these calls cannot be handed to the caller, or an empty string. No call at all is a fault
    where one is demanded."""
    calls = tuple(calls)
    offered: set[str] = set()
    if toolbox.choice != "none":
        offered = {tool.name for tool in toolbox.tools}
    if len(calls) > MOST_CALLS:
        return "too many tool calls in one turn"
    if toolbox.must and not calls:
        return "no tool call, though one was demanded"
    for call in calls:
        if call.name not in offered:
            return "a call of a tool that was not offered"
        if toolbox.choice == "named" and call.name != toolbox.named:
            return "a call of another tool than the one that was demanded"
        if not is_json_object(call.arguments):
            return "arguments of a tool call that are no JSON object"
    return ""


def is_json_object(text: str) -> bool:
    """Return True if a text is a JSON object, as the arguments of a call must be."""
    try:
        return isinstance(STRICT.decode(text), dict)
    except (ValueError, RecursionError):
        return False
