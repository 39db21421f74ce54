"""The `compaction` item of `/v1/responses`: notes of a conversation, in the place of all but the user's messages.

`encrypted_content` is an encoding and no cipher: the notes say nothing that the caller has not sent or received. So any
process can read an item, and it outlives the run that wrote it.
"""

import base64
import binascii
from typing import Annotated, Any, Final, Literal

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


def item_of(name: str, notes: str) -> dict[str, Any]:
    """Return the item of some notes, as replies have it; `name` is its id without the prefix."""
    encoded = MARK + base64.urlsafe_b64encode(notes.encode()).decode()
    return {"id": f"cmp_{name}", "type": "compaction", "encrypted_content": encoded}


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


def find_notes(message: Message) -> str | None:
    """Return the notes of a message that was made of an item; None for every other message."""
    if message.role != "user" or not message.text.startswith(PREFACE):
        return None
    return message.text.removeprefix(PREFACE)
