"""The Merkle tree of RFC 6962 and signed checkpoints, written anew: a fault of the log's own code is no fault here.

leaf = SHA-256(0x00 || entry)
node = SHA-256(0x01 || left || right)         the left part has as many leaves as fit, 2^k of them
"""

import base64
import binascii
import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from msgspec import Struct

HASH_BYTES = 32
ED25519 = b"\x01"
COSIGNATURE = b"\x04"
"""The kind of a witness's key: its signature covers a time as well (https://c2sp.org/tlog-cosignature)."""
SIGNATURE_BYTES = 64
SIGNER = "PRIVATE+KEY+"
"""The beginning of a key that signs."""
SIZE = re.compile(r"0|[1-9]\d{0,18}", re.ASCII)
"""The size of a log in a checkpoint: no larger number is one of 63 bits."""
MARK = "\u2014 "
"""The beginning of a line with a signature: an em dash and a space."""


class LogFormatError(ValueError):
    """A checkpoint, a key or an entry is malformed. The message says which part and why."""


def leaf_hash(entry: bytes) -> bytes:
    """Return the hash of an entry."""
    return hashlib.sha256(b"\0" + entry).digest()


def event_hash(run: str, seq: int, kind: str, at: float, body: bytes) -> bytes:
    """Return the hash of an event, which is an entry of the tree of its run's events."""
    return leaf_hash(f"{run}\n{seq}\n{kind}\n{at!r}\n".encode() + body)


def node_hash(left: bytes, right: bytes) -> bytes:
    """Return the hash over two subtrees."""
    return hashlib.sha256(b"\1" + left + right).digest()


@dataclass(slots=True)
class GrowingTree:
    """A tree to which the hashes of entries are added one by one."""

    size: int = 0
    _peaks: list[tuple[int, bytes]] = field(default_factory=list)
    """The perfect subtrees from the left to the right, each with its height and root."""

    def add(self, leaf: bytes) -> None:
        """Add the hash of the next entry."""
        peaks, height = self._peaks, 0
        while peaks and peaks[-1][0] == height:
            leaf = node_hash(peaks.pop()[1], leaf)
            height += 1
        peaks.append((height, leaf))
        self.size += 1

    def root(self) -> bytes:
        """Return the root over all that was added."""
        if not self._peaks:
            return hashlib.sha256().digest()
        digest = self._peaks[-1][1]
        for _, peak in reversed(self._peaks[:-1]):
            digest = node_hash(peak, digest)
        return digest


def root_of(hashes: Iterable[bytes]) -> bytes:
    """Return the root over the hashes of these entries."""
    level = list(hashes)
    while len(level) > 1:
        pairs = [node_hash(level[at], level[at + 1]) for at in range(0, len(level) - 1, 2)]
        level = pairs + level[2 * len(pairs) :]
    if level:
        return level[0]
    return hashlib.sha256().digest()


# -- checkpoints


class Key(Struct, frozen=True):
    """A public key by which a log signs. `text` is its form in files: NAME+HEX+BASE64."""

    name: str
    id: bytes
    public: bytes
    kind: bytes = ED25519

    @property
    def text(self) -> str:
        """Return the key as files have it."""
        return f"{self.name}+{self.id.hex()}+{base64.b64encode(self.kind + self.public).decode()}"


def read_key(text: str) -> Key:
    """Return the key of this text. Raises `LogFormatError`."""
    name, _, remainder = text.strip().partition("+")
    hexed, _, encoded = remainder.partition("+")
    body = _decode_base64(encoded, "The key")
    kind, public = body[:1], body[1:]
    key_id = hashlib.sha256(f"{name}\n".encode() + body).digest()[:4]
    if kind not in (ED25519, COSIGNATURE) or len(public) != HASH_BYTES or key_id.hex() != hexed or not name:
        raise LogFormatError(f"The key {name!r} is no Ed25519 key in the form NAME+HEX+BASE64.")
    return Key(name, key_id, public, kind)


class Checkpoint(Struct, frozen=True):
    """A signed statement about a log: its name, the number of its entries and the root over them."""

    origin: str
    size: int
    root: bytes
    text: str
    signatures: tuple[tuple[str, bytes, bytes], ...]
    """Each as the name of the signer, the id of the key and the signature."""

    def signers(self, keys: Sequence[Key]) -> list[str]:
        """Return the names of the keys among these that have signed it.

        Raises `LogFormatError` for a wrong signature.
        """
        names = []
        for name, number, signature in self.signatures:
            for key in keys:
                if (key.name, key.id) != (name, number):
                    continue
                if not _is_signed(key, self.text, signature):
                    raise LogFormatError(f"The signature of {name} is wrong.")
                names.append(name)
        return names


def key_of(signer: str) -> Key:
    """Return the public key of a key that signs, PRIVATE+KEY+NAME+HEX+BASE64. Raises `LogFormatError`."""
    name, _, remainder = signer.removeprefix(SIGNER).partition("+")
    seed = _decode_base64(remainder.partition("+")[2], "The signing key")
    if not signer.startswith(SIGNER) or len(seed) != 1 + HASH_BYTES:
        raise LogFormatError("The signing key is malformed.")
    public = Ed25519PrivateKey.from_private_bytes(seed[1:]).public_key().public_bytes_raw()
    key_id = hashlib.sha256(f"{name}\n".encode() + ED25519 + public).digest()[:4]
    if remainder.partition("+")[0] != key_id.hex():
        raise LogFormatError("The id of the signing key does not fit its name and its bytes.")
    return Key(name, key_id, public)


def _is_signed(key: Key, text: str, signature: bytes) -> bool:
    signed = text.encode()
    if key.kind == COSIGNATURE:
        at = int.from_bytes(signature[:8], "big")
        signed, signature = f"cosignature/v1\ntime {at}\n".encode() + signed, signature[8:]
    try:
        Ed25519PublicKey.from_public_bytes(key.public).verify(signature, signed)
    except InvalidSignature:
        return False
    return True


def read_checkpoint(note: str) -> Checkpoint:
    """Return the checkpoint of a signed note. Raises `LogFormatError`."""
    text, separator, below = note.partition("\n\n")
    lines = text.split("\n")
    if not separator or len(lines) < 3 or not SIZE.fullmatch(lines[1]):
        raise LogFormatError("A checkpoint has an origin, a size and a root, each on its line, and signatures below.")
    root = _decode_base64(lines[2], "The root of the checkpoint")
    if len(root) != HASH_BYTES:
        raise LogFormatError("The root of a checkpoint has 32 bytes.")
    signatures = []
    for line in below.splitlines():
        name, _, encoded = line.removeprefix(MARK).partition(" ")
        body = _decode_base64(encoded, "A signature of the checkpoint")
        if not line.startswith(MARK) or len(body) < 4 + SIGNATURE_BYTES:
            raise LogFormatError("A line below the checkpoint is no signature.")
        signatures.append((name, body[:4], body[4:]))
    return Checkpoint(lines[0], int(lines[1]), root, f"{text}\n", tuple(signatures))


def _decode_base64(text: str, what: str) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        raise LogFormatError(f"{what} is not base64.") from None
