"""Shared by all programs of the Python client: the question, and the form of usage and errors in a report."""

import time
from typing import Any, Final

import openai
from openai.types import CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

Report = dict[str, Any]
MESSAGES: Final[Any] = [{"role": "user", "content": "What is 2 + 2?"}]


class Add(BaseModel):
    """Adds two numbers."""

    a: int
    b: int


TOOLS: Final[Any] = [
    openai.pydantic_function_tool(Add, name="add"),
    {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}},
]
ASKED: Final[Any] = {"model": "baton-mini", "messages": MESSAGES, "tools": TOOLS}
CHOICES: Final[Any] = {
    "auto": {"tool_choice": "auto"},
    "none": {"tool_choice": "none"},
    "required": {"tool_choice": "required"},
    "named": {"tool_choice": {"type": "function", "function": {"name": "look"}}},
    "one": {"parallel_tool_calls": False},
}
"""What is said of the tools, by the name that it has in a report."""
CUSTOM: Final[Any] = ASKED | {"tools": [{"type": "custom", "custom": {"name": "patch"}}, TOOLS[1]]}
"""The question with a tool of free text and a function."""


def usage(counted: CompletionUsage | None) -> Report | None:
    """Return the usage as plain values, our own fields included."""
    return counted.model_dump(exclude_unset=True) if counted is not None else None


def report_of_error(error: openai.APIError) -> Report:
    """The client's class, and what it read of the error object."""
    status = error.status_code if isinstance(error, openai.APIStatusError) else None
    return {
        "class": type(error).__name__,
        "status": status,
        "type": error.type,
        "code": error.code,
        "param": error.param,
        "request": bool(error.request_id) if isinstance(error, openai.APIStatusError) else None,
    }


def turn(completion: ChatCompletion) -> Report:
    """A whole reply: text, calls, finish and usage."""
    (choice,) = completion.choices
    calls: Any = choice.message.tool_calls or ()
    functions = [call.function for call in calls if _is_call(call)]
    calls_written = [[function.name, function.arguments] for function in functions]
    return _turn(choice.message.content, calls_written, choice.finish_reason, completion.usage)


def _is_call(call: Any) -> bool:
    return bool(call.type == "function" and call.id.startswith("call_bt"))


def _turn(text: str | None, calls: Any, finish: str | None, counted: CompletionUsage | None) -> Report:
    return {"text": text, "calls": calls, "finish": finish, "usage": usage(counted)}


class StreamedReply:
    """A streamed reply, put together as it comes."""

    def __init__(self) -> None:
        self._text: str | None = None
        self._calls: list[list[str]] = []
        self._finish: str | None = None
        self._usage: CompletionUsage | None = None
        self._pieces: list[int] = []
        self._began = self._ended = 0.0

    def take(self, chunk: ChatCompletionChunk) -> None:
        """One chunk. Of a call's pieces the first one alone has its id and name."""
        self._usage = chunk.usage or self._usage
        for choice in chunk.choices:
            if choice.delta.content:
                self._text = (self._text or "") + choice.delta.content
            for piece in choice.delta.tool_calls or ():
                if piece.id:
                    assert piece.index == len(self._calls)
                    self._calls.append([str(piece.function and piece.function.name), ""])
                    self._pieces.append(0)
                more = (piece.function and piece.function.arguments) or ""
                self._calls[piece.index][1] += more
                self._pieces[piece.index] += bool(more)
                self._began = self._began or time.monotonic()
            self._finish = choice.finish_reason or self._finish
            self._ended = time.monotonic()

    def report(self) -> Report:
        """The same as `turn`, and how it came: pieces of each call's arguments, and the seconds from the first to the
        end."""
        whole = _turn(self._text, self._calls, self._finish, self._usage)
        return whole | {"pieces": self._pieces, "early": self._ended - self._began if self._calls else None}


def describe_call(call: Any) -> list[str]:
    """A call of either kind, whole: its kind, its name and what it brings."""
    assert call.id.startswith("call_bt")
    if call.type == "custom":
        return [call.type, call.custom.name, call.custom.input]
    return [call.type, call.function.name, call.function.arguments]


class Pieces:
    """Calls of either kind, put together as they come. The client's own types know the pieces of functions only."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        """As `describe_call` has them."""

    def take(self, chunk: ChatCompletionChunk) -> None:
        """One chunk."""
        for piece in (piece for choice in chunk.choices for piece in choice.delta.tool_calls or ()):
            data = piece.to_dict()
            if piece.id:
                self.calls.append([str(data["type"]), "", ""])
            call, more = self.calls[piece.index], data[self.calls[piece.index][0]]
            assert isinstance(more, dict)
            call[1] += more.get("name", "")
            call[2] += more.get("input", more.get("arguments", ""))
