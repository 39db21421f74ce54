"""Models of the replies of `/v1/messages`: Anthropic's message, the events of its stream, and its errors.

They document, as those of `replies.py` do.
"""

from typing import Annotated, Any, Literal

from pydantic import Discriminator

from app.gateway.openapi.replies import Reply, RunExtension

StopReason = Literal["end_turn", "max_tokens", "refusal", "stop_sequence", "tool_use"]


class AnthropicErrorObject(Reply):
    """The fault."""

    type: str
    message: str
    details: dict[str, Any] | None = None


class AnthropicError(Reply):
    """The body of every reply of these routes that is not a success: at most 4 KiB."""

    type: Literal["error"]
    error: AnthropicErrorObject
    request_id: str


class TokenCount(Reply):
    """An estimate of the tokens of a conversation."""

    input_tokens: int


class MessageText(Reply):
    """A text of the answer."""

    type: Literal["text"]
    text: str


class MessageToolUse(Reply):
    """A call of one of the caller's tools."""

    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    caller: dict[str, Any]


MessageBlock = Annotated[MessageText | MessageToolUse, Discriminator("type")]


class MessageDeltaUsage(Reply):
    """Tokens that the caller can see; `input_tokens` does not include the cached ones."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int


class MessageUsage(MessageDeltaUsage):
    """Tokens that the caller can see; `input_tokens` does not include the cached ones."""

    service_tier: Literal["standard"]


class AnthropicMessage(Reply):
    """Anthropic's message object."""

    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    container: None
    content: list[MessageBlock]
    stop_reason: StopReason | None
    stop_sequence: str | None
    """The one at which the worker stopped, where its provider says that."""
    stop_details: None
    usage: MessageUsage
    baton: RunExtension | None = None
    """Once the message is over."""


class AnthropicModel(Reply):
    """A tier, or an alias of one, as Anthropic's model object."""

    id: str
    type: Literal["model"]
    display_name: str
    created_at: str
    lifecycle: Literal["active"]
    max_input_tokens: int
    """The longest context of the tier's workers."""
    max_tokens: int
    """The longest answer that the tier allows."""
    capabilities: dict[str, Any]
    baton: dict[str, Any]


class AnthropicModelList(Reply):
    """The models that the key may use, as Anthropic lists them."""

    data: list[AnthropicModel]
    first_id: str | None
    last_id: str | None
    has_more: bool


class MessageStart(Reply):
    """The empty message."""

    type: Literal["message_start"]
    message: AnthropicMessage


class ContentBlockStart(Reply):
    """A block begins."""

    type: Literal["content_block_start"]
    index: int
    content_block: MessageBlock


class TextDelta(Reply):
    """More of a text."""

    type: Literal["text_delta"]
    text: str


class InputJsonDelta(Reply):
    """More of the JSON text of a tool's input."""

    type: Literal["input_json_delta"]
    partial_json: str


class ContentBlockDelta(Reply):
    """More of a block."""

    type: Literal["content_block_delta"]
    index: int
    delta: Annotated[TextDelta | InputJsonDelta, Discriminator("type")]


class ContentBlockStop(Reply):
    """A block is whole."""

    type: Literal["content_block_stop"]
    index: int


class MessageEnd(Reply):
    """The reason why the message stopped."""

    stop_reason: StopReason | None
    stop_sequence: str | None
    """The one at which the worker stopped, where its provider says that."""
    stop_details: None
    container: None


class MessageDelta(Reply):
    """The end of the message."""

    type: Literal["message_delta"]
    delta: MessageEnd
    usage: MessageDeltaUsage
    baton: RunExtension


class MessageStop(Reply):
    """The last event."""

    type: Literal["message_stop"]


class Ping(Reply):
    """A keep-alive; with `baton.stream_steps` also an event of a step."""

    type: Literal["ping"]
    baton: dict[str, Any] | None = None


MessageEvent = Annotated[
    MessageStart
    | ContentBlockStart
    | ContentBlockDelta
    | ContentBlockStop
    | MessageDelta
    | MessageStop
    | Ping
    | AnthropicError,
    Discriminator("type"),
]
