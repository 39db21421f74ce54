"""Signed notes (https://c2sp.org/signed-note) and the checkpoints of a log (https://c2sp.org/tlog-checkpoint).

A note is a text with signatures below it. A checkpoint is a note whose text has three lines: the origin, which names
the log, the size of its tree, and the base64 of the root. Keys are written as Go's `golang.org/x/mod/sumdb/note` writes
them, so that its programs and those of other logs can make and use them:

    verifier key   NAME+HEX+BASE64(0x01 || 32 bytes of the public key)
    signer key     PRIVATE+KEY+NAME+HEX+BASE64(0x01 || 32 bytes of the seed)

HEX is the id of the key: the first four bytes of SHA-256(NAME || LF || 0x01 || public key).
"""

import re
from base64 import b64decode, b64encode
from binascii import Error as Base64Error
from collections.abc import Sequence
from hashlib import sha256
from pkgutil import resolve_name
from typing import TYPE_CHECKING, Final, Self

from msgspec import Struct

from app.core.transparency.merkle import HASH_BYTES

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey

KEYS: Final = "cryptography.hazmat.primitives.asymmetric.ed25519"
"""The library is imported with the first key: most commands and gateways need none."""
REFUSAL: Final = "cryptography.exceptions:InvalidSignature"
ED25519 = b"\x01"
SIGNER = "PRIVATE+KEY+"
MARK = "\u2014 "
"""The beginning of a line with a signature: an em dash and a space."""
NOTE_BYTES = 2**16
"""Most bytes of a note."""
_NAME = re.compile(r"[^\s+]+")
_SIZE = re.compile(r"0|[1-9]\d{0,18}", re.ASCII)


class NoteInvalid(ValueError):
    """A note, a checkpoint or a key is malformed, or no known key has signed the note."""


def _key_id(name: str, body: bytes) -> bytes:
    return sha256(name.encode() + b"\n" + body).digest()[:4]


def _bytes_of(text: str) -> bytes:
    try:
        return b64decode(text, validate=True)
    except (Base64Error, ValueError):
        raise NoteInvalid("It is not base64.") from None


class Verifier:
    """A public key with the name of its owner."""

    kind = ED25519
    """The byte before the key in its text form, which says how it signs."""

    def __init__(self, name: str, public: bytes) -> None:
        if not _NAME.fullmatch(name) or len(public) != HASH_BYTES:
            raise NoteInvalid("The key has no proper name, or is not an Ed25519 key.")
        self.name = name
        self.id = _key_id(name, self.kind + public)
        self._public = public
        self._key: Ed25519PublicKey = resolve_name(f"{KEYS}:Ed25519PublicKey").from_public_bytes(public)

    @classmethod
    def parse(cls, text: str) -> Self:
        """Return the verifier key that is written so. Raises `NoteInvalid`."""
        name, public = _parts(text, cls.kind)
        key = cls(name, public)
        if str(key) != text:
            raise NoteInvalid("The id of the key does not fit its name and its bytes.")
        return key

    def __str__(self) -> str:
        return f"{self.name}+{self.id.hex()}+{b64encode(self.kind + self._public).decode()}"

    def verifies(self, text: str, signature: bytes) -> bool:
        refusal: type[Exception] = resolve_name(REFUSAL)
        try:
            self._key.verify(signature, text.encode())
        except refusal:
            return False
        return True


class Signer:
    """A private key with the name of its owner. Its text form is a secret."""

    def __init__(self, name: str, seed: bytes) -> None:
        if len(seed) != HASH_BYTES:
            raise NoteInvalid("The seed of an Ed25519 key has 32 bytes.")
        self._seed = seed
        self._key: Ed25519PrivateKey = resolve_name(f"{KEYS}:Ed25519PrivateKey").from_private_bytes(seed)
        self.verifier = Verifier(name, self._key.public_key().public_bytes_raw())
        self.name = name

    @classmethod
    def parse(cls, text: str) -> "Signer":
        """Return the signer key that is written so. Raises `NoteInvalid`, without a word of the text."""
        if not text.startswith(SIGNER):
            raise NoteInvalid("A signer key begins with PRIVATE+KEY+.")
        name, seed = _parts(text.removeprefix(SIGNER))
        signer = cls(name, seed)
        if signer.secret() != text:
            raise NoteInvalid("The id of the key does not fit its name and its bytes.")
        return signer

    def secret(self) -> str:
        """Return the signer key in text form."""
        return f"{SIGNER}{self.name}+{self.verifier.id.hex()}+{b64encode(ED25519 + self._seed).decode()}"

    def signature(self, text: str) -> str:
        """Return the line with this key's signature of a text."""
        signed = self.verifier.id + self._key.sign(text.encode())
        return f"{MARK}{self.name} {b64encode(signed).decode()}\n"


def _parts(text: str, kind: bytes = ED25519) -> tuple[str, bytes]:
    """Return the name and the bytes of a key."""
    parts = text.split("+", 2)
    if len(parts) != 3:
        raise NoteInvalid("A key has a name, an id and its bytes, with a plus between them.")
    body = _bytes_of(parts[2])
    if body[:1] != kind:
        raise NoteInvalid("The key is not an Ed25519 key of this kind.")
    return parts[0], body[1:]


def sign(text: str, signers: Sequence[Signer]) -> str:
    """Return the note of a text, which ends in a newline."""
    if not text.endswith("\n"):
        raise NoteInvalid("The text of a note ends in a newline.")
    return text + "\n" + "".join([signer.signature(text) for signer in signers])


def split_note(note: str) -> tuple[str, list[tuple[str, bytes, bytes]]]:
    """Return the text of a note, and its signatures as (name, id of the key, signature). Raises `NoteInvalid`."""
    at = note.rfind("\n\n")
    if at < 0 or not note.endswith("\n") or len(note.encode()) > NOTE_BYTES:
        raise NoteInvalid("The note has no signatures, or is too long.")
    signatures = []
    for line in note[at + 2 :].removesuffix("\n").split("\n"):
        name, _, encoded = line.removeprefix(MARK).partition(" ")
        signed = _bytes_of(encoded)
        if not line.startswith(MARK) or not _NAME.fullmatch(name) or len(signed) < 5:
            raise NoteInvalid("A line of the note is not a signature.")
        signatures.append((name, signed[:4], signed[4:]))
    return note[: at + 1], signatures


def open_note(note: str, verifiers: Sequence[Verifier]) -> tuple[str, list[Verifier]]:
    """Return the text of a note, and the keys of these by which it is signed: at least one.

    Signatures by other keys are ignored. Raises `NoteInvalid`, also if one by a known key is wrong.
    """
    text, signatures = split_note(note)
    verifiers_by_id = {(verifier.name, verifier.id): verifier for verifier in verifiers}
    signed = []
    for name, number, signature in signatures:
        verifier = verifiers_by_id.get((name, number))
        if verifier is None or verifier in signed:
            continue
        if not verifier.verifies(text, signature):
            raise NoteInvalid(f"The signature of {name} is wrong.")
        signed.append(verifier)
    if not signed:
        raise NoteInvalid("No known key has signed the note.")
    return text, signed


class Checkpoint(Struct, frozen=True):
    """The state of a log: its name, the number of its entries, and the root over them."""

    origin: str
    size: int
    root: bytes

    @property
    def text(self) -> str:
        return f"{self.origin}\n{self.size}\n{b64encode(self.root).decode()}\n"


def parse_checkpoint(text: str) -> Checkpoint:
    """Return the checkpoint that is the text of a note. Further lines are ignored. Raises `NoteInvalid`."""
    lines = text.split("\n")
    if len(lines) < 4 or lines[-1] or not all(lines[:-1]) or not _SIZE.fullmatch(lines[1]):
        raise NoteInvalid("A checkpoint has an origin, a size and a root, each on its line.")
    root = _bytes_of(lines[2])
    if len(root) != HASH_BYTES:
        raise NoteInvalid("The root of a checkpoint has 32 bytes.")
    return Checkpoint(lines[0], int(lines[1]), root)


def open_checkpoint(note: str, verifiers: Sequence[Verifier]) -> Checkpoint:
    """Return the checkpoint of a note that at least one of these keys has signed. Raises `NoteInvalid`.

    Its origin is the name of a key that has signed it: a log signs in its own name.
    """
    text, signed = open_note(note, verifiers)
    checkpoint = parse_checkpoint(text)
    if checkpoint.origin not in {verifier.name for verifier in signed}:
        raise NoteInvalid("The checkpoint is not signed by the log that it names.")
    return checkpoint
