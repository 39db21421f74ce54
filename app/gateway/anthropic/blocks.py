"""The blocks of a turn of `POST /v1/messages`, and the parts of messages that they are."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, StringConstraints

from app.core.message.chat import Image, Part, Text
from app.gateway.anthropic.tools import CacheMark, Name
from app.gateway.wire.baton_options import WireModel

CallId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,256}$")]


class TextBlock(WireModel):
    """A text."""

    type: Literal["text"]
    text: str
    cache_control: CacheMark | None = None
    citations: list[Any] | None = None


class Base64Source(WireModel):
    """An image inline."""

    type: Literal["base64"]
    media_type: Literal["image/png", "image/jpeg", "image/gif", "image/webp"]
    data: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9+/=_-]+$")]


class UrlSource(WireModel):
    """An image by reference."""

    type: Literal["url"]
    url: Annotated[str, StringConstraints(pattern=r"^https?://[!-~]+$")]


class ImageBlock(WireModel):
    """An image."""

    type: Literal["image"]
    source: Annotated[Base64Source | UrlSource, Discriminator("type")]
    cache_control: CacheMark | None = None
    transformations: None = None


class ToolUseBlock(WireModel):
    """A call of a tool, in an assistant's turn."""

    type: Literal["tool_use"]
    id: CallId
    name: Name
    input: dict[str, Any]
    cache_control: CacheMark | None = None
    caller: dict[str, Any] | None = None
    toolset_name: None = None


class ToolReferenceBlock(WireModel):
    """A deferred tool that a search of the caller's has found: from here on it is on offer."""

    type: Literal["tool_reference"]
    tool_name: Name
    cache_control: CacheMark | None = None


class ToolResultBlock(WireModel):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: str | list[Annotated[TextBlock | ImageBlock | ToolReferenceBlock, Discriminator("type")]] | None = None
    is_error: bool | None = None
    cache_control: CacheMark | None = None
    toolset_name: None = None


class ThinkingBlock(WireModel):
    """An earlier turn's thinking, which only the model that thought it could use; it is left out."""

    type: Literal["thinking"]
    thinking: str
    signature: str


class RedactedThinkingBlock(WireModel):
    """Encrypted thinking of an earlier turn; it is left out."""

    type: Literal["redacted_thinking"]
    data: str


Block = Annotated[
    TextBlock | ImageBlock | ToolUseBlock | ToolResultBlock | ThinkingBlock | RedactedThinkingBlock,
    Discriminator("type"),
]


def result_of(block: ToolResultBlock) -> tuple[Part, ...]:
    """The content of a result."""
    if isinstance(block.content, str):
        return (Text(block.content),)
    return tuple(part_of(part) for part in block.content or ())


def part_of(block: TextBlock | ImageBlock | ToolReferenceBlock) -> Part:
    """A block as a part of a message."""
    if isinstance(block, TextBlock):
        return Text(block.text)
    if isinstance(block, ToolReferenceBlock):
        return Text(f"The tool {block.tool_name} can be called now.")
    source = block.source
    return Image(source.url if isinstance(source, UrlSource) else f"data:{source.media_type};base64,{source.data}")
