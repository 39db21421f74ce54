"""Drives of the official Python client, asynchronous."""

from collections.abc import Awaitable
from typing import Any

import openai
from openai import AsyncOpenAI

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


async def chat(client: AsyncOpenAI) -> Report:
    """Ask one question whole, streamed, and by the stream helper."""
    request_body: dict[str, Any] = {"model": "baton-mini", "messages": MESSAGES, "logprobs": True, "top_logprobs": 1}
    whole = await client.chat.completions.create(**request_body)
    text, finish, counted, tokens = "", None, None, []
    async for chunk in await client.chat.completions.create(
        **request_body, stream=True, stream_options={"include_usage": True}
    ):
        counted = chunk.usage or counted
        for choice in chunk.choices:
            text += choice.delta.content or ""
            finish = choice.finish_reason or finish
            tokens += [token.token for token in (choice.logprobs and choice.logprobs.content) or []]
    async with client.chat.completions.stream(**request_body) as stream:
        helped = await stream.get_final_completion()
    logprobs = whole.choices[0].logprobs
    return {
        "text": whole.choices[0].message.content,
        "finish": whole.choices[0].finish_reason,
        "tokens": [token.token for token in (logprobs and logprobs.content) or []],
        "usage": usage(whole.usage),
        "streamed": {"text": text, "finish": finish, "tokens": tokens, "usage": usage(counted)},
        "helped": helped.choices[0].message.content,
    }


async def tools(client: AsyncOpenAI) -> Report:
    """Each choice of tools whole and streamed; then the loop to its end, with the helper's own messages."""
    ask, report = client.chat.completions.create, dict[str, Any]()
    for name, choice in CHOICES.items():
        gathered = StreamedReply()
        async for chunk in await ask(**ASKED, **choice, stream=True, stream_options={"include_usage": True}):
            gathered.take(chunk)
        report[name] = {"whole": turn(await ask(**ASKED, **choice)), "streamed": gathered.report()}
    for helps in (False, True):
        messages = list(ASKED["messages"])
        while (message := await _read_message(client, ASKED | {"messages": messages}, helps)).tool_calls:
            results = [(call.id, call.function.name) for call in message.tool_calls]
            messages += [message, *({"role": "tool", "tool_call_id": id_, "content": name} for id_, name in results)]
        report["helped loop" if helps else "loop"] = message.content
    return report


async def _read_message(client: AsyncOpenAI, request_body: dict[str, Any], helps: bool) -> Any:
    if not helps:
        return (await client.chat.completions.create(**request_body)).choices[0].message
    async with client.chat.completions.stream(**request_body) as stream:
        return (await stream.get_final_completion()).choices[0].message


async def custom(client: AsyncOpenAI) -> Report:
    """Calls of free text whole and streamed, and their results."""
    ask, pieces = client.chat.completions.create, Pieces()
    (whole,) = (await ask(**CUSTOM)).choices
    async for chunk in await ask(**CUSTOM, stream=True):
        pieces.take(chunk)
    calls = whole.message.tool_calls or []
    results = [{"role": "tool", "tool_call_id": call.id, "content": call.type} for call in calls]
    last = await ask(**CUSTOM | {"messages": [*MESSAGES, whole.message, *results]})
    whole_calls = [describe_call(call) for call in calls]
    return {"whole": whole_calls, "streamed": pieces.calls, "last": last.choices[0].message.content}


async def models(client: AsyncOpenAI) -> Report:
    """The list, and one of it."""
    retrieved = await client.models.retrieve("baton-mini")
    return {"ids": [model.id async for model in client.models.list()], "one": retrieved.id}


async def errors(client: AsyncOpenAI) -> Report:
    """Return the errors that the client raises, before the first byte and after it."""
    stranger, ask = client.with_options(api_key="sk-wrong"), client.chat.completions.create

    async def stream() -> None:
        async for _ in await ask(model="baton-broken", messages=MESSAGES, stream=True):
            pass

    return {
        "model": await _report_error(ask(model="nothing", messages=MESSAGES)),
        "value": await _report_error(ask(model="baton-mini", messages=[])),
        "unknown": await _report_error(ask(model="baton-mini", messages=MESSAGES, extra_body={"foo": 1})),
        "key": await _report_error(stranger.models.list()),
        "route": await _report_error(client.embeddings.create(model="baton-mini", input="x")),
        "failed": await _report_error(ask(model="baton-broken", messages=MESSAGES)),
        "stream": await _report_error(stream()),
    }


async def _report_error(call: Awaitable[Any]) -> Report:
    try:
        await call
    except openai.APIError as error:
        return report_of_error(error)
    raise AssertionError("nothing was raised")
