"""Drives of the official Python client, synchronous."""

from typing import Any

import openai
from openai import OpenAI

from tests.clients.reports import (
    ASKED,
    CHOICES,
    CUSTOM,
    MESSAGES,
    Pieces,
    Report,
    StreamedReply,
    describe_call,
    report_of_error,
    turn,
    usage,
)


def chat(client: OpenAI) -> Report:
    """Ask one question whole, streamed, and by the stream helper."""
    request_body: dict[str, Any] = {"model": "baton-mini", "messages": MESSAGES, "logprobs": True, "top_logprobs": 1}
    whole = client.chat.completions.create(**request_body)
    text, finish, counted, tokens = "", None, None, []
    for chunk in client.chat.completions.create(**request_body, stream=True, stream_options={"include_usage": True}):
        counted = chunk.usage or counted
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
            tokens += [token.token for token in (choice.logprobs and choice.logprobs.content) or []]
    with client.chat.completions.stream(**request_body) as stream:
        helped = stream.get_final_completion()
    logprobs = whole.choices[0].logprobs
    return {
        "text": whole.choices[0].message.content,
        "finish": whole.choices[0].finish_reason,
        "tokens": [token.token for token in (logprobs and logprobs.content) or []],
        "usage": usage(whole.usage),
        "streamed": {"text": text, "finish": finish, "tokens": tokens, "usage": usage(counted)},
        "helped": helped.choices[0].message.content,
    }


def tools(client: OpenAI) -> Report:
    """Each choice of tools whole and streamed; then the loop to its end, with the helper's own messages."""
    ask, report = client.chat.completions.create, dict[str, Any]()
    for name, choice in CHOICES.items():
        gathered = StreamedReply()
        for chunk in ask(**ASKED, **choice, stream=True, stream_options={"include_usage": True}):
            gathered.take(chunk)
        report[name] = {"whole": turn(ask(**ASKED, **choice)), "streamed": gathered.report()}
    for helps in (False, True):
        messages = list(ASKED["messages"])
        while (message := _read_message(client, ASKED | {"messages": messages}, helps)).tool_calls:
            results = [(call.id, call.function.name) for call in message.tool_calls]
            messages += [message, *({"role": "tool", "tool_call_id": id_, "content": name} for id_, name in results)]
        report["helped loop" if helps else "loop"] = message.content
    return report


def _read_message(client: OpenAI, request_body: dict[str, Any], helps: bool) -> Any:
    if not helps:
        return client.chat.completions.create(**request_body).choices[0].message
    with client.chat.completions.stream(**request_body) as stream:
        return stream.get_final_completion().choices[0].message


def custom(client: OpenAI) -> Report:
    """Calls of free text whole and streamed, and their results."""
    ask, pieces = client.chat.completions.create, Pieces()
    (whole,) = (ask(**CUSTOM)).choices
    for chunk in ask(**CUSTOM, stream=True):
        pieces.take(chunk)
    calls = whole.message.tool_calls or []
    results = [{"role": "tool", "tool_call_id": call.id, "content": call.type} for call in calls]
    last = ask(**CUSTOM | {"messages": [*MESSAGES, whole.message, *results]})
    whole_calls = [describe_call(call) for call in calls]
    return {"whole": whole_calls, "streamed": pieces.calls, "last": last.choices[0].message.content}


def models(client: OpenAI) -> Report:
    """The list, and one of it."""
    return {"ids": [model.id for model in client.models.list()], "one": client.models.retrieve("baton-mini").id}


def errors(client: OpenAI) -> Report:
    """Return the errors that the client raises, before the first byte and after it."""
    stranger = client.with_options(api_key="sk-wrong")
    return {
        "model": _report_error(lambda: client.chat.completions.create(model="nothing", messages=MESSAGES)),
        "value": _report_error(lambda: client.chat.completions.create(model="baton-mini", messages=[])),
        "unknown": _report_error(
            lambda: client.chat.completions.create(model="baton-mini", messages=MESSAGES, extra_body={"foo": 1})
        ),
        "key": _report_error(lambda: stranger.models.list()),
        "route": _report_error(lambda: client.embeddings.create(model="baton-mini", input="x")),
        "failed": _report_error(lambda: client.chat.completions.create(model="baton-broken", messages=MESSAGES)),
        "stream": _report_error(
            lambda: list(client.chat.completions.create(model="baton-broken", messages=MESSAGES, stream=True))
        ),
    }


def _report_error(call: Any) -> Report:
    try:
        call()
    except openai.APIError as error:
        return report_of_error(error)
    raise AssertionError("nothing was raised")
