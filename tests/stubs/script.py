"""The vocabulary of the stub: what a provider may do, as data, and the queue of each model.

A behaviour is a `Reply` (with at most one fault in its stream), a `Fail` (an HTTP error in the provider's shape), or
one of `Hang`, `Drop`, `Raw`, `Echo`, `Agent`. All of them survive JSON, so that a test can script a stub in another
process.
"""

from __future__ import annotations

import asyncio
import json
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Sequence
from itertools import cycle
from typing import Any, Literal

from msgspec import Struct

from .record import ReceivedRequest

Point = int | Literal["close", "end"]
"""Where a fault strikes: after so many content deltas, before the finishing frames, or before the terminal event."""


class Usage(Struct, frozen=True, kw_only=True):
    """Token counts as the bill sees them: `input` includes cached ones, `output` includes reasoning."""

    input: int = 12
    output: int = 7
    cached: int = 0
    cache_write: int = 0
    reasoning: int = 0


class ToolCall(Struct, frozen=True):
    """A tool call of the model; `arguments` is JSON text, sent verbatim (so it may be broken)."""

    name: str
    arguments: str = "{}"
    id: str = ""


class Stall(Struct, frozen=True):
    """Say nothing more, with the connection open, for so many seconds, until the event is set, or until `release`
    (None)."""

    after: Point = 1
    seconds: float | asyncio.Event | None = None


class Truncate(Struct, frozen=True):
    """End without the terminal event: `clean` finishes the HTTP body properly, else the connection just closes."""

    after: Point = 1
    clean: bool = True


class Reset(Struct, frozen=True):
    """RST the connection in the middle of an HTTP chunk."""

    after: Point = 1


class StreamError(Struct, frozen=True):
    """The provider's error event inside a 200 stream, which then ends. Status decides its type (529: overloaded)."""

    after: Point = 1
    status: int = 529
    message: str = "Overloaded"


class Garbage(Struct, frozen=True):
    """A data line which is not JSON; the stream goes on."""

    after: Point = 1
    line: str = '{"id": "chatcmpl-'


class WrongSchema(Struct, frozen=True):
    """A data line of valid JSON of a wrong shape; the stream goes on."""

    after: Point = 1
    document: str = '{"object":"banana","choices":"none","type":7,"candidates":{"content":[]}}'


class HugeLine(Struct, frozen=True):
    """One delta with `size` bytes of text in a single line."""

    after: Point = 1
    size: int = 50 * 1024 * 1024


class DuplicateFinish(Struct, frozen=True):
    """The finishing frames twice."""

    after: Point = "close"


Fault = Stall | Truncate | Reset | StreamError | Garbage | WrongSchema | HugeLine | DuplicateFinish


class Trickle(Struct, frozen=True):
    """Write `size` bytes at a time and pause between: bytewise splits (0 s) or a slow drip (10 s)."""

    size: int = 1
    pause: float = 0.0


class Reply(Struct, frozen=True, kw_only=True):
    """A 200. `finish` is stop, length, refusal, tool, content_filter, blocked, or a provider's own word, verbatim."""

    chunks: Sequence[str] = ("Hello", " there", ".")
    header_delay: float = 0.0
    first_delay: float = 0.0
    gap: float = 0.0
    endless: bool = False
    usage: Usage | None = Usage()
    raw_usage: dict[str, Any] | None = None
    reasoning: Sequence[str] = ()
    refusal: str | None = None
    tool_calls: Sequence[ToolCall] = ()
    finish: str = "stop"
    stop_sequence: str | None = None
    """The one at which the answer ends, where the format says that: Anthropic's, and OpenAI's as vLLM extends it."""
    logprob: float = -0.125
    model: str | None = None
    fault: Fault | None = None
    trickle: Trickle | None = None
    streams: Literal["yes", "json", "refuse"] = "yes"
    newline: str | None = None
    comments: bool = False

    @property
    def text(self) -> str:
        """All of the content, as the non-streaming answer has it."""
        return "".join(self.chunks)

    def pieces(self) -> Iterator[str]:
        """The content deltas in order; without end when `endless`."""
        return cycle(self.chunks) if self.endless else iter(self.chunks)


class Fail(Struct, frozen=True, kw_only=True):
    """An HTTP error. `retry_after` is in seconds; `as_date` sends it as an HTTP-date; `html` sends a proxy's page;
    `code` is the finer code of formats that have one."""

    status: int = 500
    message: str = ""
    code: str | None = None
    retry_after: float | None = None
    as_date: bool = False
    html: bool = False
    delay: float = 0.0


class Hang(Struct, frozen=True):
    """Accept the request and send nothing, not even headers (None: until the client leaves)."""

    seconds: float | None = None


class Drop(Struct, frozen=True):
    """RST the connection before any header."""


class Raw(Struct, frozen=True, kw_only=True):
    """Exactly this body, whatever it means."""

    body: str
    status: int = 200
    content_type: str = "text/event-stream; charset=utf-8"


class Echo(Struct, frozen=True):
    """Answer with the canary of this model and, when `mirror`, the request's own body behind it."""

    canary: str
    mirror: bool = False

    def reply(self, received: ReceivedRequest) -> Reply:
        """The reply it stands for."""
        request_text = received.body.decode(errors="replace") if self.mirror else ""
        return Reply(chunks=tuple(part for part in (self.canary, request_text) if part))


class Agent(Struct, frozen=True, kw_only=True):
    """A worker in a loop of tools: each result says what to call next, and the answer is a word of each, in order.

    A result is JSON: `word`, and `then`, the calls that follow (name and arguments; none: the answer does). So the
    answer is right only if every result came, and in its place. Without tools on offer it says its part of the work.
    """

    first: ToolCall
    delay: float = 0.0
    """Seconds before it says anything."""

    def reply(self, received: ReceivedRequest) -> Reply:
        """Return what follows from the conversation in the request."""
        body = received.json
        if not body.get("tools"):
            return Reply(chunks=("My part.",), first_delay=self.delay)
        came = [json.loads(message["content"]) for message in body["messages"] if message["role"] == "tool"]
        calls = (self.first,)
        if came:
            calls = tuple(ToolCall(call["name"], json.dumps(call["arguments"])) for call in came[-1]["then"])
        if calls:
            return Reply(chunks=(), tool_calls=calls, finish="tool", first_delay=self.delay)
        words = (f"{entry['word']} " for entry in came)
        return Reply(chunks=tuple(words), first_delay=self.delay)


Behaviour = Reply | Fail | Hang | Drop | Raw | Echo | Agent
Choice = Behaviour | Callable[[ReceivedRequest], Behaviour]

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Usage,
        ToolCall,
        Trickle,
        Stall,
        Truncate,
        Reset,
        StreamError,
        Garbage,
        WrongSchema,
        HugeLine,
        DuplicateFinish,
        Reply,
        Fail,
        Hang,
        Drop,
        Raw,
        Echo,
        Agent,
    )
}


def plan_reply(*steps: tuple[int | str, str, Sequence[str | int]], chunk: int = 16, **fields_: Any) -> Reply:
    """Return a reply whose text is a plan of (worker, subtask, access) steps, cut every `chunk` characters."""
    plan = {"steps": [{"worker": w, "subtask": s, "access": list(a)} for w, s, a in steps]}
    text = json.dumps(plan)
    return Reply(chunks=tuple(text[i : i + chunk] for i in range(0, len(text), chunk)), **fields_)


def to_json(value: Any) -> Any:
    """Return a behaviour as JSON data; every record carries its class name as `kind`."""
    if type(value).__name__ in _KINDS:
        fields_as_json = {name: to_json(getattr(value, name)) for name in value.__struct_fields__}
        return {"kind": type(value).__name__, **fields_as_json}
    return [to_json(item) for item in value] if isinstance(value, list | tuple) else value


def from_json(data: Any) -> Any:
    """Return the inverse of `to_json`; raises KeyError or TypeError on an unknown kind or field."""
    if isinstance(data, dict) and "kind" in data:
        values = {name: from_json(item) for name, item in data.items() if name != "kind"}
        return _KINDS[data["kind"]](**values)
    return tuple(from_json(item) for item in data) if isinstance(data, list) else data


class Script:
    """The behaviours of each model: a queue for its next requests, and one for all others (by default a `Reply`)."""

    def __init__(self) -> None:
        self._queues: dict[str, deque[Choice]] = defaultdict(deque)
        self._standing: dict[str, Choice] = {}

    def add(self, model: str, *behaviours: Choice) -> None:
        """Queue behaviours, each for one request. Model `*` serves any model that has no behaviour of its own."""
        self._queues[model].extend(behaviours)

    def always(self, model: str, behaviour: Choice) -> None:
        """Set what a model does when its queue is empty."""
        self._standing[model] = behaviour

    def clear(self) -> None:
        """Forget everything."""
        self._queues.clear()
        self._standing.clear()

    def next(self, received: ReceivedRequest) -> Reply | Fail | Hang | Drop | Raw:
        """Return the behaviour for this request, and take it from the queue."""
        behaviour: Choice = Reply()
        for name in (received.model, "*"):
            if self._queues[name]:
                behaviour = self._queues[name].popleft()
                break
            if name in self._standing:
                behaviour = self._standing[name]
                break
        chosen: Behaviour = behaviour(received) if callable(behaviour) else behaviour
        received.behaviour = type(chosen).__name__
        if isinstance(chosen, Echo | Agent):
            return chosen.reply(received)
        return chosen
