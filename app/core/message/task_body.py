"""The bytes of a task in the content store, whole, and in the parts that the turns of a conversation have in common.

Callers send the whole conversation with every turn. Its bytes are therefore cut where turns begin and end: before and
after each message of the assistant. The later turn of a conversation then begins with the very parts of the one before.
Whatever is stored in this form must stay readable: neither `SPOKEN` nor the order of a task's fields may change.
"""

from collections.abc import Iterator, Sequence

import orjson

from app.core.message.chat import Message, Task, task_to_json
from app.core.records import record

BEGINNING = b'{"messages":['
SPOKEN = (b',{"role":"assistant","parts":[{"text":', b'}],"name":null}')
"""The bytes around the text of an assistant's message that has nothing else."""
LASTING = ("toolbox", "form", "logprobs")
"""The last fields of a task, which hardly change from turn to turn."""


@record(frozen=True, slots=True)
class TaskParts:
    """The bytes of a task in parts, which are the whole if they are joined."""

    head: tuple[bytes, ...]
    """The conversation, cut at its turns."""
    body: bytes
    """The fields that follow it."""
    tail: bytes
    """The fields `LASTING` with the end of the task."""

    @property
    def whole(self) -> bytes:
        """The parts, joined."""
        return b"".join((*self.head, self.body, self.tail))


def whole(task: Task) -> bytes:
    """The bytes of a task. Raises what `orjson` does for a value that is not JSON."""
    return orjson.dumps(task_to_json(task), default=dict)


def in_parts(task: Task) -> TaskParts:
    """The bytes of a task in parts: the same bytes as `whole`."""
    fields = task_to_json(task)
    head = tuple(_head(task.messages, fields.pop("messages")))
    lasting = {name: fields.pop(name) for name in LASTING if name in fields}
    beginning = b"" if head else BEGINNING
    body = beginning + b"]," + orjson.dumps(fields, default=dict)[1:-1]
    tail = b"," + orjson.dumps(lasting, default=dict)[1:] if lasting else b"}"
    return TaskParts(head, body, tail)


def _head(messages: Sequence[Message], values: Sequence[object]) -> Iterator[bytes]:
    part = BEGINNING
    for place, (message, value) in enumerate(zip(messages, values, strict=True)):
        turns = message.role == "assistant"
        if turns and place:
            yield part
            part = b""
        part += (b"," if place else b"") + orjson.dumps(value, default=dict)
        if turns:
            yield part
            part = b""
    if part and messages:
        yield part


def message_spoken(text: bytes) -> bytes:
    """The part of a conversation that is an assistant's message with this text and nothing else."""
    return orjson.dumps(text.decode(errors="replace")).join(SPOKEN)


def text_spoken(part: bytes) -> bytes | None:
    """The text of such a part of a conversation; None for any other part."""
    before, after = SPOKEN
    if not (part.startswith(before) and part.endswith(after)):
        return None
    written = part[len(before) : -len(after)]
    try:
        text = orjson.loads(written)
    except orjson.JSONDecodeError:
        return None
    same = isinstance(text, str) and orjson.dumps(text) == written
    return text.encode() if same else None
