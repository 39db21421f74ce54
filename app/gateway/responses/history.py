"""Stored responses: the task that a response was made of, and the conversation at its end."""

from collections.abc import Iterable

import orjson
from msgspec import Struct
from msgspec.structs import replace

from app.core.message.chat import Message, Part, Text, ToolCall, message_from_json, task_from_json
from app.core.run.state import Exchange, RunState, StepState
from app.core.run.visibility import labels_in_run
from app.engine.calls.step_request import texts_of
from app.engine.delivery.messages import TurnEnd
from app.gateway.responses.reply import Subject
from app.store.protocol import ContentReads


class StoredResponse(Struct, frozen=True):
    """A response in its present state: `end` is None while it is in progress; `messages` is the conversation up to
    its end, where the caller of `conversation` added it."""

    subject: Subject
    end: TurnEnd | None
    messages: tuple[Message, ...] = ()

    @property
    def labels(self) -> frozenset[str]:
        """Return the labels of its conversation, of the results of tools in it, and thus of its output."""
        return labels_in_run(self.subject.state)


async def subject(store: ContentReads, state: RunState) -> Subject:
    """Return the subject of the state's present turn. Raises `NotFound` if content was erased."""
    texts = await texts_of(store, state.run, {state.admitted.task, state.turn.request})
    task = task_from_json(orjson.loads(texts[state.admitted.task]))
    turn_task = task
    if state.turn.request:
        turn_task = task_from_json(orjson.loads(texts[state.turn.request]))
    return Subject(state, task, turn_task)


async def conversation(store: ContentReads, response: StoredResponse) -> tuple[Message, ...]:
    """Return the visible messages up to the end of a response: without its instructions, which are not carried over."""
    messages = await read_input(store, response.subject)
    if response.end is not None and (response.end.answer or response.end.calls):
        parts = (Text(response.end.answer),) if response.end.answer else ()
        messages.append(Message("assistant", parts, calls=response.end.calls))
    return tuple(messages)


async def read_input(store: ContentReads, subject: Subject) -> list[Message]:
    """Return the visible messages that a response answers, without its instructions."""
    messages = list(subject.task.messages[1:] if subject.instructions is not None else subject.task.messages)
    for turn in range(subject.state.turn.number):
        messages += await _read_exchange(store, subject.state, turn)
    return messages


async def _read_exchange(store: ContentReads, state: RunState, turn: int) -> list[Message]:
    """Return a turn's calls of the caller's tools, as one message, and what came back, under the caller's ids."""
    uses: list[tuple[StepState, Exchange]] = []
    for step in state.steps.values():
        uses += [(step, use) for use in step.exchanges if use.turn == turn]
    uses.sort(key=lambda use: not use[0].answers)
    refs = {use.message for _, use in uses} | {use.results for _, use in uses}
    texts = await texts_of(store, state.run, refs)
    words: list[Part] = []
    calls: list[ToolCall] = []
    for step, use in uses:
        message = message_from_json(orjson.loads(texts[use.message]))
        calls += _with_caller_ids(use, message)
        if step.answers:
            words += message.parts
    return [
        Message("assistant", tuple(words), calls=tuple(calls)),
        *_result_messages(texts[use.results] for _, use in uses),
    ]


def _with_caller_ids(use: Exchange, message: Message) -> list[ToolCall]:
    return [replace(call, id=ours) for call, ours in zip(message.calls, use.ids, strict=True)]


def _result_messages(results: Iterable[str]) -> list[Message]:
    """Return the results by step, then what the user said along with them, which is stored with the results of every
    step that sees the user."""
    tool_messages: list[Message] = []
    user_messages: list[Message] = []
    for text in filter(None, results):
        messages = [message_from_json(message) for message in orjson.loads(text)]
        tool_messages += [message for message in messages if message.call_id]
        user_messages = user_messages or [message for message in messages if not message.call_id]
    return [*tool_messages, *user_messages]
