"""A fast OpenAI-compatible upstream, so that what is measured is never the worker.

The path prefix sets the behaviour, each part optional: `/d<ms>/c<chunks>/g<gap_us>/t<calls>/v1/chat/completions`. It
streams when the body has `"stream": true`, and sends a usage frame when that asks for it; with `t` it calls tools
instead of an answer. `python -m tests.bench.upstream` is one process on one core.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import re
from functools import lru_cache
from typing import Any, cast

import httptools
import uvloop

CONTENT = "The answer is forty-two. " * 24
USAGE = {
    "prompt_tokens": 120,
    "completion_tokens": 150,
    "total_tokens": 270,
    "prompt_tokens_details": {"cached_tokens": 0},
    "completion_tokens_details": {"reasoning_tokens": 0},
}
HEAD = {"id": "chatcmpl-bench", "created": 1_760_000_000, "model": "bench", "system_fingerprint": None}
STREAM_HEAD = (
    b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\nCache-Control: no-cache\r\n"
    b"Transfer-Encoding: chunked\r\n\r\n"
)
TICK_US = 1000
ARGUMENTS = '{"path": "src/orchestration/queues.py"}'
PIECE = 4
"""Characters of arguments in a frame."""
_PART = re.compile(rb"/([dcgt])(\d+)")
_STREAMS = re.compile(rb'"stream"\s*:\s*true')
_WANTS_USAGE = re.compile(rb'"include_usage"\s*:\s*true')


def _frame(data: str) -> bytes:
    event = f"data: {data}\n\n".encode()
    return b"%x\r\n%s\r\n" % (len(event), event)


def _chunk(choices: list[dict[str, Any]], **more: Any) -> bytes:
    return _frame(json.dumps({**HEAD, "object": "chat.completion.chunk", "choices": choices, **more}))


def _delta(delta: dict[str, Any], finish: str | None = None) -> bytes:
    return _chunk([{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}])


def _document(calls: int = 0) -> bytes:
    message: dict[str, Any] = {"role": "assistant", "content": CONTENT, "refusal": None}
    if calls:
        message |= {"content": None, "tool_calls": [_call(number, ARGUMENTS) for number in range(calls)]}
    finish = "tool_calls" if calls else "stop"
    choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
    body = json.dumps({**HEAD, "object": "chat.completion", "choices": [choice], "usage": USAGE}).encode()
    return b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body)


def _call(number: int, arguments: str) -> dict[str, Any]:
    function = {"name": "read_file", "arguments": arguments}
    return {"id": f"call_bench{number}", "type": "function", "function": function}


@lru_cache(maxsize=16)
def reply_with_calls(calls: int, stream: bool) -> bytes:
    """Return a reply that calls tools: whole, or all of its stream but the end."""
    if not stream:
        return _document(calls)
    frames = b""
    for number in range(calls):
        frames += _delta({"tool_calls": [{"index": number, **_call(number, "")}]})
        for at in range(0, len(ARGUMENTS), PIECE):
            piece = {"index": number, "function": {"arguments": ARGUMENTS[at : at + PIECE]}}
            frames += _delta({"tool_calls": [piece]})
    return FIRST + frames + _delta({}, "tool_calls")


DOCUMENT = _document()
FIRST = STREAM_HEAD + _delta({"role": "assistant", "content": ""})
TOKEN = _delta({"content": " token"})
FINISH = _delta({}, "stop")
USAGE_FRAME = _chunk([], usage=USAGE)
DONE = _frame("[DONE]") + b"0\r\n\r\n"
NOTHING = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


@lru_cache(maxsize=256)
def behaviour(path: bytes) -> tuple[float, int, int, int]:
    """Delay in seconds, chunks, gap in microseconds, tool calls."""
    parts = {name: int(value) for name, value in _PART.findall(path)}
    return parts.get(b"d", 0) / 1000, parts.get(b"c", 100), parts.get(b"g", 0), parts.get(b"t", 0)


class Worker(asyncio.Protocol):
    """One keep-alive connection; one request at a time."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._parser = httptools.HttpRequestParser(self)
        self._path, self._body = b"", bytearray()
        self._left = 0
        self._timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)  # uvloop's is one in all but name

    def connection_lost(self, problem: Exception | None) -> None:
        """Stop what was to be sent."""
        if self._timer is not None:
            self._timer.cancel()

    def data_received(self, data: bytes) -> None:
        """Feed the parser; what it cannot read ends the connection."""
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError:
            self._transport.close()

    def on_message_begin(self) -> None:
        """A new request."""
        self._path, self._body = b"", bytearray()

    def on_url(self, url: bytes) -> None:
        """A piece of the path."""
        self._path += url

    def on_body(self, body: bytes) -> None:
        """A piece of the body."""
        self._body += body

    def on_message_complete(self) -> None:
        """Answer now, or after the delay."""
        if not self._body:
            self._transport.write(NOTHING)
            return
        delay, chunks, gap, calls = behaviour(self._path)
        stream = _STREAMS.search(self._body) is not None
        if delay:
            self._timer = self._loop.call_later(delay, self._answer, stream, chunks, gap, calls)
        else:
            self._answer(stream, chunks, gap, calls)

    def _answer(self, stream: bool, chunks: int, gap: int, calls: int) -> None:
        if not stream:
            self._transport.write(reply_with_calls(calls, False) if calls else DOCUMENT)
            return
        rest = (USAGE_FRAME if _WANTS_USAGE.search(self._body) else b"") + DONE
        if calls:
            self._transport.write(reply_with_calls(calls, True) + rest)
            return
        end = FINISH + rest
        if not gap:
            self._transport.write(FIRST + TOKEN * chunks + end)
            return
        self._left = chunks
        self._transport.write(FIRST)
        self._tick(gap, end)

    def _tick(self, gap: int, end: bytes) -> None:
        """Gaps below the loop's timer resolution are kept on average: several tokens a tick."""
        batch = min(self._left, max(1, TICK_US // gap))
        self._left -= batch
        self._transport.write(TOKEN * batch + (b"" if self._left else end))
        if self._left:
            self._timer = self._loop.call_later(max(gap, TICK_US) / 1e6, self._tick, gap, end)


async def serve(port: int) -> None:
    """Listen on loopback until cancelled; the first line of stdout is the URL."""
    loop = asyncio.get_running_loop()
    server = await loop.create_server(lambda: Worker(loop), "127.0.0.1", port, backlog=4096)
    print(f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}", flush=True)
    await server.serve_forever()


def main() -> None:
    """The command line."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.upstream", description=__doc__)
    parser.add_argument("--port", type=int, default=0)
    uvloop.run(serve(parser.parse_args().port))


if __name__ == "__main__":
    main()
