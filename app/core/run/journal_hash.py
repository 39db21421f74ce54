"""The hash of a run's journal: the root of a Merkle tree over its events, as RFC 6962 builds one.

It stays when the events are deleted. A copy of the whole journal then proves itself by having the same root, and a copy
of a single event by the hashes on its way to the root. Events hold ids, times, figures and salted hashes of texts, so
the root says nothing about them to somebody who guesses.

    leaf = SHA-256(0x00 || run LF seq LF kind LF time LF body)     numbers in decimal, the time in its shortest form
    node = SHA-256(0x01 || left || right)                          the left part has as many leaves as fit, 2^k of them
"""

from collections.abc import Iterable, Sequence
from hashlib import sha256

LEAF, NODE = b"\x00", b"\x01"


def leaf(run: str, seq: int, kind: str, at: float, body: bytes) -> bytes:
    """The hash of one event. `body` is its JSON as the exact bytes that are stored."""
    return sha256(LEAF + f"{run}\n{seq}\n{kind}\n{at!r}\n".encode() + body).digest()


def root(run: str, events: Iterable[tuple[int, str, float, bytes]]) -> bytes:
    """The root over the events of a run, each as (seq, kind, at, body), in their order."""
    return _root([leaf(run, *event) for event in events])


def _root(hashes: Sequence[bytes]) -> bytes:
    if len(hashes) < 2:
        return hashes[0] if hashes else sha256().digest()
    left = 1 << (len(hashes) - 1).bit_length() - 1
    return sha256(NODE + _root(hashes[:left]) + _root(hashes[left:])).digest()
