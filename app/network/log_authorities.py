"""Requests for confirmations of a checkpoint of the transparency log: to witnesses, and to time-stamp authorities.

Each is asked a few times and within a deadline; then `ConfirmationError` says why there is no confirmation.
"""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from hashlib import sha256
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import httpx

from app.core.transparency.notes import NoteInvalid
from app.core.transparency.witnesses import Witness, find_cosignature_line, submission
from app.errors import ConfigInvalid
from app.network import retries
from app.network.http_client import async_client
from app.network.retries import retry

DEADLINE_SECONDS = 20.0
"""Seconds for one confirmation, all tries included."""
REPLY_BYTES = 2**16
"""Most bytes of a reply."""
CONFLICTS = 2
"""Times that a witness may name another size from which it wants the proof."""
SIZE_TYPE = "text/x.tlog.size"
"""The media type of a witness's reply that names the size of the last checkpoint that it has cosigned."""
TIMESTAMP_LIBRARY = "rfc3161_client"
"""The library of time stamps is imported where one is asked for."""
GRANTED = (0, 1)
"""The states of a reply that has a time stamp: granted, and granted with changes."""

Prove = Callable[[int], Awaitable[Sequence[bytes]]]
"""Returns the consistency proof from a size of the log to the one that is to be cosigned."""


class ConfirmationError(Exception):
    """There is no confirmation. The message says why, without words of the reply."""


class _Busy(Exception):
    """The reply is a 5xx."""


def check_timestamp_library() -> None:
    """Raise `ConfigInvalid` if the library of time stamps is not installed."""
    if find_spec(TIMESTAMP_LIBRARY) is None:
        raise ConfigInvalid(
            ["BATON_LOG_TIMESTAMP_URL: needs rfc3161-client; install it with `pip install 'baton[timestamps]'`"]
        )


def authority_client() -> httpx.AsyncClient:
    """Return a client for these requests. Close it."""
    return async_client(headers={"user-agent": "baton"}, timeout=httpx.Timeout(DEADLINE_SECONDS), connections=8)


async def request_cosignature(
    client: httpx.AsyncClient, witness: Witness, note: str, *, size: int, old: int, prove: Prove
) -> str:
    """Return the line with the witness's cosignature of the checkpoint `note`, which counts `size` entries.

    `old` is the size that the witness is believed to have cosigned last. Raises `ConfirmationError`.
    """
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            reply = await _submit_checkpoint(client, witness, note, size=size, old=old, prove=prove)
        return find_cosignature_line(note, reply.decode(), witness.key)
    except TimeoutError:
        raise ConfirmationError("It did not answer in time.") from None
    except (NoteInvalid, UnicodeDecodeError):
        raise ConfirmationError("Its reply is no valid cosignature by its key.") from None


async def request_timestamp(client: httpx.AsyncClient, url: str, body: bytes) -> bytes:
    """Return the reply of an RFC 3161 authority with its time stamp for these bytes, in DER.

    Raises `ConfirmationError`. It is checked that the stamp is granted, for these bytes and for this request. Who
    signed it is checked by those who rely on it, as `openssl ts -verify` does.
    """
    tsp: Any = import_module(TIMESTAMP_LIBRARY)
    query = tsp.TimestampRequestBuilder().data(body).hash_algorithm(tsp.HashAlgorithm.SHA256).build()
    try:
        async with asyncio.timeout(DEADLINE_SECONDS):
            status, _, reply = await _post(client, url, query.as_bytes(), "application/timestamp-query")
        if status != httpx.codes.OK:
            raise ConfirmationError(f"It answered with status {status}.")
        response = tsp.decode_timestamp_response(reply)
        if response.status not in GRANTED:
            raise ConfirmationError("It did not grant a time stamp.")
        about = response.tst_info.message_imprint.message
        if about != sha256(body).digest() or response.tst_info.nonce != query.nonce:
            raise ConfirmationError("Its time stamp is not for this request.")
    except TimeoutError:
        raise ConfirmationError("It did not answer in time.") from None
    except ValueError:
        raise ConfirmationError("Its reply is no time stamp.") from None
    return reply


async def _submit_checkpoint(
    client: httpx.AsyncClient, witness: Witness, note: str, *, size: int, old: int, prove: Prove
) -> bytes:
    for _ in range(1 + CONFLICTS):
        if old > size:
            raise ConfirmationError(f"It has cosigned {old} entries, and this log has {size}: the log was set back.")
        body = submission(old, await prove(old), note)
        status, kind, reply = await _post(client, f"{witness.url}/add-checkpoint", body, "text/plain; charset=utf-8")
        if status == httpx.codes.OK:
            return reply
        stated = reply.strip()
        if status != httpx.codes.CONFLICT or kind != SIZE_TYPE or not stated.isdigit() or len(stated) > 18:
            raise ConfirmationError(f"It answered with status {status}.")
        old = int(stated)
    raise ConfirmationError("It named another size at each request.")


async def _post(client: httpx.AsyncClient, url: str, body: bytes, kind: str) -> tuple[int, str, bytes]:
    """Send a request, and again if that may help. Returns status, media type and body. Raises `ConfirmationError`."""

    async def once() -> tuple[int, str, bytes]:
        async with client.stream("POST", url, content=body, headers={"content-type": kind}) as reply:
            if reply.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
                raise _Busy(f"It answered with status {reply.status_code}.")
            content = b""
            async for part in reply.aiter_raw():
                content += part
                if len(content) > REPLY_BYTES:
                    raise ConfirmationError("Its reply is too long.")
            return reply.status_code, reply.headers.get("content-type", "").partition(";")[0].strip(), content

    try:
        return await retry(once, lambda: retries.authority(faults=(httpx.TransportError, OSError, _Busy)))
    except _Busy as error:
        raise ConfirmationError(str(error)) from None
    except (httpx.HTTPError, OSError) as error:
        raise ConfirmationError(f"It cannot be reached: {type(error).__name__}.") from None
