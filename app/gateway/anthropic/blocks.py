"""The blocks of a turn of `POST /v1/messages`, and the parts of messages that they are."""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, StringConstraints

from app.core.message.chat import Document, Image, Part, Text
from app.gateway.anthropic.tools import CacheMark, ToolName
from app.gateway.wire.documents import frame_document, unsupported_error
from app.gateway.wire.parameters import PartOptions, WireModel
from app.gateway.wire.tool_names import short_name

CallId = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,256}$")]


class TextBlock(WireModel):
    """A text."""

    type: Literal["text"]
    text: str
    baton: PartOptions | None = None
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
    baton: PartOptions | None = None
    cache_control: CacheMark | None = None
    transformations: None = None


class Citations(WireModel):
    """Citations of the block in the answer, which there are none of."""

    enabled: bool | None = None


class PdfSource(WireModel):
    """A PDF inline."""

    type: Literal["base64"]
    media_type: Literal["application/pdf"]
    data: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9+/=_-]+$")]


class PlainTextSource(WireModel):
    """A text."""

    type: Literal["text"]
    media_type: Literal["text/plain"]
    data: str


class ContentSource(WireModel):
    """Texts and images that make up one document."""

    type: Literal["content"]
    content: str | Annotated[list[Annotated[TextBlock | ImageBlock, Discriminator("type")]], Field(max_length=512)]


class DocumentBlock(WireModel):
    """A document. Texts are for every worker, PDFs for those that read them."""

    type: Literal["document"]
    source: Annotated[PdfSource | PlainTextSource | ContentSource | UrlSource, Discriminator("type")]
    title: str | None = None
    context: str | None = None
    citations: Citations | None = None
    baton: PartOptions | None = None
    cache_control: CacheMark | None = None


class SearchResultBlock(WireModel):
    """Something that the caller's side has found."""

    type: Literal["search_result"]
    source: str
    title: str
    content: Annotated[list[TextBlock], Field(max_length=512)]
    citations: Citations | None = None
    baton: PartOptions | None = None
    cache_control: CacheMark | None = None


class ToolUseBlock(WireModel):
    """A call of a tool, in an assistant's turn."""

    type: Literal["tool_use"]
    id: CallId
    name: ToolName
    input: dict[str, Any]
    cache_control: CacheMark | None = None
    caller: dict[str, Any] | None = None
    toolset_name: None = None


class ToolReferenceBlock(WireModel):
    """A deferred tool that a search of the caller's has found: from here on it is on offer."""

    type: Literal["tool_reference"]
    tool_name: ToolName
    cache_control: CacheMark | None = None


ResultPart = TextBlock | ImageBlock | DocumentBlock | SearchResultBlock | ToolReferenceBlock


class ToolResultBlock(WireModel):
    """The result of a call."""

    type: Literal["tool_result"]
    tool_use_id: CallId
    content: str | list[Annotated[ResultPart, Discriminator("type")]] | None = None
    is_error: bool | None = None
    baton: PartOptions | None = None
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
    TextBlock
    | ImageBlock
    | DocumentBlock
    | SearchResultBlock
    | ToolUseBlock
    | ToolResultBlock
    | ThinkingBlock
    | RedactedThinkingBlock,
    Discriminator("type"),
]


def result_of(block: ToolResultBlock, where: str) -> tuple[Part, ...]:
    """Return the content of a result, which stands at `where`; raises `InvalidRequest`."""
    if isinstance(block.content, str):
        return (Text(block.content),)
    parts: list[Part] = []
    for at, part in enumerate(block.content or ()):
        parts += parts_of(part, f"{where}.content.{at}")
    return tuple(parts)


def parts_of(block: ResultPart, where: str) -> tuple[Part, ...]:
    """Return a block, which stands at `where`, as parts of a message; raises `InvalidRequest`."""
    if isinstance(block, TextBlock):
        return (Text(block.text),)
    if isinstance(block, ToolReferenceBlock):
        return (Text(f"The tool {short_name(block.tool_name)} can be called now."),)
    if isinstance(block, ImageBlock):
        if isinstance(block.source, UrlSource):
            return (Image(block.source.url),)
        return (Image(_data_url(block.source)),)
    if block.citations is not None and block.citations.enabled:
        raise unsupported_error(f"{where}.citations", "answers have no citations: leave it out")
    if isinstance(block, SearchResultBlock):
        texts = tuple(Text(part.text) for part in block.content)
        return frame_document({"title": block.title, "source": block.source}, texts)
    return _document(block, where)


def _document(block: DocumentBlock, where: str) -> tuple[Part, ...]:
    source = block.source
    if isinstance(source, UrlSource):
        raise unsupported_error(
            f"{where}.source", "Baton fetches no documents: send a PDF as base64, and other text as text"
        )
    about = {"title": block.title or "", "context": block.context or ""}
    if isinstance(source, PlainTextSource):
        return frame_document(about, (Text(source.data),))
    if isinstance(source, PdfSource):
        document = Document(_data_url(source), block.title or "")
        if not block.context:
            return (document,)
        return Text(f"About the document that follows: {block.context}"), document
    if isinstance(source.content, str):
        return frame_document(about, (Text(source.content),))
    parts: list[Part] = []
    for at, part in enumerate(source.content):
        parts += parts_of(part, f"{where}.source.content.{at}")
    return frame_document(about, tuple(parts))


def _data_url(source: Base64Source | PdfSource) -> str:
    return f"data:{source.media_type};base64,{source.data}"
