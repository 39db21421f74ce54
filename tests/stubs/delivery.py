"""Delivery of an answer to the client: pace, splits and all the ways in which a stream can fail."""

from __future__ import annotations

import asyncio
import json
import socket
import struct
import time
from collections.abc import Iterator
from email.utils import formatdate
from typing import Any

from aiohttp import web

from .record import ReceivedRequest
from .script import (
    DuplicateFinish,
    Fail,
    Fault,
    Garbage,
    HugeLine,
    Point,
    Raw,
    Reply,
    Reset,
    Stall,
    StreamError,
    Truncate,
    WrongSchema,
)
from .wire import Frame, ProviderRefusal, Wire, encode

PIECE = 1 << 18
SPLIT_DELAY = 0.02
"""Seconds before a connection breaks, so that what was sent before is read first."""
_HTML = (
    "<html><head><title>{0}</title></head><body><center><h1>{0} Bad gateway</h1></center><hr>cloudflare</body></html>"
)


async def stall(seconds: float | asyncio.Event | None) -> None:
    """Say nothing for so many seconds, or until the event is set; None is for ever."""
    if seconds is None:
        await asyncio.Event().wait()
    elif isinstance(seconds, asyncio.Event):
        await seconds.wait()
    else:
        await asyncio.sleep(seconds)


class Exchange:
    """One request being answered."""

    def __init__(self, request: web.Request, received: ReceivedRequest, wire: Wire) -> None:
        self.request, self.received, self.wire = request, received, wire

    async def refuse(self, refused: ProviderRefusal, headers: dict[str, str] | None = None) -> web.StreamResponse:
        """Send an error in the form of the provider."""
        document = json.dumps(self.wire.error(refused)).encode()
        return await self._send_whole(document, refused.status, {"Content-Type": "application/json", **(headers or {})})

    async def fail(self, behaviour: Fail) -> web.StreamResponse:
        """Send a scripted HTTP error."""
        await asyncio.sleep(behaviour.delay)
        headers: dict[str, str] = {}
        details: list[dict[str, Any]] = []
        if behaviour.retry_after is not None:
            if behaviour.as_date:
                headers["Retry-After"] = formatdate(time.time() + behaviour.retry_after, usegmt=True)
            elif self.wire.name == "gemini":
                kind = "type.googleapis.com/google.rpc.RetryInfo"
                details.append({"@type": kind, "retryDelay": f"{behaviour.retry_after:g}s"})
            else:
                headers["Retry-After"] = f"{behaviour.retry_after:g}"
        if behaviour.html:
            page = _HTML.format(behaviour.status).encode()
            return await self._send_whole(
                page, behaviour.status, {"Content-Type": "text/html; charset=UTF-8", **headers}
            )
        return await self.refuse(
            ProviderRefusal(behaviour.status, behaviour.message, behaviour.code, details=details), headers
        )

    async def raw(self, behaviour: Raw) -> web.StreamResponse:
        """Send the scripted bytes."""
        return await self._send_whole(
            behaviour.body.encode(errors="surrogatepass"), behaviour.status, {"Content-Type": behaviour.content_type}
        )

    async def reply(self, behaviour: Reply) -> web.StreamResponse:
        """Send a reply of status 200, as a stream if the request asks for one."""
        await asyncio.sleep(behaviour.header_delay)
        if not self.received.streaming:
            return await self._document(behaviour)
        if behaviour.streams == "refuse":
            return await self.refuse(
                ProviderRefusal(400, "Streaming is not supported by this model.", "unsupported_value", "stream")
            )
        if behaviour.streams == "json":
            return await self._document(behaviour)
        if self.wire.name == "gemini" and self.received.query.get("alt") != "sse":
            frames = ",\r\n".join(frame.data for frame in self.wire.frames(self.received, behaviour))
            return await self._send_whole(
                f"[{frames}]".encode(), 200, {"Content-Type": "application/json; charset=UTF-8"}
            )
        return await self._stream(behaviour)

    async def cut(self) -> None:
        """Reset the connection (RST)."""
        self.received.cut_by_stub = True
        transport = self.request.transport
        if transport is not None:
            peer = transport.get_extra_info("socket")
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
            transport.abort()
        await stall(None)

    async def close(self) -> None:
        """Close the connection in good order, whatever was promised (FIN)."""
        self.received.cut_by_stub = True
        if self.request.transport is not None:
            self.request.transport.close()
        await stall(None)

    async def _begin(self, status: int, headers: dict[str, str], length: int | None = None) -> web.StreamResponse:
        response = web.StreamResponse(status=status, headers={**self.wire.headers(status), **headers})
        response.content_length = length
        if length is None:
            response.enable_chunked_encoding()
        self.received.status = status
        await response.prepare(self.request)
        return response

    async def _write(self, response: web.StreamResponse, data: bytes, behaviour: Reply | None = None) -> None:
        if self.received.first_byte_at is None:
            self.received.first_byte_at = time.monotonic()
        size = behaviour.trickle.size if behaviour and behaviour.trickle else PIECE
        for i in range(0, len(data), size):
            await response.write(data[i : i + size])
            if behaviour and behaviour.trickle:
                await asyncio.sleep(behaviour.trickle.pause)

    async def _send_whole(self, body: bytes, status: int, headers: dict[str, str]) -> web.StreamResponse:
        response = await self._begin(status, headers, len(body))
        await self._write(response, body)
        await response.write_eof()
        return response

    async def _document(self, behaviour: Reply) -> web.StreamResponse:
        fault = behaviour.fault
        behaviour_shown = behaviour
        if isinstance(fault, HugeLine):
            behaviour_shown = Reply(chunks=("x" * fault.size,))
        body = json.dumps(self.wire.document(self.received, behaviour_shown)).encode()
        if isinstance(fault, Garbage | WrongSchema):
            body = (fault.line if isinstance(fault, Garbage) else fault.document).encode()
        if isinstance(fault, StreamError):
            body = json.dumps(self.wire.error(ProviderRefusal(fault.status, fault.message))).encode()
        await asyncio.sleep(behaviour.first_delay)
        response = await self._begin(200, {"Content-Type": "application/json"}, len(body))
        if isinstance(fault, Truncate | Reset | Stall):
            await self._write(response, body[: len(body) // 2], behaviour)
            await asyncio.sleep(SPLIT_DELAY)
            if isinstance(fault, Stall):
                await stall(fault.seconds)
                body = body[len(body) // 2 :]
            else:
                await (self.cut() if isinstance(fault, Reset) else self.close())
        await self._write(response, body, behaviour)
        self.received.deltas_sent = 1
        await response.write_eof()
        return response

    async def _stream(self, behaviour: Reply) -> web.StreamResponse:
        response = await self._begin(200, dict(self.wire.stream_headers))
        newline = behaviour.newline or self.wire.newline
        if behaviour.comments:
            await self._write(response, f": PROCESSING{newline}{newline}".encode(), behaviour)
        fault = behaviour.fault
        for frame in self.wire.frames(self.received, behaviour):
            if frame.kind == "delta":
                await asyncio.sleep(behaviour.gap if self.received.deltas_sent else behaviour.first_delay)
            if fault is not None and _strikes(fault.after, frame, self.received.deltas_sent):
                if not await self._strike(response, fault, frame, newline, behaviour):
                    return response
                fault = None
            await self._write(response, encode(frame, newline), behaviour)
            self.received.deltas_sent += frame.kind == "delta"
        await response.write_eof()
        return response

    async def _strike(
        self, response: web.StreamResponse, fault: Fault, frame: Frame, newline: str, behaviour: Reply
    ) -> bool:
        """Carry out the fault; return True if the stream goes on after it."""
        match fault:
            case Stall(seconds=seconds):
                await stall(seconds)
            case Truncate(clean=True):
                await response.write_eof()
                return False
            case Truncate():
                await self.close()
            case Reset():
                await self._half_chunk(encode(frame, newline))
            case StreamError(status=status, message=message):
                await self._write(
                    response, encode(self.wire.error_event(ProviderRefusal(status, message)), newline), behaviour
                )
                await response.write_eof()
                return False
            case Garbage(line=text) | WrongSchema(document=text):
                await self._write(response, encode(Frame("open", text, frame.event), newline), behaviour)
            case HugeLine(size=size):
                huge = next(_deltas(self.wire.frames(self.received, Reply(chunks=("x" * size,)))))
                await self._write(response, encode(huge, newline))
                self.received.deltas_sent += 1
            case DuplicateFinish():
                await self._write(response, encode(frame, newline), behaviour)
        return True

    async def _half_chunk(self, data: bytes) -> None:
        transport = self.request.transport
        if transport is not None:
            transport.write(f"{len(data):x}\r\n".encode() + data[: len(data) // 2])
            await asyncio.sleep(SPLIT_DELAY)
        await self.cut()


def _strikes(after: Point, frame: Frame, sent_size: int) -> bool:
    if isinstance(after, str):
        return frame.kind == after
    return frame.kind in ("close", "end") or (frame.kind == "delta" and sent_size == after)


def _deltas(frames: Iterator[Frame]) -> Iterator[Frame]:
    return (frame for frame in frames if frame.kind == "delta")
