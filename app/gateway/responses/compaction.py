"""`POST /v1/responses/compact`: a shorter conversation, as items that the next request sends in its place.

The user's messages come back word for word, and one `compaction` item stands for everything else. A run of the tier,
like any other, writes the notes that the item holds.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, Final

from msgspec.structs import replace
from pydantic import Field

from app.core.message.chat import Message, Task, Text
from app.core.run.identifiers import format_reply_id
from app.engine.delivery.messages import TurnEnd
from app.errors import Conflict, InvalidRequest, RunFailed
from app.gateway.chat.route import extension
from app.gateway.http.fault import AWAITING_APPROVAL
from app.gateway.responses.calls import pair_outputs, unknown_call_error
from app.gateway.responses.compaction_item import find_notes, item_of
from app.gateway.responses.input import Item
from app.gateway.responses.items import message_item
from app.gateway.responses.reply import Subject, usage_of
from app.gateway.responses.request import ResponsesRequest, new_messages, validate_body
from app.gateway.wire.parameters import COMPACTION

FORMAT: Final = "compaction"
IDENTIFIER: Final = "safety_identifier"
PROMPT: Final = (
    "Write the notes from which you could go on with this conversation without its messages. The user's messages will "
    "be kept word for word; everything else will be gone. State the instructions that are in force; what was done and "
    "found out, with exact names, paths, numbers and the results of tools that still matter; what was decided and why; "
    "what is left to do. Do not go on with the task. Answer with the notes alone."
)


class CompactionRequest(ResponsesRequest):
    """The fields that `COMPACTION` names are read."""

    input: str | Annotated[list[Item], Field(max_length=2_048, fail_fast=True)] = []


def read_request(body: Mapping[str, Any]) -> tuple[CompactionRequest, tuple[str, ...]]:
    """Return the request, and the names of parameters that are ignored; raises `InvalidRequest` naming the field at
    fault."""
    return validate_body(body, COMPACTION, CompactionRequest, omits_search=True)


def task_of(request: ResponsesRequest, before: Sequence[Message]) -> Task:
    """Return the task of the run that writes the notes; raises `InvalidRequest`.

    Calls get other ids than they had: a run that waits for their results is not to go on with them here.
    """
    conversation = _with_new_ids(pair_outputs((*before, *new_messages(request))))
    if not conversation:
        raise InvalidRequest(
            "There is nothing to compact: send input, or previous_response_id.",
            param="input",
            code="missing_required_parameter",
        )
    first = (Message("developer", (Text(request.instructions),)),) if request.instructions else ()
    return Task((*first, *conversation, Message("user", (Text(PROMPT),))))


def for_user_of(earlier: Task, task: Task) -> Task:
    """Return the task with the end user of the conversation that it goes on with: this route's requests name none, and
    the run has words of that user, by whose name it must be found where they are erased or held."""
    name = earlier.echoed.get(IDENTIFIER)
    if name is not None:
        task = replace(task, echoed={IDENTIFIER: name})
    return replace(task, user=earlier.user)


def _with_new_ids(messages: Iterable[Message]) -> list[Message]:
    ids: dict[str, str] = {}
    renumbered: list[Message] = []
    for message in messages:
        for call in message.calls:
            ids[call.id] = f"call_{len(ids)}"
        calls = tuple(replace(call, id=ids[call.id]) for call in message.calls)
        if message.call_id and message.call_id not in ids:
            raise unknown_call_error()
        renumbered.append(replace(message, calls=calls, call_id=ids.get(message.call_id, "")))
    return renumbered


def require_notes(end: TurnEnd) -> None:
    """Raise `Conflict` while the notes wait for an approval of their plan, and `RunFailed` if there are none: a caller
    would send an empty item, or a refusal, in the place of its conversation."""
    if end.state.state == AWAITING_APPROVAL:
        raise Conflict(
            "The plan for the notes waits for an approval, so there are none yet: keep the conversation as it is. The "
            "same request with its Idempotency-Key gets the notes once the plan is approved.",
            code=AWAITING_APPROVAL,
        )
    if not end.answer or end.refusal:
        message = "No worker has written notes: keep the conversation as it is."
        raise RunFailed(message, code="no_notes", run=end.state.run)


def compaction_reply(subject: Subject, end: TurnEnd) -> dict[str, Any]:
    """Return a `response.compaction`: the user's messages, and the item that stands for everything else."""
    run, conversation = subject.state.run, subject.task.messages[:-1]
    labels = sorted(subject.state.admitted.labels)
    marks = {"baton": {"labels": labels}} if labels else {}
    user_messages = [message for message in conversation if message.role == "user" and find_notes(message) is None]
    output = [message_item(f"{run}_in{place}", message) | marks for place, message in enumerate(user_messages)]
    output.append(item_of(run, end.answer) | marks)
    return {
        "id": format_reply_id(FORMAT, run, 0),
        "object": "response.compaction",
        "created_at": int(subject.state.turn.at),
        "output": output,
        "usage": usage_of(end.bill),
        "baton": extension(end),
    }
