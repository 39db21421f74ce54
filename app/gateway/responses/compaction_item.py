"""The `compaction` item of `/v1/responses`: notes of a conversation, in the place of all but the user's messages.

`encrypted_content` is an encoding and no cipher: the notes say nothing that the caller has not sent or received. So any
process can read an item, and it outlives the run that wrote it.
"""

import base64
import binascii
from typing import Annotated, Final, Literal

from pydantic import StringConstraints

from app.core.message.chat import Message, Text
from app.errors import InvalidRequest
from app.gateway.wire.parameters import PartOptions, WireModel, labels_on

MARK: Final = "baton1."
"""The beginning of what Baton has encoded; other servers' content has another."""
PREFACE: Final = "Notes of the conversation so far, in the place of its answers and of the results of its tools:\n\n"


class CompactionItem(WireModel):
    """Notes of the conversation before it."""

    type: Literal["compaction"]
    encrypted_content: Annotated[str, StringConstraints(max_length=20_971_520)]
    id: Annotated[str, StringConstraints(max_length=256)] | None = None
    baton: PartOptions | None = None
    created_by: str | None = None


def encode_notes(notes: str) -> str:
    """Notes as the `encrypted_content` of an item."""
    return MARK + base64.urlsafe_b64encode(notes.encode()).decode()


def message_of(item: CompactionItem, place: int) -> Message:
    """Return the message that an item of the input stands for. Raises `InvalidRequest` for an item that Baton did not
    make."""
    mark, text = item.encrypted_content[: len(MARK)], item.encrypted_content[len(MARK) :]
    try:
        notes = None
        if mark == MARK:
            notes = base64.b64decode(text, altchars=b"-_", validate=True).decode()
    except (binascii.Error, ValueError):
        notes = None
    if notes is None:
        raise InvalidRequest(
            "This service did not make the item, and cannot read it; send the messages that it stands for.",
            param=f"input[{place}].encrypted_content",
            code="invalid_encrypted_content",
        )
    return Message("user", (Text(PREFACE + notes),), labels=labels_on(item))


def is_notes(message: Message) -> bool:
    """Return True if a message was made of an item, and is none of the user's own."""
    return message.role == "user" and message.text.startswith(PREFACE)
