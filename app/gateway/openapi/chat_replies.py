"""Models of the replies of `/v1/chat/completions` and `/v1/completions`, and of the events of their streams.

They document, as those of `replies.py` do.
"""

from typing import Any, Literal

from app.gateway.openapi.replies import Reply, RunExtension, TokenUsage


class Token(Reply):
    """A token with its natural-log probability."""

    token: str
    logprob: float
    bytes: list[int] | None


class DecodedToken(Token):
    """A token of the answer, and the likeliest alternatives."""

    top_logprobs: list[Token]


class LogProbabilities(Reply):
    """The log-probabilities of the answer's tokens."""

    content: list[DecodedToken] | None
    refusal: list[DecodedToken] | None


class CalledFunction(Reply):
    """The function that is called."""

    name: str
    arguments: str
    """JSON text."""


class ToolCall(Reply):
    """A call of one of the caller's functions."""

    id: str
    type: Literal["function"]
    function: CalledFunction


class CalledCustomTool(Reply):
    """The custom tool that is called, and the text that it gets."""

    name: str
    input: str


class CustomToolCall(Reply):
    """A call of one of the caller's custom tools."""

    id: str
    type: Literal["custom"]
    custom: CalledCustomTool


class AnswerMessage(Reply):
    """The message that answers the conversation."""

    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: list[ToolCall | CustomToolCall] | None = None


class ChatChoice(Reply):
    """The only choice: a run gives one answer."""

    index: int
    message: AnswerMessage
    logprobs: LogProbabilities | None
    finish_reason: Literal["stop", "length", "content_filter", "tool_calls"]


class ChatCompletion(Reply):
    """OpenAI's `chat.completion`."""

    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: TokenUsage
    service_tier: Literal["default"]
    system_fingerprint: str | None
    baton: RunExtension


class FunctionDelta(Reply):
    """More of a function's call."""

    name: str | None = None
    arguments: str


class CustomToolDelta(Reply):
    """More of a custom tool's call."""

    name: str | None = None
    input: str


class ToolCallDelta(Reply):
    """More of one tool call; `id` and `type` come with its first part."""

    index: int
    id: str | None = None
    type: Literal["function", "custom"] | None = None
    function: FunctionDelta | None = None
    custom: CustomToolDelta | None = None


class Delta(Reply):
    """The part of the message that one chunk adds."""

    role: Literal["assistant"] | None = None
    content: str | None = None
    refusal: str | None = None
    tool_calls: list[ToolCallDelta] | None = None


class ChunkChoice(Reply):
    """The only choice of a chunk."""

    index: int
    delta: Delta
    logprobs: LogProbabilities | None
    finish_reason: Literal["stop", "length", "content_filter", "tool_calls"] | None


class ChatCompletionChunk(Reply):
    """One event of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"]
    created: int
    model: str
    choices: list[ChunkChoice]
    service_tier: Literal["default"]
    system_fingerprint: str | None
    usage: TokenUsage | None = None
    """In the last chunk, if `stream_options.include_usage` asks for it."""
    baton: RunExtension | dict[str, Any] | None = None
    """With the finish reason how the run produced the answer; with `baton.stream_steps` also events of its steps."""


class TextChoice(Reply):
    """The only choice: a run gives one answer."""

    index: int
    text: str
    logprobs: None
    finish_reason: Literal["stop", "length", "content_filter"]


class TextCompletion(Reply):
    """OpenAI's `text_completion`."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChoice]
    usage: TokenUsage
    system_fingerprint: str | None
    baton: RunExtension


class TextChunkChoice(Reply):
    """The only choice of a chunk."""

    index: int
    text: str
    logprobs: None
    finish_reason: Literal["stop", "length", "content_filter"] | None


class TextCompletionChunk(Reply):
    """One event of a streamed text completion."""

    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[TextChunkChoice]
    system_fingerprint: str | None
    usage: TokenUsage | None = None
    """In the last chunk, if `stream_options.include_usage` asks for it."""
    baton: RunExtension | dict[str, Any] | None = None
    """With the finish reason how the run produced the text; with `baton.stream_steps` also events of its steps."""
