"""The hash of a run's journal: the root of the Merkle tree of RFC 6962 (`core/transparency/merkle.py`) over its events.

It stays when the events are deleted. A copy of the whole journal then proves itself by having the same root, and a copy
of a single event by the hashes on its way to the root. Events hold ids, times, figures and salted hashes of texts, so
the root says nothing about them to somebody who guesses.

    leaf = SHA-256(0x00 || run LF seq LF kind LF time LF body)     numbers in decimal, the time in its shortest form
    node = SHA-256(0x01 || left || right)                          the left part has as many leaves as fit, 2^k of them
"""

from collections.abc import Iterable

from app.core.transparency.merkle import leaf_hash, tree_root


def leaf(run: str, seq: int, kind: str, at: float, body: bytes) -> bytes:
    """Return the hash of one event. `body` is its JSON as the exact bytes that are stored."""
    return leaf_hash(f"{run}\n{seq}\n{kind}\n{at!r}\n".encode() + body)


def root(run: str, events: Iterable[tuple[int, str, float, bytes]]) -> bytes:
    """Return the root over the events of a run, each as (seq, kind, at, body), in their order."""
    return tree_root([leaf(run, *event) for event in events])
