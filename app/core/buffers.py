"""Buffers without spare capacity, for bytes that are held for long."""


def fitted(body: bytes) -> bytes:
    """Return a copy of the bytes without spare capacity. The result of `orjson.dumps` occupies at least 4 KiB, and up
    to eight times its length, for as long as it is referenced, so this is for bytes that live as long as a run or a
    call."""
    return bytes(memoryview(body))
