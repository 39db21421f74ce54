"""Bytes that are kept."""


def fitted(body: bytes) -> bytes:
    """The same bytes in no more room than they need. What `orjson.dumps` returns holds 4 KiB at least, and up to eight
    times its length, for as long as somebody has it: this is for whatever waits with a run or a call."""
    return bytes(memoryview(body))
