"""The bytes of contents: how they are held for long, and by which ref they are named."""

import hashlib


def trim_capacity(body: bytes) -> bytes:
    """Return a copy of the bytes without spare capacity. The result of `orjson.dumps` occupies at least 4 KiB, and up
    to eight times its length, for as long as it is referenced, so this is for bytes that live as long as a run or a
    call."""
    return bytes(memoryview(body))


def content_ref(salt: bytes, body: bytes) -> str:
    """Return the ref of a body within its run: the SHA-256 of the run's salt and the body, as 64 hex digits."""
    return hashlib.sha256(salt + body).hexdigest()
