"""Documents in a conversation, of every wire format: texts become texts between two lines, PDFs stay documents."""

import base64
import binascii
from collections.abc import Mapping
from typing import Final

from app.core.message.chat import Document, Part, Text
from app.errors import InvalidRequest

FILE: Final = r"^data:[a-z]+/[a-z0-9.+-]+(;charset=[A-Za-z0-9-]+)?;base64,[A-Za-z0-9+/=_-]+$"
"""A file as a `data:` URL."""
PDF: Final = "application/pdf"
NO_FILES_MESSAGE: Final = "Baton keeps no files and fetches none: send the file itself as a data: URL in base64"


def frame_document(about: Mapping[str, str], parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Return the parts of a document between lines that say where it begins and ends, and what is known about it. Texts
    alone become one."""
    head = "<document>\n"
    for name, text in about.items():
        if text:
            head += f"<{name}>{text}</{name}>\n"
    framed_parts = (Text(head), *parts, Text("\n</document>\n"))
    texts = [part.text for part in framed_parts if isinstance(part, Text)]
    if len(texts) == len(framed_parts):
        return (Text("".join(texts)),)
    return framed_parts


def file_parts(url: str | None, name: str | None, param: str) -> tuple[Part, ...]:
    """Return a file of a `data:` URL of the form `FILE`, as parts of a message; raises `InvalidRequest`, which names
    `param`.

    There is no URL where the request names a file that is kept or fetched elsewhere.
    """
    if url is None:
        raise unsupported_error(param, NO_FILES_MESSAGE)
    head, _, data = url.removeprefix("data:").partition(",")
    media = head.partition(";")[0]
    if media == PDF:
        return (Document(url, name or ""),)
    if not (media.startswith("text/") or media == "application/json"):
        raise unsupported_error(
            param, f"files are PDFs or texts, and this one is neither; its type must be {PDF} or text/*"
        )
    try:
        text = base64.b64decode(data, validate=True).decode()
    except (binascii.Error, UnicodeDecodeError):
        text = "\0"
    if "\0" in text:
        message = f"Invalid value for '{param}': it is no base64 of a text in UTF-8."
        raise InvalidRequest(message, param=param, code="invalid_value")
    return frame_document({"title": name or ""}, (Text(text),))


def unsupported_error(param: str, why: str) -> InvalidRequest:
    """Return the refusal of a field that asks for something that Baton does not have."""
    return InvalidRequest(f"'{param}' is not supported: {why}.", param=param, code="unsupported_parameter")
