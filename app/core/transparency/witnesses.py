"""Cosignatures of witnesses (https://c2sp.org/tlog-cosignature), and how a log asks for one (https://c2sp.org/tlog-witness).

A witness remembers the last checkpoint of a log that it has seen, and cosigns a later one only if a consistency proof
shows that the log was only appended to. Its signature covers the time as well:

    verifier key   NAME+HEX+BASE64(0x04 || 32 bytes of the public key)
    signature      ID || 8 bytes of the time || Ed25519 over STATED
    STATED         "cosignature/v1" LF "time " SECONDS LF text of the checkpoint
"""

from base64 import b64encode
from collections.abc import Awaitable, Callable, Sequence
from functools import partial

from msgspec import Struct

from app.core.transparency.merkle import consistency_proof
from app.core.transparency.notes import MARK, NoteInvalid, Verifier, split_note
from app.core.transparency.tiles import reader_for

TIME_BYTES = 8


class WitnessKey(Verifier):
    """The public key of a witness."""

    kind = b"\x04"

    def verifies(self, text: str, signature: bytes) -> bool:
        """Return True if it is this witness's signature of a checkpoint's text."""
        stated = f"cosignature/v1\ntime {read_cosignature_time(signature)}\n{text}"
        return super().verifies(stated, signature[TIME_BYTES:])


class Witness(Struct, frozen=True):
    """A witness: the URL below which it takes checkpoints, and its key."""

    url: str
    key: WitnessKey

    @property
    def name(self) -> str:
        """Return the name of its key."""
        return self.key.name


def read_witnesses(text: str) -> tuple[Witness, ...]:
    """Return the witnesses of a setting: a URL and a verifier key each. Raises `NoteInvalid`."""
    words = text.split()
    if len(words) % 2:
        raise NoteInvalid("A witness has a URL and a verifier key.")
    witnesses = []
    for at in range(0, len(words), 2):
        witnesses.append(Witness(words[at].rstrip("/"), WitnessKey.parse(words[at + 1])))
    if len({witness.name for witness in witnesses}) < len(witnesses):
        raise NoteInvalid("Two witnesses have the same name.")
    return tuple(witnesses)


def read_cosignature_time(signature: bytes) -> int:
    """Return the time of a cosignature, in seconds since 1970."""
    return int.from_bytes(signature[:TIME_BYTES], "big")


def cosignature_time(note: str, key: WitnessKey) -> int | None:
    """Return when the witness has cosigned this checkpoint; None if it has not. Raises `NoteInvalid`."""
    text, signatures = split_note(note)
    for name, number, signature in signatures:
        if (name, number) == (key.name, key.id):
            if not key.verifies(text, signature):
                raise NoteInvalid(f"The signature of {name} is wrong.")
            return read_cosignature_time(signature)
    return None


def submission(old: int, proof: Sequence[bytes], note: str) -> bytes:
    """Return the body of a request for a cosignature; `proof` shows that the log has grown from its first `old`
    entries."""
    lines = [f"old {old}", *[b64encode(sibling_hash).decode() for sibling_hash in proof], "", note]
    return "\n".join(lines).encode()


def find_cosignature_line(note: str, reply: str, key: WitnessKey) -> str:
    """Return the line of the reply with the witness's cosignature. Raises `NoteInvalid` if there is no valid one."""
    text, _ = split_note(note)
    for line in reply.split("\n"):
        has_name = line.startswith(f"{MARK}{key.name} ")
        if has_name and cosignature_time(f"{text}\n{line}\n", key) is not None:
            return f"{line}\n"
    raise NoteInvalid("No known key has signed the note.")


async def proof_from_tiles(old: int, new: int, tile: Callable[[int, int], Awaitable[bytes]]) -> list[bytes]:
    """Return the consistency proof between two sizes of a log, whose tiles `tile` reads by level and number.

    Raises ValueError if the log does not have these tiles.
    """
    node = await reader_for(partial(consistency_proof, old, new), tile)
    return consistency_proof(old, new, node)
