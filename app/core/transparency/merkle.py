"""The Merkle tree of RFC 6962 over the entries of a log: its hashes, and proofs about them.

    leaf = SHA-256(0x00 || entry)
    node = SHA-256(0x01 || left || right)         the left part has as many leaves as fit, 2^k of them

A node is named by its level and its index there: node (k, i) is the root over the leaves i * 2^k to (i + 1) * 2^k - 1.
The functions that make a proof read nodes through a function, so that they work on tiles as well as on a list.

An inclusion proof shows that an entry is in a tree, a consistency proof that one tree is the beginning of another.
"""

from collections.abc import Callable, Iterable, Sequence
from hashlib import sha256

LEAF, NODE = b"\x00", b"\x01"
HASH_BYTES = 32
EMPTY_ROOT = sha256().digest()
"""The root of a tree without entries."""
Node = Callable[[int, int], bytes]
"""Reads the hash of the node of this level and index, all of whose leaves are in the tree."""


def leaf_hash(entry: bytes) -> bytes:
    """Return the hash of the leaf of an entry."""
    return sha256(LEAF + entry).digest()


def node_hash(left: bytes, right: bytes) -> bytes:
    """Return the hash of the node above these two."""
    return sha256(NODE + left + right).digest()


class Frontier:
    """The part of a tree that is needed to append to it: the roots of its perfect subtrees, the largest first."""

    __slots__ = ("hashes", "size")

    def __init__(self, size: int = 0, hashes: Iterable[bytes] = ()) -> None:
        self.size = size
        self.hashes = list(hashes)
        if len(self.hashes) != size.bit_count():
            raise ValueError("The number of subtrees does not fit the size of the tree.")

    @classmethod
    def from_bytes(cls, size: int, stored: bytes) -> "Frontier":
        """Return the frontier whose hashes are stored one behind the other."""
        return cls(size, [stored[at : at + HASH_BYTES] for at in range(0, len(stored), HASH_BYTES)])

    def to_bytes(self) -> bytes:
        """Return the hashes, one behind the other."""
        return b"".join(self.hashes)

    def extend(self, leaves: Iterable[bytes]) -> None:
        """Append the hashes of entries."""
        hashes, size = self.hashes, self.size
        for leaf in leaves:
            digest, full = leaf, size
            while full & 1:
                digest = sha256(NODE + hashes.pop() + digest).digest()
                full >>= 1
            hashes.append(digest)
            size += 1
        self.size = size

    def root(self) -> bytes:
        """Return the root of the whole tree."""
        if not self.hashes:
            return EMPTY_ROOT
        digest = self.hashes[-1]
        for peak in reversed(self.hashes[:-1]):
            digest = node_hash(peak, digest)
        return digest


def tree_root(leaves: Iterable[bytes]) -> bytes:
    """Return the root over the hashes of these entries."""
    frontier = Frontier()
    frontier.extend(leaves)
    return frontier.root()


# -- making proofs


def range_root(begin: int, end: int, node: Node) -> bytes:
    """Return the root over the leaves `begin` to `end` - 1 of a tree, where a subtree of so many leaves may begin at
    `begin`.

    `range_root(0, size, node)` is the root of the tree.
    """
    size = end - begin
    if size == 0:
        return EMPTY_ROOT
    if size & (size - 1) == 0:
        level = size.bit_length() - 1
        return node(level, begin >> level)
    middle = begin + _largest_power_below(size)
    return node_hash(range_root(begin, middle, node), range_root(middle, end, node))


def inclusion_proof(index: int, size: int, node: Node) -> list[bytes]:
    """Return the proof that the entry at `index` is in the tree of `size` entries: PATH of RFC 6962, 2.1.1."""
    if not 0 <= index < size:
        raise ValueError("The tree has no entry at this index.")
    proof: list[bytes] = []
    begin, end = 0, size
    while end - begin > 1:
        middle = begin + _largest_power_below(end - begin)
        if index < middle:
            proof.append(range_root(middle, end, node))
            end = middle
        else:
            proof.append(range_root(begin, middle, node))
            begin = middle
    return proof[::-1]


def consistency_proof(old: int, new: int, node: Node) -> list[bytes]:
    """Return the proof that the tree of `old` entries is the beginning of the tree of `new` ones: PROOF of RFC 6962,
    2.1.2."""
    if not 0 <= old <= new:
        raise ValueError("The earlier tree is larger than the later one.")
    if old in (0, new):
        return []
    proof: list[bytes] = []
    begin, end, whole = 0, new, True
    while old != end:
        middle = begin + _largest_power_below(end - begin)
        if old <= middle:
            proof.append(range_root(middle, end, node))
            end = middle
        else:
            proof.append(range_root(begin, middle, node))
            begin, whole = middle, False
    if not whole:
        proof.append(range_root(begin, end, node))
    return proof[::-1]


def _largest_power_below(size: int) -> int:
    """Return the number of leaves in the left part of a tree of `size` of them: the largest power of two below it."""
    return 1 << (size - 1).bit_length() - 1


# -- checking proofs (RFC 9162, 2.1.3.2)


def includes(index: int, size: int, leaf: bytes, proof: Sequence[bytes], root: bytes) -> bool:
    """Return True if the proof shows that the entry with the hash `leaf` is at `index` in the tree with this size and
    root."""
    if not 0 <= index < size:
        return False
    place, last, digest = index, size - 1, leaf
    for step in proof:
        if last == 0:
            return False
        if place & 1 or place == last:
            digest = node_hash(step, digest)
            while not place & 1 and place:
                place, last = place >> 1, last >> 1
        else:
            digest = node_hash(digest, step)
        place, last = place >> 1, last >> 1
    return last == 0 and digest == root


def consistent(old: int, new: int, roots: tuple[bytes, bytes], proof: Sequence[bytes]) -> bool:
    """Return True if the proof shows that the tree of `old` entries is the beginning of that of `new` ones.

    `roots` are those of both trees, the older one first (RFC 9162, 2.1.4.2).
    """
    if old in (0, new):
        return not proof and (roots[0] == (roots[1] if old else EMPTY_ROOT))
    first, last = old - 1, new - 1
    while first & 1:
        first, last = first >> 1, last >> 1
    path = [roots[0], *proof] if old & (old - 1) == 0 else list(proof)
    if not path or old > new:
        return False
    older = newer = path[0]
    for sibling in path[1:]:
        if last == 0:
            return False
        if first & 1 or first == last:
            older, newer = node_hash(sibling, older), node_hash(sibling, newer)
            while first and not first & 1:
                first, last = first >> 1, last >> 1
        else:
            newer = node_hash(newer, sibling)
        first, last = first >> 1, last >> 1
    return (older, newer) == roots and last == 0
