"""The replies of `/v1/responses`: the response object and the events of its stream.

Both are written from the journal and the stored task alone, so that any process can give them again. A response is one
turn of a run: `resp_<run>` is the first, `resp_<run>_<n>` the one that began with the n-th tool results.

Sequence numbers never fall and never change: they say how much of the reply was sent (`run/caller_view.py`). Attempts
of earlier turns do not count.

    0, 1                       response.created, response.in_progress
    2, 3                       the message's item and its part are there
    3 + n                      its first n characters were sent
    3 + length + 1, 2, 3       text, part and item are done
    + 1, + 1, + 1, + 1         of a hosted search before a call: search added, done; its output added, done
    + 1, + m, + 1, + 1         of each function call: added, m characters of arguments, arguments done, item done
    + 1                        the response is over
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any, Final

import orjson
from msgspec import Struct
from msgspec.structs import replace

from app.core.message.chat import Form, Task, ToolCall
from app.core.run import caller_view
from app.core.run.caller_view import Bill, Position
from app.core.run.notices import response_id
from app.core.run.state import RunState
from app.engine.delivery.messages import AnswerPart, StepEvent, TurnEnd
from app.errors import BatonError, RunOutOfQuota, RunOverBudget, RunRefused, RunTooLong
from app.gateway.chat.route import extension
from app.gateway.http import fault
from app.gateway.responses import tool_search
from app.gateway.responses.tools import call_item, hosted_search_items, item_id, kind_of, response_tools, tool_choice_of
from app.gateway.wire.call_sequence import CallSequence

ID: Final = re.compile(r"resp_(run_[0-9a-z]{1,64})(?:_([1-9][0-9]{0,5}))?")
IN_PROGRESS, OPENING, TEXT = 1, 2, 3
"""Numbers before the message's first event, and before its first character."""
FINAL, COMMENTARY = "final_answer", "commentary"
"""Phases of a message: the answer, and the text before calls of tools."""
INCOMPLETE: Final = {"length": "max_output_tokens", "content_filter": "content_filter"}


def parse_id(text: str) -> tuple[str, int] | None:
    """Run and turn of a response's id; None if it is none."""
    match = ID.fullmatch(text)
    if not match:
        return None
    return (match[1], int(match[2] or 0))


class Subject(Struct, frozen=True):
    """The source of a response: the state and the task of its run."""

    state: RunState
    task: Task
    turn_task: Task
    """The sampling parameters and tools of the request that began this turn."""

    @property
    def id(self) -> str:
        """Return the response's id."""
        return response_id(self.state.run, self.state.turn.number)

    @property
    def instructions(self) -> str | None:
        """Return the instructions in force: those that the run began with, as its first message; None without any."""
        if not self.state.admitted.wire.get("instructions"):
            return None
        return self.task.messages[0].text


def render_response(subject: Subject, end: TurnEnd | None) -> dict[str, Any]:
    """Return the response object: as it ended, or, with None, under way."""
    state, wire = subject.state, subject.state.turn.wire
    status = status_of(subject, end)
    echoed = subject.turn_task.echoed
    body: dict[str, Any] = {
        "id": subject.id,
        "object": "response",
        "created_at": int(state.turn.at),
        "status": status,
        "background": bool(wire.get("background")),
        "completed_at": int(state.replied_at) if status == "completed" else None,
        "error": _error(end),
        "incomplete_details": _describe_incompleteness(end, status),
        "instructions": subject.instructions,
        "max_output_tokens": subject.turn_task.sampling.max_tokens,
        "max_tool_calls": echoed.get("max_tool_calls"),
        "model": state.admitted.tier,
        "output": items(subject, end, _message_status(status)) if end else [],
        "parallel_tool_calls": echoed.get("parallel_tool_calls", subject.turn_task.toolbox.parallel),
        "previous_response_id": wire.get("previous"),
        "prompt_cache_key": echoed.get("prompt_cache_key"),
        "prompt_cache_retention": (echoed.get("prompt_cache_retention") or "").replace("-", "_") or None,
        "reasoning": {"effort": wire.get("effort"), "summary": wire.get("summary")},
        "safety_identifier": echoed.get("safety_identifier"),
        "service_tier": "default",
        "temperature": subject.turn_task.sampling.temperature,
        "text": {"format": _format(subject.turn_task.form)} | _verbosity(echoed),
        "tool_choice": echoed.get("tool_choice") or tool_choice_of(subject.turn_task.toolbox),
        "tools": echoed.get("tools") or response_tools(subject.turn_task.toolbox),
        "top_logprobs": subject.turn_task.logprobs or 0,
        "top_p": subject.turn_task.sampling.top_p,
        "truncation": echoed.get("truncation", "disabled"),
        "usage": usage_of(end.bill) if end is not None and status != "queued" else None,
        "user": echoed.get("user", subject.task.user),
        "metadata": dict(echoed.get("metadata", subject.task.metadata)),
    }
    if end is not None:
        return body | {"baton": extension(end)}
    return body


def _message_status(status: str) -> str:
    if status == "incomplete":
        return "incomplete"
    return "completed"


def status_of(subject: Subject, end: TurnEnd | None) -> str:
    """Return the status of a turn in OpenAI's words: a background one is queued until its first call."""
    if end is None:
        if subject.state.turn.wire.get("background") and not subject.state.calls:
            return "queued"
        return "in_progress"
    if end.state.state == "awaiting_approval":
        return "queued"
    if end.error is not None:
        if end.state.state == "cancelled":
            return "cancelled"
        return "failed"
    if end.finish in INCOMPLETE:
        return "incomplete"
    return "completed"


def items(subject: Subject, end: TurnEnd, status: str) -> list[dict[str, Any]]:
    """Return the output: the message, if anything was said, then the calls, behind what has found their tools."""
    output: list[dict[str, Any]] = []
    if end.state.state == "awaiting_approval":
        return output
    if end.answer or not (end.calls or end.error):
        part = _part(end.answer, end.logprobs, end.refusal)
        phase = COMMENTARY if end.calls else FINAL
        output.append(message_item(subject, [part], status, phase))
    toolbox = subject.turn_task.toolbox
    for at, call in enumerate(end.calls):
        output += hosted_search_items(toolbox, call, end.calls[:at])
        output.append(call_item(toolbox, call, "completed"))
    return output


def message_item(subject: Subject, content: list[dict[str, Any]], status: str, phase: str | None) -> dict[str, Any]:
    """Return the assistant's message. The `phase` is None while calls of tools may still follow the text."""
    head = {"id": message_id(subject), "type": "message", "status": status, "role": "assistant"}
    return head | {"content": content, "phase": phase}


def message_id(subject: Subject) -> str:
    """Return the id of the message of a response."""
    return subject.id.replace("resp_", "msg_", 1)


def usage_of(bill: Bill) -> dict[str, Any]:
    """Return the visible tokens, and those of the orchestration apart (DESIGN §6)."""
    visible, orchestration = bill.visible, bill.orchestration
    return {
        "input_tokens": visible.input,
        "input_tokens_details": {
            "cached_tokens": visible.cached,
            "cache_write_tokens": 0,
            "orchestration_input_tokens": orchestration.input,
            "orchestration_input_cached_tokens": orchestration.cached,
        },
        "output_tokens": visible.output,
        "output_tokens_details": {
            "reasoning_tokens": visible.reasoning,
            "orchestration_output_tokens": orchestration.output,
        },
        "total_tokens": visible.input + visible.output,
    }


def _part(text: str, logprobs: Any, refusal: bool) -> dict[str, Any]:
    if refusal:
        return {"type": "refusal", "refusal": text}
    tokens = [_token(token) for token in logprobs or ()]
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": tokens}


def _token(token: Mapping[str, Any]) -> dict[str, Any]:
    """Return a token of the whole part: each has its bytes, which a worker of this format does not send while it
    streams."""
    alternatives = [_with_bytes(alternative) for alternative in token["top_logprobs"]]
    return _with_bytes(token) | {"top_logprobs": alternatives}


def _with_bytes(token: Mapping[str, Any]) -> dict[str, Any]:
    token_bytes = token["bytes"]
    if token_bytes is None:
        token_bytes = list(token["token"].encode())
    return _without_bytes(token) | {"bytes": token_bytes}


def _drop_token_bytes(logprobs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return log-probabilities as events have them: without the tokens' bytes, which the whole part has."""
    streamed: list[dict[str, Any]] = []
    for token in logprobs:
        alternatives = [_without_bytes(alternative) for alternative in token["top_logprobs"]]
        streamed.append(_without_bytes(token) | {"top_logprobs": alternatives})
    return streamed


def _without_bytes(token: Mapping[str, Any]) -> dict[str, Any]:
    return {"token": token["token"], "logprob": token["logprob"]}


def _error(end: TurnEnd | None) -> dict[str, Any] | None:
    if end is None or end.error is None or end.state.state == "cancelled":
        return None
    fault_body = fault.describe(end.error)["error"]
    return {"code": _code(end.error), "message": fault_body["message"]}


def _code(error: BatonError) -> str:
    """Return the code of a response's error; clients compact a conversation on `context_length_exceeded`, and send a
    request again on `rate_limit_exceeded`, which would spend a budget once more."""
    if isinstance(error, RunTooLong):
        return RunTooLong.code
    if isinstance(error, RunRefused):
        return "invalid_prompt"
    if isinstance(error, RunOutOfQuota | RunOverBudget):
        return RunOutOfQuota.code
    if error.status == 429:
        return "rate_limit_exceeded"
    return "server_error"


def _describe_incompleteness(end: TurnEnd | None, status: str) -> dict[str, Any] | None:
    if end is not None and status == "incomplete":
        return {"reason": INCOMPLETE[end.finish]}
    return None


def _verbosity(echoed: Mapping[str, Any]) -> dict[str, Any]:
    if "verbosity" not in echoed:
        return {}
    return {"verbosity": echoed["verbosity"]}


def _format(form: Form | None) -> dict[str, Any]:
    if form is None:
        return {"type": "text"}
    if form.schema is None:
        return {"type": "json_object"}
    fields = {"name": form.name, "description": form.description or None, "strict": form.strict}
    return {"type": "json_schema", **fields, "schema": form.schema}


class Events:
    """The frames of one stream; those up to the sequence number `after` are left out."""

    ping = b": ping\n"

    def __init__(self, subject: Subject, after: int | None = None) -> None:
        self._subject = subject
        self._after = -1 if after is None else after
        self._base = 0
        """The number at which the present attempt begins."""
        if self._after >= 0:
            self._base = self._after - self._after % caller_view.ATTEMPT
        self._text = ""
        self._at = 0
        """The number of the latest event, within its attempt."""
        self._has_message = self._message_done = self._open_call = self._refused = False
        self._is_changed = False
        """True if the caller has text of another attempt than the one that is sent now."""
        self._index = -1
        self._calls: list[ToolCall] = []
        self._sequence = CallSequence()

    def opening(self) -> bytes:
        """Return the events that the response exists, and that it is in progress."""
        under_way = render_response(self._subject, None) | {"status": "in_progress"}
        created = self._event("response.created", 0, response=under_way)
        return created + self._event("response.in_progress", IN_PROGRESS, response=under_way)

    def answer_part(self, part: AnswerPart) -> bytes:
        """Return more of the text, or of the calls behind it. Text behind a call, as servers of open models send it
        now and then, has no place there any more: it comes with the whole response at the end."""
        if part.at:
            attempt = caller_view.read_position(part.at).attempt - part.earlier_attempts
            base, has_sent = Position(attempt).number, bool(self._text or self._calls)
            self._is_changed |= base != self._base and self._after > self._base + TEXT and not has_sent
            self._base = base
        if self._is_changed:
            return b""
        self._refused |= part.refusal
        frames = self._more_text(part) if part.text and not self._calls else b""
        for delta in self._sequence.take(part.calls):
            if delta.index >= len(self._calls):
                frames += self._end_block() + self._begin_call(ToolCall(delta.id, delta.name, ""))
            if delta.arguments:
                frames += self._more_arguments(delta.arguments)
        return frames

    def step_event(self, event: StepEvent) -> bytes:
        """Return a step's event, as a comment: clients check the types of events. No blank line follows it: see
        `Frames.ping`."""
        return b": baton " + orjson.dumps({"event": event.kind, **event.body}) + b"\n"

    def closing(self, end: TurnEnd) -> bytes:
        """Return all events that were not sent yet, and the end. While a plan waits for an approval that is
        `response.queued`, with the number of the event before it, behind which the stream goes on once it is
        approved."""
        if end.state.state == "awaiting_approval":
            number = max(self._after, self._base + self._at)
            response = render_response(self._subject_at(end), end)
            queued = {"type": "response.queued", "sequence_number": number, "response": response}
            return b"event: response.queued\ndata: %s\n\n" % orjson.dumps(queued)
        if self._is_changed:
            return self._error_event(caller_view.answer_changed_error(end.state.run))
        frames = b""
        response = render_response(self._subject_at(end), end)
        if not (self._has_message or self._calls or end.calls):
            frames += self._begin_message()
        for call in end.calls[len(self._calls) :]:
            frames += self._end_block() + self._begin_call(ToolCall(call.id, call.name, ""))
            frames += self._more_arguments(call.arguments)
        frames += self._end_block(end.logprobs, response["status"], FINAL)
        number = self._at + 1
        if response["status"] == "incomplete":  # no journal says how much was sent of calls that were cut off
            number = max(number, self._after - self._base + 1)
        frames += self._event(f"response.{response['status']}", number, response=response)
        is_unknown = self._after > self._base + self._at
        if is_unknown:
            return self._error_event(caller_view.unknown_event_error())
        return frames

    def failure(self, error: BatonError, end: TurnEnd) -> bytes:
        """Return the end of a run that failed, or of a stream that is broken. No journal says how much text of a failed
        run was sent, so its end comes behind any event that the caller names."""
        if end.state.ended and end.state.state != "succeeded":
            number = max(self._at, self._after - self._base) + 1
            return self._event("response.failed", number, response=render_response(self._subject_at(end), end))
        return self._error_event(error)  # the stream alone is broken: it can be resumed

    def _error_event(self, error: BatonError) -> bytes:
        body = fault.describe(error)["error"] | {"type": "error", "sequence_number": self._base + self._at}
        return b"event: error\ndata: %s\n\n" % orjson.dumps(body)

    def _subject_at(self, end: TurnEnd) -> Subject:
        return Subject(end.state, self._subject.task, self._subject.turn_task)

    def _begin_message(self) -> bytes:
        self._has_message, self._index = True, self._index + 1
        toolbox = self._subject.turn_task.toolbox
        may_call = bool(toolbox.tools) and toolbox.choice != "none"
        item = message_item(self._subject, [], "in_progress", None if may_call else FINAL)
        added = self._event("response.output_item.added", OPENING, output_index=self._index, item=item)
        part = _part("", (), self._refused)
        return added + self._event("response.content_part.added", TEXT, **self._place(), part=part)

    def _more_text(self, part: AnswerPart) -> bytes:
        frames = b"" if self._has_message else self._begin_message()
        sent_chars = max(self._after - self._base - TEXT - len(self._text), 0)
        self._text += part.text
        number = TEXT + len(self._text)
        fields: dict[str, Any] = self._place() | {"delta": part.text[sent_chars:]}
        if not self._refused:
            fields["logprobs"] = _drop_token_bytes(part.logprobs)
        return frames + self._event(f"response.{self._kind()}.delta", number, **fields)

    def _kind(self) -> str:
        return "refusal" if self._refused else "output_text"

    def _place(self) -> dict[str, Any]:
        """Return the place of the message's part; the message comes first."""
        return {"item_id": message_id(self._subject), "output_index": 0, "content_index": 0}

    def _end_block(self, logprobs: Any = None, status: str = "completed", phase: str = COMMENTARY) -> bytes:
        """Close what is open: the message, or the latest call. The phase is that of a message that calls follow."""
        if self._calls and self._open_call:
            return self._end_call(status)
        if not self._has_message or self._message_done:
            return b""
        self._message_done = True
        part = _part(self._text, logprobs, self._refused)
        content: dict[str, Any] = {"refusal": self._text}
        if not self._refused:
            content = {"text": self._text, "logprobs": _drop_token_bytes(logprobs or ())}
        item = message_item(self._subject, [part], status, phase)
        number = TEXT + len(self._text)
        frames = self._event(f"response.{self._kind()}.done", number + 1, **self._place(), **content)
        frames += self._event("response.content_part.done", number + 2, **self._place(), part=part)
        return frames + self._event("response.output_item.done", number + 3, output_index=self._index, item=item)

    def _begin_call(self, call: ToolCall) -> bytes:
        self._at = max(self._at, TEXT + len(self._text) + 3)
        toolbox = self._subject.turn_task.toolbox
        frames = b""
        for item in hosted_search_items(toolbox, call, self._calls):
            frames += self._search_item(item)
        self._calls.append(call)
        self._open_call, self._index = True, self._index + 1
        item = call_item(toolbox, call, "in_progress")
        return frames + self._event("response.output_item.added", self._at + 1, output_index=self._index, item=item)

    def _search_item(self, item: Mapping[str, Any]) -> bytes:
        """Return an item of a hosted search, from its beginning to its end."""
        self._index += 1
        kind, place = "response.output_item", {"output_index": self._index}
        added = self._event(f"{kind}.added", self._at + 1, **place, item=tool_search.in_progress(item))
        return added + self._event(f"{kind}.done", self._at + 1, **place, item=item)

    def _more_arguments(self, text: str) -> bytes:
        call, toolbox = self._calls[-1], self._subject.turn_task.toolbox
        sent_chars = max(self._after - self._base - self._at, 0)
        self._calls[-1] = call = replace(call, arguments=call.arguments + text)
        if kind_of(toolbox, call.name) != "function":  # a text inside JSON is sent when it is whole
            self._at += len(text)
            return b""
        place = {"item_id": item_id(toolbox, call), "output_index": self._index}
        return self._event(
            "response.function_call_arguments.delta", self._at + len(text), **place, delta=text[sent_chars:]
        )

    def _end_call(self, status: str) -> bytes:
        call = self._calls[-1]
        self._open_call = False
        toolbox = self._subject.turn_task.toolbox
        place = {"item_id": item_id(toolbox, call), "output_index": self._index}
        item = call_item(toolbox, call, status)
        kind, frames = kind_of(toolbox, call.name), b""
        if kind == "custom":
            custom = "response.custom_tool_call_input"
            frames = self._event(f"{custom}.delta", self._at, **place, delta=item["input"])
            frames += self._event(f"{custom}.done", self._at + 1, **place, input=item["input"])
        elif kind == "function":
            fields = {"arguments": call.arguments, "name": item["name"]}
            frames = self._event("response.function_call_arguments.done", self._at + 1, **place, **fields)
        return frames + self._event("response.output_item.done", self._at + 1, output_index=self._index, item=item)

    def _event(self, kind: str, number: int, **fields: object) -> bytes:
        """Return one frame, or nothing if the caller has received it before."""
        self._at, at = number, self._base + number
        if at <= self._after:
            return b""
        body = orjson.dumps({"type": kind, "sequence_number": at, **fields})
        return b"id: %d\nevent: %s\ndata: %s\n\n" % (at, kind.encode(), body)
