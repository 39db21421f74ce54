"""Signatures of conductors' versions: a signed note (`notes.py`) beside the manifest of a version. Its text has

    baton-conductor/v1
    NAME@HASH                         the version's name
    SHA-256 of the manifest           in hexadecimal

The manifest holds the hash of every file of its folder, so the signature covers weights, tokenizer, golden prompts and
what is said of the training. It says that the holder of the key has released these files under this name. It says
nothing of what a server really loads, or of how good the plans are.
"""

from collections.abc import Sequence

from msgspec import Struct

from app.core.transparency.notes import NoteInvalid, Signer, Verifier, open_note, sign

FORM = "baton-conductor/v1"


def sign_version(version: str, manifest_sha256: str, signer: Signer) -> str:
    """Return the note with which a key signs a version."""
    return sign(f"{FORM}\n{version}\n{manifest_sha256}\n", [signer])


class TrustedSigners(Struct, frozen=True):
    """The keys of which one must have signed a version that is to conduct. Without keys every version may."""

    keys: tuple[Verifier, ...] = ()
    refuses: bool = True
    """True if other versions are refused; False if there is only a warning."""

    def objection(self, version: str, note: str, manifest_sha256: str | None = None) -> str:
        """Return the reason why a version is not accepted, or an empty string.

        `note` is its signature, empty where it has none. The hash is compared where the manifest is at hand.
        """
        if not self.keys:
            return ""
        if not note:
            return f"{version} is not signed; `baton conductor sign FOLDER` signs it"
        try:
            text, _ = open_note(note, self.keys)
        except NoteInvalid as error:
            return f"the signature of {version} is not accepted: {error}"
        return _disagreement(text.splitlines(), version, manifest_sha256)


def _disagreement(lines: Sequence[str], version: str, manifest_sha256: str | None) -> str:
    """Return the difference between the lines of a signed text and a version, or an empty string."""
    if len(lines) != 3 or lines[0] != FORM:
        return f"the signature of {version} is of something else than a conductor's version"
    if lines[1] != version:
        return f"the signature beside {version} is that of {lines[1]}"
    if manifest_sha256 not in (None, lines[2]):
        return f"the manifest of {version} is not the one that was signed"
    return ""
