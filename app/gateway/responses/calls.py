"""Calls of tools and their outputs in a conversation of `/v1/responses`, each output right behind its calls.

OpenAI takes an output anywhere behind its call; workers want it next. Both refuse a call without its output, and an
output without its call. An output of a call of ours may come alone: its id leads to the run that waits for it.
"""

from collections import defaultdict, deque
from collections.abc import Iterable

from app.core.message.chat import Message, run_of
from app.errors import InvalidRequest


def pair_outputs(messages: Iterable[Message]) -> tuple[Message, ...]:
    """Return the messages with each output right behind its call. Raises `InvalidRequest`, which names only ids of
    ours."""
    messages = tuple(messages)
    _check_order(messages)
    call_ids = {call.id for message in messages for call in message.calls}
    outputs: defaultdict[str, deque[Message]] = defaultdict(deque)
    for message in messages:
        outputs[message.call_id].append(message)
    ordered, missing = list[Message](), list[str]()
    for message in messages:
        if not message.call_id or (message.call_id not in call_ids and run_of(message.call_id)):
            ordered.append(outputs[message.call_id].popleft())
        for call in message.calls:
            if waiting := outputs[call.id]:
                ordered.append(waiting.popleft())
            else:
                missing.append(call.id)
    if missing:
        names = ", ".join(filter(run_of, missing)) or f"{len(missing)} in all"
        text = f"Every call of a tool needs its output in the input. Missing are those of: {names}"
        raise InvalidRequest(text, param="input", code="tool_results_missing")
    if any(outputs.values()):
        raise unknown_call_error()
    return tuple(ordered)


def _check_order(messages: Iterable[Message]) -> None:
    """Raise `InvalidRequest` for an output that stands before the call that it answers, unless it is a call of ours."""
    call_ids: set[str] = set()
    for message in messages:
        call_ids.update(call.id for call in message.calls)
        if message.call_id and message.call_id not in call_ids and not run_of(message.call_id):
            raise unknown_call_error()


def unknown_call_error() -> InvalidRequest:
    """Return the error for an output that answers no call before it."""
    message = "An output in the input answers no call of the conversation; send the call's item before it, too."
    return InvalidRequest(message, param="input", code="unknown_tool_call")
