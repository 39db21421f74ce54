"""Draws that a text decides, so that every process finds the same one, also after a crash."""

from hashlib import sha256


def draw(text: str) -> float:
    """Return a number from 0 to below 1 that depends on nothing but the text. Those of many texts are evenly spread."""
    return int.from_bytes(sha256(text.encode("utf-8", "surrogatepass")).digest()[:7], "big") / 2**56
